"""Shapley values: exact ones against the definition; estimates by their axioms, their errors and alternatives."""

from __future__ import annotations

import inspect
import tracemalloc
from itertools import combinations, islice, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.simic.attribution import counterfactual
from esper.simic.attribution.counterfactual import coalition_order, estimate, exact_weights, interactions, weights_for

quick = settings(max_examples=40, deadline=None)
players = st.integers(1, 6)
dice = st.integers(0, 2**32 - 1)


# -- slow references and random games


def textbook(n: int, value: np.ndarray) -> np.ndarray:
    """Return the mean marginal over every order of arrival."""
    total, orders = np.zeros(n), list(permutations(range(n)))
    for order in orders:
        mask = 0
        for i in order:
            total[i] += value[mask | 1 << i] - value[mask]
            mask |= 1 << i
    return total / len(orders)


def members(n: int) -> np.ndarray:
    """Return [2ⁿ, n]: the membership of every coalition."""
    return np.array([[m >> i & 1 for i in range(n)] for m in range(2**n)], dtype=float)


def game_of_interactions(n: int, rng: np.random.Generator) -> np.ndarray:
    """Return [2ⁿ]: main effects, and weaker ones of pairs and triples."""
    inside, value = members(n), np.zeros(2**n)
    for size, scale in ((1, 1.0), (2, 0.3), (3, 0.1)):
        for group in combinations(range(n), size):
            value += scale * rng.normal() * inside[:, group].prod(1)
    return value


def game_of_saturation(n: int, rng: np.random.Generator) -> np.ndarray:
    """Return [2ⁿ]: an accuracy-like game in which each further seed helps less."""
    return np.tanh(members(n) @ rng.gamma(2.0, 0.25, n) * 1.5)


GAMES = {"interactions": game_of_interactions, "saturation": game_of_saturation}


def first(n: int, count: int, seed: int = 0) -> list[int]:
    return list(islice(coalition_order(n, seed), count))


def shuffled_table(n: int, seed: int) -> list[int]:
    masks = list(range(2**n))
    np.random.default_rng(seed).shuffle(masks)
    return masks


# -- exact values


@quick
@given(players, dice)
def test_exact_weights_equal_the_mean_over_all_orders(n: int, seed: int):
    value = np.random.default_rng(seed).normal(size=2**n)
    np.testing.assert_allclose(exact_weights(n) @ value, textbook(n, value), atol=1e-12)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([3.0, 5.0], [2.0]),
        ([0.0, 1.0, 2.0, 5.0], [2.0, 3.0]),  # each its own and half of the joint gain
        ([0, 0, 0, 0, 0, 1, 1, 1], [1 / 6, 1 / 6, 4 / 6]),  # one essential player and two helpers
    ],
)
def test_exact_values_match_cases_computed_by_hand(value: list[float], expected: list[float]):
    n = len(expected)
    np.testing.assert_allclose(estimate(n, range(2**n), np.array(value)).values, expected)


def test_weights_are_computed_once_and_are_read_only():
    assert exact_weights(4) is exact_weights(4)
    with pytest.raises(ValueError, match="read-only"):
        exact_weights(4)[0, 0] = 1.0


def test_no_players_give_no_values():
    assert estimate(0, [0], np.array([0.7])).values.shape == (0,)


@pytest.mark.parametrize("n", [*range(1, 7), 7, 8, 9, 10])
def test_complete_table_in_any_order_gives_exact_values_by_both_methods(n: int):
    masks = shuffled_table(n, n)
    value = np.random.default_rng(n).normal(size=2**n)
    exact = exact_weights(n) @ value
    estimated = estimate(n, masks, value[masks])
    np.testing.assert_allclose(estimated.values, exact, atol=1e-10)
    np.testing.assert_allclose(weights_for(n, masks) @ value[masks], exact, atol=1e-8)
    assert estimated.design_se.tolist() == [0.0] * n
    assert estimated.evaluations == 2**n


