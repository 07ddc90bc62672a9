"""Counterfactual evaluation: which coalitions to evaluate, and the worth of seeds from their scores.

    CounterfactualEngine    coalitions(…) → configurations;  worth(result) → Worth
    CounterfactualHelper    process_batch(engine) → one Worth per environment, each epoch
    report                  worth of every seed of one body, including committed ones
    estimate, interactions  Shapley values and pairwise interactions from coalition values

All numbers come from one table of per-sample scores keyed by bitmask: differences are paired, and no configuration is
evaluated twice. Bit i of a coalition's bitmask is player i. Every estimate is linear in the coalition values, φ = A·v:
the same matrix turns per-sample scores [K, N] into per-sample Shapley values [n, N], whose spread gives the standard
errors. Permutations are never enumerated.

Legend: n players, K evaluated coalitions, N samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import comb, factorial
from typing import Any

import numpy as np
import torch

from esper.kasmina.body import Body
from esper.leyline.stages import SeedStage
from esper.simic.attribution.worth import Array, Worth
from esper.tolaria.coalitions import Coalitions, Config, Measured, Score, evaluate, statistics
from esper.tolaria.engine import Engine

DEFAULT_BUDGET = 200
"""Number of coalitions in a report with more than `EXACT_PLAYERS` players."""


class CounterfactualEngine:
    """Selects coalitions and turns their scores into worth. Stateless."""

    @staticmethod
    def coalitions(players: int, prospects: int = 0, *, budget: int | None = None, rng_seed: int = 0) -> list[Config]:
        """Return all coalitions of few players, or the most informative ones within a budget. Prospects are off.

        A budget below 2n + 2 does not cover each player alone and each player off, and is raised to that.
        """
        most = 2**players if players <= EXACT_PLAYERS else DEFAULT_BUDGET
        count = min(2**players, max(most if budget is None else budget, 2 * players + 2))
        masks = islice(coalition_order(players, rng_seed), count)
        return [tuple(bool(m >> i & 1) for i in range(players)) + (False,) * prospects for m in masks]

    @staticmethod
    def worth(result: Coalitions, fossils: tuple[str, ...] = ()) -> Worth:
        """Return everything that the scores determine. Scores are [K, N], or [K, N, Q] with quality first."""
        scores = result.scores if result.scores.ndim == 2 else result.scores[..., 0]
        basic = statistics(result, scores).tolist()
        measured = Measured.read(result, basic)
        half = len(basic) // 2
        values = scores.double().cpu().numpy()
        n = result.players
        inner = [k for k, config in enumerate(result.configs) if not any(config[n:])]
        masks = [sum(1 << i for i in range(n) if result.configs[k][i]) for k in inner]
        row = dict(zip(masks, values[inner], strict=True))
        solo = np.array([_paired(row.get(1 << i), row.get(0)) for i in range(n)]).reshape(n, 2)
        shapley = np.full((3, n), np.nan)
        if n and len(masks) >= min(2**n, 2 * n + 2) and 0 in row:
            fit = estimate(n, masks, values[inner])
            shapley[:] = fit.values, fit.se, fit.design_se
        interaction, interaction_se = interactions(n, masks, values[inner])
        contribution = np.array(list(measured.contribution.values())).reshape(n, 2)
        return Worth(
            slots=result.slots[:n],
            fossils=tuple(s in fossils for s in result.slots[:n]),
            quality=measured.quality,
            quality_se=basic[half],
            committed=measured.committed if result.committed in result.configs else float("nan"),
            contribution=contribution[:, 0],
            contribution_se=contribution[:, 1],
            solo=solo[:, 0],
            solo_se=solo[:, 1],
            shapley=shapley[0],
            shapley_se=shapley[1],
            shapley_design_se=shapley[2],
            interaction=interaction,
            interaction_se=interaction_se,
            evaluations=len(result.configs),
            prospect={k: v for k, v in measured.prospect.items() if np.isfinite(v[0])},
        )


def _paired(a: Array | None, b: Array | None) -> tuple[float, float]:
    """Return mean and standard error of the per-sample difference; NaN if one side was not evaluated."""
    if a is None or b is None:
        return float("nan"), float("nan")
    d = a - b
    return float(d.mean()), float(d.std(ddof=1) / np.sqrt(len(d))) if len(d) > 1 else float("nan")


class CounterfactualHelper:
    """Computes the worth of every environment's seeds after each epoch of the training loop."""

    def process_batch(self, engine: Engine) -> list[Worth]:
        """Return each environment's worth from its latest coalitions, and write the interactions into the table."""
        worths = [CounterfactualEngine.worth(result) for result in engine.coalitions]
        for e, worth in enumerate(worths):
            for i, name in enumerate(worth.slots):
                others = np.delete(worth.interaction[i], i)
                # without a finite value, no other player is left, or pairs were not evaluated
                total = np.nansum(others) if np.isfinite(others).any() else np.nan
                engine.table.interaction[e, engine.task.slots.index(name)] = total
        return worths


