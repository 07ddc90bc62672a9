"""Episodes per minute of task families against the task `rescue`, measured in turn.

A round is one call of `train_ppo_vectorized`, the function that `esper train` calls, with a new policy: hosts,
observations, decisions, training, validation, worth, rewards and the update. Telemetry and checkpoints are off, and
no-growth baselines are given: a run trains one for each world that no run of the user has visited before.

Every process has one thread and plays a round of each task in every repeat, in alternating order; the first repeat is
not counted. Times are CPU time of the process, so other work on the machine does not count; episodes per minute are
those of all processes if each has a core of its own. Ratios are medians over processes and repeats. Worlds of a family
differ in cost, so the ratio of all rounds together is given, too. Episodes of these tasks differ in length: see also
the ratios per decision (one per epoch) and per minibatch.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import add_output_options, make_parser, print_json, timed
from esper.simic.env import HostBackend
from esper.simic.family_backend import FamilyBackend
from esper.simic.training.config import load_config
from esper.simic.training.vectorized import make_env, train_ppo_vectorized

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Case:
    """A task or family, and the episodes of one round in one process; `epochs` replaces their length."""

    task: str
    envs: int
    epochs: int | None = None


CASES = (Case("rescue", 2), Case("mend", 6), Case("triage", 12))
"""The first is the reference. Rounds take about the same time."""
QUICK = tuple(Case(case.task, envs=1, epochs=1) for case in CASES)
COUNTS = ("episodes", "decisions", "batches")


@dataclass(frozen=True, slots=True)
class RoundWork:
    """What one round did: CPU seconds, episodes, decisions, minibatches and the samples in them."""

    seconds: float
    episodes: int
    decisions: int
    batches: int
    samples: int


def play_round(case: Case, rng_seed: int) -> RoundWork:
    """Train for one round in worlds that depend on `rng_seed`, and return what it did."""
    sets = [f"task={case.task}", f"envs={case.envs}", f"seed={rng_seed}", "rounds=1", "ppo.minibatches=1"]
    config = load_config(sets=sets, more={"epochs": case.epochs})
    env = make_env(config)
    backend = env.backend
    assert isinstance(backend, (HostBackend, FamilyBackend))
    backend.add_baselines({world: [0.1] * backend.horizon for world in range(config.pool)})
    seconds = timed(lambda: train_ppo_vectorized(config, env=env))
    hosts = backend.hosts if isinstance(backend, FamilyBackend) else [backend] * case.envs
    epochs = [host.horizon for host in hosts]
    batches = [host.horizon * host.task.batches_per_epoch for host in hosts]
    samples = [count * host.task.batch for count, host in zip(batches, hosts, strict=True)]
    return RoundWork(seconds, case.envs, sum(epochs), sum(batches), sum(samples))


def play_rounds(worker: int, repeats: int, quick: bool) -> list[list[RoundWork]]:
    """Return the rounds of one process, by repeat and case."""
    torch.set_num_threads(1)
    cases = QUICK if quick else CASES
    rounds = []
    for repeat in range(repeats + 1):
        order = cases if repeat % 2 else cases[::-1]
        played = {case: play_round(case, 1_000 * worker + repeat) for case in order}
        rounds.append([played[case] for case in cases])
    return rounds[1:]


def print_rounds(worker: int, repeats: int, quick: bool) -> None:
    """Print the rounds of one process as JSON."""
    print(msgspec.json.encode(play_rounds(worker, repeats, quick)).decode())


def play_all(workers: int, repeats: int, quick: bool) -> list[list[list[RoundWork]]]:
    """Return the rounds of all processes, which run at the same time."""
    code = "from benchmarks.episodes import print_rounds; print_rounds({}, {}, {})"
    commands = [[sys.executable, "-c", code.format(worker, repeats, quick)] for worker in range(workers)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for command in commands]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a process failed: exit codes {[process.returncode for process in processes]}")
    return [msgspec.json.decode(output, type=list[list[RoundWork]]) for output in outputs]


def measure(workers: int, repeats: int, quick: bool) -> dict[str, Any]:
    """Return the rates of every case and their ratios to the first one."""
    by_worker = play_all(workers, repeats, quick)
    rows = []
    for i, case in enumerate(QUICK if quick else CASES):
        pairs = [(rounds[i], rounds[0]) for worker in by_worker for rounds in worker]
        ours = [one for one, _ in pairs]
        episodes = sum(one.episodes for one in ours)
        row: dict[str, Any] = {"task": case.task, "episodes": episodes}
        for name in COUNTS:
            rates = [(getattr(a, name) / a.seconds, getattr(b, name) / b.seconds) for a, b in pairs]
            row[f"{name}_per_minute"] = 60 * workers * statistics.median(rate for rate, _ in rates)
            row[f"{name}_ratio"] = statistics.median(rate / reference for rate, reference in rates)
            row[f"{name}_ratios"] = [rate / reference for rate, reference in rates]
            row[f"{name}_ratio_of_totals"] = total_rate(ours, name) / total_rate([b for _, b in pairs], name)
        row["decisions_per_episode"] = sum(one.decisions for one in ours) / episodes
        row["batches_per_episode"] = sum(one.batches for one in ours) / episodes
        row["samples_per_batch"] = sum(one.samples for one in ours) / sum(one.batches for one in ours)
        rows.append(row)
    return {"workers": workers, "repeats": repeats, "rows": rows}


def total_rate(rounds: list[RoundWork], name: str) -> float:
    """Return episodes, decisions or minibatches per second of these rounds together."""
    return sum(getattr(one, name) for one in rounds) / sum(one.seconds for one in rounds)


def main() -> None:
    parser = make_parser(__doc__, repeats=5, min_repeats=1)
    parser.add_argument("--workers", type=int, default=2, help="processes, one core each (default 2)")
    add_output_options(parser)
    options = parser.parse_args()
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    results = measure(options.workers, options.repeats, options.quick)
    if options.json:
        print_json(results)
        return
    print_table(results)


def print_table(results: dict[str, Any]) -> None:
    """Print one column per task."""
    rows = results["rows"]
    title = f"{results['workers']} processes, {results['repeats']} repeats in turn"
    table = Table("", *(row["task"] for row in rows), title=title)
    table.add_row("episodes measured", *(str(row["episodes"]) for row in rows))
    table.add_row("decisions per episode", *(f"{row['decisions_per_episode']:.1f}" for row in rows))
    table.add_row("minibatches per episode", *(f"{row['batches_per_episode']:.0f}" for row in rows))
    table.add_row("samples per minibatch", *(f"{row['samples_per_batch']:.0f}" for row in rows))
    for name, label in zip(COUNTS, ("episodes", "decisions", "minibatches"), strict=True):
        table.add_row(f"{label} per minute", *(f"{row[f'{name}_per_minute']:.1f}" for row in rows))
        ratio = f"{label} per minute / {rows[0]['task']}"
        table.add_row(f"{ratio}, median", *(f"{row[f'{name}_ratio']:.2f}" for row in rows))
        table.add_row(f"{ratio}, all rounds", *(f"{row[f'{name}_ratio_of_totals']:.2f}" for row in rows))
    Console().print(table)


if __name__ == "__main__":
    main()
