"""PPO training of the policy: rollout buffer, advantage estimation and the update.

Read first: `rollout_buffer.py`.
"""

from esper.simic.agent.advantages import gae_rows, gae_scan, normalized_advantages
from esper.simic.agent.rollout_buffer import Minibatch, TamiyoRolloutBuffer

__all__ = ["Minibatch", "TamiyoRolloutBuffer", "gae_rows", "gae_scan", "normalized_advantages"]
