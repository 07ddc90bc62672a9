"""An observation context for tests and benchmarks of features."""

from __future__ import annotations

import math

import numpy as np

from esper.leyline.actions import BLUEPRINTS
from esper.tamiyo.policy.features import ObsContext


def example_context(slots: int) -> ObsContext:
    """Return sizes like those of a small convolutional host, growing with depth."""
    rng = np.random.default_rng(slots)
    width = 8 * 2 ** (np.arange(slots) * 3 // slots)
    prices = width[:, None] ** 2 * rng.integers(1, 10, (slots, len(BLUEPRINTS)))
    return ObsContext(
        horizon=60, host_params=6400, host_macs=1_000_000, slot_width=width, slot_params=prices,
        slot_macs=prices * 49, slot_depth=np.linspace(0, 1, slots), params_budget=64_000, chance_loss=math.log(10),
    )  # fmt: skip
