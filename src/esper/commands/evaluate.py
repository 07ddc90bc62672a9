"""`esper eval`: compare controllers in the same held-out worlds, as a table and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from esper.commands import plainly
from esper.commands.charts import dots
from esper.karn.held_out import Figure, HeldOut, lead_text
from esper.kasmina.blueprints import blueprint_name
from esper.leyline.atomic_io import write_atomically
from esper.leyline.errors import ConfigError, EsperError, unknown_name
from esper.leyline.paired import Difference, compare
from esper.nissa.run import read_manifest
from esper.simic.env import HostBackend
from esper.simic.evaluation.comparison import Compute, Played, from_start, play, static
from esper.simic.evaluation.no_growth_baseline import BASELINES, shared_baselines
from esper.simic.evaluation.plan_search import (
    KindOf,
    Plan,
    PlanTable,
    fit_plan,
    fit_plans_by_kind,
    follow,
    follow_by_kind,
    impairment_and_block,
    plans_of,
    read_plan_table,
    search_in_world,
    visible_kind,
)
from esper.simic.evaluation.sim_oracle import FollowPlans
from esper.simic.evaluation.sim_oracle import best_schedule as best_plan
from esper.simic.family_backend import FamilyBackend
from esper.simic.simulator import Simulator
from esper.simic.training.config import HELD_OUT_FROM, TrainConfig, built, config_of_run, load_config
from esper.simic.training.vectorized import make_backend
from esper.tamiyo.controllers import CONTROLLERS, make_controller
from esper.tolaria.tasks import Task

BEST_SCHEDULE = "best-schedule"
BEST_PER_KIND = "best-per-kind"
BEST_PER_IMPAIRMENT = "best-per-impairment"
SEARCH = "search"
FROM_START = "from-start"
WIDER = "wider"
DEEPER = "deeper"
STATIC = {
    FROM_START: "same structure from step 0",
    WIDER: "wider host of equal size",
    DEEPER: "deeper host of equal size",
}
EVERYTHING = ("heuristic", "random", "schedule", BEST_SCHEDULE, "none", FROM_START, WIDER, DEEPER)
BY_KIND: dict[str, tuple[str, KindOf]] = {
    BEST_PER_KIND: ("best schedule per visible kind of host", visible_kind),
    BEST_PER_IMPAIRMENT: ("best schedule per impairment and block, both known", impairment_and_block),
}
"""Baselines with one plan per kind of host: their labels, and the kind of a world."""
FITTED = (BEST_SCHEDULE, *BY_KIND, SEARCH)
"""Baselines that search for a fixed plan: in training worlds, per kind of host, or in each held-out world with the
training compute that the first controller used there."""
EPISODES_PER_PLAN = 2
"""Episodes of the search for a plan in training worlds, per plan, unless --search-episodes sets their number."""


OF_UTILITY = ("rent_params", "rent_macs", "rent_training", "worst_quality", "floor")
"""Settings of the reward that determine U."""


class ControllerComparison:
    """Comparison of controllers with the backend, rules and reward of one config."""

    def __init__(
        self, config: TrainConfig, *, data_root: Path | None = None, baselines: Sequence[Path] = (),
        search_episodes: int | None = None, fit_task: str | None = None, plans: PlanTable | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.search_episodes = search_episodes
        self.plans = plans
        if plans is not None:
            if fit_task is not None or search_episodes is not None:
                raise ConfigError("--plans replaces the search: do not use --fit-task and --search-episodes with it")
            self.must_fit(plans)
            fit_task = None if plans.task == config.task else plans.task
        self.backend = make_backend(config, [0], data_root, baselines=baselines)
        self.fit_task = fit_task
        self.fitting = self.backend
        """Backend in which plans are fitted."""
        self.fitting_worlds = range(config.pool)
        """Training worlds in which plans are fitted."""
        if fit_task is not None:
            if config.simulated:
                raise ConfigError("--fit-task needs real hosts; do not use it with --sim")
            try:
                other = built(TrainConfig, msgspec.to_builtins(config) | {"task": fit_task})
                self.fitting = make_backend(other, [0], data_root, baselines=baselines)
            except EsperError as error:
                if plans is None:
                    raise
                raise ConfigError(f"the file of --plans has plans of {fit_task!r}, but: {error}") from error
            self.fitting_worlds = range(other.pool)

    def must_fit(self, plans: PlanTable) -> None:
        """Raise unless this table of plans can be used with real hosts and held-out worlds."""
        if self.config.simulated:
            raise ConfigError("--plans needs real hosts; do not use it with --sim")
        given, now = (msgspec.structs.asdict(reward) for reward in (plans.reward, self.config.reward))
        other = ", ".join(f"reward.{k} {given[k]} instead of {now[k]}" for k in OF_UTILITY if given[k] != now[k])
        if other:
            raise ConfigError(
                f"the file of --plans has plans for another utility: {other}. Find plans with the settings of the "
                "comparison, or give a run with these settings first"
            )
        if max(plans.worlds) >= HELD_OUT_FROM:
            raise ConfigError(
                f"the file of --plans has plans found in world {max(plans.worlds)}; worlds from {HELD_OUT_FROM} on are "
                "held out for this comparison"
            )

    def play_all(self, names: Sequence[str], worlds: Sequence[int], console: Console) -> list[Played]:
        """Play all controllers in the same worlds. Static hosts are sized by what the first one grew."""
        self.must_know(names)
        played: list[Played] = []
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=len(names))
            for name in names:
                progress.update(task, description=f"{name} in {len(worlds)} worlds")
                if not console.is_terminal:
                    plainly(console, f"{name} in {len(worlds)} worlds")
                played.append(self.play_one(name, list(worlds), played))
                progress.advance(task)
        return played

    def must_know(self, names: Sequence[str]) -> None:
        """Check all names before the first is played, which may take an hour."""
        for i, name in enumerate(names):
            if name in STATIC:
                if i == 0 or isinstance(self.backend, Simulator):
                    raise ConfigError(
                        f"{name!r} is a static host sized like what the first controller grew: put a controller before "
                        "it, and do not use --sim"
                    )
            elif name in FITTED:
                self.must_be_possible(name, i)
            elif name in EVERYTHING or name == "tamiyo" or Path(name).exists():
                make_controller(name)
            elif Path(name).name != name:
                make_controller(name)  # raises: there is no such run
            else:
                raise unknown_name("controller or run", name, ["tamiyo", *EVERYTHING, *BY_KIND, SEARCH])

    def must_be_possible(self, name: str, position: int) -> None:
        """Raise unless a search for a plan is possible here."""
        if name in BY_KIND and not all(isinstance(b, FamilyBackend) for b in (self.backend, self.fitting)):
            is_family = isinstance(self.backend, FamilyBackend)  # so it is the task of the plans that is no family
            other = f", and with plans of one, not of {self.fit_task!r}" if is_family else ""
            raise ConfigError(f"{name!r} needs worlds with different hosts: use it with a task family{other}")
        if name != SEARCH and self.plans is not None:
            table = self.backend.table
            for chosen in {plan.blueprint for plan in self.saved_plans(name, self.plans)}:
                if chosen is not None and not table.takes[table.enabled.any(axis=0), chosen].any():
                    raise ConfigError(
                        f"the best plan of {self.plans.task!r} plants {blueprint_name(chosen)}, which no slot of "
                        f"{self.config.task!r} takes. Use plans of a task with similar hosts"
                    )
        if name == SEARCH and (position == 0 or isinstance(self.backend, Simulator)):
            raise ConfigError(
                f"{name!r} uses the training compute of the first controller: put a controller before it, and do not "
                "use --sim"
            )

    def saved_plans(self, name: str, table: PlanTable) -> list[Plan]:
        """Return the plans of a table that a baseline follows."""
        if name == BEST_SCHEDULE:
            return [table.best()]
        assert isinstance(self.fitting, FamilyBackend)
        return list(table.best_by_kind(self.fitting.tasks.family, BY_KIND[name][1]).values())

    def play_one(self, name: str, worlds: list[int], before: list[Played]) -> Played:
        """Play one controller or static host in these worlds."""
        if name in STATIC:
            return self.play_static(name, worlds, before)
        if name in FITTED:
            return self.play_fitted(name, worlds, before)
        label = name if name in CONTROLLERS or name == "tamiyo" else f"learned ({Path(name).name})"
        controller = make_controller(name)
        return play(self.backend, controller, worlds, self.config.reward, label, compute=self.compute(before))

    def compute(self, before: list[Played]) -> Compute | None:
        """Return the training compute of the first controller by world; None for it, and unless hosts differ."""
        if not before or not isinstance(self.backend, FamilyBackend):
            return None
        return dict(zip(before[0].worlds, before[0].train_macs.tolist(), strict=True))

    def play_static(self, name: str, worlds: list[int], before: list[Played]) -> Played:
        """Play a static host of the size or structure that the first controller grew."""
        assert isinstance(self.backend, (HostBackend, FamilyBackend))
        grown = before[0]
        reward = self.config.reward
        label = STATIC[name]
        if name == FROM_START:
            return from_start(self.backend, grown, reward, label)
        enlarge = Task.widened if name == WIDER else Task.deepened
        if isinstance(self.backend, HostBackend):
            other = enlarge(self.backend.task, round(float(grown.params.mean())))
            return static(self.backend, other, worlds, reward, label)
        sizes = dict(zip(grown.worlds, grown.params, strict=True))
        hosts = [self.backend.host(world) for world in worlds]  # each world has its own host and size
        return Played.gather(
            label,
            [
                static(host, enlarge(host.task, round(sizes[world])), [world], reward, label)
                for host, world in zip(hosts, worlds, strict=True)
            ],
        )

    def play_fitted(self, name: str, worlds: list[int], before: list[Played]) -> Played:
        """Search for fixed plans and follow them."""
        config = self.config
        reward = self.config.reward
        backend = self.backend
        if isinstance(backend, Simulator):
            plan, _ = best_plan(backend.config, range(64), config.rules, reward, beam=48)
            return play(backend, FollowPlans([plan]), worlds, reward, f"best schedule ({len(plan)} seeds)")
        assert isinstance(backend, (HostBackend, FamilyBackend))
        if name == SEARCH:
            label = "search in each world, equal compute"
            parts = [
                search_in_world(backend, world, reward, macs, label)
                for world, macs in zip(worlds, before[0].train_macs.tolist(), strict=True)
            ]
            return Played.gather(label, parts)
        fitting = self.fitting
        of_task = f" of {self.fit_task}" if self.fit_task else ""
        assert isinstance(fitting, (HostBackend, FamilyBackend))
        episodes = self.search_episodes or EPISODES_PER_PLAN * len(plans_of(fitting))
        if name == BEST_SCHEDULE:
            table = self.plans
            chosen = table.best() if table else fit_plan(fitting, self.fitting_worlds, reward, episodes)
            label = f"best schedule{of_task} ({chosen})"
            return follow(backend, chosen, worlds, reward, label, self.compute(before))
        assert isinstance(backend, FamilyBackend)
        assert isinstance(fitting, FamilyBackend)
        label, kind_of = BY_KIND[name]
        if self.plans is not None:
            plans = self.plans.best_by_kind(fitting.tasks.family, kind_of)
        else:
            plans = fit_plans_by_kind(fitting, self.fitting_worlds, reward, episodes, kind_of)
        return follow_by_kind(backend, plans, kind_of, worlds, reward, label + of_task, self.compute(before))


def run_eval(
    names: list[str],
    *,
    task: str | None,
    simulated: bool,
    worlds: int,
    out: Path | None,
    as_json: bool,
    data_root: Path | None,
    threads: int,
    search_episodes: int | None = None,
    fit_task: str | None = None,
    plans: Path | None = None,
) -> None:
    """Compare controllers and print the results, or write them to `out`."""
    torch.set_num_threads(threads)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)  # fail before the comparison, which may take an hour
        except OSError as error:
            raise ConfigError(
                f"cannot write into {out}: {error.strerror or error}. Use --out to choose another directory"
            ) from error
    config = config_of(names, task, simulated)
    names = complete(names, config.simulated)
    runs = [Path(n) for n in names if (Path(n) / BASELINES).is_dir()]
    places = [*(run / BASELINES for run in runs[:1]), shared_baselines()]
    table = None if plans is None else read_plan_table(plans)
    comparison = ControllerComparison(
        config, data_root=data_root, baselines=places, search_episodes=search_episodes, fit_task=fit_task, plans=table
    )
    held_out = range(HELD_OUT_FROM, HELD_OUT_FROM + worlds)
    console = Console(stderr=as_json)
    played = comparison.play_all(names, held_out, console)
    facts = figures(played, config.task_label)
    if out is not None:
        write_atomically(out / "eval.json", (json.dumps(facts, indent=1) + "\n").encode())
        plot = dots([(p.name, p.utility.tolist()) for p in played], "Utility in held-out worlds")
        write_atomically(out / "eval.svg", plot.encode())
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    console.print(results_tables(facts, config.simulated))
    if out is not None:
        plainly(console, f"files in {out}: eval.json, eval.svg")


def complete(names: list[str], simulated: bool) -> list[str]:
    """Add all other controllers and static hosts to a single name."""
    if len(names) > 1:
        return names
    others = [n for n in EVERYTHING if n not in names and not (simulated and n in STATIC)]
    return [*names, *others]


def config_of(names: Sequence[str], task: str | None, simulated: bool) -> TrainConfig:
    """Return the settings to compare under: those of the first run among the names, if any."""
    if simulated and task is not None:
        raise ConfigError(f"--sim compares on simulated hosts, --task on those of {task!r}. Use one of them")
    real = None if task is None else False  # a named task is meant, also if the run was simulated
    more: dict[str, Any] = {"task": task, "simulated": simulated or real}
    for run in [Path(name) for name in names if (Path(name) / "manifest.json").exists()][:1]:
        tree = read_manifest(run).get("config")
        if isinstance(tree, dict) and "ppo" in tree:
            changes = {k: v for k, v in more.items() if v is not None} | {"imitation": 0}
            return config_of_run(tree, run, changes)
    return load_config(more=more)


def figures(played: Sequence[Played], task: str) -> dict[str, Any]:
    """Return all results on a task as plain data. Differences are leads of the first controller."""
    first = played[0]
    rows = []
    for p in played:
        row: dict[str, Any] = {"name": p.name, "structures": [{s: b for s, (b, _) in x.items()} for x in p.structures]}
        for column in ("test", "quality", "params", "macs", "utility", "train_macs", "equal_test"):
            values = getattr(p, column)
            whole = len(values) > 0 and bool(np.isfinite(values).all())
            if not whole:
                row[column] = None
                continue
            sd = float(np.std(values, ddof=1))
            row[column] = {"mean": float(values.mean()), "sd": sd, "worlds": values.tolist()}
        if p is not first:
            pairs = {"test": first.test, "utility": first.utility, "equal_test": first.test}
            for column, ours in pairs.items():
                if row[column] is not None and np.isfinite(ours).all():
                    row[f"{column}_lead"] = msgspec.to_builtins(compare(ours, getattr(p, column)))
        rows.append(row)
    return {"task": task, "worlds": first.worlds, "rows": rows}


def results_tables(facts: Mapping[str, Any], simulated: bool) -> Group:
    """Return the results of `figures` as tables, one row per controller, with their explanation."""
    comparison = msgspec.convert(facts, HeldOut)
    notes = [
        f"{len(comparison.worlds)} held-out worlds, the same for every row",
        "lead: mean over worlds of first row − this row, with its bootstrap 95 % interval",
        "bold: the interval excludes 0",
        "U: utility, the quality gained over no growth minus rent on size and compute",
    ]
    parts: list[RenderableType] = []
    if not simulated:
        notes.append("test accuracy: mean ± standard deviation over worlds; its lead is in points")
        accuracy = contenders("test accuracy", "lead [95 %]")
        for row in comparison.rows:
            accuracy.add_row(escape(row.name), accuracy_text(row.test), lead(row.test_lead, "percent"))
        parts += [accuracy, ""]
    if any(row.equal_test for row in comparison.rows):
        notes.append("at equal compute: after as much training compute as the first row spent in that world")
        equal = contenders("test accuracy at equal compute", "lead [95 %]")
        for row in comparison.rows[1:]:
            equal.add_row(escape(row.name), accuracy_text(row.equal_test), lead(row.equal_test_lead, "percent"))
        parts += [equal, ""]
    utility = contenders("U", "lead [95 %]", "parameters", "multiply-adds")
    for row in comparison.rows:
        mean = "–" if row.utility is None else f"{row.utility.mean:+.4f}"
        sizes = ["–" if size is None else f"{size.mean:,.0f}" for size in (row.params, row.macs)]
        utility.add_row(escape(row.name), mean, lead(row.utility_lead, "utility"), *sizes)
    return Group(*parts, utility, Text("\n".join(notes), "dim"))


def accuracy_text(figure: Figure | None) -> str:
    """Format a mean accuracy with its standard deviation over worlds."""
    return "–" if figure is None else f"{figure.mean:.1%} ± {100 * figure.sd:.1f}"


def contenders(*columns: str) -> Table:
    """Return an empty table in which numbers do not wrap and names do."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in columns:
        table.add_column(name.replace("-", "-\n"), justify="right", no_wrap=True)
    return table


def lead(value: Difference | None, unit: str) -> str:
    """Format the lead of the first row with its interval; "" if there is none."""
    if value is None:
        return ""
    return f"[b]{lead_text(value, unit)}[/b]" if value.is_sure else lead_text(value, unit)
