"""Rules, slot tables and actions to test the lifecycle with."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import strategies as st

from esper.leyline import PERMISSIVE, STRICT, Head, SlotTable, Thresholds
from esper.leyline.lifecycle import Rules
from tests.support.random_tables import random_actions, random_legal_actions, random_table

floors = st.sampled_from([None, float("-inf"), -0.02, 0.0, 0.01, 0.5])
thresholds = st.builds(
    Thresholds,
    blend_dwell=st.integers(0, 4),
    blend_health=floors,
    blend_ratio=floors,
    blend_improvement=floors,
    hold_dwell=st.integers(0, 4),
    fossil_contribution=floors,
    z=st.sampled_from([0.0, 0.5, 2.5]),
)
any_rules = st.builds(
    Rules,
    thresholds=st.sampled_from([PERMISSIVE, STRICT]) | thresholds,
    auto_train=st.booleans(),
    auto_blend=st.booleans(),
    auto_hold=st.booleans(),
    max_seeds=st.integers(0, 4),
    min_prune_age=st.integers(0, 6),
    birth=st.sampled_from(["isolated", "open"]),
    open_ramp=st.sampled_from([None, 0, 1, 4]),
    one_at_a_time=st.booleans(),
)


@cache
def reached(slots: int) -> SlotTable:
    """Return many reachable tables to draw from, built once."""
    return random_table(512, slots, seed=slots)


def mixed_actions(table: SlotTable, rules: Rules, rng: np.random.Generator) -> np.ndarray:
    """Return actions: half of them legal, the rest random; a tenth of the rows has a head out of range."""
    anything = random_actions(table, rng)
    sensible = rng.random((table.num_envs, 1)) < 0.5
    actions = np.where(sensible, random_legal_actions(table, rules, rng), anything)
    silly = np.nonzero(rng.random(table.num_envs) < 0.1)[0]
    actions[silly, rng.integers(0, len(Head), silly.size)] = rng.choice([-9, -1, 13, 99], silly.size)
    return actions
