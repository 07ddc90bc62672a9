"""Rewinding the journal: exactly the entries that a resumed run writes again are removed."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.errors import RunError
from esper.leyline.events import PhaseProfile
from esper.nissa.journal_reader import Damage, Follower, decoded_entries, read, segment_name, segments
from esper.nissa.journal_writer import JsonlSink, rewind
from esper.nissa.record import Record, line
from tests.support.journal_checks import missing_seqs, next_seq

SYSTEM = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "unlink")}


@pytest.fixture(autouse=True)
def a_quick_disk(monkeypatch):
    """Disable fsync: these tests do not depend on power cuts, and thousands of syncs are slow."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def row(seq, rank=0, time_s=None):
    event = PhaseProfile(phase=f"phase {seq}", wall_ms=seq / 7, cpu_ms=float(seq), calls=seq)
    return Record(seq, 1e9 + seq if time_s is None else time_s, rank, event)


def write(run_dir, seqs, *, rank=0, segment_bytes=400, time_s=None):
    sink = JsonlSink(run_dir / "events", rank=rank, segment_bytes=segment_bytes)
    for seq in seqs:
        sink.write([row(seq, rank, time_s)])
    sink.close()


def seqs_of(run_dir, rank=0, damage=None):
    return [entry.seq for entry in read(run_dir, damage) if entry.rank == rank]


def files_of(run_dir):
    return {path.name: path.read_bytes() for path in (run_dir / "events").iterdir()}


# Any journal: segments of lines, each an entry's seq or the bytes of a damaged line ----------------------------------

damaged_lines = st.sampled_from([b"", b"{", b"\xff\x00", b'{"seq":1}', b"[" * 3000, line(row(2, rank=7))[:-1]])
lines = st.lists(st.one_of(*[st.integers(0, 12)] * 4, damaged_lines), max_size=6)
ends = st.one_of(st.just(b""), st.integers(1, 60), st.just("whole"))
"""The end of a segment: a line end, a line cut after so many bytes, or a line that only lacks its line end."""
journals = st.lists(st.tuples(lines, ends, st.integers(0, 12)), max_size=4)


def put(folder, journal, rank):
    """Write the journal; return the same as a list of (segment, seq or bytes), without torn ends."""
    folder.mkdir(exist_ok=True)
    journal_lines = []
    for number, (content, end, seq) in enumerate(journal):
        text = b"".join((line(row(each, rank)) if isinstance(each, int) else each + b"\n") for each in content)
        journal_lines += [(number, each) for each in content]
        if end == "whole":
            text += line(row(seq, rank))[:-1]
            journal_lines.append((number, seq))
        elif end:
            text += line(row(seq, rank))[:end]
        (folder / segment_name(rank, number)).write_bytes(text)
    return journal_lines


def slowly(before, journal_lines, rank, limit):
    """Return the files of a rank after a rewind, rewritten from the list of entries.

    After any change, the run continues in an empty segment behind all existing ones.
    """
    journal_lines = [(number, each) for number, each in journal_lines if not isinstance(each, int) or each < limit]
    while journal_lines and not isinstance(journal_lines[-1][1], int):
        journal_lines.pop()
    files = {}
    for number, each in journal_lines:
        text = line(row(each, rank)) if isinstance(each, int) else each + b"\n"
        files[segment_name(rank, number)] = files.get(segment_name(rank, number), b"") + text
    last = len(before) - 1
    if before and not before[segment_name(rank, last)]:
        files[segment_name(rank, last)] = b""
    elif files != before:
        files[segment_name(rank, last + 1)] = b""
    return files


