"""Test the action distribution: equal to a reference, never illegal, never without a gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.tamiyo.network import entropy, likeliest, log_distribution, pick

LAST = 1.0 - 2.0**-53
"""Largest float64 random number below 1."""


def slow_distribution(logits, legal, epsilon):
    """Return probabilities of one head: softmax over legal options mixed with the uniform distribution."""
    options = [k for k, ok in enumerate(legal) if ok]
    top = max(logits[k] for k in options)
    weight = {k: math.exp(logits[k] - top) for k in options}
    total = sum(weight.values())
    return [
        (1 - epsilon) * weight[k] / total + epsilon / len(options) if k in weight else 0.0 for k in range(len(logits))
    ]


def slow_entropy(probs, legal):
    """Return the entropy divided by its maximum ln n, or 0 with a single option."""
    options = [p for p, ok in zip(probs, legal, strict=True) if ok]
    if len(options) < 2:
        return 0.0
    return -sum(p * math.log(p) for p in options if p > 0) / math.log(len(options))


def heads(rows=200, width=9, seed=0, scale=3.0):
    """Return random logits and masks with at least one option each, some with exactly one."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < torch.rand(rows, 1, generator=generator)
    mask[torch.arange(rows), torch.randint(width, (rows,), generator=generator)] = True
    return logits, mask


@pytest.mark.parametrize("epsilon", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_probabilities_and_entropies_match_the_reference(epsilon, seed):
    logits, mask = heads(seed=seed)
    log_probs = log_distribution(logits, mask, epsilon)
    result = entropy(log_probs, mask)
    for row in range(len(logits)):
        expected = slow_distribution(logits[row].tolist(), mask[row].tolist(), epsilon)
        assert log_probs[row].exp().tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert float(result[row]) == pytest.approx(slow_entropy(expected, mask[row].tolist()), abs=1e-5)
    assert ((result >= 0) & (result <= 1 + 1e-6)).all()


@pytest.mark.parametrize("epsilon", [0.0, 0.02])
def test_illegal_options_have_probability_zero_and_legal_sum_to_one(epsilon):
    logits, mask = heads(scale=50.0)
    log_probs = log_distribution(logits, mask, epsilon)
    assert (log_probs[~mask] == -torch.inf).all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(len(mask)))


def test_illegal_logits_have_no_effect_even_if_nan():
    logits, mask = heads()
    logits.requires_grad_()
    worse = logits.detach().clone()
    worse[~mask] = torch.nan
    worse.requires_grad_()
    grads = []
    for given_logits in (logits, worse):
        log_probs = log_distribution(given_logits, mask, 0.02)
        (log_probs[mask].sum() + entropy(log_probs, mask).sum()).backward()
        grads.append(given_logits.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert torch.isfinite(grads[0]).all()
    assert not grads[0][~mask].any()


def test_uniform_distribution_has_entropy_one():
    for options in range(2, 9):
        mask = torch.arange(9) < options
        assert float(entropy(log_distribution(torch.zeros(9), mask, 0.02), mask)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 0.02])
def test_single_option_is_certain_and_has_no_gradient(epsilon):
    logits = torch.tensor([3.0, -40.0, 2.0], requires_grad=True)
    mask = torch.tensor([False, True, False])
    log_probs = log_distribution(logits, mask, epsilon)
    assert float(log_probs[1].detach()) == pytest.approx(0.0, abs=1e-7)
    result = entropy(log_probs, mask)
    assert float(result.detach()) == 0.0
    (log_probs[1] + result).backward()
    assert not logits.grad.any()
    assert int(pick(log_probs, torch.tensor(LAST, dtype=torch.double))) == int(likeliest(log_probs)) == 1


@pytest.mark.parametrize("gap", [0.0, 10.0, 80.0, 1e4])
def test_every_legal_option_keeps_its_share_of_epsilon(gap):
    epsilon, mask = 0.02, torch.tensor([True, True, True, False, True])
    probs = log_distribution(torch.tensor([gap, 0.0, -gap, 0.0, 0.0]), mask, epsilon).exp()
    assert (probs[mask] >= epsilon / 4 * (1 - 1e-6)).all()


@pytest.mark.parametrize("gap", [5.0, 15.0, 40.0, 80.0])
@pytest.mark.parametrize("chosen", [0, 1])
def test_saturated_head_has_a_gradient(gap, chosen):
    """Clamping probabilities at a floor would give zero gradients below it, so the head could not change."""
    logits = torch.tensor([gap, 0.0, 0.0], requires_grad=True)
    mask = torch.ones(3, dtype=torch.bool)
    log_distribution(logits, mask, 0.02)[chosen].backward()
    assert logits.grad.abs().sum() > 0
    assert torch.sign(logits.grad[1]) == (1 if chosen == 1 else -1)  # towards the chosen option
    other = logits.detach().clone().requires_grad_()
    entropy(log_distribution(other, mask, 0.02), mask).backward()
    assert (other.grad[1:] > 0).all()


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_log_distribution_is_computed_in_at_least_float32(dtype, computed):
    logits, mask = heads(rows=10)
    assert log_distribution(logits.to(dtype), mask, 0.02).dtype == computed


def test_pick_frequencies_match_probabilities():
    logits, mask = heads(rows=20, scale=1.0, seed=4)
    log_probs = log_distribution(logits, mask, 0.02)
    draws = 4000
    chances = (torch.arange(draws, dtype=torch.double) + 0.5) / draws
    picked = pick(log_probs[:, None].expand(-1, draws, -1), chances.expand(len(logits), -1))
    share = torch.nn.functional.one_hot(picked, logits.shape[1]).double().mean(1)
    assert (share - log_probs.double().exp()).abs().max() < 1.5 / draws  # evenly spaced numbers: exact within one


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0, 100.0]), epsilon=st.sampled_from([0.0, 0.02]))
def test_options_of_probability_zero_are_never_picked(seed, scale, epsilon):
    logits, mask = heads(rows=50, seed=seed, scale=scale)
    log_probs = log_distribution(logits, mask, epsilon)
    for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-24, LAST):
        picked = pick(log_probs, torch.full((50,), u, dtype=torch.double))
        assert (picked < logits.shape[1]).all()
        assert (log_probs.gather(-1, picked[:, None]) > -torch.inf).all()
        assert mask.gather(-1, picked[:, None]).all()


def test_pick_returns_the_first_option_with_cumulative_sum_above_u():
    probs = [0.25, 0.0, 0.5, 0.25, 0.0]
    log_probs = torch.tensor(probs, dtype=torch.double).log()
    for u, expected in ((0.0, 0), (0.2499, 0), (0.25, 2), (0.7499, 2), (0.75, 3), (LAST, 3)):
        assert int(pick(log_probs, torch.tensor(u, dtype=torch.double))) == expected, u
