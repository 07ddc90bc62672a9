"""Checks whether a saved state fits a grower. They change nothing."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from esper.grower.state import GrowerState, SlotState, settings, slot_state
from esper.kasmina.blueprints import blueprint_index, registered
from esper.kasmina.body import Body
from esper.kasmina.optimizer_state import check_optimizer
from esper.kasmina.slot import Slot
from esper.leyline.actions import Operator
from esper.leyline.errors import CheckpointError
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage

if TYPE_CHECKING:
    from esper.grower import Grower


def check(grower: Grower, told: GrowerState, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if any part of the state does not fit; warn about settings that differ."""
    body = grower.body
    check_slots(told, body)
    check_table(told, grower.table)
    seeds = trial_seeds(told, body)
    state, params = dict(body.model.state_dict()), {f"model.{n}": p for n, p in body.model.named_parameters()}
    for name, slot in seeds.items():
        prefix = f"esper.{name.replace('.', '/')}."
        state |= {prefix + n: value for n, value in slot.state_dict().items()}
        params |= {prefix + n: p for n, p in slot.named_parameters()}
    check_tensors({**weights, **told.parts}, state, "the model", every=True)
    check_tensors(grads, params, "the model's gradients")
    check_rest(told, body)
    check_optimizer(told.optimizer, grower.optimizer, body, {n: p for n, p in params.items() if n.startswith("esper.")})
    _say_what_differs(told.settings, settings(grower))


def check_slots(told: GrowerState, body: Body) -> None:
    """Raise unless the body has the same slots after the same modules."""
    here = {name: slot_state(body, slot) for name, slot in body.slots.items()}
    if list(told.slots) != list(here):
        raise CheckpointError(
            f"it has slots {', '.join(told.slots)}; this body has {', '.join(here)}. Graft at the same places."
        )
    for name, slot in told.slots.items():
        there, now = ((s.module, s.layout, s.dim) for s in (slot, here[name]))
        if there != now:
            raise CheckpointError(
                f"its slot {name!r} follows {there[0]!r}, a {there[1]} of {there[2]}; here it follows {now[0]!r}, a "
                f"{now[1]} of {now[2]}. Graft the same model at the same places."
            )


def check_table(told: GrowerState, table: SlotTable) -> None:
    """Raise unless the saved table has the columns of this one, agrees with the slots and knows the blueprints."""
    here = table.arrays()
    odd = sorted(told.table.keys() ^ here.keys())
    if odd:
        raise CheckpointError(f"its table and this Esper's differ in column {odd[0]!r}: it is of another version.")
    for name, column in told.table.items():
        shape = (table.num_slots, column.shape[-1]) if name == "takes" else here[name].shape
        if column.shape != shape or column.dtype != here[name].dtype:
            raise CheckpointError(
                f"its table has {column.dtype} {column.shape} for {name!r}, expected {here[name].dtype} {shape}."
            )
    if not np.isin(told.table["stage"], list(SeedStage)).all():
        raise CheckpointError("its table has stages that do not exist.")
    stages, numbers = told.table["stage"][0].tolist(), told.table["blueprint"][0].tolist()
    names = {number: name for name, number in told.blueprints.items()}
    for (slot, state), stage, number in zip(told.slots.items(), stages, numbers, strict=True):
        lives = SeedStage.DORMANT < stage < SeedStage.PRUNED
        if lives != bool(state.blueprint) or (lives and names.get(number) != state.blueprint):
            raise CheckpointError(f"its table and its slots disagree on what lives in {slot!r}.")
    known = {name: blueprint_index(name) for name in registered()}
    for name, number in told.blueprints.items():
        if name in known and known[name] != number:
            raise CheckpointError(
                f"blueprint {name!r} had number {number}, here it has {known[name]}. "
                "Register your own blueprints in the same order."
            )
        if name not in known and number in numbers:
            slot = list(told.slots)[numbers.index(number)]
            raise CheckpointError(
                f"it holds a seed of blueprint {name!r} in slot {slot!r}, which is not registered here. "
                "Register it with esper.blueprint before loading."
            )


def check_rest(told: GrowerState, body: Body) -> None:
    """Raise for module names or generator states that are not valid, which only a manipulated file has."""
    modules = {"", *body.slots, *(name for name, _ in body.model.named_modules())}
    points = [*told.fork_sequence, *told.proven_forks, *(s.fork for s in told.slots.values() if s.fork)]
    if any(name not in modules for _, name in points) or not body.slots.keys() >= {*told.sampled, *told.unsampled}:
        raise CheckpointError("it speaks of modules or slots that are not there.")
    try:
        torch.Generator().set_state(told.chance["torch"])
        np.random.RandomState().set_state(told.chance["numpy"])
        random.Random().setstate(told.chance["python"])
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"it holds no state of a random stream: {error}.") from error


def trial_seeds(told: GrowerState, body: Body) -> dict[str, Slot]:
    """Build the saved seeds in slots outside the body, and return these; a blueprint's errors are raised here."""
    seeds = {}
    for name, state in told.slots.items():
        if state.blueprint:
            own = body.slots[name]
            device, dtype = body.anchor(own)
            seeds[name] = Slot(name, own.module_name, own.site, own.select).to(device)
            seeds[name].plant(state.blueprint, _operator(state), device=device, dtype=dtype, seed=state.birth)
    return seeds


def _operator(state: SlotState) -> Operator:
    try:
        return Operator(state.operator)
    except ValueError as error:
        raise CheckpointError(f"{error}.") from error


def check_tensors(found: Mapping[str, Any], here: Mapping[str, Any], what: str, *, every: bool = False) -> None:
    """Raise unless each tensor in `found` matches `here` in name, shape and dtype; if `every`, none may be missing."""
    odd = [n for n in found if n not in here] + [n for n in here if every and n not in found]
    if odd:
        where = "only in the checkpoint" if odd[0] in found else "not in the checkpoint"
        more = f", as are {len(odd) - 1} more" if len(odd) > 1 else ""
        raise CheckpointError(f"of {what} {odd[0]!r} is {where}{more}. Build the same model.")
    for name, value in found.items():
        told, now = (
            (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else ("a", type(v).__name__) for v in (value, here[name])
        )
        if told != now:
            raise CheckpointError(
                f"of {what} {name!r} is {told[0]} {told[1]} in the checkpoint and {now[0]} {now[1]} here. "
                "Build the same model, in the same precision."
            )


def _say_what_differs(told: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    odd = [f"{name} was {told.get(name)!r}, is {value!r}" for name, value in now.items() if told.get(name) != value]
    if odd:
        warnings.warn(
            f"training goes on in another way than it would have: {'; '.join(odd)}. What is given now is used.",
            stacklevel=5,
        )
