"""`esper grow`: train and grow one host, then set it beside hosts that did not grow."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from safetensors.torch import save as save_tensors

from esper.commands import plainly
from esper.commands.export import exported_program
from esper.growth_note import why_nothing_was_planted
from esper.karn import report as karn_report
from esper.karn.summary import RunSummary
from esper.kasmina.blueprints import blueprint_name
from esper.kasmina.harden import harden
from esper.kasmina.lifecycle import Rules, legal
from esper.leyline.events import Level, RunStarted
from esper.leyline.events import level as level_by_name
from esper.leyline.files import write_atomically
from esper.leyline.phases import Phases
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage
from esper.recording import Run, record
from esper.simic.attribution import CounterfactualHelper, Worth, report
from esper.simic.best_host import BEST_HOST, BestHost, GrownHost
from esper.simic.evaluation import structure_of
from esper.simic.ground import context_of
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.tamiyo.controllers import Controller, Wait, make_controller
from esper.tamiyo.controllers.learned import Learned
from esper.tolaria.data import Dataset
from esper.tolaria.engine import Engine, EngineConfig, score
from esper.tolaria.tasks import Task, get_task

GROWN, NO_GROWTH, FROM_START, WIDER = "grown", "no growth", "same structure from step 0", "wider host of equal size"
HOSTS_COMPARED = (GROWN, NO_GROWTH, FROM_START, WIDER)
PLAIN_EVERY = 5
"""Epochs between lines where the output is not a terminal."""


@dataclass(slots=True)
class Result:
    """One host's training."""

    name: str
    accuracy: float = float("nan")
    loss: float = float("nan")
    params: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


def run_grow(
    task_name: str,
    controller_name: str,
    *,
    epochs: int | None,
    seed: int,
    out: Path | None,
    data_root: Path | None,
    compare: bool,
    incubation: str,
    threads: int,
    telemetry: str,
    tensorboard: bool,
) -> None:
    torch.set_num_threads(threads)
    console = Console()
    task = get_task(task_name)
    controller = make_controller(controller_name)
    if epochs is not None:
        task = dataclasses.replace(task, epochs=epochs)
    config = EngineConfig(incubation=incubation)  # type: ignore[arg-type]
    level = level_by_name(telemetry)
    data = task.load_data(data_root)
    manifest = {
        "controller": controller_name,
        "seed": seed,
        "threads": threads,
        "config": {"task": settings_of(task), "engine": msgspec.to_builtins(config)},
        "data": {data.name: data.sha256},
    }
    with record(task.name, out=out, level=level, manifest=manifest, tensorboard=tensorboard) as run:
        console.print(
            f"task [b]{task.name}[/b]: {task.question}  [dim]({task.host}, {len(data.train):,} training samples, "
            f"{task.epochs} epochs of {task.batches_per_epoch} × {task.batch}, seed {seed})[/dim]"
        )
        plainly(console, f"run {run.path}  (esper watch {run.path} looks on)")
        names = HOSTS_COMPARED if compare and controller_name != "none" else HOSTS_COMPARED[:1]
        scene = Scene(console, run, task, data, seed, config, level, Phases())
        engine = scene.engine()
        if isinstance(controller, Learned):
            context = context_of(engine.plots[0].body, task.epochs, engine.rules.thresholds, data.classes)
            controller.bind(context, [seed])
        run.say(
            RunStarted(
                run_id=run.path.name,
                command="grow",
                task=task.name,
                controller=controller_name,
                seed=seed,
                env_names=names,
                slots=task.slots,
                steps=task.epochs,
                host_params=engine.plots[0].host_size,
                threads=threads,
                telemetry=level.name.lower(),
            )
        )
        results = [scene.train(GROWN, engine, controller)]
        worth = judge(engine)
        scene.emitter(GROWN, engine).worth(engine.table, [worth])
        save_models(run.path, engine, worth)  # at once: not lost if the comparisons are interrupted
        save_figures(run.path, task, seed, controller_name, results, engine, worth)
        if len(names) > 1:
            results += compared(scene, engine)
            save_figures(run.path, task, seed, controller_name, results, engine, worth)
        console.print(summary(results))
        console.print(seed_table(engine, worth))
        if note := why_nothing_was_planted(controller, engine.table, engine.rules, task.slots):
            plainly(console, note)
    written = karn_report.write([RunSummary.of(run.path)], run.path / "report.html")
    plainly(console, f"left in {run.path}: result.json, worth.svg, body.safetensors (graft and load it), plain.pt2")
    plainly(console, f"take it home without Esper: esper export {run.path} --format torch  (or onnx, torch-export)")
    plainly(console, f"report: {written}")


