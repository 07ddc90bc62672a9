"""A run that is followed: journals that are cut off or replaced meanwhile, and what each viewer is sent."""

import json
import os

import pytest

from esper.karn.live_run import Cursor, LiveRun
from esper.leyline.checksums import open_json, seal_json
from esper.nissa.journal_writer import rewind
from tests.support.sample_runs import Journal, started, step

FIRST = "rank0-00000.jsonl"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("esper.karn.live_run.POLL_S", 0.0)
    monkeypatch.setattr("esper.karn.live_run.STATUS_S", 0.0)


def write_steps(path, count, *, quality=0.5, start_s=1_763_245_000.0):
    journal = Journal(path, start_s=start_s)
    journal.write(started())
    for n in range(1, count + 1):
        journal.write(step(n, quality=quality))
    return journal.close()


def cursor_of(document):
    return Cursor(document["position"], document["version"], document["run"]["status"])


def qualities(document):
    return document["series"]["0"]["columns"]["quality"]


def cut(path):
    file = path / "events" / FIRST
    os.truncate(file, file.stat().st_size // 2)


def replaced(path):
    other = write_steps(path.parent / "other", 30, quality=0.9, start_s=1_763_999_000.0)
    (other / "events" / FIRST).replace(path / "events" / FIRST)


def removed(path):
    (path / "events" / FIRST).unlink()


@pytest.mark.parametrize(("disturb", "position"), [(cut, 10), (replaced, 31), (removed, 0)])
def test_disturbed_journal_is_read_again_and_viewers_get_all_of_it(tmp_path, disturb, position):
    path = write_steps(tmp_path / "run", 20)
    run = LiveRun(path)
    first = run.document()
    assert first["position"] == 21
    assert run.changes(cursor_of(first)) is None
    disturb(path)
    patch = run.changes(cursor_of(first))
    assert patch["since"] == 0
    assert patch["version"] != first["version"]
    assert abs(patch["position"] - position) <= 1
    if disturb is replaced:
        assert qualities(patch) == [0.9] * 30
    assert run.changes(cursor_of(patch)) is None
    fresh = LiveRun(path).document()
    assert {**fresh, "version": ""} == {**run.document(), "version": ""}


def test_resumed_run_is_not_read_again(tmp_path):
    path = write_steps(tmp_path / "run", 20)
    run = LiveRun(path)
    first = run.document()
    assert rewind(path, 0, 11) == 10
    assert run.changes(cursor_of(first)) is None
    again = Journal(tmp_path / "again")
    again.seq = 11
    for n in range(11, 26):
        again.write(step(n))
    again.file.close()
    with (path / "events" / "rank0-00001.jsonl").open("ab") as file:
        file.write((tmp_path / "again" / "events" / FIRST).read_bytes())
    patch = run.changes(cursor_of(first))
    assert (patch["since"], patch["position"], patch["series"]["0"]["at"]) == (21, 26, 20)
    assert patch["series"]["0"]["columns"]["step"] == list(range(21, 26))
    assert not any("damaged" in problem["text"] for problem in patch["problems"])


def test_every_viewer_learns_that_a_run_was_killed(tmp_path):
    path = write_steps(tmp_path / "run", 3)
    set_status(path, "finished")
    run = LiveRun(path)
    viewers = [cursor_of(run.document()) for _ in range(2)]
    set_status(path, "interrupted")
    assert [run.changes(viewer)["run"]["status"] for viewer in viewers] == ["interrupted"] * 2


def set_status(path, status):
    manifest = open_json((path / "manifest.json").read_bytes()) | {"status": status}
    (path / "manifest.json").write_bytes(seal_json(json.dumps(manifest).encode()))


def test_cursor_of_another_server_is_answered_with_everything(tmp_path):
    run = LiveRun(write_steps(tmp_path / "run", 20))
    version = run.document()["version"]
    for cursor in (Cursor(5, "7 1.0"), Cursor(10**17, version), Cursor(0)):
        assert run.changes(cursor)["since"] == 0
    assert run.changes(Cursor(5, version))["since"] == 5
