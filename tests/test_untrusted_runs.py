"""Untrusted run directories: no command changes a file outside them, blocks on one, or reads without bound."""

import contextlib
import io
import json
import os
import resource
import sys
import time
from pathlib import Path

import pytest

from esper import cli
from esper.commands.resuming import checkpoint_of, must_fit
from esper.leyline.errors import RunError
from esper.nissa.journal_reader import Damage, Follower, decoded_entries, read, segment_name
from esper.nissa.journal_writer import rewind
from esper.nissa.run import RunDirectory, is_owned, read_manifest
from esper.nissa.run_list import list_runs
from esper.tolaria.checkpoint import Checkpoints
from tests.support.bad_input import Case, check, esper
from tests.support.journal_checks import next_seq
from tests.support.untrusted_runs import ACTS, FINISHED, a_run, entry, run_with_control_characters


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mine() -> Path:
    folder = Path("mine")
    (folder / "kept").mkdir(parents=True)
    (folder / "thesis.txt").write_text("years")
    (folder / "kept" / "index.json").write_text("data")
    return folder.absolute()


# -- links


def resumable(name: str = "run") -> Path:
    path = a_run(Path(name), entry(0))
    Checkpoints(path / "checkpoints").write("round-000001", documents={"run": {}})
    return path


LINKED = ["run.lock", "manifest.json", "events", "checkpoints", "baselines", "best_host", "tensorboard"]


@pytest.mark.parametrize("part", LINKED)
def test_run_with_a_symlink_is_not_resumed_and_nothing_outside_changes(place, part):
    folder, path = mine(), resumable()
    target = folder if part not in ("run.lock", "manifest.json") else folder / "thesis.txt"
    if part == "manifest.json":
        (folder / "thesis.txt").write_text(json.dumps(FINISHED))
    if (path / part).is_dir():
        (path / part).rename(path / "was")
    else:
        (path / part).unlink(missing_ok=True)
    (path / part).symlink_to(target)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    with pytest.raises(RunError, match=r"symbolic link"):
        RunDirectory.resume(path)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("thesis.txt"), os.mkfifo], ids=["link", "fifo"])
def test_manifest_that_is_not_a_regular_file_is_not_rebuilt(place, make):
    path = resumable()
    (path / "manifest.json").unlink()
    make(path / "manifest.json")
    before = os.lstat(path / "manifest.json")
    with pytest.raises(RunError, match=r"it is a (symbolic link|FIFO)"):
        checkpoint_of(path, "train", lambda _: {})
    assert os.path.samestat(os.lstat(path / "manifest.json"), before)


def test_lock_with_a_second_hard_link_is_not_taken(place):
    folder, path = mine(), resumable()
    os.link(folder / "thesis.txt", path / "run.lock")
    with pytest.raises(RunError, match="hard link"):
        RunDirectory.resume(path)
    assert (folder / "thesis.txt").read_text() == "years"


def test_segments_that_are_links_are_neither_read_nor_written(place):
    folder, path = mine(), a_run(Path("run"), entry(0))
    (folder / "log").write_bytes(entry(1))
    (path / "events" / segment_name(0, 1)).symlink_to(folder / "log")
    damage = Damage()
    assert [each.seq for each in read(path, damage)] == [0]
    assert damage.lines == 1
    with pytest.raises(RunError, match="cannot rewind"):
        rewind(path, 0, 0)
    assert (folder / "log").read_bytes() == entry(1)


def test_checkpoints_that_are_links_are_neither_removed_nor_read(place):
    folder = mine()
    checkpoints = Checkpoints(Path("kept"), keep=1)
    Checkpoints(folder).write("old", documents={"run": {"secret": 1}})
    Path("kept").mkdir()
    Path("kept/old").symlink_to(folder / "old")
    Path("kept/.draft-1").symlink_to(folder)
    for name in ("a", "b"):
        checkpoints.write(name, documents={"run": {}})
    assert checkpoints.names() == ["b"]
    assert Checkpoints(folder).names() == ["old"]
    assert (folder / "thesis.txt").read_text() == "years"


def test_report_changes_nothing_but_itself(place):
    folder, path = mine(), a_run(Path("run"), entry(0))
    (path / "report.html").symlink_to(folder / "thesis.txt")
    for pid in (os.getpid(), os.getpid() + 1):
        (path / f".report.html.{pid}.tmp").symlink_to(folder / "thesis.txt")
    assert esper("report", path)[0] == 0
    assert (folder / "thesis.txt").read_text() == "years"
    assert "<html" in (path / "report.html").read_text()


