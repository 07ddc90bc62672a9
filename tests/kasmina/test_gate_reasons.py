"""Test that the reason of a closed gate names the measured value and the threshold."""

from __future__ import annotations

import pytest

from esper.kasmina.gate_reasons import TEXTS, gate_reasons, planting_obstacle
from esper.kasmina.lifecycle import Rules
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import STRICT, Check, SeedStage, Thresholds

S = SeedStage


def table_with(stage: SeedStage, **columns: float) -> SlotTable:
    table = SlotTable.empty(1, 2)
    table.stage[0, 0] = stage
    for name, value in columns.items():
        getattr(table, name)[0, 0] = value
    return table


def test_every_check_has_a_text():
    assert set(TEXTS) == set(Check)


def test_open_gate_has_no_reasons():
    rules = Rules(thresholds=Thresholds(blend_dwell=0, blend_health=None))
    assert gate_reasons(table_with(S.TRAINING), rules, 0) == {}


HOLDING = {"contribution_age": 0, "contribution": 0.01, "contribution_se": 0.008}
CASES = [
    (S.TRAINING, {"dwell": 3}, Check.DWELL, "it has been TRAINING for 3 of 10 epochs (thresholds.blend_dwell)"),
    (S.BLENDING, {"dwell": 3}, Check.DWELL, "it has been BLENDING for 3 of 10 epochs (thresholds.hold_dwell)"),
    (S.TRAINING, {}, Check.GRADIENT_RATIO, "seed/host gradient ratio was not measured"),
    (
        S.TRAINING,
        {"grad_ratio": 0.05},
        Check.GRADIENT_RATIO,
        "seed/host gradient ratio 0.05 is below 0.1 (thresholds.blend_ratio)",
    ),
    (S.TRAINING, {}, Check.IMPROVEMENT, "improvement of quality in this stage was not measured"),
    (S.BLENDING, {"alpha": 0.5, "alpha_to": 0.5}, Check.ALPHA_AT_FULL, "alpha rests at 0.50; the gate asks for 1"),
    (
        S.BLENDING,
        {"alpha": 0.5, "alpha_to": 1.0, "ramp_len": 4, "ramp_pos": 2},
        Check.ALPHA_AT_FULL,
        "alpha is 0.50 and moving to 1.00; the gate asks that it rests at 1",
    ),
    (S.HOLDING, {}, Check.CONTRIBUTION, "its contribution was not measured in HOLDING"),
    (
        S.HOLDING,
        HOLDING,
        Check.CONTRIBUTION,
        "its contribution +0.01 − 2.5 × 0.008 (standard error) = -0.01 is below +0.01 (thresholds.fossil_contribution)",
    ),
    (
        S.HOLDING,
        HOLDING | {"contribution_se": float("nan")},
        Check.CONTRIBUTION,
        "its contribution +0.01 − 2.5 × nan (standard error) is not a finite number",
    ),
]


@pytest.mark.parametrize(("stage", "columns", "check", "text"), CASES)
def test_closed_gate_names_the_value_and_the_threshold(stage, columns, check, text):
    assert gate_reasons(table_with(stage, **columns), Rules(thresholds=STRICT), 0)[check] == text


def test_low_and_missing_gradient_health_have_different_texts():
    rules = Rules()
    missing = gate_reasons(table_with(S.TRAINING), rules, 0)[Check.GRADIENT_HEALTH]
    low = gate_reasons(table_with(S.TRAINING, grad_health=0.5), rules, 0)[Check.GRADIENT_HEALTH]
    assert missing == "gradient health was not measured"
    assert low == "gradient health 0.5 is below 0.7 (thresholds.blend_health)"


def test_planting_obstacle_names_the_rule():
    names = ("a", "b")
    assert planting_obstacle(table_with(S.DORMANT), Rules(), names) == ""
    assert "'a' is still TRAINING" in planting_obstacle(table_with(S.TRAINING), Rules(), names)
    full = table_with(S.HOLDING)
    assert "rules.max_seeds" in planting_obstacle(full, Rules(max_seeds=1), names)
    full.stage[:] = S.FOSSILIZED
    assert planting_obstacle(full, Rules(), names) == "no slot is empty"
    fits_nothing = SlotTable.empty(1, 2)
    fits_nothing.takes[:] = False
    assert planting_obstacle(fits_nothing, Rules(), names) == "no blueprint fits 'a'"