def settings_of(task: Task) -> dict[str, Any]:
    """A task as a manifest keeps it: everything but the data itself."""
    return {f.name: getattr(task, f.name) for f in dataclasses.fields(task) if f.name != "data"}


@dataclass(slots=True)
class Scene:
    """Where hosts are trained side by side: the same task, data, world and budget, recorded in one run."""

    console: Console
    run: Run
    task: Task
    data: Dataset
    seed: int
    config: EngineConfig
    level: Level
    phases: Phases

    def engine(self, task: Task | None = None) -> Engine:
        return Engine(
            task or self.task, [self.seed], rules=Rules(), config=self.config, data=self.data, phases=self.phases
        )

    def emitter(self, name: str, engine: Engine) -> TelemetryEmitter:
        return TelemetryEmitter(
            self.run.hub, slots=self.task.slots, worlds=[self.seed], envs=[HOSTS_COMPARED.index(name)],
            host_params=engine.plots[0].host_size, level=self.level,
        )  # fmt: skip

    def train(self, name: str, engine: Engine, controller: Controller) -> Result:
        """Train one environment for the task's epochs, showing and recording how it goes."""
        result, helper = Result(name), CounterfactualHelper()
        start, phases = time.perf_counter(), self.phases
        emit = self.emitter(name, engine)
        emit.planted(engine.table)
        with progress(self.console, name, engine, result) as show:
            for _ in range(engine.task.epochs):
                with phases("policy"):
                    allowed = legal(engine.table, engine.rules)
                    actions = controller.act(engine.table, allowed)
                outcome = engine.step(actions)
                with phases("worth"):
                    worth = helper.process_batch(engine)
                with phases("telemetry"):
                    emit.step(engine.table, actions, outcome, allowed)
                    emit.governed(engine.alarms)
                    emit.worth(engine.table, worth)
                    emit.phases(phases)
                    self.run.env_steps += 1
                result.history.append(snapshot(engine))
                show()
        result.seconds = time.perf_counter() - start
        result.accuracy, result.loss = engine.plots[0].test(engine.data.test)
        result.params = engine.plots[0].params
        emit.episode(engine.table, [name], test_quality=[result.accuracy], test_loss=[result.loss],
                     wall_s=[result.seconds])  # fmt: skip
        emit.phases(phases, last=True)
        return result


def compared(scene: Scene, grown: Engine) -> Iterator[Result]:
    """The hosts to compare with, each with the same budget of epochs."""
    yield scene.train(NO_GROWTH, scene.engine(), Wait())
    structure = structure_of(grown, 0)
    if structure:
        same = scene.engine()
        same.plant_fossils(0, structure)
        yield scene.train(FROM_START, same, Wait())
        yield scene.train(WIDER, scene.engine(scene.task.widened(grown.plots[0].params)), Wait())


def snapshot(engine: Engine) -> dict[str, Any]:
    t = engine.table
    return {
        "epoch": int(t.step[0]),
        "train_loss": float(t.train_loss[0]),
        "val_loss": float(t.val_loss[0]),
        "val_accuracy": float(t.quality[0]),
        "params": engine.plots[0].params,
        "stage": [SeedStage(int(s)).name for s in t.stage[0]],
        "alpha": [round(float(a), 4) for a in t.alpha[0]],
    }


# -- what it shows


@contextmanager
def progress(console: Console, name: str, engine: Engine, result: Result) -> Iterator[Any]:
    """A live picture in a terminal; a line now and then elsewhere."""
    if not console.is_terminal:

        def line() -> None:
            last = result.history[-1]
            if last["epoch"] % PLAIN_EVERY == 0 or last["epoch"] == engine.task.epochs:
                print(f"{name}: {headline(engine, result)}  {slots_line(engine)}", flush=True)

        yield line
        return
    with Live(console=console, refresh_per_second=8, transient=True) as live:

        def draw() -> None:
            live.update(Group(Text(f"{name}: {headline(engine, result)}"), live_table(engine)))

        yield draw


def headline(engine: Engine, result: Result) -> str:
    last = result.history[-1]
    return (
        f"epoch {last['epoch']:>3}/{engine.task.epochs}  train loss {last['train_loss']:.3f}  "
        f"val loss {last['val_loss']:.3f}  val accuracy {last['val_accuracy']:.1%}  {last['params']:,} parameters"
    )


def slots_line(engine: Engine) -> str:
    t = engine.table
    alive = [s for s in range(t.num_slots) if t.stage[0, s] != SeedStage.DORMANT]
    return "  ".join(
        f"{engine.task.slots[s]}:{SeedStage(int(t.stage[0, s])).name.lower()}"
        + (f"({blueprint_name(int(t.blueprint[0, s]))} α{t.alpha[0, s]:.2f})" if t.blueprint[0, s] >= 0 else "")
        for s in alive
    )


