"""What a grower shows its user, as text and HTML: reports, slots, why a seed cannot be planted or is planted late."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from esper.kasmina.blueprints import blueprint_name
from esper.kasmina.body import Body
from esper.leyline.actions import Head, Op
from esper.leyline.gates import gate_reasons
from esper.leyline.lifecycle import Effect, EffectKind, Rules, legal
from esper.leyline.slot_table import Ints, SlotTable
from esper.leyline.stages import COOLING, GROWING, Check, SeedStage
from esper.leyline.text import html_table
from esper.tamiyo.controllers import Controller, ExplainsWaiting, Wait

MIXING_STEPS = 560
"""Optimiser steps that a planted structure needs at least to match the same one trained from step 0 for as many epochs.

Measured on `rescue`, open birth, 20 batches per epoch, test accuracy. Planted at epoch 8 it was half a point below
after 28 epochs (worlds 0 to 2). Planted at epoch 16 it was still 1.1 points below after 29 epochs (worlds 0 and 1)."""


def late_planting(names: Sequence[str], steps_left: int, mixing_steps: int) -> str:
    """Return a warning about seeds planted at most `steps_left` optimiser steps before the end of training.

    It is empty if there are no such seeds, or if `steps_left` is at least `mixing_steps`.
    """
    if not names or steps_left >= mixing_steps:
        return ""
    return (
        f"{', '.join(map(repr, names))}: planted at most {steps_left} optimiser steps before the end of training. "
        f"A seed needs about {mixing_steps} or more to pay off. Plant earlier, or train for more epochs"
    )


def germination_reason(table: SlotTable, rules: Rules, names: Sequence[str], slot: int, blueprint: int | None) -> str:
    """Return why an empty or cooling slot of environment 0 cannot be planted now, with this blueprint or any."""
    takes = [blueprint_name(int(b)) for b in np.nonzero(table.takes[slot])[0]]
    if blueprint is not None and not table.takes[slot, blueprint]:
        return f"{blueprint_name(blueprint)!r} does not fit there. It takes: {', '.join(takes) or 'none'}"
    if not takes:
        return f"no blueprint fits {names[slot]!r}"
    cooling = {n: int(c) for n, c in zip(names, table.cooldown[0], strict=True) if c}
    if cooling and (rules.one_at_a_time or names[slot] in cooling):
        cooldowns = ", ".join(f"{n!r} for {c} more epochs" for n, c in cooling.items())
        return f"cooling down after a prune: {cooldowns}"
    learning = [s for s in range(len(names)) if table.stage[0, s] in (SeedStage.GERMINATED, SeedStage.TRAINING)]
    if learning and rules.one_at_a_time:
        return (
            f"{names[learning[0]]!r} is still {SeedStage(int(table.stage[0, learning[0]])).name}, and one seed learns "
            "at a time. Wait until it blends, or set rules.one_at_a_time=False"
        )
    return f"there are {rules.max_seeds} seeds, the most that rules.max_seeds allows. Prune one, or raise it"


def planting_obstacle(table: SlotTable, rules: Rules, names: Sequence[str]) -> str:
    """Return why no slot of environment 0 can be planted now; "" if one can."""
    if legal(table, rules)[0, Op.GERMINATE].any():
        return ""
    empty = np.nonzero(table.stage[0] == SeedStage.DORMANT)[0]
    if not len(empty):
        return "no slot is empty"
    return germination_reason(table, rules, names, int(empty[0]), None)


WAYS_OUT = {
    Check.DWELL: "call grower.step() once per epoch, or require fewer epochs in rules.thresholds",
    Check.GRADIENT_HEALTH: "train on: gradients are sampled in optimizer.step() and read in grower.step()",
    Check.GRADIENT_RATIO: "train on: gradients are sampled in optimizer.step() and read in grower.step()",
    Check.IMPROVEMENT: "train on and give grower.step() validation batches",
    Check.ALPHA_AT_FULL: "wait until its ramp ends; if it rests below, set_alpha_target(…, 1.0)",
    Check.CONTRIBUTION: "measure it with grower.step(val_batches); if it stays low, prune",
}
"""What to do about a gate that is shut, by the check that fails."""
COLUMNS = 80
"""Maximum width of a printed grower."""


@dataclass(frozen=True, slots=True)
class SlotView:
    """The state of one slot; NaN means never measured.

    Example:
        >>> view = grower.slots["1"]
        >>> view.stage.name, view.blueprint
        ('DORMANT', '')
    """

    name: str
    stage: SeedStage
    blueprint: str
    alpha: float
    age_epochs: int
    params: int
    contribution: float
    contribution_se: float
    prospect: float
    waits_for: str
    """Why its next gate is shut; empty if it is open."""

    def __str__(self) -> str:
        parts = [f"{self.name:<20} {self.stage.name:<10}"]
        if self.blueprint:
            parts.append(f"{self.blueprint:<14} alpha {self.alpha:.2f}  {self.params:>8,} params")
        if np.isfinite(self.contribution):
            parts.append(f"contribution {self.contribution:+.4f} ± {self.contribution_se:.4f} (standard error)")
        elif np.isfinite(self.prospect):
            parts.append(f"prospect {self.prospect:+.4f}")
        if self.waits_for:
            parts.append(f"waits: {self.waits_for}")
        return wrapped("  ".join(parts))


def wrapped(text: str) -> str:
    """Return the text in lines of at most `COLUMNS` columns, indented from the second line on."""
    return textwrap.fill(text, COLUMNS, subsequent_indent="    ", break_on_hyphens=False)


def slot_views(body: Body, table: SlotTable, rules: Rules) -> dict[str, SlotView]:
    """Return the state of every slot of environment 0 and its seed, by name."""
    return {
        name: SlotView(
            name=name,
            stage=SeedStage(int(table.stage[0, s])),
            blueprint=slot.blueprint,
            alpha=float(table.alpha[0, s]),
            age_epochs=int(table.age[0, s]),
            params=int(table.params[0, s]),
            contribution=float(table.contribution[0, s]),
            contribution_se=float(table.contribution_se[0, s]),
            prospect=float(table.prospect[0, s]),
            waits_for="; ".join(gate_reasons(table, rules.thresholds, s).values()),
        )
        for s, (name, slot) in enumerate(body.slots.items())
    }


def growth_figures(body: Body, quality: float) -> dict[str, float]:
    """Return the numbers of a growth step for the log of a training library."""
    return {
        "quality": quality,
        "seeds": float(sum(slot.seed is not None for slot in body.slots.values())),
        "parameters": float(sum(p.numel() for p in body.esper.parameters())),
    }


def why_not_legal(table: SlotTable, rules: Rules, names: Sequence[str], actions: Ints) -> str:
    """Return why the operation of environment 0 is not legal, and what to do about it."""
    op, s = Op(int(actions[0, Head.OP])), int(actions[0, Head.SLOT])
    stage, age = SeedStage(int(table.stage[0, s])), int(table.age[0, s])
    prefix = f"cannot {op.name.lower().replace('_', ' ')} {names[s]!r}, which is {stage.name}: "
    if op == Op.GERMINATE and stage in (*COOLING, SeedStage.DORMANT):
        return prefix + germination_reason(table, rules, names, s, int(actions[0, Head.BLUEPRINT]))
    if op == Op.PRUNE and stage in GROWING and age < rules.min_prune_age:
        return prefix + f"it is {age} epochs old, rules.min_prune_age is {rules.min_prune_age}"
    if op in (Op.PRUNE, Op.SET_ALPHA_TARGET) and table.moving[0, s]:
        return prefix + "its alpha is moving; wait until it rests"
    gated_stages = (SeedStage.HOLDING,) if op == Op.FOSSILIZE else GROWING[:-1] if op == Op.ADVANCE else ()
    if stage in gated_stages:
        reasons = gate_reasons(table, rules.thresholds, s)
        if not reasons:
            return prefix + "it advances by itself at the next step (rules.auto_train, auto_blend, auto_hold)"
        ways = dict.fromkeys(WAYS_OUT[check] for check in reasons)
        return prefix + f"{'; '.join(reasons.values())}. Way out: {'; '.join(ways)}"
    if op == Op.FOSSILIZE and stage in GROWING:
        waits = "; ".join(gate_reasons(table, rules.thresholds, s).values())
        return prefix + (
            f"only a HOLDING seed that was measured can be committed{f' ({waits})' * bool(waits)}. Way out: call "
            "grower.step(val_batches) first, once per epoch; it measures the seed and advances it"
        )
    able = [name for name, is_legal in zip(names, legal(table, rules)[0, op], strict=True) if is_legal]
    return prefix + f"this stage does not allow it. Slots that do: {', '.join(able) or 'none'}"


def why_nothing_was_planted(controller: Controller, table: SlotTable, rules: Rules, names: Sequence[str]) -> str:
    """Return why environment 0 has never had a seed; empty once one was planted.

    Either there was no step yet, or the rules do not allow germination, or the controller waits and states its
    condition and threshold.
    """
    epochs = int(table.step[0])
    if table.next_serial[0] > 0:
        return ""
    if epochs == 0 and isinstance(controller, Wait):
        return "No step yet. The controller 'none' never plants: call grower.germinate(slot, blueprint)."
    if epochs == 0:
        return f"No step yet. The controller {type(controller).__name__} decides at each grower.step()."
    reason = planting_obstacle(table, rules, names)
    if not reason and isinstance(controller, ExplainsWaiting):
        reason = controller.why_waiting(table)
    if not reason:
        reason = f"the controller {type(controller).__name__} did not choose to plant, which the rules allow"
    return f"Nothing was planted in {epochs} epoch{'s' * (epochs != 1)}: {reason}."


def effect_text(effect: Effect, table: SlotTable, names: Sequence[str]) -> str:
    """Return a structural change in words: what was done, to which blueprint, in which slot."""
    change = "set operator of" if effect.kind == EffectKind.SET_OPERATOR else effect.kind.name.lower()
    return f"{change} {blueprint_name(int(table.blueprint[effect.env, effect.slot]))} in slot {names[effect.slot]}"


@dataclass(frozen=True, slots=True)
class StepReport:
    """The measurements and changes of one call of `Grower.step`.

    Example:
        >>> report = grower.step([(x, y)])
        >>> report.op.name, report.slot, report.effects
        ('WAIT', '', ())
    """

    quality: float
    """Quality of the whole network on the validation batches; NaN if nothing was measured."""
    committed: float
    """Quality with every uncommitted seed off."""
    op: Op
    """The operation that the controller chose."""
    slot: str
    """The slot that the operation applied to; empty for WAIT."""
    effects: tuple[str, ...]
    """The structural changes, such as "build conv_light in slot layer1"."""

    def _repr_html_(self) -> str:
        chosen = f"{self.op.name} {self.slot}".strip()
        rows = [(f"{self.quality:.4f}", f"{self.committed:.4f}", chosen, ", ".join(self.effects))]
        header = ("quality", "without uncommitted seeds", "operation", "changes")
        return html_table("Step", header, rows, numbers=(0, 1))


HEADER = ("slot", "stage", "blueprint", "alpha", "parameters", "contribution ± standard error", "waits for")


def grower_html(views: Iterable[SlotView], note: str) -> str:
    """Return the table of all slots, with a note below it."""
    rows = [
        (
            view.name,
            view.stage.name,
            view.blueprint,
            f"{view.alpha:.2f}" if view.blueprint else "",
            f"{view.params:,}" if view.blueprint else "",
            f"{view.contribution:+.4f} ± {view.contribution_se:.4f}" if math.isfinite(view.contribution) else "",
            view.waits_for,
        )
        for view in views
    ]
    return html_table("Grower", HEADER, rows, numbers=(3, 4, 5), note=note)
