"""Latest state of one environment and one slot, and conversion of values from external data.

None means *not measured*; values that are not finite are kept.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from esper.leyline.stages import COOLING, GROWING, SeedStage
from esper.leyline.text import printable
from esper.nissa.journal_reader import Entry

Number = float | None

HISTORY = 4096
"""Maximum number of steps of an episode kept per environment."""
OWN_HAPPENINGS = 200
"""Maximum number of events kept for the list of one environment."""


def number(value: object) -> Number:
    """Return the value as a float, None if it is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def whole(value: object, default: int = 0) -> int:
    """Return the value as an int, `default` if it is not a finite number."""
    n = number(value)
    return default if n is None or not math.isfinite(n) else int(n)


def text(value: object) -> str:
    """Return the value as printable text, "" if it is not a string."""
    return printable(value) if isinstance(value, str) else ""


def items(value: object) -> list[Any]:
    """Return the value as a list, empty if it is not a list or tuple."""
    return list(value) if isinstance(value, list | tuple) else []


def numbers(value: object) -> dict[str, Number]:
    """Return a dict of numbers, empty if the value is not a dict."""
    return {str(k): number(v) for k, v in value.items()} if isinstance(value, dict) else {}


def stage_number(name: object) -> int:
    """Return the stage of this name. An unknown name counts as DORMANT."""
    stage = SeedStage.__members__.get(text(name).upper())
    return int(SeedStage.DORMANT if stage is None else stage)


@dataclass(slots=True)
class SlotState:
    """Latest state of one slot of one environment."""

    name: str
    stage: int = int(SeedStage.DORMANT)
    since: int = 0  # the step at which this stage began
    blueprint: str = ""
    alpha: Number = None
    health: Number = None
    ratio: Number = None
    worth: dict[str, Number] = field(default_factory=dict)  # by the field names of the `worth` event
    worth_step: int | None = None

    @property
    def is_growing(self) -> bool:
        """Whether the slot has a seed that is still growing."""
        return self.stage in GROWING

    def enter(self, stage: int, step: int) -> None:
        """Begin a stage. Measurements are reset if the seed is new or gone."""
        if stage == self.stage:
            return
        if stage in (SeedStage.DORMANT, SeedStage.GERMINATED, *COOLING):
            self.health = self.ratio = self.worth_step = None
            self.worth = {}
        self.stage, self.since = stage, step


@dataclass(slots=True)
class EnvState:
    """One environment: its current or last episode."""

    index: int
    name: str
    slots: list[SlotState]
    episode: int | None = None
    episodes: int = 0  # number of episodes begun
    has_ended: bool = False
    step: int = 0
    op: str = ""
    act: str = ""  # the last op that was not WAIT
    act_slot: str = ""
    act_step: int = 0
    is_forced: bool | None = None  # whether the pending decision has only one legal op; None: not recorded
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
        """Number of growing seeds."""
        return sum(s.is_growing for s in self.slots)

    @property
    def fossils(self) -> int:
        """Number of fossilised seeds."""
        return sum(s.stage == SeedStage.FOSSILIZED for s in self.slots)

    @property
    def broken(self) -> list[str]:
        """Names of the measurements that are not finite."""
        values = {"train loss": self.train_loss, "validation loss": self.val_loss, "quality": self.quality}
        return [name for name, v in values.items() if v is not None and not math.isfinite(v)]

    def begin(self, episode: int) -> None:
        """Reset the state for a new episode."""
        if episode == self.episode:
            return
        self.episode, self.episodes = episode, self.episodes + 1
        self.has_ended, self.step, self.op, self.act, self.act_slot, self.act_step = False, 0, "", "", "", 0
        self.quality = self.committed_quality = self.best = self.train_loss = self.val_loss = self.reward = None
        self.best_step, self.params, self.governed_step, self.is_forced = 0, None, None, None
        self.qualities.clear()
        self.stages.clear()
        self.slots = [SlotState(s.name) for s in self.slots]
