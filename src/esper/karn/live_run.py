"""Runs that are followed while they are written: `LiveRun` is one run and its state, `LiveRuns` those of a directory.

Each run is followed and folded once for all viewers. Both classes are safe to use from several threads.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from esper.karn.document import Json, clean, columns, detail, document
from esper.karn.episode_state import STEP_COLUMNS
from esper.karn.run_state import RunState
from esper.karn.series import grouped, to_array
from esper.leyline.errors import RunError
from esper.leyline.events import Step
from esper.leyline.text import printable
from esper.nissa.journal_rows import PORTION, follow, replay
from esper.nissa.run import LOCK, MANIFEST
from esper.nissa.run_list import Data, RunInfo, manifest_of, newest_first, run_directories, run_info

POLL_S = 0.5
"""Minimum seconds between two reads of a run's journal, for any number of viewers."""
STATUS_S = 2.0
"""Least seconds between two reads of its manifest."""
MOST_ROWS = 4096
"""Maximum number of rows of a zoomed curve."""


class Cursor(NamedTuple):
    """Which document a viewer has: that of the first `position` events of a version of the journal."""

    position: int = 0
    version: str | None = None
    """None if the viewer did not send it."""
    status: str | None = None
    """Status of the run in it. It may change without an event: when a run is killed."""


class LiveRun:
    """One run and its state, shown under `name` instead of the directory's. Safe to use from several threads."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self._name = name
        self._lock = threading.Lock()
        self._restarts = -1
        self._restart({})
        self._polled_at = self._manifest_at = -1e9
        self._run_id: str | None = None

    def _restart(self, manifest: Data) -> None:
        """Begin to read the journal, with an empty state."""
        self._restarts += 1
        self._follower = follow(self.path)
        self._empty_state(manifest)

    def _empty_state(self, manifest: Data) -> None:
        self.state = RunState(self.path, manifest)
        self.state.damage = self._follower.damage
        if self._name is not None:
            self.state.name = printable(self._name)

    @property
    def version(self) -> str:
        """What identifies the journal that was read. A document of another version cannot be extended."""
        return f"{self._restarts} {self.state.first_s}"

    def document(self) -> Json:
        """Return the whole document of the run."""
        with self._lock:
            self.refresh()
            return self._document(0)

    def changes(self, cursor: Cursor) -> Json | None:
        """Return what changed since a viewer's document; None if nothing did."""
        with self._lock:
            self.refresh()
            is_same = cursor.version in (None, self.version) and cursor.position <= self.state.position
            if is_same and cursor.position == self.state.position and cursor.status in (None, self.state.status):
                return None
            return self._document(cursor.position if is_same else 0)

    def _document(self, since: int) -> Json:
        return document(self.state, since) | {"version": self.version}

    def detail(self, env: int | None) -> Json | None:
        """Return stages, alpha, worth and seed lives of an environment, or of the best episode; None if absent."""
        with self._lock:
            self.refresh()
            return detail(self.state, env)

    def rows(self, env: int, episode: int, by: str, first: float, last: float) -> Json:
        """Return the steps of an episode within a range at full resolution, read from the journal."""
        rows = []
        at = STEP_COLUMNS.index(by)
        names = STEP_COLUMNS[:-1]  # without the position
        for row in replay(self.path, [Step]):
            if row.env == env and row.episode == episode:
                values = tuple(getattr(row, name) for name in names)
                if values[at] is not None and first <= values[at] <= last:
                    rows.append(values)
        table = to_array(rows, len(names))
        stride = 1 << max(0, (len(rows) - 1) // MOST_ROWS).bit_length()
        low, high = grouped(table, stride)
        series = {"at": 0, "stride": stride, "episode": episode, "columns": columns(names, high)}
        return clean(series | ({"low": columns(names, low)} if stride > 1 else {}))

    def refresh(self, *, is_forced: bool = False) -> None:
        """Fold what was written since the last call, at most once per POLL_S unless forced.

        Raise RunError if the directory was removed, or has another run now.
        """
        now = time.monotonic()
        if is_forced or now - self._manifest_at >= STATUS_S:
            self._manifest_at = now
            manifest, damage = manifest_of(self.path)
            run_id = manifest.get("run_id", self._run_id)
            if self._run_id not in (None, run_id):
                raise RunError(f"{self.path} has another run now; the list of runs has it")
            self._run_id = run_id
            if self.state.position == 0 and not self.state.manifest:
                self._empty_state(manifest)  # with its slot names
            self.state.manifest = manifest
            self.state.manifest_damage = damage if (self.path / MANIFEST).exists() else None  # it may not be copied yet
        if is_forced or now - self._polled_at >= POLL_S:
            self._polled_at = now
            if self._follower.is_replaced():
                self._restart(self.state.manifest)
            while rows := self._follower.poll(PORTION):
                self.state.fold(rows)


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
