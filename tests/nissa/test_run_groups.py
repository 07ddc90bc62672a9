"""Runs in groups, such as OUT/a of `esper train --ab` and DIR/ARM/WORLD of `esper sweep`, are found like others."""

import os
from pathlib import Path

from esper.commands.runs import run_runs
from esper.nissa.run_list import find_run, list_runs
from tests.support.sample_runs import Journal


def a_run(path):
    return Journal(path).close()


def test_runs_of_groups_are_listed_with_their_path(tmp_path, capsys):
    for name in ("one", "lr/a", "lr/b", "sweep/none/3"):
        a_run(tmp_path / name)
    assert {row.name for row in list_runs(tmp_path)} == {"one", "lr/a", "lr/b", "sweep/none/3"}
    run_runs(tmp_path, as_json=False)
    assert "sweep/none/3" in capsys.readouterr().out


def test_other_directories_are_not_taken_for_runs(tmp_path):
    a_run(tmp_path / "one")
    a_run(tmp_path / "one" / "inside")
    a_run(tmp_path / ".hidden" / "run")
    a_run(tmp_path / "far" / "too" / "deep" / "run")
    a_run(tmp_path.parent / f"{tmp_path.name}-outside" / "run")
    (tmp_path / "link").symlink_to(tmp_path.parent / f"{tmp_path.name}-outside")
    (tmp_path / "site" / "public").mkdir(parents=True)
    (tmp_path / "site" / "public" / "manifest.json").write_text("{}")  # of a web application
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [row.name for row in list_runs(tmp_path)] == ["one"]


def test_directory_that_cannot_be_read_is_left_out(tmp_path, monkeypatch):
    a_run(tmp_path / "one")
    a_run(tmp_path / "closed" / "run")
    scan = os.scandir

    def refuse(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert [row.name for row in list_runs(tmp_path)] == ["one"]


def test_newest_run_may_be_in_a_group(tmp_path):
    old, new = a_run(tmp_path / "old"), a_run(tmp_path / "lr" / "b")
    os.utime(old / "events", (1, 1))
    assert find_run(tmp_path) == new
