"""The state of a grower: everything that determines how its training continues.

`grower_file` writes a `GrowerState` besides weights and gradients, and validates a file against its types.
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

from esper.grower.qualities import quality_name
from esper.kasmina.blueprints import blueprint_index, registered
from esper.kasmina.body import Body, hidden_buffers
from esper.kasmina.optimizer_state import OptimizerState, optimizer_state
from esper.kasmina.slot import Slot
from esper.leyline.errors import CheckpointError
from esper.tamiyo.controllers import Stateful

if TYPE_CHECKING:
    from esper.grower import Grower

FORMAT = 1
Arrays = dict[str, npt.NDArray[Any]]
Point = tuple[bool, str]


class SlotState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One slot: its site and its seed."""

    module: str
    layout: str
    dim: int
    fork: Point | None
    blueprint: str
    operator: int
    birth: int
    """The random seed of its weights, and of a gate that is added later."""


class GrowerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a grower without weights and gradients."""

    format: int
    settings: dict[str, Any]
    """The grower's settings. On loading, those that differ cause a warning and the current ones are used."""
    slots: dict[str, SlotState]
    blueprints: dict[str, int]
    parts: dict[str, Any]
    """Entries of the body's state dict that are not tensors."""
    hidden: dict[str, Tensor]
    """Non-persistent buffers, which are not in that state dict."""
    frozen: tuple[str, ...]
    """Parameters with requires_grad=False."""
    resting: tuple[str, ...]
    """Modules in eval mode."""
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
    """Return the state of a grower. Tensors are not copied: write them before they change."""
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
        fork_sequence=tuple((p.at_input, p.name) for p in body.forking.sequence),
        proven_forks=tuple((p.at_input, p.name) for p in sorted(body.forking.proven)),
        cannot_fork=body.forking.failure,
        optimizer=optimizer_state(grower.optimizer, body),
        table=grower.table.arrays(),
        batches=grower._batches,
        lessons=grower._lessons,
        unsampled=tuple(sorted(grower.network.unsampled)),
        sampled=dict(meter.latest),
        smoothed=dict(meter.smoothed),
        controller=controller.state_dict() if isinstance(controller, Stateful) else None,
        chance=chance(),
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
        "seed": grower.network.optimizer_sync.seed,
        "horizon": grower.horizon,
        "gradient_telemetry_stride": grower.network.meter.stride,
        **{f"rules.{name}": value for name, value in rules.items()},
        **{f"rules.thresholds.{name}": value for name, value in thresholds.items()},
    }


def slot_state(body: Body, slot: Slot) -> SlotState:
    """Return the state of one slot."""
    fork = body.forking.points.get(slot.name)
    return SlotState(
        module=slot.module_name,
        layout=str(slot.site.layout),
        dim=slot.site.dim,
        fork=None if fork is None else (fork.at_input, fork.name),
        blueprint=slot.blueprint,
        operator=int(slot.operator),
        birth=slot.birth,
    )


def gradients(body: Body) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of parameters that have one; raise CheckpointError for a sparse one."""
    for name, p in body.named_parameters():
        if p.grad is not None:
            if p.grad.layout != torch.strided:
                raise CheckpointError(
                    f"the gradient of {name!r} is sparse, which a checkpoint cannot hold. "
                    "Call optimizer.zero_grad() before grower.save()."
                )
            yield name, p.grad


def chance() -> dict[str, Any]:
    """Return the states of the global random generators of torch, numpy and Python."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
