"""The journal: what was written is read back, whatever happened to the files in between."""

import errno
import math
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.errors import ConfigError
from esper.leyline.events import Gradient, Health, PhaseProfile, Step
from esper.nissa.journal_reader import (
    Damage,
    Entry,
    Follower,
    decoded_entries,
    head,
    read,
    segment_name,
    segments,
    tail,
)
from esper.nissa.journal_writer import JsonlSink
from esper.nissa.record import Record, line, sealed
from tests.support.journal_checks import missing_seqs, next_seq


@pytest.fixture(autouse=True)
def a_quick_disk(monkeypatch):
    """Disable fsync: these tests do not depend on power cuts, and thousands of syncs are slow."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def profile(i=0):
    return PhaseProfile(phase=f"phase {i}", wall_ms=i / 7, cpu_ms=float(i), calls=i)


def records(seqs, rank=0):
    return [Record(seq, 1e9 + seq, rank, profile(seq)) for seq in seqs]


def write(run_dir, seqs, *, rank=0, segment_bytes=1 << 20, batch=3):
    sink = JsonlSink(run_dir / "events", rank=rank, segment_bytes=segment_bytes)
    rows = records(seqs, rank)
    for start in range(0, len(rows), batch):
        sink.write(rows[start : start + batch])
    sink.close()


def seqs_of(run_dir, damage=None):
    return [entry.seq for entry in read(run_dir, damage)]


def last_segment(run_dir, rank=0):
    return segments(run_dir / "events")[rank][-1][1]


def slowly(run_dir, rank=0):
    """Read one undamaged rank by the simplest method: every line that is JSON."""
    lines = b"".join(path.read_bytes() for _, path in segments(run_dir / "events")[rank]).split(b"\n")
    for text in lines:
        try:
            data = msgspec.json.decode(text)
        except ValueError:
            continue
        del data["crc"]
        place = [data.pop(name) for name in ("seq", "time_s", "rank", "kind")]
        yield Entry(*place, data)


# Writing and reading ------------------------------------------------------------------------------------------------


def test_entries_carry_position_kind_and_fields(tmp_path):
    write(tmp_path, range(2))
    assert list(read(tmp_path)) == [
        Entry(0, 1e9, 0, "phase_profile", {"phase": "phase 0", "wall_ms": 0.0, "cpu_ms": 0.0, "calls": 0}),
        Entry(1, 1e9 + 1, 0, "phase_profile", {"phase": "phase 1", "wall_ms": 1 / 7, "cpu_ms": 1.0, "calls": 1}),
    ]


def test_directory_without_a_journal_has_no_entries(tmp_path):
    assert list(read(tmp_path)) == [] == Follower(tmp_path, decoded_entries).poll() == head(tmp_path) == tail(tmp_path)
    assert next_seq(tmp_path) == 0


@pytest.mark.parametrize("batch", [1, 4, 100])
@pytest.mark.parametrize("segment_bytes", [1, 150, 400, 1 << 20])
def test_rotation_splits_between_lines_and_changes_nothing_else(tmp_path, segment_bytes, batch):
    write(tmp_path, range(40), segment_bytes=segment_bytes, batch=batch)
    files = segments(tmp_path / "events")[0]
    sizes = [path.stat().st_size for _, path in files]
    longest = max(len(line(record)) for record in records(range(40)))

    assert [number for number, _ in files] == list(range(len(files)))
    assert all(path.read_bytes().endswith(b"\n") for _, path in files)
    assert max(sizes) <= max(segment_bytes, longest)
    assert b"".join(path.read_bytes() for _, path in files) == b"".join(map(line, records(range(40))))
    assert list(read(tmp_path)) == list(slowly(tmp_path))


def test_segment_is_filled_before_the_next_begins(tmp_path):
    write(tmp_path, range(40), segment_bytes=400, batch=100)
    sizes = [path.stat().st_size for _, path in segments(tmp_path / "events")[0]]
    longest = max(len(line(record)) for record in records(range(40)))
    assert all(400 - longest < size <= 400 for size in sizes[:-1])


def test_segments_are_read_in_numeric_order_past_five_digits(tmp_path):
    events = tmp_path / "events"
    events.mkdir()
    for seq, number in enumerate([99_998, 99_999, 100_000, 100_001]):
        (events / segment_name(0, number)).write_bytes(line(records([seq])[0]))
    (events / "notes.txt").write_text("not a segment")
    assert seqs_of(tmp_path) == [0, 1, 2, 3]
    JsonlSink(events, segment_bytes=1).write(records([4]))
    assert seqs_of(tmp_path) == [0, 1, 2, 3, 4]


def test_one_write_per_batch(tmp_path, monkeypatch):
    sink = JsonlSink(tmp_path / "events")
    calls = []
    system = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: calls.append(len(data)) or system(fd, data))
    sink.write(records(range(100)))
    sink.write([])
    assert len(calls) == 1


def test_segment_size_of_zero_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="segment_bytes=0"):
        JsonlSink(tmp_path, segment_bytes=0)


# Ranks --------------------------------------------------------------------------------------------------------------


@given(times=st.lists(st.lists(st.integers(0, 50), max_size=20), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_ranks_are_merged_by_time_and_each_keeps_its_order(tmp_path_factory, times):
    run_dir = tmp_path_factory.mktemp("run")
    for rank, each in enumerate(times):
        sink = JsonlSink(run_dir / "events", rank=rank, segment_bytes=500)
        sink.write([Record(seq, float(at), rank, profile()) for seq, at in enumerate(sorted(each))])
        sink.close()

    every = [(float(at), rank, seq) for rank, each in enumerate(times) for seq, at in enumerate(sorted(each))]
    assert [(e.time_s, e.rank, e.seq) for e in read(run_dir)] == sorted(every)
    assert [(e.time_s, e.rank, e.seq) for e in Follower(run_dir, decoded_entries).poll()] == sorted(every)


def test_line_of_another_rank_is_damage(tmp_path):
    write(tmp_path, [0])
    with last_segment(tmp_path).open("ab") as file:
        file.write(line(records([1], rank=1)[0]) + line(records([2])[0]))
    damage = Damage()
    assert seqs_of(tmp_path, damage) == [0, 2]
    assert damage == Damage(lines=1)


# Torn tails ---------------------------------------------------------------------------------------------------------


def test_truncation_at_every_byte_loses_only_the_torn_line(tmp_path):
    whole = tmp_path / "whole"
    write(whole, range(8), segment_bytes=500)
    earlier, last = segments(whole / "events")[0][:-1], last_segment(whole)
    content = last.read_bytes()
    before = [entry for entry in read(whole) if entry.seq < next_seq(whole) - content.count(b"\n")]
    assert earlier
    assert content.count(b"\n") >= 2

    for cut in range(len(content) + 1):
        run_dir = tmp_path / f"cut {cut}"
        (run_dir / "events").mkdir(parents=True)
        for _, path in earlier:
            os.link(path, run_dir / "events" / path.name)
        torn = run_dir / "events" / last.name
        torn.write_bytes(content[:cut])
        # a line is complete from its closing brace on: only its line end is missing
        ended = content[:cut].count(b"\n") + (content[cut : cut + 1] == b"\n")
        is_torn = cut > 0 and content[cut - 1] != ord("\n") and content[cut : cut + 1] != b"\n"

        damage = Damage()
        survivors = list(read(run_dir, damage))
        assert survivors == list(read(whole))[: len(before) + ended]
        assert damage == Damage(torn=int(is_torn))
        follower = Follower(run_dir, decoded_entries)
        assert follower.poll() == survivors

        first = next_seq(run_dir)
        assert first == len(survivors)
        write(run_dir, range(first, first + 4), segment_bytes=500)
        assert torn.read_bytes().startswith(content[:cut])  # no bytes are removed
        damage = Damage()
        assert seqs_of(run_dir, damage) == list(range(first + 4))
        assert damage == Damage(torn=int(is_torn))
        assert [entry.seq for entry in follower.poll()] == list(range(first, first + 4))
        assert follower.damage == damage


@pytest.mark.parametrize("end", [b'{"seq":3', b"no json\n", b"\xff\xfe\n", b"\0" * 40, b"\0" * 40 + b"\n", b"[" * 5000])
def test_sink_starts_a_new_segment_after_a_bad_end(tmp_path, end):
    write(tmp_path, range(3))
    with last_segment(tmp_path).open("ab") as file:
        file.write(end)
    write(tmp_path, range(3, 6))
    assert len(segments(tmp_path / "events")[0]) == 2
    damage = Damage()
    assert seqs_of(tmp_path, damage) == list(range(6))
    assert damage.torn + damage.lines == 1


@pytest.mark.parametrize("length", [10, 70_000, 200_000])
def test_sink_appends_after_a_complete_last_line_of_any_length(tmp_path, length):
    sink = JsonlSink(tmp_path / "events")
    sink.write([Record(0, 1.0, 0, Health(source="test", severity="info", text="x" * length))])
    sink.close()
    write(tmp_path, [1])
    assert len(segments(tmp_path / "events")[0]) == 1
    assert seqs_of(tmp_path) == [0, 1]


def test_empty_segment_is_used(tmp_path):
    JsonlSink(tmp_path / "events").close()
    JsonlSink(tmp_path / "events").close()
    assert len(segments(tmp_path / "events")[0]) == 1


def test_killed_process_leaves_a_readable_log(tmp_path):
    code = f"""
