"""`esper bench check`: are we as fast as we were? Ratios of this machine, now, against ratios that were stored.

Every figure is our time over a reference's, both measured here and now in turn: it hardly depends on the machine, so
a stored one can be compared with. Larger is slower. A figure that is more than `most` worse is a loss.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from esper.commands import bench_gae, bench_obs
from esper.commands.bench_body import BLUEPRINTS, coalition_ratios, reference_task, train_ratio
from esper.commands.bench_train import Case, cases, compared, stacked_factor
from esper.leyline.errors import DataError
from esper.leyline.files import write_atomically

MOST_LOSS = 0.15


def figures(repeats: int) -> dict[str, float]:
    """Each figure by its name: our time over the reference's."""
    torch.set_num_threads(1)
    task = reference_task(256, 256)
    found = {}
    for name, (ours, twin) in bench_obs._pairs(128, 25).items():
        if twin is not None:
            found[f"{name} 128×25 / sequential"] = 1.0 / _number(bench_obs._compare(ours, twin, repeats)["ratio"])
    row = bench_gae.measure(128, 150, repeats)
    found |= {f"advantages 128×150 / {name[3:]}": 1.0 / v for name, v in row.items() if name in ("vs scalar", "vs SB3")}
    for seeds in (0, 3):
        found[f"train step, {seeds} seeds / bare"] = train_ratio(task, BLUEPRINTS[:seeds], repeats)
    found |= {f"{name} (mixed)": ratio for name, ratio in coalition_ratios(task, BLUEPRINTS, repeats).items()}
    for seeds in (0, 3):
        found[f"whole loop, {seeds} seeds / bare"] = compared(Case("", task, 2, BLUEPRINTS[:seeds]), repeats)["ratio"]
    for case in cases(quick=False):
        if case.strategy == "stacked" and not case.blueprints:
            found[f"{case.name}, {case.envs} as one stack / loop"] = 1.0 / stacked_factor(case, repeats)
    return found


def _number(value: Any) -> float:
    assert isinstance(value, float)
    return value


def run_check(file: Path, *, repeats: int, update: bool, measure: Callable[[int], dict[str, float]] = figures) -> bool:
    """Whether nothing is lost. With `update`, what is found now is stored instead of compared.

    A machine has bad moments: what is stored, and what looks like a loss, is the median of three measurements.
    """

    def measured(times: int) -> dict[str, float]:
        each = [measure(repeats) for _ in range(times)]
        return {name: statistics.median(one[name] for one in each) for name in each[0]}

    if not update:
        stored = read(file)
    found = measured(3) if update else measured(1)
    if update:
        write_atomically(file, json.dumps({n: round(v, 6) for n, v in found.items()}, indent=1).encode() + b"\n")
        Console().print(f"stored {len(found)} ratios in {file}")
        return True
    known = [name for name in stored if name in found]
    if any(found[name] > (1.0 + MOST_LOSS) * stored[name] for name in known):
        found = measured(3)
    losses = {name: found[name] / stored[name] - 1.0 for name in known}
    table = Table("our time / reference's", "stored", "now", "slower by", title="esper bench check")
    for name, loss in losses.items():
        mark = "[red]" if loss > MOST_LOSS else ""
        table.add_row(name, f"{stored[name]:.4g}", f"{found[name]:.4g}", f"{mark}{loss:+.0%}")
    Console().print(table)
    gone = sorted(stored.keys() - found.keys())
    if gone:
        raise DataError(f"{file} has figures that nobody measures any more: {', '.join(gone)}. Store anew: --update")
    return all(loss <= MOST_LOSS for loss in losses.values())


def read(file: Path) -> dict[str, float]:
    try:
        stored = {str(name): float(value) for name, value in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        raise DataError(f"there are no stored ratios in {file}: `esper bench check --update` stores them") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is no list of ratios: {error}") from error
    return stored