def report(
    body: Body,
    batches: Iterable[tuple[Any, Any]],
    score: Score,
    *,
    budget: int | None = None,
    tolerance: float | None = None,
    calibration: Any = None,
) -> Worth:
    """Return the worth of every seed of a body, including committed ones. For reports; gates do not use it.

    Shapley values are exact for up to six seeds. For more, `budget` limits the evaluated coalitions, and `tolerance`
    stops as soon as the error due to the missing coalitions is below it.
    """
    players, prospects = body.players(fossils=True), body.training_slots
    n = len(players)
    configs = CounterfactualEngine.coalitions(n, len(prospects), budget=budget)
    nobody = (False,) * len(prospects)
    rows = [(True,) * n + nobody[:i] + (True,) + nobody[i + 1 :] for i in range(len(prospects))]
    batches = list(batches)  # may be iterated more than once
    committed = tuple(s.name for s in players if s.stage == SeedStage.FOSSILIZED)
    take = len(configs) if tolerance is None or n <= EXACT_PLAYERS else 2 * n + 2
    done = evaluate(body, batches, score, configs=configs[:take] + rows, fossils=True, calibration=calibration)
    while True:
        worth = CounterfactualEngine.worth(done, committed)
        if take >= len(configs) or tolerance is None or float(worth.shapley_design_se.max()) <= tolerance:
            return worth
        more = configs[take : 2 * take]
        new = evaluate(body, batches, score, configs=more, fossils=True, calibration=calibration)
        take += len(more)
        done = Coalitions(done.slots, done.players, done.configs + new.configs, torch.cat([done.scores, new.scores]))


EXACT_PLAYERS = 6
"""Maximum number of players for which all 2ⁿ coalitions are evaluated."""
ENUMERABLE_PLAYERS = 16
"""Maximum number of players for which the coalitions of a size are listed and shuffled. Above, they are sampled."""


@lru_cache(maxsize=32)
def exact_weights(n: int) -> Array:
    """Return the matrix [n, 2ⁿ] from the values of all coalitions, ordered by bitmask, to Shapley values."""
    masks = np.arange(2**n)
    size = np.array([m.bit_count() for m in masks.tolist()])
    gain = np.array([factorial(s - 1) * factorial(n - s) / factorial(n) if s else 0.0 for s in range(n + 1)])
    loss = np.array([factorial(s) * factorial(n - s - 1) / factorial(n) if s < n else 0.0 for s in range(n + 1)])
    member = (masks[None, :] >> np.arange(n)[:, None]) & 1 == 1  # [n, 2ⁿ]
    weights: Array = np.where(member, gain[size], -loss[size])
    weights.setflags(write=False)
    return weights


