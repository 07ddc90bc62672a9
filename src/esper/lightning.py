"""Growth in Lightning. Install with `pip install 'esper-lite[lightning]'`.

    class Model(L.LightningModule):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.body.parameters())
            self.grower = esper.Grower(self.body, optimizer, controller="schedule")  # before any scheduler
            return optimizer

    L.Trainer(callbacks=[GrowthCallback()]).fit(Model(), train_loader, val_loader)

The callback grows after each validation and before ModelCheckpoint, clips host and seeds separately, and makes
checkpoints complete: `fit(ckpt_path=...)` into a fresh module restores structure, optimiser and controller.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from esper.grower import Grower, StepReport
from esper.grower.explanations import growth_figures
from esper.grower.saving import gathered_generators, load_own_generators
from esper.installation import require_own_package
from esper.kasmina.body import Body
from esper.kasmina.optimizer_sync import SEED_GROUP, unwrapped
from esper.leyline.errors import CheckpointError, ConfigError

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
except ImportError as error:
    raise ImportError("esper.lightning needs Lightning: pip install 'esper-lite[lightning]'") from error

require_own_package()

__all__ = ["GrowthCallback"]

UNSUPPORTED_CALLBACKS = (StochasticWeightAveraging, WeightAveraging)
"""Callbacks that average a copy of the module, made before it grows. They pair parameters by position."""
UNSUPPORTED_STRATEGIES = ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy")


class GrowthCallback(Callback):  # type: ignore[misc]
    """Grow the body of a LightningModule that has a `grower`, built in `configure_optimizers`.

    Args:
        batches: Number of batches of each validation on which seeds are measured; None is all of them. They are kept in
            memory until the validation ends.
        unpack: Function from a validation batch to (inputs, target) or a mapping with "labels"; None takes it as it is.

    Example:
        >>> from esper.lightning import GrowthCallback
        >>> callback = GrowthCallback(unpack=lambda batch: (batch["image"], batch["label"]))
    """

    def __init__(self, *, batches: int | None = 8, unpack: Callable[[Any], Any] | None = None) -> None:
        self.batches = batches
        self.unpack = unpack
        self.report: StepReport | None = None
        """The report of the last call of `grower.step`."""
        self._val_batches: list[Any] = []
        self._train_batch: Any = None
        self._max_norm: float | None = None
        self._grower: Grower | None = None
        self._has_grown = False
        self._loaded: Mapping[str, Any] | None = None

    # -- setup and checkpoints

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Keep seeds out of DDP, which Lightning wraps around the module after it has restored a checkpoint."""
        pl_module._ddp_params_and_buffers_to_ignore = _SeedNames(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that module and trainer fit; on resuming, load the state of the grower."""
        self._grower = grower = _grower_of(trainer, pl_module)
        has_loss = callable(getattr(pl_module, "shadow_loss", None))
        if grower.body.incubation == "shadow" and not has_loss:
            raise ConfigError(
                "incubation='shadow' needs the loss of a batch in a pass of its own. Define shadow_loss(self, batch) "
                "in the module, which returns it without logging, or use incubation='straight_through'."
            )
        own = type(pl_module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm in (None, "norm") and not own:
            self._max_norm = trainer.gradient_clip_val  # Lightning would clip host and seeds by their joint norm
            trainer.gradient_clip_val = None
        if self._loaded is not None:
            grower.load_state_dict(self._loaded)  # Lightning loads the optimiser again, by position
            load_own_generators(grower, self._loaded["generators"])
            self._loaded = None

    def teardown(self, trainer: Trainer, _pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Give the limit of the gradient norm back to the trainer."""
        if self._max_norm is not None:
            trainer.gradient_clip_val, self._max_norm = self._max_norm, None
        self._train_batch = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the grower and the generators of all ranks: strings and tensors, which need no pickle.

        Lightning calls it on all ranks and writes the result of rank 0.
        """
        if self._grower is None:
            return {}
        return {**self._grower.state_dict(), "generators": gathered_generators(self._grower)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a state until the optimiser exists."""
        self._loaded = state_dict or None

    def on_load_checkpoint(self, trainer: Trainer, _module: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        """Refuse to resume from a checkpoint whose optimiser has no group for seeds."""
        optimizers = checkpoint.get("optimizer_states") or ()
        if trainer.state.fn == "fit" and any(
            not any(SEED_GROUP in group for group in state["param_groups"]) for state in optimizers
        ):
            raise CheckpointError(
                "this checkpoint was written without growth. To grow its model, load the weights alone: "
                "module.load_state_dict(torch.load(path)['state_dict']), and call fit without ckpt_path."
            )

    # -- training

    def on_train_batch_start(self, _trainer: Trainer, _module: LightningModule, batch: Any, _batch_idx: int) -> None:
        """Keep the batch for the shadow pass; set the mode of seeds that were planted during validation."""
        self._train_batch = batch
        self._set_modes()

    def on_train_end(self, _trainer: Trainer, _module: LightningModule) -> None:
        """Set the mode of seeds that were planted during the last validation; warn if there was none."""
        self._set_modes()
        if self.report is None:
            warnings.warn(
                "training ended before its first validation, so nothing was grown: growth follows validations. Use "
                "Trainer(val_check_interval=...) or train longer.",
                stacklevel=2,
            )

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the shadow pass of seeds that are TRAINING."""
        grower = self._grower
        if grower is not None and grower.body.incubation == "shadow" and grower.body.training_slots:
            with trainer.precision_plugin.forward_context():
                grower.shadow(lambda: pl_module.shadow_loss(self._train_batch) / trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, *_args: Any) -> None:
        """Clip host and seeds separately."""
        if self._grower is not None and self._max_norm is not None:
            self._grower.clip_grad_norm_(self._max_norm)

    # -- growth

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        _module: LightningModule,
        _outputs: Any,
        batch: Any,
        _batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the first batches of the first validation loader."""
        is_wanted = self.batches is None or len(self._val_batches) < self.batches
        if dataloader_idx == 0 and is_wanted and self._is_due(trainer):
            self._val_batches.append(batch if self.unpack is None else self.unpack(batch))

    def on_validation_end(self, trainer: Trainer, _module: LightningModule) -> None:
        """Measure, decide and change the structure, before ModelCheckpoint saves."""
        if not self._is_due(trainer):
            return
        assert self._grower is not None
        batches, self._val_batches = self._val_batches, []
        with torch.enable_grad(), trainer.precision_plugin.forward_context():
            self.report = self._grower.step(batches)
        self._has_grown = True
        figures = growth_figures(self._grower.body, self.report.quality)
        for logger in trainer.loggers:
            logger.log_metrics({f"growth/{name}": value for name, value in figures.items()}, step=trainer.global_step)

    def _set_modes(self) -> None:
        """Give seeds the mode of the model. Lightning restores those of modules older than the validation."""
        if self._has_grown:
            assert self._grower is not None
            self._grower.body.esper.train(self._grower.body.model.training)
            self._has_grown = False

    def _is_due(self, trainer: Trainer) -> bool:
        return self._grower is not None and trainer.state.fn == "fit" and not trainer.sanity_checking


class _SeedNames:
    """Names of the parameters and buffers of a module's seeds, computed when they are iterated."""

    def __init__(self, module: LightningModule) -> None:
        self.modules = [(name, each) for name, each in module.named_modules() if isinstance(each, Body)]

    def __iter__(self) -> Iterator[str]:
        for name, body in self.modules:
            for own in body._ddp_params_and_buffers_to_ignore:
                yield f"{name}.{own}" if name else own


def _grower_of(trainer: Trainer, pl_module: LightningModule) -> Grower:
    """Return the grower of a module. Raise ConfigError if module or trainer do not fit."""
    strategy = type(trainer.strategy).__name__
    if strategy in UNSUPPORTED_STRATEGIES:
        raise ConfigError(f"growth in Lightning needs one device or DDP, got {strategy}.")
    for callback in trainer.callbacks:
        if isinstance(callback, UNSUPPORTED_CALLBACKS):
            raise ConfigError(
                f"{type(callback).__name__} averages a copy of the module that has no seeds, which would mix up "
                "parameters. Remove it, or keep an average of your own that follows grower.on_change."
            )
    if len(trainer.optimizers) != 1:
        raise ConfigError(
            f"configure_optimizers returned {len(trainer.optimizers)} optimisers; a grower serves one. Put all "
            "parameters into one optimiser, with several parameter groups if they need different options."
        )
    grower = getattr(pl_module, "grower", None)
    if not isinstance(grower, Grower):
        raise ConfigError(
            "the module has no grower. In configure_optimizers, set self.grower = esper.Grower(self.body, optimizer, "
            "...) before you build a scheduler."
        )
    if unwrapped(trainer.optimizers[0]) is not grower.optimizer:
        raise ConfigError(
            "self.grower belongs to another optimiser than the one that configure_optimizers returned. Return the "
            "optimiser that self.grower was built with."
        )
    if not trainer.enable_validation:
        raise ConfigError("growth measures seeds after validation. Define validation_step and give a val_dataloader.")
    return grower
