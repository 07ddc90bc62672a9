"""`esper grow`: train and grow one host, then compare it with hosts that did not grow."""

from __future__ import annotations

import dataclasses
import json
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.torch import save as save_tensors

from esper.commands import losses_decide_exit_code, plainly
from esper.commands.explained_run import explain_run
from esper.commands.export import exported_program
from esper.commands.grow_progress import accuracy_curves, evidence_text, points, progress
from esper.commands.growing import (
    GROWN,
    HOSTS_COMPARED,
    NO_GROWTH,
    GrowCheckpointer,
    GrowSettings,
    HostComparison,
    HostResult,
    SavedGrowth,
    exact_for,
)
from esper.commands.resuming import checkpoint_of, must_fit, ownership, refuse_settings
from esper.grower.explanations import MIXING_STEPS, late_planting, why_nothing_was_planted
from esper.karn import report as karn_report
from esper.karn.run_state import RunState
from esper.karn.worth_plot import plot_worth
from esper.kasmina.harden import harden
from esper.leyline.atomic_io import write_atomically
from esper.leyline.errors import ConfigError
from esper.leyline.events import RunStarted
from esper.leyline.events import level as level_by_name
from esper.leyline.lifecycle import Rules
from esper.leyline.run_files import DECISIONS
from esper.leyline.stages import SeedStage
from esper.nissa.recorder import Run, record, record_on
from esper.nissa.run import Lock, read_manifest
from esper.nissa.signals import stoppable
from esper.simic.attribution import Worth, report
from esper.simic.env import context_of
from esper.tamiyo.controllers import CONTROLLERS, Controller, make_controller
from esper.tamiyo.controllers.learned import Learned
from esper.tamiyo.decision_record import DecisionLog
from esper.tamiyo.policy.action_masks import MaskLayout
from esper.tolaria.best_host import BEST_HOST, GrownHost
from esper.tolaria.checkpoint import Saved
from esper.tolaria.data import Dataset
from esper.tolaria.engine import Engine, score
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.families import world_task
from esper.tolaria.reproducibility import changes
from esper.tolaria.tasks import Task

GAIN_NOTE = "gain: points of test accuracy above the host without growth"
MACS_NOTE = "10⁹ MACs: billions of multiply-adds spent on training, forward and backward"
WORTH_NOTES = """\
contribution: accuracy with the seed minus without it, before it was committed
dependence: accuracy that the network would lose now without the seed
Shapley φ: mean gain from adding the seed, over all orders of adding seeds"""


@dataclass(frozen=True, slots=True)
class GrowOptions:
    """Command-line options that are not settings of the run."""

    out: Path | None = None
    """Run directory to create; None is a new one in runs/."""
    data_root: Path | None = None
    """Directory of the data files; None is `$ESPER_DATA`."""
    track: tuple[str, ...] = ()
    """Names of trackers."""
    allow_inexact: bool = False
    """Whether to resume although the result may differ in bits."""

    def resume_command(self, path: Path) -> str:
        """Return the command that resumes the run at `path` with the same options."""
        return f"esper grow --resume {path}" + ("" if self.data_root is None else f" --data {self.data_root}")


def run_grow(settings: GrowSettings, options: GrowOptions) -> None:
    """Train and grow a new host."""
    if settings.controller not in CONTROLLERS and Path(settings.controller).exists():
        settings = msgspec.structs.replace(settings, controller_path=str(Path(settings.controller).absolute()))
    _grow(settings, options, None, None)


def resume_grow(path: Path, overrides: list[str], options: GrowOptions) -> None:
    """Resume a run that was stopped or killed. The result is bit-identical to an uninterrupted run."""
    refuse_settings(overrides, "--data, --track, --tensorboard and --allow-inexact")
    with ownership(path) as lock:
        saved = checkpoint_of(path, "grow", facts_of)
        if read_manifest(path)["status"] == "finished":
            raise ConfigError(f"{path} has finished and cannot be resumed. Show its results with: esper report {path}")
        _grow(SavedGrowth.of(saved).settings, options, path, saved, lock)


