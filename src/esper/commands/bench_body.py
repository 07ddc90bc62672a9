"""`esper bench body`: what growing costs, as ratios against plain PyTorch doing the same arithmetic.

    train step    Plot's batch with 0, 1 and 3 live seeds against a plain loop over the same host and the same
                  seeds as one ordinary module, with the same optimiser and clipping
    coalitions    all 8 of 3 live seeds on 512 images against one plain validation pass, and against 8 passes
    graft         a grafted host without seeds against the bare host, forward and backward

Everything compared is interleaved, repeat by repeat, and the medians of the ratios are reported.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint_index
from esper.kasmina.body import Body
from esper.kasmina.graft import graft
from esper.kasmina.harden import harden
from esper.kasmina.lifecycle import Effect, EffectKind
from esper.leyline.actions import Operator
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage
from esper.tolaria.coalitions import evaluate
from esper.tolaria.engine import EngineConfig, Plot, build_optimizer, score, takes_of
from esper.tolaria.tasks import Task

BLUEPRINTS = ("conv_light", "depthwise", "attention")
"""The three live seeds, slot by slot: what a grown host of the reference typically holds."""


def run_bench(*, repeats: int, as_json: bool, quick: bool) -> None:
    torch.set_num_threads(1)
    batch, images = (64, 64) if quick else (512, 512)
    task, blueprint_sets = reference_task(batch, images), {"mixed": BLUEPRINTS, "conv_light": ("conv_light",) * 3}
    found: dict[str, Any] = {"torch": torch.__version__, "threads": 1, "batch": batch, "repeats": repeats}
    for seeds in (0, 1, 3):
        found[f"train step, {seeds} live seeds / bare loop"] = train_ratio(task, BLUEPRINTS[:seeds], repeats)
    for name, blueprints in blueprint_sets.items():
        for key, ratio in coalition_ratios(task, blueprints, repeats).items():
            found[f"{key} ({name} seeds)"] = ratio
    found["grafted host without seeds / bare host"] = graft_ratio(task, repeats)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table("what", "ratio", title=f"esper bench body: medians of {repeats} interleaved repeats, one thread")
    for key, value in found.items():
        if isinstance(value, float):
            table.add_row(key, f"{value:.3f}")
    Console().print(table)


def reference_task(batch: int, images: int) -> Task:
    """The reference CNN: base 8, 3 blocks, 3×32×32; 5 training batches, as many validation images as asked."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(5 * batch + 2 * images, 3, 32, 32, generator=noise)
    y = torch.randint(0, 10, (len(x),), generator=noise)
    held = images / len(x)
    return Task.from_tensors(
        "reference", x, y, held_out=held + 1e-9, classes=10, host_kwargs={"base": 8, "blocks": 3},
        batch=batch, batches_per_epoch=5, lr=0.01, seed_lr=0.01,
    )  # fmt: skip


def live_plot(task: Task, blueprints: tuple[str, ...]) -> Plot:
    """A plot whose first slots hold these seeds, held in BLENDING."""
    plot = Plot(task, task.load_data(), 0, EngineConfig())
    table = SlotTable.empty(1, len(task.slots), takes=takes_of(plot.body))
    effects = []
    for s, name in enumerate(blueprints):
        table.stage[0, s], table.alpha[0, s], table.alpha_to[0, s] = SeedStage.BLENDING, 0.7, 0.7
        table.blueprint[0, s], table.operator[0, s], table.serial[0, s] = blueprint_index(name), Operator.ADD, s
        effects.append(Effect(EffectKind.BUILD, 0, s))
    plot.carry_out(effects, table, 0)
    stir(plot.body)
    plot.average.restart()
    return plot


def stir(body: Body) -> None:
    """Give newborn seeds weights that do something."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for slot in body.slots.values():
            for p in slot.parameters():
                p.add_(torch.randn(p.shape, generator=noise), alpha=0.05)


def train_ratio(task: Task, blueprints: tuple[str, ...], repeats: int) -> float:
    plot = live_plot(task, blueprints)
    plain = harden(plot.body) if blueprints else task.build_host(0)
    plain = plain.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = build_optimizer(task, list(plain.parameters()))
    batches = list(task.minibatches(plot.data, 0, 0))

    def bare() -> None:
        for x, y in batches:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(plain(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), task.clip)
            optimizer.step()

    return median_ratio(lambda: plot.train_epoch(0), bare, repeats)


def coalition_ratios(task: Task, blueprints: tuple[str, ...], repeats: int) -> dict[str, float]:
    plot = live_plot(task, blueprints)
    body, split = plot.body, plot.data.val
    plain = harden(body).eval()
    calibration = plot.data.train.x[:128]
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
    bare, host = task.build_host(0), task.build_host(0)
    sites = host.sites()
    x = task.load_data().train.x[: task.batch]
    body = graft(host, {s: sites[s] for s in task.slots}, probe=x)

    def run(model: nn.Module) -> None:
        model(x).sum().backward()

    return median_ratio(lambda: run(body), lambda: run(bare), repeats)


def median_ratio(ours: Callable[[], Any], reference: Callable[[], Any], repeats: int) -> float:
    """Median over repeats of our time over the reference's, one after the other each time."""
    ours(), reference()
    ratios = []
    for i in range(repeats):
        pair = (ours, reference) if i % 2 else (reference, ours)
        seconds = {f: timed(f) for f in pair}
        ratios.append(seconds[ours] / seconds[reference])
    return statistics.median(ratios)


def timed(work: Callable[[], Any]) -> float:
    """CPU seconds of this process: other work on the machine does not count."""
    start = time.process_time()
    work()
    return time.process_time() - start
