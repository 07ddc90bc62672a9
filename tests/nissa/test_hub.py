"""Guarantees of the hub: must-keep events are not lost, order is kept, no sink affects another sink or the caller."""

import logging
import os
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.errors import ConfigError, DataError, EsperError
from esper.leyline.events import GovernorAlarm, Gradient, Health, Level, PhaseProfile, RunFinished, Step
from esper.nissa.hub import NissaHub
from esper.nissa.journal_reader import read
from esper.nissa.journal_writer import JsonlSink
from tests.support.journal_checks import missing_seqs

PATIENCE = 60.0  # for waits that end by themselves: only a failing test reaches it


def keep(step, env=0, value=None):
    return GovernorAlarm(env=env, episode=0, step=step, alarm="none", action="none", value=value)


def gauge(calls, phase="train"):
    return PhaseProfile(phase=phase, wall_ms=1.0, cpu_ms=1.0, calls=calls)


class ListSink:
    """A sink that stores its events in a list."""

    def __init__(self):
        self.records, self.closed, self.threads = [], 0, set()

    def write(self, records):
        self.threads.add(threading.current_thread())
        self.records += records

    def close(self):
        self.closed += 1

    @property
    def seqs(self):
        return [record.seq for record in self.records]

    def of(self, kind):
        return [record.event for record in self.records if isinstance(record.event, kind)]


class SlowSink(ListSink):
    def write(self, records):
        time.sleep(2e-5 * len(records))
        super().write(records)


class RaisingSink(ListSink):
    def write(self, _records):
        raise OSError("no space left")


class GatedSink(ListSink):
    """A sink that blocks in `write` until its gate is opened."""

    def __init__(self):
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()

    def write(self, records):
        self.entered.set()
        self.gate.wait()
        super().write(records)


class DurableSink(ListSink):
    def __init__(self):
        super().__init__()
        self.flushed = 0

    def flush(self):
        self.flushed = len(self.records)


def blocked(sink, **settings):
    """Return a hub whose only sink has taken one event and blocks at its gate."""
    hub = NissaHub([sink], hang_s=PATIENCE, **settings)
    hub.emit(keep(0))
    assert sink.entered.wait(PATIENCE)
    return hub


def wait_until(done):
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Delivery -------------------------------------------------------------------------------------------------------


def test_events_arrive_in_order_numbered_and_from_another_thread():
    sink = ListSink()
    with NissaHub([sink], rank=3, first_seq=40) as hub:
        for step in range(500):
            hub.emit(keep(step))
    assert sink.seqs == list(range(40, 541))
    assert [event.step for event in sink.of(GovernorAlarm)] == list(range(500))
    assert {record.rank for record in sink.records} == {3}
    assert all(a.time_s <= b.time_s for a, b in pairwise(sink.records))
    assert threading.current_thread() not in sink.threads
    assert len(sink.threads) == 1
    assert sink.closed == 1


def test_caller_does_not_format_encode_or_write():
    me = threading.current_thread()

    class TextOfAnotherThread(str):
        def __str__(self):
            assert threading.current_thread() is not me
            return super().__str__()

    sink = ListSink()
    with NissaHub([sink]) as hub:
        hub.emit(RunFinished(status=TextOfAnotherThread("finished"), wall_s=1.0, env_steps=1))
        hub.emit(keep(np.float32(1)))  # cannot be encoded: a caller that only enqueues does not notice
        assert hub.flush()
    assert me not in sink.threads


def test_burst_beside_slow_raising_and_hanging_sinks_loses_nothing(tmp_path):
    slow, raising, hanging = SlowSink(), RaisingSink(), GatedSink()
    hub = NissaHub([hanging, JsonlSink(tmp_path / "events"), raising, slow], capacity=1_000, hang_s=0.3)
    for step in range(5_000):
        hub.emit(keep(step))
    assert hub.flush(PATIENCE)
    hub.close(PATIENCE)

    entries = list(read(tmp_path))
    journal = [entry.data["step"] for entry in entries if entry.kind == "governor"]
    assert journal == list(range(5_000)) == [event.step for event in slow.of(GovernorAlarm)]
    assert not missing_seqs(entries)
    assert slow.seqs == [entry.seq for entry in entries]

    health = hub.health()
    assert health["waits"] > 0
    assert health["wait_s"] > 0
    assert "3 failures in a row" in health["sinks"]["RaisingSink"]["retired"]
    assert "did not return" in health["sinks"]["GatedSink"]["retired"]
    assert health["sinks"]["GatedSink"]["given_up"] > 0
    assert not health["sinks"]["SlowSink"]["retired"]
    texts = [event.text for event in slow.of(Health)]
    assert sum("RaisingSink was retired" in text for text in texts) == 1
    assert sum("GatedSink was retired" in text for text in texts) == 1
    assert sum("is full: callers wait" in text for text in texts) == 1
    hanging.gate.set()


