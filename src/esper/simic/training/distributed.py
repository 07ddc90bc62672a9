"""The group of processes (ranks) that train one policy together. Most runs have a single process.

    group = ProcessGroup.join()
    mine = group.share(config.envs)             # this rank's environments, as a slice
    …                                           # step them; act on a batch padded to [E]
    group.gather(buffer.fields())               # once per round: every rank receives all rollouts
    group.agree(training.digest, "…")           # check that all ranks made the same update

The policy's batch has the same shape for any number of ranks, so the bits of a row do not depend on the rank.
Ranks on one machine rendezvous over a file and communicate over loopback; `torchrun` connects several machines.

Legend: E environments of the run, R of them on this rank, T steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import ConfigError, TrainingError
from esper.leyline.text import cut
from esper.simic.training.heartbeat import PATIENCE, Heartbeat, RankLostError, close, silence_s

RENDEZVOUS = "ESPER_RENDEZVOUS"
"""Environment variable that gives a spawned rank its rank, the group's size and the rendezvous file: rank/size/file."""
SLICES_S = (0.00005, 0.05)
"""First and longest pause in seconds between two polls of a pending collective. Each is 1.5 times the previous one."""
_BITS = {1: torch.uint8, 4: torch.int32, 8: torch.int64}
"""Integer type per element size. Sums with zeros are exact in it, including NaN and the sign of a zero."""


@dataclass(slots=True, eq=False)
class ProcessGroup:
    """Rank and size of the process group. A group of one process does not communicate."""

    rank: int = 0
    size: int = 1
    poll: Callable[[], None] = lambda: None
    """Called while this rank waits for others. It may raise."""
    heartbeat: Heartbeat | None = None
    comm: dist.ProcessGroup | None = None
    """The torch process group to communicate over; None is the default one."""
    device: torch.device = torch.device("cpu")
    """Where tensors to be exchanged must be: NCCL requires a GPU."""
    activity: str = ""
    """What the ranks do together now, for error messages."""

    @classmethod
    def join(cls, poll: Callable[[], None] = lambda: None) -> ProcessGroup:
        """Join the group that this process was started in, by `--workers` or torchrun; otherwise return a group of one.

        `poll` is called while this rank waits for others. It may raise.
        """
        if RENDEZVOUS in os.environ:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
            return cls._meet(*_rendezvous(os.environ[RENDEZVOUS]), poll)
        if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
            raise ConfigError(f"RANK is set in the environment, but WORLD_SIZE is not. {_WAY_OUT}")
        size = _from_environment("WORLD_SIZE", 1) if "WORLD_SIZE" in os.environ else 1
        if size == 1:
            return cls()
        rank = _from_environment("RANK", 0)
        if rank >= size:
            raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={size}. {_WAY_OUT}")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ConfigError(f"WORLD_SIZE={size} requires {name}, which is not set. {_WAY_OUT}")
        return cls._meet(rank, size, "env://", poll)

    @classmethod
    def _meet(cls, rank: int, size: int, where: str, poll: Callable[[], None]) -> ProcessGroup:
        """Rendezvous in a separate thread, so that this one can handle signals and call `poll`."""
        silence_s()  # raise ConfigError here, before the ranks connect
        group = cls(rank, size, poll)
        failed: list[Exception] = []
        abandoned = threading.Event()

        def meet() -> None:
            from torch._C._distributed_c10d import PrefixStore
            from torch.distributed.rendezvous import rendezvous

            try:
                if dist.is_initialized():  # an earlier run of this process has left its group
                    dist.destroy_process_group()
                if abandoned.is_set():  # a file store whose directory was removed would block the exit for minutes
                    return
                store, *_ = next(rendezvous(where, rank, size, timeout=PATIENCE))
                if where == "env://":
                    store = PrefixStore(_attempt(store, rank, size), store)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
                group.heartbeat = Heartbeat(rank, size)
                group.gather_ints(
                    0
                )  # once it returns, all ranks have connected, and the rendezvous file can be removed
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=meet, name="esper-rendezvous", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.1)
                poll()
        except BaseException:
            abandoned.set()
            raise
        for error in failed:
            raise TrainingError(
                f"rank {rank} of {size} could not join the process group at {where}: {error}"
            ) from error
        return group

    def leave(self) -> None:
        """Close the connections to the other ranks. A pending collective is aborted."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if self.size > 1 and dist.group.WORLD is not None:
            close(dist.group.WORLD)

    def check(self) -> None:
        """Raise if `poll` does, or if another rank is lost."""
        self.poll()
        if self.heartbeat is not None:
            self.heartbeat.check()

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which owns the run directory, its checkpoints and the console output."""
        return self.rank == 0

    def share(self, envs: int) -> slice:
        """Return the slice of environments of this rank.

        Sizes differ by at most one, and the first ranks have the larger.
        """
        if envs < self.size:
            raise ConfigError(
                f"{self.size} processes cannot share {envs} environments. Use fewer processes, or increase envs"
            )
        least, more = divmod(envs, self.size)
        start = self.rank * least + min(self.rank, more)
        return slice(start, start + least + (self.rank < more))

    def pad_rows(self, rows: NDArray[Any], envs: int, blank: Any = 0) -> Tensor:
        """Return this rank's rows [R, …] at their positions in a tensor [E, …], filled with `blank` elsewhere."""
        if self.size == 1:
            return torch.from_numpy(rows)
        whole = np.full((envs, *rows.shape[1:]), blank, dtype=rows.dtype)
        whole[self.share(envs)] = rows
        return torch.from_numpy(whole)

    def gather(self, fields: Iterable[Tensor], axis: int = 1, poll: Callable[[], None] = lambda: None) -> None:
        """Exchange each tensor's parts between the ranks, in place. Each rank provides its own slice along `axis`.

        `poll` is called while this rank waits for others. It may raise.
        """
        if self.size == 1:
            return
        for field in fields:
            bits = field.view(_BITS[field.element_size()])
            mine = self.share(field.shape[axis])
            bits.narrow(axis, 0, mine.start).zero_()
            bits.narrow(axis, mine.stop, field.shape[axis] - mine.stop).zero_()
            self.all_reduce(bits, poll)

    def gather_rows(self, rows: NDArray[np.float64], envs: int) -> NDArray[np.float64]:
        """Return the numbers of all environments [E], given those of this rank [R]."""
        numbers = self.pad_rows(np.asarray(rows, np.float64), envs)
        self.gather([numbers], axis=0)
        return numbers.numpy()

    def gather_ints(self, number: int) -> list[int]:
        """Return the `number` of every rank, by rank."""
        numbers = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        numbers[self.rank] = number
        self.gather([numbers], axis=0)
        return numbers.tolist()

    def exchange(self, message: bytes) -> list[bytes]:
        """Return the message of every rank, by rank."""
        if self.size == 1:
            return [message]
        sizes = self.gather_ints(len(message))
        rows = torch.zeros(self.size, max(sizes) + 1, dtype=torch.uint8)  # never empty
        rows[self.rank, : len(message)] = torch.from_numpy(np.frombuffer(bytearray(message), dtype=np.uint8))
        rows = rows.to(self.device)
        self.all_reduce(rows)
        return [bytes(row[:size].numpy()) for row, size in zip(rows.cpu(), sizes, strict=True)]

    def broadcast(self, message: Any = None) -> Any:
        """Return rank 0's message, sent as JSON. The messages of other ranks are ignored."""
        if self.size == 1:
            return message
        return json.loads(self.exchange(json.dumps(message).encode() if self.is_rank_zero else b"")[0])

    def agree(self, digested: Callable[[], bytes], what: str) -> None:
        """Raise TrainingError unless the digests of all ranks are equal."""
        if self.size == 1:
            return
        digests = self.exchange(digested())
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise TrainingError(
                f"{what} differ between rank 0 and rank {', '.join(map(str, others))}: the ranks do not compute the "
                "same bits. Use one kind of processor, the same versions and threads on all of them"
            )

    def all_reduce(self, tensor: Tensor, poll: Callable[[], None] = lambda: None) -> None:
        """Replace the tensor on every rank by the sum over the ranks.

        The completion is polled for, so that Python handles signals and lost ranks are noticed.
        """
        pause_s, longest_s = SLICES_S
        try:
            work = dist.all_reduce(tensor, group=self.comm, async_op=True)
            while not work.is_completed():
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, longest_s)
                poll()
                self.check()
            work.wait()
        except RuntimeError as error:
            if self.heartbeat is not None:
                self.heartbeat.name_lost()
            during = f" during {self.activity}" if self.activity else ""
            raise RankLostError(
                f"the connection to another rank was lost{during} (noticed by rank {self.rank}): {cut(str(error), 200)}"
            ) from error


