"""The state of a growing network between two batches, and of an engine between two steps: all that determines the rest.

    state = network.state()                                    # everything besides the weights
    network.load_state(state, weights, gradients, table)
    tree = engine_state(engine)                                # tensors, arrays and plain values, for `packing.packed`
    load_engine(engine, tree)                                  # into an engine of the same task, worlds and config

`GrowingNetwork` owns saving; the functions here serve its methods. `esper.Grower` and the engine both
save a `NetworkState`, next to the tensors of `weights_of` and to their slot table. A network or an engine that has
loaded its state continues bit for bit as the saved one. Data order and dropout are functions of (world, step), so the
state contains no random generator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from esper.kasmina.blueprints import blueprint_index
from esper.kasmina.body import STRUCTURE, Body, hidden_buffers
from esper.kasmina.forking import ForkPoint
from esper.kasmina.optimizer_state import OptimizerState, load_optimizer, optimizer_state
from esper.kasmina.optimizer_sync import GradientMeter, sharded_like, whole
from esper.kasmina.slot import Slot
from esper.leyline.actions import ALPHA_TARGETS, TEMPO_EPOCHS
from esper.leyline.errors import CheckpointError
from esper.leyline.lifecycle import Effect, EffectKind
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage

if TYPE_CHECKING:
    from esper.tolaria.engine import Engine
    from esper.tolaria.growing_network import GrowingNetwork

Point = tuple[bool, str]


class SlotState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One slot: its module, its features and its seed."""

    module: str
    layout: str
    dim: int
    fork: Point | None
    blueprint: str
    operator: int
    rng_seed: int = msgspec.field(name="birth")
    """The random seed of its weights, and of a gate that is added later."""


class NetworkState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a growing network without weights, gradients and table."""

    slots: dict[str, SlotState]
    parts: dict[str, Any]
    """Entries of the body's state dict that are not tensors."""
    hidden: dict[str, Tensor]
    """Non-persistent buffers, which are not in that state dict."""
    frozen: tuple[str, ...]
    """Parameters with requires_grad=False."""
    eval_modules: tuple[str, ...]
    fork_sequence: tuple[Point, ...]
    proven_forks: tuple[Point, ...]
    cannot_fork: str
    optimizer: OptimizerState
    unsampled: tuple[str, ...]
    sampled: dict[str, Tensor]
    smoothed: dict[str, float]
    average: tuple[Tensor, ...]
    """The averaged weights in the order of the parameters; empty if no average is kept."""
    average_updates: int


def network_state(network: GrowingNetwork) -> NetworkState:
    """Return the state of a network. Tensors are not copied: write them before they change."""
    body = network.body
    meter = network.meter
    average = network.average
    return NetworkState(
        slots={name: slot_state(body, slot) for name, slot in body.slots.items()},
        parts={name: value for name, value in body.state_dict().items() if not isinstance(value, Tensor)},
        hidden=dict(hidden_buffers(body)),
        frozen=tuple(name for name, p in body.named_parameters() if not p.requires_grad),
        eval_modules=tuple(name for name, module in body.named_modules() if not module.training),
        fork_sequence=tuple((p.at_input, p.name) for p in body.forking.sequence),
        proven_forks=tuple((p.at_input, p.name) for p in sorted(body.forking.proven)),
        cannot_fork=body.forking.failure,
        optimizer=optimizer_state(network.optimizer, body),
        unsampled=tuple(sorted(network.unsampled)),
        sampled=dict(meter.latest),
        smoothed=dict(meter.smoothed),
        average=() if average is None else tuple(average.average),
        average_updates=0 if average is None else average.updates,
    )


def slot_state(body: Body, slot: Slot) -> SlotState:
    """Return the state of one slot."""
    fork = body.forking.points.get(slot.name)
    return SlotState(
        module=slot.module_name,
        layout=str(slot.spec.layout),
        dim=slot.spec.dim,
        fork=None if fork is None else (fork.at_input, fork.name),
        blueprint=slot.blueprint,
        operator=int(slot.operator),
        rng_seed=slot.rng_seed,
    )


def weights_of(body: Body) -> dict[str, Tensor]:
    """Return the tensors of the body's state dict. Collective if the host is sharded."""
    return {name: whole(value) for name, value in body.state_dict().items() if isinstance(value, Tensor)}


def state_tree(state: NetworkState) -> dict[str, Any]:
    """Return the state as a tree for `packed`, with structs as dicts; `msgspec.convert` restores it."""
    optimizer = msgspec.structs.asdict(state.optimizer)
    optimizer["groups"] = tuple(msgspec.structs.asdict(group) for group in state.optimizer.groups)
    slots = {name: msgspec.to_builtins(slot) for name, slot in state.slots.items()}
    return {**msgspec.structs.asdict(state), "slots": slots, "optimizer": optimizer}


