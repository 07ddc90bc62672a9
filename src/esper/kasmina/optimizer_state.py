"""An optimiser's state by parameter name, so that it can be loaded in another process whatever seeds have grown.

torch numbers parameters by their position in the groups, which changes with every seed. Names do not change, and show
before loading whether a state belongs to another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from esper.kasmina.body import Body
from esper.kasmina.optimizer_sync import SEED_GROUP, is_sharded, sharded_like, whole
from esper.leyline.errors import CheckpointError

SEEDS = "esper."
"""Prefix of the names of seeds' parameters; the host's begin with "model."."""
OUTSIDE = "outside."
"""Prefix of parameters that are not the body's, which are named by their position in the group."""


class GroupState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One parameter group."""

    params: tuple[str, ...]
    options: dict[str, Any]


class OptimizerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An optimiser's state dict with names instead of numbers."""

    kind: str
    groups: tuple[GroupState, ...]
    shapes: dict[str, tuple[int, ...]]
    state: dict[str, dict[str, Any]]
    others: dict[str, Any]
    """State that belongs to no parameter."""
    rest: dict[str, Any]
    """Further entries of the state dict, such as those of a custom optimiser."""


def names_of(optimizer: Optimizer, body: Body) -> list[list[str]]:
    """Return the names of the optimiser's parameters, one list per group."""
    own = {p: name for name, p in body.named_parameters()}
    groups = []
    for g, group in enumerate(optimizer.param_groups):
        others = {p: f"{OUTSIDE}{g}.{i}" for i, p in enumerate(p for p in group["params"] if p not in own)}
        groups.append([own.get(p) or others[p] for p in group["params"]])
    return groups


def _params_by_name(optimizer: Optimizer, body: Body) -> dict[str, Tensor]:
    """Return the optimiser's parameters by name."""
    groups = zip(names_of(optimizer, body), optimizer.param_groups, strict=True)
    return {name: p for names, group in groups for name, p in zip(names, group["params"], strict=True)}


def optimizer_state(optimizer: Optimizer, body: Body) -> OptimizerState:
    """Return the optimiser's state by parameter name. Tensors are not copied, unless they are sharded (collective)."""
    state_dict = pytree.tree_map(whole, optimizer.state_dict())
    groups = list(zip(state_dict["param_groups"], names_of(optimizer, body), strict=True))
    by_number = {i: name for group, names in groups for i, name in zip(group["params"], names, strict=True)}
    state = state_dict["state"]
    return OptimizerState(
        kind=type(optimizer).__name__,
        groups=tuple(
            GroupState(params=tuple(names), options={k: v for k, v in group.items() if k != "params"})
            for group, names in groups
        ),
        shapes={name: tuple(p.shape) for name, p in _params_by_name(optimizer, body).items()},
        state={by_number[k]: v for k, v in state.items() if k in by_number},
        others={k: v for k, v in state.items() if k not in by_number},
        rest={k: v for k, v in state_dict.items() if k not in ("state", "param_groups")},
    )


def check_optimizer(saved: OptimizerState, optimizer: Optimizer, body: Body, seeds: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the state does not fit this optimiser. `seeds` are the parameters of the saved seeds."""
    kind = type(optimizer).__name__
    if kind != saved.kind:
        raise CheckpointError(f"it was saved with {saved.kind}, this optimiser is {kind}. Build the same kind.")
    names = names_of(optimizer, body)
    if len(names) != len(saved.groups):
        raise CheckpointError(
            f"its optimiser had {len(saved.groups)} groups of parameters, the seeds' included; this one has "
            f"{len(names)}. Build the same groups."
        )
    for g, (group, own, now) in enumerate(zip(saved.groups, names, optimizer.param_groups, strict=True)):
        if bool(group.options.get(SEED_GROUP)) != bool(now.get(SEED_GROUP)):
            raise CheckpointError(f"the seeds' group is not group {g} here. Build the grower at the same point.")
        there, here = ({n for n in each if not n.startswith(SEEDS)} for each in (group.params, own))
        if differing := sorted(there ^ here):
            where = "in the checkpoint only" if differing[0] in there else "here only"
            raise CheckpointError(
                f"group {g} of the optimiser holds {differing[0]!r} {where} ({len(differing)} differences). Build it "
                "from the same parameters, in the same groups."
            )
    shapes = {n: tuple(t.shape) for n, t in (_params_by_name(optimizer, body) | dict(seeds)).items()}
    for name, shape in saved.shapes.items():
        if shapes.get(name) != shape:
            raise CheckpointError(
                f"its optimiser held {name!r} of shape {shape}, here it is {shapes.get(name, 'missing')}."
            )


@torch.no_grad()
def load_optimizer(saved: OptimizerState, optimizer: Optimizer, body: Body) -> None:
    """Load a checked state into the optimiser of a body that already has the saved seeds."""
    params = {**dict(body.named_parameters()), **_params_by_name(optimizer, body)}
    numbers = {name: i for i, name in enumerate(n for group in saved.groups for n in group.params)}
    for group, now in zip(saved.groups, optimizer.param_groups, strict=True):
        now["params"][:] = [params[name] for name in group.params]
    optimizer.load_state_dict(
        {
            **saved.rest,
            "state": {**{numbers[n]: s for n, s in saved.state.items()}, **saved.others},
            "param_groups": [{**group.options, "params": [numbers[n] for n in group.params]} for group in saved.groups],
        }
    )
    for name, state in saved.state.items():
        p = params[name]
        optimizer.state[p] = pytree.tree_map(lambda was, now, p=p: _as_saved(was, now, p), state, optimizer.state[p])


def _as_saved(was: Any, now: Any, p: Tensor) -> Any:
    """Return a loaded value with the dtype it was saved with, on torch's device, in the parameter's memory layout.

    torch casts state to the parameter's dtype, which loses precision if the optimiser keeps its state in a wider one.
    """
    if not isinstance(was, Tensor):
        return now
    if is_sharded(p) and was.shape == p.shape:
        return sharded_like(was, p)
    like = p if was.shape == p.shape else was
    return torch.empty_like(like, dtype=was.dtype, device=now.device).copy_(was)
