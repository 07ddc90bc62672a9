"""What a step is worth: pure functions of the whole environment before and after it.

    before = Frame.of(table, context, twin_quality)
    …                                               # one step
    after = Frame.of(table, context, twin_quality)
    r = reward(before, after, config)               # [E]

`frame.py` holds what a mode may look at and the table of modes, `utility.py` the default, `comparisons.py` modes
of the earlier system, mended. A new mode is one function under `@reward_mode("name")`.
"""

from esper.simic.rewards import comparisons
from esper.simic.rewards.frame import REWARDS, Frame, RewardConfig, reward, reward_mode
from esper.simic.rewards.utility import rent, utility

__all__ = ["REWARDS", "Frame", "RewardConfig", "comparisons", "rent", "reward", "reward_mode", "utility"]