# -- axioms


@quick
@given(st.integers(1, 12), st.integers(2, 150), dice)
def test_values_add_up_to_the_total_for_any_evaluations(n: int, count: int, seed: int):
    masks = first(n, count, seed)
    value = np.random.default_rng(seed).normal(size=len(masks))
    values = estimate(n, masks, value).values
    whole = value[masks.index(2**n - 1)] - value[masks.index(0)]
    assert values.sum() == pytest.approx(whole, abs=1e-6)


@quick
@given(st.integers(2, 9), dice)
def test_equal_players_get_equal_values_from_the_complete_table(n: int, seed: int):
    rng = np.random.default_rng(seed)
    i, j = rng.choice(n, 2, replace=False).tolist()
    table = rng.normal(size=2**n)
    swapped = [m & ~(1 << i | 1 << j) | (m >> i & 1) << j | (m >> j & 1) << i for m in range(2**n)]
    value = table + table[swapped]
    masks = shuffled_table(n, seed)
    values = estimate(n, masks, value[masks]).values
    assert values[i] == pytest.approx(values[j], abs=1e-9)


@quick
@given(st.integers(1, 9), dice)
def test_null_player_gets_zero_from_the_complete_table(n: int, seed: int):
    rng = np.random.default_rng(seed)
    i = int(rng.integers(n))
    value = rng.normal(size=2**n)[[m & ~(1 << i) for m in range(2**n)]]
    masks = shuffled_table(n, seed)
    assert estimate(n, masks, value[masks]).values[i] == pytest.approx(0.0, abs=1e-9)


@quick
@given(st.integers(1, 8), st.integers(2, 256), dice)
def test_least_squares_is_additive_over_games(n: int, count: int, seed: int):
    masks, rng = first(n, count, seed), np.random.default_rng(seed)
    a, b = rng.normal(size=(2, len(masks)))
    weights = weights_for(n, masks)
    np.testing.assert_allclose(weights @ (2 * a - 3 * b), 2 * (weights @ a) - 3 * (weights @ b), atol=1e-9)


@quick
@given(st.integers(2, 10), st.integers(0, 100), dice)
def test_additive_game_is_exact_from_any_part_that_shows_every_player(n: int, more: int, seed: int):
    rng = np.random.default_rng(seed)
    own = rng.normal(size=n)
    masks = first(n, 2 * n + 2 + more, seed)
    estimated = estimate(n, masks, 0.3 + members(n)[masks] @ own)
    np.testing.assert_allclose(estimated.values, own, atol=1e-7)


@quick
@given(st.integers(2, 9), st.integers(0, 60), dice, st.floats(0.01, 100.0), st.floats(-10, 10))
def test_values_scale_with_the_unit_and_ignore_the_offset_of_quality(
    n: int, more: int, seed: int, unit: float, zero: float
):
    masks = first(n, 2 * n + 2 + more, seed)
    value = game_of_interactions(n, np.random.default_rng(seed))[masks]
    a, b = estimate(n, masks, value), estimate(n, masks, unit * value + zero)
    np.testing.assert_allclose(b.values, unit * a.values, atol=1e-5 * unit)
    np.testing.assert_allclose(b.design_se, unit * a.design_se, atol=1e-5 * unit)


@quick
@given(st.integers(4, 8), st.integers(0, 40), dice)
def test_values_do_not_depend_on_player_order(n: int, more: int, seed: int):
    rng = np.random.default_rng(seed)
    masks, value = first(n, 2 * n + 2 + more, seed), game_of_interactions(n, rng)
    name = rng.permutation(n)
    renamed = [sum(1 << int(name[i]) for i in range(n) if m >> i & 1) for m in masks]
    estimated, other = estimate(n, masks, value[masks]), estimate(n, renamed, value[masks])
    np.testing.assert_allclose(other.values[name], estimated.values, atol=1e-6)


