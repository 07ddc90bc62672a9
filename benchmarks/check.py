"""Compare this machine's speed ratios with stored ones: a loss of more than 15 % is an error (exit code 1).

Every figure is our time over a reference's, both measured in turn. Larger is slower. The reference does the same kind
of work as ours, so the ratio hardly depends on the machine: hosts are compared with bare PyTorch, observations with
plain numpy operations on arrays of the same shape. (Against a loop in pure Python, the same code was 22 % slower on
another processor.) A figure above the limit is measured three times, and the medians are compared.

    python -m benchmarks.check --only observations advantages
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
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
    parser.add_argument(
        "--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="measure these groups of figures"
    )
    options = parser.parse_args()

    def measure(repeats: int) -> dict[str, float]:
        return figures(repeats, options.only)

    whole = options.only == list(GROUPS)
    try:
        passed = run_check(
            options.against, repeats=options.repeats, update=options.update, measure=measure, whole=whole
        )
    except DataError as error:
        parser.exit(2, f"benchmarks.check: {error}\n")
    sys.exit(0 if passed else 1)


def numpy_operations(envs: int, slots: int) -> None:
    """Run operations of the kind and size that features and masks consist of."""
    x = _yardstick(envs, slots)
    for _ in range(10):
        y = np.where(x > 0.0, x, -x)
        y = y / (y + 1.0)
        np.minimum(np.log2(1.0 + y), 1.0, out=y)
        y[:, ::2].copy()


@lru_cache(maxsize=4)
def _yardstick(envs: int, slots: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(envs, slots)).astype(np.float32)


def of_observations(repeats: int) -> dict[str, float]:
    """Return features and masks against plain numpy operations."""
    envs, slots = 128, 25

    def reference() -> None:
        for _ in range(observations.INNER):
            numpy_operations(envs, slots)

    results = {}
    for name, (ours, slow) in observations.pairs(envs, slots).items():
        if slow is not None:
            ratio = observations.compare(ours, reference, repeats)["ratio"]
            assert ratio is not None
            results[f"{name} {envs}×{slots} / numpy operations"] = observations.INNER / ratio
    return results


def of_advantages(repeats: int) -> dict[str, float]:
    """Return advantages against Stable-Baselines3's, where it is installed."""
    ratio = gae.measure(128, 150, repeats)["vs SB3"]
    return {} if isinstance(ratio, str) else {"advantages 128×150 / SB3": 1.0 / ratio}


def of_bodies(repeats: int) -> dict[str, float]:
    """Return a training step and a validation with coalitions against the bare network."""
    task = reference_task(256, 256)
    results = {f"train step, {n} seeds / bare": train_ratio(task, BLUEPRINTS[:n], repeats) for n in (0, 3)}
    return results | {f"{name} (mixed)": ratio for name, ratio in coalition_ratios(task, BLUEPRINTS, repeats).items()}


def of_training(repeats: int) -> dict[str, float]:
    """Return `train_ppo_vectorized` against the bare loop."""
    task = reference_task(256, 256)
    results = {}
    for seeds in (0, 3):
        case = Case("", task, envs=2, steps=3, blueprints=BLUEPRINTS[:seeds])
        results[f"train_ppo_vectorized, {seeds} seeds / bare"] = compare(case, repeats)["ratio"]
    return results


def of_stacks(repeats: int) -> dict[str, float]:
    """Return equal hosts trained as one batch against a loop over them."""
    return {
        f"{case.name}, {case.envs} as one stack / loop": 1.0 / stacked_factor(case, repeats)
        for case in cases(quick=False)
        if case.strategy == "stacked" and not case.blueprints
    }


GROUPS: dict[str, Callable[[int], dict[str, float]]] = {
    "observations": of_observations,
    "advantages": of_advantages,
    "bodies": of_bodies,
    "training": of_training,
    "stacks": of_stacks,
}


def figures(repeats: int, groups: Iterable[str] = GROUPS) -> dict[str, float]:
    """Return each figure by its name: our time over the reference's."""
    torch.set_num_threads(1)
    return {name: ratio for group in groups for name, ratio in GROUPS[group](repeats).items()}


def run_check(
    file: Path,
    *,
    repeats: int,
    update: bool,
    measure: Callable[[int], dict[str, float]] = figures,
    whole: bool = True,
) -> bool:
    """Return whether no figure is lost. With `update`, store the measured figures instead.

    Stored figures and suspected losses are medians of three measurements. If `whole` is False, `measure` returns a
    part of the figures, and the others are neither compared nor changed.
    """

    def measured(times: int) -> dict[str, float]:
        each = [measure(repeats) for _ in range(times)]
        return {name: statistics.median(one[name] for one in each) for name in each[0]}

    stored = {} if update and whole else read(file)
    ratios = measured(3) if update else measured(1)
    if update:
        rounded = stored | {name: round(ratio, 6) for name, ratio in ratios.items()}
        write_atomically(file, json.dumps(rounded, indent=1).encode() + b"\n")
        Console().print(f"stored {len(ratios)} ratios in {file}")
        return True
    compared = [name for name in stored if name in ratios]
    if any(ratios[name] > (1.0 + MOST_LOSS) * stored[name] for name in compared):
        ratios = measured(3)
    losses = {name: ratios[name] / stored[name] - 1.0 for name in compared}
    table = Table("our time / reference's", "stored", "now", "slower by", title="speed against the stored ratios")
    for name, loss in losses.items():
        mark = "[red]" if loss > MOST_LOSS else ""
        table.add_row(name, f"{stored[name]:.4g}", f"{ratios[name]:.4g}", f"{mark}{loss:+.0%}")
    Console().print(table)
    unmeasured = sorted(stored.keys() - ratios.keys())
    if unmeasured and whole:
        raise DataError(
            f"{file} has figures that are no longer measured: {', '.join(unmeasured)}. Use --update to store the "
            "current ones"
        )
    return all(loss <= MOST_LOSS for loss in losses.values())


def read(file: Path) -> dict[str, float]:
    try:
        stored = {str(name): float(value) for name, value in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        raise DataError(
            f"there are no stored ratios in {file}: `python -m benchmarks.check --update` stores them"
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is not a list of ratios: {error}") from error
    return stored


if __name__ == "__main__":
    main()
