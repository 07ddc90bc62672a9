"""Text messages for failed gate checks, with the measured value and the threshold it must reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from esper.kasmina.blueprints import blueprint_name
from esper.kasmina.lifecycle import Rules, gates, legal
from esper.leyline.actions import Op
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Check, SeedStage, Thresholds


def gate_reasons(table: SlotTable, rules: Rules, slot: int, env: int = 0) -> dict[Check, str]:
    """Return one sentence per check that keeps a seed's next gate shut; empty if the gate is open."""
    bits = int(gates(table, rules)[1][env, slot])
    return {check: TEXTS[check](table, rules.thresholds, (env, slot)) for check in Check if bits >> check & 1}


At = tuple[int, int]  # environment, slot


def _dwell(table: SlotTable, t: Thresholds, at: At) -> str:
    """Explain a failed DWELL check."""
    training = table.stage[at] == SeedStage.TRAINING
    name, least = ("blend_dwell", t.blend_dwell) if training else ("hold_dwell", t.hold_dwell)
    stage = SeedStage(int(table.stage[at])).name
    return f"it has been {stage} for {int(table.dwell[at])} of {least} epochs (thresholds.{name})"


def _health(table: SlotTable, t: Thresholds, at: At) -> str:
    """Explain a failed GRADIENT_HEALTH check."""
    return _too_low("gradient health", float(table.grad_health[at]), t.blend_health, "blend_health")


def _ratio(table: SlotTable, t: Thresholds, at: At) -> str:
    """Explain a failed GRADIENT_RATIO check."""
    return _too_low("seed/host gradient ratio", float(table.grad_ratio[at]), t.blend_ratio, "blend_ratio")


def _improvement(table: SlotTable, t: Thresholds, at: At) -> str:
    """Explain a failed IMPROVEMENT check."""
    improvement = float(table.quality[at[0]] - table.quality_stage[at])
    return _too_low("improvement of quality in this stage", improvement, t.blend_improvement, "blend_improvement")


def _alpha(table: SlotTable, t: Thresholds, at: At) -> str:
    """Explain a failed ALPHA_AT_FULL check."""
    alpha, target = float(table.alpha[at]), float(table.alpha_to[at])
    if table.moving[at]:
        return f"alpha is {alpha:.2f} and moving to {target:.2f}; the gate asks that it rests at 1"
    return f"alpha rests at {alpha:.2f}; the gate asks for 1"


def _contribution(table: SlotTable, t: Thresholds, at: At) -> str:
    """Explain a failed CONTRIBUTION check."""
    if table.contribution_age[at] < 0:
        return "its contribution was not measured in HOLDING"
    value, se = float(table.contribution[at]), float(table.contribution_se[at])
    bound = f"its contribution {value:+.4g} − {t.z:g} × {se:.4g} (standard error)"
    if not math.isfinite(value - t.z * se):
        return f"{bound} is not a finite number"
    return f"{bound} = {value - t.z * se:+.4g} is below {t.fossil_contribution:+.4g} (thresholds.fossil_contribution)"


def _too_low(what: str, value: float, least: float | None, name: str) -> str:
    """Return the message for a value that is missing or below its threshold."""
    if math.isnan(value):
        return f"{what} was not measured"
    return f"{what} {value:.4g} is below {least:.4g} (thresholds.{name})"


TEXTS: dict[Check, Callable[[SlotTable, Thresholds, At], str]] = {
    Check.DWELL: _dwell,
    Check.GRADIENT_HEALTH: _health,
    Check.GRADIENT_RATIO: _ratio,
    Check.IMPROVEMENT: _improvement,
    Check.ALPHA_AT_FULL: _alpha,
    Check.CONTRIBUTION: _contribution,
}


def germination_reason(table: SlotTable, rules: Rules, names: Sequence[str], slot: int, blueprint: int | None) -> str:
    """Return why an empty or cooling slot of environment 0 cannot be planted now, with this blueprint or any."""
    takes = [blueprint_name(int(b)) for b in np.nonzero(table.takes[slot])[0]]
    if blueprint is not None and not table.takes[slot, blueprint]:
        return f"{blueprint_name(blueprint)!r} does not fit there. It takes: {', '.join(takes) or 'none'}"
    if not takes:
        return f"no blueprint fits {names[slot]!r}"
    cooling = {n: int(c) for n, c in zip(names, table.cooldown[0], strict=True) if c}
    if cooling and (rules.one_at_a_time or names[slot] in cooling):
        left = ", ".join(f"{n!r} for {c} more epochs" for n, c in cooling.items())
        return f"cooling down after a prune: {left}"
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
