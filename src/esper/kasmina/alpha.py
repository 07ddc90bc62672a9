"""Alpha, the weight of a seed in the host, as a closed-form function of its ramp."""

from __future__ import annotations

import numpy as np

from esper.leyline.actions import CURVE_STEEPNESS, Curve
from esper.leyline.slot_table import Floats, Ints


def progress(curve: Ints, t: Floats) -> Floats:
    """Return the progress, 0…1, of a ramp with this curve at time t in 0…1. Exact at both ends."""
    k = np.maximum(CURVE_STEEPNESS[curve], 1e-9)
    low = 1.0 / (1.0 + np.exp(0.5 * k))
    rise = (1.0 / (1.0 + np.exp(-k * (t - 0.5))) - low) / (1.0 - 2.0 * low)
    shaped = np.where(curve == Curve.LINEAR, t, np.where(curve == Curve.COSINE, 0.5 - 0.5 * np.cos(np.pi * t), rise))
    return np.where(t <= 0.0, 0.0, np.where(t >= 1.0, 1.0, shaped))


def alpha_at(start: Floats, target: Floats, position: Ints, length: Ints, curve: Ints) -> Floats:
    """Return alpha after `position` of `length` ticks. Exactly `target` at the end, also for length 0."""
    t = position.astype(np.float64) / np.maximum(length, 1)
    t = np.where(length == 0, 1.0, t)
    p = progress(curve, t)
    value = start + (target.astype(np.float64) - start) * p
    return np.where(p >= 1.0, target, value).astype(np.float32)
