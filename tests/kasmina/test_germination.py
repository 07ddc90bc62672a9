"""Test the reason why no seed can be planted."""

from __future__ import annotations

from esper.kasmina.germination import planting_obstacle
from esper.kasmina.lifecycle import Rules
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage

S = SeedStage


def table_with(stage: SeedStage) -> SlotTable:
    table = SlotTable.empty(1, 2)
    table.stage[0, 0] = stage
    return table


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
