"""Advantages against a scalar reference: done, truncated and short columns, several episodes, garbage in padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.simic.agent import advantages as module
from esper.simic.agent.advantages import gae_rows, gae_scan, normalized_advantages

EXAMPLES = 400  # of up to 8 columns each
NAN, INF = float("nan"), float("inf")


def scalar_gae(rewards, values, done, truncated, bootstrap, step_counts, gamma, lam, kind=float):
    """Return advantages by the definition, one number at a time. `kind` sets the precision."""
    advantages, returns = np.zeros(rewards.shape, kind), np.zeros(rewards.shape, kind)
    gamma, carry = kind(gamma), kind(gamma * lam)
    for e, count in enumerate(step_counts):
        r, v, b = ([kind(x) for x in field[:, e]] for field in (rewards, values, bootstrap))
        later = kind(0.0)
        for t in reversed(range(count)):
            end = done[t, e] or truncated[t, e] or t == count - 1
            if done[t, e]:
                following = kind(0.0)
            elif end:
                following = b[t]
            else:
                following = v[t + 1]
            later = r[t] + gamma * following - v[t] + (kind(0.0) if end else carry * later)
            advantages[t, e], returns[t, e] = later, later + v[t]
    return advantages, returns


def by_rows(*case):
    return gae_rows(*case)


def by_scan(*case):
    *fields, gamma, lam = case
    return tuple(x.numpy() for x in gae_scan(*(torch.from_numpy(x.copy()) for x in fields), gamma, lam))


WAYS = pytest.mark.parametrize("gae", [by_rows, by_scan])


def random_case(seed, steps, envs, *, ends=0.2, poison=0.0, full=False):
    """Return columns with ends anywhere, and garbage wherever nothing may be read."""
    rng = np.random.default_rng(seed)
    shape = steps, envs
    rewards, values, bootstrap = (rng.normal(size=shape).astype(np.float32) for _ in range(3))
    done, truncated = rng.random(shape) < ends, rng.random(shape) < ends
    counts = np.full(envs, steps) if full else rng.integers(0, steps + 1, envs)
    padding = np.arange(steps)[:, None] >= counts
    last = np.arange(steps)[:, None] == counts - 1
    garbage = rng.choice(np.array([NAN, INF, -INF, 1e38, 7.0], np.float32), shape)
    not_finite = rng.choice(np.array([NAN, INF, -INF], np.float32), shape)
    bootstrap = np.where(~done & (truncated | last), bootstrap, garbage)
    poisoned = rng.random(shape) < poison
    rewards = np.where(poisoned & (rng.random(shape) < 0.5), not_finite, rewards)
    values = np.where(poisoned & (rng.random(shape) < 0.5), not_finite, values)
    rewards, values = (np.where(padding, garbage, x) for x in (rewards, values))
    return rewards, values, done, truncated, bootstrap, counts


def assert_same(results, expected):
    """Assert equality where finite; non-finite values must be non-finite in both."""
    for f, e in zip(results, expected, strict=True):
        finite = np.isfinite(e)
        np.testing.assert_array_equal(np.isfinite(f), finite)
        np.testing.assert_allclose(f[finite], e[finite], rtol=2e-5, atol=2e-5)


cases = {
    "seed": st.integers(0, 2**32 - 1),
    "steps": st.integers(1, 24),
    "envs": st.integers(1, 8),
    "ends": st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    "gamma": st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]),
    "lam": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
}


@given(**cases, width=st.sampled_from([1, 4, 16, 1024]), full=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_every_mix_of_ends_equals_the_scalar_reference(seed, steps, envs, ends, gamma, lam, width, full):
    case = (*random_case(seed, steps, envs, ends=ends, full=full), gamma, lam)
    expected = scalar_gae(*case)
    assert np.isfinite(expected[0]).all()  # garbage is never where the definition reads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_WIDTH", width)
        assert_same(by_rows(*case), expected)
    assert_same(by_scan(*case), expected)


@given(**cases, width=st.sampled_from([1, 4, 16, 1024]), poison=st.sampled_from([0.02, 0.2]))
@settings(max_examples=EXAMPLES, deadline=None)
def test_non_finite_values_affect_only_their_own_episode(seed, steps, envs, ends, gamma, lam, width, poison):
    case = (*random_case(seed, steps, envs, ends=ends, poison=poison), gamma, lam)
    with np.errstate(all="ignore"):
        expected = scalar_gae(*case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_WIDTH", width)
        assert_same(by_rows(*case), expected)
    assert_same(by_scan(*case), expected)


@given(**cases)
@settings(max_examples=EXAMPLES // 4, deadline=None)
def test_wide_rows_equal_a_float32_reference_bit_for_bit(seed, steps, envs, ends, gamma, lam):
    case = (*random_case(seed, steps, envs, ends=ends), gamma, lam)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_WIDTH", 1)  # every row counts as wide enough
        results = by_rows(*case)
    for f, e in zip(results, scalar_gae(*case, kind=np.float32), strict=True):
        np.testing.assert_array_equal(f, e)


@WAYS
@pytest.mark.parametrize(("envs", "steps"), [(4, 25), (16, 150), (128, 150), (100, 37), (600, 40), (1100, 3), (1, 1)])
def test_shapes_around_every_threshold_equal_the_reference(gae, envs, steps):
    for poison in (0.0, 0.001):
        case = (*random_case(1, steps, envs, ends=0.02, poison=poison), 0.99, 0.95)
        with np.errstate(all="ignore"):
            assert_same(gae(*case), scalar_gae(*case))


# Three steps, γ = λ = ½, rewards 1 2 3, values 1, bootstraps 8 10 4; deltas of non-final steps: ½ and 1½.
HAND_WORKED = {
    "goes on behind the last step": ("---", 3, [1.125, 2.5, 4.0]),
    "done at the last step": ("--d", 3, [1.0, 2.0, 2.0]),
    "cut at the last step": ("--t", 3, [1.125, 2.5, 4.0]),
    "done and cut is done": ("--b", 3, [1.0, 2.0, 2.0]),
    "done in the middle": ("-d-", 3, [0.75, 1.0, 4.0]),
    "cut in the middle": ("-t-", 3, [2.0, 6.0, 4.0]),
    "an end at every step": ("dtd", 3, [0.0, 6.0, 2.0]),
    "a short column goes on": ("---", 2, [2.0, 6.0, 0.0]),
    "a short column is done": ("-d-", 2, [0.75, 1.0, 0.0]),
    "a flag in the padding": ("--d", 2, [2.0, 6.0, 0.0]),
    "one step": ("---", 1, [4.0, 0.0, 0.0]),
    "no step": ("ddd", 0, [0.0, 0.0, 0.0]),
}


@WAYS
@pytest.mark.parametrize("name", HAND_WORKED)
def test_advantages_match_values_computed_by_hand(gae, name):
    flags, count, expected = HAND_WORKED[name]
    column = lambda *x: np.array(x, np.float32)[:, None]  # noqa: E731
    done, truncated = (np.array([f in kinds for f in flags])[:, None] for kinds in ("db", "tb"))
    advantages, returns = gae(
        column(1, 2, 3), column(1, 1, 1), done, truncated, column(8, 10, 4), np.array([count]), 0.5, 0.5
    )
    assert advantages[:, 0].tolist() == expected
    assert returns[:, 0].tolist() == [a + 1.0 if t < count else 0.0 for t, a in enumerate(expected)]


@WAYS
def test_inputs_are_unchanged_and_any_layout_is_accepted(gae):
    case = random_case(3, 20, 6, poison=0.1)
    before = [x.copy() for x in case]
    expected = gae(*case, 0.9, 0.9)
    for x, b in zip(case, before, strict=True):
        np.testing.assert_array_equal(x, b)
    turned = gae(*(np.asfortranarray(x) for x in case), 0.9, 0.9)
    assert_same(turned, expected)


def test_float64_input_gives_float64_output():
    *fields, counts = random_case(4, 50, 3)
    case = (*(x.astype(float) if x.dtype == np.float32 else x for x in fields), counts, 0.99, 0.95)
    for gae in (by_rows, by_scan):
        for result, expected in zip(gae(*case), scalar_gae(*case), strict=True):
            assert result.dtype == np.float64
            np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)


def test_normalised_advantages_have_mean_0_and_spread_1_over_counted_steps():
    advantages = torch.randn(30, 7, generator=torch.Generator().manual_seed(0)) * 4 + 3
    counted = torch.rand(30, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    advantages[~counted] = NAN
    normalized = normalized_advantages(advantages, counted)
    assert normalized[counted].mean().abs() < 1e-5
    assert (normalized[counted].std(correction=0) - 1).abs() < 1e-5
    assert (normalized[~counted] == 0).all()


def test_spread_below_the_floor_is_not_scaled_up():
    normalized = normalized_advantages(torch.tensor([1.0, 1.0 + 2e-4]), torch.tensor([True, True]))
    torch.testing.assert_close(normalized, torch.tensor([-0.1, 0.1]), rtol=1e-2, atol=0.0)


def test_no_counted_step_gives_zero_advantages():
    assert normalized_advantages(torch.tensor([NAN, 2.0]), torch.tensor([False, False])).tolist() == [0.0, 0.0]
