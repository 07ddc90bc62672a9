"""Every reader compares the journal with the counts recorded at the end of the run, and reports missing events."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from esper.commands.report import run_report
from esper.commands.runs import run_runs
from esper.commands.sql import run_sql
from esper.karn.problems import problems
from esper.karn.run_state import RunState
from esper.karn.sql import Runs
from esper.karn.watch.cells import problem_lines
from esper.karn.watch.watched_run import WatchedRun
from esper.leyline.checksums import seal_json
from esper.leyline.errors import RunError
from esper.leyline.events import GovernorAlarm, PhaseProfile, RunFinished
from esper.nissa.hub import NissaHub
from esper.nissa.journal_reader import Damage, Extent, read
from esper.nissa.journal_writer import JsonlSink
from esper.nissa.missed_events import lost_events
from esper.nissa.recorder import record, record_beside, record_on
from esper.nissa.run import read_manifest
from esper.nissa.run_list import list_runs
from tests.support.run_outcomes import TINY, esper, finished

STEPS = 20


def event(step: int) -> GovernorAlarm:
    return GovernorAlarm(env=0, episode=0, step=step, alarm="none", action="none")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a finished run of two ranks: 20 events each, then `run_finished` of rank 0 and each hub's final record."""
    with record("mine", out=tmp_path / "runs" / "run") as recorded:
        for step in range(STEPS):
            recorded.emit(event(step))
        with record_beside(recorded.path, 1, 0) as beside:
            for step in range(STEPS):
                beside.emit(event(step))
        recorded.emitted = {0: 0, 1: beside.next_seq}
    return recorded.path


def cut(run: Path, rank: int, lines: int) -> None:
    """Remove lines at the end of a rank's journal."""
    file = run / "events" / f"rank{rank}-00000.jsonl"
    kept = file.read_bytes().splitlines(keepends=True)[:-lines]
    file.write_bytes(b"".join(kept))


def cut_rank_0(run: Path) -> None:
    cut(run, 0, 12)


def remove_rank_1(run: Path) -> None:
    (run / "events" / "rank1-00000.jsonl").unlink()


def remove_everything(run: Path) -> None:
    shutil.rmtree(run / "events")
    (run / "events").mkdir()


DAMAGES = {
    cut_rank_0: ["12 events of rank 0 missing", "no run_finished event"],
    remove_rank_1: ["21 events of rank 1 missing"],
    remove_everything: ["22 events of rank 0 missing", "21 events of rank 1 missing", "no run_finished event"],
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_reader_reports_missing_events(run, damage, capsys):
    assert RunState.of(run).losses == list_runs(run.parent)[0].losses == []
    damage(run)
    losses = DAMAGES[damage]

    assert RunState.of(run).losses == losses
    assert [text for _, text in problems(RunState.of(run))][: len(losses)] == [
        f"The journal is incomplete: {text}." for text in losses
    ]
    assert list_runs(run.parent)[0].losses == losses
    with Runs([run]) as opened:
        assert opened.ask("select missing from runs").rows == [("; ".join(losses),)]
    watched = WatchedRun(run, lambda: 0.0)
    watched.read()
    assert f"The journal is incomplete: {losses[0]}." in problem_lines(watched).plain

    run_runs(run.parent, as_json=False)
    run_report([run], run.parent / "report.html", as_json=False, open_browser=False)
    run_sql([run], "select 1")
    out, err = capsys.readouterr()
    for text in losses:
        assert " ".join(out.split()).count(text) == 2
        assert text in err


def test_every_reader_reports_a_gap_in_the_middle(run):
    file = run / "events" / "rank0-00000.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:5] + lines[8:]))
    with Runs([run]) as opened:
        assert opened.ask("select missing from runs").rows == [("3 events of rank 0 missing",)]
        assert opened.ask("select after_seq, before_seq, missing from losses").rows == [(4, 8, 3)]
    assert RunState.of(run).losses == ["3 events of rank 0 missing"]


def test_replaced_gauges_are_not_reported_as_lost(tmp_path):
    class Gate(JsonlSink):
        is_open = False

        def write(self, records):
            if not self.is_open:
                raise OSError("shut")
            super().write(records)

    run = tmp_path / "run"
    sink = Gate(run / "events")
    with NissaHub([sink], capacity=8) as hub:
        for calls in range(40):
            hub.emit(PhaseProfile(phase="train", wall_ms=1.0, cpu_ms=1.0, calls=calls))
        sink.is_open = True
        hub.emit(RunFinished(status="finished", wall_s=1.0, env_steps=1))
    (run / "manifest.json").write_bytes(
        seal_json(json.dumps({"status": "finished", "journal": {"0": {"events": hub.next_seq}}}).encode())
    )
    assert hub.health()["coalesced"] > 20
    assert RunState.of(run).losses == list_runs(tmp_path)[0].losses == []
    with Runs([run]) as opened:
        assert opened.ask("select missing from runs").rows == [(None,)]
        assert opened.ask("select * from losses").rows == []
        assert opened.ask("select count(extra) from phases").rows == [(0,)]


def test_counts_are_right_after_a_resume(run):
    with record_on(run, [7, 5]) as recorded:
        assert "journal" not in recorded.directory.manifest
        recorded.emit(event(7))
        with record_beside(run, 1, 5) as beside:
            beside.emit(event(5))
        recorded.emitted = {0: 0, 1: beside.next_seq}
    assert recorded.directory.manifest["journal"] == {"0": {"events": 10}, "1": {"events": 7}}
    assert RunState.of(run).losses == list_runs(run.parent)[0].losses == []
    cut(run, 1, 1)
    assert RunState.of(run).losses == ["1 event of rank 1 missing"]


def test_events_lost_before_a_resume_are_still_reported(run):
    cut(run, 0, 12)
    with pytest.warns(UserWarning, match="are not in the journal"), record_on(run, [20, 20]):
        pass
    assert RunState.of(run).losses == list_runs(run.parent)[0].losses == ["10 events of rank 0 missing"]


def test_deleted_journal_is_reported_after_a_successful_resume(run, capsys):
    remove_everything(run)
    with pytest.warns(UserWarning, match="40 of the 40 events"), record_on(run, [20, 20]) as resumed:
        resumed.emitted = {1: 20}
    losses = ["20 events of rank 0 missing", "20 events of rank 1 missing"]
    assert RunState.of(run).losses == list_runs(run.parent)[0].losses == losses
    assert resumed.losses == []  # events of an earlier session: warned about, and not an error of this one
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("elsewhere"), os.mkfifo], ids=["link", "fifo"])
def test_journal_file_that_is_not_regular_is_counted_by_readers_and_refused_on_resume(run, make):
    make(run / "events" / "rank0-00001.jsonl")
    before = (run / "manifest.json").read_bytes()
    assert RunState.of(run).damage.lines == 1
    with Runs([run]) as opened:
        assert opened.ask("select damaged from runs").rows == [(1,)]
    watched = WatchedRun(run, lambda: 0.0)
    for _ in range(3):
        watched.read()
    assert watched.state.damage.lines == 1
    with (
        pytest.raises(RunError, match=r"events/rank0-00001.jsonl: it is a (symbolic link|FIFO)"),
        record_on(run, [7, 5]),
    ):
        pass
    assert (run / "manifest.json").read_bytes() == before


