"""What a grower is made of, all of it by name: whatever decides how its training goes on.

`GrowerState` is what `grower_file` writes besides weights and gradients, and its types are what a file is held to.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper.kasmina.blueprints import blueprint_index, registered
from esper.kasmina.body import Body
from esper.kasmina.slot import Slot
from esper.leyline.errors import CheckpointError
from esper.optimizer_names import OptimizerState, optimizer_state
from esper.qualities import quality_name
from esper.tamiyo.controllers import Remembers

if TYPE_CHECKING:
    from esper.grower import Grower

FORMAT = 1
Arrays = dict[str, npt.NDArray[Any]]
Point = tuple[bool, str]


class SlotState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One slot: where it is, and what lives there."""

    module: str
    layout: str
    dim: int
    fork: Point | None
    blueprint: str
    operator: int
    birth: int
    """What its weights were drawn from: a gate that comes later is drawn from it too."""


class GrowerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept besides weights and gradients."""

    format: int
    settings: dict[str, Any]
    """What the grower was built with. Where that is another now it is said, and the new is used."""
    slots: dict[str, SlotState]
    blueprints: dict[str, int]
    parts: dict[str, Any]
    """What is no tensor in the body's state."""
    hidden: dict[str, Tensor]
    """Buffers that are no part of that state."""
    frozen: tuple[str, ...]
    """Parameters that ask for no gradient."""
    resting: tuple[str, ...]
    """Modules in eval."""
    fork_sequence: tuple[Point, ...]
    proven_forks: tuple[Point, ...]
    cannot_fork: str
    optimizer: OptimizerState
    table: Arrays
    batches: int
    lessons: int
    unsampled: tuple[str, ...]
    sampled: dict[str, Tensor]
    smoothed: dict[str, float]
    controller: Any
    chance: dict[str, Any]
    extra: Any


def grower_state(grower: Grower, extra: Any = None) -> GrowerState:
    body, meter, controller = grower.body, grower.network.meter, grower.controller
    return GrowerState(
        format=FORMAT,
        settings=settings(grower),
        slots={name: slot_state(body, slot) for name, slot in body.slots.items()},
        blueprints={name: blueprint_index(name) for name in registered()},
        parts={name: value for name, value in body.state_dict().items() if not isinstance(value, Tensor)},
        hidden=dict(hidden_buffers(body)),
        frozen=tuple(name for name, p in body.named_parameters() if not p.requires_grad),
        resting=tuple(name for name, module in body.named_modules() if not module.training),
        fork_sequence=tuple((p.at_input, p.name) for p in body.fork_sequence),
        proven_forks=tuple((p.at_input, p.name) for p in sorted(body.proven_forks)),
        cannot_fork=body.cannot_fork,
        optimizer=optimizer_state(grower.optimizer, body),
        table=grower.table.arrays(),
        batches=grower._batches,
        lessons=grower._lessons,
        unsampled=tuple(sorted(grower.network.unsampled)),
        sampled=dict(meter.latest),
        smoothed=dict(meter.smoothed),
        controller=controller.state_dict() if isinstance(controller, Remembers) else None,
        chance=chance(),
        extra=extra,
    )


def settings(grower: Grower) -> dict[str, Any]:
    """What decides how training goes on and is not the checkpoint's to decide."""
    rules = msgspec.structs.asdict(grower.rules)
    thresholds = msgspec.structs.asdict(rules.pop("thresholds"))
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "controller": type(grower.controller).__name__,
        "quality": quality_name(grower.quality),
        "incubation": grower.body.incubation,
        "seed": grower.network.surgeon.seed,
        "horizon": grower.horizon,
        "gradient_telemetry_stride": grower.network.meter.stride,
        **{f"rules.{name}": value for name, value in rules.items()},
        **{f"rules.thresholds.{name}": value for name, value in thresholds.items()},
    }


def slot_state(body: Body, slot: Slot) -> SlotState:
    fork = body.forks.get(slot.name)
    return SlotState(
        module=slot.module_name,
        layout=str(slot.site.layout),
        dim=slot.site.dim,
        fork=None if fork is None else (fork.at_input, fork.name),
        blueprint=slot.blueprint,
        operator=int(slot.operator),
        birth=slot.birth,
    )


def hidden_buffers(body: Body) -> Iterator[tuple[str, Tensor]]:
    """Buffers that no state dict has. Models rebuild them, or count on them: a run that goes on needs the latter."""
    for path, module in body.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None and not isinstance(module, Slot):
                yield f"{path}.{name}", buffer


def gradients(body: Body) -> Iterator[tuple[str, Tensor]]:
    for name, p in body.named_parameters():
        if p.grad is not None:
            if p.grad.layout != torch.strided:
                raise CheckpointError(
                    f"the gradient of {name!r} is sparse, which a checkpoint cannot hold. "
                    "Call optimizer.zero_grad() before grower.save()."
                )
            yield name, p.grad


def chance() -> dict[str, Any]:
    """Where the random streams stand that everybody draws from."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
