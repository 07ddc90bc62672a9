"""A temporarily full or slow disk loses no event; what is lost permanently is recorded and reported."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from esper.leyline.errors import RunError
from esper.leyline.events import GovernorAlarm, PhaseProfile
from esper.nissa.hub import NissaHub
from esper.nissa.journal_reader import Damage, read, segments
from esper.nissa.journal_writer import JsonlSink
from esper.nissa.record import Record, line
from esper.nissa.recorder import END_S, record
from esper.nissa.run import read_manifest
from esper.nissa.sink_worker import BACK_OFF_S
from tests.support.run_outcomes import TINY, finished, restore_signal_handling, wait_for_first_write

PATIENCE = 60.0


def event(step: int) -> GovernorAlarm:
    return GovernorAlarm(env=0, episode=0, step=step, alarm="none", action="none")


def wait_until(done) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Disk:
    """A fake disk: `os.write` and `os.fsync` of the journal's segments fail or hang until `repair`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_repaired, self.failures = threading.Event(), 0
        self.free_bytes = 500  # bytes that the full disk still accepts
        self._write, self._fsync, self._patch = os.write, os.fsync, monkeypatch

    def fill(self) -> None:
        self._patch.setattr(os, "write", self.write)

    def refuse_fsync(self) -> None:
        self._patch.setattr(os, "fsync", self.fsync)

    def hang_fsync(self) -> None:
        self._patch.setattr(os, "fsync", self.block_fsync)

    def repair(self) -> None:
        self.is_repaired.set()

    def write(self, fd, data):
        if self.is_repaired.is_set() or ".jsonl" not in os.readlink(f"/proc/self/fd/{fd}"):
            return self._write(fd, data)
        size = min(self.free_bytes, len(data))
        if not size:
            self.failures += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.free_bytes -= size
        return self._write(fd, bytes(data)[:size])

    def fsync(self, fd):
        if not self.is_repaired.is_set() and ".jsonl" in os.readlink(f"/proc/self/fd/{fd}"):
            self.failures += 1
            raise OSError(errno.EIO, "Input/output error")
        self._fsync(fd)

    def block_fsync(self, fd):
        if ".jsonl" in os.readlink(f"/proc/self/fd/{fd}"):
            self.is_repaired.wait(PATIENCE)
        self._fsync(fd)


