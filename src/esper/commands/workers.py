"""Worker processes: `esper train --workers N` is this process and N − 1 more with the same command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from esper.leyline.errors import ConfigError, TrainingError
from esper.nissa.signals import deferred_signals
from esper.simic.training.distributed import RENDEZVOUS
from esper.simic.training.heartbeat import RankLostError

GRACE_S = 3.0
"""Seconds that workers have to exit after a request. Killing one later loses nothing: events after the last checkpoint
are recorded again.
"""
PARENT = "ESPER_PARENT"
"""Environment variable with the pid of the process that started a rank."""


class Workers:
    """Context manager of the other ranks on this machine. They meet through a temporary file."""

    def __init__(self, count: int) -> None:
        if count > 1 and "RANK" in os.environ:
            raise ConfigError(
                "--workers cannot be used under torchrun, which has already started the ranks. Remove one of them"
            )
        self.count = count
        self.processes: list[subprocess.Popen[bytes]] = []
        self.place: Path | None = None
        self.is_parent = RENDEZVOUS not in os.environ

    def __enter__(self) -> Workers:
        if self.count > 1 and self.is_parent:
            try:
                with deferred_signals():  # a signal in between would leave an untracked worker
                    self._start()
            except BaseException as error:  # a signal, for example
                self.__exit__(type(error), error, None)
                raise
        return self

    def _start(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="esper-"))
        for rank in range(1, self.count):
            environment = os.environ | {RENDEZVOUS: self._rendezvous(rank), PARENT: str(os.getpid())}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "esper", *sys.argv[1:]], env=environment, stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            )  # fmt: skip
        os.environ[RENDEZVOUS] = self._rendezvous(0)

    def _rendezvous(self, rank: int) -> str:
        return f"{rank}/{self.count}/{self.place}/meeting"

    def remove_rendezvous(self) -> None:
        """Remove the meeting file after all ranks have met."""
        if self.place is not None:
            shutil.rmtree(self.place, ignore_errors=True)

    def poll(self) -> None:
        """Raise RankLostError if a worker has ended."""
        for rank, process in enumerate(self.processes, 1):
            if process.poll() is not None:
                how = f"exit code {process.returncode}" if process.returncode >= 0 else f"signal {-process.returncode}"
                ended = f"worker {rank} of {self.count} ended ({how}); the run cannot continue without it"
                raise RankLostError(ended, rank)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.place is None:
            return
        os.environ.pop(RENDEZVOUS, None)
        for process in self.processes:
            if kind is not None:
                process.terminate()
        end = time.monotonic() + GRACE_S
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.place, ignore_errors=True)


class Parent:
    """The process that started this rank. The run ends with it."""

    def __init__(self) -> None:
        pid = os.environ.get(PARENT, "")
        self.pid = int(pid) if pid.isdecimal() and len(pid) < 10 else os.getppid()

    def poll(self) -> None:
        """Raise TrainingError if the parent has ended."""
        if os.getppid() != self.pid:
            raise TrainingError("the process that started this rank has ended")
