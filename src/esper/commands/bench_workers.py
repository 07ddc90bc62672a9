"""`esper bench workers`: one training run by one process and by several, in turn; how much faster several are.

Wall time of whole rounds on the reference CNN, 16 environments: their episodes, the exchange of rollouts, the update,
the checkpoint. The first round, which trains the twins, is left out. It needs as many idle cores as processes.
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

from esper.commands.bench_body import reference_task
from esper.simic.training.config import load_config
from esper.simic.training.team import MEETING, Team
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tolaria.tasks import TASKS


def run_bench(*, workers: int, repeats: int, as_json: bool, quick: bool) -> None:
    spent: dict[int, list[float]] = {1: [], workers: []}
    with tempfile.TemporaryDirectory() as twins:
        for i in range(repeats):
            for size in (1, workers) if i % 2 else (workers, 1):
                spent[size].append(round_s(size, quick, Path(twins)))
    ratios = [alone / together for alone, together in zip(spent[1], spent[workers], strict=True)]
    found: dict[str, Any] = {
        "workers": workers,
        "cores": os.cpu_count(),
        "repeats": repeats,
        "round_s": {str(size): statistics.median(seconds) for size, seconds in spent.items()},
        "speedup": statistics.median(ratios),
        "speedups": ratios,
    }
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(
        "processes", "seconds a round", "times as fast", title=f"esper bench workers, {repeats} repeats in turn"
    )
    for size in spent:
        faster = 1.0 if size == 1 else found["speedup"]
        table.add_row(str(size), f"{found['round_s'][str(size)]:.2f}", f"{faster:.2f}")
    Console().print(table)


def round_s(size: int, quick: bool, twins: Path) -> float:
    """Median wall seconds of a round by a team of this size. Twins are trained once, for all runs."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "twins").symlink_to(twins)
        command = [sys.executable, "-m", __spec__.name, "quick" if quick else "full", place]
        known = [os.environ | {MEETING: f"{rank}/{size}/{place}/meeting"} for rank in range(size)]
        ranks = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for env in known]
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {size} failed: exit codes {[rank.returncode for rank in ranks]}")
    return float(json.loads(said[0]))


def _rank(quick: bool, place: Path) -> None:
    """One rank's part; the leading one says how long its rounds took. Ranks share the twins of the run directory."""
    size, envs = (64, 4) if quick else (512, 16)
    TASKS["reference"] = reference_task(size, size)
    steps, rounds = (2, 2) if quick else (6, 2)
    shape = [f"envs={envs}", f"worlds={envs}", f"epochs={steps}", f"rounds={rounds}", "ppo.groups=2"]
    config = load_config(sets=["task=reference", *shape])
    team, ends = Team.join(), [time.perf_counter()]
    train_ppo_vectorized(config, directory=place, team=team, on_round=lambda told: ends.append(time.perf_counter()))
    team.leave()
    if team.leads:
        print(json.dumps(statistics.median(b - a for a, b in pairwise(ends[1:]))))


if __name__ == "__main__":
    torch.set_num_threads(1)
    _rank(sys.argv[1] == "quick", Path(sys.argv[2]))