@pytest.fixture
def disk(monkeypatch):
    small_disk = Disk(monkeypatch)
    yield small_disk
    small_disk.repair()


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps in the journal, which must be undamaged and have no duplicate line."""
    damage = Damage()
    entries = list(read(run_dir, damage))
    assert damage == Damage()
    assert all(extent.missing == 0 for extent in damage.extents().values())
    return [entry.data["step"] for entry in entries if entry.kind == "governor"]


def warnings_of(run_dir: Path) -> list[str]:
    return [e.data["text"] for e in read(run_dir) if e.kind == "health" and e.data["severity"] == "warning"]


@pytest.mark.parametrize("trouble", ["fill", "refuse_fsync", "hang_fsync"])
def test_journal_is_suspended_and_recovers_without_loss(tmp_path, disk, trouble, caplog):
    getattr(disk, trouble)()
    hub = NissaHub([JsonlSink(tmp_path / "events")], hang_s=0.1)
    for step in range(300):
        hub.emit(event(step))
    assert not hub.flush(0.3)
    wait_until(lambda: hub.health()["sinks"]["JsonlSink"]["suspended"])
    wait_until(lambda: disk.failures > 4 or trouble == "hang_fsync")
    assert not hub.health()["sinks"]["JsonlSink"]["retired"]
    disk.repair()
    for step in range(300, 400):
        hub.emit(event(step))
    assert hub.flush(PATIENCE)
    hub.close()

    assert steps_of(tmp_path) == list(range(400))
    suspended, recovered = warnings_of(tmp_path)
    assert "JsonlSink is suspended" in suspended
    assert "JsonlSink writes again" in recovered
    assert caplog.text.count("is suspended") == caplog.text.count("writes again") == 1
    assert not hub.has_lost


def test_callers_wait_while_the_disk_is_full_and_memory_is_bounded(tmp_path, disk):
    disk.fill()
    hub = NissaHub([JsonlSink(tmp_path / "events")], capacity=64)
    done = threading.Event()

    def emit_all() -> None:
        for step in range(1_000):
            hub.emit(event(step))
        done.set()

    threading.Thread(target=emit_all, daemon=True).start()
    wait_until(lambda: hub.health()["waits"] > 0 and disk.failures > 3)
    assert not done.is_set()
    assert hub.health()["queued"] <= 64 + 4  # and the hub's own reports
    disk.repair()
    assert done.wait(PATIENCE)
    hub.close()
    assert steps_of(tmp_path) == list(range(1_000))


def test_retries_on_a_full_disk_become_rarer(tmp_path, disk):
    disk.fill()
    start = time.monotonic()
    hub = NissaHub([JsonlSink(tmp_path / "events")])
    for step in range(100):
        hub.emit(event(step))
    wait_until(lambda: disk.failures > 4)
    pauses = disk.failures - 1
    first, longest = BACK_OFF_S
    assert time.monotonic() - start >= sum(min(longest, first * 2.0**i) for i in range(pauses))
    disk.repair()
    hub.close()
    assert steps_of(tmp_path) == list(range(100))


def test_close_gives_up_on_a_full_disk_after_its_timeout(tmp_path, disk, caplog):
    disk.fill()
    hub = NissaHub([JsonlSink(tmp_path / "events")])
    for step in range(100):
        hub.emit(event(step))
    hub.close(0.3)
    assert hub.has_lost
    assert "No space left" in hub.health()["sinks"]["JsonlSink"]["retired"]
    assert "JsonlSink was retired" in caplog.text


def test_stop_waiting_releases_a_caller_blocked_on_a_full_disk(tmp_path, disk):
    disk.fill()
    hub = NissaHub([JsonlSink(tmp_path / "events")], capacity=8)
    done = threading.Event()

    def emit_all() -> None:
        for step in range(100):
            hub.emit(event(step))
        done.set()

    threading.Thread(target=emit_all, daemon=True).start()
    wait_until(lambda: hub.health()["sinks"]["JsonlSink"]["suspended"] and hub.health()["waits"])
    assert not done.is_set()
    hub.stop_waiting(0.1)
    assert done.wait(PATIENCE)
    hub.close(0.1)


def test_durable_sink_with_a_defect_is_still_retired():
    class Defective:
        def write(self, _records):
            raise TypeError("a defect, not a disk")

        def flush(self): ...
        def close(self): ...

    with NissaHub([Defective()]) as hub:
        hub.emit(event(0))
        assert not hub.flush(PATIENCE)
    assert "a defect" in hub.health()["sinks"]["Defective"]["retired"]


@pytest.mark.parametrize("segment_bytes", [250, 1 << 20])
def test_interrupted_writes_leave_the_same_bytes(tmp_path, disk, segment_bytes, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of syncs are slow
    records = [Record(seq, 1e9 + seq, 0, event(seq)) for seq in range(5)]

    def content(run_dir: Path) -> list[bytes]:
        return [path.read_bytes() for _, path in segments(run_dir / "events")[0]]

    undisturbed = JsonlSink(tmp_path / "whole" / "events", segment_bytes=segment_bytes)
    undisturbed.write(records)
    undisturbed.close()
    disk.fill()
    for free_bytes in range(sum(len(line(each)) for each in records)):
        run_dir = tmp_path / f"{free_bytes}"
        sink = JsonlSink(run_dir / "events", segment_bytes=segment_bytes)
        disk.free_bytes = free_bytes
        with pytest.raises(OSError, match="No space"):
            sink.write(records)
        disk.free_bytes = 1 << 20
        sink.write(records)
        sink.close()
        assert content(run_dir) == content(tmp_path / "whole")


def test_replaced_gauges_are_not_counted_as_missing(tmp_path, disk):
    disk.fill()
    hub = NissaHub([JsonlSink(tmp_path / "events")], capacity=8)
    for calls in range(50):
        hub.emit(PhaseProfile(phase="train", wall_ms=1.0, cpu_ms=1.0, calls=calls))
    disk.repair()
    hub.close()
    assert hub.health()["coalesced"] > 0
    damage = Damage()
    entries = list(read(tmp_path, damage))
    assert sum(entry.replaced for entry in entries) == hub.health()["coalesced"]
    assert damage.extents()[0].missing == 0
    assert damage.extents()[0].next_seq == hub.next_seq


# Whole runs ---------------------------------------------------------------------------------------------------------


def test_loss_is_recorded_in_the_manifest_and_reported(tmp_path, disk, monkeypatch, capsys):
    monkeypatch.setattr("esper.nissa.recorder.END_S", 0.5)
    with record("mine", out=tmp_path / "run") as run:
        for step in range(10):
            run.emit(event(step))
        assert run.hub.flush()
        disk.free_bytes = 300
        disk.fill()
        for step in range(10, 100):
            run.emit(event(step))
    manifest = read_manifest(run.path)
    written = {entry.seq for entry in read(run.path)}
    facts = manifest["journal"]["0"]
    assert manifest["status"] == "finished"
    assert facts["events"] == run.hub.next_seq
    assert facts["lost"]["events"] == facts["events"] - len(written) > 80
    assert facts["lost"]["first_seq"] == len(written)
    assert facts["lost"]["last_seq"] == facts["events"] - 1
    assert f"{facts['lost']['events']} of {facts['events']} events could not be written" in capsys.readouterr().err
    assert run.losses


def test_unwritable_manifest_is_reported(tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with record("mine", out=tmp_path / "run\x1b[2J") as run:
        monkeypatch.setattr(os, "replace", refuse)
    message = capsys.readouterr().err
    assert "the manifest could not be written" in message
    assert "run\\x1b[2J" in message
    assert "\x1b" not in message
    assert run.losses


CHILD = """
import sys
import esper
from esper.leyline.errors import RunError
from esper.leyline.events import GovernorAlarm
from esper.nissa import recorder
recorder.END_S = float(sys.argv[3])
with esper.record("mine", out=sys.argv[1]) as run:
    for step in range(int(sys.argv[2])):
        run.emit(GovernorAlarm(env=0, episode=0, step=step, alarm="none", action="none"))
    print("emitted", flush=True)
