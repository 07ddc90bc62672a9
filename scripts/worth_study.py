"""Measure how well a seed's contribution at HOLDING predicts its gain; record coalition tables of grown hosts.

    python scripts/worth_study.py decisions [--task rescue] [--worlds 6]
    python scripts/worth_study.py tables --out tables.json

`decisions`: one seed per run, in each slot of each world, with blueprints in turn. Its contribution when it reaches
HOLDING is compared with its gain: final test accuracy minus that of the same world's no-growth baseline. Prints the
pairs and their correlations. `tables` grows hosts with 6 and 7 seeds and records the accuracy of every coalition,
for scripts/compare_shapley.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import torch

from esper.kasmina.blueprints import blueprint_index
from esper.leyline.actions import Head, Op
from esper.leyline.lifecycle import Rules
from esper.leyline.slot_table import Bools, Ints, SlotTable
from esper.leyline.stages import SeedStage, Thresholds
from esper.simic.attribution import CounterfactualEngine
from esper.tamiyo.controllers import Controller, Wait, wait_everywhere
from esper.tolaria.coalitions import evaluate
from esper.tolaria.data import load_data
from esper.tolaria.engine import Engine, score
from esper.tolaria.rollout import rollout
from esper.tolaria.tasks import get_task

BLUEPRINTS = ("conv_light", "depthwise", "norm", "bottleneck", "attention", "conv_heavy")


class PlantOne:
    """Controller that plants one seed at epoch 1 and commits it two epochs after it reached HOLDING."""

    def __init__(self, slot: int, blueprint: str) -> None:
        self.slot = slot
        self.blueprint = blueprint_index(blueprint)
        self.worth: dict[str, float] = {}

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        actions = wait_everywhere(1)
        slot = self.slot
        if table.step[0] == 1:
            actions[0, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = Op.GERMINATE, slot, self.blueprint
        elif table.stage[0, slot] == SeedStage.HOLDING:
            if not self.worth:
                columns = {"holding": table.contribution, "se": table.contribution_se, "prospect": table.prospect}
                self.worth = {name: float(column[0, slot]) for name, column in columns.items()}
            if table.dwell[0, slot] >= 2 and legal[0, Op.FOSSILIZE, slot]:
                actions[0, [Head.OP, Head.SLOT]] = Op.FOSSILIZE, slot
        return actions


class PlantAll:
    """Controller that plants the same blueprint in one slot per epoch, from the first slot on."""

    def __init__(self, blueprint: str) -> None:
        self.blueprint = blueprint_index(blueprint)

    def act(self, table: SlotTable, _legal: Bools) -> Ints:
        actions = wait_everywhere(1)
        epoch = int(table.step[0])
        if epoch < table.num_slots:
            actions[0, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = Op.GERMINATE, epoch, self.blueprint
        return actions


def trained(engine: Engine, controller: Controller) -> Engine:
    """Train one host to the end under a controller."""
    for _ in rollout(engine, controller, engine.task.epochs):
        pass
    return engine


def accuracy(engine: Engine) -> float:
    return engine.networks[0].test(engine.data.test)[0]


def decisions(name: str, worlds: int) -> None:
    task = get_task(name)
    rules = Rules(birth="isolated")  # a prospect is measured in TRAINING
    data = task.load_data()
    rows = []
    print("| world | slot | blueprint | prospect | contribution at HOLDING | gain |\n|---|---|---|---|---|---|")
    for world in range(worlds):
        bare = accuracy(trained(Engine(task, [world], data=data), Wait()))
        for slot in range(len(task.slots)):
            blueprint = BLUEPRINTS[(world + 2 * slot) % len(BLUEPRINTS)]
            plant = PlantOne(slot, blueprint)
            grown = accuracy(trained(Engine(task, [world], rules=rules, data=data), plant))
            worth = plant.worth
            if not worth:
                print(f"| {world} | {task.slots[slot]} | {blueprint} | never reached HOLDING | | |", flush=True)
                continue
            gain = grown - bare
            rows.append((worth["holding"], worth["prospect"], gain))
            print(
                f"| {world} | {task.slots[slot]} | {blueprint} | {100 * worth['prospect']:+.1f} | "
                f"{100 * worth['holding']:+.1f} ± {100 * worth['se']:.1f} | {100 * gain:+.1f} |",
                flush=True,
            )
    held, prospect, gain = np.array(rows).T
    ranks = lambda x: np.argsort(np.argsort(x))  # noqa: E731
    print(f"\n{len(rows)} decisions on {name}")
    for label, values in (("contribution at HOLDING", held), ("prospect at the end of TRAINING", prospect)):
        pearson = np.corrcoef(values, gain)[0, 1]
        spearman = np.corrcoef(ranks(values), ranks(gain))[0, 1]
        print(f"{label}: correlation with gain {pearson:.2f}, of ranks {spearman:.2f}")


def tables(out: Path) -> None:
    """Write the accuracy of every coalition of hosts with 6 and with 7 live seeds."""
    fashion = load_data("fashion")
    six = dataclasses.replace(
        get_task("rescue"), slots=("r0c0", "r1c0", "r0c1", "r1c1", "r0c2", "r1c2"), epochs=14, data=fashion
    )
    seven = dataclasses.replace(
        six, host_kwargs={**six.host_kwargs, "blocks": 4, "pools": 3}, slots=(*six.slots, "r0c3"), epochs=16
    )
    rules = Rules(birth="isolated", one_at_a_time=False, thresholds=Thresholds(blend_dwell=1, blend_health=None))
    games = []
    for task, blueprint in ((six, "conv_light"), (seven, "conv_light")):
        for world in range(4):
            engine = trained(Engine(task, [world], rules=rules), PlantAll(blueprint))
            network = engine.networks[0]
            n = len(task.slots)
            every = CounterfactualEngine.coalitions(n, budget=2**n)
            split = engine.data.test
            with network.average.applied():
                result = evaluate(
                    network.body, [(split.x, split.y)], score, configs=every, calibration=engine.calibration
                )
            masks = [sum(1 << i for i in range(n) if c[i]) for c in every]
            values = np.zeros(2**n)
            values[masks] = result.scores[..., 0].mean(1).numpy()
            games.append(values.round(5).tolist())
            print(f"{task.name} world {world}: {n} seeds, none {values[0]:.3f}, all {values[-1]:.3f}", flush=True)
    out.write_text(json.dumps(games))


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["decisions", "tables"])
    parser.add_argument("--task", default="rescue")
    parser.add_argument("--worlds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("tables.json"))
    arguments = parser.parse_args()
    if arguments.what == "decisions":
        decisions(arguments.task, arguments.worlds)
    else:
        tables(arguments.out)


if __name__ == "__main__":
    main()