def judged(table: SlotTable, s: int) -> str:
    """The contribution as last measured; of a fossil, that was before it was committed."""
    if np.isfinite(table.contribution[0, s]):
        return points(float(table.contribution[0, s]), float(table.contribution_se[0, s]))
    if np.isfinite(table.prospect[0, s]):
        return f"({100 * table.prospect[0, s]:+.1f} if switched on)"
    return ""


def live_table(engine: Engine) -> Table:
    t = engine.table
    table = Table("slot", "stage", "blueprint", "alpha", "contribution", box=None)
    for s, name in enumerate(engine.task.slots):
        stage = SeedStage(int(t.stage[0, s]))
        bar = "█" * round(10 * float(t.alpha[0, s]))
        blueprint = blueprint_name(int(t.blueprint[0, s])) if t.blueprint[0, s] >= 0 else ""
        table.add_row(name, stage.name.lower(), blueprint, f"{t.alpha[0, s]:.2f} {bar:<10}", judged(t, s))
    return table


def summary(results: list[Result]) -> Table:
    bare = next((r.accuracy for r in results if r.name == NO_GROWTH), float("nan"))
    table = Table(
        "",
        "test accuracy",
        "gain",
        "test loss",
        "parameters",
        "seconds",
        title="Same data, same budget of epochs",
        box=None,
    )
    best = max(r.accuracy for r in results)
    for r in results:
        mark = "bold" if r.accuracy == best else ""
        accuracy = f"{r.accuracy:.1%}"
        gain = f"{100 * (r.accuracy - bare):+.1f}" if r.name != NO_GROWTH and np.isfinite(bare) else ""
        table.add_row(r.name, accuracy, gain, f"{r.loss:.3f}", f"{r.params:,}", f"{r.seconds:.1f}", style=mark)
    return table


def judge(engine: Engine) -> Worth:
    """What every seed is worth at the end, on the validation split and the averaged weights."""
    plot, split = engine.plots[0], engine.data.val
    with plot.average.applied():
        return report(plot.body, [(split.x, split.y)], score, calibration=engine.calibration)


def seed_table(engine: Engine, worth: Worth) -> Table:
    """What grew where: its contribution when it was judged; and what the network would lose without it now.

    Of a fossil the latter is *dependence*: the host has learnt to lean on it, so it is more than it brought.
    """
    t = engine.table
    table = Table("slot", "stage", "blueprint", "params", "contribution", "dependence", "Shapley",
                  title="What grew where (points of validation accuracy ± standard error)", box=None)  # fmt: skip
    for s, name in enumerate(engine.task.slots):
        stage = SeedStage(int(t.stage[0, s]))
        if stage == SeedStage.DORMANT:
            table.add_row(name, "empty")
            continue
        now = ["", ""]
        if name in worth.slots:
            i = worth.slots.index(name)
            now = [
                points(worth.contribution[i], worth.contribution_se[i]),
                points(worth.shapley[i], worth.shapley_se[i]),
            ]
        blueprint = engine.plots[0].body.slots[name].blueprint
        table.add_row(name, stage.name.lower(), blueprint, f"{t.params[0, s]:,}", judged(t, s), *now)
    return table


def points(value: float, se: float) -> str:
    return f"{100 * value:+.1f} ± {100 * se:.1f}" if np.isfinite(value) else ""


def save_figures(
    out: Path, task: Task, seed: int, controller: str, results: list[Result], engine: Engine, worth: Worth
) -> None:
    """What was asked and what came out, as JSON."""
    record = {
        "task": task.name,
        "seed": seed,
        "controller": controller,
        "epochs": task.epochs,
        "data_sha256": engine.data.sha256,
        "structure": engine.plots[0].body.structure(),
        "worth": worth.to_dict(),
        "results": [dataclasses.asdict(r) for r in results],
    }
    write_atomically(out / "result.json", (json.dumps(record, indent=1) + "\n").encode())


def save_models(out: Path, engine: Engine, worth: Worth) -> None:
    """The host for `esper export`, the body as tensors, the plain model as a program, and a picture of worth."""
    plot = engine.plots[0]
    host = GrownHost.of(engine, 0)
    if host.is_finite:
        BestHost(host).save(out / BEST_HOST)
    else:
        warnings.warn("the grown host is not finite: none is kept for `esper export`", stacklevel=2)
    with plot.average.applied():
        state = {k: v.contiguous() for k, v in plot.body.state_dict().items()}
        plain = harden(plot.body).eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        example = engine.data.test.x[:4]
        program = exported_program(plain, example, ({0: torch.export.Dim("batch")},))
    for name, content in (("body.safetensors", save_tensors(state)), ("plain.pt2", program)):
        write_atomically(out / name, content)
    worth.picture(out / "worth.svg")
