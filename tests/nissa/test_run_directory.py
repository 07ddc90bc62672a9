"""The run directory: one owner, nothing overwritten, and a manifest that states how the run ended."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from esper.commands.runs import run_runs
from esper.leyline.atomic_io import lock_file, write_atomically
from esper.leyline.checksums import open_json, seal_json
from esper.leyline.errors import ConfigError, EsperError, RunError
from esper.leyline.events import PhaseProfile, RunFinished
from esper.nissa import run as run_module
from esper.nissa.journal_reader import read
from esper.nissa.journal_writer import JsonlSink
from esper.nissa.record import Record
from esper.nissa.run import END_BYTES, RunDirectory, earlier_seconds, is_owned, manifest_base, read_manifest
from esper.nissa.run_list import list_runs, run_size
from tests.support.journal_checks import next_seq

OWNER = """
import sys, time
from pathlib import Path
from esper.leyline.events import PhaseProfile
from esper.nissa.record import Record
from esper.nissa.run import RunDirectory
from esper.nissa.journal_writer import JsonlSink
run = RunDirectory.create(Path(sys.argv[1]), "digits", name="it", manifest={})
sink = JsonlSink(run.events_dir)
sink.write([Record(i, float(i), 0, PhaseProfile(phase="p", wall_ms=1.0, cpu_ms=1.0, calls=i)) for i in range(5)])
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path):
    """Start a process that owns `tmp_path/it`."""
    child = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def create(root, **facts):
    return RunDirectory.create(root, facts.pop("task", "digits"), name=facts.pop("name", None), manifest=facts)


def on_disk(run):
    return open_json((run.path / "manifest.json").read_bytes())


# Creation -----------------------------------------------------------------------------------------------------------


def test_new_run_has_a_manifest_from_the_start(tmp_path):
    run = create(tmp_path / "runs", seed=3)
    manifest = on_disk(run)
    assert manifest == run.manifest
    assert manifest["status"] == "running"
    assert manifest["schema"] == 2
    assert manifest["run_id"] == run.path.name
    assert manifest["pid"] == os.getpid()
    assert manifest["task"] == "digits"
    assert manifest["seed"] == 3
    assert datetime.fromisoformat(manifest["started"]).utcoffset().total_seconds() == 0
    assert run.events_dir.is_dir()
    assert re.fullmatch(r"\d{8}-\d{6}-digits-[0-9a-f]{4}", run.path.name)
    (reserved,) = run.path.glob(".*")
    assert reserved.stat().st_blocks * 512 >= END_BYTES
    run.finish("finished")
    assert not list(run.path.glob(".*"))


def test_space_reserved_by_a_killed_run_is_freed_when_it_is_resumed(tmp_path, owner):
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    path = tmp_path / "it"
    (draft,) = path.glob(".*")
    with RunDirectory.resume(path):
        assert draft not in path.glob(".*")
    assert not list(path.glob(".*"))


@pytest.mark.parametrize(("task", "word"), [("a/b c", "a-b-c"), ("../..", "run"), ("größe", "gr-e"), ("", "run")])
def test_any_task_makes_a_path_safe_name(tmp_path, task, word):
    run = create(tmp_path, task=task)
    assert run.path.parent == tmp_path
    assert run.path.name[16:-5] == word
    run.finish("finished")


def test_runs_of_the_same_second_get_distinct_names(tmp_path, monkeypatch):
    draws, random = iter(["aaaa", "aaaa", "bbbb", "cccc"] * 2), run_module.secrets.token_hex
    monkeypatch.setattr(run_module.secrets, "token_hex", lambda size: next(draws) if size == 2 else random(size))

    class FixedDatetime(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2030, 1, 1, 12, tzinfo=tz)

    monkeypatch.setattr(run_module, "datetime", FixedDatetime)
    names = [create(tmp_path).path.name for _ in range(3)]
    assert names == [f"20300101-120000-digits-{end}" for end in ("aaaa", "bbbb", "cccc")]


