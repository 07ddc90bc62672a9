"""`esper train`: train a policy on real or simulated hosts, with telemetry, a final table and a report."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from esper.commands import losses_decide_exit_code, plainly
from esper.commands.evaluate import ControllerComparison, figures, results_tables
from esper.commands.explained_run import explain_run
from esper.commands.resuming import checkpoint_of, must_fit, ownership, owns_run, refuse_settings
from esper.commands.workers import Parent, Workers
from esper.karn import held_out
from esper.karn import report as karn_report
from esper.karn.run_state import RunState
from esper.leyline.errors import ConfigError, TrainingError
from esper.leyline.events import RunStarted
from esper.nissa.recorder import Run, record, record_beside, record_on
from esper.nissa.run import Lock
from esper.nissa.signals import stoppable, terminable
from esper.simic.evaluation.no_growth_baseline import BASELINES, shared_baselines
from esper.simic.training import memory_estimate as memory
from esper.simic.training.checkpointer import (
    CHECKPOINTS,
    Round,
    TrainingResult,
    differences,
    run_metadata,
    with_policy_network,
)
from esper.simic.training.config import HELD_OUT_FROM, TrainConfig, as_tree, config_of_run, load_config
from esper.simic.training.distributed import ProcessGroup
from esper.simic.training.heartbeat import RankLostError
from esper.simic.training.vectorized import make_env, train_ppo_vectorized
from esper.tamiyo.policy_file import POLICY
from esper.tolaria.checkpoint import Checkpoints, Saved
from esper.tolaria.data.dataset import must_be_usable

OPTION = {"simulated": "--sim"}
"""Options whose name differs from their setting."""
KEPT_WITH_RESUME = "--rounds, --workers, --data, --track, --tensorboard, --no-compare and --allow-inexact"
SHOWN_WORLDS = 3
"""Held-out worlds of the final table: a first look. `esper eval` gives a reliable result."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Command-line options that are not settings of the run."""

    resume: Path | None = None
    """Run directory to resume; None starts a new run."""
    allow_inexact: bool = False
    """Whether to resume although the result may differ in bits."""
    workers: int = 1
    """Number of processes, ≥ 1."""
    out: Path | None = None
    """Run directory to create; None is a new one in runs/."""
    data_root: Path | None = None
    """Directory of the data files; None is `$ESPER_DATA`."""
    compare: bool = True
    """Whether to compare with other controllers at the end."""
    track: tuple[str, ...] = ()
    """Names of trackers."""

    def resume_command(self, path: Path) -> str:
        """Return the command that resumes the run at `path` with the same options."""
        command = f"esper train --resume {path}" + ("" if self.data_root is None else f" --data {self.data_root}")
        command += "" if self.workers == 1 else f" --workers {self.workers}"
        return command + ("" if self.compare else " --no-compare")


def run_train(
    options: TrainOptions, *, preset: str | None, config_file: Path | None, sets: list[str], more: dict[str, Any],
    show: bool,
) -> Path | None:  # fmt: skip
    """Train a policy from a config or from a checkpoint, or only print the config if `show`.

    Return the run directory, or None if `show` or if this process is not rank 0.
    """
    if options.resume is None:
        config = with_policy_network(load_config(preset=preset, file=config_file, sets=sets, more=more))
        if is_restarted(options.out, config):
            resumed = replace(options, resume=options.out, out=None)
            return run_train(resumed, preset=None, config_file=None, sets=[], more={}, show=show)
    with ownership(options.resume) as lock:
        if options.resume is not None:
            settings = {"preset": preset, "config": config_file, "set": sets or None, "out": options.out} | more
            overrides = [n for n, v in settings.items() if v is not None and n != "rounds"]
            refuse_settings([OPTION.get(n, f"--{n.replace('_', '-')}") for n in overrides], KEPT_WITH_RESUME)
            saved, config = last_checkpoint(options.resume, more.get("rounds"))
        else:
            saved = None
        if show:
            print(json.dumps(as_tree(config), indent=1))
            return None
        must_be_usable(config.engine.device)
        torch.set_num_threads(config.threads)
        return train_in_group(config, saved, options, lock)


def is_restarted(out: Path | None, config: TrainConfig) -> bool:
    """Return whether torchrun has started this command again after a failure: `out` holds a run with these settings.

    An agent of torchrun counts only the restarts that its own ranks have caused, so the count does not tell.
    """
    if out is None or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") in ("", "0"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reported when it is loaded
        saved = Checkpoints(out / CHECKPOINTS).newest()
    return saved is not None and saved.kind == "run" and config_of_run(run_metadata(saved)["config"], out) == config


