"""The state of a grower: its network's state, and everything else that determines how its training continues."""

from __future__ import annotations

import random
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
from esper.kasmina.optimizer_sync import is_sharded, whole
from esper.leyline.errors import CheckpointError
from esper.tamiyo.controllers import Stateful
from esper.tolaria.network_state import NetworkState, network_state

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
        **msgspec.structs.asdict(network_state(grower.network)),
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