def _attempt(store: Any, rank: int, size: int) -> str:
    """Return a name that all ranks of this start of the run share, and none of an earlier start.

    torchrun may keep its store when it starts the ranks again, with the addresses of ranks that have ended.
    """
    mine = secrets.token_hex(8)
    store.set(f"esper/join/{rank}", mine)
    while True:
        if rank == 0:
            store.set("esper/joined", "/".join(store.get(f"esper/join/{r}").decode() for r in range(size)))
        joined = store.get("esper/joined").decode()
        if joined.split("/")[rank] == mine:
            store.set(f"esper/seen/{rank}", joined)
            keys = [f"esper/seen/{r}" for r in range(size)]
            if rank == 0 and store.check(keys) and all(store.get(each).decode() == joined for each in keys):
                store.set("esper/start", joined)
            if store.check(["esper/start"]) and store.get("esper/start").decode() == joined:
                return hashlib.sha256(joined.encode()).hexdigest()
        time.sleep(0.05)


_WAY_OUT = "Start with torchrun, or unset WORLD_SIZE and RANK"


def _from_environment(name: str, least: int) -> int:
    """Return an integer that torchrun put into the environment. Raise ConfigError if it is missing or below `least`."""
    text = os.environ.get(name)
    if text is None:
        raise ConfigError(f"WORLD_SIZE is set in the environment, but {name} is not. {_WAY_OUT}")
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        raise ConfigError(
            f"{name} in the environment must be a whole number ≥ {least}, got {cut(text, 50)!r}. {_WAY_OUT}"
        )
    return int(text)


def _rendezvous(text: str) -> tuple[int, int, str]:
    """Return rank, size and rendezvous address of a spawned rank."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})/(.+)", text)
    if match is None:
        raise ConfigError(f"{RENDEZVOUS} is set by `esper train --workers` only, got {cut(text, 100)!r}. Unset it")
    return int(match[1]), int(match[2]), f"file://{match[3]}"
