"""State of one rank besides rank 0: random generators, and gradients that are not yet averaged over the ranks.

Weights, seeds, optimiser and table are the same on all ranks: rank 0 writes them. Each other rank writes its own state
beside them, in `<directory>-rank<number>`. Without it, as after a change of the number of ranks, the rank continues
with its present generators. A checkpoint that rank 0 alone writes, as Lightning's, holds the generators of all ranks.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from esper.grower.checks import check_rng_states
from esper.grower.state import gradients, load_rng_states, rng_states
from esper.kasmina.optimizer_sync import is_sharded
from esper.leyline.errors import CheckpointError
from esper.tolaria.checkpoint import Checkpoints, Written
from esper.tolaria.packing import packed, unpacked

if TYPE_CHECKING:
    from esper.grower import Grower

KIND = "rank"


def rank_directory(grower: Grower, directory: Path) -> Path:
    """Return the directory of this rank's own state."""
    return directory.with_name(f"{directory.name}-rank{grower.ranks.group.rank}")


def save_rank(grower: Grower, directory: Path, name: str, *, keep: int) -> Written:
    """Write the state of this rank beside the checkpoint `name` of rank 0; return where that checkpoint is."""
    document, tensors = packed(rng_states())
    own = dict(gradients(grower.body, sharded=False))
    done = Checkpoints(rank_directory(grower, directory), keep=keep).write(
        name, tensors={"gradients": own, "rng": tensors}, documents={"rng": document}, kind=KIND
    )
    return Written(directory / name, done.size_bytes, done.write_ms)


def load_rank(grower: Grower, directory: Path, name: str) -> None:
    """Load the state of this rank that belongs to the checkpoint `name`; warn if there is none."""
    place = rank_directory(grower, directory)
    saved = Checkpoints(place).newest() if place.exists() else None
    if saved is None or saved.name != name or saved.kind != KIND:
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
