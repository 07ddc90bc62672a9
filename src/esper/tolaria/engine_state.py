"""The state of an engine between two steps, as a tree of tensors, arrays and plain values.

    tree = engine_state(engine)          # for `tolaria.checkpoint.packed`
    load_engine(engine, tree)            # into an engine of the same task, worlds and config

An engine that has loaded the state continues bit for bit as the saved one. Data order and dropout are functions of
(world, step), so the state contains no random generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
import torch

from esper.kasmina.body import hidden_buffers
from esper.kasmina.forking import ForkPoint
from esper.kasmina.gradients import GradientMeter
from esper.kasmina.optimizer_state import GroupState, OptimizerState, load_optimizer, optimizer_state
from esper.leyline.errors import CheckpointError
from esper.leyline.slot_table import SlotTable
from esper.tolaria.engine import Engine
from esper.tolaria.host_network import HostNetwork


def engine_state(engine: Engine) -> dict[str, Any]:
    """Return everything that determines how the engine continues. Tensors are not copied: write them at once."""
    return {
        "table": engine.table.arrays(),
        "networks": [_network_state(network) for network in engine.networks],
        "governor": engine.governor.state_dict(),
    }


def load_engine(engine: Engine, state: Mapping[str, Any]) -> None:
    """Load what `engine_state` returned into a newly built engine."""
    if len(state["networks"]) != len(engine.networks):
        raise CheckpointError(
            f"the state has {len(state['networks'])} environments, this engine {len(engine.networks)}"
        )
    for field in fields(SlotTable):
        getattr(engine.table, field.name)[...] = state["table"][field.name]
    for env, (network, kept) in enumerate(zip(engine.networks, state["networks"], strict=True)):
        _load_network(network, kept, engine.table, env)
    engine.governor.load_state_dict(state["governor"])


def _network_state(network: HostNetwork) -> dict[str, Any]:
    body, optimizer = network.body, optimizer_state(network.optimizer, network.body)
    tree = msgspec.structs.asdict(optimizer)
    tree["groups"] = tuple(msgspec.structs.asdict(group) for group in optimizer.groups)
    return {
        "body": dict(body.state_dict()),
        "hidden": dict(hidden_buffers(body)),
        "births": {name: slot.birth for name, slot in body.slots.items()},
        "frozen": tuple(name for name, p in body.named_parameters() if not p.requires_grad),
        "proven_forks": tuple((p.at_input, p.name) for p in sorted(body.forking.proven)),
        "cannot_fork": body.forking.failure,
        "optimizer": tree,
        "average": list(network.average.average),
        "updates": network.average.updates,
        "sampled": dict(network.meter.latest),
        "smoothed": dict(network.meter.smoothed),
    }


@torch.no_grad()
def _load_network(network: HostNetwork, state: Mapping[str, Any], table: SlotTable, env: int) -> None:
    body, average = network.body, network.average
    body.load_state_dict(state["body"])
    for name, slot in body.slots.items():
        slot.birth = state["births"][name]
    network.optimizer_sync.reload()
    groups = tuple(GroupState(**group) for group in state["optimizer"]["groups"])
    load_optimizer(OptimizerState(**{**state["optimizer"], "groups": groups}), network.optimizer, body)
    body.sync(table, env)
    for name, buffer in hidden_buffers(body):
        buffer.copy_(state["hidden"][name])
    for name, p in body.named_parameters():
        p.requires_grad_(name not in state["frozen"])
    body.forking.proven = {ForkPoint(*point) for point in state["proven_forks"]}
    body.forking.failure = state["cannot_fork"]
    average.restart()
    for mine, kept in zip(average.average, state["average"], strict=True):
        mine.copy_(kept)
    average.updates = state["updates"]
    sampled = {name: value.to(network.config.device) for name, value in state["sampled"].items()}
    network.meter = GradientMeter(network.meter.stride, sampled, dict(state["smoothed"]))
    network.regroup()