def facts_of(saved: Saved) -> dict[str, Any]:
    """Return the manifest fields of the run that wrote this checkpoint."""
    settings = SavedGrowth.of(saved).settings
    return {"task": settings.task, "controller": settings.controller, "seed": settings.seed}


def _grow(
    settings: GrowSettings, options: GrowOptions, path: Path | None, saved: Saved | None, lock: Lock | None = None
) -> None:
    torch.set_num_threads(settings.threads)
    console = Console()
    task = world_task(settings.task, settings.seed)
    controller = make_controller(settings.controller_path or settings.controller)
    task = dataclasses.replace(task, epochs=settings.epochs or task.epochs, lr_schedule=settings.lr_schedule)  # type: ignore[arg-type]
    rules = Rules(birth=settings.birth)  # type: ignore[arg-type]
    config = EngineConfig(incubation=settings.incubation)  # type: ignore[arg-type]
    level = level_by_name(settings.telemetry)
    data = task.load_data(options.data_root)
    exact = exact_for(settings, config, task, data, controller)
    if saved is not None:
        must_fit(changes(SavedGrowth.of(saved).exact, exact), options.allow_inexact)
    with _recording(settings, options, task, config, data, path, saved, lock) as run:
        about = (
            f"task {task.name}: {task.question}  ({task.host}, {len(data.train):,} training samples, {task.epochs} "
            f"epochs of {task.batches_per_epoch} × {task.batch}, seed {settings.seed})"
        )
        console.print(Text(about))  # wrapped between words
        plainly(console, f"run {run.path}  (live view: esper watch {run.path})")
        notice = "stopping after this epoch; repeat the signal to exit immediately"
        with stoppable(notice, run.hub.stop_waiting) as stop:
            checkpointer = GrowCheckpointer(run, settings, exact)
            show = partial(progress, console)
            comparison = HostComparison(run, task, data, settings.seed, config, rules, level, checkpointer, stop, show)
            try:
                worth = _train_all(comparison, settings, controller, saved, console)
            except SystemExit:
                where = f"last checkpoint: {checkpointer.last}" if checkpointer.last else "no checkpoint yet"
                plainly(console, f"stopped, {where}. Resume with: {options.resume_command(run.path)}")
                raise
        assert comparison.grown is not None
        console.print(accuracy_curves(comparison.results, task.epochs, console.width))
        console.print(summary(comparison.results))
        if len(comparison.results) > 1:
            console.print(Text(GAIN_NOTE, "dim"))
        console.print(Text(MACS_NOTE, "dim"))
        console.print(seed_table(comparison.grown, worth))
        console.print(Text(WORTH_NOTES, "dim"))
        if note := not_in_the_network(comparison.grown):
            plainly(console, note)
        if isinstance(controller, Learned) and (note := outside_note(controller)):
            plainly(console, note)
        if note := planted_late(comparison.grown):
            plainly(console, note)
        if note := why_nothing_was_planted(controller, comparison.grown.table, comparison.grown.rules, task.slots):
            plainly(console, note)
    with losses_decide_exit_code(run):
        written = karn_report.write([RunState.of(run.path)], run.path / "report.html", explain_run)
        plainly(
            console, f"files in {run.path}: result.json, worth.svg, body.safetensors (grafted), plain.pt2 (plain model)"
        )
        plainly(console, f"export a plain model: esper export {run.path} --format torch  (or onnx, torch-export)")
        plainly(console, f"report: {written}")