def test_missing_empty_or_full_coalition_raises():
    with pytest.raises(ValueError, match="empty and the full"):
        weights_for(3, [0, 1, 2, 4])
    with pytest.raises(ValueError, match="empty and the full"):
        weights_for(3, [7, 1, 2, 4])


def test_only_empty_and_full_coalition_give_equal_values():
    np.testing.assert_allclose(estimate(4, [0, 15], np.array([0.2, 0.6])).values, [0.1] * 4)


# -- which coalitions


@pytest.mark.parametrize("n", range(11))
def test_order_lists_every_coalition_once(n: int):
    masks = list(coalition_order(n, rng_seed=n))
    assert len(masks) == 2**n
    assert set(masks) == set(range(2**n))


@pytest.mark.parametrize("n", [3, 4, 5, 8, 17, 25])
def test_empty_full_solos_and_leave_one_outs_come_first_then_pairs(n: int):
    full, masks = 2**n - 1, first(n, min(2**n, 300))
    assert masks[:2] == [0, full]
    assert masks[2 : n + 2] == [1 << i for i in range(n)]
    assert masks[n + 2 : 2 * n + 2] == [full ^ 1 << i for i in range(n)]
    rest = masks[2 * n + 2 :]
    assert all(a ^ b == full for a, b in zip(rest[::2], rest[1::2], strict=True))
    assert len(set(masks)) == len(masks)


