"""Checkpoints of a grower, at any stage of any seed.

  body.safetensors          weights and buffers of the host and its seeds: a valid argument of `body.load_state_dict`
  gradients.safetensors     gradients of parameters that have one, for loops that accumulate them
  grower.json, .safetensors everything else by name: optimiser, table, counters, controller, generators, `extra`

Loading first checks everything (`grower_check`). A checkpoint that does not fit changes nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from esper.grower.checks import check
from esper.grower.state import FORMAT, GrowerState, gradients, grower_state
from esper.kasmina.blueprints import registered
from esper.kasmina.body import STRUCTURE, Body, hidden_buffers
from esper.kasmina.forking import ForkPoint
from esper.kasmina.gradients import GradientMeter
from esper.kasmina.lifecycle import Effect, EffectKind
from esper.kasmina.optimizer_state import load_optimizer
from esper.leyline.errors import CheckpointError, EsperError
from esper.leyline.slot_table import SlotTable
from esper.tamiyo.controllers import Stateful
from esper.tolaria.checkpoint import Checkpoints, Saved, Written
from esper.tolaria.packing import packed, unpacked

if TYPE_CHECKING:
    from esper.grower import Grower

KIND = "body"


def save(grower: Grower, directory: Path, *, keep: int, extra: Any) -> Written:
    """Write a checkpoint below `directory` and remove all but the last `keep`."""
    state, body = grower_state(grower, extra), grower.body
    tree = msgspec.structs.asdict(state)
    tree["slots"] = {name: msgspec.structs.asdict(slot) for name, slot in state.slots.items()}
    tree["optimizer"] = msgspec.structs.asdict(state.optimizer)
    tree["optimizer"]["groups"] = tuple(msgspec.structs.asdict(group) for group in state.optimizer.groups)
    document, tensors = packed(tree)
    weights = {name: value for name, value in body.state_dict().items() if isinstance(value, Tensor)}
    return Checkpoints(directory, keep=keep).write(
        f"epoch{int(grower.table.step[0]):05d}-batch{state.batches:07d}",
        tensors={"body": weights, "gradients": dict(gradients(body)), "grower": tensors},
        documents={"grower": document},
        kind=KIND,
    )


def load(grower: Grower, directory: Path) -> Any:
    """Load the newest checkpoint below `directory`; return its `extra`."""
    saved = newest(directory)
    try:
        told, weights, grads = _read(saved)
        check(grower, told, weights, grads)
        same = told.settings.get("controller") == type(grower.controller).__name__
        if same and told.controller is not None and isinstance(grower.controller, Stateful):
            grower.controller.load_state_dict(told.controller)
    except EsperError as error:
        raise CheckpointError(f"cannot go on from {saved.path}: {error} Nothing was changed.") from error
    take_over(grower, told, weights | told.parts | structure(told), grads)
    return told.extra


def newest(directory: Path) -> Saved:
    """Return the newest undamaged checkpoint; raise CheckpointError if there is none or it is not a grower's."""
    saved = Checkpoints(directory).newest()
    if saved is None:
        above = directory.parent if (directory / "index.json").exists() else None
        hint = f"Give the directory above it, {above}" if above else "grower.save(directory) writes one"
        raise CheckpointError(f"there is no checkpoint in {directory} that can be used. {hint}.")
    if saved.kind != KIND:
        raise CheckpointError(f"{saved.path} is a checkpoint of kind {saved.kind!r}; a grower's is of kind {KIND!r}.")
    return saved


def _read(saved: Saved) -> tuple[GrowerState, dict[str, Tensor], dict[str, Tensor]]:
    tree = unpacked(saved.document("grower"), saved.tensors("grower"))
    if isinstance(tree, dict) and tree.get("format") != FORMAT:
        raise CheckpointError(f"it has format {tree.get('format')}, this Esper reads {FORMAT}.")
    try:
        told = msgspec.convert(tree, GrowerState)
    except (msgspec.ValidationError, TypeError) as error:
        raise CheckpointError(f"it is no grower's state: {error}.") from error
    weights = saved.tensors("body")
    weights.pop(STRUCTURE, None)  # rebuilt from slots and table: see `structure`
    return told, weights, saved.tensors("gradients")