@settings(deadline=None, max_examples=250)
@given(st.lists(journals, min_size=1, max_size=3), st.integers(-1, 14), st.data())
def test_rewind_equals_the_reference(tmp_path_factory, ranks, limit, data):
    run_dir = tmp_path_factory.mktemp("run")
    journal_lines = [put(run_dir / "events", journal, rank) for rank, journal in enumerate(ranks)]
    before = files_of(run_dir)
    rank = data.draw(st.integers(0, len(ranks) - 1))

    forgotten = rewind(run_dir, rank, limit)

    mine = {name: text for name, text in before.items() if name.startswith(f"rank{rank}-")}
    others = {name: text for name, text in before.items() if name not in mine}
    assert files_of(run_dir) == others | slowly(mine, journal_lines[rank], rank, limit)
    assert forgotten == sum(isinstance(each, int) and each >= limit for _, each in journal_lines[rank])
    assert rewind(run_dir, rank, limit) == 0
    assert files_of(run_dir) == others | slowly(mine, journal_lines[rank], rank, limit)
    assert next_seq(run_dir, rank) <= max(0, limit)
    damage = Damage()
    list(read(run_dir, damage))
    if len(ranks) == 1:
        assert damage.torn == 0


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([1, 150, 400, 1 << 20]),
    st.integers(0, 40),
    st.data(),
)
def test_killed_and_resumed_run_keeps_each_lower_number_once(tmp_path_factory, sessions, segment_bytes, limit, data):
    """Each session steps back, rewinds or repeats entries, continues, and ends with a torn line."""
    run_dir = tmp_path_factory.mktemp("run")
    at = 0
    for more, back, rewinds in sessions:
        start = max(0, at - back)
        at = (start if rewinds else at) + more
        for rank in (0, 1):
            if rewinds:
                rewind(run_dir, rank, start)
            write(run_dir, range(start, at), rank=rank, segment_bytes=segment_bytes)
        with segments(run_dir / "events")[0][-1][1].open("ab") as file:
            file.write(line(row(at))[: data.draw(st.integers(0, 50))])
    before = list(read(run_dir))
    limit = min(limit, at)

    rewind(run_dir, 0, limit)

    assert list(read(run_dir)) == [entry for entry in before if entry.rank == 1 or entry.seq < limit]
    assert next_seq(run_dir) == limit
    assert next_seq(run_dir, 1) == at
    assert missing_seqs(read(run_dir)) == {}
    write(run_dir, range(limit, at + 3), segment_bytes=segment_bytes)
    assert seqs_of(run_dir) == list(range(at + 3))


def test_holes_below_stay_and_holes_above_are_removed(tmp_path):
    write(tmp_path, [0, 1, 3, 4, 8, 9])
    rewind(tmp_path, 0, 8)
    assert seqs_of(tmp_path) == [0, 1, 3, 4]
    assert missing_seqs(read(tmp_path)) == {0: [range(2, 3)]}
    assert next_seq(tmp_path) == 5


def test_rewind_without_a_journal_or_rank_does_nothing(tmp_path):
    assert rewind(tmp_path, 0, 0) == 0
    write(tmp_path, range(5))
    before = files_of(tmp_path)
    assert rewind(tmp_path, 1, 0) == 0
    assert files_of(tmp_path) == before


def test_leftovers_of_a_killed_rewind_are_removed(tmp_path):
    write(tmp_path, range(5))
    before = files_of(tmp_path)
    for rank in (0, 1):
        (tmp_path / "events" / f".{segment_name(rank, 1)}.99999.tmp").write_bytes(b"half")
    rewind(tmp_path, 0, 5)
    assert files_of(tmp_path) == before | {".rank1-00001.jsonl.99999.tmp": b"half"}


def test_segments_below_are_not_touched(tmp_path):
    write(tmp_path, range(30))
    before_files = segments(tmp_path / "events")[0]
    before = [path.stat().st_ino for _, path in before_files]
    rewind(tmp_path, 0, 20)
    after = segments(tmp_path / "events")[0]
    assert len(before_files) > len(after) > 4
    assert [path.stat().st_ino for _, path in after[:-2]] == before[: len(after) - 2]
    assert after[-1][0] == before_files[-1][0] + 1


# Failures in the middle -----------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def after_calls(monkeypatch, most, what):
    """From the n-th call that changes the disk on, do nothing: the process was killed, or the disk failed."""
    calls_left = [most]

    def failing(name):
        def call(*args, **kwargs):
            if name == "open" and not (len(args) > 1 and args[1] & os.O_CREAT):
                return SYSTEM[name](*args, **kwargs)
            calls_left[0] -= 1
            if calls_left[0] < 0:
                raise what
            return SYSTEM[name](*args, **kwargs)

        return call

    for name in SYSTEM:
        monkeypatch.setattr(os, name, failing(name))
    return calls_left


