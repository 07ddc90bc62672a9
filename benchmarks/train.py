"""`train_ppo_vectorized` against the bare PyTorch loop that does the same host work.

    ours    whole rounds of the function that `esper train` calls: new hosts, policy, features, masks, rules, training,
            coalitions, Shapley values, governor and snapshots, reward, rollout buffer, PPO update, checkpoint, and
            telemetry `normal` into a run directory
    bare    forward, backward and optimiser step of the host with its live seeds as one plain module, and one validation
            pass per step, on the same batches

After each round of ours, the bare loop runs as many steps; the first round of both is not counted. One process with one
thread; times are CPU time of the process, threads of the hub included. The policy chooses and learns, but its actions
are not applied: live seeds are held in BLENDING, so that every step does the same work. No-growth baselines are given.

Coalitions are extra work, so they are shown separately: "/ bare + coalitions" is our time relative to the
bare loop plus the cost of coalitions beyond its one validation pass, norm statistics included.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.bare_loop import BareLoop
from benchmarks.bars import Bar, bars
from benchmarks.hosts import BLUEPRINTS, plant, reference_task
from benchmarks.measure import add_output_options, make_parser, print_json, timed
from esper.leyline.errors import TrainingError
from esper.leyline.lifecycle import Outcome
from esper.leyline.slot_table import Ints
from esper.leyline.stages import SeedStage
from esper.nissa.hub import NissaHub
from esper.nissa.recorder import record
from esper.simic.env import HostBackend
from esper.simic.training import vectorized
from esper.simic.training.config import TrainConfig, load_config
from esper.tamiyo.controllers import wait_everywhere
from esper.tolaria.engine import Engine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.tasks import TASKS, Task, get_task

ROOT = Path(__file__).parents[1]
EARLIER = 5.7
"""Time of the earlier system relative to the bare loop, with 3 live seeds on the reference host."""
MANY = 64
"""Number of environments at which the cost of an environment-step is compared with that of a few."""
Strategy = Literal["loop", "stacked"]


@dataclass(frozen=True, slots=True)
class Case:
    """One host to compare on: its task, environments, steps of a round, and the live seeds of its first slots."""

    name: str
    task: Task
    envs: int
    steps: int
    blueprints: tuple[str, ...] = ()
    strategy: Strategy = "loop"

    @property
    def label(self) -> str:
        seeds = {0: "no live seeds", 1: "1 live seed"}.get(len(self.blueprints), f"{len(self.blueprints)} live seeds")
        return f"{self.name}, {seeds}" + (", one stack" if self.strategy == "stacked" else "")

    def config(self, rounds: int) -> TrainConfig:
        """Return the settings of a training run on this case; its task must be registered."""
        shape = [
            f"envs={self.envs}",
            f"worlds={self.envs}",
            f"epochs={self.steps}",
            f"rounds={rounds}",
            "ppo.minibatches=2",
        ]
        return load_config(sets=[f"task={self.task.name}", *shape, f"engine.strategy={self.strategy}"])


def cases(quick: bool) -> list[Case]:
    """Return the hosts of the table."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(1_200, 3, 32, 32, generator=noise)
    tiny = Task.from_tensors(
        "tiny", x, torch.randint(0, 10, (len(x),), generator=noise), classes=10, batch=16, lr=0.01, seed_lr=0.01,
        host_kwargs={"base": 1, "blocks": 3, "kernel": 1},
    )  # fmt: skip
    v = torch.randn(3_000, 64, generator=noise)
    mlp = Task.from_tensors(
        "mlp", v, torch.randint(0, 10, (len(v),), generator=noise), classes=10, batch=32, lr=0.01, seed_lr=0.01,
        host_kwargs={"width": 64, "layers": 2},
    )  # fmt: skip
    text = replace(get_task("moby"), name="text", batches_per_epoch=5)
    batch = 32 if quick else 512
    few, many = (2, 4) if quick else (4, 16)
    short, long = (2, 2) if quick else (5, 20)
    reference = Case("reference CNN", reference_task(batch, batch), few, short)
    transformer = Case("transformer", text, few, short)
    small = [replace(Case("tiny 1×1 CNN", tiny, many, long), blueprints=BLUEPRINTS[:n]) for n in (0, 3)]
    small += [replace(Case("MLP 64-64", mlp, many, long), blueprints=("mlp_small",) * n) for n in (0, 2)]
    strategies: tuple[Strategy, ...] = ("loop", "stacked")
    return [
        *(replace(reference, blueprints=BLUEPRINTS[:n]) for n in (0, 1, 3)),
        *(replace(case, strategy=strategy) for case in small for strategy in strategies),
        *(replace(transformer, blueprints=("lora",) * n) for n in (0, 3)),
    ]