@torch.no_grad()
def load_network(
    network: GrowingNetwork,
    state: NetworkState,
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    table: SlotTable,
    env: int = 0,
) -> None:
    """Load a state into a network of the same model, slots and optimiser; notify listeners of replaced seeds.

    Row `env` of `table` must hold the saved values: stages and alphas are taken from it.
    """
    body, average = network.body, network.average
    seeds_before = {name: slot.seed for name, slot in body.slots.items()}
    here = body.state_dict()
    weights = {name: sharded_like(value, here.get(name)) for name, value in weights.items()}
    body.load_state_dict({**weights, **state.parts, **_structure(state, table, env)})
    for name, slot in body.slots.items():
        slot.rng_seed = state.slots[name].rng_seed
    network.optimizer_sync.reload()
    load_optimizer(state.optimizer, network.optimizer, body)
    body.sync(table, env)
    _load_body(body, state, gradients)
    if average is not None:
        average.restart()
        torch._foreach_copy_(average.average, list(state.average))
        average.updates = state.average_updates
    for s, slot in enumerate(body.slots.values()):
        if slot.seed is not seeds_before[slot.name]:
            effect = Effect(EffectKind.DROP if slot.seed is None else EffectKind.BUILD, env, s)
            for listener in network.optimizer_sync.on_change:
                listener(effect, slot)
    device = next(body.model.parameters()).device
    sampled = {name: value.to(device) for name, value in state.sampled.items()}
    network.meter = GradientMeter(network.meter.stride, sampled, dict(state.smoothed))
    network.unsampled = set(state.unsampled)
    network.regroup()


def _structure(state: NetworkState, table: SlotTable, env: int) -> dict[str, Tensor]:
    """Return the structure entry of the body's state dict, built from slots and table so that all three agree."""
    seeds = {
        name: {
            "blueprint": slot.blueprint,
            "operator": slot.operator,
            "stage": int(table.stage[env, s]),
            "alpha": float(table.alpha[env, s]),
        }
        for s, (name, slot) in enumerate(state.slots.items())
        if slot.blueprint
    }
    return {STRUCTURE: torch.frombuffer(bytearray(json.dumps(seeds).encode()), dtype=torch.uint8)} if seeds else {}


def _load_body(body: Body, state: NetworkState, gradients: Mapping[str, Tensor]) -> None:
    body.forking.points = {name: None if s.fork is None else ForkPoint(*s.fork) for name, s in state.slots.items()}
    body.forking.sequence = [ForkPoint(*point) for point in state.fork_sequence]
    body.forking.proven = {ForkPoint(*point) for point in state.proven_forks}
    body.forking.failure = state.cannot_fork
    for name, buffer in hidden_buffers(body):
        saved = state.hidden.get(name)
        if saved is not None and saved.shape == buffer.shape:  # a cache may have another size in this process
            buffer.copy_(saved)
    frozen = set(state.frozen)
    eval_modules = set(state.eval_modules)
    for name, p in body.named_parameters():
        p.requires_grad_(name not in frozen)
        p.grad = torch.empty_like(p).copy_(sharded_like(gradients[name], p)) if name in gradients else None
    for name, module in body.named_modules():
        module.training = name not in eval_modules


def adopt_body(network: GrowingNetwork, table: SlotTable, env: int = 0) -> None:
    """Fill a table row from a body that may already have seeds, as after loading a state dict.

    A state dict holds alpha but not its target: an alpha between targets continues to 1.
    """
    network.optimizer_sync.reload()
    table.reset([env])
    for s, slot in enumerate(network.body.slots.values()):
        if slot.seed is None:
            continue
        at = env, s
        table.stage[at] = slot.stage
        table.operator[at] = slot.operator
        table.blueprint[at] = blueprint_index(slot.blueprint)
        table.alpha[at] = table.alpha_from[at] = table.alpha_to[at] = slot.amplitude
        if slot.stage <= SeedStage.BLENDING and not np.isin(table.alpha[at], ALPHA_TARGETS):
            table.alpha_to[at] = 1.0
            table.ramp_len[at] = table.tempo[at] = TEMPO_EPOCHS[1]
        table.params[at] = sum(p.numel() for p in slot.parameters())
        table.serial[at] = table.next_serial[env]
        table.next_serial[env] += 1
    network.meter = GradientMeter(network.meter.stride)
    network.body.sync(table, env)
    network.regroup()


def engine_state(engine: Engine) -> dict[str, Any]:
    """Return everything that determines how the engine continues. Tensors are not copied: write them at once."""
    return {
        "table": engine.table.arrays(),
        "networks": [state_tree(network.state()) for network in engine.networks],
        "weights": [weights_of(network.body) for network in engine.networks],
        "governor": engine.governor.state_dict(),
    }


def load_engine(engine: Engine, state: Mapping[str, Any]) -> None:
    """Load what `engine_state` returned into a newly built engine."""
    if len(state["networks"]) != len(engine.networks):
        raise CheckpointError(
            f"the state has {len(state['networks'])} environments, this engine has {len(engine.networks)}"
        )
    engine.table.restore(SlotTable(**state["table"]))
    saved = zip(state["networks"], state["weights"], strict=True)
    for env, (network, (tree, weights)) in enumerate(zip(engine.networks, saved, strict=True)):
        network.load_state(msgspec.convert(tree, NetworkState), weights, {}, engine.table, env)
    engine.governor.load_state_dict(state["governor"])
