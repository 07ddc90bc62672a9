"""Controller that chooses random legal actions: a lower bound for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from esper.leyline.actions import HEAD_OPTIONS, Head
from esper.leyline.errors import ConfigError
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.tamiyo.controllers.schedule import wait_everywhere


class Random:
    """Chooses an operation uniformly among the legal ones, then a slot, then the other heads."""

    def __init__(self, rng_seed: int = 0) -> None:
        self.rng_seed, self.rng = rng_seed, np.random.default_rng(rng_seed)
        self.rngs: list[np.random.Generator] | None = None  # one per environment, after `bind`

    def bind(self, worlds: Sequence[int]) -> None:
        """Seed one generator per world, so that actions do not depend on which other worlds run alongside."""
        self.rngs = [np.random.default_rng([self.rng_seed, world]) for world in worlds]

    def _uniform(self, envs: int, count: int) -> Floats:
        """Return random numbers in [0, 1), [E, count]."""
        if self.rngs is None:
            return self.rng.random((envs, count))
        return np.stack([rng.random(count) for rng in self.rngs])

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return random legal actions [E, 8]."""
        envs = table.num_envs
        actions = wait_everywhere(envs)
        op = self._pick(np.asarray(legal.any(axis=2)))
        slot = self._pick(legal[np.arange(envs), op])
        actions[:, Head.OP], actions[:, Head.SLOT] = op, slot
        actions[:, Head.BLUEPRINT] = self._pick(table.takes[slot])
        rest = [Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE]
        actions[:, rest] = self._uniform(envs, len(rest)) * [len(HEAD_OPTIONS[head] or ()) for head in rest]
        return actions

    def why_waiting(self, _table: SlotTable) -> str:
        """Return why the controller has planted nothing."""
        return "the random controller has not drawn GERMINATE yet; it draws one of the legal operations per epoch"

    def _pick(self, allowed: Bools) -> Ints:
        """Return a random allowed column per row; 0 where none is allowed."""
        return np.asarray(np.where(allowed, self._uniform(*allowed.shape), -1.0).argmax(axis=1))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the shared generator."""
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`. Raise ConfigError if it is invalid."""
        rng = np.random.default_rng()
        try:
            rng.bit_generator.state = state["rng"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the state is not one of a random controller: {error!r}") from error
        self.rng = rng
