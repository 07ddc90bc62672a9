"""Test gradient statistics against a plain reference implementation."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from esper.kasmina.optimizer_sync import GradientMeter, GradientStats, gradient_norms

NORMS = st.lists(st.floats(0.0, 20.0, width=32) | st.just(1e-9), min_size=1, max_size=5)


def scalar_reference(host: list[float], seed: list[float], host_size: int, size: int) -> tuple[float, float, float]:
    """Return norm, unsmoothed ratio and health, computed in plain Python."""
    norm = math.sqrt(sum(n * n for n in seed))
    per_host = math.sqrt(sum(n * n for n in host)) / math.sqrt(host_size)
    ratio = 0.0 if per_host < 1e-8 else min(10.0, norm / math.sqrt(size) / per_host)
    if any(not n <= 10.0 for n in seed):
        return norm, ratio, 0.0
    return norm, ratio, 1.0 - 0.5 * sum(n < 1e-7 for n in seed) / len(seed)


def sample(meter: GradientMeter, host: list[float], **seeds: list[float]) -> dict[str, GradientStats]:
    sizes = {name: 10 * (i + 1) for i, name in enumerate(seeds)}
    meter.take(torch.tensor(host), {n: torch.tensor(v) for n, v in seeds.items()}, 400, sizes)
    return meter.read(meter.pending().tolist())


@given(NORMS, NORMS, NORMS)
@settings(max_examples=100, deadline=None)
def test_norm_ratio_and_health_match_the_reference(host, one, two):
    stats = sample(GradientMeter(), host, one=one, two=two)
    assert list(stats) == ["one", "two"]
    for name, norms, size in (("one", one, 10), ("two", two, 20)):
        expected = scalar_reference(host, norms, 400, size)
        assert (stats[name].norm, stats[name].ratio, stats[name].health) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("norms", "health"),
    [
        ([1.0, 1.0], 1.0),
        ([1.0, 0.0], 0.75),  # half of the tensors have zero gradient
        ([0.0, 1e-8], 0.5),
        ([1.0, 10.1], 0.0),  # one explodes
        ([1.0, 10.0], 1.0),  # at the threshold
        ([1.0, float("inf")], 0.0),
        ([1.0, float("nan")], 0.0),
    ],
)
def test_health_reflects_zero_and_exploding_gradients(norms, health):
    assert sample(GradientMeter(), [1.0], seed=norms)["seed"].health == health


def test_ratio_is_smoothed_starting_from_the_first_reading():
    meter = GradientMeter()
    ratios = [sample(meter, [2.0], seed=[norm])["seed"].ratio for norm in (1.0, 2.0, 2.0)]
    first = (1.0 / math.sqrt(10)) / (2.0 / 20.0)
    expected = [first, 0.9 * first + 0.2 * first]
    expected.append(0.9 * expected[1] + 0.2 * first)
    assert ratios == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("host", [[float("nan")], [1.0]])
def test_nan_batch_is_reported_and_not_kept_in_the_average(host):
    meter = GradientMeter()
    before = sample(meter, [1.0], seed=[1.0])["seed"].ratio
    broken = sample(meter, host, seed=[float("nan")])["seed"]
    assert math.isnan(broken.ratio)
    assert broken.health == 0.0
    assert sample(meter, [1.0], seed=[1.0])["seed"].ratio == pytest.approx(before)


def test_unsampled_seeds_are_absent_and_newest_sample_wins():
    meter = GradientMeter()
    assert meter.pending().numel() == 0
    assert meter.read([]) == {}
    meter.take(torch.ones(2), {"silent": torch.zeros(0), "heard": torch.ones(1)}, 4, {"silent": 4, "heard": 4})
    meter.take(torch.ones(2), {"heard": torch.full((1,), 3.0)}, 4, {"heard": 4})
    assert meter.pending().shape == (3,)
    stats = meter.read(meter.pending().tolist())
    assert list(stats) == ["heard"]
    assert stats["heard"].norm == 3.0
    assert meter.read(meter.pending().tolist()) == {}  # a sample is returned once


def test_forget_resets_the_smoothed_ratio():
    meter = GradientMeter()
    sample(meter, [1.0], slot=[5.0])
    meter.forget("slot")
    assert sample(meter, [1.0], slot=[1.0])["slot"].ratio == pytest.approx(scalar_reference([1.0], [1.0], 400, 10)[1])


def test_stride_selects_the_sampled_batches():
    assert [i for i in range(25) if GradientMeter(10).due(i)] == [0, 10, 20]
    assert [i for i in range(3) if GradientMeter(1).due(i)] == [0, 1, 2]


def test_gradient_norms_returns_one_norm_per_existing_gradient():
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    params[0].grad, params[2].grad = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0])
    assert gradient_norms(params).tolist() == [5.0, 1.0]
    assert gradient_norms([]).shape == (0,)