def test_second_rewind_after_a_kill_at_any_call_gives_the_same_result(tmp_path, monkeypatch):
    def journal(folder):
        write(folder, [*range(12), *range(8, 20)], segment_bytes=500)
        with segments(folder / "events")[0][1][1].open("ab") as file:
            file.write(line(row(30)) + b"torn")  # out of order, and an end to cut off in an early segment
        return folder

    whole = journal(tmp_path / "whole")
    rewind(whole, 0, 7)
    assert seqs_of(whole) == list(range(7))

    for calls in range(100):
        run_dir = journal(tmp_path / str(calls))
        with monkeypatch.context() as patch:
            calls_left = after_calls(patch, calls, Killed())
            try:
                rewind(run_dir, 0, 7)
            except Killed:
                pass
            else:
                break
            assert calls_left[0] < 0
        assert [seq for seq in seqs_of(run_dir) if seq < 7] == list(range(7))  # nothing is lost in between either
        rewind(run_dir, 0, 7)
        assert files_of(run_dir) == files_of(whole)  # and no temporary file is left
    assert calls > 10


def test_full_disk_is_reported_and_loses_no_kept_entry(tmp_path, monkeypatch):
    for calls in range(5):
        run_dir = tmp_path / str(calls)
        write(run_dir, range(10))
        with monkeypatch.context() as patch:
            after_calls(patch, calls, OSError(errno.ENOSPC, "No space left on device"))
            with pytest.raises(RunError, match=r"No space left on device.*resume again"):
                rewind(run_dir, 0, 4)
        assert seqs_of(run_dir)[:4] == [0, 1, 2, 3]
        rewind(run_dir, 0, 4)
        assert seqs_of(run_dir) == [0, 1, 2, 3]


@pytest.mark.slow
def test_rewind_killed_by_sigkill_is_completed_by_the_next(tmp_path):
    write(tmp_path, range(1500), segment_bytes=700)
    code = "import sys; from pathlib import Path; from esper.nissa.journal_writer import rewind\n"
    code += "print('on', flush=True); rewind(Path(sys.argv[1]), 0, int(sys.argv[2]))"
    for step in range(10):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(1400 - 100 * step)], stdout=subprocess.PIPE
        )
        assert child.stdout.readline() == b"on\n"
        time.sleep(0.003 * step)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        seqs = seqs_of(tmp_path)
        assert seqs[: 1400 - 100 * step] == list(range(1400 - 100 * step))
    rewind(tmp_path, 0, 500)
    assert seqs_of(tmp_path) == list(range(500))
    assert all(path.name.startswith("rank0-") for path in (tmp_path / "events").iterdir())


# Followers ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 30),
    st.one_of(st.none(), st.integers(1, 12)),
    st.integers(0, 30),
    st.integers(0, 30),
    st.sampled_from([1, 150, 400, 1 << 20]),
    st.booleans(),
    st.sampled_from([1234567890.123456, 1.0]),
)
def test_follower_of_a_rewound_run_sees_each_number_once(
    tmp_path_factory, first, most, limit, more, segment_bytes, looks_between, time_s
):
    """The repeated lines are a little longer or shorter, so no offset matches by accident."""
    run_dir = tmp_path_factory.mktemp("run")
    follower, seen = Follower(run_dir, decoded_entries), []
    write(run_dir, range(first), segment_bytes=segment_bytes)
    seen += follower.poll(most)
    limit = min(limit, first)
    rewind(run_dir, 0, limit)
    if looks_between:
        seen += follower.poll(most)
    write(run_dir, range(limit, first + more), segment_bytes=segment_bytes, time_s=time_s)
    while entries := follower.poll(most):
        seen += entries
    seen += follower.poll()
    assert [entry.seq for entry in seen] == list(range(first + more))
    assert follower.poll() == []


def test_follower_inside_a_replaced_segment_reads_on(tmp_path):
    write(tmp_path, range(20), segment_bytes=1 << 20)
    follower = Follower(tmp_path, decoded_entries)
    entries = follower.poll(5)  # the rest is being read
    rewind(tmp_path, 0, 10)
    entries += follower.poll()
    assert [entry.seq for entry in entries] == list(range(20))
    write(tmp_path, range(10, 25), segment_bytes=1 << 20)
    assert [entry.seq for entry in follower.poll()] == list(range(20, 25))
