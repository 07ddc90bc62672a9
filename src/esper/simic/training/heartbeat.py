"""Heartbeat: detect within seconds that another rank is stopped, frozen, unreachable or terminated.

    heartbeat = Heartbeat(rank, size)      # collective: every rank constructs it, in the same order
    heartbeat.check()                      # raises RankLostError with the number of the lost rank
    heartbeat.stop()

Rank 0 and each other rank exchange one number per beat, in a separate process group, from a daemon thread. A rank
that trains for minutes between two collectives keeps beating; a process that is stopped (SIGSTOP), whose interpreter
hangs or whose machine is down does not. Rank 0 sends the number of the lost rank to the others.

Silence is measured in beats of this process, not in wall time: a process group that was suspended as a whole (Ctrl-Z,
a sleeping laptop) continues when it is resumed.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from esper.leyline.errors import ConfigError, TrainingError
from esper.leyline.text import cut

SILENCE = "ESPER_SILENCE_S"
"""Environment variable: seconds without an answer after which a rank counts as lost. Must be equal on all ranks."""
DEFAULT_SILENCE_S = 20.0
BEATS = 20
"""Beats per `SILENCE` interval. A beat thread may miss a few of them without consequence."""
PATIENCE = timedelta(hours=2)
"""Maximum time that a rank waits in a collective for another rank that is alive but does not arrive."""


class RankLostError(TrainingError):
    """Another rank of the run is lost. `rank` is its number, None if unknown."""

    exit_code = 3

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Heartbeat:
    """Monitors the other ranks: rank 0 monitors all of them, each of them monitors rank 0."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.silence_s = silence_s()
        self.beat_s = self.silence_s / BEATS
        self._groups: dict[int, Any] = {}  # peer → process group of this rank and the peer
        for other in range(1, size):
            group = dist.new_group([0, other], backend="gloo", timeout=PATIENCE)
            if rank in (0, other):
                self._groups[other if rank == 0 else 0] = group
        self._silent_s = dict.fromkeys(self._groups, 0.0)
        self._exchanges: dict[int, tuple[Any, Tensor]] = {}  # peer → pending exchange and its tensor
        self._lost: RankLostError | None = None
        self._lost_since = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="esper-heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if a rank is lost. Rank 0 waits two beats first, in which it sends the rank's number to the others."""
        is_announced = self.rank > 0 or time.monotonic() - self._lost_since > 2 * self.beat_s
        if self._lost is not None and is_announced:
            raise self._lost

    def name_lost(self) -> None:
        """Raise if a rank is detected as lost within the next beats. Call it when a connection has failed."""
        for _ in range(5):
            self.check()
            time.sleep(self.beat_s)
        self.check()

    def stop(self) -> None:
        """Stop the thread and close the connections. Idempotent."""
        self._stopping.set()
        self._thread.join()
        for group in self._groups.values():
            close(group)
        self._groups = {}

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopping.wait(self.beat_s):
            now = time.monotonic()
            awake_s = min(now - last, 2 * self.beat_s)
            last = now
            for peer in list(self._groups):
                self._beat(peer, awake_s)

    def _beat(self, peer: int, awake_s: float) -> None:
        """Complete the exchange with a peer and start the next one, or add to the peer's silence."""
        try:
            if peer in self._exchanges:
                work, lost_rank = self._exchanges[peer]
                if not work.is_completed():
                    self._count_silence(peer, awake_s)
                    return
                work.wait()
                self._silent_s[peer] = 0.0
                if int(lost_rank) > 0:
                    self._lose(
                        int(lost_rank) - 1, "is stopped, frozen, unreachable or terminated, as reported by rank 0"
                    )
            lost_rank = torch.tensor([0 if self._lost is None or self._lost.rank is None else self._lost.rank + 1])
            work = dist.all_reduce(lost_rank, dist.ReduceOp.MAX, group=self._groups[peer], async_op=True)
            self._exchanges[peer] = work, lost_rank
        except RuntimeError:
            del self._groups[peer]
            self._lose(peer, "closed its connection")

    def _count_silence(self, peer: int, awake_s: float) -> None:
        self._silent_s[peer] += awake_s
        if self._silent_s[peer] > self.silence_s:
            self._lose(
                peer,
                f"has not answered for {self.silence_s:g} s: it is stopped, frozen or unreachable. Continue or kill it",
            )

    def _lose(self, rank: int, how: str) -> None:
        """Record the first lost rank. Later losses are consequences of it."""
        if self._lost is None:
            self._lost_since = time.monotonic()
            self._lost = RankLostError(f"rank {rank} {how}", rank)


def close(group: Any) -> None:
    """Close the connections of a process group immediately, aborting pending operations.

    The group is never destroyed: its destructor waits for pending collectives, and so for a stopped rank. It ends with
    the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    group.abort()


def silence_s() -> float:
    """Return the seconds without an answer after which a rank counts as lost."""
    text = os.environ.get(SILENCE, str(DEFAULT_SILENCE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < PATIENCE.total_seconds():
        raise ConfigError(
            f"{SILENCE} in the environment must be a number of seconds above 0 and below {PATIENCE.total_seconds():g}, "
            f"got {cut(text, 50)!r}. Unset it to use the default of {DEFAULT_SILENCE_S:g} s"
        )
    return seconds
