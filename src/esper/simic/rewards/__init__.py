"""Rewards: pure functions of the whole environment before and after a step.

    before = Frame.of(table, context, baseline_quality)
    …                                               # one step
    after = Frame.of(table, context, baseline_quality)
    r = reward(before, after, config)               # [E]

`frame.py` defines the inputs of a mode and the registry of modes, `utility.py` the default mode, `comparisons.py`
corrected modes of the earlier system. A new mode is one function decorated with `@reward_mode("name")`.
"""

from esper.simic.rewards import comparisons
from esper.simic.rewards.frame import REWARDS, WITH_POTENTIAL, Frame, RewardConfig, reward, reward_mode
from esper.simic.rewards.utility import rent, utility

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
