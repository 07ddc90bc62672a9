"""`esper plans`: find what to grow in each training world, for a policy to imitate.

Successive halving over fixed plans leaves a few. Each of these is followed in every world, and the best one is the
world's plan; no growth if none gains enough, since measurements are noisy. A second file holds the utilities of these
plans in all worlds, in which `esper eval` finds the best fixed plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from esper.commands import plainly
from esper.kasmina.blueprints import blueprint_name
from esper.leyline.atomic_io import write_atomically
from esper.leyline.errors import ConfigError
from esper.simic.env import HostBackend
from esper.simic.evaluation.no_growth_baseline import shared_baselines
from esper.simic.evaluation.plan_search import Plan, PlanTable, best_plans, plans_of, utilities
from esper.simic.family_backend import FamilyBackend
from esper.simic.rewards import RewardConfig
from esper.simic.training.config import TrainConfig, load_config
from esper.simic.training.vectorized import make_backend
from esper.studies.runner import worker_pool

KEEP = 16
"""Number of plans that are followed in every world."""


def run_plans(
    task: str, sets: Sequence[str], *, worlds: int, episodes: int, least_gain: float, workers: int, out: Path
) -> None:
    """Find a plan for each of the first `worlds` worlds and write them as a config file of `esper train`."""
    if math.isnan(least_gain):
        raise ConfigError("--least-gain must be a number, got nan")
    if out.exists():
        raise ConfigError(f"{out} exists. Use --out to choose another file")
    results = out.with_suffix(".json")
    if results.exists():
        raise ConfigError(f"{results} exists. Use --out to choose another file")
    if out.suffix.lower() == ".json":
        raise ConfigError(f"{out} is the name of the results; use --out to choose another file, such as plans.toml")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no directory {out.parent}. Create it, or use --out to choose another file")
    console = Console()
    config, backend = _prepared(task, tuple(sets))
    values: dict[tuple[Plan, int], float] = {}  # an episode of the same plan and world gives the same utility
    with worker_pool(workers) as pool:
        play = partial(_utility, task=task, sets=tuple(sets))

        def follow_all(plans: Sequence[Plan], some: Sequence[int]) -> list[list[float]]:
            jobs = dict.fromkeys((plan, world) for world in some for plan in plans)
            missing = [job for job in jobs if job not in values]
            values.update(zip(missing, pool.map(play, missing), strict=True))
            return [[values[plan, world] for world in some] for plan in plans]

        candidates = plans_of(backend)
        plans = best_plans(candidates, range(worlds), episodes, KEEP, follow_all, partial(plainly, console))
        followed: list[list[float]] = [[] for _ in plans]
        lines = [f"task = {json.dumps(task, ensure_ascii=False)}", "", *_reward_lines(config.reward), "[plans]"]
        for world in range(worlds):
            gains = [gain for (gain,) in follow_all(plans, [world])]
            for row, value in zip(followed, gains, strict=True):
                row.append(value)
            gain = max(gains)
            plan = plans[gains.index(gain)] if gain >= least_gain else Plan()
            plainly(console, f"world {world + 1} of {worlds}: {plan}; the best plan gains U {gain:+.4f}")
            lines.append(f"{world} = {_planted(plan, backend, world)}")
    table = PlanTable(
        task=task, episodes=len(values), worlds=list(range(worlds)), plans=plans, utility=followed, reward=config.reward
    )
    write_atomically(results, msgspec.json.encode(table) + b"\n")
    write_atomically(out, ("\n".join(lines) + "\n").encode())
    plainly(console, f"plans in {out}: use them with esper train --preset family --config {out} --set imitation=12")
    plainly(
        console, f"best fixed plan: {table.best()}; compare with it by esper eval RUN best-schedule --plans {results}"
    )
    family = config.family()
    if family is not None and worlds > 1:
        plainly(console, "plans chosen in one half of the worlds gain in the other:")
        for name, gain in table.gain_by_group(family).items():
            plainly(console, f"    {name}: U {gain:+.4f}")


def _reward_lines(reward: RewardConfig) -> list[str]:
    """Return the settings of the utility that are not defaults, as lines of TOML."""
    values = msgspec.structs.asdict(reward)
    changed = [f"{k} = {json.dumps(v)}" for k, v in values.items() if v != getattr(RewardConfig(), k)]
    return ["[reward]", *changed, ""] if changed else []


@cache
def _prepared(task: str, sets: tuple[str, ...]) -> tuple[TrainConfig, HostBackend | FamilyBackend]:
    """Return the settings and hosts, built once per process."""
    torch.set_num_threads(1)
    config = load_config(sets=sets, more={"task": task, "simulated": False})
    backend = make_backend(config, [0], baselines=[shared_baselines()])
    assert isinstance(backend, (HostBackend, FamilyBackend))
    return config, backend


def _utility(job: tuple[Plan, int], task: str, sets: tuple[str, ...]) -> float:
    config, backend = _prepared(task, sets)
    plan, world = job
    return utilities(backend, plan, [world], config.reward)[0]


def _planted(plan: Plan, backend: HostBackend | FamilyBackend, world: int) -> str:
    """Return what a plan plants in a world as an inline table of TOML.

    Slots that do not take its blueprint are left out.
    """
    if plan.blueprint is None:
        return "{}"
    host = backend if isinstance(backend, HostBackend) else backend.host(world)
    name = blueprint_name(plan.blueprint)
    takes = host.table.takes[:, plan.blueprint]
    first = plan.first if plan.first >= 0 else max(0, len(host.slots) + plan.first)
    slots = range(len(host.slots))[first : first + plan.slots]
    return "{ " + ", ".join(f'{host.slots[s]} = "{name}"' for s in slots if takes[s]) + " }"