@pytest.mark.parametrize("n", [8, 25])
def test_sizes_alternate(n: int):
    pairs = first(n, 2 * n + 2 + 4 * (n // 2 - 1))[2 * n + 2 :: 2]
    turn = list(range(2, n // 2 + 1))
    assert [m.bit_count() for m in pairs] == turn * 2


def test_order_depends_on_its_seed_alone():
    assert first(25, 200, seed=3) == first(25, 200, seed=3)
    assert first(25, 200, seed=3) != first(25, 200, seed=4)
    assert first(8, 100, seed=3) == first(8, 200, seed=3)[:100]


def test_exhausted_small_sizes_do_not_stop_the_order():
    masks = first(18, 2 * 18 + 2 + 2 * 8 * (18 * 17 // 2 + 5))  # beyond all pairs of two
    assert len(set(masks)) == len(masks)
    assert sum(m.bit_count() == 2 for m in masks) == 18 * 17 // 2


def test_estimate_for_25_players_never_lists_all_coalitions():
    n = 25
    masks = first(n, 200)
    value = np.array([np.tanh(0.1 * m.bit_count()) for m in masks])
    estimated = estimate(n, masks, value)
    tracemalloc.start()
    estimate(n, first(n, 200, seed=1), value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6  # a few matrices of 200 × 200; a bit for each of 2²⁵ coalitions is 4 MB, a number 268
    assert estimated.values.sum() == pytest.approx(value[1] - value[0])
    assert estimated.values.tolist() == estimate(n, first(n, 200), value).values.tolist()


def test_more_players_than_bits_in_a_machine_word_are_accepted():
    n = 70
    masks = first(n, 250)
    own = np.random.default_rng(0).normal(size=n)
    value = np.array([sum(own[i] for i in range(n) if m >> i & 1) for m in masks])
    np.testing.assert_allclose(estimate(n, masks, value).values, own, atol=1e-7)


def test_no_permutation_is_ever_listed():
    assert not hasattr(counterfactual, "itertools")
    assert "permutations(" not in inspect.getsource(counterfactual)


# -- accuracy of partial tables


def by_permutations(n: int, value: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Estimate by marginals along random orders until this many distinct coalitions were evaluated."""
    total, count, seen = np.zeros(n), np.zeros(n), {0, 2**n - 1}
    while True:
        mask = 0
        for i in rng.permutation(n).tolist():
            after = mask | 1 << i
            if after not in seen and len(seen) == budget:
                return total / np.maximum(count, 1)
            seen.add(after)
            total[i], count[i], mask = total[i] + value[after] - value[mask], count[i] + 1, after


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("budget", [32, 64, 128])
def test_partial_table_beats_sampled_permutations_of_equal_cost(game: str, budget: int):
    n, ours, theirs = 8, [], []
    for k in range(30):
        rng = np.random.default_rng(k)
        value = GAMES[game](n, rng)
        exact = exact_weights(n) @ value
        masks = first(n, budget, seed=k)
        ours.append(np.abs(estimate(n, masks, value[masks]).values - exact).mean())
        theirs.append(np.abs(by_permutations(n, value, budget, rng) - exact).mean())
    assert np.mean(ours) < 0.5 * np.mean(theirs)


@pytest.mark.parametrize("game", GAMES)
def test_more_evaluations_reduce_the_error(game: str):
    n, error = 8, {24: [], 64: [], 128: [], 240: []}
    for k in range(30):
        value = GAMES[game](n, np.random.default_rng(k))
        for budget, errors in error.items():
            masks = first(n, budget, seed=k)
            errors.append(np.abs(estimate(n, masks, value[masks]).values - exact_weights(n) @ value).mean())
    means = [np.mean(errors) for errors in error.values()]
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.2 * means[0]


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("n", [7, 8, 9])
def test_stated_design_error_covers_the_unevaluated_coalitions(game: str, n: int):
    within = []
    for k in range(60):
        value = GAMES[game](n, np.random.default_rng(k))
        masks = first(n, 2**n // 4, seed=k)
        estimated = estimate(n, masks, value[masks])
        within += (np.abs(estimated.values - exact_weights(n) @ value) <= 2 * estimated.design_se).tolist()
    assert np.mean(within) >= 0.8


# -- errors over samples


def test_errors_are_those_of_per_sample_values():
    n, rng = 3, np.random.default_rng(0)
    masks, scores = shuffled_table(n, 0), rng.normal(size=(8, 40))
    table = scores[np.argsort(masks)]
    each = np.array([textbook(n, table[:, s]) for s in range(40)])  # [N, n]
    estimated = estimate(n, masks, scores)
    np.testing.assert_allclose(estimated.values, each.mean(0), atol=1e-12)
    np.testing.assert_allclose(estimated.se, each.std(0, ddof=1) / np.sqrt(40), atol=1e-12)


def test_without_samples_no_error_is_reported():
    assert np.isnan(estimate(2, range(4), np.arange(4.0)).se).all()
    assert np.isnan(estimate(2, range(4), np.arange(4.0)[:, None]).se).all()


def test_interactions_are_second_differences_of_solos_with_paired_errors():
    n, rng = 4, np.random.default_rng(1)
    masks, scores = shuffled_table(n, 1), rng.normal(size=(16, 30))
    at = {m: scores[k] for k, m in enumerate(masks)}
    value, se = interactions(n, masks, scores)
    for i, j in permutations(range(n), 2):
        d = [at[1 << i | 1 << j][s] - at[1 << i][s] - at[1 << j][s] + at[0][s] for s in range(30)]
        assert value[i, j] == pytest.approx(np.mean(d))
        assert se[i, j] == pytest.approx(np.std(d, ddof=1) / np.sqrt(30))
    assert np.isnan(np.diag(value)).all()
    assert np.isnan(np.diag(se)).all()


def test_two_players_have_an_interaction():
    value, se = interactions(2, [0, 1, 2, 3], np.array([0.5, 0.6, 0.7, 0.7]))
    assert value[0, 1] == value[1, 0] == pytest.approx(-0.1)
    assert np.isnan(se).all()


def test_interactions_of_unevaluated_pairs_are_unknown():
    value, _ = interactions(3, [0, 1, 2, 4, 3, 7], np.arange(6.0))
    assert np.isfinite(value).tolist() == [[False, True, False], [True, False, False], [False] * 3]
