"""The telemetry hub: accepts events from any thread in about 1 µs and passes them to sinks on worker threads.

    emit ──► log: one list, ordered by seq ──► one worker per sink: take a chunk ─► write ─► flush on request

`emit` numbers an event and appends it to the log without waking a thread. Each sink worker (`sink_worker.py`) polls
the log 20 times a second, or at once when the log is half full or a caller waits, and stores its own position. Events
that every active worker has taken leave the log, so a slow sink delays no caller until the log is full. Then callers of
**must-keep** events block (counted and reported). **Gauges** never block: from half full on, the newest value per key
replaces the one a worker has not taken yet (counted; the seq of the replaced one is skipped).

A sink that keeps raising, or stays in one call for `hang_s`, is retired: its unwritten events are dropped and the
other sinks receive a `Health` event. A durable sink (one with `flush()`) is only suspended while its disk is full
or slow: it is retried, callers block once the log is full, and `Health` events mark the start and the end. A suspended
sink is retired only when a time limit set by `close` or `stop_waiting` has expired.

One re-entrant lock guards all state, and waiting releases it completely: a signal handler may close the hub while
the thread it interrupted is inside `emit`.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import itemgetter
from time import monotonic, time
from types import TracebackType
from typing import Any

from esper.leyline.errors import ConfigError, DataError, EsperError
from esper.leyline.events import Event, Health, Level, Number, encode
from esper.nissa.record import Record
from esper.nissa.sink_worker import SinkWorker, fault
from esper.nissa.sinks import Sink

TICK_S = 0.05
"""Polling interval of the sink workers, in seconds. A hard kill loses the events of this interval and of one write."""
GRACE_S = 0.5
"""Extra time for a sink that looks hung, in seconds: after a pause of the whole process every sink looks hung."""
TEXTS = ("retired", "suspended")
"""Fields of `SinkWorker.health` that are text."""

_log = logging.getLogger(__name__)
_seq_of = itemgetter(0)
Numbered = tuple[int, float, Event]  # seq, time, event
_hubs: weakref.WeakSet[NissaHub] = weakref.WeakSet()  # used only in a forked child


class NissaHub:
    """Pass the events of one rank of one run to its sinks.

    level      limits what is recorded, not what is measured
    rank       the rank of this process, stored in every record
    first_seq  seq of the first event, ≥ 0; larger than 0 for a resumed run
    capacity   events held in memory before callers of must-keep events block, ≥ 2
    strict     raise DataError in `emit` if an event cannot be encoded
    hang_s     seconds in one call after which a sink counts as hung, > 0
    """

    def __init__(
        self,
        sinks: Sequence[Sink] = (),
        *,
        level: Level = Level.NORMAL,
        rank: int = 0,
        first_seq: int = 0,
        capacity: int = 65_536,
        strict: bool = False,
        hang_s: float = 5.0,
    ) -> None:
        if capacity < 2:
            raise ConfigError(f"capacity must be ≥ 2 events, got {capacity}")
        if hang_s <= 0:
            raise ConfigError(f"hang_s must be positive, got {hang_s}")
        self._level = level
        self._rank = rank
        self._strict = strict
        self._hang_s = hang_s
        self._capacity = capacity
        self._half = capacity // 2
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._workers: list[SinkWorker] = []
        self._listening = -1  # the level while a sink is active, else below the level of every kind
        self._seq = self._first_seq = first_seq
        self._log: list[Numbered] = []
        self._dead: set[int] = set()  # seqs in the log that were replaced by newer gauges
        self._newest: dict[tuple[Any, ...], int] = {}  # gauge key → seq of its newest value since the log was half full
        self._waiting = 0  # threads that wait for a sink worker
        self._blocked: list[int] = []  # idents of the threads that wait inside emit
        self._closing = self._ending = False
        self._give_up_at = float("inf")  # monotonic time at which suspended sinks are retired
        self._counts = {"coalesced": 0, "waits": 0, "after_close": 0, "peak": 0}
        self._wait_s = 0.0
        self._reported_kinds: set[type[Event]] = set()  # kinds that were reported as unencodable
        _hubs.add(self)
        atexit.register(self.close)
        for sink in sinks:
            self.add_sink(sink)

    # API for callers --------------------------------------------------------------------------------------------

    def wants(self, kind: type[Event]) -> bool:
        """Return whether an event of this kind would be recorded. Check it before building a costly event."""
        return self._listening >= kind.LEVEL

    def emit(self, event: Event) -> None:
        """Number the event and append it to the log. After close the event is ignored and counted."""
        if self._listening < type(event).LEVEL:
            if self._closing:
                with self._lock:
                    self._counts["after_close"] += 1
            return
        if self._strict:
            _refuse_unencodable(event)
        with self._lock:
            if len(self._log) >= self._half and not self._admit(event):
                return
            now = time()
            seq = self._seq  # no signal handler can run between this line and the append
            self._seq = seq + 1
            self._log.append((seq, now, event))

    @property
    def next_seq(self) -> int:
        """The seq of the next event."""
        return self._seq

    def add_sink(self, sink: Sink) -> None:
        """Send events emitted from now on to this sink as well."""
        if not (callable(getattr(sink, "write", None)) and callable(getattr(sink, "close", None))):
            raise ConfigError(f"a sink has write(records) and close(); {type(sink).__name__} has not")
        with self._lock:
            if self._closing:
                raise EsperError(f"cannot add {type(sink).__name__}: the hub is closed. Make a new hub")
            name = type(sink).__name__
            same = sum(type(worker.sink).__name__ == name for worker in self._workers)
            worker = SinkWorker(self, sink, f"{name}-{same + 1}" if same else name, self._seq)
            worker.thread.start()
            self._workers.append(worker)
            self._retune()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything emitted before this call is on disk. Return whether it is.

        Only durable sinks (those with `flush()`) are waited for: a console cannot delay a checkpoint. The result is
        False if a durable sink was retired. A hub without durable sinks waits until its sinks have written.
        """
        with self._lock:
            target = self._seq
            durable = [worker for worker in self._workers if worker.durable]
            workers = durable or self._workers
            for worker in workers:
                worker.flush_target = max(worker.flush_target, target)
            there = self._wait_until(
                lambda: all(worker.retired or worker.flushed >= target for worker in workers), timeout
            )
            return there and not any(worker.retired for worker in durable)

    def close(self, timeout: float = 10.0) -> None:
        """Write the queued events, then the counters as a last `Health` event, and close the sinks. Idempotent.

        Sinks that have not caught up after `timeout` seconds are retired, and that is reported. The others have at
        least one more second to close.
        """
        self.stop_waiting(timeout)
        start = monotonic()
        with self._lock:
            self._closing = True
            self._retune()
            target = self._seq
            if not self._ending and not self._wait_until(self._is_drained, timeout):
                for worker in self._workers:
                    if worker.written < target:
                        self._retire(worker, f"it had not caught up {timeout:g} s after the end")
            if not self._ending:  # another thread may have done this while this one waited
                self._report_totals()
                self._ending = True
            remaining_s = max(1.0, timeout + start - monotonic())
            if not self._wait_until(
                lambda: all(worker.retired or worker.finished for worker in self._workers), remaining_s
            ):
                for worker in self._workers:
                    self._retire(worker, f"its close() took longer than {remaining_s:g} s")
        atexit.unregister(self.close)

    def stop_waiting(self, timeout: float = 10.0) -> None:
        """Retire suspended sinks after `timeout` seconds, so that no caller waits longer. Safe in a signal handler.

        The earliest of several limits applies.
        """
        self._give_up_at = min(self._give_up_at, monotonic() + timeout)

    @property
    def has_lost(self) -> bool:
        """Whether a durable sink was retired."""
        return any(worker.durable and worker.retired for worker in self._workers)

    def _is_drained(self) -> bool:
        """Return whether everything is written and no thread is inside emit, except the one that calls."""
        me = threading.get_ident()
        return all(ident == me for ident in self._blocked) and all(
            worker.retired or worker.written == self._seq for worker in self._workers
        )

    def __enter__(self) -> NissaHub:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def health(self) -> dict[str, Any]:
        """Return the counters of the hub and of every sink."""
        with self._lock:
            self._retire_hung()
            return {
                "emitted": self._seq - self._first_seq,
                **self._counts,
                "wait_s": self._wait_s,
                "unencodable": max((worker.unencodable for worker in self._workers), default=0),
                "queued": len(self._log) - len(self._dead),
                "sinks": {worker.name: worker.health() for worker in self._workers},
            }

    # Back-pressure ----------------------------------------------------------------------------------------------

    def _admit(self, event: Event) -> bool:
        """Return whether to append an event; wait while the log is full.

        Called if the log is half full or no sink is active.
        """
        if self._listening < 0:
            self._counts["after_close"] += self._closing
            return False
        if len(self._log) == self._half:
            self._changed.notify_all()
        if not event.KEEP:
            self._supersede(event)
        elif self._is_full:
            self._wait_while_full()
        return any(not worker.retired for worker in self._workers)

    @property
    def _is_full(self) -> bool:
        return len(self._log) - len(self._dead) >= self._capacity

    def _supersede(self, event: Event) -> None:
        """Replace the previous value of this gauge, for sink workers that have not taken it."""
        key = (type(event), *[getattr(event, name) for name in event.KEY])
        try:
            old, self._newest[key] = self._newest.get(key, -1), self._seq
        except TypeError:  # unhashable key: keep every value
            return
        if behind := [worker for worker in self._workers if not worker.retired and worker.taken <= old]:
            self._dead.add(old)
            self._counts["coalesced"] += 1
            for worker in behind:
                worker.coalesced += 1
            if 2 * len(self._dead) > len(self._log):
                self._log = [each for each in self._log if each[0] not in self._dead]
                self._dead = set()

    def _wait_while_full(self) -> None:
        start = monotonic()
        self._counts["waits"] += 1
        if self._counts["waits"] == 1:
            slowest = min((worker for worker in self._workers if not worker.retired), key=lambda worker: worker.taken)
            text = f"{slowest.name} is {self._seq - slowest.taken} events behind and the queue is full: callers wait"
            self._report("warning", text)
        self._blocked.append(me := threading.get_ident())
        try:
            self._wait_until(lambda: not self._is_full or self._closing, float("inf"))
        finally:
            self._blocked.remove(me)
            self._wait_s += monotonic() - start

    def _wait_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait for `done` up to `timeout` seconds and return whether it holds. Check for hung sinks meanwhile."""
        deadline = monotonic() + timeout
        self._waiting += 1
        self._changed.notify_all()
        try:
            while not done():
                remaining_s = deadline - monotonic()
                if remaining_s <= 0:
                    return False
                self._changed.wait(min(remaining_s, TICK_S))
                self._retire_hung()
            return True
        finally:
            self._waiting -= 1

    # API for sink workers ---------------------------------------------------------------------------------------

    def _take(self, worker: SinkWorker) -> list[Numbered] | None:
        """Wait for and return the worker's next events; [] if only a flush is due, None at the end."""
        with self._lock:
            while True:
                if worker.retired:
                    return None
                if worker.taken < worker.goal:
                    return self._cut(worker)
                if worker.flushed < worker.flush_target <= worker.taken:
                    return []
                if worker.taken == self._seq:
                    if self._ending:
                        return None
                    self._changed.wait(TICK_S)
                elif not (
                    self._closing or worker.flushed < worker.flush_target or self._seq - worker.taken >= self._half
                ):
                    self._changed.wait(TICK_S)
                worker.goal = self._seq
                self._retire_hung()

    def _cut(self, worker: SinkWorker) -> list[Numbered]:
        first = bisect_left(self._log, worker.taken, key=_seq_of)
        chunk = self._log[first : first + worker.chunk]
        worker.taken = self._seq if first + worker.chunk >= len(self._log) else chunk[-1][0] + 1
        if self._dead:
            chunk = [each for each in chunk if each[0] not in self._dead]
        worker.in_hand = len(chunk)
        self._trim()
        return chunk

    def _trim(self) -> None:
        """Remove the events that every active worker has taken, in batches to save time."""
        self._counts["peak"] = max(self._counts["peak"], len(self._log))
        low = min((worker.taken for worker in self._workers if not worker.retired), default=self._seq)
        free = bisect_left(self._log, low, key=_seq_of)
        if free == len(self._log) or free > self._capacity // 64:
            del self._log[:free]
            if self._dead:
                self._dead = {seq for seq in self._dead if seq >= low}
            self._moved()

    def _moved(self) -> None:
        if self._waiting:
            self._changed.notify_all()

    def _report_unencodable(self, records: list[Record]) -> None:
        """Report the first unencodable event of each kind. The others are only counted."""
        with self._lock:
            for record in records:
                kind = type(record.event)
                if kind not in self._reported_kinds:
                    self._reported_kinds.add(kind)
                    self._report("error", f"{kind.__name__} with seq {record.seq} cannot be recorded: {fault(record)}")

    def _retire_hung(self) -> None:
        """Retire hung sinks, suspend hung durable sinks, and retire suspended sinks whose time limit has expired."""
        now = monotonic()
        for worker in self._workers:
            if worker.suspended and now >= self._give_up_at:
                self._retire(worker, f"it was still suspended at the end: {worker.suspended}")
            since = worker.busy_since
            if since is None or worker.retired or worker.suspended or now - since < self._hang_s:
                continue
            if worker.suspected != since:
                worker.suspected, worker.suspected_at = since, now
            elif now - worker.suspected_at >= min(GRACE_S, self._hang_s):
                why = f"it did not return for {now - since:.1f} s"
                worker.suspend(why) if worker.durable else self._retire(worker, why)

    def _retire(self, worker: SinkWorker, why: str) -> None:
        """Stop using this sink, and report it to the others."""
        with self._lock:
            if worker.retired or worker.finished:
                return
            worker.retired = why
            rest = self._log[bisect_left(self._log, worker.taken, key=_seq_of) :]
            worker.given_up = worker.in_hand + sum(each[0] not in self._dead for each in rest)
            self._retune()
            self._trim()
            missed = f". It misses {worker.given_up} queued events" if worker.given_up else ""
            self._report("error", f"sink {worker.name} was retired: {why}{missed}", also_log=worker.durable)
            self._changed.notify_all()

    def _retune(self) -> None:
        is_active = not self._closing and any(not worker.retired for worker in self._workers)
        self._listening = int(self._level) if is_active else -1
        self._half = self._capacity // 2 if is_active else 0  # 0: `emit` always calls `_admit`

    def _report(
        self, severity: str, text: str, counters: dict[str, Number] | None = None, *, also_log: bool = False
    ) -> None:
        """Emit a `Health` event regardless of capacity. Log it too if `also_log`, or instead if no sink can take it."""
        alone = self._ending or self._level < Health.LEVEL or all(worker.retired for worker in self._workers)
        if (alone and severity != "info") or also_log:
            _log.warning("telemetry: %s", text)
        if alone:
            return
        event = Health(source="hub", severity=severity, text=text, counters=counters or {})
        self._log.append((self._seq, time(), event))
        self._seq += 1

    def _report_totals(self) -> None:
        health = self.health()
        sinks = health.pop("sinks")
        lost = sum(each["given_up"] for each in sinks.values()) + health["unencodable"]
        notes = [
            *([f"{lost} not written by sinks that failed"] if lost else []),
            *([f"callers waited {health['waits']} times, {health['wait_s']:.2f} s"] if health["waits"] else []),
            *([f"{health['coalesced']} gauges replaced by newer ones"] if health["coalesced"] else []),
        ]
        counters: dict[str, Number] = {name: float(value) for name, value in health.items()}
        for name, each in sinks.items():
            counters |= {f"{name}.{key}": float(value) for key, value in each.items() if key not in TEXTS}
        text = f"{health['emitted']} events; " + ("; ".join(notes) or "no event lost, no caller waited")
        self._report("warning" if lost else "info", text, counters)

    def _forget(self) -> None:
        """Disable the hub in a forked child: its worker threads do not exist there, and its sinks are the parent's."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closing = self._ending = True
        self._listening = -1
        self._half = 0
        for worker in self._workers:
            worker.busy_since = None
            worker.finished = True


def _refuse_unencodable(event: Event) -> None:
    try:
        encode(event)
    except Exception as error:
        kind = type(event).__name__
        raise DataError(
            f"{kind} cannot be recorded: {error}. Events hold plain numbers, words and tuples: "
            "use .item() or float() on what comes out of a tensor or an array"
        ) from error


def _forget_all() -> None:
    for hub in list(_hubs):
        hub._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
