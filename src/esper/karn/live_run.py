"""One run that is followed while it is written, and its state. Safe to use from several threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from esper.karn.document import Json, clean, detail, document, rounded
from esper.karn.episode_state import STEP_COLUMNS
from esper.karn.lenient_manifest import manifest_of
from esper.karn.run_state import RunState
from esper.karn.series import grouped, to_array
from esper.leyline.errors import RunError
from esper.leyline.events import Step
from esper.nissa.journal_rows import PORTION, follow, replay
from esper.nissa.run import MANIFEST

POLL_S = 0.5
"""Least seconds between two looks at the journal of a run, whatever the number of viewers."""
STATUS_S = 2.0
"""Least seconds between two reads of its manifest."""
MOST_ROWS = 4096
"""Maximum number of rows of a zoomed curve."""


class LiveRun:
    """One run and its state. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._follower = follow(path)
        self.state = RunState(path)
        self.state.damage = self._follower.damage
        self._polled_at = self._manifest_at = -1e9
        self._run_id: str | None = None

    def document(self, since: int = 0) -> Json | None:
        """Return what changed after the first `since` events; None if nothing did. 0 returns everything."""
        with self._lock:
            status = self.state.status
            self.refresh()
            if 0 < since == self.state.position and status == self.state.status:
                return None
            return document(self.state, since if since <= self.state.position else 0)

    def detail(self, env: int | None) -> Json | None:
        """Return stages, alpha, worth and seed lives of an environment, or of the best episode; None if absent."""
        with self._lock:
            self.refresh()
            return detail(self.state, env)

    def rows(self, env: int, episode: int, by: str, first: float, last: float) -> Json:
        """Return the steps of an episode within a range at full resolution, read from the journal."""
        rows = []
        at = STEP_COLUMNS.index(by)
        names = [name for name in STEP_COLUMNS if name != "position"]
        for row in replay(self.path, [Step]):
            if row.env == env and row.episode == episode:
                values = tuple(getattr(row, name) for name in names)
                if values[at] is not None and first <= values[at] <= last:
                    rows.append(values)
        table = to_array(rows, len(names))
        stride = 1 << max(0, (len(rows) - 1) // MOST_ROWS).bit_length()
        low, high = grouped(table, stride)
        found = {"at": 0, "stride": stride, "episode": episode, "columns": _columns(names, high)}
        return clean(found | ({"low": _columns(names, low)} if stride > 1 else {}))

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
                self.state = RunState(self.path, manifest)  # with its slot names
                self.state.damage = self._follower.damage
            self.state.manifest = manifest
            self.state.manifest_damage = damage if (self.path / MANIFEST).exists() else None  # it may not be copied yet
        if is_forced or now - self._polled_at >= POLL_S:
            self._polled_at = now
            while rows := self._follower.poll(PORTION):
                self.state.fold(rows)


def _columns(names: list[str], table: Any) -> Json:
    return {
        name: rounded(table[:, i]) for i, name in enumerate(names) if i == 0 or not np.isnan(table[:, i]).all()
    }  # fmt: skip