def test_order_is_kept_per_thread_and_numbers_have_no_gaps():
    sinks = [ListSink(), SlowSink()]

    def work(env):
        for step in range(1_000):
            hub.emit(keep(step, env=env))

    with NissaHub(sinks, capacity=256) as hub:
        threads = [threading.Thread(target=work, args=(env,)) for env in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for sink in sinks:
        assert sink.seqs == list(range(len(sink.seqs)))
        for env in range(8):
            assert [e.step for e in sink.of(GovernorAlarm) if e.env == env] == list(range(1_000))


# Interest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", Level)
def test_kind_is_wanted_from_its_level_on(level):
    sink = ListSink()
    with NissaHub([sink], level=level) as hub:
        assert hub.wants(GovernorAlarm) == (level >= Level.MINIMAL)
        assert hub.wants(Step) == hub.wants(Gradient) == (level >= Level.NORMAL)
        hub.emit(keep(0))
        hub.emit(Gradient(env=0, episode=0, step=0, slot="a", norm=1.0, ratio=1.0, health=1.0))
    assert len(sink.of(GovernorAlarm)) == (level >= Level.MINIMAL)
    assert len(sink.of(Gradient)) == (level >= Level.NORMAL)
    assert len(sink.of(Health)) == (level >= Level.MINIMAL)


def test_nothing_is_wanted_without_an_active_sink():
    hub = NissaHub()
    assert not hub.wants(GovernorAlarm)
    hub.emit(keep(0))
    assert hub.health()["emitted"] == hub.health()["after_close"] == 0
    hub.add_sink(RaisingSink())
    assert hub.wants(GovernorAlarm)
    hub.emit(keep(1))
    wait_until(lambda: not hub.wants(GovernorAlarm))
    hub.emit(keep(2))
    assert hub.health()["queued"] == 0
    hub.add_sink(late := ListSink())
    hub.emit(keep(3))
    hub.close()
    assert [event.step for event in late.of(GovernorAlarm)] == [3]


def test_two_sinks_of_one_class_get_distinct_names():
    with NissaHub([ListSink(), ListSink(), ListSink()]) as hub:
        assert list(hub.health()["sinks"]) == ["ListSink", "ListSink-2", "ListSink-3"]


@pytest.mark.parametrize("nonsense", [{"capacity": 1}, {"hang_s": 0.0}])
def test_invalid_arguments_are_refused(nonsense):
    with pytest.raises(ConfigError):
        NissaHub(**nonsense)


# Backpressure ---------------------------------------------------------------------------------------------------


def test_full_queue_blocks_the_caller_and_counts_it():
    sink = GatedSink()
    hub = blocked(sink, capacity=4)
    done = threading.Event()

    def work():
        for step in range(1, 20):
            hub.emit(keep(step))
        done.set()

    threading.Thread(target=work, daemon=True).start()
    wait_until(lambda: hub.health()["waits"] > 0)
    assert not done.wait(0.1)
    assert hub.health()["emitted"] == 1 + 4 + 1  # taken, queued, and the report that callers wait
    sink.gate.set()
    assert done.wait(PATIENCE)
    hub.close()
    assert [event.step for event in sink.of(GovernorAlarm)] == list(range(20))
    last = sink.records[-1].event
    assert last.counters["waits"] == hub.health()["waits"] >= 1
    assert "callers waited" in last.text


def test_under_pressure_the_newest_gauge_wins_and_replacements_are_counted():
    sink = GatedSink()
    hub = blocked(sink, capacity=8)
    for calls in range(100):  # more than the queue holds: gauges never wait
        hub.emit(gauge(calls))
    hub.emit(gauge(-1, phase="validate"))
    assert hub.health()["queued"] < 8
    sink.gate.set()
    hub.close()
    assert [e.calls for e in sink.of(PhaseProfile) if e.phase == "train"] == [0, 1, 2, 3, 99]
    assert [e.calls for e in sink.of(PhaseProfile) if e.phase == "validate"] == [-1]
    assert hub.health()["coalesced"] == hub.health()["sinks"]["GatedSink"]["coalesced"] == 95
    assert set(range(102)) - set(sink.seqs) == set(range(5, 100))  # gaps where gauges were replaced
    assert "95 gauges replaced" in sink.records[-1].event.text


def test_gauge_is_replaced_only_for_the_sink_that_lags():
    gated, quick = GatedSink(), ListSink()
    hub = blocked(gated, capacity=8)
    hub.add_sink(quick)
    for calls in range(30):
        hub.emit(gauge(calls))
        wait_until(lambda: hub.health()["sinks"]["ListSink"]["written"] > calls)  # noqa: B023
    gated.gate.set()
    hub.close()
    assert [event.calls for event in quick.of(PhaseProfile)] == list(range(30))
    assert [event.calls for event in gated.of(PhaseProfile)] == [0, 1, 2, 3, 29]
    sinks = hub.health()["sinks"]
    assert (sinks["ListSink"]["coalesced"], sinks["GatedSink"]["coalesced"]) == (0, 25)


def coalesced_reference(events, half):
    """Return which of the events are delivered if no sink takes any meanwhile."""
    queue, newest = [], {}
    for event in events:
        if len(queue) >= half and not event.KEEP:
            if event.phase in newest:
                queue = [each for each in queue if each is not newest[event.phase]]
            newest[event.phase] = event
        queue.append(event)
    return queue


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["", "train", "validate", "worth"]), max_size=60), st.integers(0, 10))
def test_coalescing_equals_the_reference(phases, half):
    events = [gauge(i, phase) if phase else keep(i) for i, phase in enumerate(phases)]
    sink = GatedSink()
    hub = blocked(sink, capacity=64)
    hub._half = half
    for event in events:
        hub.emit(event)
    sink.gate.set()
    hub.close()
    assert [record.event for record in sink.records[1:-1]] == coalesced_reference(events, half)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["", "", "train", "validate"]), max_size=150), min_size=1, max_size=4),
    st.integers(2, 40),
)
def test_guarantees_hold_for_any_schedule(schedules, capacity):
    sinks = [ListSink(), SlowSink()]
    hub = NissaHub(sinks, capacity=capacity)

    def work(env, phases):
        for i, phase in enumerate(phases):
            hub.emit(gauge(i, f"{phase}{env}") if phase else keep(i, env=env))

    threads = [threading.Thread(target=work, args=each) for each in enumerate(schedules)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hub.close(PATIENCE)
    health = hub.health()
    for sink, name in zip(sinks, health["sinks"], strict=True):
        assert sink.seqs == sorted(set(sink.seqs))
        assert health["emitted"] == len(sink.seqs) + health["sinks"][name]["coalesced"]
        for env, phases in enumerate(schedules):
            steps = [event.step for event in sink.of(GovernorAlarm) if event.env == env]
            assert steps == [i for i, phase in enumerate(phases) if not phase]
            for phase in {each for each in phases if each}:
                newest = max(i for i, each in enumerate(phases) if each == phase)
                assert [e.calls for e in sink.of(PhaseProfile) if e.phase == f"{phase}{env}"][-1] == newest
    assert health["queued"] == 0


# Failing sinks --------------------------------------------------------------------------------------------------


def test_transient_failure_loses_nothing():
    class FlakySink(ListSink):
        tries = 0

        def write(self, records):
            self.tries += 1
            if self.tries % 3:
                raise OSError("try again")
            super().write(records)

    with NissaHub([sink := FlakySink()]) as hub:
        for step in range(100):
            hub.emit(keep(step))
    assert [event.step for event in sink.of(GovernorAlarm)] == list(range(100))
    assert hub.health()["sinks"]["FlakySink"]["failures"] == sink.tries * 2 // 3
    assert not hub.health()["sinks"]["FlakySink"]["retired"]


def test_hanging_sink_is_retired_and_no_longer_waited_for():
    hanging, healthy = GatedSink(), ListSink()
    hub = NissaHub([hanging, healthy], capacity=16, hang_s=0.2)
    for step in range(200):
        hub.emit(keep(step))
    hub.close()
    assert [event.step for event in healthy.of(GovernorAlarm)] == list(range(200))
    assert hub.health()["sinks"]["GatedSink"]["retired"]
    lost = hub.health()["sinks"]["GatedSink"]["given_up"]
    assert any(f"misses {lost} queued events" in event.text for event in healthy.of(Health))
    assert healthy.records[-1].event.severity == "warning"
    hanging.gate.set()
    wait_until(lambda: hanging.closed)  # when `write` returns, its own thread closes it


def test_slow_sink_is_not_treated_as_hung():
    class SleepingSink(ListSink):
        def write(self, records):
            time.sleep(0.02 * len(records))  # 0.3 s at most per call, 2 s together
            super().write(records)

    with NissaHub([sink := SleepingSink()], hang_s=1.0) as hub:
        for step in range(100):
            hub.emit(keep(step))
    assert len(sink.of(GovernorAlarm)) == 100
    assert not hub.health()["sinks"]["SleepingSink"]["retired"]


def test_retiring_the_last_sink_is_logged(caplog):
    with caplog.at_level(logging.WARNING), NissaHub([RaisingSink()]) as hub:
        hub.emit(keep(0))
        assert hub.flush()
    assert "RaisingSink was retired" in caplog.text
    assert hub.health()["sinks"]["RaisingSink"]["failures"] == 3


def test_sink_that_fails_to_close_affects_no_other():
    class RaisingAtCloseSink(ListSink):
        def close(self):
            raise OSError("still busy")

    with NissaHub([failing := RaisingAtCloseSink(), other := ListSink()]) as hub:
        hub.emit(keep(0))
    assert failing.seqs == other.seqs == [0, 1]
    assert other.closed == 1
    assert "still busy" in hub.health()["sinks"]["RaisingAtCloseSink"]["retired"]


# Events that cannot be written ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [np.float64(1), np.zeros(2), object(), "\ud800"], ids=["numpy", "array", "object", "surrogate"]
)
def test_strict_hub_refuses_unencodable_events_at_once(value):
    with NissaHub([sink := ListSink()], strict=True) as hub:
        with pytest.raises(DataError, match="GovernorAlarm cannot be recorded"):
            hub.emit(keep(0, value=value))
        hub.emit(keep(1))
    assert [event.step for event in sink.of(GovernorAlarm)] == [1]
    assert sink.seqs == [0, 1]  # the refused event took no number


