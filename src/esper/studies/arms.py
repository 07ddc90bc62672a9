"""Trainers of the arms of studies: fixed structures, planted structures, and searches over structures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from esper.kasmina.lifecycle import Rules
from esper.leyline.rng import derive_seed
from esper.studies.budgeted import Session, Structure, full_structure, full_training_macs
from esper.studies.contract import Arm, Point
from esper.studies.trainers import trainer
from esper.tamiyo.controllers import Schedule, Wait
from esper.tolaria.engine import Engine
from esper.tolaria.tasks import Task, get_task

SMALL_HOST_EPOCHS = 5
"""A host that is much cheaper than the full structure trains at most this many times the task's epochs."""


def structure_named(task: Task, name: str) -> Structure:
    """Return the structure that an arm's setting names: "none", "full", or one blueprint for every slot."""
    if name == "none":
        return {}
    full = full_structure(task)
    return full if name == "full" else dict.fromkeys(full, name)


def resized(task: Task, host: str) -> Task:
    """Return the task with its own host ("own"), or with a wider or deeper one as large as the full structure."""
    if host == "own":
        return task
    session = Session(task, 0, unit=1, structure=full_structure(task))
    params = session.engine.networks[0].params
    return task.widened(params) if host == "wider" else task.deepened(params)


@trainer("static")
def train_static(arm: Arm, task: str, world: int, budgets: Sequence[float]) -> list[Point]:
    """Train a fixed structure from step 0. Settings: `structure` ("none", "full", a blueprint), `host`."""
    own = get_task(task)
    host = resized(own, arm.settings.get("host", "own"))
    structure = structure_named(own, arm.settings.get("structure", "none"))
    limit = None if structure else SMALL_HOST_EPOCHS * own.epochs
    unit = full_training_macs(own)
    session = Session(host, world, unit=unit, structure=structure, max_epochs=limit)
    session.pretrain(arm.settings.get("pretrain", 0))
    return session.run(Wait(), budgets)


@trainer("planted")
def train_planted(arm: Arm, task: str, world: int, budgets: Sequence[float]) -> list[Point]:
    """Plant a structure during training, one seed per epoch, shallow slots first.

    Settings: `start` (epoch of the first seed), `structure`, `birth`, `open_ramp` (epochs of the alpha ramp).
    """
    own = get_task(task)
    structure = structure_named(own, arm.settings.get("structure", "full"))
    names = list(dict.fromkeys(structure.values()))
    rules = {k: arm.settings[k] for k in ("birth", "open_ramp") if k in arm.settings}
    session = Session(own, world, unit=full_training_macs(own), rules=Rules(**rules))
    before = arm.settings.get("pretrain", 0)
    session.pretrain(before)
    return session.run(Schedule(names, start=before + arm.settings["start"]), budgets)


# -- searches: several trainings within one budget


def limited_structures(task: Task, limit: int, rng: np.random.Generator) -> Structure:
    """Draw a random structure of at most `limit` multiply-adds per sample with the host: any blueprint or none a slot."""
    engine = Engine(task, [0])
    costs = engine.networks[0].body.costs()
    from esper.simic.backend import walk

    host, _ = walk(engine.networks[0].body)
    while True:
        drawn = {slot: rng.choice([*prices, ""]) for slot, prices in costs.items()}
        structure = {slot: str(name) for slot, name in drawn.items() if name}
        if host + sum(costs[slot][name].macs for slot, name in structure.items()) <= limit:
            return structure
