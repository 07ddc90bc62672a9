"""Heartbeat: notice within seconds that another rank is stopped, frozen, unreachable or gone.

    heartbeat = Heartbeat(rank, size)      # collective: every rank constructs it, in the same order
    heartbeat.check()                      # raises Deserted, naming the rank that is lost
    heartbeat.stop()

Rank 0 and each other rank exchange one number every beat, in a process group of their own, from a daemon thread. A rank
that trains for minutes between two collectives keeps beating; a process that is stopped (SIGSTOP), whose interpreter is
stuck or whose machine is gone does not. Rank 0 tells the others which rank was lost.

Silence is counted in beats of this process, not by the clock: a team that was suspended as a whole (Ctrl-Z, a laptop
that slept) continues when it wakes up.
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

SILENCE = "ESPER_SILENCE_S"
"""The environment variable with the seconds of silence after which a rank counts as lost; the same on all ranks."""
DEFAULT_SILENCE_S = 20.0
BEATS = 20
"""Beats within the time of silence. A beat thread that is starved for a few of them does no harm."""
PATIENCE = timedelta(hours=2)
"""How long a rank waits in a collective for another that is alive but does not arrive."""


class Deserted(TrainingError):
    """Another rank of the run is lost. `rank` is its number, None if it is not known which."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Heartbeat:
    """Watches the other ranks of a team: rank 0 watches all of them, each of them watches rank 0."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.silence_s = silence_s()
        self.beat_s = self.silence_s / BEATS
        self._groups: dict[int, Any] = {}  # peer → the process group of this rank and the peer
        for other in range(1, size):
            group = dist.new_group([0, other], backend="gloo", timeout=PATIENCE)
            if rank in (0, other):
                self._groups[other if rank == 0 else 0] = group
        self._silent_s = dict.fromkeys(self._groups, 0.0)
        self._exchanges: dict[int, tuple[Any, Tensor]] = {}  # peer → the exchange under way and what it carries
        self._lost: Deserted | None = None
        self._lost_since = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="esper-heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if a rank is lost. Rank 0 first lets two beats pass, in which the others learn which one."""
        told = self.rank > 0 or time.monotonic() - self._lost_since > 2 * self.beat_s
        if self._lost is not None and told:
            raise self._lost

    def name_lost(self) -> None:
        """Raise if a rank is found lost within the next beats: to be called when a connection has failed."""
        for _ in range(5):
            self.check()
            time.sleep(self.beat_s)
        self.check()

    def stop(self) -> None:
        """Stop beating and close the connections. Idempotent."""
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
        """Finish the exchange with a peer and begin the next one, or count its silence."""
        try:
            if peer in self._exchanges:
                work, news = self._exchanges[peer]
                if not work.is_completed():
                    self._count_silence(peer, awake_s)
                    return
                work.wait()
                self._silent_s[peer] = 0.0
                if int(news) > 0:
                    self._lose(int(news) - 1, "is stopped, frozen, unreachable or gone, says rank 0")
            news = torch.tensor([0 if self._lost is None or self._lost.rank is None else self._lost.rank + 1])
            work = dist.all_reduce(news, dist.ReduceOp.MAX, group=self._groups[peer], async_op=True)
            self._exchanges[peer] = work, news
        except RuntimeError:
            del self._groups[peer]
            self._lose(peer, "has gone: it closed its connection")

    def _count_silence(self, peer: int, awake_s: float) -> None:
        self._silent_s[peer] += awake_s
        if self._silent_s[peer] > self.silence_s:
            self._lose(
                peer,
                f"has not answered for {self.silence_s:g} s: it is stopped, frozen or unreachable. Continue or kill it",
            )

    def _lose(self, rank: int, how: str) -> None:
        """The first loss counts: what follows it is its consequence."""
        if self._lost is None:
            self._lost_since = time.monotonic()
            self._lost = Deserted(f"rank {rank} {how}", rank)


def close(group: Any) -> None:
    """Close the connections of a process group at once, whatever is under way in it.

    The group itself is never destroyed: its destructor waits for the collectives under way, and so for a rank that is
    stopped. It ends with the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    group.abort()


def silence_s() -> float:
    """Return the seconds of silence after which a rank counts as lost."""
    text = os.environ.get(SILENCE, str(DEFAULT_SILENCE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < PATIENCE.total_seconds():
        raise ConfigError(
            f"{SILENCE} must be a number of seconds above 0, got {text!r}. Unset it for {DEFAULT_SILENCE_S:g}"
        )
    return seconds