class HeldBackend(HostBackend):
    """Hosts whose first slots hold live seeds: actions are not applied, so the seeds stay in BLENDING."""

    blueprints: tuple[str, ...] = ()

    def reset(self, worlds: Sequence[int]) -> None:
        super().reset(worlds)
        self.add_baselines({world: [0.1] * self.task.epochs for world in worlds})
        plant(self.engine, self.blueprints)

    def step(self, actions: Ints) -> Outcome:
        outcome = super().step(wait_everywhere(len(actions)))
        live = (self.table.stage == SeedStage.BLENDING).sum(1)
        if (live != len(self.blueprints)).any():
            raise TrainingError(f"the seeds of {self.task.name} did not stay in BLENDING: {live.tolist()} are there")
        return outcome


@contextmanager
def held(case: Case) -> Iterator[list[HeldBackend]]:
    """Run `train_ppo_vectorized` on this case with hosts whose seeds stay fixed; yield the backends that it builds."""
    backends: list[HeldBackend] = []

    class Backend(HeldBackend):
        blueprints = case.blueprints

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            backends.append(self)

    with mock.patch.dict(TASKS, {case.task.name: case.task}), mock.patch.object(vectorized, "HostBackend", Backend):
        yield backends


@dataclass(slots=True)
class RoundTimes:
    """CPU seconds of one round of ours, of as many steps of the bare loop, and more of ours."""

    ours_s: float
    bare_s: float
    wall_s: float
    events: int
    phases_ms: dict[str, float]


class RoundTimer:
    """Measures each round of ours when it ends, then runs and measures as many steps of the bare loop."""

    def __init__(self, case: Case, hub: NissaHub, backends: list[HeldBackend]) -> None:
        self.case = case
        self.hub = hub
        self.backends = backends
        self.bare = BareLoop(case.task, case.envs, case.blueprints)
        self.totals_ms: dict[str, float] = {}
        self.rounds: list[RoundTimes] = []
        self.start()

    def start(self) -> None:
        self.events = self.hub.next_seq
        self.wall_s = time.perf_counter()
        self.cpu_s = time.process_time()

    def on_round(self, _: object) -> None:
        self.hub.flush()
        ours_s = time.process_time() - self.cpu_s
        wall_s = time.perf_counter() - self.wall_s
        events = self.hub.next_seq - self.events
        totals_ms = {name: total.cpu_ms for name, total in self.backends[0].phases.totals().items()}
        phases_ms = {name: ms - self.totals_ms.get(name, 0.0) for name, ms in totals_ms.items()}
        self.totals_ms = totals_ms
        self.rounds.append(RoundTimes(ours_s, timed(self.bare_round), wall_s, events, phases_ms))
        self.start()

    def bare_round(self) -> None:
        for _ in range(self.case.steps):
            self.bare.step()


