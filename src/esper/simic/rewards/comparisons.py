"""Reward modes of the earlier system, for comparison, with their known defects corrected.

Corrected in both: they read the whole environment, not only the slot that was acted on; qualities come from the one
shared validation split; sizes are relative to the host, not to a constant; rejected operations earn nothing, because
rewards depend on states only.
"""

from __future__ import annotations

import numpy as np

from esper.leyline.slot_table import Floats
from esper.leyline.stages import NUM_STAGES, SeedStage
from esper.simic.rewards.frame import Frame, RewardConfig, reward_mode
from esper.simic.rewards.utility import bounded, gain, rent

S = SeedStage
STAGE_POTENTIAL = np.zeros(NUM_STAGES)
STAGE_POTENTIAL[[S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING, S.FOSSILIZED]] = 1.0, 2.0, 3.5, 5.5, 6.0
_HAS_SAY = np.isin(np.arange(NUM_STAGES), (S.BLENDING, S.HOLDING, S.FOSSILIZED))


@reward_mode("shaped")
def shaped(before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return a dense reward: measured contributions, progress through the stages, rent, and a share of the final gain.

    Contributions and rent are paid as differences, so a seed is paid for once and loses everything when it is
    pruned. The stages form a potential, γΦ′ − Φ with Φ ≥ 0 and Φ = 0 at the end, so no cycle of stages earns
    anything.
    """
    earned = _credit(after, config) - _credit(before, config)
    progress = config.gamma * _progress(after, config) - _progress(before, config)
    final = bounded(gain(after.quality, after, config), after, config)
    return np.asarray(earned + progress + np.where(after.ended, config.terminal_weight * final, 0.0))


def _credit(frame: Frame, config: RewardConfig) -> Floats:
    """Return [E] the last measured contributions of seeds that are BLENDING, HOLDING or FOSSILIZED, minus all rent."""
    is_measured = _HAS_SAY[frame.stage] & np.isfinite(frame.contribution)
    worth = np.where(is_measured, frame.contribution, 0.0).sum(axis=1)
    return bounded(worth - rent(frame.params, frame.macs, frame, config), frame, config)


def _progress(frame: Frame, config: RewardConfig) -> Floats:
    """Return [E] the potential Φ of all seeds together."""
    total = config.stage_bonus * STAGE_POTENTIAL[frame.stage].sum(axis=1)
    return np.where(frame.ended | frame.crashed, 0.0, total)


@reward_mode("sparse")
def sparse(_before: Frame, after: Frame, config: RewardConfig) -> Floats:
    """Return 0 until the end of the episode, then the quality with only fossils on, minus the committed rent."""
    sound = np.isfinite(after.committed_quality) & ~after.crashed
    value = np.where(sound, after.committed_quality, 0.0)
    value = value - rent(after.committed_params, after.committed_macs, after, config)
    value = np.where(sound, np.clip(value, config.floor, 1.0), config.floor)
    return np.where(after.ended, value, 0.0)
