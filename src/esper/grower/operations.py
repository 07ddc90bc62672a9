"""The operations of a grower that its user can call, the checks of their arguments, and how an action is applied."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from esper.grower.explanations import late_planting, why_not_legal
from esper.grower.ranks import Ranks
from esper.grower.training_watch import TrainingWatch
from esper.kasmina.blueprints import blueprint_index, registered
from esper.kasmina.body import Body
from esper.leyline import lifecycle
from esper.leyline.actions import ALPHA_TARGETS, HEAD_OPTIONS, NUM_HEADS, STYLES, Head, Op
from esper.leyline.errors import ConfigError, LifecycleError, unknown_name
from esper.leyline.lifecycle import EffectKind, Outcome, Rules
from esper.leyline.slot_table import Ints, SlotTable
from esper.leyline.text import cut
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.tamiyo.controllers import Controller, Schedule, find_controller, wait_everywhere
from esper.tolaria.growing_network import GrowingNetwork
from esper.tolaria.host_costs import takes_of
from esper.tolaria.network_state import adopt_body

SHIFTS_LABELS = ("ForCausalLM", "LMHeadModel")
"""Class name endings of transformers models that take their inputs as labels and shift them internally."""


def check_count(name: str, value: Any, least: int, meaning: str) -> None:
    """Raise ConfigError if the setting `name` is not an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{name} is {meaning}, an integer ≥ {least}, got {value!r}")


def check_telemetry(telemetry: Any) -> None:
    """Raise ConfigError if it cannot receive events."""
    if telemetry is not None and not (callable(getattr(telemetry, "emit", None)) and hasattr(telemetry, "wants")):
        raise ConfigError(
            f"telemetry takes a receiver of events (an object with emit and wants), got {cut(repr(telemetry), 80)}. To "
            "record a run, pass run.hub inside `with esper.record(...) as run`"
        )


def check_settings(model: nn.Module, rules: Any, incubation: Any, quality: Any) -> None:
    """Raise ConfigError for settings of a grower that are not valid for this model."""
    if rules is not None and not isinstance(rules, Rules):
        raise ConfigError(f"rules must be esper.Rules(…), got {rules!r}")
    if incubation not in ("straight_through", "shadow"):
        raise ConfigError(f"incubation must be 'straight_through' or 'shadow', got {incubation!r}")
    if quality in ("accuracy", "log_probability") and type(model).__name__.endswith(SHIFTS_LABELS):
        raise ConfigError(
            f"{type(model).__name__} takes its inputs as labels and shifts them: quality={quality!r} would "
            f"compare each token with itself. Use quality='next_token_{quality}', or your own function."
        )


def as_controller(body: Body, controller: str | Controller | Mapping[str, str] | None) -> Controller:
    """Return the controller of a name or a plan {slot: blueprint}, or the given object.

    Raise UnknownNameError for a slot that the body does not have, or a blueprint that does not fit its slot.
    """
    if not isinstance(controller, Mapping):
        return find_controller(controller)
    fitting = body.valid_blueprints()
    plan = {}
    for slot, name in controller.items():
        if slot not in fitting:
            raise unknown_name("slot", slot, fitting)
        if name not in fitting[slot]:
            raise unknown_name(f"blueprint for slot {slot!r}", name, fitting[slot])
        plan[list(fitting).index(slot)] = blueprint_index(name)
    return Schedule(plan=plan)


def checked_actions(actions: Any, controller: object) -> Ints:
    """Return a controller's action row [1, 8]; raise ConfigError for any other shape or type."""
    actions = np.asarray(actions)
    if actions.shape != (1, NUM_HEADS) or not np.issubdtype(actions.dtype, np.integer):
        raise ConfigError(
            f"a controller's act returns integers [1, {NUM_HEADS}], one per head; {type(controller).__name__} "
            f"returned {actions.dtype} {list(actions.shape)}. Start from wait_everywhere(1) of "
            "esper.tamiyo.controllers"
        )
    return actions


def option(head: Head, name: str) -> int:
    """Return the index of a head's option by its name; the name is not case-sensitive."""
    names = HEAD_OPTIONS[head] or ()
    if not isinstance(name, str):
        raise ConfigError(f"{head.name.lower().replace('_', ' ')} is one of {', '.join(names)}, got {name!r}")
    if name.upper() not in names:
        raise unknown_name(head.name.lower().replace("_", " "), name, names)
    return names.index(name.upper())


def alpha_target_index(value: float) -> int:
    """Return the index of an alpha target by its value."""
    near = np.nonzero(np.abs(ALPHA_TARGETS - value) < 1e-6)[0]
    if not len(near):
        raise ConfigError(f"an alpha target is one of {', '.join(f'{t:.1f}' for t in ALPHA_TARGETS)}, got {value}")
    return int(near[0])


