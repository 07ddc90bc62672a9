"""A controller that germinates nothing reports the condition that prevents it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.grower.explanations import why_nothing_was_planted
from esper.leyline.lifecycle import Rules
from esper.leyline.slot_table import SlotTable
from esper.tamiyo.controllers import Heuristic, Random, Schedule, Wait, wait_everywhere
from tests.support.rules import ISOLATED

NAMES = ("a", "b")


def table_at(epoch: int, *, quality: list[float] | None = None, loss: list[float] | None = None) -> SlotTable:
    """Return a table without seeds after so many epochs, with the end of its histories."""
    table = SlotTable.empty(1, 2)
    table.step[:] = epoch
    for history, values in ((table.quality_history, quality), (table.loss_history, loss)):
        if values:
            history[0, -len(values) :] = values
    if loss:
        table.val_loss[:] = loss[-1]
    return table


class WaitOnly:
    def act(self, table, _legal):
        return wait_everywhere(table.num_envs)


CASES = {
    "none": (Wait(), table_at(3), "Nothing was planted in 3 epochs: the controller 'none' never plants"),
    "one epoch": (Wait(), table_at(1), "Nothing was planted in 1 epoch: "),
    "schedule, start": (Schedule(start=9), table_at(3), "plants from epoch 9 on (start)"),
    "schedule, slots": (
        Schedule(slots=0),
        table_at(3),
        "none of the schedule's blueprints fits a slot that it uses (0",
    ),
    "random": (Random(), table_at(3), "has not drawn GERMINATE"),
    "own controller": (
        WaitOnly(),
        table_at(3),
        "the controller WaitOnly did not choose to plant, which the rules allow",
    ),
    "heuristic, early": (Heuristic(), table_at(3), "plants from epoch 5 on (first_epoch)"),
    "heuristic, unmeasured": (Heuristic(), table_at(9), "give grower.step() validation batches"),
    "heuristic, improving": (
        Heuristic(),
        table_at(9, quality=[0.5, 0.6, 0.7, 0.8]),
        "the best of the last 3 epochs, 0.8, is 0.3 above the best before, 0.5; the heuristic plants once that is "
        "below 0.005 (plateau_gain)",
    ),
    "heuristic, unsettled": (
        Heuristic(),
        table_at(9, quality=[0.5] * 4, loss=[4.0, 3.0, 2.0, 1.0]),
        "the validation loss changes by -5% to +3% (settled_band) in 3 epochs in a row (settled_epochs); the latest "
        "change was -50.0%",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_note_names_the_condition_and_its_threshold(case):
    controller, table, text = CASES[case]
    controller.act(table, np.ones((1, 6, 2), dtype=bool))
    assert text in why_nothing_was_planted(controller, table, Rules(), NAMES)


def test_note_names_the_rule_that_forbids_germination():
    table = table_at(3)
    table.takes[:] = False
    assert "no blueprint fits 'a'" in why_nothing_was_planted(Schedule(), table, Rules(), NAMES)


def test_note_is_empty_once_a_seed_was_germinated():
    table = table_at(3)
    table.next_serial[:] = 1
    assert why_nothing_was_planted(Wait(), table, Rules(), NAMES) == ""


def test_print_grower_shows_the_note_and_the_reason_each_seed_waits():
    body = esper.graft(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)), at=["1"], probe=torch.randn(3, 6))
    grower = esper.Grower(body, torch.optim.SGD(body.parameters(), lr=0.1), controller="heuristic", rules=ISOLATED)
    assert "Nothing was planted" not in repr(grower)
    grower.step()
    note = "Nothing was planted in 1 epoch: the heuristic plants from epoch 5 on (first_epoch)."
    assert note in " ".join(repr(grower).split())
    grower.germinate("1", "lora")
    grower.step()
    assert "Nothing was planted" not in repr(grower)
    assert "waits: it has been TRAINING for 1 of 10 epochs (thresholds.blend_dwell)" in " ".join(repr(grower).split())
