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

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from esper.grower import saving
from esper.grower.arguments import after_closure, alpha_target_index, check_settings, checked_actions, option
from esper.grower.clipping import ClippingWatch
from esper.grower.explanations import SlotView, slot_views, why_not_legal, why_nothing_was_planted, wrapped
from esper.grower.qualities import NeedsTargets, Quality, find_quality, scored
from esper.grower.ranks import Group, Ranks, ValidationShare
from esper.grower.step_report import StepReport
from esper.kasmina import lifecycle
from esper.kasmina.blueprints import blueprint_index
from esper.kasmina.body import Body
from esper.kasmina.germination import MIXING_STEPS, late_planting
from esper.kasmina.lifecycle import Effect, EffectKind, Outcome, Rules
from esper.kasmina.optimizer_sync import refuse_scheduled, unwrapped
from esper.kasmina.slot import Incubation, Slot
from esper.leyline.actions import STYLES, Head, Op
from esper.leyline.errors import ConfigError, LifecycleError
from esper.leyline.events import Checkpoint, Emits, RunStarted, Silence
from esper.leyline.slot_table import Ints, SlotTable
from esper.simic.attribution import CounterfactualEngine, Worth, report
from esper.simic.env import context_of
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.tamiyo.controllers import Controller, find_controller, wait_everywhere
from esper.tamiyo.controllers.learned import Learned
from esper.tolaria.coalitions import Coalitions, Measured, measure
from esper.tolaria.engine import takes_of
from esper.tolaria.growing_network import GrowingNetwork
from esper.tolaria.network_state import adopt_body

DEFAULT_HORIZON = 40
"""Number of epochs that a trained policy assumes if none is given."""


