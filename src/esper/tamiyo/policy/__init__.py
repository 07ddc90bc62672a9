"""Observations and action masks of a learned policy, computed for the whole table at once.

Read first: `features.py` (the named columns of an observation), then `action_masks.py`.
"""

from esper.tamiyo.policy.action_masks import (
    CANONICAL,
    DEFAULT_FIXED,
    MaskLayout,
    blueprint_given_slot,
    compute_action_masks,
    compute_batch_masks,
    conditioned,
    forced,
    slot_given_op,
)
from esper.tamiyo.policy.features import (
    BASE,
    FEATURES,
    PER_SLOT,
    Feature,
    ObsContext,
    batch_obs_to_features,
    feature_names,
    num_features,
)

__all__ = [
    "BASE",
    "CANONICAL",
    "DEFAULT_FIXED",
    "FEATURES",
    "PER_SLOT",
    "Feature",
    "MaskLayout",
    "ObsContext",
    "batch_obs_to_features",
    "blueprint_given_slot",
    "compute_action_masks",
    "compute_batch_masks",
    "conditioned",
    "feature_names",
    "forced",
    "num_features",
    "slot_given_op",
]
