"""Train policies on the simulator with several training seeds and compare each with the best fixed schedule.

    python scripts/simulator_policies.py --seeds 0 1 2 3 4                     # the preset `sim`
    python scripts/simulator_policies.py --seeds 0 --set imitation=0           # one setting changed

U in held-out worlds with sampled actions, as in `esper eval`; with actions sampled without the uniform share of
exploration; and with the likeliest actions. The lead of the second over the best fixed schedule is paired by world,
with its bootstrap 95 % interval. `--first 20000 --worlds 256` are the tuning worlds.
"""

from __future__ import annotations

import argparse
import time

import msgspec

from esper.leyline.paired import compare
from esper.simic.evaluation.comparison import play
from esper.simic.evaluation.sim_oracle import FollowPlans, best_schedule
from esper.simic.simulator import Simulator
from esper.simic.training.config import HELD_OUT_FROM, load_config
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.studies.simulated_policies import played_utility


def main() -> None:
    """Print one line per training seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", nargs="*", default=[], help="settings, as for `esper train`")
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--first", type=int, default=HELD_OUT_FROM)
    options = parser.parse_args()
    worlds = list(range(options.first, options.first + options.worlds))
    base = load_config(preset="sim", sets=options.set)
    sim = Simulator(base.sim, worlds, base.rules)
    plan, _ = best_schedule(base.sim, range(64), base.rules, base.reward, beam=48)
    fixed = play(sim, FollowPlans([plan]), worlds, base.reward).utility
    print(f"best fixed schedule {fixed.mean():+.4f}", flush=True)
    for seed in options.seeds:
        config = load_config(preset="sim", sets=[*options.set, f"seed={seed}"])
        start = time.process_time()
        network = train_ppo_vectorized(config).network
        cpu_s = time.process_time() - start
        sampled = played_utility(network, config, worlds)
        likeliest = played_utility(network, config, worlds, sample=False)
        network.config = msgspec.structs.replace(network.config, epsilon=0.0)
        unmixed = played_utility(network, config, worlds)
        lead = compare(unmixed, fixed)
        print(
            f"seed {seed}  U sampled {sampled.mean():+.4f}  without uniform share {unmixed.mean():+.4f}  "
            f"likeliest {likeliest.mean():+.4f}  lead {lead.mean:+.4f} [{lead.low:+.4f}, {lead.high:+.4f}]  "
            f"{cpu_s:.0f} s CPU",
            flush=True,
        )


if __name__ == "__main__":
    main()
