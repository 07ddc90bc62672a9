"""Compare this machine's speed ratios with stored ones: a loss of more than 15 % is an error (exit code 1).

Every figure is our time over a reference's, both measured here and now in turn, so it hardly depends on the machine.
Larger is slower. A figure that looks lost is measured three times over, and the medians are compared.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import gae, observations
from benchmarks.body import coalition_ratios, train_ratio
from benchmarks.hosts import BLUEPRINTS, reference_task
from benchmarks.measure import make_parser
from benchmarks.train import Case, cases, compare, stacked_factor
from esper.leyline.atomic_io import write_atomically
from esper.leyline.errors import DataError

RATIOS = Path(__file__).with_name("ratios.json")
MOST_LOSS = 0.15


def main() -> None:
    parser = make_parser(__doc__, repeats=9)
    parser.add_argument("--against", type=Path, default=RATIOS, metavar="FILE", help="the stored ratios")
    parser.add_argument("--update", action="store_true", help="store what is measured now")
    options = parser.parse_args()
    try:
        passed = run_check(options.against, repeats=options.repeats, update=options.update)
    except DataError as error:
        parser.exit(2, f"benchmarks.check: {error}\n")
    sys.exit(0 if passed else 1)


def figures(repeats: int) -> dict[str, float]:
    """Return each figure by its name: our time over the reference's."""
    torch.set_num_threads(1)
    task = reference_task(256, 256)
    results = {}
    for name, (ours, reference) in observations.pairs(128, 25).items():
        if reference is not None:
            ratio = observations.compare(ours, reference, repeats)["ratio"]
            assert ratio is not None
            results[f"{name} 128×25 / sequential"] = 1.0 / ratio
    row = gae.measure(128, 150, repeats)
    results |= {f"advantages 128×150 / {k[3:]}": 1.0 / v for k, v in row.items() if k in ("vs scalar", "vs SB3")}
    for seeds in (0, 3):
        results[f"train step, {seeds} seeds / bare"] = train_ratio(task, BLUEPRINTS[:seeds], repeats)
    results |= {f"{name} (mixed)": ratio for name, ratio in coalition_ratios(task, BLUEPRINTS, repeats).items()}
    for seeds in (0, 3):
        case = Case("", task, envs=2, steps=3, blueprints=BLUEPRINTS[:seeds])
        results[f"train_ppo_vectorized, {seeds} seeds / bare"] = compare(case, repeats)["ratio"]
    for case in cases(quick=False):
        if case.strategy == "stacked" and not case.blueprints:
            results[f"{case.name}, {case.envs} as one stack / loop"] = 1.0 / stacked_factor(case, repeats)
    return results


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
    table = Table("our time / reference's", "stored", "now", "slower by", title="speed against the stored ratios")
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
        raise DataError(
            f"there are no stored ratios in {file}: `python -m benchmarks.check --update` stores them"
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is no list of ratios: {error}") from error
    return stored


if __name__ == "__main__":
    main()
