"""Checkpoints of a grower, at any stage of any seed.

  body.safetensors          weights and buffers of the host and its seeds: a valid argument of `body.load_state_dict`
  gradients.safetensors     gradients of parameters that have one, for loops that accumulate them
  grower.json, .safetensors everything else by name: optimiser, table, counters, controller, generators, `extra`

Loading first checks everything (`state.check`). A checkpoint that does not fit changes nothing.

Weights, seeds, optimiser and table are the same on all ranks: rank 0 writes them. Each other rank writes its random
generators, and gradients that are not yet averaged, beside them in `<directory>-rank<number>`. Without these, as after
a change of the number of ranks, the rank continues with its present generators.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from esper.grower.state import (
    FORMAT,
    GrowerState,
    check,
    check_rng_states,
    gradients,
    grower_state,
    load_rng_states,
    rng_states,
)
from esper.kasmina.blueprints import registered
from esper.kasmina.body import STRUCTURE
from esper.kasmina.optimizer_sync import is_sharded
from esper.leyline.errors import CheckpointError, ConfigError, EsperError
from esper.leyline.slot_table import SlotTable
from esper.tamiyo.controllers import Stateful
from esper.tolaria.checkpoint import Checkpoints, Saved, Written
from esper.tolaria.network_state import state_tree, weights_of
from esper.tolaria.packing import packed, unpacked

if TYPE_CHECKING:
    from esper.grower import Grower

KIND, RANK_KIND = "body", "rank"
"""Kinds of checkpoints: that of rank 0, and the own state of another rank."""


def save(grower: Grower, directory: Path, *, keep: int, extra: Any) -> Written:
    """Write a checkpoint below `directory` and remove all but the last `keep`."""
    state = grower_state(grower, extra)
    name = f"epoch{int(grower.table.step[0]):05d}-batch{state.batches:07d}"
    weights = weights_of(grower.body)  # all ranks: collective if sharded, as are the gradients
    grads = dict(gradients(grower.body))
    if not grower.ranks.is_rank_zero:
        return save_rank(grower, directory, name, keep=keep)
    document, tensors = packed(state_tree(state))
    return Checkpoints(directory, keep=keep).write(
        name,
        tensors={"body": weights, "gradients": grads, "grower": tensors},
        documents={"grower": document},
        kind=KIND,
    )


def load(grower: Grower, directory: Path) -> Any:
    """Load the newest checkpoint below `directory`; return its `extra`."""
    saved = newest(directory)
    try:
        state = _read(saved.document("grower"), saved.tensors("grower"))
        weights, grads = saved.tensors("body"), saved.tensors("gradients")
        weights.pop(STRUCTURE, None)  # rebuilt from slots and table, see `GrowingNetwork.load_state`
        _check(grower, state, weights, grads)
    except EsperError as error:
        raise CheckpointError(f"cannot load {saved.path}: {error} Nothing was changed.") from error
    _apply(grower, state, weights, grads)
    if not grower.ranks.is_rank_zero:
        load_rank(grower, directory, saved.name)
    return state.extra


def state_dict(grower: Grower) -> dict[str, Any]:
    """Return the state of a grower without weights and gradients: a JSON text and tensors, which need no pickle."""
    document, tensors = packed(state_tree(grower_state(grower)))
    return {"document": json.dumps(document), "tensors": tensors}


def load_state_dict(grower: Grower, saved: Mapping[str, Any]) -> None:
    """Load the result of `state_dict` into a grower whose body already has the weights that belong to it."""
    weights = weights_of(grower.body)
    weights.pop(STRUCTURE, None)
    try:
        state = _read(json.loads(saved["document"]), saved["tensors"])
        for name, slot in grower.body.slots.items():
            if name in state.slots and slot.blueprint != (blueprint := state.slots[name].blueprint):
                raise CheckpointError(
                    f"it has {blueprint or 'no seed'} in slot {name!r}, the body has {slot.blueprint or 'none'}. Load "
                    "the state of the body first."
                )
        _check(grower, state, weights, {})
    except EsperError as error:
        raise CheckpointError(f"cannot load this state of a grower: {error} Nothing was changed.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"this is not the state of a grower: {error!r}. Nothing was changed.") from error
    modes = {module: module.training for module in grower.body.modules()}
    _apply(grower, state, weights, {})
    for module, training in modes.items():  # a training library saves in eval mode and sets modes itself
        module.training = training


def _check(grower: Grower, state: GrowerState, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
    """Check a state, then load it into the controller, which may refuse it."""
    check(grower, state, weights, grads)
    name = type(grower.controller).__name__
    if state.settings.get("controller") != name or state.controller is None:
        return
    if not isinstance(grower.controller, Stateful):
        raise ConfigError(f"its controller {name!r} had a state, which this version's has not. Start anew")
    grower.controller.load_state_dict(state.controller)


def _apply(grower: Grower, state: GrowerState, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
    """Load a checked state."""
    table = _table(state)
    grower.network.load_state(state, weights, grads, table)
    grower.table = table
    grower.emit.planted(table)
    grower._batches = state.batches
    grower._shadow_passes = state.shadow_passes
    if grower.ranks.is_rank_zero:
        load_rng_states(state.rng_states)


def newest(directory: Path) -> Saved:
    """Return the newest undamaged checkpoint; raise CheckpointError if there is none or it is not a grower's."""
    saved = Checkpoints(directory).newest()
    if saved is None:
        is_checkpoint = (directory / "index.json").exists()
        hint = f"Pass its parent, {directory.parent}" if is_checkpoint else "grower.save(directory) writes one"
        raise CheckpointError(f"there is no usable checkpoint in {directory}. {hint}.")
    if saved.kind != KIND:
        raise CheckpointError(f"{saved.path} is a checkpoint of kind {saved.kind!r}; a grower's is of kind {KIND!r}.")
    return saved


