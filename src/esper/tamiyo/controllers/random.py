"""A controller that does anything the rules allow: the floor that others must beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from esper.leyline.actions import HEAD_OPTIONS, Head
from esper.leyline.errors import ConfigError
from esper.leyline.slot_table import Bools, Ints, SlotTable
from esper.tamiyo.controllers.schedule import wait_everywhere


class Random:
    """An operation uniformly among those that are legal, then a slot, then the other heads."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        envs = table.num_envs
        actions = wait_everywhere(envs)
        op = _pick(np.asarray(legal.any(axis=2)), self.rng)
        slot = _pick(legal[np.arange(envs), op], self.rng)
        actions[:, Head.OP], actions[:, Head.SLOT] = op, slot
        actions[:, Head.BLUEPRINT] = _pick(table.takes[slot], self.rng)
        for head in (Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE):
            actions[:, head] = self.rng.integers(0, len(HEAD_OPTIONS[head] or ()), envs)
        return actions

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rng = np.random.default_rng()
        try:
            rng.bit_generator.state = state["rng"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no state of a random controller: {error!r}") from error
        self.rng = rng


def _pick(allowed: Bools, rng: np.random.Generator) -> Ints:
    """One allowed column per row, uniformly; 0 where none is."""
    draw = np.where(allowed, rng.random(allowed.shape), -1.0)
    return np.asarray(draw.argmax(axis=1))
