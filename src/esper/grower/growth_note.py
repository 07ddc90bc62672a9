"""Explains why a controller planted nothing, in one sentence for `print(grower)` and the end of `esper grow`."""

from __future__ import annotations

from collections.abc import Sequence

from esper.kasmina.gate_reasons import planting_obstacle
from esper.kasmina.lifecycle import Rules
from esper.leyline.slot_table import SlotTable
from esper.tamiyo.controllers import Controller, ExplainsWaiting


def why_nothing_was_planted(controller: Controller, table: SlotTable, rules: Rules, names: Sequence[str]) -> str:
    """Return why environment 0 has never had a seed; empty once one was planted.

    Either the rules do not allow germination, or the controller waits and states its condition and threshold.
    """
    if table.next_serial[0] > 0:
        return ""
    epochs = int(table.step[0])
    reason = planting_obstacle(table, rules, names)
    if not reason and isinstance(controller, ExplainsWaiting):
        reason = controller.why_waiting(table)
    if not reason:
        reason = f"the controller {type(controller).__name__} did not choose to plant, which the rules allow"
    return f"Nothing was planted in {epochs} epoch{'s' * (epochs != 1)}: {reason}."
