"""Gates: the checks that a seed must pass before its next stage, as functions over the table, with their messages.

    GERMINATED → TRAINING    no check
    TRAINING → BLENDING      dwell, gradient health, gradient ratio, improvement of the host
    BLENDING → HOLDING       dwell, alpha rests at 1
    HOLDING → FOSSILIZED     contribution measured in HOLDING and high enough

Legend: E environments, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from esper.leyline.slot_table import Bools, Floats, SlotTable
from esper.leyline.stages import Check, SeedStage, Thresholds

ALPHA_TOLERANCE = 1e-6

# plain ints: numpy compares them with small integers five times faster than enum members
_GERMINATED, _TRAINING, _BLENDING, _HOLDING = (
    int(s) for s in (SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)
)
At = tuple[int, int]  # environment, slot


class GateRule(NamedTuple):
    """One check: where it fails [E, S], or None if the thresholds do not require it, and the message for one slot."""

    failed: Callable[[SlotTable, Thresholds], Bools | None]
    message: Callable[[SlotTable, Thresholds, At], str]


def failed_checks(table: SlotTable, thresholds: Thresholds) -> dict[Check, Bools]:
    """Return where each required check fails [E, S]. Checks that the thresholds do not require are omitted."""
    results = ((check, rule.failed(table, thresholds)) for check, rule in GATE_RULES.items())
    return {check: failed for check, failed in results if failed is not None}


def open_gates(table: SlotTable, thresholds: Thresholds) -> Bools:
    """Return whether each seed's next gate is open [E, S]; False where there is no gate."""
    shut = (table.stage < _GERMINATED) | (table.stage > _HOLDING)
    for failed in failed_checks(table, thresholds).values():
        shut |= failed
    return ~shut


def gate_reasons(table: SlotTable, thresholds: Thresholds, slot: int, env: int = 0) -> dict[Check, str]:
    """Return one sentence per check that keeps a seed's next gate shut; empty if the gate is open."""
    at = env, slot
    failed = failed_checks(table, thresholds)
    return {check: GATE_RULES[check].message(table, thresholds, at) for check in failed if failed[check][at]}


def _dwell(table: SlotTable, t: Thresholds) -> Bools:
    failed = (table.stage == _TRAINING) & (table.dwell < t.blend_dwell)
    if t.hold_dwell:
        failed |= (table.stage == _BLENDING) & (table.dwell < t.hold_dwell)
    return failed


def _dwell_message(table: SlotTable, t: Thresholds, at: At) -> str:
    stage = SeedStage(int(table.stage[at]))
    name = "blend_dwell" if stage == SeedStage.TRAINING else "hold_dwell"
    return f"it has been {stage.name} for {int(table.dwell[at])} of {getattr(t, name)} epochs (thresholds.{name})"


def _improvement(table: SlotTable, t: Thresholds) -> Bools | None:
    if t.blend_improvement is None:
        return None
    return _below(table, _TRAINING, table.quality[:, None] - table.quality_stage, t.blend_improvement)


def _improvement_message(table: SlotTable, t: Thresholds, at: At) -> str:
    improvement = float(table.quality[at[0]] - table.quality_stage[at])
    return _too_low("improvement of quality in this stage", improvement, t.blend_improvement, "blend_improvement")


def _alpha(table: SlotTable, _t: Thresholds) -> Bools:
    at_full = (table.alpha_to >= 1 - ALPHA_TOLERANCE) & (np.abs(table.alpha - table.alpha_to) <= ALPHA_TOLERANCE)
    return (table.stage == _BLENDING) & ~(at_full & ~table.moving)


def _alpha_message(table: SlotTable, _t: Thresholds, at: At) -> str:
    alpha, target = float(table.alpha[at]), float(table.alpha_to[at])
    if table.moving[at]:
        return f"alpha is {alpha:.2f} and moving to {target:.2f}; the gate requires that it rests at 1"
    return f"alpha rests at {alpha:.2f}; the gate requires 1"


def _contribution(table: SlotTable, t: Thresholds) -> Bools | None:
    if t.fossil_contribution is None:
        return None
    lower_bound = np.where(table.contribution_age >= 0, table.contribution - t.z * table.contribution_se, np.nan)
    return _below(table, _HOLDING, lower_bound, t.fossil_contribution)


def _contribution_message(table: SlotTable, t: Thresholds, at: At) -> str:
    if table.contribution_age[at] < 0:
        return "its contribution was not measured in HOLDING"
    value, se = float(table.contribution[at]), float(table.contribution_se[at])
    bound = f"its contribution {value:+.4g} − {t.z:g} × {se:.4g} (standard error)"
    if not math.isfinite(value - t.z * se):
        return f"{bound} is not a finite number"
    return f"{bound} = {value - t.z * se:+.4g} is below {t.fossil_contribution:+.4g} (thresholds.fossil_contribution)"


def _below(table: SlotTable, stage: int, value: Floats, floor: float | None) -> Bools | None:
    """Return where a seed in `stage` has a value that is not finite or below `floor`; None if there is no floor."""
    if floor is None:
        return None
    return (table.stage == stage) & ~(np.isfinite(value) & (value >= floor))


def _too_low(what: str, value: float, floor: float | None, name: str) -> str:
    """Return the message for a value that is missing or below its threshold."""
    if math.isnan(value):
        return f"{what} was not measured"
    return f"{what} {value:.4g} is below {floor:.4g} (thresholds.{name})"


GATE_RULES: dict[Check, GateRule] = {
    Check.DWELL: GateRule(_dwell, _dwell_message),
    Check.GRADIENT_HEALTH: GateRule(
        lambda table, t: _below(table, _TRAINING, table.grad_health, t.blend_health),
        lambda table, t, at: _too_low("gradient health", float(table.grad_health[at]), t.blend_health, "blend_health"),
    ),
    Check.GRADIENT_RATIO: GateRule(
        lambda table, t: _below(table, _TRAINING, table.grad_ratio, t.blend_ratio),
        lambda table, t, at: _too_low(
            "seed/host gradient ratio", float(table.grad_ratio[at]), t.blend_ratio, "blend_ratio"
        ),
    ),
    Check.IMPROVEMENT: GateRule(_improvement, _improvement_message),
    Check.ALPHA_AT_FULL: GateRule(_alpha, _alpha_message),
    Check.CONTRIBUTION: GateRule(_contribution, _contribution_message),
}
"""The only definition of each check."""
