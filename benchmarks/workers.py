"""Speed-up of a training run by several processes over one process, measured in turn.

Wall time of whole rounds on the reference CNN, 16 environments: their episodes, the exchange of rollouts, the update,
the checkpoint. The first round, which trains the no-growth baselines, is not counted. The benchmark needs
as many idle cores as processes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.hosts import reference_task
from benchmarks.measure import add_output_options, make_parser, print_json
from esper.simic.evaluation.no_growth_baseline import BASELINES
from esper.simic.training.config import load_config
from esper.simic.training.distributed import RENDEZVOUS, ProcessGroup
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tolaria.tasks import TASKS


def main() -> None:
    parser = make_parser(__doc__, repeats=3, min_repeats=1)
    parser.add_argument("--workers", type=int, default=2, help="processes to compare with one (default 2)")
    add_output_options(parser)
    options = parser.parse_args()
    if options.workers < 2:
        parser.error(f"--workers must be at least 2, got {options.workers}")
    results = measure(options.workers, options.repeats, options.quick)
    if options.json:
        print_json(results)
        return
    title = f"medians of {options.repeats} repeats in turn"
    table = Table("processes", "seconds a round", "times as fast", title=title)
    table.add_row("1", f"{results['round_s']['1']:.2f}", "1.00")
    table.add_row(str(options.workers), f"{results['round_s'][str(options.workers)]:.2f}", f"{results['speedup']:.2f}")
    Console().print(table)


def measure(workers: int, repeats: int, quick: bool) -> dict[str, Any]:
    spent: dict[int, list[float]] = {1: [], workers: []}
    with tempfile.TemporaryDirectory() as baselines:
        for i in range(repeats):
            for size in (1, workers) if i % 2 else (workers, 1):
                spent[size].append(round_s(size, quick, Path(baselines)))
    ratios = [alone / together for alone, together in zip(spent[1], spent[workers], strict=True)]
    return {
        "workers": workers,
        "cores": os.cpu_count(),
        "repeats": repeats,
        "round_s": {str(size): statistics.median(seconds) for size, seconds in spent.items()},
        "speedup": statistics.median(ratios),
        "speedups": ratios,
    }


def round_s(size: int, quick: bool, baselines: Path) -> float:
    """Return the median wall seconds of a round by a group of this size. Baselines are trained once for all runs."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / BASELINES).symlink_to(baselines)
        code = f"from benchmarks.workers import run_rank; run_rank({quick}, {place!r})"
        command = [sys.executable, "-c", code]
        environments = [os.environ | {RENDEZVOUS: f"{rank}/{size}/{place}/meeting"} for rank in range(size)]
        ranks = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for env in environments]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {size} failed: exit codes {[rank.returncode for rank in ranks]}")
    return float(json.loads(outputs[0]))


def run_rank(quick: bool, place: str) -> None:
    """Run one rank's part; rank 0 prints the median seconds of its rounds."""
    torch.set_num_threads(1)
    size, envs, steps = (16, 4, 1) if quick else (512, 16, 6)
    TASKS["reference"] = reference_task(size, size)
    shape = [f"envs={envs}", f"worlds={envs}", f"epochs={steps}", "rounds=2", "ppo.minibatches=2"]
    config = load_config(sets=["task=reference", "rules.birth=isolated", *shape])  # as in the stored measurements
    group = ProcessGroup.join()
    ends: list[float] = []
    train_ppo_vectorized(
        config, directory=Path(place), group=group, on_round=lambda _: ends.append(time.perf_counter())
    )
    group.leave()
    if group.is_rank_zero:
        print(json.dumps(statistics.median(b - a for a, b in pairwise(ends))))


if __name__ == "__main__":
    main()
