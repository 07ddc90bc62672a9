"""Trainers of the arms of studies: fixed structures, planted structures, and searches over structures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from esper.kasmina.blueprints import blueprint_index, unregister
from esper.kasmina.copied_blocks import register_copy
from esper.leyline.lifecycle import Rules
from esper.leyline.planning import Placement, planned
from esper.leyline.rng import derive_seed
from esper.studies.budgeted import Session, Structure, full_structure, full_training_macs, shared_data
from esper.studies.contract import Arm, Point
from esper.studies.trainers import trainer
from esper.tamiyo.controllers import Schedule, Wait
from esper.tolaria.engine import Engine
from esper.tolaria.host_costs import host_macs_and_order
from esper.tolaria.tasks import Task, get_task

LEAST_TRAINING = 0.1
"""A search starts no training that has less than this share of a unit left."""


def structure_named(task: Task, name: str, slots: int | None = None) -> Structure:
    """Return the structure that an arm's settings name, in the first `slots` slots of the task or in all.

    Names: "none", "full", or one blueprint for every slot.
    """
    if name == "none":
        return {}
    full = full_structure(task)
    return {slot: full[slot] if name == "full" else name for slot in list(full)[:slots]}


def resized(task: Task, host: str, seeds: int | None = None) -> Task:
    """Return the task with its own host ("own"), or with a wider or deeper one.

    That is as large as the full structure, or as the host with the last `seeds` seeds of it, which are the largest.
    """
    if host == "own":
        return task
    session = Session(task, 0, unit=1, structure=dict(list(full_structure(task).items())[-seeds if seeds else 0 :]))
    params = session.engine.networks[0].params
    return task.widened(params) if host == "wider" else task.deepened(params)


def largest_within(space: Space, host: str) -> Task:
    """Return the task with its own host ("own"), or with the widest or deepest one within the limit of the space."""
    task = space.task
    while host != "own":
        params = task.host_params + 1
        larger = task.widened(params) if host == "wider" else task.deepened(params)
        if host_macs(larger) > space.limit:
            break
        task = larger
    return task


def host_macs(task: Task) -> int:
    """Return the multiply-adds per sample of a task's host."""
    return max(1, host_macs_and_order(Engine(task, [0], data=shared_data(task)).networks[0].body)[0])


def weakened(task: Task, world: int, impairment: str) -> Task:
    """Return the task with a host of 3×3 convolutions, one block of which is impaired: the world draws which one.

    "none" returns the task as it is.
    """
    if impairment == "none":
        return task
    block = derive_seed(world, "weak_spot") % task.host_kwargs["blocks"]
    return replace(task, host_kwargs={**task.host_kwargs, "kernel": 3, "impairment": impairment, "impaired": block})


SITUATION = ("change", "samples")
"""Settings of any arm that `Session` takes as they are: a task that changes, few training samples."""


@trainer("static")
def train_static(arm: Arm, task: str, world: int, budgets: Sequence[float]) -> list[Point]:
    """Train a fixed structure from step 0 for the whole compute, also a small host.

    Settings: `structure` ("none", "full", a blueprint), `slots` (how many, from the first; default all), `host` ("own",
    "wider", "deeper"), `seeds` (see `resized`), `limit` (see `Space`: the host is the largest within it, and a unit is
    that of the searches), `pretrain` (epochs that the host was trained before), `weak` (see `weakened`), `epochs`
    (train for this many epochs at each budget instead of for its compute), and those of `SITUATION`.
    """
    own = weakened(get_task(task), world, arm.settings.get("weak", "none"))
    if "limit" in arm.settings:
        space = Space(own, arm.settings["limit"])
        host = largest_within(space, arm.settings.get("host", "own"))
        unit = space.unit
    else:
        host = resized(own, arm.settings.get("host", "own"), arm.settings.get("seeds"))
        unit = full_training_macs(own)
    structure = structure_named(own, arm.settings.get("structure", "none"), arm.settings.get("slots"))
    session = Session(host, world, unit=unit, structure=structure, **chosen(arm, SITUATION))
    session.pretrain(arm.settings.get("pretrain", 0))
    epochs = arm.settings.get("epochs")
    if epochs is None:
        return session.run(Wait(), budgets)
    return at_budgets(session.run(Wait(), [share_of_epochs(session, count) for count in epochs]), budgets)


