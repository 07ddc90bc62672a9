"""The runs of a directory, each followed and folded once for all viewers."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from esper.karn.document import Json, clean
from esper.karn.live_run import LiveRun
from esper.leyline.errors import RunError
from esper.leyline.text import printable
from esper.nissa.run import LOCK, MANIFEST
from esper.nissa.run_list import RunInfo, newest_first, run_directories, run_info

ENDED = ("finished", "failed", "interrupted")
"""Statuses that are recorded in the manifest. A killed run shows as killed once nobody holds its lock."""

MOST_OPEN = 32
"""Maximum number of runs whose state is kept in memory, those that were used last."""


class LiveRuns:
    """The runs below a directory, or the run that it is. A run keeps its number as long as the server runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._places: list[tuple[Path, str]] = []  # number → directory and name of the run
        self._numbers: dict[tuple[Path, str], int] = {}  # directory and id of the run → number
        self._infos: dict[Path, tuple[tuple[int, int, int], RunInfo]] = {}  # version of the manifest, row
        self._runs: dict[int, LiveRun] = {}
        self._lock = threading.Lock()

    def listing(self) -> Json:
        """Return the runs, newest first, as rows with their numbers."""
        if any((self.directory / name).exists() for name in (MANIFEST, LOCK)):
            rows = [self._info(self.directory, printable(self.directory.resolve().name))]
        else:
            paths = run_directories(self.directory, (MANIFEST, LOCK))
            rows = newest_first([self._info(path, path.relative_to(self.directory).as_posix()) for path in paths])
        entries = []
        with self._lock:
            for row in rows:
                place = row.path, row.id
                if place not in self._numbers:
                    self._numbers[place] = len(self._places)
                    self._places.append((row.path, row.name))
                entries.append({
                    "id": self._numbers[place], "name": row.name, "task": row.task, "status": row.status,
                    "controller": row.controller, "started": row.started, "seconds": row.seconds,
                    "env_steps": row.env_steps, "missing": row.losses,
                })  # fmt: skip
        return clean({"directory": printable(str(self.directory)), "runs": entries})

    def _info(self, path: Path, name: str) -> RunInfo:
        """Return the row of a run. A run that ended is read again only if its manifest was replaced."""
        try:
            now = os.lstat(path / MANIFEST)
        except OSError:
            return run_info(path, name)
        version = now.st_ino, now.st_size, now.st_mtime_ns
        with self._lock:
            cached = self._infos.get(path)
        if cached is not None and cached[0] == version:
            return cached[1]
        row = run_info(path, name)
        if row.status in ENDED:
            with self._lock:
                self._infos[path] = version, row
        return row

    def path(self, number: int) -> Path:
        """Return the directory of a run by its number."""
        with self._lock:
            if not 0 <= number < len(self._places):
                raise RunError("there is no such run; the list of runs has their numbers")
            path = self._places[number][0]
        if not path.is_dir():
            raise RunError(f"{path} was removed")
        return path

    def run(self, number: int) -> LiveRun:
        """Return a run by its number."""
        path = self.path(number)
        with self._lock:
            run = self._runs.pop(number, None) or LiveRun(path, self._places[number][1])
            self._runs[number] = run  # the last one is the one used last
            if len(self._runs) > MOST_OPEN:
                del self._runs[next(iter(self._runs))]
            return run
