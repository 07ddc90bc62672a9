"""`esper bench train`: the whole training loop against the bare PyTorch loop that does the same host work.

    ours    see, choose, apply, tick, train an epoch, validate with coalitions, Shapley values, governor and snapshots,
            reward, rollout buffer, telemetry `normal` into a run directory
    bare    forward, backward and optimiser step of the host with its live seeds as one plain module, and one validation
            pass, on the same batches

Both are taken in turn in one process with one thread; times are CPU time of the process, threads of the hub included.
Live seeds are held in BLENDING. A table of coalitions is asked for, so it is shown apart: `over the table` is our time
against the bare loop's plus what the coalitions cost beyond its one validation pass, norm statistics included.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from esper.commands.bench_body import BLUEPRINTS, reference_task, stir, timed
from esper.karn.bars import Bar, bars
from esper.kasmina.blueprints import blueprint_index
from esper.kasmina.harden import harden
from esper.kasmina.lifecycle import Effect, EffectKind
from esper.leyline.actions import Operator
from esper.leyline.errors import ConfigError, TrainingError
from esper.leyline.phases import Phases
from esper.leyline.stages import SeedStage
from esper.recording import record
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.env import GrowthVectorEnv
from esper.simic.ground import HostGround
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.tamiyo.controllers import wait_everywhere
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy.action_masks import forced
from esper.tamiyo.policy.features import num_features
from esper.tolaria.engine import Engine, EngineConfig, build_optimizer
from esper.tolaria.tasks import Task, get_task

EARLIER = 5.7
"""Times the bare loop, of the earlier system with 3 live seeds on the reference host."""
MANY = 64
STRATEGIES: tuple[Literal["loop", "stacked"], ...] = ("loop", "stacked")
"""Ways to train hosts so small that they are worth training as one stack."""


@dataclass(frozen=True, slots=True)
class Case:
    """One host to compare on: its task, environments, and the seeds that live in its first slots."""

    name: str
    task: Task
    envs: int
    blueprints: tuple[str, ...] = ()
    strategy: Literal["loop", "stacked"] = "loop"

    @property
    def label(self) -> str:
        seeds = {0: "no live seeds", 1: "1 live seed"}.get(len(self.blueprints), f"{len(self.blueprints)} live seeds")
        return f"{self.name}, {seeds}" + (", one stack" if self.strategy == "stacked" else "")


def cases(quick: bool) -> list[Case]:
    """The hosts of the table."""
    batch, images = (32, 32) if quick else (512, 512)
    reference = reference_task(batch, images)
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
    text = replace(get_task("moby"), batches_per_epoch=5)
    envs = 2 if quick else 4
    found = [Case("reference CNN", reference, envs, BLUEPRINTS[:seeds]) for seeds in (0, 1, 3)]
    many = 4 if quick else 16
    small = [Case("tiny 1×1 CNN", tiny, many, BLUEPRINTS[:seeds]) for seeds in (0, 3)]
    small += [Case("MLP 64-64", mlp, many, ("mlp_small",) * seeds) for seeds in (0, 2)]
    found += [replace(case, strategy=way) for case in small for way in STRATEGIES]
    return [*found, *(Case("transformer", text, envs, ("lora",) * 3 if seeds else ()) for seeds in (0, 3))]


class Ours:
    """The whole loop over one case, a step at a time."""

    def __init__(self, case: Case) -> None:
        task = replace(case.task, epochs=10_000)
        self.case, self.phases, self.open = case, Phases(), ExitStack()
        self.ground = HostGround(task, config=EngineConfig(strategy=case.strategy), phases=self.phases)
        worlds = range(case.envs)
        self.ground.know_twins({w: [0.1] * 10_000 for w in worlds})  # a twin's training is not a step's
        self.env, self.network = GrowthVectorEnv(self.ground, list(worlds), phases=self.phases), TamiyoNetwork()
        self.obs, self.info = self.env.reset()
        hold(self.ground.engine, case.blueprints)
        self.hidden = self.network.initial(case.envs)
        self.buffer = TamiyoRolloutBuffer(
            steps=64, envs=case.envs, features=num_features(self.env.layout.slots), masks=self.env.layout.size,
            hidden=(self.network.hidden_size,),
        )  # fmt: skip
        place = Path(self.open.enter_context(tempfile.TemporaryDirectory()))
        self.run = self.open.enter_context(record("bench", out=place / "run"))
        self.emit = TelemetryEmitter(self.run.hub, slots=task.slots, worlds=worlds, host_params=1)
        self.emit.planted(self.ground.table)
        self.luck = torch.rand(case.envs, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        self.never, self.steps = torch.zeros(case.envs, dtype=torch.bool), 0

    def step(self) -> None:
        seen, masks = torch.from_numpy(self.obs), torch.from_numpy(self.info["masks"])
        with self.phases("policy"):
            choice = self.network.act(seen, masks, self.hidden, self.env.layout, self.luck)
        actions, allowed = wait_everywhere(self.case.envs), self.env.legal  # the seeds are held where they are
        self.obs, paid, ended, cut, self.info = self.env.step(actions)
        if self.buffer.rows == self.buffer.steps:
            self.buffer.reset()
        self.buffer.add(
            obs=seen, masks=masks, actions=choice.actions, log_probs=choice.log_probs, values=choice.values,
            rewards=paid, done=ended, truncated=cut, starts=self.never, hidden=self.hidden,
            forced=forced(masks, self.env.layout),
        )  # fmt: skip
        self.hidden = choice.hidden
        with self.phases("telemetry"):
            self.emit.step(self.ground.table, actions, self.env.outcome, allowed)
            self.emit.governed(self.ground.alarms)
            self.emit.worth(self.ground.table, self.ground.worth)
            self.emit.phases(self.phases)
        self.steps += 1
        live = (self.ground.table.stage == SeedStage.BLENDING).sum(1)
        if (live != len(self.case.blueprints)).any():
            raise TrainingError(f"the seeds of {self.case.name} did not stay in BLENDING: {live.tolist()} are there")

    def close(self) -> int:
        """End the run; the events it said."""
        said = self.run.hub.next_seq
        self.open.close()
        return said


def hold(engine: Engine, blueprints: tuple[str, ...]) -> None:
    """Plant these seeds in the first slots of every environment, held in BLENDING at alpha 0.7."""
    table, effects = engine.table, []
    for e in range(table.num_envs):
        for s, name in enumerate(blueprints):
            at = e, s
            table.stage[at], table.alpha[at], table.alpha_to[at] = SeedStage.BLENDING, 0.7, 0.7
            table.blueprint[at], table.operator[at] = blueprint_index(name), Operator.ADD
            table.serial[at] = table.next_serial[e]
            table.next_serial[e] += 1
            effects.append(Effect(EffectKind.BUILD, *at))
    engine.carry_out(effects)
    for plot in engine.plots:
        stir(plot.body)
        plot.average.restart()


class Bare:
    """What anyone would write: the same hosts with the same seeds as plain modules, trained and validated."""

    def __init__(self, case: Case) -> None:
        engine = Engine(case.task, list(range(case.envs)))
        hold(engine, case.blueprints)
        self.task, self.data = case.task, engine.data
        self.models = [harden(p.body) if case.blueprints else p.body.model for p in engine.plots]
        if self.data.kind == "image":
            self.models = [m.to(memory_format=torch.channels_last) for m in self.models]  # type: ignore[call-overload]
        self.optimizers = [build_optimizer(case.task, list(m.parameters())) for m in self.models]
        self.steps = 0

    def step(self) -> None:
        for world, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            model.train()
            for x, y in self.task.minibatches(self.data, world, self.steps):
                optimizer.zero_grad(set_to_none=True)
                loss_of(model, x, y).backward()
                optimizer.step()
            self.validate(model)
        self.steps += 1

    @torch.no_grad()
    def validate(self, model: nn.Module) -> float:
        model.eval()
        val = self.data.val
        return float(loss_of(model, val.x, val.y))

    def validation_s(self, repeats: int) -> float:
        """CPU seconds of one validation pass of every host."""

        def every() -> None:
            for model in self.models:
                self.validate(model)

        every()
        return statistics.median(timed(every) for _ in range(repeats))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def compared(case: Case, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    ours, bare = Ours(case), Bare(case)
    for loop in (ours, bare):
        loop.step()
    before = ours.phases.totals()
    spent: dict[Any, list[float]] = {ours: [], bare: []}
    for i in range(repeats):
        for loop in (ours, bare) if i % 2 else (bare, ours):
            spent[loop].append(timed(loop.step))
    validation = bare.validation_s(repeats)
    phases = {
        name: (total.cpu_ms - (before[name].cpu_ms if name in before else 0.0)) / repeats
        for name, total in ours.phases.totals().items()
    }
    wall = time.perf_counter()
    ours.step()
    wall = time.perf_counter() - wall
    events = ours.close() / ours.steps
    table_s = max(0.0, (phases.get("coalitions", 0.0) + phases.get("norms", 0.0)) / 1e3 - validation)
    if not case.blueprints:
        table_s = 0.0
    pairs = list(zip(spent[ours], spent[bare], strict=True))
    mine, theirs = statistics.median(spent[ours]), statistics.median(spent[bare])
    return {
        "case": case.label,
        "envs": case.envs,
        "ratio": statistics.median(a / b for a, b in pairs),
        "over the table": statistics.median(a / (b + table_s) for a, b in pairs),
        "env_steps_per_s": case.envs / mine,
        "minibatches_per_s": case.envs * case.task.batches_per_epoch / mine,
        "events_per_s": events / mine,
        "step_ms": 1e3 * mine,
        "bare_ms": 1e3 * theirs,
        "table_ms": 1e3 * table_s,
        "wall_ms": 1e3 * wall,
        "phases_ms": {name: round(ms, 3) for name, ms in sorted(phases.items(), key=lambda p: -p[1])},
    }


def per_env_step(task: Task, few: int, many: int, repeats: int) -> float:
    """CPU time of one environment's step among many, against one among few; taken in turn."""
    loops = {envs: Ours(Case("", task, envs)) for envs in (few, many)}
    ratios = []
    for i in range(repeats + 1):
        spent = {few: 0.0, many: 0.0}
        for envs in (few, many) if i % 2 else (many, few):
            spent[envs] = sum(timed(loops[envs].step) for _ in range(many // envs))  # as many env-steps of each
        ratios.append(spent[many] / spent[few])
    for loop in loops.values():
        loop.close()
    return statistics.median(ratios[1:])


def stacked_factor(case: Case, repeats: int) -> float:
    """How many times as long the loop over environments takes to train an epoch as one stack of them."""
    worlds = list(range(case.envs))
    loop, stack = (Engine(case.task, worlds, config=EngineConfig(strategy=way)) for way in ("loop", "stacked"))
    for engine in (loop, stack):
        hold(engine, case.blueprints)
        engine.table.step[:] = 1
        if any(result is None for result in engine._train()):
            raise TrainingError(f"{case.name} could not be trained: {engine.governor.alarms}")
    ratios = []
    for i in range(repeats):
        pair = (loop, stack) if i % 2 else (stack, loop)
        spent = {id(engine): timed(engine._train) for engine in pair}
        ratios.append(spent[id(loop)] / spent[id(stack)])
    return statistics.median(ratios)


def peak_mb(which: str, label: str, quick: bool) -> float:
    """Peak memory of a process that does nothing but one of the loops."""
    asked = [sys.executable, "-m", "esper.commands.bench_train", which, label, "quick" if quick else "full"]
    return float(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_of_this_process_mb() -> float:
    """`ru_maxrss` of Linux begins with what the parent had, so the kernel is asked for this program's own."""
    status = Path("/proc/self/status")
    if status.exists():
        return float(status.read_text().split("VmHWM:")[1].split()[0]) / (1 << 10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def run_bench(*, repeats: int, as_json: bool, quick: bool, chart: Path | None = None) -> None:
    torch.set_num_threads(1)
    if chart is not None and not chart.parent.is_dir():
        raise ConfigError(f"--chart {chart}: there is no directory {chart.parent}. Make it first")
    console = Console(stderr=as_json)
    rows = []
    for case in cases(quick):
        row = compared(case, repeats)
        row["peak_memory_ratio"] = peak_mb("ours", case.label, quick) / peak_mb("bare", case.label, quick)
        rows.append(row)
        if not as_json:
            console.print(f"[dim]{case.label}: {row['ratio']:.2f}× bare[/dim]")
    if chart is not None:
        chart.write_text(drawn(rows, repeats))
        console.print(f"[dim]drawn: {chart}[/dim]")
    small = [case for case in cases(quick) if case.strategy == "stacked"]
    stacked = {case.label: stacked_factor(case, repeats) for case in small}
    reference = cases(quick)[0]
    few, many = reference.envs, 8 if quick else MANY
    smaller = reference_task(32, 32) if quick else reference_task(128, 128)  # shorter turns: the machine's moods cancel
    growth = per_env_step(smaller, few, many, 1 if quick else repeats + 2)
    with_three = next(r for r in rows if r["case"] == "reference CNN, 3 live seeds")
    found = {
        "torch": torch.__version__,
        "threads": 1,
        "repeats": repeats,
        "rows": rows,
        "times as fast as one stack": stacked,
        f"cost per env-step, {many} envs / {few}": growth,
        "env-steps/s against the earlier system, 3 live seeds": EARLIER / with_three["ratio"],
    }
    if as_json:
        print(json.dumps(found, indent=1))
        return
    shown(console, rows, repeats)
    for name, factor in stacked.items():
        console.print(f"{name}, {small[0].envs} environments: trained {factor:.1f} times as fast as by the loop")
    for name, value in found.items():
        if isinstance(value, float):
            console.print(f"{name}: {value:.2f}")


def drawn(rows: list[dict[str, Any]], repeats: int) -> str:
    """What each case's step is made of, against the bare loop."""
    told = []
    for row in rows:
        whole = sum(row["phases_ms"].values())
        parts = {name: row["ratio"] * ms / whole for name, ms in row["phases_ms"].items()}
        told.append(Bar(row["case"], parts, row["ratio"] / row["over the table"]))
    return bars(told, f"The whole loop against the bare loop, medians of {repeats} repeats, one thread")


def shown(console: Console, rows: list[dict[str, Any]], repeats: int) -> None:
    title = f"the whole loop / the bare loop: medians of {repeats} interleaved repeats, one thread"
    table = Table(
        "case", "envs", "/ bare", "/ bare + table", "env-steps/s", "batches/s", "events/s", "memory", title=title
    )
    for row in rows:
        table.add_row(
            row["case"], str(row["envs"]), f"{row['ratio']:.2f}", f"{row['over the table']:.2f}",
            f"{row['env_steps_per_s']:.1f}", f"{row['minibatches_per_s']:.0f}", f"{row['events_per_s']:.0f}",
            f"{row['peak_memory_ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
    where = Table("case", "what a step is made of, by CPU time", title="phases of at least 0.1 %")
    for row in rows:
        whole = sum(row["phases_ms"].values())
        shares = {name: ms / whole for name, ms in row["phases_ms"].items() if ms >= 0.001 * whole}
        where.add_row(row["case"], ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items()))
    console.print(where)


def _alone(which: str, label: str, quick: bool) -> None:
    """Run one loop by itself, for its peak memory."""
    torch.set_num_threads(1)
    case = next(c for c in cases(quick) if c.label == label)
    loops: dict[str, Callable[[Case], Ours | Bare]] = {"ours": Ours, "bare": Bare}
    loop = loops[which](case)
    for _ in range(3):
        loop.step()
    print(peak_of_this_process_mb())
    if isinstance(loop, Ours):
        loop.close()


if __name__ == "__main__":
    np.seterr(all="ignore")
    _alone(sys.argv[1], sys.argv[2], sys.argv[3] == "quick")