def train_in_group(config: TrainConfig, saved: Saved | None, options: TrainOptions, lock: Lock | None) -> Path | None:
    """Start or join the process group and train, as rank 0, which returns the run directory, or as another rank."""
    group = ProcessGroup()
    try:
        with terminable(), Workers(options.workers) as workers:
            group = ProcessGroup.join(workers.poll if workers.is_parent else Parent().poll)
            workers.remove_rendezvous()
            group.share(config.envs)
            if group.size > 1 and config.engine.strategy != "loop":
                raise ConfigError(
                    f"engine.strategy={config.engine.strategy} does not support several processes: its results depend "
                    "on the number of environments per process. Use engine.strategy=loop, or one process"
                )
            if group.is_rank_zero:
                return run_rank_zero(config, saved, options, group, workers, lock)
            run_other_rank(config, saved, options, group)
            return None
    finally:
        group.leave()  # after the workers began to exit, so that they do not report rank 0 as lost


def last_checkpoint(path: Path, rounds: int | None) -> tuple[Saved, TrainConfig]:
    """Return the checkpoint to resume from and its settings, with a larger number of rounds if given."""
    with warnings.catch_warnings():
        if not owns_run():
            warnings.simplefilter("ignore")  # rank 0 warns
        saved = checkpoint_of(path, "train", facts_of)
    settings = run_metadata(saved)["config"]
    done = run_metadata(saved)["done"]
    planned = int(settings.get("rounds", 0))
    if rounds is not None and rounds < planned:
        raise ConfigError(f"--rounds can only be increased: {path} was started with {planned} rounds, got {rounds}")
    config = config_of_run(settings, path, None if rounds is None else {"rounds": rounds})
    if config.rounds <= done:
        raise ConfigError(f"{path} has completed all {done} rounds. Use --rounds N with a larger N to train further")
    return saved, config


def facts_of(saved: Saved) -> dict[str, Any]:
    """Return the manifest fields of the run that wrote this checkpoint."""
    config = config_of_run(run_metadata(saved)["config"], saved.path)
    return {"task": config.task_label} | manifest_of(config)


def manifest_of(config: TrainConfig) -> dict[str, Any]:
    """Return the manifest fields of a config."""
    return {"controller": "tamiyo", "seed": config.seed, "threads": config.threads, "config": as_tree(config)}


def run_rank_zero(
    config: TrainConfig, saved: Saved | None, options: TrainOptions, group: ProcessGroup, workers: Workers,
    lock: Lock | None,
) -> Path:  # fmt: skip
    """Run the command as rank 0, which owns the run directory. Return the directory."""
    console = Console()
    label = config.task_label
    env = make_env(config, options.data_root, group)  # an error in data, device or policy leaves no run behind
    if saved is not None:
        must_fit(differences(saved, config, env.backend), options.allow_inexact)
    need = memory.needed(config, env, group.size)
    memory_line = memory.describe(need, memory.available(), group.size)
    with recording(config, saved, options, label, lock) as run:
        seqs = [0] * group.size if saved is None else run_metadata(saved)["next_seq"]
        group.broadcast({"path": str(run.path.absolute()), "next_seq": seqs})
        plainly(console, f"run {run.path}  (live view: esper watch {run.path})")
        if saved is not None:
            plainly(console, f"resuming from {saved.path.name}, next round: {run_metadata(saved)['done'] + 1}")
        plainly(console, settings_line(config))
        plainly(console, memory_line)
        run.emit(
            RunStarted(
                run_id=run.path.name, command="train", task=label, controller="tamiyo", seed=config.seed,
                env_names=tuple(f"env {e}" for e in range(config.envs)), slots=env.backend.slots, steps=env.horizon,
                rounds=config.rounds, host_params=int(env.backend.host_params.mean()), threads=config.threads,
                telemetry=config.telemetry,
            )
        )  # fmt: skip
        progress = ProgressDisplay(console, config, 0 if saved is None else run_metadata(saved)["done"])
        again = options.resume_command(run.path)
        try:
            notice = "stopping after this step; repeat the signal to exit immediately"
            with progress, stoppable(notice, run.hub.stop_waiting) as stop:

                def poll() -> None:
                    stop()
                    run.directory.must_exist()

                trained = train_ppo_vectorized(
                    config, run.hub, env=env, directory=run.path, baselines=shared_baselines(), resume=saved,
                    group=group, poll=poll, on_round=progress.round,
                )  # fmt: skip
        except SystemExit:
            plainly(console, f"stopped in round {progress.done + 1} of {config.rounds}. Resume with: {again}")
            raise
        except TrainingError as error:
            kind = RankLostError if isinstance(error, RankLostError) else TrainingError
            raise kind(f"{named(error, workers)}. {resumable(run.path, again)}") from error
        run.env_steps = trained.env_steps
        run.emitted = dict(enumerate(group.gather_ints(run.hub.next_seq)))
    with losses_decide_exit_code(run):
        conclude(config, options, run.path, trained, console)
    return run.path


