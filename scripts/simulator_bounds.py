"""Print U of reference controllers in held-out simulated worlds, for both births.

    python scripts/simulator_bounds.py --worlds 20

best fixed schedule   one plan for all worlds, fitted to 64 training worlds
uninformed planner    expects the mean over 4096 training worlds in every world; prunes by measurement
informed planner      knows demand, need and largest possible gain of each world, not its surprises; prunes
replacing planner     knows the same; replaces a seed if another one promises more
oracle                the best plan of each world, by search on the true parameters
"""

from __future__ import annotations

import argparse

import msgspec

from esper.leyline.lifecycle import Rules
from esper.leyline.paired import compare
from esper.simic.evaluation.comparison import play
from esper.simic.evaluation.informed_planner import InformedPlanner
from esper.simic.evaluation.replacing_planner import ReplacingPlanner
from esper.simic.evaluation.sim_oracle import FollowPlans, best_schedule
from esper.simic.rewards import RewardConfig
from esper.simic.simulated_worlds import draw_worlds
from esper.simic.simulator import SimConfig, Simulator
from esper.simic.training.config import HELD_OUT_FROM

BEAM = 48


def main() -> None:
    """Print one line per birth and controller: mean U and the 95 % interval of its mean over worlds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--first", type=int, default=HELD_OUT_FROM)
    options = parser.parse_args()
    worlds = list(range(options.first, options.first + options.worlds))
    config = SimConfig()
    reward = RewardConfig()
    usual = draw_worlds(range(4096), config).expected.mean(axis=0)
    for birth in ("open", "isolated"):
        rules = msgspec.structs.replace(Rules(), birth=birth)
        sim = Simulator(config, worlds, rules)
        plan, _ = best_schedule(config, range(64), rules, reward, beam=BEAM)
        oracle = [best_schedule(config, [world], rules, reward, beam=BEAM)[0] for world in worlds]
        controllers = {
            "best fixed schedule": FollowPlans([plan]),
            "uninformed planner": InformedPlanner(sim, reward, usual),
            "informed planner": InformedPlanner(sim, reward),
            "replacing planner": ReplacingPlanner(sim, reward),
            "oracle": FollowPlans(oracle),
        }
        for name, controller in controllers.items():
            utility = play(sim, controller, worlds, reward).utility
            mean = compare(utility, 0 * utility)
            print(f"{birth:9} {name:20} {mean.mean:+.4f} [{mean.low:+.4f}, {mean.high:+.4f}]", flush=True)


if __name__ == "__main__":
    main()