# -- endless files


@pytest.mark.parametrize("part", ["manifest.json", "run.lock"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["fifo", "device"])
def test_fifo_or_device_is_no_part_of_a_run(place, part, make):
    path = a_run(Path("run"), entry(0), **({"status": "running"} if part == "run.lock" else {}))
    (path / part).unlink(missing_ok=True)
    make(path / part)
    a_run(Path("other"))
    assert not is_owned(path)
    assert {row.path.name: row.status for row in list_runs(Path("."))} == {
        "run": "killed" if part == "run.lock" else "unreadable", "other": "finished",
    }  # fmt: skip
    for command in (["runs", "."], ["report", path], ["watch", path, "--once"], ["sql", path, "select 1 as a"]):
        assert esper(*command)[0] == 0, command


def test_oversized_manifest_is_refused_unread(place):
    path = a_run(Path("run"))
    with (path / "manifest.json").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(RunError, match="more than"):
        read_manifest(path)
    assert [row.status for row in list_runs(Path("."))] == ["unreadable"]


def test_endless_line_is_one_damaged_line(place, monkeypatch):
    monkeypatch.setattr("esper.nissa.journal_reader.MOST_LINE_BYTES", 1 << 20)
    path = a_run(Path("run"), entry(0), b"\0" * (5 << 20), b"\n", entry(1), b"\0" * (3 << 20))
    damage = Damage()
    assert [each.seq for each in read(path, damage)] == [0, 1]
    assert (damage.lines, damage.torn) == (1, 1)
    assert next_seq(path) == 2


def test_follower_skips_an_overlong_line_and_reads_on_after_it(place, monkeypatch):
    monkeypatch.setattr("esper.nissa.journal_reader.MOST_LINE_BYTES", 1 << 20)
    path = a_run(Path("run"), entry(0))
    follower, segment = Follower(path, decoded_entries), path / "events" / segment_name(0, 0)
    assert len(follower.poll()) == 1
    for _ in range(4):
        with segment.open("ab") as file:
            file.write(b"\0" * (1 << 19))
        assert follower.poll() == []
    with segment.open("ab") as file:
        file.write(b"\n" + entry(1))
    assert [each.seq for each in follower.poll()] == [1]
    assert follower.damage.lines == 1


def test_half_a_gigabyte_without_newline_is_read_in_linear_time(place):
    path = a_run(Path("run"), entry(0))
    with (path / "events" / segment_name(0, 0)).open("r+b") as file:
        file.truncate(1 << 29)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    assert [each.seq for each in read(path)] == [0]
    assert next_seq(path) == 1
    assert time.process_time() - started < 60  # one second in pieces; an hour if joined repeatedly
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


def test_too_many_ranks_are_refused_and_many_need_few_open_files(place, monkeypatch):
    path = a_run(Path("run"))
    for rank in range(200):
        (path / "events" / segment_name(rank, 0)).write_bytes(entry(0, rank=rank))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 40, hard))
    try:
        assert len(list(read(path))) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr("esper.nissa.journal_reader.MOST_RANKS", 100)
    with pytest.raises(RunError, match="200 ranks"):
        list(read(path))
    a_run(Path("other"))
    assert {row.path.name for row in list_runs(Path("."))} == {"run", "other"}
    check(Case("", ["report", path], ("200 ranks",)), place)


# -- numbers


NUMBERS = [1e308, -1e308, 2**62, -(2**62), 2**64, 10**30, "Infinity", "-Infinity", "NaN", True, None, [1], {}]


@pytest.mark.parametrize("value", NUMBERS, ids=str)
def test_impossible_number_breaks_no_command_and_no_other_run(place, value):
    result = {"env_steps": value, "started": value, "finished": value, "sessions": [{"seconds": value}, value]}
    a_run(Path("strange"), entry(0, time_s=1e10), **result)
    a_run(Path("strange-id"), run_id=value, task=value, controller=value, config=value, status="killed")
    a_run(Path("plain"), env_steps=7)
    rows = {row.path.name: row for row in list_runs(Path("."))}
    assert rows["plain"].env_steps == 7
    assert all(row.seconds is None or 0 <= row.seconds < 1e12 for row in rows.values())
    for options in ([], ["--json"]):
        assert esper("runs", ".", *options)[0] == 0
    for command in ("report", "watch --once"):
        assert esper(*command.split()[:1], "strange", *command.split()[1:])[0] == 0
    assert esper("sql", "strange", "select 1 as a")[0] == 0