def test_lenient_hub_counts_and_reports_unencodable_events(tmp_path):
    hub = NissaHub([JsonlSink(tmp_path / "events")])
    for step in range(50):
        hub.emit(keep(step, value=np.float32(1) if step % 10 == 3 else 1.0))
    assert hub.flush()
    hub.close()
    entries = list(read(tmp_path))
    assert [e.data["step"] for e in entries if e.kind == "governor"] == [i for i in range(50) if i % 10 != 3]
    result = [e.data["text"] for e in entries if e.kind == "health"]
    assert sum("cannot be recorded" in text for text in result) == 1
    assert hub.health()["unencodable"] == 5
    assert hub.health()["sinks"]["JsonlSink"]["failures"] == 0


def test_gauge_with_an_unhashable_key_is_kept():
    sink = GatedSink()
    hub = blocked(sink, capacity=8)
    for calls in range(20):
        hub.emit(gauge(calls, phase=[]))
    sink.gate.set()
    hub.close()
    assert [event.calls for event in sink.of(PhaseProfile)] == list(range(20))


# Flush and close ------------------------------------------------------------------------------------------------


def test_flush_waits_until_durable_sinks_have_flushed():
    with NissaHub([sink := DurableSink(), hanging := GatedSink()], hang_s=PATIENCE) as hub:
        for step in range(300):
            hub.emit(keep(step))
        assert hub.flush()  # does not wait for the one that hangs
        assert sink.flushed == 300
        assert not hanging.records
        hanging.gate.set()


