"""Find what to grow in each training world of a task or family, for a policy to imitate.

    python scripts/find_plans.py --task sight --set reward.rent_macs=0.03 --workers 2 --out plans.toml
    esper train --config plans.toml --set reward.rent_macs=0.03 --set imitation=12

Successive halving over fixed plans in training worlds leaves a few. Each of these is followed in every world, and the
best one is the world's plan; no growth if none gains enough, since measurements are noisy. The result is a config file
of `esper train` with the task and the plans. Give all other settings to `esper train` again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import torch

from esper.kasmina.blueprints import blueprint_name
from esper.leyline.atomic_io import write_atomically
from esper.simic.env import HostBackend
from esper.simic.evaluation.no_growth_baseline import shared_baselines
from esper.simic.evaluation.plan_search import Plan, all_plans, best_plans, utilities
from esper.simic.family_backend import FamilyBackend
from esper.simic.training.config import TrainConfig, load_config
from esper.simic.training.vectorized import make_backend


@cache
def settings(task: str, sets: tuple[str, ...]) -> tuple[TrainConfig, HostBackend | FamilyBackend]:
    torch.set_num_threads(1)
    config = load_config(sets=sets, more={"task": task})
    backend = make_backend(config, [0], baselines=[shared_baselines()])
    assert isinstance(backend, (HostBackend, FamilyBackend))
    return config, backend


def follow(job: tuple[Plan, int], task: str, sets: tuple[str, ...]) -> float:
    """Return the utility of a plan in a world."""
    config, backend = settings(task, sets)
    return utilities(backend, job[0], [job[1]], config.reward)[0]


def planted(plan: Plan, slots: Sequence[str]) -> str:
    """Return what a plan plants as an inline table of TOML."""
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
    parser.add_argument("--episodes", type=int, default=640, help="episodes of the halving")
    parser.add_argument("--least-gain", type=float, default=0.01, help="utility that growth must gain in a world")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args()

    sets = tuple(options.sets)
    _, backend = settings(options.task, sets)
    worlds = range(options.worlds)
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        play = partial(follow, task=options.task, sets=sets)

        def follow_all(plans: Sequence[Plan], some: Sequence[int]) -> list[list[float]]:
            values = pool.map(play, [(plan, world) for plan in plans for world in some], chunksize=4)
            return [[next(values) for _ in some] for _ in plans]

        report = partial(print, flush=True)
        plans = best_plans(all_plans(backend.table), worlds, options.episodes, options.keep, follow_all, report)
        lines = [f'task = "{options.task}"', "", "[plans]"]
        values = pool.map(play, [(plan, world) for world in worlds for plan in plans])
        for world in worlds:
            gain, best = max(((next(values), i) for i in range(len(plans))), default=(0.0, 0))
            plan = plans[best] if gain >= options.least_gain else Plan()
            report(f"world {world} of {len(worlds)}: {plan}; the best plan gains U {gain:+.4f}")
            lines.append(f"{world} = {planted(plan, backend.slots)}")
    write_atomically(options.out, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
