"""Speed of the simulator: whole episodes with a random controller and rewards, one thread."""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import add_output_options, make_parser, print_json
from esper.leyline.lifecycle import Rules
from esper.simic.evaluation.sim_oracle import simulate_episode
from esper.simic.rewards import RewardConfig
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.controllers import Random

ENVS = (1, 16, 128, 1024)


def main() -> None:
    parser = make_parser(__doc__, repeats=9)
    add_output_options(parser)
    options = parser.parse_args()
    results = rows(options.repeats, options.quick)
    if options.json:
        print_json(results)
        return
    table = Table("envs", "env-steps/s", "against one environment", title=f"medians of {options.repeats} repeats")
    for row in results:
        table.add_row(str(row["envs"]), f"{row['env_steps_per_s']:,.0f}", f"{row['ratio']:.1f}×")
    Console().print(table)


def rows(repeats: int, quick: bool = False) -> list[dict[str, Any]]:
    """Return environment steps per second by number of environments; `ratio` is relative to one at a time."""
    config = SimConfig(horizon=10 if quick else 40)
    rules = Rules(birth="isolated")  # as in the stored measurements
    sims = {envs: Simulator(config, range(envs), rules) for envs in ENVS}
    speeds: dict[int, list[float]] = {envs: [] for envs in ENVS}
    for repeat in range(repeats + 1):
        for envs, sim in sims.items():
            start = time.process_time()  # of this process: other work on the machine does not count
            simulate_episode(sim, Random(repeat), RewardConfig())
            seconds = time.process_time() - start
            if repeat:  # the first warms up
                speeds[envs].append(envs * config.horizon / max(seconds, 1e-9))
    alone = statistics.median(speeds[1])
    return [
        {
            "envs": envs,
            "slots": config.slots,
            "threads": 1,
            "env_steps_per_s": statistics.median(rates),
            "ratio": statistics.median(rates) / alone,
        }
        for envs, rates in speeds.items()
    ]


if __name__ == "__main__":
    main()