def _read(document: Any, tensors: Mapping[str, Tensor]) -> GrowerState:
    """Return the state in a document and its tensors."""
    tree = unpacked(document, tensors)
    if isinstance(tree, dict) and tree.get("format") != FORMAT:
        raise CheckpointError(f"it has format {tree.get('format')}, this version of Esper reads format {FORMAT}.")
    try:
        return msgspec.convert(tree, GrowerState)
    except (msgspec.ValidationError, TypeError) as error:
        raise CheckpointError(f"it is not a valid state of a grower: {error}.") from error


def _table(state: GrowerState) -> SlotTable:
    """Return the saved table without blueprints that are not registered in this process."""
    names = {number: name for name, number in state.blueprints.items()}
    takes = state.table["takes"]
    is_registered = np.array([names.get(b) in registered() for b in range(takes.shape[1])])
    return SlotTable(**{**state.table, "takes": takes & is_registered}).clone()


def rank_directory(grower: Grower, directory: Path) -> Path:
    """Return the directory of this rank's own state."""
    return directory.with_name(f"{directory.name}-rank{grower.ranks.group.rank}")


def save_rank(grower: Grower, directory: Path, name: str, *, keep: int) -> Written:
    """Write the state of this rank beside the checkpoint `name` of rank 0; return where that checkpoint is."""
    document, tensors = packed(rng_states())
    own = dict(gradients(grower.body, sharded=False))
    done = Checkpoints(rank_directory(grower, directory), keep=keep).write(
        name, tensors={"gradients": own, "rng": tensors}, documents={"rng": document}, kind=RANK_KIND
    )
    return Written(directory / name, done.size_bytes, done.write_ms)


def load_rank(grower: Grower, directory: Path, name: str) -> None:
    """Load the state of this rank that belongs to the checkpoint `name`; warn if there is none."""
    place = rank_directory(grower, directory)
    saved = Checkpoints(place).newest() if place.exists() else None
    if saved is None or saved.name != name or saved.kind != RANK_KIND:
        warnings.warn(
            f"{place} has no state of rank {grower.ranks.group.rank} for checkpoint {name}: its random generators keep "
            "their present state. Call grower.save on all ranks, and resume with the same number of ranks.",
            stacklevel=5,
        )
        return
    states = unpacked(saved.document("rng"), saved.tensors("rng"))
    if not isinstance(states, dict):
        raise CheckpointError(f"{saved.path} holds no states of random generators.")
    check_rng_states(states)
    own = saved.tensors("gradients")
    for key, p in grower.body.named_parameters():
        if not is_sharded(p):
            p.grad = torch.empty_like(p).copy_(own[key]) if key in own and own[key].shape == p.shape else None
    load_rng_states(states)


def gathered_generators(grower: Grower) -> dict[str, Any]:
    """Return the states of the random generators of all ranks, as a JSON text and tensors. All ranks must call it."""
    with grower.ranks.together("the saving of random generators"):
        document, tensors = packed(grower.ranks.gather([rng_states()]))
    return {"document": json.dumps(document), "tensors": tensors}


def load_own_generators(grower: Grower, saved: Mapping[str, Any]) -> None:
    """Set the random generators of this rank from the result of `gathered_generators`, if it has a state for it."""
    states = unpacked(json.loads(saved["document"]), saved["tensors"])
    rank = grower.ranks.group.rank
    if rank < len(states):
        check_rng_states(states[rank])
        load_rng_states(states[rank])