from pathlib import Path
from esper.leyline.events import PhaseProfile
from esper.nissa.record import Record
from esper.nissa.journal_writer import JsonlSink
sink, seq = JsonlSink(Path({str(tmp_path)!r}) / "events", segment_bytes=20_000), 0
while True:
    event = PhaseProfile(phase="p", wall_ms=1.0, cpu_ms=1.0, calls=seq)
    sink.write([Record(seq + i, 1.0, 0, event) for i in range(50)])
    seq += 50
    if seq == 5000: print("going", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"going\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    damage = Damage()
    entries = list(read(tmp_path, damage))
    assert [entry.seq for entry in entries] == list(range(len(entries)))
    assert len(entries) >= 5000
    assert damage.lines == damage.duplicates == 0
    assert damage.torn <= 1


# Write failures -----------------------------------------------------------------------------------------------------


class FullDisk:
    """A fake disk that accepts a number of bytes: part of the last write, then an error."""

    def __init__(self, monkeypatch, free_bytes):
        self.monkeypatch, self.free_bytes, self.system = monkeypatch, free_bytes, os.write

    def __enter__(self):
        self.monkeypatch.setattr(os, "write", self.write)
        return self

    def __exit__(self, *_):
        self.monkeypatch.setattr(os, "write", self.system)

    def write(self, fd, data):
        size = min(self.free_bytes, len(data))
        if not size:
            raise OSError(errno.ENOSPC, "no space left on device")
        self.free_bytes -= size
        return self.system(fd, bytes(data)[:size])


@pytest.mark.parametrize("segment_bytes", [250, 1 << 20])
def test_temporarily_full_disk_loses_nothing_when_the_batch_is_retried(tmp_path, monkeypatch, segment_bytes):
    size = sum(len(line(record)) for record in records(range(3)))
    for free_bytes in range(size):
        run_dir = tmp_path / f"free_bytes {free_bytes}"
        sink = JsonlSink(run_dir / "events", segment_bytes=segment_bytes)
        with FullDisk(monkeypatch, free_bytes) as disk:
            for _ in range(2):
                with pytest.raises(OSError, match="no space"):
                    sink.write(records(range(3)))
            disk.free_bytes = 1 << 30
            sink.write(records(range(3)))
            sink.write(records(range(3, 6)))
        sink.close()
        damage = Damage()
        assert seqs_of(run_dir, damage) == list(range(6))
        assert damage == Damage()


def test_abandoned_batch_damages_no_later_line(tmp_path, monkeypatch):
    for free_bytes in range(1, 120):
        run_dir = tmp_path / f"free_bytes {free_bytes}"
        sink = JsonlSink(run_dir / "events")
        with FullDisk(monkeypatch, free_bytes) as disk:
            with pytest.raises(OSError, match="no space"):
                sink.write(records([0, 1]))
            disk.free_bytes = 1 << 30
            sink.write(records([2, 3]))
        sink.close()
        assert [seq for seq in seqs_of(run_dir) if seq >= 2] == [2, 3]


def test_sink_is_unchanged_when_no_new_segment_can_be_created(tmp_path, monkeypatch):
    sink = JsonlSink(tmp_path / "events", segment_bytes=200)
    sink.write(records([0]))

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="no space"):
            sink.write(records(range(1, 4)))
    sink.write(records(range(1, 4)))
    sink.close()
    assert seqs_of(tmp_path) == [0, 1, 2, 3]


