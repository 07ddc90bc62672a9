"""Features, masks and legal operations of a whole batch against sequential Python: microseconds and ratios.

The reference (`tests/reference/observations.py`) walks environments and slots one by one. Reading the table into its
report objects is not timed. One process, one thread; both sides run in turn, and medians are reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import add_output_options, make_parser, print_json, timed
from esper.leyline.lifecycle import legal
from esper.tamiyo.policy.action_masks import DEFAULT_FIXED, compute_batch_masks
from esper.tamiyo.policy.features import batch_obs_to_features, num_features
from tests.reference.observations import reports, slow_features, slow_masks, slow_prices
from tests.support.observation_context import example_context
from tests.support.random_tables import LIVELY, random_table

SIZES = ((4, 3), (16, 3), (128, 3), (128, 9), (128, 25))
"""(environments, slots)."""


def main() -> None:
    parser = make_parser(__doc__, repeats=9)
    add_output_options(parser)
    options = parser.parse_args()
    results = rows(options.repeats, options.quick)
    if options.json:
        print_json(results)
        return
    table = Table("what", "envs", "slots", "µs", "reference µs", "ratio", title="Observation of all environments")
    for row in results:
        reference = [f"{row['reference_us']:,.0f}", f"{row['ratio']:,.0f}×"] if row["ratio"] else ["", ""]
        table.add_row(row["what"], str(row["envs"]), str(row["slots"]), f"{row['us']:,.0f}", *reference)
    Console().print(table)


def rows(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Return the median microseconds of each function and of its reference, alternating on one thread."""
    torch.set_num_threads(1)
    results = []
    for envs, slots in SIZES[:: 4 if quick else 1]:
        for name, (ours, reference) in pairs(envs, slots).items():
            results.append({"what": name, "envs": envs, "slots": slots, **compare(ours, reference, repeats)})
    return results


Work = Callable[[], Any]


def pairs(envs: int, slots: int) -> dict[str, tuple[Work, Work | None]]:
    """Return each function with its reference, on the same table. `legal` is an input of both and is timed alone."""
    table = random_table(envs, slots, seed=0, epochs=40)
    context = example_context(slots)
    ops = legal(table, LIVELY)
    plain, prices = reports(table, ops), slow_prices(table.takes, context)
    out = np.empty((envs, num_features(slots)), dtype=np.float32)
    return {
        "features": (
            lambda: batch_obs_to_features(table, context, legal=ops, out=out),
            lambda: slow_features(plain, context, prices),
        ),
        "masks": (
            lambda: compute_batch_masks(table, ops, fixed=DEFAULT_FIXED),
            lambda: slow_masks(plain, table.takes, DEFAULT_FIXED),
        ),
        "legal": (lambda: legal(table, LIVELY), None),
    }


INNER = 20
"""Calls of the fast function per repeat; a single call is too short for the clock."""


def compare(ours: Work, reference: Work | None, repeats: int) -> dict[str, float | None]:
    def many() -> None:
        for _ in range(INNER):
            ours()

    many()
    fast, slow = [], []
    for _ in range(repeats):
        fast.append(1e6 * timed(many) / INNER)
        if reference is not None:
            slow.append(1e6 * timed(reference))
    ratio = statistics.median(b / a for a, b in zip(fast, slow, strict=True)) if slow else None
    return {"us": statistics.median(fast), "reference_us": statistics.median(slow) if slow else None, "ratio": ratio}


if __name__ == "__main__":
    main()