def test_flush_returns_false_on_timeout():
    sink = GatedSink()
    hub = blocked(sink)
    assert not hub.flush(timeout=0.05)
    sink.gate.set()
    assert hub.flush()
    assert sink.seqs == [0]
    hub.close()
    assert hub.flush(timeout=0.0)


def test_flush_is_false_once_a_durable_sink_is_retired():
    class RaisingAtFlushSink(DurableSink):
        def flush(self):
            raise OSError("no such device")

    with NissaHub([RaisingAtFlushSink(), ListSink()]) as hub:
        hub.emit(keep(0))
        assert not hub.flush()
        assert not hub.flush()
    assert "no such device" in hub.health()["sinks"]["RaisingAtFlushSink"]["retired"]


def test_flush_without_events_or_sinks_is_true():
    with NissaHub() as hub:
        assert hub.flush()
        hub.add_sink(DurableSink())
        assert hub.flush()


def test_close_is_idempotent_and_later_events_are_counted():
    hub = NissaHub([sink := ListSink()])
    hub.emit(keep(0))
    hub.close()
    hub.close()
    hub.emit(keep(1))
    hub.emit(gauge(1))
    assert not hub.wants(GovernorAlarm)
    assert sink.seqs == [0, 1]
    assert sink.closed == 1
    assert hub.health()["after_close"] == 2
    with pytest.raises(EsperError, match="closed"):
        hub.add_sink(ListSink())


