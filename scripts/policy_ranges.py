"""Measure the ranges of the observations of a policy in its training worlds, and store them in its file.

    python scripts/policy_ranges.py policy.safetensors --task rescue --worlds 4 --birth isolated

`esper train` stores the ranges of all training episodes. This script is for a policy file that has none: it plays one
episode in each of the first worlds, with sampled actions as in training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open

from esper.leyline.lifecycle import Rules
from esper.simic.env import HostBackend
from esper.tamiyo.controllers.learned import Learned
from esper.tamiyo.decision_record import DecisionLog
from esper.tamiyo.policy.feature_ranges import FeatureRanges
from esper.tamiyo.policy_file import save_policy
from esper.tolaria.families import world_task
from esper.tolaria.rollout import rollout


def measure(policy: Path, task: str, worlds: int, birth: str) -> FeatureRanges:
    """Return the ranges of the observations in one episode of each world."""
    ranges = FeatureRanges()
    rules = Rules(birth=birth)  # type: ignore[arg-type]
    for world in range(worlds):
        backend = HostBackend(world_task(task, world), rules=rules, world=world)
        controller = Learned.load(policy)
        controller.bind(backend.context, [world])
        controller.log = DecisionLog()
        for _ in rollout(backend, controller, backend.horizon):
            pass
        ranges.add(torch.cat(controller.log.rows["obs"]))
        print(f"world {world}: {backend.horizon} observations", flush=True)
    return ranges


def main() -> None:
    """Measure and store the ranges of one policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", type=Path)
    parser.add_argument("--task", required=True)
    parser.add_argument("--worlds", type=int, default=4)
    parser.add_argument("--birth", choices=["open", "isolated"], default="open")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranges = measure(options.policy, options.task, options.worlds, options.birth)
    with safe_open(options.policy, "pt") as file:
        about = json.loads(file.metadata()["about"])
    controller = Learned.load(options.policy)
    save_policy(controller.network, options.policy, fixed=controller.fixed, ranges=ranges, **about)
    print(f"stored in {options.policy}")


if __name__ == "__main__":
    main()
