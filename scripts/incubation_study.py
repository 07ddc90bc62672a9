"""Compare ways to train a seed before it is blended in: `python scripts/incubation_study.py [--json FILE]`.

One seed per host, germinated at epoch 1, ten epochs in TRAINING, a linear ramp of five, then HOLDING to the
end; nothing else grows. All ways of incubation use the same worlds: the same host, data order and initial seed, and,
because TRAINING is isolated, the same host when the ramp begins. Prints one table per task and slot
(columns: docs/studies/incubation.md). It takes about five minutes per table on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina import slot as slot_module
from esper.kasmina.blueprints import blueprint_index
from esper.kasmina.body import Body, Incubation
from esper.kasmina.slot import FeelNothing, Slot, straight_through
from esper.leyline.actions import NUM_HEADS, Head, Op
from esper.leyline.lifecycle import Rules
from esper.leyline.stages import SeedStage, Thresholds
from esper.studies.budgeted import few_validation
from esper.tolaria.coalitions import statistics
from esper.tolaria.engine import Engine, HostNetwork
from esper.tolaria.engine_config import EngineConfig, GovernorConfig
from esper.tolaria.tasks import Task, get_task

PLACES = (("rescue", "r0c1"), ("rescue", "r0c2"), ("fashion", "r0c1"))
GERMINATE = {Head.OP: Op.GERMINATE, Head.TEMPO: 1, Head.ALPHA_TARGET: 2}  # a ramp of 5 epochs to 1
TRAINING_EPOCHS = 10
TIMED_EPOCHS = 15
NO_ROLLBACK = 1_000_000
"""Patience of the governor: a loss that rises while a seed is blended is a result here."""
Numbers = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to incubate a seed."""

    name: str
    incubation: Incubation = "shadow"
    every: int = 1
    norms_in_eval: bool = False
    has_pull: bool = True


WAYS = (
    Way("shadow, every batch", every=1),
    Way("shadow, every 2nd", every=2),
    Way("shadow, every 4th", every=4),
    Way("shadow, every batch, norms in eval", every=1, norms_in_eval=True),
    Way("shadow, every 2nd, norms in eval", every=2, norms_in_eval=True),
    Way("straight-through", incubation="straight_through"),
    Way("straight-through, no pull", incubation="straight_through", has_pull=False),
)


class Study:
    """One task and slot, with the worlds that all ways share."""

    def __init__(self, task: Task, slot: str, worlds: list[int], blueprint: str, epochs: int) -> None:
        self.task = task
        self.slot = slot
        self.worlds = worlds
        self.blueprint = blueprint
        self.epochs = epochs
        self.data = task.load_data()

    def engine(self, way: Way | None, worlds: list[int] | None = None) -> Engine:
        """Return engines whose gates depend only on time, so that every seed blends at the same epoch."""
        governor = GovernorConfig(patience=NO_ROLLBACK)
        config = EngineConfig(governor=governor)
        if way:
            config = EngineConfig(governor=governor, incubation=way.incubation, shadow_every=way.every)
        rules = Rules(birth="isolated", thresholds=Thresholds(blend_dwell=TRAINING_EPOCHS, blend_health=None))
        engine = Engine(self.task, worlds or self.worlds, rules=rules, config=config, data=self.data)
        engine.data = few_validation(self.data)  # `read` measures three epochs; the others need the governor's loss
        engine.lr_factor = None  # a constant learning rate, also for a task with a schedule
        if way and way.norms_in_eval:
            for network in engine.networks:
                network.body.shadowed = MethodType(_shadowed_in_eval, network.body)  # type: ignore[method-assign]
        return engine

    def germinate(self, engine: Engine) -> None:
        place = {Head.SLOT: self.task.slots.index(self.slot), Head.BLUEPRINT: blueprint_index(self.blueprint)}
        train(engine)
        train(engine, GERMINATE | place)

    def without_growth(self) -> Numbers:
        engine = self.engine(None)
        for _ in range(self.epochs):
            train(engine)
        return {"end": [network.test(self.data.test)[0] for network in engine.networks]}

    def run(self, way: Way) -> Numbers:
        engine = self.engine(way)
        s = self.task.slots.index(self.slot)
        with pull(way.has_pull):
            self.germinate(engine)
            for _ in range(TRAINING_EPOCHS - 1):
                train(engine)
            assert (engine.table.stage[:, s] == SeedStage.TRAINING).all()
            judged = [read(engine, network) for network in engine.networks]
            qualities = {
                "ratio": [delta_ratio(network, self.slot, self.data.val.x) for network in engine.networks],
                "host": [quality for quality, _ in judged],
                "prospect": [prospect for _, prospect in judged],
                "switched_on": [quality + prospect for quality, prospect in judged],
            }
        while (engine.table.stage[:, s] < SeedStage.HOLDING).all():
            train(engine)
        qualities["ramp"] = [read(engine, network)[0] for network in engine.networks]
        while engine.table.step[0] < self.epochs:
            train(engine)
        return qualities | {"end": [network.test(self.data.test)[0] for network in engine.networks]}

    def times(self) -> dict[str, float]:
        """Return the CPU time of a training epoch with a TRAINING seed over one without: best of repeats."""
        racers: dict[str, tuple[Way | None, HostNetwork]] = {}
        for way in (None, *WAYS):
            engine = self.engine(way, self.worlds[:1])
            if way is not None:
                self.germinate(engine)
            racers[way.name if way else ""] = (way, engine.networks[0])
        best = dict.fromkeys(racers, float("inf"))
        for step in range(TIMED_EPOCHS):
            for name, (way, network) in racers.items():
                with pull(way is None or way.has_pull):
                    start = time.process_time()
                    network.train_epoch(step)
                    best[name] = min(best[name], time.process_time() - start)
        return {name: seconds / best[""] for name, seconds in best.items() if name}


