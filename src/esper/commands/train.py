"""`esper train`: train a policy on real or simulated hosts, recorded, ending with a table and a report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from esper.commands import plainly
from esper.commands.evaluate import Arena, results_table
from esper.karn import report as karn_report
from esper.karn.summary import RunSummary
from esper.leyline.events import RunStarted
from esper.recording import record
from esper.simic.training.config import HELD_OUT_FROM, TrainConfig, as_tree, load_config
from esper.simic.training.vectorized import Round, Trained, make_env, train_ppo_vectorized
from esper.tamiyo.policy_file import POLICY

SHOWN_WORLDS = 4
"""Held-out worlds of the table at the end: a first look, not a result. `esper eval` gives one."""


def run_train(
    *,
    preset: str | None,
    config_file: Path | None,
    sets: list[str],
    more: dict[str, Any],
    out: Path | None,
    data_root: Path | None,
    show: bool,
    compare: bool,
    tensorboard: bool,
) -> None:
    config = load_config(preset=preset, file=config_file, sets=sets, more=more)
    if show:
        print(json.dumps(as_tree(config), indent=1))
        return
    torch.set_num_threads(config.threads)
    console, label = Console(), "sim" if config.simulated else config.task
    manifest = {"controller": "tamiyo", "seed": config.seed, "threads": config.threads, "config": as_tree(config)}
    with record(label, out=out, level=config.telemetry, manifest=manifest, tensorboard=tensorboard) as run:
        plainly(console, f"run {run.path}  (esper watch {run.path} looks on)")
        plainly(console, what_is_set(config))
        env = make_env(config, data_root=data_root)
        run.say(
            RunStarted(
                run_id=run.path.name, command="train", task=label, controller="tamiyo", seed=config.seed,
                env_names=tuple(f"env {e}" for e in range(config.envs)), slots=env.ground.slots, steps=env.horizon,
                rounds=config.rounds, host_params=env.ground.context.host_params, threads=config.threads,
                telemetry=config.telemetry,
            )
        )  # fmt: skip
        progress = Shown(console, config)
        with progress:
            trained = train_ppo_vectorized(
                config, run.hub, directory=run.path, data_root=data_root, on_round=progress.round
            )
        run.env_steps = trained.env_steps
    console.print(learning_table(trained))
    if compare:
        arena = Arena(config, data_root=data_root, twins=run.path / "twins")
        worlds = range(HELD_OUT_FROM, HELD_OUT_FROM + (64 if config.simulated else SHOWN_WORLDS))
        played = arena.play_all([str(run.path), "heuristic", "schedule", "random", "none"], worlds, console)
        console.print(results_table(played, config.simulated))
    written = karn_report.write([RunSummary.of(run.path)], run.path / "report.html")
    plainly(console, f"policy: {run.path / POLICY}  (esper grow --controller {run.path} uses it)")
    plainly(console, f"report: {written}")


def what_is_set(config: TrainConfig) -> str:
    """The settings that differ from the defaults, and the few that always matter."""
    usual, mine = as_tree(TrainConfig()), as_tree(config)
    said = [f"{k}={mine[k]}" for k in ("task", "seed", "rounds", "envs") if not (k == "task" and config.simulated)]
    said += ["simulated hosts"] if config.simulated else []
    for key, value in mine.items():
        if isinstance(value, dict) and isinstance(usual[key], dict):
            said += [f"{key}.{k}={v}" for k, v in value.items() if v != usual[key].get(k)]
        elif value != usual[key] and key not in ("task", "seed", "rounds", "envs", "simulated"):
            said.append(f"{key}={value}")
    return "  ".join(said)


class Shown:
    """Progress: a bar in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, config: TrainConfig) -> None:
        self.console, self.rounds, self.start = console, config.rounds, time.monotonic()
        self.every = max(1, config.rounds // 12)
        self.bar = Progress(
            TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("first round: twins are trained too", total=config.rounds)

    def __enter__(self) -> Shown:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def round(self, told: Round) -> None:
        text = (
            f"return {told.returns.mean():+.4f} ± {told.returns.std():.4f}  quality {told.quality.mean():.1%}  "
            f"KL {said(told.update.kl, '.4f')}  value NRMSE {said(told.update.value_nrmse, '.2f')}"
        )
        self.bar.update(self.task, advance=1, description=text)
        if not self.console.is_terminal and (told.number % self.every == 0 or told.number == self.rounds - 1):
            spent = time.monotonic() - self.start
            print(f"round {told.number + 1}/{self.rounds}  {text}  {spent:.0f} s", flush=True)


def said(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def learning_table(trained: Trained) -> Table:
    """How returns and choices changed, in at most eight rows."""
    table = Table("rounds", "return", "quality", "op entropy", "KL", "value NRMSE", title="Learning", box=None)
    for group in np.array_split(np.arange(len(trained.rounds)), min(8, len(trained.rounds))):
        rounds = [trained.rounds[i] for i in group]
        returns = np.concatenate([r.returns for r in rounds])
        error = returns.std(ddof=1) / len(returns) ** 0.5 if len(returns) > 1 else float("nan")
        told = [mean_of([getattr(r.update, name) for r in rounds]) for name in ("kl", "value_nrmse")]
        entropy = mean_of([r.update.entropy["op"] for r in rounds])
        table.add_row(
            f"{group[0] + 1}–{group[-1] + 1}", f"{returns.mean():+.4f} ± {error:.4f}",
            f"{np.mean([r.quality.mean() for r in rounds]):.1%}", said(entropy, ".2f"), said(told[0], ".4f"),
            said(told[1], ".2f"),
        )  # fmt: skip
    return table


def mean_of(values: list[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return float(np.mean(there)) if there else None