def _recording(
    settings: GrowSettings, options: GrowOptions, task: Task, config: EngineConfig, data: Dataset, path: Path | None,
    saved: Saved | None, lock: Lock | None,
) -> AbstractContextManager[Run]:  # fmt: skip
    """Return the context of a new run, or of an earlier one that is resumed."""
    level = level_by_name(settings.telemetry)
    if path is not None and saved is not None:
        return record_on(path, [SavedGrowth.of(saved).next_seq], level=level, track=options.track, lock=lock)
    manifest = {
        "controller": settings.controller,
        "seed": settings.seed,
        "threads": settings.threads,
        "config": {
            "task": {f.name: getattr(task, f.name) for f in dataclasses.fields(task) if f.name != "data"},
            "engine": msgspec.to_builtins(config),
            "rules": {"birth": settings.birth},
        },
        "data": {data.name: data.sha256},
    }
    return record(task.name, out=options.out, level=level, manifest=manifest, track=options.track)


def _train_all(
    comparison: HostComparison, settings: GrowSettings, controller: Controller, saved: Saved | None, console: Console
) -> Worth:
    """Train the growing host and the hosts to compare with, from the start or from a checkpoint. Return its worth."""
    task = comparison.task
    run = comparison.run
    engine = comparison.engine()
    names = HOSTS_COMPARED if settings.compare and settings.controller != "none" else HOSTS_COMPARED[:1]
    if isinstance(controller, Learned):
        context = context_of(engine.networks[0].body, task.epochs, engine.rules.thresholds, comparison.data.classes)
        controller.bind(context, [settings.seed])
        controller.log = DecisionLog()
    run.emit(
        RunStarted(
            run_id=run.path.name, command="grow", task=task.name, controller=settings.controller, seed=settings.seed,
            env_names=names, slots=task.slots, steps=task.epochs, host_params=engine.networks[0].host_size,
            threads=settings.threads, telemetry=settings.telemetry,
        )
    )  # fmt: skip
    if saved is not None:
        run.env_steps = SavedGrowth.of(saved).env_steps
        comparison.load(saved, engine)
        plainly(console, f"resuming from {saved.path.name}")
    is_new = not comparison.results
    if is_new:
        comparison.train(GROWN, engine, controller)
        save_decisions(run.path, task, settings.seed, controller)
    comparison.grown = engine
    worth = measured_worth(engine)
    if is_new:
        comparison.emitter(GROWN, engine).worth(engine.table, [worth])
    save_models(run.path, engine, worth)  # before the comparisons, which may be interrupted
    save_figures(run.path, task, settings.seed, settings.controller, comparison.results, engine, worth)
    if len(names) > 1:
        for _ in comparison.compare():
            save_figures(run.path, task, settings.seed, settings.controller, comparison.results, engine, worth)
    return worth


# -- output


def summary(results: list[HostResult]) -> Table:
    """Return the table of test results. With several hosts it has the gain of each over the host without growth."""
    bare = next((r.accuracy for r in results if r.name == NO_GROWTH), None)
    table = Table("", "accuracy", box=None, title="Test results")
    if bare is not None:
        table.title = "Test results with the same data and number of epochs"
        table.add_column("gain")
    for title in ("loss", "parameters", "10⁹ MACs"):
        table.add_column(title)
    best = max(r.accuracy for r in results)
    for r in results:
        row = [r.name, f"{r.accuracy:.1%}"]
        if bare is not None:
            row.append("" if r.name == NO_GROWTH else f"{100 * (r.accuracy - bare):+.1f}")
        row += [f"{r.loss:.3f}", f"{r.params:,}", f"{r.train_macs / 1e9:.2f}"]
        table.add_row(*row, style="bold" if r.accuracy == best else "")
    return table


def measured_worth(engine: Engine) -> Worth:
    """Return the worth of every seed of the final network, on the validation split."""
    network = engine.networks[0]
    split = engine.data.val
    with network.final():
        return report(network.body, [(split.x, split.y)], score, calibration=engine.calibration)


