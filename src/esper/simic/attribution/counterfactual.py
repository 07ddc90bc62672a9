"""Counterfactual evaluation: which coalitions to evaluate, and the worth of seeds from their scores.

    CounterfactualEngine    coalitions(…) → configurations;  worth(result) → Worth
    CounterfactualHelper    process_batch(engine) → one Worth per environment, each epoch
    report                  worth of every seed of one body, including committed ones

All numbers come from one table of per-sample scores keyed by bitmask: differences are paired, and no configuration is
evaluated twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch

from esper.kasmina.body import Body
from esper.leyline.stages import SeedStage
from esper.simic.attribution.shapley import EXACT_PLAYERS, Array, coalition_order, estimate, interactions
from esper.simic.attribution.worth import Worth
from esper.tolaria.coalitions import Coalitions, Config, Measured, Score, evaluate, statistics
from esper.tolaria.engine import Engine

DEFAULT_BUDGET = 200
"""Number of coalitions in a report with more than `EXACT_PLAYERS` players."""


class CounterfactualEngine:
    """Selects coalitions and turns their scores into worth. Stateless."""

    @staticmethod
    def coalitions(players: int, prospects: int = 0, *, budget: int | None = None, seed: int = 0) -> list[Config]:
        """Return all coalitions of few players, or the most informative ones within a budget. Prospects are off.

        A budget below 2n + 2 does not cover each player alone and each player off, and is raised to that.
        """
        most = 2**players if players <= EXACT_PLAYERS else DEFAULT_BUDGET
        count = min(2**players, max(most if budget is None else budget, 2 * players + 2))
        masks = islice(coalition_order(players, seed), count)
        return [tuple(bool(m >> i & 1) for i in range(players)) + (False,) * prospects for m in masks]

    @staticmethod
    def worth(result: Coalitions, fossils: tuple[str, ...] = ()) -> Worth:
        """Return everything that the scores determine. Scores are [K, N], or [K, N, Q] with quality first."""
        scores = result.scores if result.scores.ndim == 2 else result.scores[..., 0]
        basic = statistics(result, scores).tolist()
        measured, half = Measured.read(result, basic), len(basic) // 2
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
        worths = [CounterfactualEngine.worth(result) for result in engine.judged]
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