class Grower:
    """Grows one body inside your own training loop.

    controller  "none" or None (you call the operations yourself), "schedule", "heuristic", "tamiyo" (the trained policy
                of the package), a run or policy file of `esper train`, or your own object with `act`
    quality     a score per sample, higher is better: a name in `esper.grower.qualities.QUALITIES` ("accuracy",
                "negative_mse", …), or (output, target) → [B]; `grower.check(batch)` tests it before the first epoch
    rules       how a seed begins, thresholds, automatic advances, limits
    incubation  how a TRAINING seed learns, only with `Rules(birth="isolated")`: "straight_through" in your own backward
                pass; "shadow" in a pass of its own, for which you call `grower.shadow(closure)` after backward
    rng_seed    random seed of the initial weights of seeds
    gradient_telemetry_stride  batches between samples of gradient statistics, at least 1
    horizon     number of epochs you plan to train: an input of a trained policy, for which None is 40. If it is given,
                a seed planted fewer than `mixing_steps` optimiser steps before the end causes a warning
    mixing_steps  optimiser steps, ≥ 0, that a seed needs to pay off; 0 gives no warning
    telemetry   receiver of events, such as the hub of `esper.record`; used on rank 0 only
    process_group  the processes that train this model together (DDP, FSDP2); None is torch's default group if it is
                initialised, False is this process alone
    Further keywords are options of the optimiser's group for seeds (lr=…, weight_decay=…). It becomes the last of the
    optimiser's groups: a scheduler that takes one value per group needs one more.
    """

    def __init__(
        self,
        body: Body,
        optimizer: Optimizer,
        *,
        controller: str | Controller | None = "none",
        quality: str | Quality | NeedsTargets = "accuracy",
        rules: Rules | None = None,
        incubation: Incubation = "straight_through",
        rng_seed: int = 0,
        gradient_telemetry_stride: int = 10,
        horizon: int | None = None,
        mixing_steps: int = MIXING_STEPS,
        telemetry: Emits | None = None,
        process_group: Group = None,
        **seed_options: Any,
    ) -> None:
        self.quality = quality
        self.controller = find_controller(controller)
        check_settings(getattr(body, "model", body), rules, incubation, quality)
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
        self.body, self.optimizer, self.rules = body, optimizer, rules or Rules()
        self.horizon = DEFAULT_HORIZON if horizon is None else horizon
        self._mixing_steps = 0 if horizon is None else mixing_steps
        self.table = SlotTable.empty(1, len(body.slots), takes=takes_of(body))
        self._batches = self._shadow_passes = 0
        self._clipping = ClippingWatch(body)
        adopt_body(self.network, self.table)
        if isinstance(self.controller, Learned):
            self.controller.bind(context_of(body, self.horizon, self.rules.thresholds))
        hub = Silence() if telemetry is None or not self.ranks.leads else telemetry
        self.emit = TelemetryEmitter(hub, slots=self.network.slot_names, worlds=[rng_seed], host_params=host_params)
        self.emit.planted(self.table)
        hub.emit(
            RunStarted(
                command="loop", controller=type(self.controller).__name__.lower(), seed=rng_seed, env_names=("model",),
                slots=tuple(self.network.slot_names), steps=self.horizon, host_params=host_params,
                threads=torch.get_num_threads(), device=str(next(body.model.parameters()).device),
            )
        )  # fmt: skip
        body.on_load.append(lambda: adopt_body(self.network, self.table))
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

    def __repr__(self) -> str:
        lines = [str(view) for view in self.slots.values()]
        note = why_nothing_was_planted(self.controller, self.table, self.rules, self.network.slot_names)
        return "\n".join([*lines, wrapped(note)] if note else lines)

    # -- operations; each raises LifecycleError with the reason if the rules do not allow it now

    def germinate(
        self,
        slot: str,
        blueprint: str,
        *,
        style: str = "SIGMOID_ADD",
        tempo: str = "STANDARD",
        alpha_target: float = 1.0,
    ) -> None:
        """Plant a seed. It first learns without affecting the host, then is blended in at `tempo`."""
        if blueprint_index(blueprint) >= self.table.takes.shape[1]:  # registered after the grower was built
            self.table = replace(self.table, takes=takes_of(self.body))
        self._do(
            Op.GERMINATE,
            slot,
            {
                Head.BLUEPRINT: blueprint_index(blueprint),
                Head.STYLE: option(Head.STYLE, style),
                Head.TEMPO: option(Head.TEMPO, tempo),
                Head.ALPHA_TARGET: alpha_target_index(alpha_target),
            },
        )
        self._warn_of_late_planting([slot])

    def advance(self, slot: str) -> None:
        """Move a seed to its next stage, if its gate is open."""
        self._do(Op.ADVANCE, slot, {})

    def set_alpha_target(
        self, slot: str, target: float, *, speed: str = "MEDIUM", curve: str = "SIGMOID", style: str | None = None
    ) -> None:
        """Start a ramp of alpha to another value; with `style`, also change the blend operator."""
        operator = self.body.slot(slot).operator
        same = next(i for i, s in enumerate(STYLES) if s.operator == operator)
        self._do(
            Op.SET_ALPHA_TARGET,
            slot,
            {
                Head.STYLE: same if style is None else option(Head.STYLE, style),
                Head.ALPHA_TARGET: alpha_target_index(target),
                Head.ALPHA_SPEED: option(Head.ALPHA_SPEED, speed),
                Head.ALPHA_CURVE: option(Head.ALPHA_CURVE, curve),
            },
        )

    def prune(self, slot: str, *, speed: str = "INSTANT", curve: str = "LINEAR") -> None:
        """Remove a seed, at once or after a ramp of alpha to 0 during which the seed is frozen."""
        heads = {Head.ALPHA_SPEED: option(Head.ALPHA_SPEED, speed), Head.ALPHA_CURVE: option(Head.ALPHA_CURVE, curve)}
        self._do(Op.PRUNE, slot, heads)

    def fossilize(self, slot: str) -> None:
        """Commit a seed: make it a permanent part of the host."""
        self._do(Op.FOSSILIZE, slot, {})

    # -- once per epoch

    def step(self, val_batches: Iterable[Any] | None = None) -> StepReport:
        """Measure on the validation batches, apply the controller's action, and advance the lifecycle by one epoch.

        A batch is (inputs, target), or a mapping with "labels". Without batches nothing is measured, and gates that
        need a measurement stay shut. If measuring fails nothing is changed: correct `grower.quality` or the batches and
        repeat the call.
        """
        with self.ranks.together(f"grower.step() of epoch {int(self.table.step[0])}"):
            self.ranks.share_buffers(self.body)
            measured = self._measure(val_batches)
            self._warn_without_shadow_passes()
            meter = self.network.meter
            self.network.write_gradients(self.table, 0, meter.read(meter.pending().tolist()))  # sync: once per epoch
            allowed = lifecycle.legal(self.table, self.rules)
            actions = None
            if self.ranks.leads:
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
        op, names = Op(int(self.table.last_op[0])), self.network.slot_names
        return StepReport(
            quality=measured.quality if measured else float("nan"),
            committed=measured.committed if measured else float("nan"),
            op=op,
            slot="" if op == Op.WAIT else names[int(actions[0, Head.SLOT])],
            effects=tuple(f"{e.kind.name.lower()} {names[e.slot]}" for e in done.effects + ticked),
        )

    def check(self, val_batch: Any) -> None:
        """Evaluate the quality on one validation batch as `step` does, without changing anything.

        Raise ConfigError with the expected and actual shapes if it fails.
        """
        self._evaluate([val_batch])

    def worth(self, val_batches: Iterable[Any], *, budget: int | None = None, tolerance: float | None = None) -> Worth:
        """Return the worth of every seed with standard errors: print it, call `to_dict()`, or `esper.plot_worth`.

        Committed seeds are included with their *dependence*: what the network would lose without them now, which is
        more than they contributed. With more than six seeds, `budget` limits the number of coalitions evaluated, and
        `tolerance` stops earlier, once the sampling error of every Shapley value is at most that.
        """
        batches, score = scored(val_batches, self.quality)
        worth = report(self.body, batches, score, budget=budget, tolerance=tolerance)
        self.emit.worth(self.table, [worth])
        return worth

    def save(self, directory: str | Path, *, keep: int = 2, extra: Any = None) -> Path:
        """Write a checkpoint below `directory`, remove all but the last `keep`, and return the new one's path.

        It contains body, optimiser, table, controller and the random generators of torch, numpy and Python, so training
        resumes bit for bit from any point between two batches. `extra` is for your own state, such as a scheduler's,
        the epoch or the position in the data: dicts, lists, tuples, numbers, strings, tensors and arrays. Events
        emitted so far are flushed first. With several ranks rank 0 writes it, and the others write their random
        generators beside it; with FSDP2 all ranks must call it.
        """
        flush = getattr(self.emit.hub, "flush", None)
        if flush is not None:
            flush()
        done = saving.save(self, Path(directory), keep=keep, extra=extra)
        self.emit.say(
            Checkpoint(path=str(done.path), reason="requested", size_bytes=done.size_bytes, write_ms=done.write_ms)
        )
        return done.path

    def load(self, directory: str | Path) -> Any:
        """Load the newest undamaged checkpoint below `directory` and return its `extra`.

        Build model, graft, optimiser, grower and schedulers first, as in the run that saved. If the checkpoint does not
        fit, raise CheckpointError and change nothing. A damaged checkpoint is skipped with a warning. Rules and
        settings are those of this grower; a warning lists those that differ from the checkpoint's. All ranks must call
        it, with a directory that all of them see.
        """
        with self.ranks.together("grower.load()"):
            extra = saving.load(self, Path(directory))
            self.ranks.agree(self.body, self.table)
        return extra

    def state_dict(self) -> dict[str, Any]:
        """Return what `save` writes, without the body's weights and gradients, as strings and tensors.

        For checkpoints of your own that hold `body.state_dict()`. Tensors are not copied.
        """
        return saving.state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Load the state of the body first.

        If the state does not fit, raise CheckpointError and change nothing.
        """
        saving.load_state_dict(self, state)

    # -- in the training loop, optional

    def shadow(self, loss: Callable[[], Tensor]) -> None:
        """Run the shadow pass: compute `loss()` with each TRAINING seed switched on; only that seed gets gradients.

        Call it after `backward()`, on every batch or every second one. It does nothing if no seed is TRAINING, so never
        with open birth. Scale or divide the loss as you do for your own backward pass.
        """
        if self.body.incubation != "shadow":
            raise ConfigError("grower.shadow needs Grower(..., incubation='shadow')")
        self._shadow_passes += 1
        self.body.shadow_backward(loss)
        self._clipping.after_shadow()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradient norm of the host with its fossils, and of each growing seed, separately.

        Return the host's norm before clipping.
        """
        self.sync_gradients()
        self.network.regroup()  # the model is the user's: its parameters may have changed
        return torch.linalg.vector_norm(self.network.clip(max_norm)[0])

    def sync_gradients(self) -> None:
        """Average the gradients of seeds over the ranks, as DDP does for those of the host.

        `optimizer.step()` and `clip_grad_norm_` do it. Call it on every rank before code of your own that reads these
        gradients, such as `GradScaler.unscale_`.
        """
        self.ranks.average_gradients([p for p in self.body.esper.parameters() if p.requires_grad])

    def on_change(self, listener: Callable[[Effect, Slot], None]) -> None:
        """Call `listener(effect, slot)` after each structural change, for example to update an EMA."""
        self.network.optimizer_sync.on_change.append(listener)

    # -- internal

    def _do(self, op: Op, slot: str, heads: Mapping[Head, int]) -> None:
        self.body.slot(slot)
        actions = wait_everywhere(1)
        actions[0, [Head.OP, Head.SLOT]] = op, self.network.slot_names.index(slot)
        for head, value in heads.items():
            actions[0, head] = value
        with self.ranks.together(f"grower.{op.name.lower()}({slot!r}, …)"):
            if not lifecycle.is_legal(self.table, actions, self.rules)[0]:
                raise LifecycleError(why_not_legal(self.table, self.rules, self.network.slot_names, actions))
            done = self._apply(self.ranks.decide(self.table, actions))
            self.ranks.agree(self.body, self.table)
        self.emit.acted(self.table, actions, done)

    def _apply(self, actions: Ints) -> Outcome:
        before = self.table.clone()
        outcome = lifecycle.apply(self.table, actions, self.rules)
        try:
            self.network.apply_effects(outcome.effects, self.table)
        except Exception:  # such as an invalid blueprint: the table must not list a seed that was not built
            slots = list(self.body.slots.values())
            if any(e.kind == EffectKind.BUILD and slots[e.slot].seed is None for e in outcome.effects):
                self.table.restore(before)
            raise
        return outcome

    def _warn_of_late_planting(self, planted: Sequence[str]) -> None:
        """Warn if seeds in these slots were planted too late to pay off, by the optimiser steps per epoch so far."""
        epochs = int(self.table.step[0])
        steps_left = (self.horizon - epochs) * self._batches // max(epochs, 1)
        if epochs and self._mixing_steps and (text := late_planting(planted, steps_left, self._mixing_steps)):
            warnings.warn(text, stacklevel=3)

    def _warn_without_shadow_passes(self) -> None:
        """Warn if a seed is TRAINING without shadow passes: it would never leave that stage."""
        if self.body.training_slots and self.body.incubation == "shadow" and not self._shadow_passes and self._batches:
            warnings.warn(
                "a seed is TRAINING with incubation='shadow', but grower.shadow(closure) was not called: it learns "
                "nothing. Call it after backward(), or use incubation='straight_through'.",
                stacklevel=3,
            )
        self._shadow_passes = 0

    def _evaluate(self, val_batches: Iterable[Any], *gather: Callable[[list[Any]], list[Any]]) -> Coalitions:
        batches, score = scored(val_batches, self.quality, *gather)
        result = self.network.evaluate(batches, score)
        if result.scores.ndim != 2:
            raise ConfigError(
                f"a quality returns one score per sample, [B]; this one returned [B, {result.scores.shape[2]}]. "
                "Return the mean over the last axis"
            )
        return result

    def _measure(self, val_batches: Iterable[Any] | None) -> Measured | None:
        """Write the measurements on all ranks' batches to the table and return them; None if there are no batches."""
        result, share = None, ValidationShare(() if val_batches is None else val_batches, self.ranks)
        if val_batches is not None:
            result = self._evaluate(share, self.ranks.gather)
        else:
            self.ranks.must_evaluate_together(None)
            if isinstance(self.quality, NeedsTargets):
                self.ranks.gather([])
        result = self.ranks.pool(result, share.checksum)
        if result is None:
            return None
        measured = measure(result)
        self.emit.worth(self.table, [CounterfactualEngine.worth(result)])
        worth = self.network.write_scores(self.table, 0, measured)
        unknown = np.full(1, np.nan)
        lifecycle.record(self.table, quality=np.array([measured.quality]), val_loss=unknown, train_loss=unknown)
        lifecycle.record_contribution(self.table, worth[:1], worth[1:])
        return measured

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