def conclude(config: TrainConfig, options: TrainOptions, path: Path, trained: TrainingResult, console: Console) -> None:
    """Print the results of a finished run, compare its policy with other controllers, and write the report."""
    saved = Checkpoints(path / CHECKPOINTS).newest()
    if saved is None or run_metadata(saved)["done"] < config.rounds:
        print(
            "esper: the last checkpoint of this run could not be written; --resume would continue from "
            f"{'the start' if saved is None else saved.path.name}. All other results are in {path}",
            file=sys.stderr,
        )
    console.print(learning_table(trained))
    if config.rounds <= config.imitation:
        plainly(
            console,
            f"all {config.rounds} rounds imitated a teacher (imitation = {config.imitation}): PPO begins after them. "
            "Use more --rounds, or --set imitation=0",
        )
    if options.compare:
        comparison = ControllerComparison(
            config, data_root=options.data_root, baselines=[path / BASELINES, shared_baselines()]
        )
        worlds = range(HELD_OUT_FROM, HELD_OUT_FROM + (64 if config.simulated else SHOWN_WORLDS))
        names = [str(path), "heuristic", "schedule", "random", "none"]
        facts = figures(comparison.play_all(names, worlds, console), config.task_label)
        held_out.write(path, facts, config.rounds)
        console.print(results_tables(facts, config.simulated))
    written = karn_report.write([RunState.of(path)], path / "report.html", explain_run)
    plainly(console, f"policy: {path / POLICY}  (use it with: esper grow --controller {path})")
    plainly(console, f"report: {written}")


