"""Test the closed form of alpha against an incremental controller."""

from __future__ import annotations

import math

import numpy as np
import pytest

from esper.leyline import Curve
from esper.leyline.lifecycle import alpha_at, progress

REFERENCE = {
    Curve.LINEAR: ("linear", 0),
    Curve.COSINE: ("cosine", 0),
    Curve.SIGMOID_GENTLE: ("sigmoid", 6),
    Curve.SIGMOID: ("sigmoid", 12),
    Curve.SIGMOID_SHARP: ("sigmoid", 24),
}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class Controller:
    """Incremental alpha controller: counts its steps and returns the exact target at the last one."""

    def __init__(self, curve: Curve, start: float, target: float, steps: int) -> None:
        self.shape, self.k = REFERENCE[curve]
        self.start, self.target, self.total, self.done = start, target, steps, 0
        self.alpha = start if steps else target

    def step(self) -> float:
        self.done += 1
        t = self.done / self.total
        if self.done >= self.total:
            self.alpha = self.target
            return self.alpha
        if self.shape == "linear":
            p = t
        elif self.shape == "cosine":
            p = 0.5 * (1 - math.cos(math.pi * t))
        else:
            k = self.k
            p = (sigmoid(k * (t - 0.5)) - sigmoid(-k / 2)) / (sigmoid(k / 2) - sigmoid(-k / 2))
        self.alpha = self.start + (self.target - self.start) * p
        return self.alpha


def ramp(curve: Curve, start: float, target: float, steps: int) -> np.ndarray:
    """Return alpha after 0, 1, … `steps` ticks."""
    n = steps + 1
    return alpha_at(
        np.full(n, start, np.float32),
        np.full(n, target, np.float32),
        np.arange(n, dtype=np.int16),
        np.full(n, steps, np.int16),
        np.full(n, curve, np.int8),
    )


@pytest.mark.parametrize("curve", list(Curve))
@pytest.mark.parametrize("steps", [1, 3, 5, 8])
@pytest.mark.parametrize(("start", "target"), [(0, 1), (0, 0.5), (0.5, 1), (1, 0.7), (0.7, 0), (1, 0)])
def test_closed_form_equals_incremental_controller(curve, steps, start, target):
    controller = Controller(curve, start, target, steps)
    expected = [controller.alpha] + [controller.step() for _ in range(steps)]
    np.testing.assert_allclose(ramp(curve, start, target, steps), expected, atol=1e-6)


@pytest.mark.parametrize("curve", list(Curve))
@pytest.mark.parametrize("target", [0.0, 0.5, 0.7, 1.0])
def test_ramp_starts_and_ends_exactly(curve, target):
    for start in (0.0, 0.1, 0.5, 0.7, 1.0):
        for steps in (1, 2, 3, 5, 8, 300):
            alphas = ramp(curve, start, target, steps)
            assert alphas[0] == np.float32(start)
            assert alphas[-1] == np.float32(target)


@pytest.mark.parametrize("curve", list(Curve))
def test_ramp_is_monotone_and_within_its_endpoints(curve):
    for start, target in ((0.0, 1.0), (0.7, 0.5), (1.0, 0.0)):
        alphas = ramp(curve, start, target, 300)
        steps = np.diff(alphas) * np.sign(target - start)
        assert (steps >= 0).all()
        assert steps.max() > 0
        assert alphas.min() >= np.float32(min(start, target))
        assert alphas.max() <= np.float32(max(start, target))


def test_ramp_of_zero_ticks_returns_the_target():
    assert ramp(Curve.SIGMOID, 0.2, 0.7, 0).tolist() == [np.float32(0.7)]


def test_sigmoid_over_five_epochs_matches_reference_values():
    assert [round(float(a), 3) for a in ramp(Curve.SIGMOID, 0, 1, 5)] == [0, 0.024, 0.23, 0.77, 0.976, 1]


@pytest.mark.parametrize("curve", list(Curve))
def test_curves_are_symmetric_about_the_midpoint(curve):
    t = np.linspace(0, 1, 21)
    p = progress(np.full(21, curve), t)
    np.testing.assert_allclose(p + p[::-1], 1.0, atol=1e-12)
    assert p[10] == pytest.approx(0.5)


def test_sharper_sigmoid_is_lower_at_a_quarter():
    quarter = progress(np.array([Curve.LINEAR, 2, 3, 4]), np.full(4, 0.25))
    assert (np.diff(quarter) < 0).all()


def test_curves_raise_no_numpy_floating_point_errors():
    with np.errstate(all="raise"):
        for curve in Curve:
            ramp(curve, 0.0, 1.0, 8)
