"""The sink worker: one sink, its thread, and its position in the hub's log.

A sink that raises gets the same records again. A durable sink that raises OSError (a full disk, for example) is
suspended: the worker retries with back-off until the sink recovers or the hub is closed. Any other failing sink is
retired after three failures in a row.
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
    from esper.nissa.hub import NissaHub, Numbered

CHUNKS = (16, 256)
"""Records per write, initial and maximal. Encoding 256 records holds the interpreter lock for less than 1 ms."""
FAILURES = 3
"""Failures in a row after which a sink is retired."""
PAUSES_S = (0.05, 0.2)
"""Pauses between the attempts of a failing sink, in seconds."""
BACK_OFF_S = (0.05, 2.0)
"""Pauses between the attempts of a durable sink, in seconds: the first, doubled after each failure, and the longest."""


class SinkWorker:
    """One sink, its thread, and its position in the log. All seqs are exclusive ends."""

    def __init__(self, hub: NissaHub, sink: Sink, name: str, start: int) -> None:
        self.hub = hub
        self.sink = sink
        self.name = name
        self.durable = callable(getattr(sink, "flush", None))
        self.goal = self.taken = self.written = self.flushed = self.flush_target = self.next = start
        self.chunk = CHUNKS[0]
        self.in_hand = 0
        self.busy_since: float | None = None  # start of the current call of the sink
        self.suspected: float | None = None  # `busy_since` of the call that looks hung
        self.suspected_at = 0.0
        self.retired = ""  # the reason, "" if it is not
        self.suspended = ""  # the reason; only for durable sinks, until a call returns or succeeds
        self.finished = False
        self.events = self.coalesced = self.failures = self.given_up = self.unencodable = 0
        self.thread = threading.Thread(target=self._run, name=f"nissa-{name}", daemon=True)

    def health(self) -> dict[str, Any]:
        """Return the state and the counters of this sink."""
        return {
            "retired": self.retired,
            "suspended": self.suspended,
            "written": self.events,
            "coalesced": self.coalesced,
            "failures": self.failures,
            "given_up": self.given_up,
            "unencodable": self.unencodable,
        }

    def _run(self) -> None:
        hub = self.hub
        while (chunk := hub._take(self)) is not None:
            if self._write(self._records(chunk)):
                self._flush_if_due()
            with hub._lock:
                hub._moved()
        if self.durable:
            self._attempt(self._flush, [])
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

    def _records(self, chunk: list[Numbered]) -> list[Record]:
        """Return the events as records. `replaced` counts the seqs before an event whose gauges were replaced."""
        records = []
        for seq, time_s, event in chunk:
            records.append(Record(seq, time_s, self.hub._rank, event, seq - self.next))
            self.next = seq + 1
        return records

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

    def _flush_if_due(self) -> None:
        if self.flushed < self.flush_target <= self.written:
            upto = self.written
            if not self.durable or self._attempt(self._flush, []):
                self.flushed = upto

    def _flush(self, _: list[Record]) -> None:
        self.sink.flush()  # type: ignore[attr-defined]

    def _attempt(self, work: Callable[[list[Record]], None], records: list[Record]) -> bool:
        """Call `work` until it succeeds or the sink is retired; return whether it did. Drop unencodable records."""
        failed = refused = 0
        while not self.retired:
            self.busy_since = monotonic()
            try:
                work(records)
                self._recover()
                return not self.retired
            except BaseException as error:
                why = repr(error)
                is_disk = isinstance(error, OSError)
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
            self.failures += 1
            if self.durable and is_disk:
                refused += 1
                self._back_off(refused, why)
                continue
            failed += 1
            if failed == FAILURES:
                self.hub._retire(self, f"{FAILURES} failures in a row, the last {why}")
                break
            sleep(PAUSES_S[failed - 1])
        return False

    def _back_off(self, refused: int, why: str) -> None:
        """Wait before the next attempt, less if the hub is closing. Report from the second failure in a row on."""
        if refused > 1:
            self.suspend(why)
        first, longest = BACK_OFF_S
        end = monotonic() + min(longest, first * 2.0 ** min(refused - 1, 30))
        hub = self.hub
        with hub._lock:
            while not self.retired and (remaining_s := end - monotonic()) > 0:
                hub._changed.wait(min(remaining_s, first))
                hub._retire_hung()
                if hub._closing:
                    return

    def suspend(self, why: str) -> None:
        """Report, once, that a durable sink cannot write at present."""
        with self.hub._lock:
            if self.suspended or self.retired:
                return
            self.suspended = why
            self.hub._report(
                "warning",
                f"sink {self.name} is suspended: {why}. Events are kept in memory and writing is retried; once "
                f"{self.hub._capacity} of them wait, training waits too",
                also_log=True,
            )

    def _recover(self) -> None:
        if self.suspended:
            with self.hub._lock:
                if not self.retired:
                    self.suspended = ""
                    self.hub._report("warning", f"sink {self.name} writes again: nothing was lost", also_log=True)


def fault(record: Record) -> str:
    """Return why this record cannot be encoded, "" if it can."""
    try:
        encode(record.event)
    except Exception as error:
        return repr(error)
    return ""