def test_failed_resume_keeps_the_earlier_count_of_missing_events(run, monkeypatch):
    cut(run, 0, 12)

    def refuse(*_: object) -> None:
        raise RunError("cannot rewind")

    monkeypatch.setattr("esper.nissa.recorder.rewind", refuse)
    with pytest.raises(RunError, match="cannot rewind"), record_on(run, [7, 5]):
        pass
    assert read_manifest(run)["status"] == "failed"
    assert RunState.of(run).losses == ["12 events of rank 0 missing", "no run_finished event"]


@pytest.mark.slow
def test_counts_are_right_after_a_resume_with_another_number_of_workers(tmp_path):
    run = tmp_path / "run"
    for args in (["--out", run, *TINY, "--rounds", "2", "--workers", "1"], ["--resume", run, "--rounds", "4",
                 "--workers", "2", "--no-compare"]):  # fmt: skip
        finished(esper("train", *args))
        damage = Damage()
        for _ in read(run, damage):
            pass
        written = {str(rank): {"events": extent.next_seq} for rank, extent in damage.extents().items()}
        assert read_manifest(run)["journal"] == written
        assert len(written) == int(args[args.index("--workers") + 1])
        assert RunState.of(run).losses == []
    (run / "events" / "rank1-00000.jsonl").unlink()
    assert RunState.of(run).losses == [f"{written['1']['events']} events of rank 1 missing"]


@pytest.mark.parametrize(
    ("manifest", "extents", "has_end", "losses"),
    [
        ({"status": "running"}, {0: Extent(5, 0)}, False, []),
        ({"status": "killed"}, {0: Extent(5, 2)}, False, ["2 events missing"]),
        ({"status": "finished"}, {0: Extent(5, 0)}, False, ["no run_finished event"]),
        ({"status": "finished", "journal": {"0": {"events": 0}}}, {}, False, []),  # telemetry is off
        ({"status": "failed", "journal": {"0": {"events": 3}}}, {0: Extent(3, 0)}, False, ["no run_finished event"]),
        ({"status": "finished", "journal": {"0": {"events": 6}}}, {0: Extent(5, 0)}, True, ["1 event missing"]),
        ({"status": "finished", "journal": {"0": 3, "x": {"events": 2}, "1": []}}, {0: Extent(5, 0)}, True, []),
        ({"status": "finished", "journal": "?"}, {0: Extent(5, 0)}, True, []),
    ],
)
def test_losses_computed_from_a_manifest_and_a_journal(manifest, extents, has_end, losses):
    assert lost_events(manifest, extents, has_end=has_end) == losses
