"""Test gate checks and that the reason of a closed gate names the measured value and the threshold."""

from __future__ import annotations

import pytest

from esper.leyline.gates import GATE_RULES, gate_reasons, open_gates
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import PERMISSIVE, STRICT, Check, SeedStage, Thresholds

Stage = SeedStage


def table_with(stage: SeedStage, **columns: float) -> SlotTable:
    table = SlotTable.empty(1, 2)
    table.stage[0, 0] = stage
    for name, value in columns.items():
        getattr(table, name)[0, 0] = value
    return table


def test_every_check_has_a_rule():
    assert set(GATE_RULES) == set(Check)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_value_that_is_not_finite_closes_the_gate(value):
    anything = Thresholds(blend_dwell=0, blend_health=float("-inf"))
    assert open_gates(table_with(Stage.TRAINING, grad_health=-9.0), anything)[0, 0]
    assert not open_gates(table_with(Stage.TRAINING, grad_health=value), anything)[0, 0]


@pytest.mark.parametrize("stage", [Stage.DORMANT, Stage.FOSSILIZED, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING])
def test_stage_without_a_gate_is_never_open(stage):
    assert not open_gates(table_with(stage), PERMISSIVE).any()


def test_open_gate_has_no_reasons():
    thresholds = Thresholds(blend_dwell=0, blend_health=None)
    assert gate_reasons(table_with(Stage.TRAINING), thresholds, 0) == {}


HOLDING = {"contribution_age": 0, "contribution": 0.01, "contribution_se": 0.008}
CASES = [
    (Stage.TRAINING, {"dwell": 3}, Check.DWELL, "it has been TRAINING for 3 of 10 epochs (thresholds.blend_dwell)"),
    (Stage.BLENDING, {"dwell": 3}, Check.DWELL, "it has been BLENDING for 3 of 10 epochs (thresholds.hold_dwell)"),
    (Stage.TRAINING, {}, Check.GRADIENT_RATIO, "seed/host gradient ratio was not measured"),
    (
        Stage.TRAINING,
        {"grad_ratio": 0.05},
        Check.GRADIENT_RATIO,
        "seed/host gradient ratio 0.05 is below 0.1 (thresholds.blend_ratio)",
    ),
    (Stage.TRAINING, {}, Check.IMPROVEMENT, "improvement of quality in this stage was not measured"),
    (Stage.BLENDING, {"alpha": 0.5, "alpha_to": 0.5}, Check.ALPHA_AT_FULL, "alpha rests at 0.50; the gate requires 1"),
    (
        Stage.BLENDING,
        {"alpha": 0.5, "alpha_to": 1.0, "ramp_len": 4, "ramp_pos": 2},
        Check.ALPHA_AT_FULL,
        "alpha is 0.50 and moving to 1.00; the gate requires that it rests at 1",
    ),
    (Stage.HOLDING, {}, Check.CONTRIBUTION, "its contribution was not measured in HOLDING"),
    (
        Stage.HOLDING,
        HOLDING,
        Check.CONTRIBUTION,
        "its contribution +0.01 − 2.5 × 0.008 (standard error) = -0.01 is below +0.01 (thresholds.fossil_contribution)",
    ),
    (
        Stage.HOLDING,
        HOLDING | {"contribution_se": float("nan")},
        Check.CONTRIBUTION,
        "its contribution +0.01 − 2.5 × nan (standard error) is not a finite number",
    ),
]


@pytest.mark.parametrize(("stage", "columns", "check", "text"), CASES)
def test_closed_gate_names_the_value_and_the_threshold(stage, columns, check, text):
    assert gate_reasons(table_with(stage, **columns), STRICT, 0)[check] == text


def test_low_and_missing_gradient_health_have_different_texts():
    missing = gate_reasons(table_with(Stage.TRAINING), PERMISSIVE, 0)[Check.GRADIENT_HEALTH]
    low = gate_reasons(table_with(Stage.TRAINING, grad_health=0.5), PERMISSIVE, 0)[Check.GRADIENT_HEALTH]
    assert missing == "gradient health was not measured"
    assert low == "gradient health 0.5 is below 0.7 (thresholds.blend_health)"
