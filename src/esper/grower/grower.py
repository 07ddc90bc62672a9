"""Grower: growth inside your own training loop.

    body = esper.graft(model, at=["layer1", "layer2"], probe=x)
    optimizer = torch.optim.AdamW(body.parameters())
    grower = esper.Grower(body, optimizer, controller="schedule")
    ... train an epoch as usual, calling body(x) ...
    grower.step(val_batches)            # once per epoch: measure, decide, change
    grower.save("checkpoints")          # at any time; grower.load("checkpoints") resumes

Like the command line, this module connects the parts: rules, body, optimiser, controller, coalitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper.grower import saving
from esper.grower.clipping import ClippingWatch
from esper.grower.explanations import (
    MIXING_STEPS,
    SlotView,
    StepReport,
    effect_text,
    grower_html,
    slot_views,
    why_nothing_was_planted,
    wrapped,
)
from esper.grower.measuring import Measuring
from esper.grower.operations import (
    Operations,
    after_closure,
    as_controller,
    check_count,
    check_settings,
    check_telemetry,
    checked_actions,
)
from esper.grower.qualities import NeedsTargets, Quality, find_quality
from esper.grower.ranks import Group, Ranks
from esper.grower.training_watch import TrainingWatch
from esper.kasmina.body import Body
from esper.kasmina.optimizer_sync import refuse_scheduled, refuse_ungrafted, unwrapped
from esper.kasmina.slot import Incubation, Slot
from esper.leyline import lifecycle
from esper.leyline.actions import Head, Op
from esper.leyline.errors import ConfigError
from esper.leyline.events import Checkpoint, EventReceiver, NullReceiver, RunStarted
from esper.leyline.lifecycle import Effect, EffectKind, Outcome, Rules
from esper.leyline.slot_table import SlotTable
from esper.simic.env import context_of
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.tamiyo.controllers import Controller, Wait
from esper.tamiyo.controllers.learned import Learned
from esper.tolaria.growing_network import GrowingNetwork
from esper.tolaria.host_costs import takes_of
from esper.tolaria.network_state import adopt_body

DEFAULT_HORIZON = 40
"""Number of epochs that a trained policy assumes if none is given."""


class Grower(Operations, Measuring):
    """Grows one body inside your own training loop.

    Args:
        body: The grafted model.
        optimizer: The optimiser of the body's parameters. Build schedulers after the grower: it adds one group for
            seeds as the last of the optimiser's groups.
        controller: What decides: "schedule" (plants in one slot after another and commits measured seeds), "heuristic",
            "random", "tamiyo" (the trained policy of the package), the path of a run or policy file of `esper train`, a
            plan {slot: blueprint} such as `esper.audition(…).plan()`, which the schedule plants, your own object with
            `act(table, legal)`, or "none" or None (you call the operations yourself).
        quality: Score per sample, higher is better: a name in `esper.grower.qualities.QUALITIES` ("accuracy",
            "negative_mse", …) or a function (output, target) → [B]. `check` tests it before the first epoch.
        rules: How a seed begins, thresholds, automatic advances and limits; None is `Rules()`.
        incubation: How a TRAINING seed learns, only with `Rules(birth="isolated")`: "straight_through" in your own
            backward pass; "shadow" in a pass of its own, for which you call `shadow` after `backward()`.
        rng_seed: Random seed of the initial weights of seeds.
        gradient_telemetry_stride: Batches between samples of gradient statistics, at least 1.
        horizon: Number of epochs you plan to train, ≥ 1, an input of a trained policy, for which None is 40. If it is
            given, a seed planted fewer than `mixing_steps` optimiser steps before the end causes a warning.
        mixing_steps: Optimiser steps, ≥ 0, that a seed needs to pay off; 0 gives no warning.
        telemetry: Receiver of events, such as the hub of `esper.record`; used on rank 0 only.
        process_group: The processes that train this model together (DDP, FSDP2). None is torch's default group if it is
            initialised, False is this process alone.
        **seed_options: Options of the optimiser's group for seeds, such as `lr` and `weight_decay`.

    Raises:
        ConfigError: A setting is invalid or does not fit the model.
        UnknownNameError: There is no such controller, quality or slot, or a planned blueprint does not fit.
        GraftError: The model was not grafted.
        OptimizerError: The optimiser does not support growth, or a scheduler was built before the grower.

    Example:
        >>> grower = esper.Grower(body, torch.optim.SGD(body.parameters(), lr=0.1), controller="schedule")
        >>> report = grower.step([(x, y)])  # once per epoch: measure, decide, change
        >>> report.op.name, grower.slots["1"].stage.name
        ('WAIT', 'DORMANT')
    """

    def __init__(
        self,
        body: Body,
        optimizer: Optimizer,
        *,
        controller: str | Controller | Mapping[str, str] | None = "schedule",
        quality: str | Quality | NeedsTargets = "accuracy",
        rules: Rules | None = None,
        incubation: Incubation = "straight_through",
        rng_seed: int = 0,
        gradient_telemetry_stride: int = 10,
        horizon: int | None = None,
        mixing_steps: int = MIXING_STEPS,
        telemetry: EventReceiver | None = None,
        process_group: Group = None,
        **seed_options: Any,
    ) -> None:
        refuse_ungrafted(body)
        self.quality = quality
        self.controller = as_controller(body, controller)
        check_settings(body.model, rules, incubation, quality)
        check_telemetry(telemetry)
        check_count("horizon", DEFAULT_HORIZON if horizon is None else horizon, 1, "a number of epochs")
        check_count("mixing_steps", mixing_steps, 0, "a number of optimiser steps")
        check_count("gradient_telemetry_stride", gradient_telemetry_stride, 1, "a number of batches")
        refuse_scheduled(optimizer)
        optimizer = unwrapped(optimizer)
        self.network = GrowingNetwork(
            body,
            optimizer,
            rng_seed=rng_seed,
            incubation=incubation,
            gradient_stride=gradient_telemetry_stride,
            **seed_options,
        )
        self.ranks = Ranks(body, process_group)
        host_params = self.network.host_size
        self.body = body
        self.optimizer = optimizer
        self.rules = rules or Rules()
        self.horizon = DEFAULT_HORIZON if horizon is None else horizon
        self._mixing_steps = 0 if horizon is None else mixing_steps
        self.table = SlotTable.empty(1, len(body.slots), takes=takes_of(body))
        self._batches = self._shadow_passes = 0
        self._clipping = ClippingWatch(body)
        adopt_body(self.network, self.table)
        self._training = TrainingWatch(self.network)
        if not isinstance(self.controller, Wait):
            self._training.must_have_gradients()
        if isinstance(self.controller, Learned):
            self.controller.bind(context_of(body, self.horizon, self.rules.thresholds))
        hub = NullReceiver() if telemetry is None or not self.ranks.is_rank_zero else telemetry
        self.emit = TelemetryEmitter(hub, slots=self.network.slot_names, worlds=[rng_seed], host_params=host_params)
        self.emit.planted(self.table)
        name = "none" if isinstance(self.controller, Wait) else type(self.controller).__name__.lower()
        hub.emit(
            RunStarted(
                command="loop", controller=name, seed=rng_seed, env_names=("model",),
                slots=tuple(self.network.slot_names), steps=horizon, host_params=host_params,
                threads=torch.get_num_threads(), device=str(next(body.model.parameters()).device),
            )
        )  # fmt: skip
        body.on_load[:] = [self._adopt]  # a body has one grower, the last that was built
        optimizer.register_step_pre_hook(self._before_step)

    # -- inspection

    @property
    def quality(self) -> Quality | NeedsTargets:
        """The function that scores samples; a function or a name can be assigned at any time."""
        return self._quality

    @quality.setter
    def quality(self, quality: str | Quality | NeedsTargets) -> None:
        self._quality = find_quality(quality)

    @property
    def slots(self) -> dict[str, SlotView]:
        """The state of every slot and its seed, by name."""
        return slot_views(self.body, self.table, self.rules)

    def _repr_html_(self) -> str:
        return grower_html(self.slots.values(), self._note())

    def _note(self) -> str:
        return why_nothing_was_planted(self.controller, self.table, self.rules, self.network.slot_names)

    def __repr__(self) -> str:
        lines = [str(view) for view in self.slots.values()]
        note = self._note()
        return "\n".join([*lines, wrapped(note)] if note else lines)

    # -- once per epoch

    def step(self, val_batches: Iterable[Any] | None = None) -> StepReport:
        """Measure on the validation batches, apply the controller's action, and advance the lifecycle by one epoch.

        If measuring fails nothing is changed: correct `grower.quality` or the batches and repeat the call.

        Args:
            val_batches: Batches `(inputs, target)`, or mappings with "labels". With None nothing is measured, and gates
                that need a measurement stay closed.

        Returns:
            What was measured, decided and changed.

        Raises:
            ConfigError: The quality does not fit the batches, or an action of the controller is invalid.
            RanksDifferError: Ranks made different calls or hold different weights.

        Example:
            >>> report = grower.step([(x, y)])
            >>> 0 <= report.quality <= 1
            True
        """
        self._must_be_current()
        with self.ranks.together(f"grower.step() of epoch {int(self.table.step[0])}"):
            self.ranks.share_buffers(self.body)
            measured = self._measure(val_batches)
            self._training.at_growth_step(self._batches, self._shadow_passes)
            self._shadow_passes = 0
            meter = self.network.meter
            self.network.write_gradients(self.table, 0, meter.read(meter.pending().tolist()))  # sync: once per epoch
            self.emit.measured(self.table)
            allowed = lifecycle.legal(self.table, self.rules)
            actions = None
            if self.ranks.is_rank_zero:
                actions = checked_actions(self.controller.act(self.table, allowed), self.controller)
            actions = self.ranks.decide(self.table, actions)
            done = self._apply(actions)
            ticked = lifecycle.tick(self.table, self.rules)
            self.network.apply_effects(ticked, self.table)
            self.ranks.agree(self.body, self.table)
        self._warn_of_late_planting(
            [self.network.slot_names[e.slot] for e in done.effects if e.kind == EffectKind.BUILD]
        )
        unmeasured = ("val_loss", "train_loss") if measured else ("val_loss", "train_loss", "quality")
        self.emit.step(
            self.table, actions, Outcome(done.happened, done.effects + ticked), allowed, unmeasured=unmeasured
        )
        op = Op(int(self.table.last_op[0]))
        names = self.network.slot_names
        return StepReport(
            quality=measured.quality if measured else float("nan"),
            committed=measured.committed if measured else float("nan"),
            op=op,
            slot="" if op == Op.WAIT else names[int(actions[0, Head.SLOT])],
            effects=tuple(effect_text(e, self.table, names) for e in done.effects + ticked),
        )

    def save(self, directory: str | Path, *, keep: int = 2, extra: Any = None) -> Path:
        """Write a checkpoint. Training resumes from it bit for bit, from any point between two batches.

        It contains body, optimiser, table, controller and the random generators of torch, numpy and Python. Events
        emitted so far are flushed first. With several ranks rank 0 writes it, and the others write their random
        generators beside it; with FSDP2 all ranks must call it.

        Args:
            directory: Directory of this grower's checkpoints.
            keep: Number of checkpoints to keep, at least 1.
            extra: Your own state, such as a scheduler's, the epoch or the position in the data: dicts, lists, tuples,
                numbers, strings, tensors and arrays.

        Returns:
            The path of the new checkpoint.

        Raises:
            CheckpointError: It cannot be written, or `extra` holds something else.

        Example:
            >>> path = grower.save("checkpoints", extra={"epoch": 3})
            >>> grower.load("checkpoints")
            {'epoch': 3}
        """
        flush = getattr(self.emit.hub, "flush", None)
        if flush is not None:
            flush()
        done = saving.save(self, Path(directory), keep=keep, extra=extra)
        self.emit.run_event(
            Checkpoint(path=str(done.path), reason="requested", size_bytes=done.size_bytes, write_ms=done.write_ms)
        )
        return done.path

    def load(self, directory: str | Path) -> Any:
        """Load the newest undamaged checkpoint.

        Build model, graft, optimiser, grower and schedulers first, as in the run that saved. A damaged checkpoint is
        skipped with a warning. Rules and settings are those of this grower; a warning lists those that differ. All
        ranks must call it, with a directory that all of them see.

        Args:
            directory: The directory given to `save`.

        Returns:
            The `extra` of the checkpoint.

        Raises:
            CheckpointError: There is none, or it does not fit this model, graft, optimiser or blueprint. Nothing is
                changed.

        Example:
            >>> path = grower.save("checkpoints")
            >>> grower.load("checkpoints") is None
            True
        """
        self._must_be_current()
        with self.ranks.together("grower.load()"):
            extra = saving.load(self, Path(directory))
            self.ranks.agree(self.body, self.table)
        return extra

    def state_dict(self) -> dict[str, Any]:
        """Return what `save` writes, without the body's weights and gradients.

        For checkpoints of your own that hold `body.state_dict()`. Tensors are not copied.

        Returns:
            Strings and tensors by name.

        Example:
            >>> state = {"body": body.state_dict(), "grower": grower.state_dict()}
        """
        return saving.state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Load the state of the body first.

        Args:
            state: The result of `state_dict`.

        Raises:
            CheckpointError: The state does not fit. Nothing is changed.

        Example:
            >>> grower.load_state_dict(grower.state_dict())
        """
        saving.load_state_dict(self, state)

    # -- in the training loop, optional

    def shadow(self, loss: Callable[[], Tensor]) -> None:
        """Run the shadow pass: compute the loss with each TRAINING seed switched on; only that seed gets gradients.

        Call it after `backward()`, on every batch or every second one. It does nothing if no seed is TRAINING, so never
        with open birth.

        Args:
            loss: Function that computes the loss of the batch. Scale or divide it as in your own backward pass.

        Raises:
            ConfigError: The grower was not built with `incubation="shadow"`.

        Example:
            >>> grower = esper.Grower(body, torch.optim.SGD(body.parameters(), lr=0.1), incubation="shadow")
            >>> grower.shadow(lambda: nn.functional.cross_entropy(body(x), y))
        """
        if self.body.incubation != "shadow":
            raise ConfigError("grower.shadow needs Grower(..., incubation='shadow')")
        self._shadow_passes += 1
        self.body.shadow_backward(loss)
        self._clipping.after_shadow()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradient norm of the host with its fossils, and of each growing seed, separately.

        Args:
            max_norm: Maximum norm of each of them.

        Returns:
            The host's norm before clipping.

        Example:
            >>> nn.functional.cross_entropy(body(x), y).backward()
            >>> norm = grower.clip_grad_norm_(1.0)
        """
        self.sync_gradients()
        self.network.regroup()  # the model is the user's: its parameters may have changed
        return torch.linalg.vector_norm(self.network.clip(max_norm)[0])

    def sync_gradients(self) -> None:
        """Average the gradients of seeds over the ranks, as DDP does for those of the host.

        `optimizer.step()` and `clip_grad_norm_` do it. Call it on every rank before code of your own that reads these
        gradients, such as `GradScaler.unscale_`.

        Example:
            >>> grower.sync_gradients()
        """
        self.ranks.average_gradients([p for p in self.body.esper.parameters() if p.requires_grad])

    def on_change(self, listener: Callable[[Effect, Slot], None]) -> None:
        """Register a function that is called after each structural change, for example to update an EMA.

        Args:
            listener: Called with the effect and the slot.

        Example:
            >>> grower.on_change(lambda effect, slot: print(effect.kind.name, slot.name))
            >>> grower.germinate("1", "mlp_small")
            BUILD 1
        """
        self.network.optimizer_sync.on_change.append(listener)

    # -- internal

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Prepare the seeds' gradients for an optimiser step; if a closure computes them, after that closure."""
        return after_closure(args, kwargs, lambda: self._prepare_gradients(optimizer))

    @torch.no_grad()
    def _prepare_gradients(self, optimizer: Optimizer) -> None:
        """Average the seeds' gradients over the ranks, and sample them on the batches on which they are due."""
        self.ranks.must_know_the_group()
        due = self.network.gradients_due(self._batches)
        self._batches += 1
        self._clipping.before_step(compare=due)
        self.sync_gradients()
        if due:
            self.network.regroup()
            scale = getattr(optimizer, "grad_scale", None)  # fused optimisers unscale within their step
            self.network.sample_gradients(scale=scale if isinstance(scale, Tensor) else None)