def coalition_order(n: int, rng_seed: int = 0) -> Iterator[int]:
    """Yield distinct coalitions, the most informative first: none, all, each alone, all but one, complementary pairs.

    In a pair S and its complement, every interaction of even order cancels. Sizes alternate, so that any prefix is
    balanced over sizes. The iterator ends after all 2ⁿ coalitions.
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
    rng = np.random.default_rng(rng_seed)
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
    """Yield distinct coalitions of one size in random order; of size n/2 only one of each complementary pair."""
    half = 2 * size == n
    if n <= ENUMERABLE_PLAYERS:
        masks = [m for m in range(2**n) if m.bit_count() == size and not (half and m & 1)]
        rng.shuffle(masks)
        yield from masks
        return
    yielded: set[int] = set()
    while len(yielded) < comb(n, size) // (2 if half else 1):
        mask = sum(1 << int(i) for i in rng.choice(n, size, replace=False))
        if half and mask & 1:
            mask ^= 2**n - 1
        if mask not in yielded:
            yielded.add(mask)
            yield mask


@dataclass(frozen=True, slots=True)
class Estimate:
    """Shapley values and their errors."""

    values: Array  # [n]
    se: Array  # [n] from the spread over samples; NaN without per-sample scores
    design_se: Array  # [n] due to coalitions that were not evaluated; 0 if all were
    evaluations: int


def weights_for(n: int, masks: Sequence[int]) -> Array:
    """Return the matrix [n, K] from these coalitions to Shapley values, by constrained weighted least squares.

    It fits v(S) ≈ v(∅) + Σ φ_i over all coalitions under Σφ = v(all) − v(none). The Shapley kernel's weight of each
    size is divided among the evaluated coalitions of that size. With all 2ⁿ coalitions it is exact.
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
    sizes = member.sum(1).astype(int)
    weight = (n - 1) / (sizes * (n - sizes)) / np.bincount(sizes, minlength=n)[sizes]  # the Shapley kernel's
    gram = member.T @ (weight[:, None] * member)
    project = np.linalg.pinv(gram, hermitian=True)
    free = np.zeros((n, len(masks)))  # unconstrained right-hand side, as an operator on v
    columns = [column[m] for m in inner]
    free[:, columns] = member.T * weight
    free[:, column[0]] -= (member.T * weight).sum(1)
    ones = project.sum(1)
    solution = project @ free
    return solution + np.outer(ones / ones.sum(), total - solution.sum(0))


def estimate(n: int, masks: Sequence[int], scores: Array) -> Estimate:
    """Return Shapley values from coalition scores [K] or, per sample, [K, N].

    They are exact for a full table. For a part of it, the missing values are interpolated (`_interpolated`).
    """
    means = scores if scores.ndim == 1 else scores.mean(1)
    if len(masks) == 2**n:
        weights = exact_weights(n)[:, list(masks)] if n <= ENUMERABLE_PLAYERS else weights_for(n, masks)
        design_se = np.zeros(n)
    else:
        weights, design_se = _interpolated(n, masks, means)
    se = np.full(n, np.nan)
    if scores.ndim == 2 and scores.shape[1] > 1:
        se = (weights @ scores).std(1, ddof=1) / np.sqrt(scores.shape[1])
    return Estimate(weights @ means, se, design_se, len(masks))


