"""Test that controllers read only the table and choose only legal actions."""

from __future__ import annotations

import numpy as np
import pytest

from esper.leyline.actions import BLUEPRINTS, Head, Op
from esper.leyline.errors import UnknownNameError
from esper.leyline.lifecycle import Rules, apply, is_legal, legal, tick
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import STRICT, SeedStage
from esper.tamiyo.controllers import CONTROLLERS, Schedule, Wait, make_controller, wait_everywhere
from tests.support.random_tables import LIVELY, random_table
from tests.support.rules import ISOLATED

CONV, NORM = BLUEPRINTS.index("conv_light"), BLUEPRINTS.index("norm")


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.parametrize(
    "rules",
    [Rules(), ISOLATED, LIVELY, Rules(max_seeds=2, thresholds=STRICT)],
    ids=["", "isolated", "lively", "strict"],
)
@pytest.mark.parametrize("seed", range(3))
def test_controllers_choose_only_legal_actions(name, rules, seed):
    table = random_table(40, 4, seed)
    table.enabled[:, seed] = False
    table.takes[seed] = False
    before = table.clone()
    actions = make_controller(name).act(table, legal(table, rules))
    assert is_legal(table, actions, rules).all()
    assert not table.diff(before)


def test_wait_controller_always_waits():
    table = random_table(20, 3, 0)
    assert (Wait().act(table, legal(table, LIVELY))[:, Head.OP] == Op.WAIT).all()


def test_wait_everywhere_has_default_values_in_other_heads():
    row = wait_everywhere(2)
    assert row.shape == (2, len(Head))
    assert row[0].tolist() == [0, 0, 2, 1, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("rules", "order", "gap"),
    [
        (Rules(), [("GERMINATE", 0), ("FOSSILIZE", 0), ("GERMINATE", 1), ("FOSSILIZE", 1)], 2),
        (ISOLATED, [("GERMINATE", 0), ("GERMINATE", 1), ("FOSSILIZE", 0), ("FOSSILIZE", 1)], 11),  # once 0 blends
    ],
    ids=["open", "isolated"],
)
def test_schedule_germinates_in_slot_order_and_fossilises_measured_seeds(rules, order, gap):
    table, schedule = SlotTable.empty(1, 2), Schedule()
    done = []
    for _ in range(60):
        table.grad_health[:] = 1.0
        holding = table.stage == SeedStage.HOLDING
        table.contribution[holding] = table.contribution_se[holding] = table.contribution_age[holding] = 0
        actions = schedule.act(table, legal(table, rules))
        apply(table, actions, rules)
        if actions[0, Head.OP]:
            done.append((Op(actions[0, Head.OP]).name, int(actions[0, Head.SLOT]), int(table.step[0])))
        tick(table, rules)
    assert [(op, slot) for op, slot, _ in done] == order
    assert [step for op, _, step in done if op == "GERMINATE"] == [1, 1 + gap]


def test_schedule_fossilises_before_it_germinates():
    table = SlotTable.empty(1, 2)
    table.stage[0, 0], table.alpha_to[0, 0], table.alpha[0, 0], table.step[:] = SeedStage.HOLDING, 1, 1, 5
    table.contribution[0, 0] = table.contribution_se[0, 0] = table.contribution_age[0, 0] = 0
    table.dwell[0, 0] = 1
    actions = Schedule().act(table, legal(table, Rules()))
    assert actions[0, [Head.OP, Head.SLOT]].tolist() == [Op.FOSSILIZE, 0]


def test_schedule_uses_the_first_blueprint_that_a_slot_takes():
    takes = np.zeros((3, len(BLUEPRINTS)), dtype=bool)
    takes[0, NORM] = takes[1, [NORM, CONV]] = True
    table = SlotTable.empty(3, 3, takes=takes)
    table.step[:] = 1
    table.stage[1, 1] = SeedStage.FOSSILIZED
    free = legal(table, Rules())
    both = Schedule(["conv_light", "norm"]).act(table, free)
    assert both[:, [Head.OP, Head.SLOT, Head.BLUEPRINT]].tolist() == [[1, 0, NORM]] * 3
    one = Schedule(["conv_light"]).act(table, free)
    assert one[0, [Head.OP, Head.SLOT, Head.BLUEPRINT]].tolist() == [1, 1, CONV]
    assert one[1, Head.OP] == Op.WAIT  # its only fitting slot holds a fossil


def test_default_schedule_plants_another_blueprint_where_none_of_its_own_fits():
    takes = np.zeros((2, len(BLUEPRINTS)), dtype=bool)
    takes[1, [NORM, BLUEPRINTS.index("conv_heavy")]] = True
    table = SlotTable.empty(1, 2, takes=takes)
    table.step[:] = 1
    actions = Schedule().act(table, legal(table, Rules()))
    assert actions[0, [Head.OP, Head.SLOT, Head.BLUEPRINT]].tolist() == [Op.GERMINATE, 1, NORM]
    assert Schedule(["conv_light"]).act(table, legal(table, Rules()))[0, Head.OP] == Op.WAIT


def test_schedule_waits_for_its_start():
    table = SlotTable.empty(1, 1)
    for step, op in ((0, Op.WAIT), (1, Op.WAIT), (2, Op.GERMINATE)):
        table.step[:] = step
        assert Schedule(start=2).act(table, legal(table, Rules()))[0, Head.OP] == op


def test_unknown_name_error_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match=r"no controller named 'shedule'. Did you mean 'schedule'\?"):
        make_controller("shedule")
    with pytest.raises(UnknownNameError, match=r"no blueprint named 'conv_lite'. Did you mean 'conv_light'\?"):
        Schedule(["conv_lite"])


def test_schedule_accepts_custom_blueprints_by_index():
    takes = np.ones((1, len(BLUEPRINTS) + 1), dtype=bool)
    table = SlotTable.empty(1, 1, takes=takes)
    table.step[:] = 1
    schedule = Schedule([len(BLUEPRINTS) + 7, len(BLUEPRINTS)])  # the first is not in this table
    assert schedule.act(table, legal(table, Rules()))[0, Head.BLUEPRINT] == len(BLUEPRINTS)
