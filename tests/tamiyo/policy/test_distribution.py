"""The distribution over choices: equal to its slow twin, never illegal, never without a gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.tamiyo.policy.distribution import entropy, likeliest, log_distribution, pick

LAST = 1.0 - 2.0**-53
"""The largest number below 1 that a choice can fall by."""


def slow_distribution(logits, legal, epsilon):
    """Probabilities of one head in plain Python: softmax over what is legal, mixed with the uniform over it."""
    options = [k for k, ok in enumerate(legal) if ok]
    top = max(logits[k] for k in options)
    weight = {k: math.exp(logits[k] - top) for k in options}
    total = sum(weight.values())
    return [
        (1 - epsilon) * weight[k] / total + epsilon / len(options) if k in weight else 0.0 for k in range(len(logits))
    ]


def slow_entropy(probs, legal):
    """Entropy over its largest value, ln n; 0 where there is no choice."""
    options = [p for p, ok in zip(probs, legal, strict=True) if ok]
    if len(options) < 2:
        return 0.0
    return -sum(p * math.log(p) for p in options if p > 0) / math.log(len(options))


def heads(rows=200, width=9, seed=0, scale=3.0):
    """Random logits and masks with at least one option each, some with exactly one."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < torch.rand(rows, 1, generator=generator)
    mask[torch.arange(rows), torch.randint(width, (rows,), generator=generator)] = True
    return logits, mask


@pytest.mark.parametrize("epsilon", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_probabilities_and_entropies_equal_the_slow_twin(epsilon, seed):
    logits, mask = heads(seed=seed)
    log_probs = log_distribution(logits, mask, epsilon)
    told = entropy(log_probs, mask)
    for row in range(len(logits)):
        expected = slow_distribution(logits[row].tolist(), mask[row].tolist(), epsilon)
        assert log_probs[row].exp().tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert float(told[row]) == pytest.approx(slow_entropy(expected, mask[row].tolist()), abs=1e-5)
    assert ((told >= 0) & (told <= 1 + 1e-6)).all()


@pytest.mark.parametrize("epsilon", [0.0, 0.02])
def test_what_is_illegal_has_no_chance_and_the_rest_share_all_of_it(epsilon):
    logits, mask = heads(scale=50.0)
    log_probs = log_distribution(logits, mask, epsilon)
    assert (log_probs[~mask] == -torch.inf).all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(len(mask)))


def test_logits_of_illegal_options_change_nothing_not_even_if_they_are_not_finite():
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


def test_undecided_is_entropy_1_whatever_the_number_of_options():
    for options in range(2, 9):
        mask = torch.arange(9) < options
        assert float(entropy(log_distribution(torch.zeros(9), mask, 0.02), mask)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 0.02])
def test_one_option_is_certain_and_carries_no_gradient(epsilon):
    logits = torch.tensor([3.0, -40.0, 2.0], requires_grad=True)
    mask = torch.tensor([False, True, False])
    log_probs = log_distribution(logits, mask, epsilon)
    assert float(log_probs[1].detach()) == pytest.approx(0.0, abs=1e-7)
    told = entropy(log_probs, mask)
    assert float(told.detach()) == 0.0
    (log_probs[1] + told).backward()
    assert not logits.grad.any()
    assert int(pick(log_probs, torch.tensor(LAST, dtype=torch.double))) == int(likeliest(log_probs)) == 1


@pytest.mark.parametrize("gap", [0.0, 10.0, 80.0, 1e4])
def test_every_legal_choice_keeps_its_share_of_epsilon(gap):
    epsilon, mask = 0.02, torch.tensor([True, True, True, False, True])
    probs = log_distribution(torch.tensor([gap, 0.0, -gap, 0.0, 0.0]), mask, epsilon).exp()
    assert (probs[mask] >= epsilon / 4 * (1 - 1e-6)).all()


@pytest.mark.parametrize("gap", [5.0, 15.0, 40.0, 80.0])
@pytest.mark.parametrize("chosen", [0, 1])
def test_a_decided_head_still_has_a_gradient(gap, chosen):
    """Under a floor a probability below it is a constant: such a head could never change its mind."""
    logits = torch.tensor([gap, 0.0, 0.0], requires_grad=True)
    mask = torch.ones(3, dtype=torch.bool)
    log_distribution(logits, mask, 0.02)[chosen].backward()
    assert logits.grad.abs().sum() > 0
    assert torch.sign(logits.grad[1]) == (1 if chosen == 1 else -1)  # towards what was chosen, if it paid
    other = logits.detach().clone().requires_grad_()
    entropy(log_distribution(other, mask, 0.02), mask).backward()
    assert (other.grad[1:] > 0).all()


@pytest.mark.parametrize(
    ("given", "computed"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_log_distribution_is_computed_in_at_least_float32(given, computed):
    logits, mask = heads(rows=10)
    assert log_distribution(logits.to(given), mask, 0.02).dtype == computed


def test_picks_come_as_often_as_their_probability_says():
    logits, mask = heads(rows=20, scale=1.0, seed=4)
    log_probs = log_distribution(logits, mask, 0.02)
    draws = 4000
    chances = (torch.arange(draws, dtype=torch.double) + 0.5) / draws
    picked = pick(log_probs[:, None].expand(-1, draws, -1), chances.expand(len(logits), -1))
    share = torch.nn.functional.one_hot(picked, logits.shape[1]).double().mean(1)
    assert (share - log_probs.double().exp()).abs().max() < 1.5 / draws  # evenly spread numbers: within one of them


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0, 100.0]), epsilon=st.sampled_from([0.0, 0.02]))
def test_what_has_no_chance_is_never_picked_however_the_number_falls(seed, scale, epsilon):
    logits, mask = heads(rows=50, seed=seed, scale=scale)
    log_probs = log_distribution(logits, mask, epsilon)
    for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-24, LAST):
        picked = pick(log_probs, torch.full((50,), u, dtype=torch.double))
        assert (picked < logits.shape[1]).all()
        assert (log_probs.gather(-1, picked[:, None]) > -torch.inf).all()
        assert mask.gather(-1, picked[:, None]).all()


def test_a_pick_is_the_first_option_whose_running_sum_exceeds_the_number():
    probs = [0.25, 0.0, 0.5, 0.25, 0.0]
    log_probs = torch.tensor(probs, dtype=torch.double).log()
    for u, expected in ((0.0, 0), (0.2499, 0), (0.25, 2), (0.7499, 2), (0.75, 3), (LAST, 3)):
        assert int(pick(log_probs, torch.tensor(u, dtype=torch.double))) == expected, u