def test_concurrent_close_is_safe():
    hub = NissaHub([sink := SlowSink()])
    for step in range(1_000):
        hub.emit(keep(step))
    threads = [threading.Thread(target=hub.close) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sink.seqs == list(range(1_001))
    assert sink.closed == 1


def test_caller_blocked_at_close_still_delivers_its_event():
    sink = GatedSink()
    hub = blocked(sink, capacity=2)
    threads = [threading.Thread(target=hub.emit, args=(keep(step),)) for step in range(1, 6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: hub.health()["waits"] == 3)
    closer = threading.Thread(target=hub.close)
    closer.start()
    sink.gate.set()
    closer.join()
    assert sorted(event.step for event in sink.of(GovernorAlarm)) == list(range(6))
    assert sink.seqs == list(range(len(sink.seqs)))
    assert isinstance(sink.records[-1].event, Health)  # the final record comes after theirs


def test_close_gives_up_on_lagging_sinks_and_reports_them():
    hanging, healthy = GatedSink(), ListSink()
    hub = NissaHub([hanging, healthy], hang_s=PATIENCE)
    hub.emit(keep(0))
    assert hanging.entered.wait(PATIENCE)
    hub.close(timeout=0.1)
    assert "not caught up" in hub.health()["sinks"]["GatedSink"]["retired"]
    assert [event.severity for event in healthy.of(Health)] == ["error", "warning"]
    assert healthy.closed == 1
    hanging.gate.set()


def test_final_record_holds_the_counters():
    with NissaHub([sink := ListSink()]) as hub:
        for step in range(7):
            hub.emit(keep(step))
    last = sink.records[-1].event
    assert isinstance(last, Health)
    assert (last.source, last.severity) == ("hub", "info")
    assert last.counters["emitted"] == last.counters["ListSink.written"] == 7
    assert last.counters["waits"] == last.counters["coalesced"] == last.counters["unencodable"] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hub_is_disabled_in_a_forked_child(tmp_path):
    hub = NissaHub([JsonlSink(tmp_path / "events")])
    hub.emit(keep(0))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            hub.emit(keep(99))
            hub.close()
            status = 0 if not hub.wants(GovernorAlarm) and hub.health()["after_close"] == 1 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    hub.emit(keep(1))
    hub.close()
    assert [entry.data["step"] for entry in read(tmp_path) if entry.kind == "governor"] == [0, 1]


def test_lost_journal_is_reported_to_the_user_despite_other_sinks(caplog):
    class FullDiskSink:
        def write(self, _records):
            raise OSError(28, "No space left on device")

        def flush(self): ...
        def close(self): ...

    class DiscardingSink:
        def write(self, records): ...
        def close(self): ...

    with NissaHub([FullDiskSink(), DiscardingSink()]) as hub:
        hub.emit(RunFinished(status="finished", wall_s=1.0, env_steps=1))
        assert not hub.flush(0.3)
        hub.close(0.3)
    assert "sink FullDiskSink was retired" in caplog.text
    assert "No space left" in caplog.text
