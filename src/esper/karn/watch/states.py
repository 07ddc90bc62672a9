"""One environment and one slot as last heard of, and how values are taken from outside data.

None means *not measured*; numbers that are not finite stay what they are.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from esper.leyline.stages import COOLING, GROWING, SeedStage
from esper.leyline.text import printable
from esper.nissa.journal import Entry

Number = float | None

HISTORY = 4096
"""Steps of an episode kept per environment."""
OWN_HAPPENINGS = 200
"""Events kept for the list of one environment."""


def number(value: object) -> Number:
    """A measurement, or None for whatever is not one."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def whole(value: object, default: int = 0) -> int:
    n = number(value)
    return default if n is None or not math.isfinite(n) else int(n)


def text(value: object) -> str:
    return printable(value) if isinstance(value, str) else ""


def items(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def numbers(value: object) -> dict[str, Number]:
    """Named measurements."""
    return {str(k): number(v) for k, v in value.items()} if isinstance(value, dict) else {}


def stage_number(name: object) -> int:
    """A stage by its name as events write it; an unknown one counts as empty."""
    stage = SeedStage.__members__.get(text(name).upper())
    return int(SeedStage.DORMANT if stage is None else stage)


@dataclass(slots=True)
class SlotState:
    """One slot of one environment as last heard of."""

    name: str
    stage: int = int(SeedStage.DORMANT)
    since: int = 0  # the step at which this stage began
    blueprint: str = ""
    alpha: Number = None
    health: Number = None
    ratio: Number = None
    worth: dict[str, Number] = field(default_factory=dict)  # by the names of the `worth` event
    worth_step: int | None = None

    @property
    def is_growing(self) -> bool:
        return self.stage in GROWING

    def enter(self, stage: int, step: int) -> None:
        """Begin a stage. A new seed, or none, has not been measured."""
        if stage == self.stage:
            return
        if stage in (SeedStage.DORMANT, SeedStage.GERMINATED, *COOLING):
            self.health = self.ratio = self.worth_step = None
            self.worth = {}
        self.stage, self.since = stage, step


@dataclass(slots=True)
class EnvState:
    """One environment: the episode that runs now, or the last one."""

    index: int
    name: str
    slots: list[SlotState]
    episode: int | None = None
    episodes: int = 0  # begun so far, this one included
    has_ended: bool = False
    step: int = 0
    op: str = ""
    act: str = ""  # the last op that was not WAIT
    act_slot: str = ""
    act_step: int = 0
    is_forced: bool | None = None  # whether the decision now pending had one legal op; None: nobody said
    quality: Number = None
    committed_quality: Number = None
    best: Number = None
    best_step: int = 0
    train_loss: Number = None
    val_loss: Number = None
    reward: Number = None
    params: int | None = None
    governed_step: int | None = None
    qualities: deque[Number] = field(default_factory=lambda: deque(maxlen=HISTORY))
    stages: deque[bytes] = field(default_factory=lambda: deque(maxlen=HISTORY))  # per step, one byte per slot
    happenings: deque[Entry] = field(default_factory=lambda: deque(maxlen=OWN_HAPPENINGS))

    @property
    def growing(self) -> int:
        return sum(s.is_growing for s in self.slots)

    @property
    def fossils(self) -> int:
        return sum(s.stage == SeedStage.FOSSILIZED for s in self.slots)

    @property
    def broken(self) -> list[str]:
        """Which of its measurements are not finite."""
        values = {"train loss": self.train_loss, "validation loss": self.val_loss, "quality": self.quality}
        return [name for name, v in values.items() if v is not None and not math.isfinite(v)]

    def begin(self, episode: int) -> None:
        """A new episode forgets the one before."""
        if episode == self.episode:
            return
        self.episode, self.episodes = episode, self.episodes + 1
        self.has_ended, self.step, self.op, self.act, self.act_slot, self.act_step = False, 0, "", "", "", 0
        self.quality = self.committed_quality = self.best = self.train_loss = self.val_loss = self.reward = None
        self.best_step, self.params, self.governed_step, self.is_forced = 0, None, None, None
        self.qualities.clear()
        self.stages.clear()
        self.slots = [SlotState(s.name) for s in self.slots]