def resumable(path: Path, command: str) -> str:
    """Describe from which checkpoint a run that ended early can be resumed, and how."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = Checkpoints(path / CHECKPOINTS).newest()
    if kept is None:
        return "No checkpoint was written"
    return f"The last checkpoint is {kept.path.name}. Resume with: {command}"


def named(error: TrainingError, workers: Workers) -> str:
    """Return the reason why the process group ended: which worker ended and how, if it was a local one."""
    if isinstance(error, RankLostError):
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            try:
                workers.poll()
            except TrainingError as reason:
                return str(reason)
            time.sleep(0.05)
    return str(error)


def recording(
    config: TrainConfig, saved: Saved | None, options: TrainOptions, label: str, lock: Lock | None
) -> AbstractContextManager[Run]:
    """Return the context of a new run, or of an earlier one that is resumed."""
    if saved is not None and options.resume is not None:
        next_seq = run_metadata(saved)["next_seq"]
        changes = {"config": as_tree(config)}
        return record_on(
            options.resume, next_seq, level=config.telemetry, manifest=changes, track=options.track,
            lock=lock,
        )  # fmt: skip
    manifest = manifest_of(config)
    return record(label, out=options.out, level=config.telemetry, manifest=manifest, track=options.track)


def run_other_rank(config: TrainConfig, saved: Saved | None, options: TrainOptions, group: ProcessGroup) -> None:
    """Train a share of the environments as another rank, with its own journal and without output."""
    place = group.broadcast()
    first = place["next_seq"][group.rank] if group.rank < len(place["next_seq"]) else 0
    path = Path(place["path"])
    try:
        with (
            record_beside(path, group.rank, first, config.telemetry) as hub,
            stoppable(f"rank {group.rank} is stopping after this step", hub.stop_waiting) as stop,
        ):
            train_ppo_vectorized(
                config, hub, directory=path, baselines=shared_baselines(), data_root=options.data_root, resume=saved,
                group=group, poll=stop,
            )  # fmt: skip
            hub.close()  # so that the event count sent to rank 0 is final
            group.gather_ints(hub.next_seq)
    except RankLostError as error:
        if error.rank != 0:
            raise SystemExit(error.exit_code) from None  # rank 0 reports it
        again = options.resume_command(path)
        raise RankLostError(f"{error}. {resumable(path, again)}, after rank 0 has ended") from error


def settings_line(config: TrainConfig) -> str:
    """Return the settings that differ from the defaults, and the most important ones."""
    usual = as_tree(TrainConfig())
    mine = as_tree(config)
    shown = [f"{k}={mine[k]}" for k in ("task", "seed", "rounds", "envs") if not (k == "task" and config.simulated)]
    shown += ["simulated hosts"] if config.simulated else []
    shown += [f"plans of {len(config.plans)} worlds"] if config.plans else []
    for key, value in mine.items():
        if key == "plans":
            continue
        if isinstance(value, dict) and isinstance(usual[key], dict):
            shown += [f"{key}.{k}={v}" for k, v in value.items() if v != usual[key].get(k)]
        elif value != usual[key] and key not in ("task", "seed", "rounds", "envs", "simulated"):
            shown.append(f"{key}={value}")
    return "  ".join(shown)


class ProgressDisplay:
    """Progress output: a bar in a terminal, else a line every few rounds."""

    def __init__(self, console: Console, config: TrainConfig, done: int = 0) -> None:
        self.console = console
        self.rounds = config.rounds
        self.done = done
        self.start = time.monotonic()
        self.every = max(1, config.rounds // 12)
        self.imitation = config.imitation
        self.bar = Progress(
            TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=10), TextColumn("{task.description}"),
            TimeElapsedColumn(), TimeRemainingColumn(compact=True), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("first round, with no-growth baselines", total=config.rounds, completed=done)

    def __enter__(self) -> ProgressDisplay:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def round(self, result: Round) -> None:
        """Show a finished round."""
        update = result.update
        short = f"return {number(update.return_mean, '+.4f')}"
        quality = f"quality {result.quality.mean():.1%}"
        text = (
            f"{short} ± {number(update.return_sd, '.4f')} (sd over {len(result.returns)} episodes)  {quality}  "
            f"KL {number(update.kl, '.4f')}  value NRMSE {number(update.value_nrmse, '.2f')}"
        )
        if result.number < self.imitation:
            text += "  imitates a teacher"
            short += "  imitates"
        if update.skipped:
            text += f"  {update.skipped} minibatches skipped (not finite)"
            short += f"  {update.skipped} skipped"
        self.done = result.number + 1
        self.bar.update(self.task, completed=self.done, description=f"{short}  {quality}")
        due = result.number % self.every == 0 or result.number == self.rounds - 1 or result.update.skipped
        if not self.console.is_terminal and due:
            spent = time.monotonic() - self.start
            print(f"round {result.number + 1}/{self.rounds}  {text}  {spent:.0f} s", flush=True)


def number(value: float | None, form: str) -> str:
    """Format a value; – if it was not measured."""
    return "–" if value is None else format(value, form)


def learning_table(trained: TrainingResult) -> Table:
    """Return a table of returns and other statistics over training, in at most eight rows."""
    table = Table("rounds", "return ± se", "quality", "op entropy", "KL", "value NRMSE", box=None, pad_edge=False,
                  title="Learning (± se: standard error over the rounds' episodes)")  # fmt: skip
    for group in np.array_split(np.arange(len(trained.rounds)), min(8, len(trained.rounds))):
        rounds = [trained.rounds[i] for i in group]
        returns = np.concatenate([r.returns for r in rounds])
        error = returns.std(ddof=1) / len(returns) ** 0.5 if len(returns) > 1 else float("nan")
        kl, nrmse = (mean_of([getattr(r.update, name) for r in rounds]) for name in ("kl", "value_nrmse"))
        entropy = mean_of([r.update.entropy["op"] for r in rounds])
        span = f"{group[0] + 1}–{group[-1] + 1}" if len(group) > 1 else f"{group[0] + 1}"
        table.add_row(
            span, f"{returns.mean():+.4f} ± {error:.4f}",
            f"{np.mean([r.quality.mean() for r in rounds]):.1%}", number(entropy, ".2f"), number(kl, ".4f"),
            number(nrmse, ".2f"),
        )  # fmt: skip
    return table


def mean_of(values: list[float | None]) -> float | None:
    """Return the mean of the measured values, None if there are none."""
    measured = [v for v in values if v is not None]
    return float(np.mean(measured)) if measured else None