def train_rounds(case: Case, repeats: int) -> list[RoundTimes]:
    """Train for `repeats` + 1 rounds by one call of `train_ppo_vectorized`; return the times of all but the first."""
    with (
        tempfile.TemporaryDirectory() as folder,
        record("benchmark", out=Path(folder) / "run") as run,
        held(case) as backends,
    ):
        timer = RoundTimer(case, run.hub, backends)
        config = case.config(repeats + 1)
        vectorized.train_ppo_vectorized(config, run.hub, directory=run.path, on_round=timer.on_round)
    return timer.rounds[1:]


def compare(case: Case, repeats: int) -> dict[str, Any]:
    """Return one row of the table."""
    rounds = train_rounds(case, repeats)
    phases_ms = {
        name: statistics.mean(one.phases_ms.get(name, 0.0) for one in rounds) / case.steps
        for name in rounds[-1].phases_ms
    }
    coalitions_s = 0.0
    if case.blueprints:
        validation_s = BareLoop(case.task, case.envs, case.blueprints).validation_s(repeats)
        coalitions_s = (phases_ms.get("coalitions", 0.0) + phases_ms.get("norms", 0.0)) / 1e3 - validation_s
        coalitions_s = case.steps * max(0.0, coalitions_s)
    ours_s = statistics.median(one.ours_s for one in rounds)
    env_steps = case.envs * case.steps
    return {
        "case": case.label,
        "envs": case.envs,
        "steps": case.steps,
        "ratio": statistics.median(one.ours_s / one.bare_s for one in rounds),
        "ratio_with_coalitions": statistics.median(one.ours_s / (one.bare_s + coalitions_s) for one in rounds),
        "s_per_env_step": ours_s / env_steps,
        "bare_s_per_env_step": statistics.median(one.bare_s for one in rounds) / env_steps,
        "wall_s_per_env_step": statistics.median(one.wall_s for one in rounds) / env_steps,
        "minibatches_per_s": env_steps * case.task.batches_per_epoch / ours_s,
        "events_per_s": statistics.median(one.events for one in rounds) / ours_s,
        "phases_ms": {name: round(ms, 3) for name, ms in sorted(phases_ms.items(), key=lambda p: -p[1])},
    }


def env_step_growth(task: Task, few: int, many: int, repeats: int) -> float:
    """Return the cost of an environment-step among many environments over that among few, both against bare loops."""
    many_ratio, few_ratio = (compare(Case("", task, envs, 2), repeats)["ratio"] for envs in (many, few))
    return float(many_ratio / few_ratio)


def stacked_factor(case: Case, repeats: int) -> float:
    """Return how many times as long the loop over environments takes to train an epoch as one stack of them."""
    worlds = list(range(case.envs))
    loop, stack = (Engine(case.task, worlds, config=EngineConfig(strategy=way)) for way in ("loop", "stacked"))
    for engine in (loop, stack):
        plant(engine, case.blueprints)
        engine.table.step[:] = 1
        if any(result is None for result in engine._train()):
            raise TrainingError(f"{case.name} could not be trained: {engine.governor.alarms}")
    ratios = []
    for i in range(repeats):
        pair = (loop, stack) if i % 2 else (stack, loop)
        spent = {id(engine): timed(engine._train) for engine in pair}
        ratios.append(spent[id(loop)] / spent[id(stack)])
    return statistics.median(ratios)


def peak_memory_ratio(case: Case, quick: bool) -> float:
    """Return the peak memory of a process that only runs our loop over that of one that only runs the bare loop."""

    def peak_mb(loop: str) -> float:
        code = f"from benchmarks.train import print_peak_memory; print_peak_memory({loop!r}, {case.label!r}, {quick})"
        done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        return float(done.stdout.split()[-1])

    return peak_mb("ours") / peak_mb("bare")


def print_peak_memory(loop: str, label: str, quick: bool) -> None:
    """Run one of the two loops by itself and print this process's peak memory in MB."""
    torch.set_num_threads(1)
    case = next(c for c in cases(quick) if c.label == label)
    if loop == "bare":
        bare = BareLoop(case.task, case.envs, case.blueprints)
        for _ in range(case.steps):
            bare.step()
    else:
        with tempfile.TemporaryDirectory() as folder, held(case), record("benchmark", out=Path(folder) / "run") as run:
            vectorized.train_ppo_vectorized(case.config(1), run.hub, directory=run.path)
    print(peak_of_this_process_mb())


