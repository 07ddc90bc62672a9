"""Cost of a decision without the training of hosts: features, masks, advantages and the simulator, each against a
sequential reference, and the overhead of the loop.

Advantages are also compared with those of Stable-Baselines3, CleanRL's form and TorchRL, where installed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import gae, observations, simulator
from benchmarks.measure import add_output_options, make_parser, print_json
from esper.leyline.events import Level
from esper.nissa.hub import NissaHub
from esper.simic.env import GrowthVectorEnv
from esper.simic.simulated_worlds import SimConfig
from esper.simic.simulator import Simulator
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.simic.training.distributed import ProcessGroup
from esper.simic.training.vectorized import Sampler
from esper.tamiyo.network import TamiyoNetwork
from esper.tolaria.rollout import rollout

LOOPS = ((16, 3), (128, 3), (128, 25))
WARM_UP, BLOCK = 20, 20
"""Steps before the loop's overhead is measured, and steps of which the median is taken."""


def main() -> None:
    parser = make_parser(__doc__, repeats=9)
    add_output_options(parser)
    options = parser.parse_args()
    results = measure(options.repeats, options.quick)
    if options.json:
        print_json(results)
        return
    console = Console()
    for title, rows in results.items():
        table = Table(*[str(k) for k in rows[0]], title=title, box=None)
        for row in rows:
            table.add_row(*[shown(v) for v in row.values()])
        console.print(table)


def measure(repeats: int, quick: bool) -> dict[str, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    return {
        "features and masks": observations.rows(repeats, quick),
        "advantages": gae.rows(repeats, quick),
        "simulator": simulator.rows(repeats, quick),
        "loop": [overhead(e, s, 1 if quick else 2 * repeats) for e, s in (LOOPS[:1] if quick else LOOPS)],
    }


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "–" if value is None else str(value)


def overhead(envs: int, slots: int, repeats: int) -> dict[str, Any]:
    """Return the milliseconds of one step without host training: choose, apply, tick, observe, reward, emit.

    The simulator replaces the hosts. The time of its learning curves is measured separately and subtracted, like the
    training of a real host. The figure is CPU time of the loop's thread, the median step of the fastest of several
    blocks, because a shared core is slower at times.
    """
    backend = _Timed(SimConfig(slots=slots, horizon=10_000), range(envs))
    env = GrowthVectorEnv(backend, range(envs))
    network = TamiyoNetwork()
    with NissaHub([_Nowhere()], level=Level.NORMAL) as hub:
        emit = TelemetryEmitter(hub, slots=env.backend.slots, worlds=range(envs), host_params=1)
        obs, info = env.reset()
        count = WARM_UP + BLOCK * repeats
        draws = torch.rand(envs, 8, dtype=torch.float64).expand(count, -1, -1)
        sampler = Sampler(network, env.layout, ProcessGroup(), draws, obs, info["masks"])
        steps = []
        hosts = []
        start = time.thread_time()
        for step in rollout(env, sampler, count):
            obs, _, _, _, info = step.result
            sampler.observe(obs, info["masks"])
            emit.step(env.backend.table, step.actions, env.outcome, step.allowed)
            now = time.thread_time()
            steps.append(1e3 * (now - start))
            hosts.append(1e3 * backend.spent_s)
            start = now
            backend.spent_s = 0.0
    blocks = [slice(i, i + BLOCK) for i in range(WARM_UP, len(steps), BLOCK)]
    whole, of_hosts = min((statistics.median(steps[b]), statistics.median(hosts[b])) for b in blocks)
    return {"envs": envs, "slots": slots, "step_ms": whole, "hosts_ms": of_hosts, "overhead_ms": whole - of_hosts}


class _Timed(Simulator):
    """A simulator that measures the time of its hosts' learning curves."""

    spent_s = 0.0

    def _learn(self) -> None:
        start = time.thread_time()
        super()._learn()
        self.spent_s += time.thread_time() - start

    def _measure(self) -> None:
        start = time.thread_time()
        super()._measure()
        self.spent_s += time.thread_time() - start


class _Nowhere:
    def write(self, records: Any) -> None: ...
    def close(self) -> None: ...


if __name__ == "__main__":
    main()
