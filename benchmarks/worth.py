"""Cost of measuring the worth of seeds, and accuracy of the estimates.

Coalitions against one validation pass; Shapley values for 3 to 25 players, their time and error; and the share
of a step that measuring takes: training an epoch, validation with coalitions, computing worth.
"""

from __future__ import annotations

import statistics
import time
from itertools import islice
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.body import coalition_ratios, planted_network
from benchmarks.hosts import BLUEPRINTS, reference_task
from benchmarks.measure import add_output_options, make_parser, print_json, timed
from esper.simic.attribution import CounterfactualEngine
from esper.simic.attribution.counterfactual import coalition_order, estimate, exact_weights

PLAYERS = (3, 5, 8, 10, 12, 25)
BUDGET = 200
"""Maximum number of coalitions that are evaluated."""


def main() -> None:
    parser = make_parser(__doc__, repeats=15)
    add_output_options(parser)
    options = parser.parse_args()
    results = measure(options.repeats, options.quick)
    if options.json:
        print_json(results)
    else:
        print_tables(results)


def measure(repeats: int, quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    size = 16 if quick else 512
    return {
        "shapley": [shapley_row(n, 3 if quick else repeats) for n in PLAYERS],
        "coalitions": coalition_ratios(reference_task(size, size), BLUEPRINTS, repeats),
        "share of a step": step_shares(size, repeats),
    }


def print_tables(results: dict[str, Any]) -> None:
    console = Console()
    table = Table("players", "evaluations", "ms", "relative error", title="Shapley values of games with interactions")
    for row in results["shapley"]:
        error = "exact" if row["error"] == 0 else f"{row['error']:.4f}" if row["error"] is not None else "not known"
        table.add_row(str(row["players"]), str(row["evaluations"]), f"{row['ms']:.2f}", error)
    console.print(table)
    table = Table("what", "ratio", title="Coalitions of 3 live seeds, 512 images, one thread")
    for key, value in results["coalitions"].items():
        table.add_row(key, f"{value:.3f}")
    console.print(table)
    table = Table("phase", "share of a step", title="Where a step with 3 live seeds goes")
    for key, value in results["share of a step"].items():
        table.add_row(key, f"{value:.1%}")
    console.print(table)


def shapley_row(n: int, repeats: int) -> dict[str, Any]:
    """Return the time of one estimate without the evaluations, and its error if the exact values are known."""
    masks = list(islice(coalition_order(n), min(2**n, BUDGET)))
    rng = np.random.default_rng(n)
    seconds, errors = [], []
    for _ in range(repeats):
        values = game(n, rng) if n <= 12 else None
        scores = values[masks] if values is not None else rng.normal(size=len(masks))
        start = time.perf_counter()
        estimated = estimate(n, masks, scores)
        seconds.append(time.perf_counter() - start)
        if values is not None:
            truth = exact_weights(n) @ values
            errors.append(float(np.abs(estimated.values - truth).mean() / np.abs(truth).mean()))
    error = None if not errors else 0.0 if len(masks) == 2**n else statistics.mean(errors)
    return {"players": n, "evaluations": len(masks), "ms": 1e3 * statistics.median(seconds), "error": error}


def game(n: int, rng: np.random.Generator) -> Any:
    """Return the values of all coalitions of a random game whose interactions decrease with their order."""
    value = rng.normal(size=2**n) * 0.4 ** np.maximum(np.array([m.bit_count() for m in range(2**n)]) - 1, 0)
    value[0] = 0.0
    for i in range(n):  # from interactions to values: sum over all subsets, one player at a time
        cube = value.reshape(-1, 2, 2**i)
        cube[:, 1] += cube[:, 0]
    return value


def step_shares(size: int, repeats: int) -> dict[str, float]:
    task = reference_task(size, size)
    network = planted_network(task, BLUEPRINTS)
    calibration = network.data.train.x[:128]
    result = network.validate(network.data.val, calibration)
    phases = {
        "train (5 batches)": lambda: network.train_epoch(0),
        "validate with 8 coalitions": lambda: network.validate(network.data.val, calibration),
        "worth and exact Shapley": lambda: CounterfactualEngine.worth(result),
    }
    medians = {name: statistics.median(timed(work) for _ in range(repeats)) for name, work in phases.items()}
    whole = sum(medians.values())
    return {name: value / whole for name, value in medians.items()}


if __name__ == "__main__":
    main()
