"""A controller for tests of training libraries."""

from __future__ import annotations

from typing import Any

from esper.kasmina.blueprints import blueprint_index
from esper.leyline.actions import Head, Op
from esper.leyline.slot_table import Bools, Ints, SlotTable
from esper.tamiyo.controllers import wait_everywhere


class Planter:
    """Plant a seed in slot i at the call number `calls[i]`, else wait. It has state, which checkpoints must hold."""

    def __init__(self, calls: tuple[int, ...] = (1, 2)) -> None:
        self.plan, self.calls = calls, 0

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return the action of the next call."""
        actions = wait_everywhere(1)
        self.calls += 1
        if self.calls in self.plan:
            slot = self.plan.index(self.calls)
            assert legal[0, Op.GERMINATE, slot]
            name = "lora" if table.takes[slot, blueprint_index("lora")] else "conv_light"
            actions[0, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = Op.GERMINATE, slot, blueprint_index(name)
        return actions

    def state_dict(self) -> dict[str, Any]:
        """Return the number of calls."""
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the number of calls."""
        self.calls = state["calls"]