@pytest.mark.parametrize("time_s", [1e308, -1e308, 2.0**62, 1e15])
def test_entry_with_an_impossible_time_is_damage_to_every_reader(place, time_s):
    path = a_run(Path("run"), entry(0), entry(1, time_s=time_s), entry(2))
    damage = Damage()
    assert [each.seq for each in read(path, damage)] == [0, 2]
    assert damage.lines == 1
    from esper.karn.sql import Runs

    with Runs([path]) as runs:
        assert runs.ask("select events, damaged from directories").rows == [(2, 1)]


# -- text


SPOKEN = [
    ["report", "run"], ["report", "run", "--json"], ["report", "run", "other"], ["watch", "run", "--once"],
    ["runs", "."], ["runs", ".", "--json"], ["sql", "run", "select * from run_started"],
    ["sql", "run", "from lifecycle", "--csv"],
    ["sql", "run", "from other_events", "--json"], ["sql", "run", "from directories"],
    ["sql", "run", "from health", "--csv"], ["sql", "run", f"select 1 as \"{ACTS}\""],
    ["sql", "run", f"select 1 as \"{ACTS}\"", "--csv"], ["sql", "run", f"select * from \"{ACTS}\""],
    ["export", "run"], ["train", "--resume", "run"], ["eval", "run", "none"],
]  # fmt: skip


@pytest.mark.parametrize("command", SPOKEN, ids=lambda command: " ".join(command)[:40])
def test_no_character_of_a_run_acts_on_the_terminal(place, command):
    run_with_control_characters("run")
    run_with_control_characters("other")
    if command[:2] == ["sql", "run"]:
        command = [part.replace("\x00", "") for part in command]
    output, errors = run_esper(command)
    assert output or errors
    for text in (output, errors):
        assert not [c for c in text if not c.isprintable() and c not in "\n\t"], (output, errors)
    for page in (Path("run/report.html"), Path("report.html")):
        if not page.exists():
            continue
        assert not [c for c in page.read_text() if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize("command", ["report", "watch --once", "runs", "sql"])
def test_name_of_a_run_directory_does_not_act_on_the_terminal(place, command):
    path = a_run(Path("all") / ACTS.replace("\x00", ""), entry(0), b"damaged\n")
    verb, *options = command.split()
    query = ["select 1 as a"] if verb == "sql" else []
    output, errors = run_esper([verb, "all" if verb == "runs" else str(path), *query, *options])
    text = output + errors
    assert "\\x1b]0;owned" in text
    assert not [c for c in text if not c.isprintable() and c != "\n"]


def test_error_message_does_not_act_on_the_terminal(place):
    _, errors = run_esper(["report", f"nowhere {ACTS}".replace("\x00", "")])
    assert "\\x1b]0;owned" in errors
    assert errors.rstrip("\n").isprintable()


def test_differences_of_a_checkpoint_do_not_act_on_the_terminal(capsys):
    must_fit([f"torch: {ACTS} then, 2 now"], allow_inexact=True)
    assert capsys.readouterr().err.rstrip("\n").isprintable()


def run_esper(command: list[str]) -> tuple[str, str]:
    output, errors, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["esper", *command]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
            cli.main()
    finally:
        sys.argv = before
    return output.getvalue(), errors.getvalue()


# -- queries


@pytest.mark.parametrize(
    "query",
    [
        "select levenshtein(repeat('a', 200000), repeat('b', 200000))",  # ignores interrupts
        "select range(20000000) as r from range(1000)",  # unbounded Python objects
        "with recursive t(n) as (select 1 union all select n + 1 from t) select max(n) from t",
    ],
)
def test_any_query_ends_at_its_timeout(place, query):
    a_run(Path("run"), entry(0, "run_finished", status="finished", wall_s=1.0, env_steps=1))
    check(Case("", ["sql", "run", query, "--timeout", "1", "--csv"], ("stopped",)), place)


@pytest.mark.parametrize("query", ["select range(1000000000)", "select list(range) from range(10000000000)"])
def test_query_has_a_memory_limit(place, query):
    a_run(Path("run"), entry(0, "run_finished", status="finished", wall_s=1.0, env_steps=1))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    check(Case("", ["sql", "run", query, "--timeout", "600"], ("more than 2 GB of memory", "fewer rows")), place)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < max(before, 5 << 20)  # kB
