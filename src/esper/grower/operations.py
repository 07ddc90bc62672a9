"""The operations of a grower that its user can call, and how an action is carried out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from esper.grower.arguments import alpha_target_index, option
from esper.grower.explanations import why_not_legal
from esper.grower.ranks import Ranks
from esper.kasmina import lifecycle
from esper.kasmina.blueprints import blueprint_index
from esper.kasmina.body import Body
from esper.kasmina.germination import late_planting
from esper.kasmina.lifecycle import EffectKind, Outcome, Rules
from esper.leyline.actions import STYLES, Head, Op
from esper.leyline.errors import LifecycleError
from esper.leyline.slot_table import Ints, SlotTable
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.tamiyo.controllers import wait_everywhere
from esper.tolaria.growing_network import GrowingNetwork
from esper.tolaria.host_costs import takes_of


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