def share_of_epochs(session: Session, epochs: int) -> float:
    """Return the smallest budget with this many epochs of a session."""
    # one multiply-add more: a budget is a fraction of the unit, and rounding it down would lose an epoch
    return (epochs * session.epoch_macs + 1) / session.unit


def at_budgets(points: Sequence[Point], budgets: Sequence[float], spent: int = 0) -> list[Point]:
    """Return the points with these budgets, and with the compute `spent` before their training added to theirs."""
    return [
        msgspec.structs.replace(point, budget=budget, train_macs=spent + point.train_macs)
        for point, budget in zip(points, budgets, strict=True)
    ]


@trainer("planted")
def train_planted(arm: Arm, task: str, world: int, budgets: Sequence[float]) -> list[Point]:
    """Plant a structure during training, one seed per epoch, shallow slots first.

    Settings: `start` (epoch of the first seed), `structure`, `slots`, `birth`, `open_ramp` (epochs of the alpha ramp),
    `ramp_share` (instead: the ramp as a share of the epochs that the full structure has within each budget, so that it
    ends before the decay), `pretrain`, `copied` (seeds start as copies of this block of the host), and those of
    `SITUATION`.
    """
    own = get_task(task)
    if "ramp_share" in arm.settings:
        share = arm.settings["ramp_share"]
        others = {name: value for name, value in arm.settings.items() if name != "ramp_share"}
        arms = [
            msgspec.structs.replace(arm, settings={**others, "open_ramp": max(1, round(share * budget * own.epochs))})
            for budget in budgets
        ]
        return [train_planted(one, task, world, [budget])[0] for one, budget in zip(arms, budgets, strict=True)]
    names = list(dict.fromkeys(structure_named(own, arm.settings.get("structure", "full")).values()))
    rules = Rules(**chosen(arm, ("birth", "open_ramp")))
    before = arm.settings.get("pretrain", 0)
    with contextlib.ExitStack() as stack:
        if "copied" in arm.settings:  # a blueprint must exist before the session
            names = [register_copy(Session(own, world, unit=1).engine.networks[0].body, arm.settings["copied"])]
            stack.callback(unregister, names[0])
        session = Session(own, world, unit=full_training_macs(own), rules=rules, **chosen(arm, SITUATION))
        session.pretrain(before)
        blueprints = [blueprint_index(name) for name in names]
        schedule = Schedule(blueprints, start=before + arm.settings["start"], slots=arm.settings.get("slots"))
        return session.run(schedule, budgets)


def chosen(arm: Arm, names: Sequence[str]) -> dict[str, Any]:
    """Return those of an arm's settings that have one of the names."""
    return {name: arm.settings[name] for name in names if name in arm.settings}


# -- searches for a structure within a limit: several trainings share one budget


class Space:
    """The structures of a task whose multiply-adds per sample are at most a share `limit` of the full structure's."""

    def __init__(self, task: Task, limit: float) -> None:
        self.task = task
        self.costs = Engine(task, [0], data=shared_data(task)).networks[0].body.costs()
        self.choices = {slot: list(costs) for slot, costs in self.costs.items()}
        self.host_macs = host_macs(task)
        self.limit = int(limit * self.macs(full_structure(task)))

    def macs(self, structure: Structure) -> int:
        """Return the multiply-adds per sample of the host with this structure."""
        return self.host_macs + sum(self.costs[slot][name].macs for slot, name in structure.items())

    def draw(self, rng: np.random.Generator) -> Structure:
        """Return a random structure within the limit: any of the blueprints or none in each slot, uniformly."""
        while True:
            drawn = {slot: str(rng.choice([*names, ""])) for slot, names in self.choices.items()}
            structure = {slot: name for slot, name in drawn.items() if name}
            if structure and self.macs(structure) <= self.limit:
                return structure

    @property
    def unit(self) -> int:
        """Training multiply-adds of one full training: the task's epochs of a network at the limit."""
        full = full_structure(self.task)
        return full_training_macs(self.task) * self.limit // self.macs(full)


