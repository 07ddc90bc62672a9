"""The state of a grower: its network's state, and everything else that determines how its training continues.

`check` and the functions that it calls find out whether a saved state fits a grower. They change nothing.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper.grower.qualities import quality_name
from esper.kasmina.blueprints import blueprint_index, registered
from esper.kasmina.body import Body
from esper.kasmina.optimizer_state import check_optimizer
from esper.kasmina.optimizer_sync import is_sharded, whole
from esper.kasmina.slot import Slot
from esper.leyline.actions import Operator
from esper.leyline.errors import CheckpointError
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers import Stateful
from esper.tolaria.network_state import NetworkState, slot_state

if TYPE_CHECKING:
    from esper.grower import Grower

FORMAT = 2


class GrowerState(NetworkState, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a grower without weights and gradients. A checkpoint is validated against its types."""

    format: int
    settings: dict[str, Any]
    """The grower's settings. On loading, those that differ cause a warning and the current ones are used."""
    blueprints: dict[str, int]
    table: dict[str, npt.NDArray[Any]]
    batches: int
    shadow_passes: int
    controller: Any
    rng_states: dict[str, Any]
    extra: Any


def grower_state(grower: Grower, extra: Any = None) -> GrowerState:
    """Return the state of a grower. Tensors are not copied: write them before they change."""
    controller = grower.controller
    return GrowerState(
        **msgspec.structs.asdict(grower.network.state()),
        format=FORMAT,
        settings=settings(grower),
        blueprints={name: blueprint_index(name) for name in registered()},
        table=grower.table.arrays(),
        batches=grower._batches,
        shadow_passes=grower._shadow_passes,
        controller=controller.state_dict() if isinstance(controller, Stateful) else None,
        rng_states=rng_states(),
        extra=extra,
    )


def settings(grower: Grower) -> dict[str, Any]:
    """Return the settings that affect training but are given by the program, not restored from a checkpoint."""
    rules = msgspec.structs.asdict(grower.rules)
    thresholds = msgspec.structs.asdict(rules.pop("thresholds"))
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "controller": type(grower.controller).__name__,
        "quality": quality_name(grower.quality),
        "incubation": grower.body.incubation,
        "rng_seed": grower.network.optimizer_sync.rng_seed,
        "horizon": grower.horizon,
        "ranks": grower.ranks.group.size,
        "gradient_telemetry_stride": grower.network.meter.stride,
        **{f"rules.{name}": value for name, value in rules.items()},
        **{f"rules.thresholds.{name}": value for name, value in thresholds.items()},
    }


def gradients(body: Body, *, sharded: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of parameters that have one; raise CheckpointError for a sparse one.

    Collective if the host is sharded, unless `sharded` is False, which leaves those out.
    """
    for name, p in body.named_parameters():
        if p.grad is not None and (sharded or not is_sharded(p)):
            if p.grad.layout != torch.strided:
                raise CheckpointError(
                    f"the gradient of {name!r} is sparse, which a checkpoint cannot hold. "
                    "Call optimizer.zero_grad() before grower.save()."
                )
            yield name, whole(p.grad)


def rng_states() -> dict[str, Any]:
    """Return the states of the global random generators of torch, numpy and Python."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def load_rng_states(states: Mapping[str, Any]) -> None:
    """Set the global random generators of torch, numpy and Python."""
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])


