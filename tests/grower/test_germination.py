"""Test the messages about seeds that cannot be planted, or are planted too late."""

from __future__ import annotations

from esper.grower.explanations import late_planting, planting_obstacle
from esper.leyline.lifecycle import Rules
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage

Stage = SeedStage


def table_with(stage: SeedStage) -> SlotTable:
    table = SlotTable.empty(1, 2)
    table.stage[0, 0] = stage
    return table


def test_planting_obstacle_names_the_rule():
    names = ("a", "b")
    assert planting_obstacle(table_with(Stage.DORMANT), Rules(), names) == ""
    assert "'a' is still TRAINING" in planting_obstacle(table_with(Stage.TRAINING), Rules(), names)
    full = table_with(Stage.HOLDING)
    assert "rules.max_seeds" in planting_obstacle(full, Rules(max_seeds=1), names)
    full.stage[:] = Stage.FOSSILIZED
    assert planting_obstacle(full, Rules(), names) == "no slot is empty"
    fits_nothing = SlotTable.empty(1, 2)
    fits_nothing.takes[:] = False
    assert planting_obstacle(fits_nothing, Rules(), names) == "no blueprint fits 'a'"


def test_late_planting_warns_below_the_mixing_time_only():
    assert late_planting(["a"], 100, 100) == ""
    assert late_planting([], 0, 100) == ""
    text = late_planting(["a", "b"], 99, 100)
    assert text.startswith("'a', 'b': planted at most 99 optimiser steps before the end of training.")
    assert "about 100" in text
