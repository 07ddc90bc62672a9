"""A team: the processes that train one policy together. Most runs are a team of one.

    team = Team.join()
    mine = team.share(config.envs)              # my environments, a slice of all
    …                                           # step them; act on a batch padded to [E]
    team.gather(buffer.fields(), mine)          # once per round: everybody has every rollout
    team.agree(learner.digest, "…")             # that everybody made the same update

The batch that a policy acts on has the same shape in every team, so a row's bits do not depend on who computes it.
Ranks of one machine meet over a file and speak over loopback; `torchrun` brings ranks of many machines together.

Legend: E environments of the run, R of them this rank's, T steps.
"""

from __future__ import annotations

import json
import os
import re
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
from esper.simic.training.heartbeat import PATIENCE, Deserted, Heartbeat, close

MEETING = "ESPER_TEAM"
"""The environment variable that tells a spawned rank who it is and where the others are met: rank/size/file."""
SLICES_S = (0.00005, 0.05)
"""Seconds between two looks at a collective under way: the first, and the longest. Each is 1.5 times the one before."""
_BITS = {1: torch.uint8, 4: torch.int32, 8: torch.int64}
"""Integers as wide as an element: sums with zeros are exact in them, the sign of a zero and NaN included."""


@dataclass(slots=True, eq=False)
class Team:
    """Which of how many ranks this is. A team of one speaks to nobody."""

    rank: int = 0
    size: int = 1
    look_up: Callable[[], None] = lambda: None
    """Called while this rank waits for others: it may raise."""
    heartbeat: Heartbeat | None = None

    @classmethod
    def join(cls, look_up: Callable[[], None] = lambda: None) -> Team:
        """The team that this process was started into: by `--workers`, by torchrun, or none.

        `look_up` is called while it waits for the others: it may raise.
        """
        if MEETING in os.environ:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
            return cls._meet(*_meeting(os.environ[MEETING]), look_up)
        size = _from_environment("WORLD_SIZE", 1) if "WORLD_SIZE" in os.environ else 1
        if size == 1:
            return cls()
        rank = _from_environment("RANK", 0)
        if rank >= size:
            raise ConfigError(f"RANK={rank} is none of WORLD_SIZE={size} ranks, which count from 0. {_WAY_OUT}")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ConfigError(
                    f"WORLD_SIZE={size} says that torchrun started this, but {name} is not set. {_WAY_OUT}"
                )
        return cls._meet(rank, size, "env://", look_up)

    @classmethod
    def _meet(cls, rank: int, size: int, where: str, look_up: Callable[[], None]) -> Team:
        """Wait for the others in a thread of its own, so that this one can hear signals and see who has gone."""
        team, failed = cls(rank, size, look_up), []  # type: tuple[Team, list[Exception]]

        def meet() -> None:
            try:
                dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=PATIENCE)
                team.heartbeat = Heartbeat(rank, size)
                team.each(0)  # when it is heard, every rank is through the door, and the meeting place can go
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=meet, name="esper-meeting", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            look_up()
        for error in failed:
            raise TrainingError(f"rank {rank} of {size} could not meet the others ({where}): {error}") from error
        return team

    def leave(self) -> None:
        """Close the connections to the others. A collective that still waits for one of them is given up."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if self.size > 1 and dist.group.WORLD is not None:
            close(dist.group.WORLD)

    def check(self) -> None:
        """Raise if another rank is lost or must not be waited for."""
        self.look_up()
        if self.heartbeat is not None:
            self.heartbeat.check()

    @property
    def leads(self) -> bool:
        """Whether this rank owns the run directory, its checkpoints and what is printed."""
        return self.rank == 0

    def share(self, envs: int) -> slice:
        """This rank's environments: as even as it goes, the first ranks one more."""
        if envs < self.size:
            raise ConfigError(f"{self.size} processes cannot share {envs} environments: ask for fewer, or raise envs")
        least, more = divmod(envs, self.size)
        start = self.rank * least + min(self.rank, more)
        return slice(start, start + least + (self.rank < more))

    def placed(self, rows: NDArray[Any], envs: int, blank: Any = 0) -> Tensor:
        """[R, …] rows of this rank at their places among all [E, …]; `blank` elsewhere."""
        if self.size == 1:
            return torch.from_numpy(rows)
        whole = np.full((envs, *rows.shape[1:]), blank, dtype=rows.dtype)
        whole[self.share(envs)] = rows
        return torch.from_numpy(whole)

    def gather(self, fields: Iterable[Tensor], axis: int = 1, look_up: Callable[[], None] = lambda: None) -> None:
        """Fill every rank's part of each tensor in, where each rank has its own part along `axis`. In place.

        `look_up` is called while it waits for the others: it may raise.
        """
        if self.size == 1:
            return
        for field in fields:
            bits = field.view(_BITS[field.element_size()])
            mine = self.share(field.shape[axis])
            bits.narrow(axis, 0, mine.start).zero_()
            bits.narrow(axis, mine.stop, field.shape[axis] - mine.stop).zero_()
            self._run(dist.all_reduce, bits, look_up=look_up)

    def whole(self, rows: NDArray[np.float64], envs: int) -> NDArray[np.float64]:
        """[E] numbers of all environments, from those of this rank's [R]."""
        numbers = self.placed(np.asarray(rows, np.float64), envs)
        self.gather([numbers], axis=0)
        return numbers.numpy()

    def each(self, number: int) -> list[int]:
        """One number per rank."""
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number
        self.gather([numbers], axis=0)
        return [int(n) for n in numbers]

    def told(self, message: Any = None) -> Any:
        """What the leading rank says, as JSON; the others' own message is ignored."""
        if self.size == 1:
            return message
        text = json.dumps(message).encode() if self.leads else b""
        size = torch.tensor([len(text)])
        self._run(dist.broadcast, size, src=0)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if self.leads:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._run(dist.broadcast, content, src=0)
        return json.loads(bytes(content.numpy()))

    def agree(self, digested: Callable[[], bytes], what: str) -> None:
        """All ranks have the same bytes, or the run ends here, before it goes two ways."""
        if self.size == 1:
            return
        digest = digested()
        all_of_them = torch.zeros(self.size, len(digest), dtype=torch.uint8)
        all_of_them[self.rank] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        self._run(dist.all_reduce, all_of_them)
        others = [r for r in range(self.size) if not torch.equal(all_of_them[r], all_of_them[0])]
        if others:
            raise TrainingError(
                f"{what} differ between rank 0 and rank {', '.join(map(str, others))}: the ranks do not compute the "
                "same bits. Use one kind of processor, the same versions and threads on all of them"
            )

    def _run(self, collective: Any, *args: Any, look_up: Callable[[], None] = lambda: None, **kwargs: Any) -> None:
        """Run a collective and wait for it in slices, so that Python hears signals and lost ranks are noticed."""
        pause_s, longest_s = SLICES_S
        try:
            work = collective(*args, async_op=True, **kwargs)
            while not work.is_completed():
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, longest_s)
                look_up()
                self.check()
            work.wait()
        except RuntimeError as error:
            if self.heartbeat is not None:
                self.heartbeat.name_lost()
            raise Deserted(f"another rank of this run has gone (noticed by rank {self.rank})") from error


_WAY_OUT = "Start with torchrun, or unset WORLD_SIZE and RANK"


def _from_environment(name: str, least: int) -> int:
    """A whole number that torchrun put into the environment."""
    text = os.environ.get(name)
    if text is None:
        raise ConfigError(f"WORLD_SIZE is set in the environment, but {name} is not. {_WAY_OUT}")
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        raise ConfigError(
            f"{name} in the environment must be a whole number ≥ {least}, got {cut(text, 50)!r}. {_WAY_OUT}"
        )
    return int(text)


def _meeting(text: str) -> tuple[int, int, str]:
    """Rank, size and address of a spawned rank."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})/(.+)", text)
    if match is None:
        raise ConfigError(f"{MEETING} is for `esper train --workers` alone, and says {cut(text, 100)!r}. Unset it")
    return int(match[1]), int(match[2]), f"file://{match[3]}"