@dataclass(frozen=True, slots=True)
class Choice:
    """A structure that was chosen by trials on copies of a young host."""

    trunk: Session  # the host, at the epoch of the trials
    structure: Structure
    spent: int  # multiply-adds of the trials

    def grown(self) -> Session:
        """Return a copy of the host with the structure."""
        return self.trunk.copy(self.structure)

    def left(self, budget: float) -> float:
        """Return what the trials left of a budget."""
        return budget - self.spent / self.trunk.unit


def best_so_far(points: Sequence[Point], budget: float) -> Point:
    """Return the point of the best validation quality, with the compute of all trainings so far."""
    best = max(points, key=lambda point: point.val_quality)
    return msgspec.structs.replace(best, budget=budget, train_macs=sum(point.train_macs for point in points))


@trainer("random_search")
def train_random_search(arm: Arm, task: str, world: int, budgets: Sequence[float]) -> list[Point]:
    """Train random structures one after another, each for at most one unit; keep the best by validation quality.

    A structure so cheap that it reaches twice the task's epochs leaves the rest of its unit to further ones.
    Settings: `limit` (see `Space`).
    """
    own = get_task(task)
    space = Space(own, arm.settings["limit"])
    rng = np.random.default_rng(derive_seed(world, "random_search"))
    tried: list[Point] = []
    points = []
    for budget in budgets:
        while (budget_left := budget - sum(point.train_macs for point in tried) / space.unit) > LEAST_TRAINING:
            session = Session(own, world, unit=space.unit, structure=space.draw(rng), max_epochs=2 * own.epochs)
            tried += session.run(Wait(), [min(1.0, budget_left)])
        points.append(best_so_far(tried, budget))
    return points