def _interpolated(n: int, masks: Sequence[int], means: Array) -> tuple[Array, Array]:
    """Return Shapley values as a matrix [n, K] on the values, and the error due to the missing coalitions [n].

    The game is modelled as a Gaussian process on the cube of coalitions: an additive part of weight κ, and a smooth
    part with correlation ρ^|S△T| between coalitions that differ in |S△T| players; κ and ρ maximise the likelihood of
    the values. The posterior mean interpolates every value, its Shapley values have a closed form, and the posterior
    variance gives their error. For a game without structure (ρ and κ near 0) missing values are predicted by the
    mean; an additive game is left to least squares.
    """
    if 0 not in masks or 2**n - 1 not in masks:
        raise ValueError("the empty and the full coalition must be among those evaluated")
    member = np.array([[m >> i & 1 for i in range(n)] for m in masks], dtype=np.float64)  # [K, n]
    size, count = member.sum(1).astype(int), len(masks)
    apart = size[:, None] + size[None, :] - 2 * member @ member.T
    sides = member - 0.5
    additive = sides @ sides.T
    scale = float(np.abs(means - means.mean()).max())
    if scale == 0.0:
        return weights_for(n, masks), np.zeros(n)
    targets = np.stack([means / scale, np.ones(count)], axis=1)  # the values, and the constant term
    best = (-np.inf, 0.0, 0.0, 0.0, apart)
    for rho in CORRELATIONS:
        smooth = rho**apart + JITTER * np.eye(count)
        for kappa in ADDITIVE:
            factor = torch.linalg.cholesky(torch.from_numpy(smooth + kappa * additive)).numpy()
            value, ones = _solve(factor, targets).T
            residual = value - ones * (value @ ones) / (ones @ ones)
            variance = max(float(residual @ residual) / count, 1e-300)
            likelihood = -0.5 * count * np.log(variance) - float(np.log(np.diag(factor)).sum())
            if likelihood > best[0]:
                best = (likelihood, rho, kappa, variance, factor)
    _, rho, kappa, variance, factor = best
    reach = _reach(n, rho)
    inside = (1 - rho) * reach[np.maximum(size - 1, 0)]
    outside = (rho - 1) * reach[np.minimum(size, n - 1)]
    at_values = np.where(member.T == 1, inside, outside) + kappa * sides.T  # [n, K] Shapley values of the kernel
    whitened = _solve(factor, at_values.T)  # [K, n]
    prior = 2 * (1 - rho) * sum(comb(n - 1, t) * _share(n, t) * reach[t] for t in range(n)) + kappa
    design_se = scale * np.sqrt(variance * np.maximum(prior - (whitened**2).sum(0), 0.0))
    if kappa == ADDITIVE[-1]:
        return weights_for(n, masks), design_se
    ones = _solve(factor, np.ones((count, 1)))
    centred = whitened - ones * (ones.T @ whitened) / (ones**2).sum()
    weights = _solve(factor.T, centred, upper=True).T
    total = np.zeros(count)
    total[list(masks).index(2**n - 1)], total[list(masks).index(0)] = 1.0, -1.0
    return weights + (total - weights.sum(0)) / n, design_se


def _solve(triangle: Array, right: Array, upper: bool = False) -> Array:
    """Solve a triangular system. numpy would solve it as a full one, with its own threads."""
    matrix = torch.from_numpy(np.ascontiguousarray(triangle))
    return torch.linalg.solve_triangular(matrix, torch.from_numpy(np.ascontiguousarray(right)), upper=upper).numpy()


CORRELATIONS = (0.02, 0.3, 0.6, 0.85, 0.95)
ADDITIVE = (0.0, 0.1, 1.0, 10.0, 1e3, 1e6)
JITTER = 1e-9


def _share(n: int, size: int) -> float:
    """Return the weight of a coalition of `size` others in a Shapley value of n players."""
    return factorial(size) * factorial(n - 1 - size) / factorial(n)


@lru_cache(maxsize=256)
def _reach(n: int, rho: float) -> Array:
    """Return [n]: Σ over coalitions S of the n−1 others of share(|S|)·ρ^|S△T|, for T of size 0…n−1."""
    others = n - 1
    return np.array(
        [
            sum(
                comb(t, a) * comb(others - t, b) * _share(n, a + b) * rho ** (t - a + b)
                for a in range(t + 1)
                for b in range(others - t + 1)
            )
            for t in range(n)
        ]
    )


def interactions(n: int, masks: Sequence[int], scores: Array) -> tuple[Array, Array]:
    """Return pairwise interactions v(ij) − v(i) − v(j) + v(∅) and their paired errors, [n, n]; NaN if not evaluated."""
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