sys.exit(1 if run.losses else 0)
"""
LIMIT = 50_000


def child_with_small_files(run: Path, events: int, end_s: float = END_S) -> subprocess.Popen[str]:
    """Start a process whose files cannot grow beyond a limit that the journal exceeds and the manifest does not.

    At its end it waits at most `end_s` seconds for space, several times.
    """

    def limit() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))

    command = [sys.executable, "-c", CHILD, str(run), str(events), str(end_s)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit, start_new_session=True
    )


def wait_for_suspension(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for text in process.stderr:
        if "is suspended" in text:
            return
    pytest.fail("the journal was not suspended")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit")
def test_process_waits_for_space_and_then_writes_everything(tmp_path):
    process = child_with_small_files(tmp_path / "run", 100_000)  # more than the hub's queue holds
    wait_for_suspension(process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    output = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    assert steps_of(tmp_path / "run") == list(range(100_000))
    assert "lost" not in read_manifest(tmp_path / "run")["journal"]["0"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_signal_ends_a_process_waiting_for_a_full_disk(tmp_path, number, code):
    process = child_with_small_files(tmp_path / "run", 100_000, end_s=1.0)
    wait_for_suspension(process)
    process.send_signal(number)
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == code
    assert "could not be written" in errors
    manifest = read_manifest(tmp_path / "run")
    assert manifest["status"] == "interrupted"
    assert manifest["journal"]["0"]["lost"]["events"] > 0


def test_second_signal_exits_immediately(tmp_path):
    process = child_with_small_files(tmp_path / "run", 100_000)
    wait_for_suspension(process)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.0)  # it now waits for the disk, for up to END_S
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == 143
    assert read_manifest(tmp_path / "run")["status"] == "killed"


def fill(path: Path) -> None:
    """Write until the file system has no space left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.fixture
def small_file_system(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system needs privileges")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_temporarily_full_file_system_loses_no_event(small_file_system):
    with record("mine", out=small_file_system / "run") as run:
        ballast = small_file_system / "ballast"
        fill(ballast)
        for step in range(500):
            run.emit(event(step))
        wait_until(lambda: run.hub.health()["sinks"]["JsonlSink"]["suspended"])
        ballast.unlink()
    assert steps_of(run.path) == list(range(500))
    assert not run.losses


def test_loss_is_recorded_on_a_file_system_that_stays_full(small_file_system, monkeypatch, capsys):
    monkeypatch.setattr("esper.nissa.recorder.END_S", 0.5)
    with record("mine", out=small_file_system / "run") as run:
        fill(small_file_system / "ballast")
        for step in range(500):
            run.emit(event(step))
    manifest = read_manifest(run.path)
    facts = manifest["journal"]["0"]
    assert manifest["status"] == "finished"
    assert facts["lost"]["events"] == facts["events"] - len(list(read(run.path))) > 0
    assert "manifest" not in capsys.readouterr().err
    assert [each.name for each in run.path.iterdir() if each.name.startswith(".")] == []


IMPATIENT_ESPER = """
from esper import cli
from esper.nissa import hub, recorder
hub.NissaHub.flush.__defaults__ = (1.0,)
recorder.END_S = 1.0
cli.main()
"""
"""The command line with 1 s instead of 10 s for each wait for a full disk: at a checkpoint and at the end."""


@pytest.mark.slow
def test_train_exits_with_code_1_on_a_file_system_that_stays_full(small_file_system):
    """The report cannot be written either, which must not hide that events are lost."""
    run = small_file_system / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT_ESPER, "train", *TINY, "--rounds", "1", "--out", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=restore_signal_handling,
    )
    wait_for_first_write(run, process, begun=False)
    (run / "report.html").mkdir()
    fill(small_file_system / "ballast")
    output = finished(process, code=1)
    assert "events could not be written" in output
    assert re.search("(Is a directory|No space left).*report.html", output), output
    manifest = read_manifest(run)
    assert manifest["status"] == "finished"
    assert manifest["journal"]["0"]["lost"]["events"] > 0


def test_run_is_refused_without_space_for_its_last_manifest(small_file_system):
    fill(small_file_system / "ballast")
    with (small_file_system / "ballast").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - (24 << 10))
    with pytest.raises(RunError, match="No space left"), record("mine", out=small_file_system / "run"):
        pass
    assert not (small_file_system / "run").exists()
