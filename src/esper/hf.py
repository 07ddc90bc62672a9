"""Growth in Hugging Face's Trainer. Install with `pip install 'esper-lite[hf]'`.

    class MyTrainer(GrowthTrainerMixin, Trainer): ...

    body = esper.graft(model, at="bert.encoder.layer.*", probe=batch)
    trainer = MyTrainer(model=body, args=args, train_dataset=..., eval_dataset=..., growth={"controller": "schedule"})
    trainer.train()

The mixin builds the grower before the scheduler, calls `grower.step` every epoch or every k optimiser steps, clips host
and seeds separately, and saves and resumes the structure. `GrowthCallback` does without a subclass of Trainer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from esper.grower import Grower, StepReport
from esper.grower.explanations import growth_figures
from esper.installation import require_own_package
from esper.kasmina.body import Body, load_seeds, save_seeds, tied_names
from esper.kasmina.optimizer_sync import unwrapped
from esper.leyline.atomic_io import write_atomically
from esper.leyline.errors import CheckpointError, ConfigError

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from transformers.utils import SAFE_WEIGHTS_NAME
except ImportError as error:
    raise ImportError("esper.hf needs transformers and accelerate: pip install 'esper-lite[hf]'") from error

require_own_package()

__all__ = ["GrowthCallback", "GrowthTrainer", "GrowthTrainerMixin", "load_pretrained"]

GROWER_FILE = "esper_grower.safetensors"
"""File of a checkpoint with the state of the grower: table, controller, and the optimiser by parameter names."""

OVERRIDDEN = (
    "_clip_grad_norm", "_save", "_load_from_checkpoint", "_load_best_model", "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler", "_build_accelerator_args",
)  # fmt: skip
"""Private methods of Trainer that the mixin overrides. Without one of them growth would be wrong without an error."""
if missing := [name for name in OVERRIDDEN if not hasattr(Trainer, name)]:
    raise ImportError(f"esper.hf does not support this version of transformers: Trainer has no method {missing[0]!r}")


def load_pretrained(body: Body, directory: str | Path) -> None:
    """Load weights and seeds that `body.save_pretrained` or `trainer.save_model` wrote.

    Args:
        body: A body with the same graft.
        directory: The directory that was written.

    Raises:
        FileNotFoundError: The files are missing.

    Example:
        >>> from esper.hf import load_pretrained
        >>> load_pretrained(body, "no_such_directory")
        Traceback (most recent call last):
        ...
        FileNotFoundError: ...
    """
    path = Path(directory) / SAFE_WEIGHTS_NAME
    model_type: Any = type(body.model)
    can_build = hasattr(model_type, "from_pretrained")
    saved = load_file(path) if path.exists() or not can_build else {}
    keys = body.model.state_dict().keys()
    tied = set(tied_names(body.model))  # of tied weights one name is saved
    if can_build and not (saved.keys() <= keys and keys - saved.keys() <= tied):
        body.model.load_state_dict(model_type.from_pretrained(directory).state_dict())
    else:  # also what `from_pretrained` cannot build, as layers that PEFT has replaced
        body.model.load_state_dict(saved, strict=not can_build)
    load_seeds(body, directory)


class GrowthTrainerMixin(Trainer):  # type: ignore[misc]
    """Let a Trainer grow its model: `class MyTrainer(GrowthTrainerMixin, OwnTrainer)`, with `model=esper.graft(...)`.

    Args:
        *args: Arguments of the Trainer.
        growth: Keyword arguments of `esper.Grower`: controller, quality, rules, ….
        grow_every: "epoch", or the number of optimiser steps between two calls of `grower.step`.
        grow_batches: Number of batches of the evaluation set on which seeds are measured; None is all of them.
        **kwargs: Further arguments of the Trainer.

    Raises:
        ConfigError: A setting is invalid, or Trainer's arguments do not allow growth.

    Example:
        >>> from esper.hf import GrowthTrainerMixin
        >>> from transformers import Trainer
        >>> class MyTrainer(GrowthTrainerMixin, Trainer): ...
    """

    def __init__(
        self,
        *args: Any,
        growth: Mapping[str, Any] | None = None,
        grow_every: int | str = "epoch",
        grow_batches: int | None = 8,
        **kwargs: Any,
    ) -> None:
        self.grower: Grower | None = None
        self.growth = dict(growth or {})
        self.grow_every = checked_interval(grow_every)
        self.grow_batches = grow_batches
        super().__init__(*args, **kwargs)
        if self.growth.get("incubation") == "shadow":
            raise ConfigError("GrowthTrainerMixin runs no shadow passes. Use incubation='straight_through'.")
        if self.eval_dataset is None:
            raise ConfigError("growth measures seeds on validation batches. Give the trainer an eval_dataset.")
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or self.args.n_gpu > 1:
            raise ConfigError("growth in Trainer needs one device or DDP, not DeepSpeed, FSDP or DataParallel.")
        if isinstance(self.model, Body) and hasattr(self.model, "get_base_model"):
            raise ConfigError(
                "Trainer does not recognise a PEFT model within a body. Graft the model that PEFT has changed: "
                "esper.graft(peft_model.get_base_model(), ...). Adapters and seeds are trained; the rest stays frozen."
            )
        self.add_callback(_GrowthTimer(self))

    @property
    def body(self) -> Body:
        """The body that the trainer trains."""
        if not isinstance(self.model, Body):
            raise ConfigError(
                f"growth needs a body as model, got a {type(self.model).__name__}. Use model=esper.graft(model, "
                "at=..., probe=batch), or return one from model_init."
            )
        return self.model

    def growth_batches(self) -> Iterator[Mapping[str, Any]]:
        """Yield the validation batches for `grower.step`. Override it to measure seeds on other data.

        Yields:
            Mappings with "labels".
        """
        name = next(iter(self.eval_dataset)) if isinstance(self.eval_dataset, dict) else None
        is_encoder_decoder = getattr(getattr(self.body, "config", None), "is_encoder_decoder", False)
        for inputs in islice(self.get_eval_dataloader(name), self.grow_batches):
            batch = self._prepare_inputs(inputs)
            if is_encoder_decoder and "decoder_input_ids" not in batch:  # made from labels, which `step` takes away
                decoder_inputs = self.body.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
                batch = {**batch, "decoder_input_ids": decoder_inputs}
            yield batch

    def grow(self) -> StepReport:
        """Measure, decide and change the structure once.

        Returns:
            What was measured, decided and changed.
        """
        assert self.grower is not None
        with self.accelerator.autocast():
            report = self.grower.step(self.growth_batches())
        self.log(_figures(self.grower, report))
        return report

    # -- what Trainer calls

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Build the optimiser, and the grower on it, before Trainer builds the scheduler."""
        optimizer = super().create_optimizer(*args, **kwargs)
        steps, epochs = self.state.max_steps, self.state.num_train_epochs
        horizon = max(1, epochs if self.grow_every == "epoch" else -(-steps // int(self.grow_every)))
        if self.grower is None or self.grower.body is not self.body:
            self.grower = Grower(self.body, optimizer, **{"horizon": horizon, **self.growth})
        else:  # a further call of train
            self.grower.horizon = int(self.grower.table.step[0]) + horizon
        return optimizer

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Return the settings of DDP that Trainer chooses for the host: a body is no `PreTrainedModel`."""
        with self._plain_model() if isinstance(self.model, Body) else nullcontext():
            return super()._build_accelerator_args(**kwargs)

    def _clip_grad_norm(self, _model: Any) -> Tensor:
        """Clip host and seeds separately; return the norm of the host."""
        assert self.grower is not None
        self.grower.sync_gradients()  # before a gradient scaler looks for inf, on every rank
        self.accelerator.unscale_gradients()
        return self.grower.clip_grad_norm_(self.args.max_grad_norm)

    @contextmanager
    def _plain_model(self) -> Iterator[None]:
        """Within the context the trainer's model is the host, so that Trainer saves and loads it by its own keys."""
        body = self.body
        self.model = body.model
        try:
            yield
        finally:
            self.model = body

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with self._plain_model():
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            save_seeds(self.body, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        body = self.body
        with self._plain_model():
            super()._load_from_checkpoint(resume_from_checkpoint, None if model is body else model)
        load_seeds(body, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        with self._plain_model():
            super()._load_best_model()
        load_seeds(self.body, self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.grower is not None
        with self._optimizer_of_grower():
            super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            save_grower(self.grower, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._optimizer_of_grower():
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            assert self.grower is not None
            load_grower(self.grower, checkpoint)

    @contextmanager
    def _optimizer_of_grower(self) -> Iterator[None]:
        """Within the context Trainer saves and loads no state of the optimiser: the grower's file has it by names."""
        optimizer = vars(self)["optimizer"]
        self.optimizer = _NoState()
        try:
            yield
        finally:
            self.optimizer = optimizer


class GrowthTrainer(GrowthTrainerMixin, Trainer):  # type: ignore[misc]
    """Trainer with growth. Its arguments are those of `GrowthTrainerMixin` and of `transformers.Trainer`.

    Example:
        `examples/grow_in_trainer.py` is a whole program.

        >>> from esper.hf import GrowthTrainer
        >>> from transformers import Trainer
        >>> issubclass(GrowthTrainer, Trainer)
        True
    """


class GrowthCallback(TrainerCallback):  # type: ignore[misc]
    """Grow the model of a plain Trainer: `Trainer(model=body, optimizers=(optimizer, None), callbacks=[callback])`.

    Build the grower on that optimiser first. The seeds are saved in `model.safetensors`, with `esper.` keys.

    Args:
        grower: An `esper.Grower` of the trainer's model and optimiser.
        val_batches: Batches for `grower.step`: a list, a DataLoader, or anything that can be iterated repeatedly.
        every: "epoch", or the number of optimiser steps between two calls of `grower.step`.

    Example:
        >>> from esper.hf import GrowthCallback
        >>> callback = GrowthCallback(grower, [(x, y)], every=100)
    """

    def __init__(self, grower: Grower, val_batches: Iterable[Any], *, every: int | str = "epoch") -> None:
        self.grower = grower
        self.val_batches = val_batches
        self.every = checked_interval(every)

    def on_train_begin(self, args: Any, state: Any, _control: Any, **kwargs: Any) -> None:
        """Check that trainer and grower fit; on resuming, load the state of the grower."""
        if kwargs.get("model") is not self.grower.body:
            raise ConfigError("the trainer's model is not the grower's body. Use Trainer(model=grower.body, ...).")
        if unwrapped(kwargs["optimizer"]) is not self.grower.optimizer:
            raise ConfigError("the trainer has another optimiser than the grower. Use optimizers=(optimizer, None).")
        if args.max_grad_norm > 0 and self.grower.rules.birth == "isolated":
            raise ConfigError(
                "Trainer clips host and seeds by their joint norm, which ends the isolation of seeds. Use "
                "GrowthTrainerMixin, which clips them separately, or max_grad_norm=0."
            )
        if state.global_step > 0:
            load_grower(self.grower, _checkpoint_directory(args, state))

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Grow after every k-th optimiser step."""
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._grow(state)

    def on_epoch_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Grow after an epoch, before the trainer evaluates and saves."""
        if self.every == "epoch":
            self._grow(state)

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Warn if training was too short to grow."""
        warn_if_never_due(self.every, state)

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Save the grower, and the model's configuration, in the checkpoint that was just written."""
        if args.should_save:
            directory = _checkpoint_directory(args, state)
            save_grower(self.grower, directory)
            if hasattr(self.grower.body, "config"):
                self.grower.body.config.save_pretrained(directory)

    def _grow(self, state: Any) -> None:
        report = self.grower.step(self.val_batches)
        state.log_history.append({**_figures(self.grower, report), "step": state.global_step})


class _GrowthTimer(TrainerCallback):  # type: ignore[misc]
    """Call `trainer.grow` when it is due, before the trainer evaluates and saves."""

    def __init__(self, trainer: GrowthTrainerMixin) -> None:
        self.trainer = trainer

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if isinstance(self.trainer.grow_every, int) and state.global_step % self.trainer.grow_every == 0:
            self.trainer.grow()

    def on_epoch_end(self, *_args: Any, **_: Any) -> None:
        if self.trainer.grow_every == "epoch":
            self.trainer.grow()

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        warn_if_never_due(self.trainer.grow_every, state)


class _NoState:
    """Stand-in for an optimiser whose state is saved elsewhere."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _state: Mapping[str, Any]) -> None:
        pass


def save_grower(grower: Grower, directory: str | Path) -> None:
    """Write the state of a grower, without weights, to `GROWER_FILE` in a directory."""
    state = grower.state_dict()
    tensors = {name: tensor.contiguous() for name, tensor in state["tensors"].items()}
    write_atomically(Path(directory) / GROWER_FILE, save(tensors, metadata={"document": state["document"]}))


def load_grower(grower: Grower, directory: str | Path) -> None:
    """Load `GROWER_FILE` of a directory into a grower whose body has the weights of that directory."""
    path = Path(directory) / GROWER_FILE
    if not path.exists():
        raise CheckpointError(
            f"{directory} has no {GROWER_FILE}: it is not a checkpoint of a growing model, or was written with "
            "save_only_model=True."
        )
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        grower.load_state_dict({"document": file.metadata()["document"], "tensors": tensors})


def checked_interval(every: int | str) -> int | str:
    """Return the interval of growth. Raise ConfigError unless it is "epoch" or a positive number of steps."""
    if every == "epoch" or (isinstance(every, int) and every > 0):
        return every
    raise ConfigError(f"growth happens every 'epoch' or every positive number of optimiser steps, got {every!r}")


def warn_if_never_due(every: int | str, state: Any) -> None:
    """Warn at the end of training if it had fewer steps than the interval of growth."""
    if isinstance(every, int) and state.global_step < every:
        warnings.warn(
            f"training ended after {state.global_step} optimiser steps, so nothing was grown: growth happens every "
            f"{every}. Choose a smaller number.",
            stacklevel=2,
        )


def _checkpoint_directory(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _figures(grower: Grower, report: StepReport) -> dict[str, float]:
    """Return the numbers of a growth step for a log."""
    return {f"growth_{name}": value for name, value in growth_figures(grower.body, report.quality).items()}
