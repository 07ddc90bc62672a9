"""The runs of a directory, each followed and folded once for all viewers."""

from __future__ import annotations

import threading
from pathlib import Path

from esper.karn.document import Json, clean
from esper.karn.live_run import LiveRun
from esper.leyline.errors import RunError
from esper.leyline.text import printable
from esper.nissa.run import LOCK, MANIFEST
from esper.nissa.run_list import list_runs


class LiveRuns:
    """The runs below a directory, or the run that it is. A run keeps its number as long as the server runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._places: list[tuple[Path, str]] = []  # number → directory and id of the run
        self._runs: dict[int, LiveRun] = {}
        self._lock = threading.Lock()

    def listing(self) -> Json:
        """Return the runs, newest first, as rows with their numbers."""
        is_run = any((self.directory / name).exists() for name in (MANIFEST, LOCK))
        rows = list_runs(self.directory.parent if is_run else self.directory)
        if is_run:
            rows = [row for row in rows if row.path.name == self.directory.resolve().name or row.path == self.directory]
        found = []
        with self._lock:
            for row in rows:
                place = row.path, row.id
                if place not in self._places:
                    self._places.append(place)
                found.append({
                    "id": self._places.index(place), "name": row.path.name, "task": row.task, "status": row.status,
                    "controller": row.controller, "started": row.started, "seconds": row.seconds,
                    "env_steps": row.env_steps, "missing": row.losses,
                })  # fmt: skip
        return clean({"directory": printable(str(self.directory)), "runs": found})

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
            if number not in self._runs:
                self._runs[number] = LiveRun(path)
            return self._runs[number]