def train(engine: Engine, action: dict[Head, int] | None = None) -> None:
    """Run one step of the engine with one action everywhere."""
    rows = np.zeros((len(engine.networks), NUM_HEADS), dtype=np.int64)
    for head, choice in (action or {}).items():
        rows[:, head] = choice
    assert engine.step(rows).happened.all()
    assert all(alarm.action in ("seen", "counted") for alarm in engine.alarms), engine.alarms


def read(engine: Engine, network: HostNetwork) -> tuple[float, float]:
    """Return the accuracy on all validation data and the contribution of the seed, or its prospect in TRAINING."""
    result = network.validate(network.data.val, engine.calibration)
    quality, _, worth, *_ = statistics(result, result.scores[..., 0]).tolist()
    return quality, worth


@torch.no_grad()
def delta_ratio(network: HostNetwork, name: str, x: Tensor) -> float:
    """Return rms Δ / rms h over these images, on the averaged weights."""
    body = network.body.eval()
    slot = network.body.slots[name]
    ratios = []

    def look(_module: nn.Module, _args: Any, h: Tensor) -> None:
        assert slot.seed is not None
        ratios.append((slot.seed(h).square().mean() / h.square().mean()).sqrt().item())

    watch = body.model.get_submodule(slot.module_name).register_forward_hook(look, prepend=True)
    with network.average.applied():
        body(x)
    watch.remove()
    return float(ratios[0])


@contextmanager
def _shadowed_in_eval(body: Body, slot: Slot) -> Iterator[None]:
    """Run the shadow pass with the running statistics of the host's norms."""
    norms = [n for n in body.norms if n.training]
    for n in norms:
        n.training = False
    try:
        with Body.shadowed(body, slot):
            yield
    finally:
        for n in norms:
            n.training = True


def without_pull(h: Tensor, delta: Tensor, _channel_axis: int) -> Tensor:
    """Return exactly h, while the seed is trained without the bound on Δ."""
    return FeelNothing.apply(h, delta)


@contextmanager
def pull(on: bool) -> Iterator[None]:
    slot_module.straight_through = straight_through if on else without_pull
    try:
        yield
    finally:
        slot_module.straight_through = straight_through


COLUMNS = (
    ("rms Δ / rms h", "ratio", 1, "{:.2f} ± {:.2f}"),
    ("switched on", "switched_on", 100, "{:.1f} ± {:.1f}"),
    ("prospect", "prospect", 100, "{:+.1f} ± {:.1f}"),
    ("after the ramp", "ramp", 100, "{:.1f} ± {:.1f}"),
    ("at the end", "end", 100, "{:.1f} ± {:.1f}"),
    ("gain", "gain", 100, "{:+.1f} ± {:.1f}"),
)


def summary(values: list[float], scale: float = 100, form: str = "{:.1f} ± {:.1f}") -> str:
    return form.format(scale * np.mean(values), scale * np.std(values, ddof=1))


def study(task_name: str, slot: str, worlds: list[int], blueprint: str, epochs: int) -> dict[str, Any]:
    """Run one task and slot; print its table in Markdown, each row as soon as it is measured."""
    here = Study(get_task(task_name), slot, worlds, blueprint, epochs)
    times = here.times()
    baseline = here.without_growth()
    ways: dict[str, Numbers] = {}
    for way in WAYS:
        result = here.run(way)
        result["gain"] = [a - b for a, b in zip(result["end"], baseline["end"], strict=True)]
        if not ways:
            host = f"host when the ramp begins {summary(result['host'])}, at the end without growth"
            print(f"\n**{task_name}, {slot}, {blueprint}, {len(worlds)} worlds**: {host} {summary(baseline['end'])}\n")
            print("| incubation | " + " | ".join(c[0] for c in COLUMNS) + " | time |")
            print("|---|" + "---:|" * (len(COLUMNS) + 1))
        cells = [summary(result[key], scale, form) for _, key, scale, form in COLUMNS]
        print(f"| {way.name} | " + " | ".join(cells) + f" | {times[way.name]:.2f}× |", flush=True)
        ways[way.name] = result
    return {"task": task_name, "slot": slot, "blueprint": blueprint, "worlds": worlds, "epochs": epochs,
            "without_growth": baseline, "ways": ways, "time_ratio": times}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--at", nargs="+", default=[f"{t}:{s}" for t, s in PLACES], metavar="TASK:SLOT")
    parser.add_argument("--worlds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--blueprint", default="conv_light")
    parser.add_argument("--json", type=Path, help="write every number here")
    args = parser.parse_args()
    if args.worlds < 2 or args.epochs < TRAINING_EPOCHS + 8:
        parser.error(f"at least 2 worlds and {TRAINING_EPOCHS + 8} epochs are needed")
    torch.set_num_threads(1)
    start = time.perf_counter()
    results = []
    for place in args.at:
        task, _, slot = place.partition(":")
        results.append(study(task, slot, list(range(args.worlds)), args.blueprint, args.epochs))
    print(f"\n{time.perf_counter() - start:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
