"""What a reward may look at, how it is configured, and the table of modes.

Legend: E environments, S slots, B blueprints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import numpy as np

from esper.leyline.costs import Priced, live_costs, seed_macs
from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import SeedStage

S = SeedStage


class Sizes(Priced, Protocol):
    """The part of an observation's context that a reward needs."""

    @property
    def horizon(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything a reward may read of E environments at one moment. A copy: the table moves on."""

    step: Ints  # [E]
    quality: Floats  # [E]
    twin_quality: Floats  # [E] of the no-growth twin at the same step
    committed_quality: Floats  # [E] with every live seed off
    params: Floats  # [E] host, fossils and growing seeds
    macs: Floats  # [E] host and all seeds that have a say
    committed_params: Floats  # [E] host and fossils
    committed_macs: Floats
    stage: Ints  # [E, S]
    contribution: Floats  # [E, S]
    rollbacks: Ints  # [E] so far; after one more, the frame shows what the governor restored
    host_params: float
    host_macs: float
    horizon: int

    @classmethod
    def of(cls, table: SlotTable, sizes: Sizes, twin_quality: Floats) -> Frame:
        fossil = table.stage == S.FOSSILIZED
        params, macs = live_costs(table, sizes)
        committed_params = np.where(fossil, table.params, 0).sum(axis=1)
        committed_macs = np.where(fossil, seed_macs(table, sizes.slot_macs), 0).sum(axis=1)
        return cls(
            step=table.step.copy(),
            quality=table.quality.astype(np.float64),
            twin_quality=np.array(twin_quality, np.float64),
            committed_quality=table.committed_quality.astype(np.float64),
            params=params.astype(np.float64),
            macs=macs.astype(np.float64),
            committed_params=(sizes.host_params + committed_params).astype(np.float64),
            committed_macs=(sizes.host_macs + committed_macs).astype(np.float64),
            stage=table.stage.copy(),
            contribution=table.contribution.astype(np.float64),
            rollbacks=table.rollbacks.copy(),
            host_params=float(sizes.host_params),
            host_macs=float(sizes.host_macs),
            horizon=sizes.horizon,
        )

    def measured(self, quality: Floats, params: Floats, macs: Floats) -> Frame:
        """The same moment with another network's quality and size."""
        return replace(self, quality=quality, params=params, macs=macs)

    @property
    def crashed(self) -> Bools:
        """[E] an epoch was trained and its quality is no number. Before the first epoch nothing is measured."""
        return np.asarray((self.step > 0) & ~np.isfinite(self.quality))

    @property
    def ended(self) -> Bools:
        """[E] the horizon is reached: a true end."""
        return np.asarray(self.step >= self.horizon)


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How steps are paid. Qualities are fractions (accuracy 0…1), so 0.01 is a point."""

    mode: str = "utility"
    """Which function pays: a name in `REWARDS`."""
    scale: float = 1.0
    """Multiplies every reward."""
    rent_params: float = 0.005
    """Paid per doubling of the host's parameters."""
    rent_macs: float = 0.005
    """Paid per doubling of the host's multiply-adds."""
    rollback_penalty: float = 0.1
    """Paid when the governor had to undo a step."""
    worst_quality: float = 0.0
    """Stands in for a twin's quality that is no number."""
    floor: float = -1.0
    """The least utility. A crashed host has it and no sound one less, so a crash never pays, however bad the host
    was before. Accuracies differ by at most 1; set it lower for a quality with a wider range."""
    gamma: float = 0.995
    """`shaped` only: the learner's discount, without which its potential would not cancel out."""
    stage_bonus: float = 0.003
    """`shaped` only: what one unit of a stage's potential is worth."""
    terminal_weight: float = 0.05
    """`shaped` only: of the final gain in quality."""

    def __post_init__(self) -> None:
        if self.mode not in REWARDS:
            raise unknown_name("reward mode", self.mode, REWARDS)
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, float) and not np.isfinite(value):
                raise ConfigError(f"reward.{name} must be a finite number, got {value}")
        for name in ("rent_params", "rent_macs", "rollback_penalty", "stage_bonus", "terminal_weight"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"reward.{name} must be ≥ 0, got {getattr(self, name)}")
        if not self.scale > 0:
            raise ConfigError(f"reward.scale must be > 0, got {self.scale}")
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"reward.gamma must lie in (0, 1], got {self.gamma}")
        if not -np.inf < self.floor <= 0:
            raise ConfigError(f"reward.floor must be finite and ≤ 0, got {self.floor}")


Mode = Callable[[Frame, Frame, RewardConfig], Floats]
REWARDS: dict[str, Mode] = {}


def reward_mode(name: str) -> Callable[[Mode], Mode]:
    """Register a mode: a pure function (before, after, config) → rewards [E], never NaN, before `scale`."""

    def register(mode: Mode) -> Mode:
        REWARDS[name] = mode
        return mode

    return register


def reward(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """What the step from `before` to `after` pays in the configured mode, [E].

    A step that the governor undid ends in the restored state, so it pays for coming to that state, minus the penalty.
    """
    undone = after.rollbacks > before.rollbacks
    return np.asarray(config.scale * (REWARDS[config.mode](before, after, config) - config.rollback_penalty * undone))
