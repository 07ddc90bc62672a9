"""Shapley values from the values of coalitions: exact from a full table, anytime from a part of it.

A coalition is a bitmask over n players; bit i is player i. Every estimate here is linear in the coalition
values, φ = A·v, so the same matrix turns per-sample scores [K, N] into per-sample Shapley values [n, N], and
their spread into standard errors. Permutations are never listed.

Legend: n players, K evaluated coalitions, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, factorial

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
EXACT_PLAYERS = 6
"""Up to so many players the whole table of 2ⁿ coalitions is evaluated."""
ENUMERABLE_PLAYERS = 16
"""Up to so many players the coalitions of a size are listed and shuffled; above they are drawn."""


@lru_cache(maxsize=32)
def exact_weights(n: int) -> Array:
    """[n, 2ⁿ]: Shapley values from the values of all coalitions in the order of their bitmasks."""
    masks = np.arange(2**n)
    size = np.array([m.bit_count() for m in masks.tolist()])
    gain = np.array([factorial(s - 1) * factorial(n - s) / factorial(n) if s else 0.0 for s in range(n + 1)])
    loss = np.array([factorial(s) * factorial(n - s - 1) / factorial(n) if s < n else 0.0 for s in range(n + 1)])
    member = (masks[None, :] >> np.arange(n)[:, None]) & 1 == 1  # [n, 2ⁿ]
    weights: Array = np.where(member, gain[size], -loss[size])
    weights.setflags(write=False)
    return weights


def coalition_order(n: int, seed: int = 0) -> Iterator[int]:
    """Distinct coalitions, the most telling first: none, all, each alone, all but one, then complementary pairs.

    Pairs matter: in a pair S and its complement every interaction of even order cancels. Sizes take turns, so
    that any prefix is balanced over sizes; it ends when all 2ⁿ are out.
    """
    full = 2**n - 1
    yield 0
    if n == 0:
        return
    yield full
    if n == 1:
        return
    for i in range(n):
        yield 1 << i
    if n == 2:
        return
    for i in range(n):
        yield full ^ (1 << i)
    rng = np.random.default_rng(seed)
    turns = [_of_size(n, size, rng) for size in range(2, n // 2 + 1)]
    while turns:
        for stream in list(turns):
            mask = next(stream, None)
            if mask is None:
                turns.remove(stream)
                continue
            yield mask
            yield full ^ mask


def _of_size(n: int, size: int, rng: np.random.Generator) -> Iterator[int]:
    """Distinct coalitions of one size in random order; of size n/2 one of each complementary pair."""
    half = 2 * size == n
    if n <= ENUMERABLE_PLAYERS:
        masks = [m for m in range(2**n) if m.bit_count() == size and not (half and m & 1)]
        rng.shuffle(masks)
        yield from masks
        return
    seen: set[int] = set()
    while len(seen) < comb(n, size) // (2 if half else 1):
        mask = sum(1 << int(i) for i in rng.choice(n, size, replace=False))
        if half and mask & 1:
            mask ^= 2**n - 1
        if mask not in seen:
            seen.add(mask)
            yield mask


@dataclass(frozen=True, slots=True)
class Estimate:
    """Shapley values and what is known of their error."""

    values: Array  # [n]
    se: Array  # [n] from the spread over samples; NaN where values came without samples
    design_se: Array  # [n] from the coalitions that were not evaluated; 0 if all were
    evaluations: int


def weights_for(n: int, masks: Sequence[int]) -> Array:
    """[n, K]: Shapley values from these coalitions, by one constrained weighted least squares.

    It fits v(S) ≈ v(∅) + Σ φ_i over all coalitions under Σφ = v(all) − v(none), with the Shapley kernel's weight
    of each size shared among those evaluated of that size. With all 2ⁿ coalitions it is exact.
    """
    column = {mask: k for k, mask in enumerate(masks)}
    full = 2**n - 1
    if 0 not in column or full not in column:
        raise ValueError("the empty and the full coalition must be among those evaluated")
    operator = np.zeros((n, len(masks)))
    if n == 1:
        operator[0, column[full]], operator[0, column[0]] = 1.0, -1.0
        return operator
    inner = [m for m in masks if m not in (0, full)]
    total = np.zeros(len(masks))  # v(all) − v(none) as a row
    total[column[full]], total[column[0]] = 1.0, -1.0
    if not inner:
        return np.repeat(total[None] / n, n, axis=0)
    member = np.array([[m >> i & 1 for i in range(n)] for m in inner], dtype=np.float64)  # [k, n]
    weight = _kernel(n, member.sum(1).astype(int))
    gram = member.T @ (weight[:, None] * member)
    project = np.linalg.pinv(gram, hermitian=True)
    free = np.zeros((n, len(masks)))  # unconstrained right-hand side, as an operator on v
    columns = [column[m] for m in inner]
    free[:, columns] = member.T * weight
    free[:, column[0]] -= (member.T * weight).sum(1)
    ones = project.sum(1)
    solution = project @ free
    return solution + np.outer(ones / ones.sum(), total - solution.sum(0))


def _kernel(n: int, sizes: npt.NDArray[np.int64]) -> Array:
    """The Shapley kernel's mass of each size, shared among the coalitions of that size."""
    counts = np.bincount(sizes, minlength=n)
    return (n - 1) / (sizes * (n - sizes)) / counts[sizes]