def after_closure(args: Any, kwargs: dict[str, Any], action: Callable[[], None]) -> tuple[Any, Any] | None:
    """Call `action` before an optimiser step with these arguments; if a closure computes the gradients, after it.

    Return the arguments of the step, with the closure replaced; None if they do not change.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        action()
        return None

    def closure_then_action() -> Any:
        loss = closure()
        action()
        return loss

    return args[:1], {**kwargs, "closure": closure_then_action}


class Operations:
    """The part of a grower that changes its body."""

    body: Body
    network: GrowingNetwork
    table: SlotTable
    rules: Rules
    ranks: Ranks
    emit: TelemetryEmitter
    horizon: int
    _mixing_steps: int
    _batches: int
    _training: TrainingWatch

    def germinate(
        self,
        slot: str,
        blueprint: str,
        *,
        style: str = "SIGMOID_ADD",
        tempo: str = "STANDARD",
        alpha_target: float = 1.0,
    ) -> None:
        """Plant a seed.

        With open birth it joins the host at once, with Δ = 0; with isolated birth it learns apart from the host first.

        Args:
            slot: Name of an empty slot, one of `body.slots`.
            blueprint: Name of a blueprint that fits the slot; `body.valid_blueprints()` lists them.
            style: How Δ joins the features: "LINEAR_ADD", "SIGMOID_ADD", "LINEAR_MULTIPLY" or "GATED_GATE".
            tempo: Epochs of the alpha ramp of an isolated birth: "FAST" (3), "STANDARD" (5) or "SLOW" (8).
            alpha_target: Value at which alpha rests: 0.5, 0.7 or 1.

        Raises:
            LifecycleError: The rules do not allow it now. The message states why.
            UnknownNameError: There is no such slot, blueprint or option.
            BlueprintError: The blueprint violates its contract.

        Example:
            >>> grower.germinate("1", "mlp_small")
            >>> grower.slots["1"].stage.name
            'BLENDING'
        """
        if blueprint not in registered():
            fitting = self.body.valid_blueprints()[self.body.slot(slot).name]
            raise unknown_name(f"blueprint for slot {slot!r}", blueprint, fitting)
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
        """Move a seed to its next stage.

        Args:
            slot: Name of the slot.

        Raises:
            LifecycleError: The gate of the next stage is closed. The message states the value and the threshold.

        Example:
            >>> grower.advance("1")
            Traceback (most recent call last):
            ...
            esper.leyline.errors.LifecycleError: cannot advance '1', which is DORMANT: ...
        """
        self._do(Op.ADVANCE, slot, {})

    def set_alpha_target(
        self, slot: str, target: float, *, speed: str = "MEDIUM", curve: str = "SIGMOID", style: str | None = None
    ) -> None:
        """Start a ramp of alpha to another value.

        Args:
            slot: Name of a slot with a BLENDING or HOLDING seed.
            target: Value at which alpha rests: 0.5, 0.7 or 1.
            speed: Length of the ramp: "INSTANT", "FAST", "MEDIUM" or "SLOW".
            curve: Curve of the ramp: "LINEAR", "COSINE", "SIGMOID_GENTLE", "SIGMOID" or "SIGMOID_SHARP".
            style: How Δ joins the features from now on; None keeps it.

        Raises:
            LifecycleError: The rules do not allow it now. The message states why.

        Example:
            >>> grower.germinate("1", "mlp_small")
            >>> grower.set_alpha_target("1", 0.5, speed="INSTANT")
        """
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
        """Remove a seed, at once or after a ramp of alpha to 0 during which the seed is frozen.

        Args:
            slot: Name of the slot.
            speed: Length of the ramp: "INSTANT", "FAST", "MEDIUM" or "SLOW".
            curve: Curve of the ramp: "LINEAR", "COSINE", "SIGMOID_GENTLE", "SIGMOID" or "SIGMOID_SHARP".

        Raises:
            LifecycleError: The seed is committed, younger than `rules.min_prune_age` epochs, or there is none.

        Example:
            >>> grower.germinate("1", "mlp_small")
            >>> for epoch in range(5):
            ...     report = grower.step([(x, y)])
            >>> grower.prune("1")
            >>> grower.slots["1"].stage.name
            'PRUNED'
        """
        heads = {Head.ALPHA_SPEED: option(Head.ALPHA_SPEED, speed), Head.ALPHA_CURVE: option(Head.ALPHA_CURVE, curve)}
        self._do(Op.PRUNE, slot, heads)

    def fossilize(self, slot: str) -> None:
        """Commit a seed: make it a permanent part of the host.

        Args:
            slot: Name of a slot whose seed is HOLDING and was measured.

        Raises:
            LifecycleError: The gate is closed. The message states the value and the threshold.

        Example:
            >>> grower.germinate("1", "mlp_small")
            >>> for epoch in range(3):
            ...     report = grower.step([(x, y)])
            >>> grower.fossilize("1")
            >>> grower.slots["1"].stage.name
            'FOSSILIZED'
        """
        self._do(Op.FOSSILIZE, slot, {})

    # -- internal

    def _adopt(self) -> None:
        """Follow a body whose state was loaded."""
        adopt_body(self.network, self.table)
        self._training.note_weights()

    def _must_be_current(self) -> None:
        """Raise ConfigError if another grower was built on the body: two tables would contradict each other."""
        if self._adopt not in self.body.on_load:
            raise ConfigError(
                "another grower was built on this body after this one. Use the new one, or give each grower a model "
                "and a graft of its own."
            )

    def _do(self, op: Op, slot: str, heads: Mapping[Head, int]) -> None:
        self._must_be_current()
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
