"""Test that the tables of stages, transitions, operations and heads match the specification and each other."""

from __future__ import annotations

import numpy as np
import pytest

from esper.leyline import BLUEPRINTS, HEAD_OPTIONS, NEXT_STAGES, RELEVANCE, STYLES, Head, Op, SeedStage
from esper.leyline.actions import (
    ALPHA_TARGETS,
    CURVE_STEEPNESS,
    SPEED_TICKS,
    STYLE_CURVE,
    STYLE_OPERATOR,
    TEMPO_EPOCHS,
    Curve,
    Operator,
)
from esper.leyline.stages import COOLDOWN_LABEL, COOLDOWN_TICKS

Stage = SeedStage
ARROWS = {
    (0, 1),
    (1, 2),
    (1, 3),
    (1, 6),
    (2, 3),
    (2, 6),
    (3, 4),
    (3, 6),
    (4, 5),
    (4, 3),
    (4, 6),
    (6, 7),
    (7, 8),
    (8, 0),
}


def test_stages_are_contiguous_indices_from_dormant():
    assert [int(s) for s in Stage] == list(range(9))
    assert Stage.DORMANT == 0
    assert Stage.FOSSILIZED == 5


def test_exactly_the_specified_transitions_exist():
    assert {(a, b) for a in Stage for b in Stage if b in NEXT_STAGES[a]} == ARROWS
    assert set(NEXT_STAGES) == set(Stage)


def test_only_fossilized_has_no_next_stage():
    assert [s for s in Stage if not NEXT_STAGES[s]] == [Stage.FOSSILIZED]


def test_cooldown_labels_run_from_pruned_to_dormant():
    assert COOLDOWN_TICKS == 7
    labels = [Stage(x) for x in COOLDOWN_LABEL[::-1]]
    assert labels == [Stage.PRUNED, *[Stage.EMBARGOED] * 5, Stage.RESETTING, Stage.DORMANT]


def test_heads_are_in_storage_order():
    assert [h.name.lower() for h in Head] == [
        "slot",
        "blueprint",
        "style",
        "tempo",
        "alpha_target",
        "alpha_speed",
        "alpha_curve",
        "op",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("head", "values"),
    [
        (Head.BLUEPRINT, BLUEPRINTS),
        (Head.STYLE, STYLES),
        (Head.TEMPO, TEMPO_EPOCHS),
        (Head.ALPHA_TARGET, ALPHA_TARGETS),
        (Head.ALPHA_SPEED, SPEED_TICKS),
        (Head.ALPHA_CURVE, CURVE_STEEPNESS),
        (Head.OP, list(Op)),
    ],
)
def test_every_option_has_a_name_and_a_value(head, values):
    assert len(HEAD_OPTIONS[head]) == len(values)
    assert len(set(HEAD_OPTIONS[head])) == len(values)


def test_option_values_match_the_specification():
    assert TEMPO_EPOCHS.tolist() == [3, 5, 8]
    assert SPEED_TICKS.tolist() == [0, 3, 5, 8]
    np.testing.assert_allclose(ALPHA_TARGETS, [0.5, 0.7, 1.0])
    assert CURVE_STEEPNESS.tolist() == [0, 0, 6, 12, 24]
    assert len(BLUEPRINTS) == 13


def test_style_is_one_curve_and_one_operator():
    pairs = {s.name: (Curve(c), Operator(o)) for s, c, o in zip(STYLES, STYLE_CURVE, STYLE_OPERATOR, strict=True)}
    assert pairs == {
        "LINEAR_ADD": (Curve.LINEAR, Operator.ADD),
        "LINEAR_MULTIPLY": (Curve.LINEAR, Operator.MULTIPLY),
        "SIGMOID_ADD": (Curve.SIGMOID, Operator.ADD),
        "GATED_GATE": (Curve.LINEAR, Operator.GATE),
    }


def test_relevance_matches_the_specification():
    #       slot blueprint style tempo target speed curve op
    table = {
        Op.WAIT: "0000 0001",
        Op.GERMINATE: "1111 1001",
        Op.SET_ALPHA_TARGET: "1010 1111",
        Op.PRUNE: "1000 0111",
        Op.FOSSILIZE: "1000 0001",
        Op.ADVANCE: "1000 0001",
    }
    for op, bits in table.items():
        assert RELEVANCE[op].tolist() == [bit == "1" for bit in bits.replace(" ", "")], op.name


def test_relevance_table_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        RELEVANCE[0, 0] = True