def check(grower: Grower, saved: GrowerState, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if any part of the state does not fit; warn about settings that differ."""
    body = grower.body
    check_slots(saved, body)
    check_table(saved, grower.table)
    state = dict(body.model.state_dict())
    params = {f"model.{n}": p for n, p in body.model.named_parameters()}
    for name, slot in trial_seeds(saved, body).items():
        prefix = f"esper.{name.replace('.', '/')}."
        state |= {prefix + n: value for n, value in slot.state_dict().items()}
        params |= {prefix + n: p for n, p in slot.named_parameters()}
    check_tensors({**weights, **saved.parts}, state, "the model", every=True)
    check_tensors(grads, params, "the model's gradients")
    check_names(saved, body)
    check_rng_states(saved.rng_states)
    seeds = {n: p for n, p in params.items() if n.startswith("esper.")}
    check_optimizer(saved.optimizer, grower.optimizer, body, seeds)
    _warn_of_other_settings(saved.settings, settings(grower))


def check_slots(saved: GrowerState, body: Body) -> None:
    """Raise unless the body has the same slots after the same modules."""
    if list(saved.slots) != list(body.slots):
        raise CheckpointError(
            f"it has slots {', '.join(saved.slots)}; this body has {', '.join(body.slots)}. Graft at the same modules."
        )
    for name, slot in saved.slots.items():
        there, here = ((s.module, s.layout, s.dim) for s in (slot, slot_state(body, body.slots[name])))
        if there != here:
            raise CheckpointError(
                f"its slot {name!r} follows {there[0]!r}, a {there[1]} of {there[2]}; here it follows {here[0]!r}, a "
                f"{here[1]} of {here[2]}. Graft the same model at the same modules."
            )


def check_table(saved: GrowerState, table: SlotTable) -> None:
    """Raise unless the saved table has the columns of this one, agrees with the slots and knows the blueprints."""
    here = table.arrays()
    if differing := sorted(saved.table.keys() ^ here.keys()):
        raise CheckpointError(f"it is of another version of Esper: its table differs in column {differing[0]!r}.")
    for name, column in saved.table.items():
        shape = (table.num_slots, column.shape[-1]) if name == "takes" else here[name].shape
        if column.shape != shape or column.dtype != here[name].dtype:
            raise CheckpointError(
                f"its table has {column.dtype} {column.shape} for {name!r}, expected {here[name].dtype} {shape}."
            )
    if not np.isin(saved.table["stage"], list(SeedStage)).all():
        raise CheckpointError("its table has stages that do not exist.")
    stages, numbers = saved.table["stage"][0].tolist(), saved.table["blueprint"][0].tolist()
    names = {number: name for name, number in saved.blueprints.items()}
    for (slot, state), stage, number in zip(saved.slots.items(), stages, numbers, strict=True):
        has_seed = SeedStage.DORMANT < stage < SeedStage.PRUNED
        if has_seed != bool(state.blueprint) or (has_seed and names.get(number) != state.blueprint):
            raise CheckpointError(f"its table and its slots disagree on the seed in {slot!r}.")
    _check_blueprints(saved, numbers)


def _check_blueprints(saved: GrowerState, numbers: list[int]) -> None:
    """Raise if a blueprint has another number here, or if one of the seeds is of a blueprint that is missing here."""
    numbers_here = {name: blueprint_index(name) for name in registered()}
    for name, number in saved.blueprints.items():
        if numbers_here.get(name, number) != number:
            raise CheckpointError(
                f"blueprint {name!r} had number {number}, here it has {numbers_here[name]}. "
                "Register your own blueprints in the same order."
            )
        if name not in numbers_here and number in numbers:
            slot = list(saved.slots)[numbers.index(number)]
            raise CheckpointError(
                f"it holds a seed of blueprint {name!r} in slot {slot!r}, which is not registered here. "
                "Register it with esper.blueprint or esper.register_copy before loading."
            )


def check_names(saved: GrowerState, body: Body) -> None:
    """Raise for names of modules or slots that do not exist, which only a manipulated file has."""
    modules = {"", *body.slots, *(name for name, _ in body.model.named_modules())}
    points = [*saved.fork_sequence, *saved.proven_forks, *(s.fork for s in saved.slots.values() if s.fork)]
    if any(name not in modules for _, name in points) or not body.slots.keys() >= {*saved.sampled, *saved.unsampled}:
        raise CheckpointError("it names modules or slots that do not exist.")


def check_rng_states(states: Mapping[str, Any]) -> None:
    """Raise for states of random generators that are not valid."""
    try:
        torch.Generator().set_state(states["torch"])
        np.random.RandomState().set_state(states["numpy"])
        random.Random().setstate(states["python"])
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"its state of a random generator is not valid: {error}.") from error


def trial_seeds(saved: GrowerState, body: Body) -> dict[str, Slot]:
    """Build the saved seeds in slots outside the body, and return these; a blueprint's errors are raised here."""
    seeds = {}
    for name, state in saved.slots.items():
        if state.blueprint:
            own = body.slots[name]
            body.check_allowed(state.blueprint)
            device, dtype = body.anchor(own)
            try:
                operator = Operator(state.operator)
            except ValueError as error:
                raise CheckpointError(f"{error}.") from error
            seed = Slot(name, own.module_name, own.spec, own.select).to(device)
            seed.plant(state.blueprint, operator, device=device, dtype=dtype, rng_seed=state.rng_seed, host=body.model)
            seeds[name] = seed
    return seeds


def check_tensors(saved: Mapping[str, Any], here: Mapping[str, Any], what: str, *, every: bool = False) -> None:
    """Raise unless each tensor in `saved` matches `here` in name, shape and dtype; if `every`, none may be missing."""
    differing = [n for n in saved if n not in here] + [n for n in here if every and n not in saved]
    if differing:
        where = "only in the checkpoint" if differing[0] in saved else "not in the checkpoint"
        more = f", as are {len(differing) - 1} more" if len(differing) > 1 else ""
        raise CheckpointError(f"of {what} {differing[0]!r} is {where}{more}. Build the same model.")
    for name, value in saved.items():
        there, now = (
            (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else ("a", type(v).__name__) for v in (value, here[name])
        )
        if there != now:
            raise CheckpointError(
                f"of {what} {name!r} is {there[0]} {there[1]} in the checkpoint and {now[0]} {now[1]} here. "
                "Build the same model, in the same precision."
            )


def _warn_of_other_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changes = [
        f"{name} was {saved[name]!r}, is {value!r}" for name, value in now.items() if saved.get(name, value) != value
    ]
    if changes:
        warnings.warn(
            f"settings differ from those of the checkpoint: {'; '.join(changes)}. The present ones are used, so "
            "training continues differently.",
            stacklevel=5,
        )