def test_caller_cannot_override_status_pid_id_and_start(tmp_path):
    run = create(tmp_path, status="finished", pid=1, run_id="other", started="never", schema=0)
    assert run.manifest["status"] == "running"
    assert run.manifest["pid"] == os.getpid()
    assert run.manifest["run_id"] == run.path.name
    assert run.manifest["started"] != "never"
    run.finish("finished")


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not empty"):
        create(tmp_path, name="mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]

    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError):
        create(tmp_path, name="file")

    create(tmp_path, name="done").finish("finished")
    with pytest.raises(ConfigError, match="resume"):
        create(tmp_path, name="done")


def test_empty_directory_of_the_requested_name_is_used(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    with create(tmp_path / "a", name="b") as run:
        assert run.path == tmp_path / "a" / "b"
    with create(tmp_path / "c" / "d", name="e") as run:
        assert run.manifest["run_id"] == "e"


@pytest.mark.parametrize("value", [np.float64(1.0), np.zeros(2), object()])
def test_unwritable_manifest_leaves_no_directory(tmp_path, value):
    with pytest.raises(TypeError):
        create(tmp_path / "runs", seed=value)
    assert not (tmp_path / "runs").exists()


# End of a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (None, "finished", None),
        (KeyboardInterrupt(), "interrupted", None),
        (ValueError("loss is NaN"), "failed", "ValueError: loss is NaN"),
        (SystemExit(), "finished", None),
        (SystemExit(0), "finished", None),
        (SystemExit(1), "failed", "SystemExit: 1"),
        (SystemExit("no data"), "failed", "SystemExit: no data"),
        (SystemExit(130), "interrupted", "SIGINT"),
        (SystemExit(143), "interrupted", "SIGTERM"),
    ],
)
def test_exit_of_the_block_decides_the_final_status(tmp_path, error, status, message):
    run = create(tmp_path)
    leaving = nullcontext() if error is None else pytest.raises(type(error))
    with leaving as caught, run:
        assert is_owned(run.path)
        if error is not None:
            raise error
    assert error is None or caught.value is error
    manifest = read_manifest(run.path)
    assert manifest["status"] == status
    assert manifest.get("error") == message
    assert manifest["finished"] >= manifest["started"]
    assert not is_owned(run.path)


def test_first_final_status_counts(tmp_path):
    with create(tmp_path) as run:
        run.finish("failed", "the reason", env_steps=7)
        run.finish("finished")
    assert (run.manifest["status"], run.manifest["error"], run.manifest["env_steps"]) == ("failed", "the reason", 7)
    assert on_disk(run) == run.manifest


def test_invalid_final_status_is_refused(tmp_path):
    with create(tmp_path) as run, pytest.raises(ConfigError, match="'killed'"):
        run.finish("killed")