def peak_of_this_process_mb() -> float:
    """Return this process's peak memory from the kernel: `ru_maxrss` of Linux includes that of the parent."""
    status = Path("/proc/self/status")
    if status.exists():
        return float(status.read_text().split("VmHWM:")[1].split()[0]) / (1 << 10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    add_output_options(parser)
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw what a step is made of into this SVG file")
    options = parser.parse_args()
    if options.chart is not None and not options.chart.parent.is_dir():
        parser.error(f"--chart {options.chart}: there is no directory {options.chart.parent}. Create it first")
    results = measure(options.repeats, options.quick)
    if options.chart is not None:
        options.chart.write_text(chart(results["rows"], options.repeats))
    if options.json:
        print_json(results)
    else:
        print_tables(results)


def measure(repeats: int, quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    progress = Console(stderr=True)
    rows = []
    for case in cases(quick):
        row = compare(case, repeats)
        row["peak_memory_ratio"] = peak_memory_ratio(case, quick)
        rows.append(row)
        progress.print(f"[dim]{case.label}: {row['ratio']:.2f}× bare[/dim]")
    few, many = (2, 8) if quick else (4, MANY)
    three_seeds = next(r for r in rows if r["case"] == "reference CNN, 3 live seeds")
    return {
        "torch": torch.__version__,
        "threads": 1,
        "repeats": repeats,
        "rows": rows,
        "training as one stack, times as fast": {
            case.label: stacked_factor(case, repeats) for case in cases(quick) if case.strategy == "stacked"
        },
        f"cost of an env-step, {many} envs / {few}": env_step_growth(
            reference_task(32, 32) if quick else reference_task(64, 64), few, many, repeats
        ),
        "env-steps/s against the earlier system, 3 live seeds": EARLIER / three_seeds["ratio"],
    }


def chart(rows: list[dict[str, Any]], repeats: int) -> str:
    """Return a chart of what each case's step is made of, in units of the bare loop."""
    chart_bars = []
    for row in rows:
        whole = sum(row["phases_ms"].values())
        parts = {name: row["ratio"] * ms / whole for name, ms in row["phases_ms"].items()}
        chart_bars.append(Bar(row["case"], parts, row["ratio"] / row["ratio_with_coalitions"]))
    return bars(chart_bars, f"train_ppo_vectorized against the bare loop, medians of {repeats} rounds, one thread")


def print_tables(results: dict[str, Any]) -> None:
    console = Console()
    rows = results["rows"]
    title = f"train_ppo_vectorized / the bare loop: medians of {results['repeats']} rounds, one thread"
    table = Table(
        "case", "envs", "/ bare", "/ bare + coalitions", "s per env-step", "batches/s", "events/s", "memory",
        title=title,
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["case"], str(row["envs"]), f"{row['ratio']:.2f}", f"{row['ratio_with_coalitions']:.2f}",
            f"{row['s_per_env_step']:.3f}", f"{row['minibatches_per_s']:.0f}", f"{row['events_per_s']:.0f}",
            f"{row['peak_memory_ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
    where = Table("case", "what a step is made of, by CPU time", title="phases of at least 0.1 %")
    for row in rows:
        whole = sum(row["phases_ms"].values())
        shares = {name: ms / whole for name, ms in row["phases_ms"].items() if ms >= 0.001 * whole}
        where.add_row(row["case"], ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items()))
    console.print(where)
    for label, factor in results["training as one stack, times as fast"].items():
        console.print(f"{label}: trained {factor:.1f} times as fast as by the loop")
    for name, value in results.items():
        if isinstance(value, float):
            console.print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