def estimate(n: int, masks: Sequence[int], scores: Array) -> Estimate:
    """Shapley values from coalition scores [K] or, per sample, [K, N]."""
    whole = len(masks) == 2**n and n <= EXACT_PLAYERS
    weights = exact_weights(n)[:, list(masks)] if whole else weights_for(n, masks)
    values = weights @ (scores if scores.ndim == 1 else scores.mean(1))
    se = np.full(n, np.nan)
    if scores.ndim == 2 and scores.shape[1] > 1:
        se = (weights @ scores).std(1, ddof=1) / np.sqrt(scores.shape[1])
    means = scores if scores.ndim == 1 else scores.mean(1)
    return Estimate(values, se, _design_se(n, masks, means, values), len(masks))


def _design_se(n: int, masks: Sequence[int], means: Array, values: Array) -> Array:
    """How far the fit may be off for want of the coalitions that were not evaluated.

    The residuals of the pairs, each the odd part that additive values do not explain, say how rough the game
    is; the sandwich turns them into an error, shrunk by the share of the cube already seen.
    """
    if len(masks) >= 2**n or n < 3:
        return np.zeros(n)
    full = 2**n - 1
    of = dict(zip(masks, means.tolist(), strict=True))
    pairs = [m for m in masks if m not in (0, full) and m < full ^ m and (full ^ m) in of]
    if not pairs:
        return np.full(n, np.nan)
    sign = np.array([[1.0 if m >> i & 1 else -1.0 for i in range(n)] for m in pairs])
    odd = np.array([of[m] - of[full ^ m] for m in pairs]) - sign @ values
    sizes = np.array([m.bit_count() for m in pairs])
    weight = _kernel(n, sizes)
    gram = np.linalg.pinv(sign.T @ (weight[:, None] * sign) / 2, hermitian=True)
    spread = gram @ ((sign * (weight * odd)[:, None]) / 2).T  # [n, pairs]
    seen = len(masks) / 2**n
    return np.sqrt((spread**2).sum(1) * max(0.0, 1.0 - seen))


def interactions(n: int, masks: Sequence[int], scores: Array) -> tuple[Array, Array]:
    """Pairwise interactions v(ij) − v(i) − v(j) + v(∅) and their paired errors, [n, n]; NaN where not evaluated."""
    row = {m: k for k, m in enumerate(masks)}
    value, se = np.full((n, n), np.nan), np.full((n, n), np.nan)
    for i in range(n):
        for j in range(i + 1, n):
            needed = ((1 << i) | (1 << j), 1 << i, 1 << j, 0)
            if all(m in row for m in needed):
                both, one, other, none = (scores[row[m]] for m in needed)
                second = both - one - other + none
                value[i, j] = value[j, i] = second.mean()
                if scores.ndim == 2 and scores.shape[1] > 1:
                    se[i, j] = se[j, i] = second.std(ddof=1) / np.sqrt(scores.shape[1])
    return value, se
