"""Tensors that FSDP2 (`fully_shard`) has sharded over ranks: the local part, the whole, and norms of the whole.

The host may be sharded; a seed is whole on every rank. Functions that need the other ranks are collective: every rank
must call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is sharded over ranks."""
    return type(tensor) is not Tensor and hasattr(tensor, "full_tensor")


def local_part(tensor: Any) -> Tensor:
    """Return the part of a sharded tensor on this rank, in the same memory; a plain tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Any) -> Any:
    """Return a sharded tensor as a plain one (collective), anything else unchanged."""
    return tensor.detach().full_tensor() if is_sharded(tensor) else tensor


def sharded_like(tensor: Tensor, like: Any) -> Tensor:
    """Return this rank's view of a whole tensor, sharded as `like` is. All ranks must have the same tensor."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    on_device = tensor.to(like.to_local().device)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor, on the device. Collective if one of them is sharded."""
    norms = torch.stack(torch._foreach_norm([local_part(t) for t in tensors]))
    sharded: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if is_sharded(tensor):
            sharded.setdefault((tensor.device_mesh, tensor.placements), []).append(i)  # type: ignore[attr-defined]
    for (mesh, placements), indices in sharded.items():
        from torch.distributed.tensor import DTensor, Partial, Replicate

        parts = [Partial() if placement.is_shard() else Replicate() for placement in placements]
        squares = DTensor.from_local(norms[indices].square(), mesh, parts, run_check=False)
        norms[indices] = squares.full_tensor().sqrt()
    return norms
