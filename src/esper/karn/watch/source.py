"""Input of the view: finds the run, follows its journal and reads its manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from esper.karn.lenient_manifest import manifest_of, slot_names
from esper.karn.watch import alarm_rules
from esper.karn.watch.find_run import find_run
from esper.karn.watch.model import WatchModel
from esper.leyline.errors import EsperError
from esper.nissa.journal_reader import Entry, Follower, decoded_entry
from esper.nissa.missed_events import JOURNAL, lost_events
from esper.nissa.run import MANIFEST

STATUS_EVERY_S = 2.0
"""Minimum seconds between two reads of the manifest."""


class Source:
    """One run and its model. A run that does not exist yet is waited for."""

    def __init__(self, location: Path, clock: Callable[[], float]) -> None:
        self._location, self._clock = location, clock
        self.run = find_run(location)
        self.model = WatchModel()
        self._follower: Follower[Entry] | None = None
        self._has_named_slots = False
        self._is_caught_up = False
        self._status_at: float | None = None
        self._manifest: dict[str, Any] = {}  # as last read
        self._restarts = 0
        self._changes = 0

    @property
    def name(self) -> str:
        """The name of the run directory, "" if there is none yet."""
        return self.run.resolve().name if self.run is not None else ""

    @property
    def version(self) -> int:
        """A number that changes whenever what is shown may have changed, also by a restart."""
        return self.model.version + self._changes + 1_000_000_000 * self._restarts

    def poll(self) -> list[Entry]:
        """Return the new journal entries. Does not touch the model, so it may run in its own thread."""
        if self.run is None:
            self.run = find_run(self._location)
        if self.run is None:
            return []
        if self._follower is None:
            self._follower = Follower(self.run, decoded_entry)
        return self._follower.poll()

    def feed(self, entries: list[Entry]) -> None:
        """Add entries to the model."""
        if entries and not self._has_named_slots:  # for a run that did not record its slot names
            self._has_named_slots = True
            if names := list(slot_names(self._read_manifest())):
                self.model.name_slots(names)
        self.model.feed(entries, self._clock() if self._is_caught_up else None)

    def caught_up(self) -> None:
        """Mark existing entries as read: later ones are fresh. Read the manifest from time to time."""
        if self.run is None:
            return
        now = self._clock()
        self._is_caught_up = True
        damage = self._follower.damage.lines if self._follower else 0
        quiet = self._status_at is None or alarm_rules.silence_s(self.model, now) > STATUS_EVERY_S
        has_end, is_final = self.model.ending is not None, JOURNAL in self._manifest
        is_stale = is_final and not has_end  # the run may have been resumed since
        due = self._status_at is None or now - self._status_at > STATUS_EVERY_S
        if due and (is_stale or (quiet and not is_final)):
            self._status_at = now
            self._manifest = self._read_manifest()
        status = self._manifest.get("status")
        news = (status if isinstance(status, str) else None, damage, self._losses())
        if news != (self.model.status, self.model.damage, self.model.losses):
            self.model.status, self.model.damage, self.model.losses = news
            self._changes += 1

    def _losses(self) -> list[str]:
        if self._follower is None:
            return []
        extents = self._follower.damage.extents()
        return lost_events(self._manifest, extents, has_end=self.model.ending is not None)

    def _read_manifest(self) -> dict[str, Any]:
        """Return the manifest; empty if it is missing or damaged, since the journal can still be shown."""
        assert self.run is not None
        try:
            manifest, damage = manifest_of(self.run)
        except (EsperError, OSError):
            return {}
        self.model.manifest_damage = damage if (self.run / MANIFEST).exists() else None
        return manifest

    def restart(self) -> None:
        """Read everything again from the beginning. A directory of runs may have a newer run by now."""
        self.run = find_run(self._location)
        self.model, self._follower, self._has_named_slots = WatchModel(), None, False
        self._is_caught_up, self._status_at, self._manifest = False, None, {}
        self._restarts += 1

    def nothing(self, query: str = "") -> str:
        """Return why there is no environment to show."""
        if query:
            return f"no environment matches “{query}”: Esc clears the filter"
        if self.run is None:
            return f"waiting for a run to begin in {self._location}"
        if self.model.losses:
            return f"the journal is incomplete: {'; '.join(self.model.losses)}"
        if self.model.events == 0:
            over = alarm_rules.is_over(alarm_rules.state(self.model, self._clock())[0])
            return "the run ended before its first event" if over else "waiting for the first event"
        return "no environment has begun yet"
