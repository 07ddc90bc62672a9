"""A lane: one sink, its thread, and how far it has come in the hub's log.

A sink that raises is given the same records again, and retired after three failures in a row: so a record may reach it
twice, with the same seq, but none is lost to a moment's trouble.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from esper.leyline.events import encode
from esper.nissa.record import Record
from esper.nissa.sinks import Sink

if TYPE_CHECKING:
    from esper.nissa.hub import NissaHub

CHUNKS = (16, 256)
"""Records per write, at first and at most: encoding 256 holds the interpreter for less than a millisecond."""
FAILURES = 3
PAUSES_S = (0.05, 0.2)
"""Between the tries of a failing sink: a moment's trouble passes."""


class Lane:
    """One sink, its thread, and how far it has come. Seqs here are exclusive ends: the first not yet …"""

    def __init__(self, hub: NissaHub, sink: Sink, name: str, start: int) -> None:
        self.hub, self.sink, self.name = hub, sink, name
        self.durable = callable(getattr(sink, "flush", None))
        self.goal = self.taken = self.written = self.flushed = self.flush_asked = start
        self.chunk, self.in_hand = CHUNKS[0], 0
        self.busy_since: float | None = None  # since when it is inside one call of the sink
        self.suspected: float | None = None  # the call that looks hung, by its `busy_since`
        self.suspected_at = 0.0
        self.retired = ""  # why
        self.finished = False
        self.events = self.coalesced = self.failures = self.given_up = self.unencodable = 0
        self.thread = threading.Thread(target=self._run, name=f"nissa-{name}", daemon=True)

    def health(self) -> dict[str, Any]:
        return {
            "retired": self.retired,
            "written": self.events,
            "coalesced": self.coalesced,
            "failures": self.failures,
            "given_up": self.given_up,
            "unencodable": self.unencodable,
        }

    def _run(self) -> None:
        hub = self.hub
        while (taken := hub._take(self)) is not None:
            if self._write([Record(seq, time_s, hub._rank, event) for seq, time_s, event in taken]):
                self._flush_if_asked()
            with hub._lock:
                hub._moved()
        try:
            self.busy_since = monotonic()
            self.sink.close()
        except BaseException as error:
            self.failures += 1
            hub._retire(self, f"it raised {error!r} when it was closed")
        with hub._lock:
            self.busy_since = None
            self.flushed = self.written
            self.finished = True
            hub._moved()

    def _write(self, records: list[Record]) -> bool:
        if records:
            start = monotonic()
            if not self._attempt(self.sink.write, records):
                return False
            took = monotonic() - start
            if took > self.hub._hang_s / 8:
                self.chunk = max(1, self.chunk // 4)  # a slow sink must not look like a hung one
            elif took < self.hub._hang_s / 64:
                self.chunk = min(CHUNKS[1], self.chunk * 2)
        self.events += self.in_hand
        self.in_hand = 0
        self.written = self.taken
        return True

    def _flush_if_asked(self) -> None:
        if self.flushed < self.flush_asked <= self.written:
            upto = self.written
            if not self.durable or self._attempt(lambda _: self.sink.flush(), []):  # type: ignore[attr-defined]
                self.flushed = upto

    def _attempt(self, work: Callable[[list[Record]], None], records: list[Record]) -> bool:
        """Do it, again if it fails; whether it was done. Records that cannot be encoded are nobody's failure."""
        failed = 0
        while not self.retired:
            self.busy_since = monotonic()
            try:
                work(records)
                return not self.retired
            except BaseException as error:
                why = repr(error)
            finally:
                self.busy_since = None
            if broken := [record for record in records if fault(record)]:
                self.unencodable += len(broken)
                self.hub._report_unencodable(broken)
                seqs = {record.seq for record in broken}
                records = [record for record in records if record.seq not in seqs]
                self.in_hand = len(records)
                if not records:
                    return True
                continue
            failed += 1
            self.failures += 1
            if failed == FAILURES:
                self.hub._retire(self, f"{FAILURES} failures in a row, the last {why}")
                break
            sleep(PAUSES_S[failed - 1])
        return False


def fault(record: Record) -> str:
    """Why no journal can hold this record; "" if one can."""
    try:
        encode(record.event)
    except Exception as error:
        return repr(error)
    return ""
