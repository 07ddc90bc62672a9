"""Controllers that ignore results: `Wait` never grows, `Schedule` grows at fixed times, `Random` acts at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from esper.leyline.actions import BLUEPRINTS, HEAD_OPTIONS, NUM_HEADS, Head, Op
from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable

PREFERRED = ("conv_light", "mlp_small", "lora")
"""Default blueprints of the schedule: the first one that fits a slot is planted, another one if none of them does."""
_DEFAULTS = np.zeros(NUM_HEADS, dtype=np.int64)
for _head, _option in (
    (Head.STYLE, "SIGMOID_ADD"), (Head.TEMPO, "STANDARD"), (Head.ALPHA_TARGET, "FULL"), (Head.ALPHA_SPEED, "MEDIUM"),
):  # fmt: skip
    _DEFAULTS[_head] = (HEAD_OPTIONS[_head] or ()).index(_option)


def wait_everywhere(envs: int) -> Ints:
    """Return action rows [E, 8] that do nothing. The other heads have their default options."""
    return np.tile(_DEFAULTS, (envs, 1))


class Wait:
    """Controller that never grows anything."""

    def act(self, table: SlotTable, _legal: Bools) -> Ints:
        """Return WAIT for every environment."""
        return wait_everywhere(table.num_envs)

    def why_waiting(self, _table: SlotTable) -> str:
        """Return why the controller plants nothing."""
        return "the controller 'none' never plants. Plant by hand, or choose another controller"


class Schedule:
    """Controller that plants in one slot after another as soon as the rules allow, and commits measured seeds.

    blueprints  what to plant, in order of preference: built-in names, or numbers (`blueprint_index` for your own); None
                for `PREFERRED` and, in slots that take none of these, the first one that they take
    start       first step at which to plant
    slots       number of slots to use, from `first` on; None for all
    first       number of the first slot to use; below 0 it is counted from the last slot, −1
    plan        number of the blueprint of each slot to use, by the slot's number, instead of `blueprints` and `slots`
    """

    def __init__(
        self,
        blueprints: Sequence[str | int] | None = None,
        *,
        start: int = 1,
        slots: int | None = None,
        first: int = 0,
        plan: Mapping[int, int] | None = None,
    ) -> None:
        names = PREFERRED if blueprints is None else blueprints
        for name in names:
            if isinstance(name, str) and name not in BLUEPRINTS:
                raise unknown_name("blueprint", name, BLUEPRINTS)
        self.preferred = [BLUEPRINTS.index(b) if isinstance(b, str) else b for b in names]
        self.plants_any = blueprints is None
        self.start = start
        self.slots = slots
        self.first = first
        self.plan = plan

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8]: commit if it is legal, otherwise plant if it is legal, otherwise wait."""
        actions = wait_everywhere(table.num_envs)
        choice = self._choice(table)  # [S]
        may_plant = legal[:, Op.GERMINATE] & (choice >= 0) & (table.step[:, None] >= self.start)
        for op, legal_slots in ((Op.GERMINATE, may_plant), (Op.FOSSILIZE, legal[:, Op.FOSSILIZE])):
            envs = legal_slots.any(axis=1)
            actions[envs, Head.OP] = op
            actions[envs, Head.SLOT] = legal_slots.argmax(axis=1)[envs]
        actions[:, Head.BLUEPRINT] = np.maximum(choice[actions[:, Head.SLOT]], 0)
        return actions

    def why_waiting(self, table: SlotTable) -> str:
        """Return which condition for planting environment 0 does not meet; empty if it meets all."""
        if table.step[0] < self.start:
            return f"the schedule plants from epoch {self.start} on (start)"
        if self.plan is not None and not self.plan:
            return "the plan is empty. Name at least one slot and its blueprint, or use controller='schedule'"
        if not (self._choice(table) >= 0).any():
            count = "all" if self.slots is None else str(self.slots)
            return f"none of the schedule's blueprints fits a slot that it uses ({count} of {table.num_slots})"
        return ""

    def _choice(self, table: SlotTable) -> Ints:
        """Return the blueprint for each slot [S]; −1 if none of the preferred ones fits."""
        choice = np.full(table.num_slots, -1)
        if self.plan is not None:
            choice[list(self.plan)] = list(self.plan.values())
            return choice
        if self.plants_any:
            choice = np.where(table.takes.any(axis=1), table.takes.argmax(axis=1), -1)
        for b in reversed([b for b in self.preferred if b < table.takes.shape[1]]):
            choice[table.takes[:, b]] = b
        first = self.first if self.first >= 0 else max(0, table.num_slots + self.first)
        choice[:first] = -1
        if self.slots is not None:
            choice[first + self.slots :] = -1
        return choice


class Random:
    """Chooses an operation uniformly among the legal ones, then a slot, then the other heads."""

    def __init__(self, rng_seed: int = 0) -> None:
        self.rng_seed = rng_seed
        self.rng = np.random.default_rng(rng_seed)
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
