"""Rewards: pure functions of the whole environment before and after a step.

    before = Frame.of(table, context, baseline_quality)
    …                                               # one step
    after = Frame.of(table, context, baseline_quality)
    r = reward(before, after, config)               # [E]

`reward.py` defines the inputs of a mode, the registry of modes and the default mode. `comparisons.py` defines corrected
modes of the earlier system. A new mode is one function decorated with `@reward_mode("name")`.
"""

from esper.simic.rewards import comparisons
from esper.simic.rewards.reward import REWARDS, WITH_POTENTIAL, Frame, RewardConfig, rent, reward, reward_mode, utility

__all__ = [
    "REWARDS",
    "WITH_POTENTIAL",
    "Frame",
    "RewardConfig",
    "comparisons",
    "rent",
    "reward",
    "reward_mode",
    "utility",
]
