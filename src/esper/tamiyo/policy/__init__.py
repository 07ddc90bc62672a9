"""Observations and action masks of a learned policy, computed for the whole table at once.

Read first: `feature_table.py` (the named columns of an observation), `features.py`, then `action_masks.py`.
"""

from esper.tamiyo.policy.action_masks import MaskLayout, compute_batch_masks, conditioned, slot_given_op
from esper.tamiyo.policy.feature_table import BASE, PER_SLOT
from esper.tamiyo.policy.features import batch_obs_to_features

__all__ = [
    "BASE", "PER_SLOT", "MaskLayout", "batch_obs_to_features", "compute_batch_masks", "conditioned", "slot_given_op",
]  # fmt: skip