def test_unencodable_record_raises_before_anything_is_written(tmp_path):
    sink = JsonlSink(tmp_path / "events")
    broken = Record(1, 1.0, 0, PhaseProfile(phase="p", wall_ms=object(), cpu_ms=1.0, calls=1))
    with pytest.raises(TypeError, match="object"):
        sink.write([*records([0]), broken, *records([2])])
    sink.write(records([0, 2]))
    assert seqs_of(tmp_path) == [0, 2]


def test_flush_syncs_to_disk_and_close_is_idempotent(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    sink = JsonlSink(tmp_path / "events", segment_bytes=200)
    synced.clear()
    sink.write(records([0]))
    assert synced == []
    sink.flush()
    assert len(synced) == 1
    sink.write(records(range(1, 4)))
    assert len(synced) >= 3  # each full segment, and the directory that names the next
    sink.close()
    sink.close()


# Damage in the middle -----------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_flipped_byte_raises_nothing_and_alters_no_other_line(tmp_path_factory, data):
    run_dir = tmp_path_factory.mktemp("run")
    gauges_missing = data.draw(st.sets(st.integers(0, 14), max_size=4))
    write(run_dir, [seq for seq in range(15) if seq not in gauges_missing], segment_bytes=600)
    before = list(read(run_dir))
    _, path = data.draw(st.sampled_from(segments(run_dir / "events")[0]))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    number = content[:at].count(b"\n")  # of the affected line; a line end belongs to both neighbours
    hit = {number, number + 1} if content[at] == ord("\n") else {number}
    content[at] = data.draw(st.integers(0, 255))
    first = next(msgspec.json.decode(line)["seq"] for line in path.read_bytes().splitlines())
    position = [entry.seq for entry in before].index(first)
    path.write_bytes(content)

    after = list(read(run_dir))
    assert Follower(run_dir, decoded_entries).poll() == after
    assert all(entry in before for entry in after), "nothing is silently different"
    for index, entry in enumerate(before):
        if index - position not in hit:
            assert after.count(entry) == 1, (entry, after)
    assert len(after) <= len(before)
    missing_seqs(after), next_seq(run_dir), head(run_dir), tail(run_dir)


@given(garbage=st.binary(max_size=300), at=st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_reading_arbitrary_bytes_raises_nothing(tmp_path_factory, garbage, at):
    run_dir = tmp_path_factory.mktemp("run")
    write(run_dir, range(10))
    content = last_segment(run_dir).read_bytes()
    at %= len(content)
    last_segment(run_dir).write_bytes(content[:at] + garbage + content[at:])
    damage = Damage()
    seqs = seqs_of(run_dir, damage)
    assert set(range(10)) - set(seqs) <= {content[:at].count(b"\n")}
    write(run_dir, [next_seq(run_dir)])
    assert seqs_of(run_dir)[-1] == next_seq(run_dir) - 1


@pytest.mark.parametrize(
    "junk",
    [
        b"null",
        b"[]",
        b"3",
        b'"seq"',
        b"{}",
        b'{"seq":1}',
        b'{"seq":"1","time_s":1.0,"rank":0,"kind":"step"}',
        b'{"seq":-1,"time_s":1.0,"rank":0,"kind":"step"}',
        b'{"seq":1.0,"time_s":1.0,"rank":0,"kind":"step"}',
        b'{"seq":true,"time_s":1.0,"rank":0,"kind":"step"}',
        b'{"seq":1,"time_s":null,"rank":0,"kind":"step"}',
        b'{"seq":1,"time_s":1.0,"rank":0,"kind":null}',
        b'{"seq":1,"time_s":1.0,"rank":0,"kind":"step","x":NaN}',
        b'{"seq":1,"time_s":1.0,"rank":0,"kind":"step","x":"\xff"}',
        b'{"seq":1,"time_s":1.0,"rank":0,"kind":"step"}{}',
        b"[" * 100_000,
    ],
)
def test_lines_that_are_no_entries_are_counted_and_skipped(tmp_path, junk):
    write(tmp_path, range(3))
    path = last_segment(tmp_path)
    path.write_bytes(junk + b"\n" + path.read_bytes())
    damage = Damage()
    assert seqs_of(tmp_path, damage) == [0, 1, 2]
    assert damage == Damage(lines=1)


def test_empty_lines_are_no_damage(tmp_path):
    write(tmp_path, range(3))
    path = last_segment(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n"))
    damage = Damage()
    assert seqs_of(tmp_path, damage) == [0, 1, 2]
    assert damage == Damage()


# Numbers: duplicates, jumps, gaps ------------------------------------------------------------------------------------


def test_repeated_entries_of_a_resumed_run_are_read_once(tmp_path):
    write(tmp_path, range(10))
    write(tmp_path, range(6, 14))
    damage = Damage()
    assert seqs_of(tmp_path, damage) == list(range(14))
    assert damage == Damage(duplicates=4)


def test_entries_lost_at_first_are_taken_from_the_repetition(tmp_path):
    write(tmp_path, [0, 1, 2, 5, 6, 7])
    write(tmp_path, range(2, 9))
    damage = Damage()
    assert sorted(seqs_of(tmp_path, damage)) == list(range(9))
    assert damage == Damage(duplicates=4)
    assert missing_seqs(read(tmp_path)) == {}


def test_number_ahead_of_the_next_line_is_damage_and_reserves_nothing(tmp_path):
    write(tmp_path, [0, 1, 92, 3, 4])
    write(tmp_path, range(5, 100))
    damage = Damage()
    assert seqs_of(tmp_path, damage) == [0, 1, *range(3, 100)]
    assert damage == Damage(lines=1)


@given(st.lists(st.integers(0, 30), max_size=60))
def test_holes_are_the_missing_numbers_below_the_highest(seqs):
    gaps = missing_seqs(Entry(seq, 0.0, 7, "step", {}) for seq in seqs)
    missing = sorted(set(range(max(seqs, default=-1) + 1)) - set(seqs))
    assert [seq for each in gaps.get(7, []) for seq in each] == missing
    assert all(each for each in gaps.get(7, []))
    assert set(gaps) == ({7} if missing else set())


def test_holes_are_reported_per_rank(tmp_path):
    write(tmp_path, [0, 1, 4, 5], rank=0)
    write(tmp_path, range(3), rank=1)
    write(tmp_path, [2, 9], rank=2)
    assert missing_seqs(read(tmp_path)) == {0: [range(2, 4)], 2: [range(2), range(3, 9)]}


# Following ----------------------------------------------------------------------------------------------------------


def test_follower_sees_every_entry_once_through_rotation_and_new_ranks(tmp_path):
    follower = Follower(tmp_path, decoded_entries)
    assert follower.poll() == []
    sinks = [JsonlSink(tmp_path / "events", rank=rank, segment_bytes=300) for rank in range(2)]
    entries = []
    for seq in range(30):
        sinks[0].write(records([seq]))
        if seq >= 10:
            sinks[1].write(records([seq - 10], rank=1))
        if seq % 4 == 0:
            entries += follower.poll()
    entries += follower.poll()
    assert follower.poll() == []
    assert sorted((e.rank, e.seq) for e in entries) == [(0, i) for i in range(30)] + [(1, i) for i in range(20)]
    assert sorted(entries) == sorted(read(tmp_path))
    assert follower.damage == Damage()


def test_follower_waits_for_the_rest_of_a_line(tmp_path):
    events = tmp_path / "events"
    events.mkdir()
    follower = Follower(tmp_path, decoded_entries)
    text = b"".join(map(line, records(range(3))))
    entries = []
    with (events / segment_name(0, 0)).open("ab", buffering=0) as file:
        for i in range(len(text)):
            file.write(text[i : i + 1])
            entries += follower.poll()
            assert [entry.seq for entry in entries] == list(range((text[: i + 2]).count(b"\n")))
    assert follower.damage == Damage()
    assert entries == list(read(tmp_path))


def test_follower_reads_a_long_log_in_chunks_of_any_size(tmp_path):
    write(tmp_path, range(50), segment_bytes=700)
    write(tmp_path, range(20), rank=1)
    follower = Follower(tmp_path, decoded_entries)
    portions = [follower.poll(most=15) for _ in range(6)]
    assert [len(portion) for portion in portions] == [15, 15, 15, 15, 10, 0]
    assert [entry for portion in portions for entry in portion] == list(read(tmp_path))
    write(tmp_path, range(50, 53))
    assert [entry.seq for entry in follower.poll(most=15)] == [50, 51, 52]


def test_idle_follower_opens_no_file(tmp_path, monkeypatch):
    write(tmp_path, range(50), segment_bytes=700)
    with last_segment(tmp_path).open("ab") as file:
        file.write(b'{"seq":50,"time')
    follower = Follower(tmp_path, decoded_entries)
    assert len(follower.poll()) == 50

    def refuse(*_, **__):
        raise AssertionError("opened a file")

    monkeypatch.setattr(type(tmp_path), "open", refuse)
    assert follower.poll() == []


def test_follower_survives_removal_of_the_journal(tmp_path):
    write(tmp_path, range(5))
    follower = Follower(tmp_path, decoded_entries)
    assert len(follower.poll()) == 5
    last_segment(tmp_path).unlink()
    (tmp_path / "events").rmdir()
    assert follower.poll() == []


def test_follower_reads_what_another_process_writes(tmp_path):
    code = f"""
from pathlib import Path
from esper.leyline.events import PhaseProfile
from esper.nissa.record import Record
from esper.nissa.journal_writer import JsonlSink
sink = JsonlSink(Path({str(tmp_path)!r}) / "events", segment_bytes=5_000)
for seq in range(2000):
    sink.write([Record(seq, 1.0, 0, PhaseProfile(phase="p", wall_ms=1.0, cpu_ms=1.0, calls=seq))])
sink.close()
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    follower, entries = Follower(tmp_path, decoded_entries), []
    while child.poll() is None:
        entries += follower.poll()
        time.sleep(0.001)
    entries += follower.poll()
    assert child.returncode == 0
    assert [entry.seq for entry in entries] == list(range(2000))
    assert follower.damage == Damage()


# Head and tail ------------------------------------------------------------------------------------------------------


def test_head_and_tail_do_not_read_the_middle(tmp_path):
    write(tmp_path, range(5000), segment_bytes=200_000, batch=500)
    with last_segment(tmp_path).open("ab") as file:
        file.write(b'{"torn')
    assert head(tmp_path)[0].seq == 0
    assert tail(tmp_path)[-1].seq == 4999
    assert len(head(tmp_path)) + len(tail(tmp_path)) < 2500
    (tmp_path / "events" / segment_name(0, 99)).write_bytes(b'{"torn')
    assert tail(tmp_path)[-1].seq == 4999
    assert next_seq(tmp_path) == 5000


# Unknown content ----------------------------------------------------------------------------------------------------


def test_unknown_kinds_fields_and_schemas_are_passed_through(tmp_path):
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / segment_name(0, 0)).write_bytes(
        sealed(b'{"seq":0,"time_s":1.5,"rank":0,"kind":"run_started","schema":99,"run_id":"x","moons":[1,{"a":null}]')
        + sealed(b'{"kind":"omen","rank":0,"later":{"x":"-Infinity"},"time_s":2,"seq":1')
    )
    damage = Damage()
    assert list(read(tmp_path, damage)) == [
        Entry(0, 1.5, 0, "run_started", {"schema": 99, "run_id": "x", "moons": [1, {"a": None}]}),
        Entry(1, 2.0, 0, "omen", {"later": {"x": -math.inf}}),
    ]
    assert damage == Damage()


def test_non_finite_numbers_are_read_as_numbers_and_names_as_names(tmp_path):
    sink = JsonlSink(tmp_path / "events")
    slots = {"stages": (0, 1), "alphas": (math.nan, 1.0), "blueprints": ("NaN", "Infinity")}
    losses = {"val_loss": math.inf, "train_loss": -math.inf, "quality": math.nan, "committed_quality": None}
    sink.write([Record(0, 1.0, 0, Step(env=0, episode=0, step=1, world=0, op="NaN", params=1, **losses, **slots))])
    sink.write(
        [Record(1, 1.0, 0, Gradient(env=0, episode=0, step=1, slot="NaN", norm=math.nan, ratio=0.5, health=1.0))]
    )
    sink.write([Record(2, 1.0, 0, Health(source="s", severity="info", text="NaN", counters={"NaN": math.nan}))])
    step, gradient, health = (entry.data for entry in read(tmp_path))

    assert step["op"] == "NaN"
    assert step["blueprints"] == ["NaN", "Infinity"]
    assert math.isnan(step["quality"])
    assert step["committed_quality"] is None
    assert (step["val_loss"], step["train_loss"]) == (math.inf, -math.inf)
    assert math.isnan(step["alphas"][0])
    assert gradient["slot"] == "NaN"
    assert math.isnan(gradient["norm"])
    assert health["text"] == "NaN"
    assert math.isnan(health["counters"]["NaN"])
