"""Ranks: the processes that train copies or shards of one model together, by DDP or FSDP2.

    ranks = Ranks(body)                            # the processes of torch.distributed, or this one alone
    with ranks.together("grower.step()"):          # an error of one rank is raised on all
        shares = ranks.exchange(tree)              # the trees of all ranks, by rank
        ranks.agree(body, table)                   # raise unless all ranks have the same weights and seeds
    ranks.average_gradients(seeds)                 # before the optimiser's step

Wrappers handle the parameters that a model had when it was wrapped. Seeds are planted later and are not wrapped: every
rank has a full copy of them, and their gradients are averaged here. Rank 0 decides; the others apply its decision.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.kasmina.body import Body
from esper.kasmina.optimizer_sync import is_sharded
from esper.leyline.errors import ConfigError, TrainingError
from esper.leyline.slot_table import Ints, SlotTable
from esper.simic.training.distributed import ProcessGroup
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.packing import packed, unpacked

Group: TypeAlias = "dist.ProcessGroup | Literal[False] | None"
"""A process group of torch; None is the default one, False is this process alone."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type per element size, in which checksums are computed."""


class RanksDifferError(TrainingError):
    """Another rank failed, or the ranks do not do the same. All ranks raise it, so it is not sent again."""


class Ranks:
    """The processes that share one grower's model. One process alone does not communicate."""

    def __init__(self, body: Body, process_group: Group = None) -> None:
        self._is_own = process_group is False
        self._has_shards = any(is_sharded(p) for p in body.model.parameters())
        self.group = ProcessGroup()
        if self._initialized() and dist.get_world_size(process_group or None) > 1:
            comm = process_group or None
            device = next(body.model.parameters()).device
            self.group = ProcessGroup(dist.get_rank(comm), dist.get_world_size(comm), comm=comm, device=device)

    def _initialized(self) -> bool:
        return not self._is_own and dist.is_available() and dist.is_initialized()

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return self.group.size > 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which decides, reports and saves."""
        return self.group.is_rank_zero

    def must_know_the_group(self) -> None:
        """Raise ConfigError if torch.distributed was initialised after the grower was built."""
        if not self.several and self._initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"torch.distributed was initialised with {dist.get_world_size()} processes after the grower was built. "
                "Build the grower after init_process_group, or with process_group=False if each process grows a model "
                "of its own."
            )

    # -- what all ranks do together

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """Within the context an exception of one rank is raised on all ranks: there as RanksDifferError."""
        self.must_know_the_group()
        self.group.activity = call
        try:
            yield
        except TrainingError:  # raised on all ranks, or the connection is lost
            raise
        except Exception as error:
            if self.several:
                self._send(None, f"{type(error).__name__}: {error}")
            raise

    def exchange(self, tree: Any = None) -> list[Any]:
        """Return the trees of all ranks, by rank. Raise RanksDifferError if one failed, or is in another call."""
        messages = self._send(tree, "")
        for rank, (_, error, _, _) in enumerate(messages):
            if error:
                raise RanksDifferError(f"rank {rank} failed in {self.group.activity}: {error}")
        calls = [call for call, *_ in messages]
        if len(set(calls)) > 1:
            listed = ", ".join(f"rank {rank} {call}" for rank, call in enumerate(calls))
            raise RanksDifferError(
                f"the ranks call different functions: {listed}. Make the same calls on all ranks, in the same order."
            )
        return [unpacked(document, safetensors.torch.load(tensors)) for _, _, document, tensors in messages]

    def _send(self, tree: Any, error: str) -> list[tuple[str, str, Any, bytes]]:
        document, tensors = packed(tree)
        content = safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        messages = self.group.exchange(msgspec.msgpack.encode((self.group.activity, error, document, content)))
        return [msgspec.msgpack.decode(message, type=tuple[str, str, Any, bytes]) for message in messages]

    def decide(self, table: SlotTable, actions: Ints | None) -> Ints:
        """Copy the table of rank 0 to the other ranks and return the actions of rank 0."""
        if not self.several:
            assert actions is not None
            return actions
        decision = {"table": table.arrays(), "actions": actions} if self.is_rank_zero else None
        decision = self.exchange(decision)[0]
        assert decision is not None
        for name, column in table.arrays().items():
            if decision["table"][name].shape != column.shape:
                raise RanksDifferError(
                    f"the ranks have different slots or blueprints: {name!r} is {decision['table'][name].shape} on "
                    f"rank 0 and {column.shape} on rank {self.group.rank}"
                )
            column[...] = decision["table"][name]
        return np.asarray(decision["actions"])

    def gather(self, items: list[Any]) -> list[Any]:
        """Return the items of all ranks, in the order of the ranks."""
        return [item for share in self.exchange(items) for item in share] if self.several else items

    def pool(self, result: Coalitions | None, data: int) -> Coalitions | None:
        """Return the scores of all ranks as one result; None if no rank has any.

        `data` is a checksum of the batches: ranks that were given the same batches count once.
        """
        if not self.several:
            return result
        share = None
        if result is not None:
            evaluated = {"slots": result.slots, "players": result.players, "configs": result.configs}
            share = {"evaluated": evaluated, "data": data, "scores": result.scores.detach()}
        shares = {each["data"]: each for each in self.exchange(share) if each is not None}
        if not shares:
            return None
        evaluated = next(iter(shares.values()))["evaluated"]
        if any(each["evaluated"] != evaluated for each in shares.values()):
            raise RanksDifferError(f"the ranks have evaluated different configurations of seeds. {_WAY_OUT}")
        return Coalitions(**evaluated, scores=torch.cat([each["scores"] for each in shares.values()], 1))

    def must_evaluate_together(self, batch: Any) -> None:
        """Raise RanksDifferError if the host is sharded and the ranks have batches of different sizes, or none left."""
        if self.several and self._has_shards:
            sizes = [len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
            counts = self.group.gather_ints(sizes[0] if sizes else 0)
            if len(set(counts)) > 1:
                raise RanksDifferError(
                    f"the ranks have validation batches of {counts} samples (0: none left). With FSDP2 all ranks "
                    "evaluate together: give them equally many batches of equal sizes."
                )

    def agree(self, body: Body, table: SlotTable) -> None:
        """Raise RanksDifferError unless all ranks have the same weights, seeds and table."""
        if not self.several:
            return
        sums = {name: torch.from_numpy(a).contiguous() for name, a in table.arrays().items()}
        sums |= {name: t for name, t in body.named_parameters() if not is_sharded(t)}
        sums |= {f"esper.{name}": b for name, b in body.esper.named_buffers()}
        numbers = torch.stack([checksum(t) for t in sums.values()]).cpu()
        shares = self.exchange({"names": list(sums), "sums": numbers})
        for rank, share in enumerate(shares):
            if share["names"] != shares[0]["names"]:
                raise RanksDifferError(f"rank 0 and rank {rank} have different seeds. {_WAY_OUT}")
            differing = [n for n, a, b in zip(sums, share["sums"], shares[0]["sums"], strict=True) if a != b]
            if differing:
                more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
                raise RanksDifferError(f"{differing[0]!r}{more} differs between rank 0 and rank {rank}. {_WAY_OUT}")

    # -- gradients and buffers of seeds

    @torch.no_grad()
    def average_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Replace the gradients by their means over the ranks. A missing one counts as zero, unless missing on all."""
        if not self.several or not params:
            return
        self.group.activity = "the averaging of seeds' gradients"
        for dtype, device in dict.fromkeys((p.dtype, p.device) for p in params):
            same = [p for p in params if (p.dtype, p.device) == (dtype, device)]
            flags = torch.tensor([p.grad is not None for p in same], dtype=dtype, device=device)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
            flat = torch.cat([flags, *(g.reshape(-1) for g in grads)])
            self.group.all_reduce(flat)
            counts, *means = flat.split([len(same), *(p.numel() for p in same)])
            for p, count, mean in zip(same, counts.tolist(), means, strict=True):  # sync: once per optimiser step
                if count:
                    p.grad = torch.empty_like(p) if p.grad is None else p.grad
                    p.grad.copy_(mean.view(p.shape) / self.group.size)

    @torch.no_grad()
    def share_buffers(self, body: Body) -> None:
        """Copy the buffers of rank 0's seeds to the other ranks, as DDP does for those of the host."""
        buffers = dict(body.esper.named_buffers()) if self.several else {}
        if any(slot.seed is not None for slot in body.slots.values()) and buffers:
            for name, value in self.exchange(buffers)[0].items():
                buffers[name].copy_(value)


_END = object()


class ValidationShare:
    """The validation batches of one rank, and a checksum of those iterated so far."""

    def __init__(self, batches: Iterable[Any], ranks: Ranks) -> None:
        self.batches = batches
        self.ranks = ranks
        self.checksum = 0

    def __iter__(self) -> Iterator[Any]:
        self.checksum = 0
        batches = iter(self.batches)
        while True:
            batch = next(batches, _END)
            self.ranks.must_evaluate_together(batch)
            if batch is _END:
                return
            for leaf in pytree.tree_leaves(batch) if self.ranks.several else ():
                self.checksum = zlib.crc32(content_of(leaf), self.checksum)
            yield batch


def content_of(leaf: Any) -> bytes:
    """Return the bytes of a tensor, or the text of anything else."""
    if not isinstance(leaf, Tensor):
        return repr(leaf).encode()
    return leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


_WAY_OUT = (
    "Wrap the body in DDP or fully_shard before training, give each grower the same rng_seed, clip gradients by "
    "grower.clip_grad_norm_, and make the same calls on all ranks."
)


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the elements' bits, on the device."""
    flat = tensor.detach().contiguous()
    return flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64).cpu()