def test_failing_finalisation_hides_no_error_and_releases_the_run(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("disk full")

    run = create(tmp_path)
    monkeypatch.setattr(run_module.os, "replace", refuse)
    with pytest.raises(ValueError, match="the cause") as caught, run:
        raise ValueError("the cause")
    assert "disk full" in caught.value.__notes__[0]
    assert read_manifest(run.path)["status"] == "killed"

    monkeypatch.undo()
    run = create(tmp_path)
    monkeypatch.setattr(run_module.os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"), run:
        pass
    assert not is_owned(run.path)
    assert not list(run.path.glob(".*"))


def test_non_finite_numbers_are_spelled_out(tmp_path):
    with create(tmp_path, limit=math.inf, config={"clip": math.nan}) as run:
        pass
    assert '"limit": "Infinity"' in (run.path / "manifest.json").read_text()
    assert read_manifest(run.path)["limit"] == math.inf
    assert math.isnan(read_manifest(run.path)["config"]["clip"])


def test_file_is_replaced_atomically(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def refuse(_):
        raise OSError("power")

    with monkeypatch.context() as patch:
        patch.setattr(run_module.os, "fsync", refuse)
        with pytest.raises(OSError, match="power"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


# Owners -------------------------------------------------------------------------------------------------------------


def test_second_process_is_refused_and_shown_the_owner(tmp_path, owner):
    code = (
        "import sys; from pathlib import Path; from esper.nissa.run import RunDirectory; "
        "RunDirectory.resume(Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "it")], capture_output=True, text=True)
    assert done.returncode != 0
    assert f"RunError: {tmp_path / 'it'} is owned by a running process (pid {owner.pid})" in done.stderr
    with pytest.raises(RunError, match=str(owner.pid)):
        RunDirectory.resume(tmp_path / "it")
    with pytest.raises(ConfigError):
        create(tmp_path, name="it")
    assert owner.poll() is None
    assert read_manifest(tmp_path / "it")["status"] == "running"


def test_run_of_a_killed_owner_reads_as_killed_and_can_be_resumed(tmp_path, owner):
    path = tmp_path / "it"
    assert read_manifest(path)["status"] == "running"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert read_manifest(path)["status"] == "killed"
    assert json.loads((path / "manifest.json").read_text())["status"] == "running"
    assert list_runs(tmp_path)[0].status == "killed"

    with RunDirectory.resume(path) as run:
        assert read_manifest(path)["status"] == "running"
        assert run.manifest["pid"] == os.getpid()
        first = next_seq(path)
        sink = JsonlSink(run.events_dir)
        sink.write([Record(first, 9.0, 0, PhaseProfile(phase="p", wall_ms=1.0, cpu_ms=1.0, calls=9))])
        sink.close()
    assert [entry.seq for entry in read(path)] == [0, 1, 2, 3, 4, 5]
    assert read_manifest(path)["status"] == "finished"


def test_resumed_run_records_how_it_ended_before(tmp_path):
    with pytest.raises(ValueError), create(tmp_path, seed=1) as run:
        raise ValueError("no memory left")
    with RunDirectory.resume(run.path) as again:
        assert "error" not in again.manifest
        assert "finished" not in again.manifest
    with RunDirectory.resume(run.path) as third:
        pass
    manifest = read_manifest(run.path)
    assert manifest["seed"] == 1
    assert manifest["started"] == run.manifest["started"]
    assert [session["status"] for session in third.manifest["sessions"]] == ["failed", "finished"]
    assert manifest["sessions"][0]["error"] == "ValueError: no memory left"
    assert manifest["sessions"][1]["started"] == again.manifest["resumed"]


def test_readers_do_not_disturb_owners(tmp_path):
    """Readers take the lock for a moment; an owner that starts at that moment retries."""
    create(tmp_path, name="it").finish("finished")
    looking = os.open(tmp_path / "it" / "run.lock", os.O_RDONLY)
    assert lock_file(looking, shared=True)
    assert not is_owned(tmp_path / "it")  # two readers at once are fine
    timer = threading.Timer(0.05, os.close, [looking])
    timer.start()
    RunDirectory.resume(tmp_path / "it").finish("finished")
    timer.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_forked_worker_owns_nothing_and_does_not_keep_the_lock(tmp_path):
    code = """
import os, sys, time
from pathlib import Path
from esper.nissa.run import RunDirectory
with RunDirectory.create(Path(sys.argv[1]), "digits", name="it", manifest={}) as run:
    if os.fork() == 0:
        run.finish("failed")
        print(os.getpid(), flush=True)
        time.sleep(60)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    worker = int(parent.stdout.readline())
    try:
        assert read_manifest(tmp_path / "it")["status"] == "running"
        parent.kill()
        parent.wait()
        assert read_manifest(tmp_path / "it")["status"] == "killed"
        RunDirectory.resume(tmp_path / "it").finish("finished")
    finally:
        os.kill(worker, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.usefixtures("owner")
def test_copy_of_a_running_run_has_no_owner(tmp_path):
    shutil.copytree(tmp_path / "it", tmp_path / "copy")
    assert read_manifest(tmp_path / "copy")["status"] == "killed"
    (tmp_path / "copy" / "run.lock").unlink()
    assert read_manifest(tmp_path / "copy")["status"] == "killed"
    assert len(list(read(tmp_path / "copy"))) == 5


# Reading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"status": "finished"}', b"\xff\xfe", b"\0" * 100]
    + [seal_json(body) for body in (b'{"a": 1}', b'{"status": 3}', b'{"a": \xff}', b'{"a": ' + b"[" * 99_999)],
)
def test_damaged_manifest_is_a_clear_error(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    for look in (read_manifest, RunDirectory.resume):
        with pytest.raises(RunError, match=r"manifest\.json"):
            look(tmp_path)
    assert not (tmp_path / "run.lock").exists()


def test_every_flipped_bit_and_truncation_of_a_manifest_is_refused(tmp_path):
    with create(tmp_path) as run:
        pass
    file = run.path / "manifest.json"
    content = file.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        for wrong in (bytes(damaged), content[:place]):
            file.write_bytes(wrong)
            with pytest.raises(RunError, match="damaged"):
                read_manifest(run.path)


def test_directory_without_a_manifest_is_no_run(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(EsperError, match="is not a run"):
            read_manifest(path)


def test_manifest_of_a_later_schema_is_readable(tmp_path):
    with create(tmp_path) as run:
        pass
    content = on_disk(run) | {"schema": 99, "moons": {"phobos": 1}}
    (run.path / "manifest.json").write_bytes(seal_json(json.dumps(content).encode()))
    assert read_manifest(run.path) == content
    assert list_runs(tmp_path)[0].status == "finished"


def test_manifest_base_has_versions_and_no_machine_paths(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/private/bin/esper", "grow", "--task", "rescue"])
    base = manifest_base()
    assert base["command"] == "esper grow --task rescue"
    assert base["versions"]["python"].startswith("3.")
    assert {"esper", "torch", "numpy"} <= set(base["versions"])
    assert all(base["versions"].values())
    assert base["cpus"] >= 1
    assert "private" not in json.dumps(base)


def test_manifest_base_does_not_import_torch():
    code = "import sys; from esper.nissa.run import manifest_base; manifest_base(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# Lists --------------------------------------------------------------------------------------------------------------


def three_runs(root):
    with create(root, name="first", controller="heuristic") as run:
        sink = JsonlSink(run.events_dir)
        sink.write([Record(0, 1.0, 0, RunFinished(status="finished", wall_s=1.0, env_steps=1234))])
        sink.close()
    time.sleep(0.002)  # start times have millisecond resolution
    create(root, name="second", config={"controller": "ppo"}).finish("failed", "why")
    time.sleep(0.002)
    third = create(root, name="third")
    sink = JsonlSink(third.events_dir)
    sink.write([Record(i, 10.0 + 50 * i, 0, PhaseProfile(phase="p", wall_ms=1.0, cpu_ms=1.0, calls=1)) for i in (0, 1)])
    sink.close()
    return third


def test_runs_are_listed_newest_first_with_their_file_data(tmp_path):
    third = three_runs(tmp_path)
    rows = list_runs(tmp_path)
    assert [row.id for row in rows] == ["third", "second", "first"]
    assert [row.status for row in rows] == ["running", "failed", "finished"]
    assert [row.controller for row in rows] == [None, "ppo", "heuristic"]
    assert [row.env_steps for row in rows] == [None, None, 1234]
    assert rows[0].seconds == 50.0
    assert 0 <= rows[1].seconds < 60
    assert run_size(rows[2].path) == sum(f.stat().st_size for f in (tmp_path / "first").rglob("*") if f.is_file())
    third.finish("finished")


def test_list_skips_other_directories_and_shows_broken_runs(tmp_path):
    three_runs(tmp_path).finish("finished")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "elsewhere").mkdir()
    for name, content in (
        ("torn", b"{"),
        ("odd", seal_json(b'{"status": "later", "started": 3, "finished": [], "config": 1}')),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(content)
    (tmp_path / "unborn").mkdir()
    (tmp_path / "unborn" / "run.lock").touch()
    rows = {row.id: row for row in list_runs(tmp_path)}
    assert set(rows) == {"first", "second", "third", "torn", "odd", "unborn"}
    assert rows["torn"].status == rows["unborn"].status == "unreadable"
    assert rows["odd"].status == "later"
    assert rows["odd"].started is rows["odd"].seconds is None


@pytest.mark.parametrize("root", ["nowhere", "file"])
def test_missing_directory_lists_nothing(tmp_path, root):
    (tmp_path / "file").touch()
    assert list_runs(tmp_path / root) == []


def shown_by_the_command(root, width=None):
    """Return the output on a terminal of this width; without one, in a pipe."""
    out = io.StringIO()
    terminal = {} if width is None else {"force_terminal": True, "no_color": True, "width": width}
    run_runs(root, as_json=False, console=Console(file=out, **terminal))
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


@pytest.mark.parametrize("width", [80, 160, None])
def test_command_shows_a_table_with_complete_names(tmp_path, width):
    three_runs(tmp_path).finish("interrupted")
    create(tmp_path, task="tinystories").finish("finished")
    output = shown_by_the_command(tmp_path, width)
    names = [line.split()[0] for line in output.splitlines()[1:5]]
    assert names == [row.id for row in list_runs(tmp_path)]
    assert "interrupted" in output
    assert "1,234" in output
    assert ("started" in output.splitlines()[0]) == ("size" in output.splitlines()[0]) == (width != 80)
    assert ("hidden, the terminal is too narrow: started (UTC), size" in output) == (width == 80)


def test_size_is_shown_where_it_fits(tmp_path):
    three_runs(tmp_path).finish("finished")
    assert "size" in shown_by_the_command(tmp_path, 80).splitlines()[0]


def test_command_distinguishes_copies_and_no_name_breaks_the_table(tmp_path):
    three_runs(tmp_path).finish("finished")
    shutil.copytree(tmp_path / "first", tmp_path / "a copy")
    shutil.copytree(tmp_path / "first", tmp_path / "two\nlines")
    lines = shown_by_the_command(tmp_path).splitlines()
    assert len(lines) == 6
    assert sum(line.startswith(("first ", "a copy ", "two\\nlines ")) for line in lines) == 3


@pytest.mark.parametrize("root", ["nosuch", "file"])
def test_command_refuses_a_missing_directory(tmp_path, root):
    (tmp_path / "file").touch()
    for as_json in (False, True):
        with pytest.raises(ConfigError, match="no runs at"):
            run_runs(tmp_path / root, as_json)


def test_command_prints_json(tmp_path, capsys):
    three_runs(tmp_path).finish("finished")
    run_runs(tmp_path, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == ["third", "second", "first"]
    assert Path(rows[0]["path"]) == tmp_path / "third"


def test_command_gives_a_hint_where_there_are_no_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_runs(Path("runs"), as_json=False)  # the default directory, before the first run
    assert "esper grow" in " ".join(capsys.readouterr().out.split())
    run_runs(Path("runs"), as_json=True)
    assert json.loads(capsys.readouterr().out) == []


def test_duration_of_a_resumed_run_is_the_sum_of_its_sessions(tmp_path, monkeypatch):
    from esper.nissa import run as module

    clock = iter(f"2026-01-01T00:00:{second:02d}+00:00" for second in (0, 4, 30, 35, 50, 56))
    monkeypatch.setattr(module, "_now", lambda: next(clock))
    with RunDirectory.create(tmp_path, "digits", name="run", manifest={}):
        pass  # 0 to 4
    with RunDirectory.resume(tmp_path / "run") as directory:
        assert earlier_seconds(directory.manifest) == 4  # 30 to 35
    with RunDirectory.resume(tmp_path / "run") as directory:
        assert earlier_seconds(directory.manifest) == 9  # 50 to 56
    (row,) = list_runs(tmp_path)
    assert row.seconds == 15