def seed_table(engine: Engine, worth: Worth) -> Table:
    """Return the table of seeds, with the columns that `WORTH_NOTES` defines.

    The dependence of a fossil exceeds its contribution, because the host has adapted to it.
    """
    t = engine.table
    table = Table("slot", "stage", "blueprint", "params", "contribution", "dependence", "Shapley φ", box=None,
                  title="Seeds (points of validation accuracy ± standard error)")  # fmt: skip
    for s, name in enumerate(engine.task.slots):
        stage = SeedStage(int(t.stage[0, s]))
        if stage == SeedStage.DORMANT:
            table.add_row(name, "empty")
            continue
        now = ["", ""]
        if name in worth.slots:
            i = worth.slots.index(name)
            measured = (worth.contribution, worth.contribution_se), (worth.shapley, worth.shapley_se)
            now = [points(value[i], se[i]) for value, se in measured]
        blueprint = engine.networks[0].body.slots[name].blueprint
        table.add_row(name, stage.name.lower(), blueprint, f"{t.params[0, s]:,}", evidence_text(t, s), *now)
    return table


def not_in_the_network(engine: Engine) -> str:
    """Name the seeds that an export omits because they are still in training; "" if there are none."""
    table = engine.table
    early = (table.stage[0] == SeedStage.GERMINATED) | (table.stage[0] == SeedStage.TRAINING)
    names = [engine.task.slots[s] for s in np.nonzero(early)[0]]
    if not names:
        return ""
    return (
        f"{', '.join(names)}: still in training at the end, so not part of the grown network, of the parameters above "
        "and of `esper export`. Use more --epochs to blend it in"
    )


def outside_note(controller: Learned) -> str:
    """Return whether the host lay outside what the policy was trained on."""
    if controller.ranges is None:
        return "the policy file does not state what it was trained on, so its limits are unknown"
    return controller.outside_text()


def planted_late(engine: Engine) -> str:
    """Name the seeds that were planted in the second half of training, too late to pay off; "" if there are none."""
    table = engine.table
    steps = table.age[0] * engine.task.batches_per_epoch  # [S] since germination
    is_late = (table.params[0] > 0) & (steps < MIXING_STEPS) & (2 * table.age[0] <= table.step[0])
    late = [name for name, each in zip(engine.task.slots, is_late, strict=True) if each]
    return late_planting(late, int(steps[is_late].max(initial=0)), MIXING_STEPS)


def save_decisions(out: Path, task: Task, world: int, controller: Controller) -> None:
    """Write the decisions of a trained policy, for `esper explain`. Other controllers leave none."""
    if isinstance(controller, Learned) and controller.log is not None and controller.context is not None:
        layout = MaskLayout(slots=len(task.slots), blueprints=controller.context.slot_params.shape[1])
        record = controller.log.record(controller.network, layout, slots=task.slots, world=world)
        record.save(out / DECISIONS)


def save_figures(
    out: Path, task: Task, world: int, controller: str, results: list[HostResult], engine: Engine, worth: Worth
) -> None:
    """Write the settings and the results to result.json."""
    record = {
        "task": task.name,
        "seed": world,
        "controller": controller,
        "epochs": task.epochs,
        "data_sha256": engine.data.sha256,
        "structure": engine.networks[0].body.structure(),
        "worth": worth.to_dict(),
        "results": [dataclasses.asdict(r) for r in results],
    }
    write_atomically(out / "result.json", (json.dumps(record, indent=1) + "\n").encode())


def save_models(out: Path, engine: Engine, worth: Worth) -> None:
    """Write the host for `esper export`, the body's tensors, the plain model as a program, and a plot of worth."""
    network = engine.networks[0]
    host = GrownHost.of(engine, 0)
    if host.is_finite:
        host.save(out / BEST_HOST)
    else:
        warnings.warn("the grown host has values that are not finite; it is not saved for `esper export`", stacklevel=2)
    with network.final():
        state = {k: v.contiguous() for k, v in network.body.state_dict().items()}
        plain = harden(network.body).eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        example = engine.data.test.x[:4]
        program = exported_program(plain, example, ({0: torch.export.Dim("batch")},))
    for name, content in (("body.safetensors", save_tensors(state)), ("plain.pt2", program)):
        write_atomically(out / name, content)
    plot_worth(worth, out / "worth.svg")
