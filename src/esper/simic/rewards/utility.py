"""Default reward: change of utility, which is quality above the no-growth baseline minus rent.

    U = (quality − baseline's quality) − rent on parameters − rent on multiply-adds,   r = U′ − U

The return telescopes. With discount γ over T steps, Σ γᵗ rₜ = (1 − γ) Σ γᵗ⁻¹ Uₜ + γᵀ⁻¹ U_T − U₀ (sum over t = 1…T−1):
the discounted mean of U plus its final value. A cycle of states earns nothing beyond the U held meanwhile.
"""

from __future__ import annotations

import numpy as np

from esper.leyline.slot_table import Floats
from esper.simic.rewards.frame import Frame, RewardConfig, reward_mode


def rent(params: Floats, macs: Floats, frame: Frame, config: RewardConfig) -> Floats:
    """Return the rent [E] of a network of this size, proportional to doublings of the host's size."""
    doublings = np.log2(params / max(frame.host_params, 1.0)), np.log2(macs / max(frame.host_macs, 1.0))
    return np.asarray(config.rent_params * doublings[0] + config.rent_macs * doublings[1])


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
