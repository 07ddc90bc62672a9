"""Cost of growth as ratios against plain PyTorch with the same arithmetic.

    train step    HostNetwork's batch with 0, 1 and 3 live seeds against a plain loop over the same host and the same
                  seeds as one ordinary module, with the same optimiser and clipping
    coalitions    all 8 of 3 live seeds on 512 images against one plain validation pass, and against 8 passes
    graft         a grafted host without seeds against the bare host, forward and backward

One process, one thread. Both sides alternate, and the medians of the ratios are reported.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.hosts import BLUEPRINTS, plant, reference_task
from benchmarks.measure import add_output_options, make_parser, median_ratio, print_json
from esper.kasmina.graft import graft
from esper.kasmina.harden import harden
from esper.tolaria.coalitions import evaluate
from esper.tolaria.engine import Engine, HostNetwork, score
from esper.tolaria.host_building import build_optimizer
from esper.tolaria.tasks import Task


def main() -> None:
    parser = make_parser(__doc__, repeats=15)
    add_output_options(parser)
    options = parser.parse_args()
    results = measure(options.repeats, options.quick)
    if options.json:
        print_json(results)
        return
    table = Table("what", "ratio", title=f"medians of {options.repeats} interleaved repeats, one thread")
    for key, value in results.items():
        if isinstance(value, float):
            table.add_row(key, f"{value:.3f}")
    Console().print(table)


def measure(repeats: int, quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    batch = images = 16 if quick else 512
    task = reference_task(batch, images)
    blueprint_sets = {"mixed": BLUEPRINTS, "conv_light": ("conv_light",) * 3}
    results: dict[str, Any] = {"torch": torch.__version__, "threads": 1, "batch": batch, "repeats": repeats}
    for seeds in (0, 1, 3):
        results[f"train step, {seeds} live seeds / bare loop"] = train_ratio(task, BLUEPRINTS[:seeds], repeats)
    for name, blueprints in blueprint_sets.items():
        for key, ratio in coalition_ratios(task, blueprints, repeats).items():
            results[f"{key} ({name} seeds)"] = ratio
    results["grafted host without seeds / bare host"] = graft_ratio(task, repeats)
    return results


def planted_network(task: Task, blueprints: tuple[str, ...]) -> HostNetwork:
    """Return a network whose first slots hold these seeds in BLENDING."""
    engine = Engine(task, [0])
    plant(engine, blueprints)
    return engine.networks[0]


def train_ratio(task: Task, blueprints: tuple[str, ...], repeats: int) -> float:
    network = planted_network(task, blueprints)
    plain = harden(network.body) if blueprints else task.build_host(0)
    plain = plain.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = build_optimizer(task, list(plain.parameters()))
    batches = list(task.minibatches(network.data, 0, 0))

    def bare() -> None:
        for x, y in batches:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(plain(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), task.clip)
            optimizer.step()

    return median_ratio(lambda: network.train_epoch(0), bare, repeats)


def coalition_ratios(task: Task, blueprints: tuple[str, ...], repeats: int) -> dict[str, float]:
    network = planted_network(task, blueprints)
    body = network.body
    split = network.data.val
    plain = harden(body).eval()
    calibration = network.data.train.x[:128]
    every = [tuple(bool(k >> s & 1) for s in range(3)) for k in range(8)]

    @torch.no_grad()
    def one_pass() -> Tensor:
        return score(plain(split.x), split.y)

    def eight_passes() -> None:
        for _ in range(8):
            one_pass()

    def coalitions() -> None:
        evaluate(body, [(split.x, split.y)], score, configs=every, calibration=calibration)

    def without_norms() -> None:
        norms, body.norms = body.norms, []
        try:
            coalitions()
        finally:
            body.norms = norms

    coalitions()
    return {
        "8 coalitions / one validation pass": median_ratio(without_norms, one_pass, repeats),
        "8 coalitions / 8 validation passes": median_ratio(without_norms, eight_passes, repeats),
        "8 coalitions with norm statistics / one validation pass": median_ratio(coalitions, one_pass, repeats),
    }


def graft_ratio(task: Task, repeats: int) -> float:
    bare = task.build_host(0)
    host = task.build_host(0)
    sites = host.sites()
    x = task.load_data().train.x[: task.batch]
    body = graft(host, {s: sites[s] for s in task.slots}, probe=x)

    def run(model: nn.Module) -> None:
        model(x).sum().backward()

    return median_ratio(lambda: run(body), lambda: run(bare), repeats)


if __name__ == "__main__":
    main()