@trainer("halving")
def train_halving(arm: Arm, task: str, world: int, budgets: Sequence[float]) -> list[Point]:
    """Successive halving: 4n random structures for a budget of n; the better half continues until one is left.

    Every round costs the same. Structures are ranked by validation quality; the last structure ends with the decay.
    Settings: `limit`.
    """
    own = get_task(task)
    space = Space(own, arm.settings["limit"])
    points = []
    for budget in budgets:
        rng = np.random.default_rng(derive_seed(world, "halving"))
        count = 4 * round(budget)
        sessions = [Session(own, world, unit=space.unit, structure=space.draw(rng)) for _ in range(count)]
        rounds = count.bit_length()
        used = total = 0.0
        while count > 1:
            used += budget / rounds / count
            for session in sessions:
                session.advance(Wait(), int(used * space.unit))
            sessions.sort(key=lambda session: -session.quality)
            total += sum(session.spent for session in sessions[count // 2 :])
            count //= 2
            sessions = sessions[:count]
        point = sessions[0].run(Wait(), [used + budget / rounds])[0]
        points.append(msgspec.structs.replace(point, budget=budget, train_macs=int(total) + point.train_macs))
    return points


@trainer("audition")
def train_audition(arm: Arm, task: str, world: int, budgets: Sequence[float]) -> list[Point]:
    """Try every seed alone on a copy of the young host, plant those that gained most, and train on.

    A seed gains the validation quality of its copy minus that of a copy without seeds, after as many epochs. Slots are
    filled in descending order of gain, each with its best seed that fits into the limit; seeds that gained less than a
    share of the largest gain are not planted. The compute of the copies counts.
    Settings: `limit`, `start` (epochs of the host before), `trial` (epochs of a copy, as a share of the budget's
    epochs), `keep` (that share of the largest gain at a budget of 1; at n it is divided by √n, because a longer
    training pays for more seeds).
    """
    points = []
    for budget in budgets:
        choice = audition_choice(arm, task, world, budget)
        points += at_budgets(choice.grown().run(Wait(), [choice.left(budget)]), [budget], choice.spent)
    return points


def audition_choice(arm: Arm, task: str, world: int, budget: float) -> Choice:
    """Return what an arm of the kind `audition` chooses at a budget."""
    own = get_task(task)
    space = Space(own, arm.settings["limit"])
    trunk = Session(own, world, unit=space.unit)
    trunk.advance(Wait(), arm.settings["start"] * trunk.epoch_macs)
    epochs = max(1, round(arm.settings["trial"] * budget * own.epochs))
    candidates = [(slot, name) for slot, names in space.choices.items() for name in names]
    gains, spent = audition(trunk, [seed for seed in candidates if space.macs(dict([seed])) <= space.limit], epochs)
    keep = arm.settings["keep"] / budget**0.5
    return Choice(trunk, planned(gains, lambda plan: space.macs(plan) <= space.limit, keep), spent)


@trainer("placed")
def train_placed(arm: Arm, task: str, world: int, budgets: Sequence[float]) -> list[Point]:
    """Plant one seed of the full structure: in a fixed slot, or where it gains most on a copy of the young host.

    Settings: `start` (epochs of the host before), `slot` (number of a slot; without it, all are tried), `trial` (epochs
    of a copy; its compute counts), `weak` (see `weakened`).
    """
    choice = placed_choice(arm, task, world)
    grown = choice.grown()
    points = grown.run(Wait(), [choice.left(budget) for budget in budgets])
    return at_budgets(points, budgets, choice.spent)


def placed_choice(arm: Arm, task: str, world: int, _budget: float = 0.0) -> Choice:
    """Return what an arm of the kind `placed` chooses. It is the same at every budget."""
    own = weakened(get_task(task), world, arm.settings.get("weak", "none"))
    trunk = Session(own, world, unit=full_training_macs(own))
    trunk.advance(Wait(), arm.settings["start"] * trunk.epoch_macs)
    seeds = list(full_structure(own).items())
    if "slot" in arm.settings:
        return Choice(trunk, dict([seeds[arm.settings["slot"]]]), 0)
    gains, spent = audition(trunk, seeds, arm.settings["trial"])
    return Choice(trunk, dict([max(seeds, key=gains.__getitem__)]), spent)


CHOICES: dict[str, Callable[[Arm, str, int, float], Choice]] = {
    "audition": audition_choice,
    "placed": placed_choice,
}
"""Functions that return what an arm of this kind chooses at a budget."""


@trainer("chosen")
def train_chosen(arm: Arm, task: str, world: int, budgets: Sequence[float]) -> list[Point]:
    """Train, from step 0, the structure that a growing arm chooses in this world, or the host without it.

    The trials that chose it are not counted: it is what a user would train who knew the structure.
    Settings: `choice` (kind of the growing arm), the settings of that arm, `equal` ("compute", or "steps": train for as
    many epochs as the grown network has at each budget), `structure` ("none" trains the host alone).
    """
    points = []
    for budget in budgets:
        choice = CHOICES[arm.settings["choice"]](arm, task, world, budget)
        structure = {} if arm.settings.get("structure") == "none" else choice.structure
        session = Session(choice.trunk.task, world, unit=choice.trunk.unit, structure=structure)
        share = budget
        if arm.settings["equal"] == "steps":
            share = share_of_epochs(session, choice.grown().epochs_within(choice.left(budget)))
        points += at_budgets(session.run(Wait(), [share]), [budget])
    return points


def audition(session: Session, seeds: Sequence[Placement], epochs: int) -> tuple[dict[Placement, float], int]:
    """Return what each seed gains on a copy of the session that trains this many epochs, and the compute of all."""

    def quality_of(structure: Structure) -> tuple[float, int]:
        copy = session.copy(structure)
        copy.advance(Wait(), session.spent + epochs * copy.epoch_macs)
        return copy.quality, copy.spent - session.spent

    bare, spent = quality_of({})
    gains: dict[Placement, float] = {}
    for seed in seeds:
        quality, macs = quality_of(dict([seed]))
        gains[seed] = quality - bare
        spent += macs
    return gains, spent
