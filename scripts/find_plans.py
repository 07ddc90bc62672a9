"""Find what to grow in each training world of a task or family, for a policy to imitate.

    python scripts/find_plans.py --task sight --set reward.rent_macs=0.03 --workers 2 --out plans.toml
    esper train --config plans.toml --set imitation=12

Successive halving over fixed plans in training worlds leaves a few. Each of these is followed in every world, and the
best one is the world's plan; no growth if none gains enough. The result is a config file of `esper train` with the task
and the plans. Other settings, as those of the reward, must be given to `esper train` again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from esper.kasmina.blueprints import blueprint_name
from esper.leyline.atomic_io import write_atomically
from esper.simic.env import HostBackend
from esper.simic.evaluation.no_growth_baseline import shared_baselines
from esper.simic.evaluation.plan_search import Plan, best_plans, plan_per_world
from esper.simic.family_backend import FamilyBackend
from esper.simic.training.config import TrainConfig, load_config
from esper.simic.training.vectorized import make_backend


def backend_of(config: TrainConfig) -> HostBackend | FamilyBackend:
    torch.set_num_threads(1)
    backend = make_backend(config, [0], baselines=[shared_baselines()])
    assert isinstance(backend, (HostBackend, FamilyBackend))
    return backend


def plan_of_world(world: int, config: TrainConfig, plans: Sequence[Plan], least_gain: float) -> tuple[Plan, float]:
    _, plan, value = next(plan_per_world(backend_of(config), plans, [world], config.reward, least_gain))
    return plan, value


def planted(plan: Plan, slots: Sequence[str]) -> str:
    """Return the plan of a world as an inline table of TOML."""
    if plan.blueprint is None:
        return "{}"
    name = blueprint_name(plan.blueprint)
    return "{ " + ", ".join(f'{slot} = "{name}"' for slot in slots[plan.first : plan.first + plan.slots]) + " }"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, help="the task, family or family file")
    parser.add_argument("--set", action="append", default=[], dest="sets", help="a setting of `esper train`")
    parser.add_argument("--worlds", type=int, default=48, help="number of worlds, from 0 on")
    parser.add_argument("--keep", type=int, default=8, help="number of plans that are followed in every world")
    parser.add_argument("--episodes", type=int, default=320, help="episodes of the halving")
    parser.add_argument("--least-gain", type=float, default=0.01, help="utility that growth must gain in a world")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args()

    config = load_config(sets=options.sets, more={"task": options.task})
    backend = backend_of(config)
    worlds = range(options.worlds)
    report = partial(print, flush=True)
    plans = best_plans(backend, worlds, config.reward, options.episodes, options.keep, report)
    for plan in plans:
        report("  ", plan)
    lines = [f'task = "{options.task}"', "", "[plans]"]
    follow = partial(plan_of_world, config=config, plans=plans, least_gain=options.least_gain)
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for world, (plan, value) in zip(worlds, pool.map(follow, worlds), strict=True):
            report(f"world {world} of {len(worlds)}: {plan}, U {value:+.4f}")
            lines.append(f"{world} = {planted(plan, backend.slots)}")
    write_atomically(options.out, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
