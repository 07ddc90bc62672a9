"""Inputs and settings of rewards, the registry of modes, and the default mode `utility`.

    U = (quality − baseline's quality) − rent on parameters, multiply-adds and training compute,   r = U′ − U

The return telescopes. With discount γ over T steps, Σ γᵗ rₜ = (1 − γ) Σ γᵗ⁻¹ Uₜ + γᵀ⁻¹ U_T − U₀ (sum over t = 1…T−1):
the discounted mean of U plus its final value. A cycle of states earns nothing beyond the U held meanwhile.

Legend: E environments, S slots, B blueprints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import numpy as np

from esper.leyline.actions import Op
from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.slot_table import Bools, Floats, Ints, Priced, SlotTable, live_costs, seed_macs
from esper.leyline.stages import SeedStage

Stage = SeedStage


class Sizes(Priced, Protocol):
    """The part of an observation's context that a reward needs."""

    @property
    def horizon(self) -> int:
        """Steps per episode."""
        ...

    @property
    def loss_unit(self) -> float:
        """Loss of guessing, or 1 if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything a reward may read of E environments at one step.

    A copy: later changes of the table do not affect it.
    """

    step: Ints  # [E]
    quality: Floats  # [E]
    baseline_quality: Floats  # [E] of the no-growth baseline at the same step
    committed_quality: Floats  # [E] with every uncommitted seed off
    params: Floats  # [E] host, fossils and growing seeds
    macs: Floats  # [E] host and all seeds that affect the output
    committed_params: Floats  # [E] host and fossils
    committed_macs: Floats
    train_ratio: Floats  # [E] training multiply-adds so far, relative to those of the host alone; 1 before the first
    val_loss: Floats  # [E]
    acted: Bools  # [E] whether the last operation was carried out and was not WAIT
    stage: Ints  # [E, S]
    dwell: Ints  # [E, S] epochs in this stage
    contribution: Floats  # [E, S]
    rollbacks: Ints  # [E] so far; after a rollback, the frame shows the restored state
    host_params: float
    host_macs: float
    chance_loss: float
    horizon: int

    @classmethod
    def of(cls, table: SlotTable, sizes: Sizes, baseline_quality: Floats) -> Frame:
        """Return the current state of a table's environments, given the quality [E] of their no-growth baselines."""
        fossil = table.stage == Stage.FOSSILIZED
        params, macs = live_costs(table, sizes)
        committed_params = np.where(fossil, table.params, 0).sum(axis=1)
        committed_macs = np.where(fossil, seed_macs(table, sizes.slot_macs), 0).sum(axis=1)
        return cls(
            step=table.step.copy(),
            quality=table.quality.astype(np.float64),
            baseline_quality=np.array(baseline_quality, np.float64),
            committed_quality=table.committed_quality.astype(np.float64),
            params=params.astype(np.float64),
            macs=macs.astype(np.float64),
            committed_params=(sizes.host_params + committed_params).astype(np.float64),
            committed_macs=(sizes.host_macs + committed_macs).astype(np.float64),
            train_ratio=np.maximum(table.train_macs, 1) / np.maximum(table.host_train_macs, 1),
            val_loss=table.val_loss.astype(np.float64),
            acted=table.last_op != Op.WAIT,
            stage=table.stage.copy(),
            dwell=table.dwell.copy(),
            contribution=table.contribution.astype(np.float64),
            rollbacks=table.rollbacks.copy(),
            host_params=float(sizes.host_params),
            host_macs=float(sizes.host_macs),
            chance_loss=sizes.loss_unit,
            horizon=sizes.horizon,
        )

    def measured(self, quality: Floats, params: Floats, macs: Floats) -> Frame:
        """Return a copy with another network's quality and size."""
        return replace(self, quality=quality, params=params, macs=macs)

    @property
    def crashed(self) -> Bools:
        """[E] whether an epoch was trained and its quality is not finite.

        Nothing is measured before the first epoch.
        """
        return np.asarray((self.step > 0) & ~np.isfinite(self.quality))

    @property
    def ended(self) -> Bools:
        """[E] whether the horizon is reached, which is a true end."""
        return np.asarray(self.step >= self.horizon)


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the reward. Qualities are fractions (accuracy 0 to 1), so 0.01 is one percentage point."""

    mode: str = "utility"
    """Rewards are computed by the function of this name, a key of `REWARDS`."""
    scale: float = 1.0
    """Every reward is multiplied by this factor, above 0."""
    rent_params: float = 0.005
    """This quality, ≥ 0, is charged per doubling of the host's parameters."""
    rent_macs: float = 0.005
    """This quality, ≥ 0, is charged per doubling of the host's multiply-adds."""
    rent_training: float = 0.0
    """This quality, ≥ 0, is charged per doubling of the training multiply-adds so far, relative to those of the host
    without growth. A seed that is planted later costs less."""
    rollback_penalty: float = 0.1
    """This reward, ≥ 0, is subtracted for every step that the governor rolled back."""
    worst_quality: float = 0.0
    """This quality, any finite number, replaces the quality of a no-growth baseline that is not finite."""
    floor: float = -1.0
    """Utility is at least this value, ≤ 0. A crashed host gets exactly this value and no other host gets less, so a
    crash never pays, however bad the host was before. Accuracies differ by at most 1; use a lower floor for a quality
    with a wider range."""
    gamma: float = 0.995
    """The stage potential is discounted by this factor, above 0 and at most 1, in the modes of `WITH_POTENTIAL` only.
    It must equal `ppo.gamma`."""
    stage_bonus: float = 0.003
    """The same modes pay this reward, ≥ 0, per unit of a stage's potential."""
    terminal_weight: float = 0.05
    """The final gain in quality has this weight, ≥ 0, in the modes shaped, basic, basic_plus and loss."""

    def __post_init__(self) -> None:
        if self.mode not in REWARDS:
            raise unknown_name("reward mode", self.mode, REWARDS)
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, float) and not np.isfinite(value):
                raise ConfigError(f"reward.{name} must be a finite number, got {value}")
        for name in ("rent_params", "rent_macs", "rent_training", "rollback_penalty", "stage_bonus", "terminal_weight"):
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
WITH_POTENTIAL: set[str] = set()
"""Modes that pay for progress through the stages."""