def structure(told: GrowerState) -> dict[str, Tensor]:
    """Return the structure entry of the body's state dict, built from slots and table so that all three agree."""
    seeds = {
        name: {
            "blueprint": state.blueprint,
            "operator": state.operator,
            "stage": int(told.table["stage"][0, s]),
            "alpha": float(told.table["alpha"][0, s]),
        }
        for s, (name, state) in enumerate(told.slots.items())
        if state.blueprint
    }
    return {STRUCTURE: torch.frombuffer(bytearray(json.dumps(seeds).encode()), dtype=torch.uint8)} if seeds else {}


# -- loading of a checked state


def take_over(grower: Grower, told: GrowerState, weights: Mapping[str, Any], grads: Mapping[str, Tensor]) -> None:
    """Load a checked state into the grower, its body and its optimiser; notify listeners of structural changes."""
    body, seeds = grower.body, {name: slot.seed for name, slot in grower.body.slots.items()}
    body.load_state_dict(weights)
    for name, state in told.slots.items():
        body.slots[name].birth = state.birth
    load_optimizer(told.optimizer, grower.optimizer, body)
    _load_table(grower, told)
    _load_body(body, told, grads)
    for s, slot in enumerate(body.slots.values()):
        if slot.seed is not seeds[slot.name]:
            effect = Effect(EffectKind.DROP if slot.seed is None else EffectKind.BUILD, 0, s)
            for listener in grower.network.optimizer_sync.on_change:
                listener(effect, slot)
    device = next(body.model.parameters()).device
    sampled = {name: value.to(device) for name, value in told.sampled.items()}
    grower.network.meter = GradientMeter(grower.network.meter.stride, sampled, dict(told.smoothed))
    grower.network.unsampled = set(told.unsampled)
    grower.network.regroup()
    grower._batches, grower._lessons = told.batches, told.lessons
    _load_chance(told.chance)


def _load_table(grower: Grower, told: GrowerState) -> None:
    names = {number: name for name, number in told.blueprints.items()}
    known = set(registered())
    takes = told.table["takes"] & np.array([names.get(b) in known for b in range(told.table["takes"].shape[1])])
    if takes.shape != grower.table.takes.shape:  # blueprints were registered during the run
        grower.table = replace(grower.table, takes=takes)
    for f in fields(SlotTable):
        getattr(grower.table, f.name)[...] = takes if f.name == "takes" else told.table[f.name]
    grower.body.sync(grower.table)
    grower.emit.planted(grower.table)


@torch.no_grad()
def _load_body(body: Body, told: GrowerState, grads: Mapping[str, Tensor]) -> None:
    body.forking.points = {name: None if s.fork is None else ForkPoint(*s.fork) for name, s in told.slots.items()}
    body.forking.sequence = [ForkPoint(*point) for point in told.fork_sequence]
    body.forking.proven = {ForkPoint(*point) for point in told.proven_forks}
    body.forking.failure = told.cannot_fork
    for name, buffer in hidden_buffers(body):
        kept = told.hidden.get(name)
        if kept is not None and kept.shape == buffer.shape:
            buffer.copy_(kept)
    frozen, resting = set(told.frozen), set(told.resting)
    for name, p in body.named_parameters():
        p.requires_grad_(name not in frozen)
        p.grad = torch.empty_like(p).copy_(grads[name]) if name in grads else None
    for name, module in body.named_modules():
        module.training = name not in resting


def _load_chance(told: Mapping[str, Any]) -> None:
    torch.set_rng_state(told["torch"])
    if torch.cuda.is_available() and told["cuda"]:
        for device, state in enumerate(told["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    np.random.set_state(told["numpy"])
    random.setstate(told["python"])
