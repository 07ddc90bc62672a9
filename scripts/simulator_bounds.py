"""Print U of reference controllers in held-out simulated worlds, for both births.

    python scripts/simulator_bounds.py --worlds 20

best_schedule        one plan for all worlds, fitted to 64 training worlds
uninformed_planner   expects the mean over 4096 training worlds in every world; prunes by measurement
informed_planner     knows demand, need and largest possible gain of each world, not its surprises; prunes
replacing_planner    knows the same; replaces a seed if another one promises more
oracle               the best plan of each world, by search on the true parameters
"""

from __future__ import annotations

import argparse

from esper.simic.training.config import HELD_OUT_FROM, load_config
from esper.studies.simulated_policies import mean_and_half_width
from esper.studies.simulated_references import CONTROLLERS, reference_utility


def main() -> None:
    """Print one line per birth and controller: mean U and half the width of its 95 % interval over worlds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--first", type=int, default=HELD_OUT_FROM)
    options = parser.parse_args()
    worlds = range(options.first, options.first + options.worlds)
    for birth in ("open", "isolated"):
        config = load_config(preset="sim", sets=[f"rules.birth={birth}"])
        for name in CONTROLLERS:
            print(f"{birth:9} {name:20} {mean_and_half_width(reference_utility(name, config, worlds))}", flush=True)


if __name__ == "__main__":
    main()