def reward_mode(name: str, *, uses_potential: bool = False) -> Callable[[Mode], Mode]:
    """Register a mode: a pure function (before, after, config) → rewards [E], never NaN, before `scale`.

    `uses_potential` states that it pays for progress through the stages, with `config.gamma`.
    """

    def register(mode: Mode) -> Mode:
        REWARDS[name] = mode
        if uses_potential:
            WITH_POTENTIAL.add(name)
        return mode

    return register


def reward(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return the rewards [E] of the step from `before` to `after` in the configured mode.

    A rolled-back step ends in the restored state: its reward is that of reaching this state, minus the penalty.
    """
    undone = after.rollbacks > before.rollbacks
    return np.asarray(config.scale * (REWARDS[config.mode](before, after, config) - config.rollback_penalty * undone))


def rent(params: Floats, macs: Floats, frame: Frame, config: RewardConfig) -> Floats:
    """Return the rent [E] of a network of this size, proportional to doublings of the host's size and compute."""
    ratios = params / max(frame.host_params, 1.0), macs / max(frame.host_macs, 1.0), frame.train_ratio
    size, speed, training = map(np.log2, ratios)
    return np.asarray(config.rent_params * size + config.rent_macs * speed + config.rent_training * training)


def gain(quality: Floats, frame: Frame, config: RewardConfig) -> Floats:
    """Return the quality above the no-growth baseline, [E]; 0 before the first epoch, when both networks are equal."""
    baseline = np.where(np.isfinite(frame.baseline_quality), frame.baseline_quality, config.worst_quality)
    return np.where(frame.step == 0, 0.0, quality - baseline)


def bounded(value: Floats, frame: Frame, config: RewardConfig) -> Floats:
    """Return `value`, clipped from below at the floor; the floor for crashed hosts."""
    return np.where(frame.crashed, config.floor, np.fmax(value, config.floor))


def utility(frame: Frame, config: RewardConfig) -> Floats:
    """Return U [E], before `scale`."""
    value = gain(frame.quality, frame, config) - rent(frame.params, frame.macs, frame, config)
    return bounded(value, frame, config)


@reward_mode("utility")
def change_of_utility(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return U′ − U [E]."""
    return np.asarray(utility(after, config) - utility(before, config))
