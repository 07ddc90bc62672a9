"""Real processes that are stopped or killed: at most the current round is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from esper.nissa.run import read_manifest
from tests.support.command_line import esper_in_process
from tests.support.run_outcomes import (
    TINY,
    esper,
    finished,
    is_whole,
    newest,
    outcome_of,
    restore_signal_handling,
    run_with_kills,
    seconds_per_round,
)

pytestmark = pytest.mark.slow
FEW = ["--rounds", "12"]
"""Enough rounds for a signal after the second one to arrive before the last."""
MANY = ["--rounds", "30"]
"""Enough rounds for five sessions of up to three rounds each."""


def uninterrupted_run(directory: Path, *rounds: str) -> Path:
    """Return an uninterrupted run."""
    assert esper_in_process("train", "--out", directory / "run", *TINY, *rounds).returncode == 0
    return directory / "run"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uninterrupted_run(tmp_path_factory.mktemp("uninterrupted"), *FEW)


def started(run: Path, *rounds: str) -> subprocess.Popen[bytes]:
    """Start a run and return its process after two rounds."""
    process = esper("train", "--out", run, *TINY, *rounds)
    end = time.monotonic() + 120
    while newest(run) < "round-000002":
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_the_run_after_the_step_and_prints_how_to_resume(
    number: int, word: int, uninterrupted: Path, tmp_path: Path
) -> None:
    process = started(tmp_path / "run", *FEW)
    process.send_signal(number)
    output = finished(process, code=word)
    assert "stopping after this step" in output
    assert f"Resume with: esper train --resume {tmp_path / 'run'}" in output.replace("\n", "")
    assert "Traceback" not in output
    assert read_manifest(tmp_path / "run")["status"] == "interrupted"
    assert esper_in_process("train", "--resume", tmp_path / "run", "--no-compare").returncode == 0
    assert outcome_of(tmp_path / "run") == outcome_of(uninterrupted)
    assert is_whole(tmp_path / "run")
    assert read_manifest(tmp_path / "run")["status"] == "finished"


def test_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    nohup = partial(restore_signal_handling, (signal.SIGHUP,))
    process = esper("train", "--out", tmp_path / "run", *TINY, "--rounds", "8", preexec_fn=nohup)
    while newest(tmp_path / "run") < "round-000002":
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    finished(process)
    assert read_manifest(tmp_path / "run")["status"] == "finished"


def test_second_signal_exits_immediately(tmp_path: Path) -> None:
    slow = ["--task", "rescue", "--envs", "64", "--rounds", "2", "--set", "worlds=64"]  # seconds per step
    process = esper("train", "--out", tmp_path / "run", *slow)
    while not (tmp_path / "run" / "checkpoints").is_dir():
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    while b"stopping after this step" not in (line := process.stdout.readline()):
        assert line, "it ended before it handled the first signal"
    process.send_signal(signal.SIGINT)
    finished(process, code=130, timeout=60)
    assert read_manifest(tmp_path / "run")["status"] in ("killed", "interrupted")


def test_run_killed_five_times_ends_bit_identical(tmp_path: Path) -> None:
    uninterrupted = uninterrupted_run(tmp_path / "uninterrupted", *MANY)
    pace = seconds_per_round(uninterrupted)
    assert run_with_kills(tmp_path / "run", [*TINY, *MANY], kills=5, seed=os.getpid(), round_s=pace) == 5
    assert outcome_of(tmp_path / "run") == outcome_of(uninterrupted)
    assert is_whole(tmp_path / "run")


@pytest.mark.parametrize("change", ["moved", "removed"])
def test_run_whose_directory_is_moved_or_removed_ends(change: str, tmp_path: Path) -> None:
    process = started(tmp_path / "run", "--rounds", "4000")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    if change == "removed":
        shutil.rmtree(tmp_path / "elsewhere")
    output = finished(process, code=2, timeout=60)
    assert "was moved or removed during the run" in output.replace("\n", " ")
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()
    if change == "moved":
        assert read_manifest(tmp_path / "elsewhere")["status"] == "killed"
        process = esper("train", "--resume", tmp_path / "elsewhere", "--no-compare")
        while "resuming from" not in (line := process.stdout.readline().decode()):
            assert line, "it ended"
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_only_one_of_several_concurrent_resumes_runs(tmp_path: Path) -> None:
    process = started(tmp_path / "run", "--rounds", "4000")
    process.send_signal(signal.SIGINT)
    finished(process, code=130)
    rivals = [esper("train", "--resume", tmp_path / "run", "--no-compare") for _ in range(3)]
    end = time.monotonic() + 240
    while len(alive := [p for p in rivals if p.poll() is None]) > 1:
        assert time.monotonic() < end
        time.sleep(0.05)
    try:
        (winner,) = alive
        for loser in rivals:
            if loser is not winner:
                assert f"owned by a running process (pid {winner.pid})" in finished(loser, code=2).replace("\n", " ")
    finally:
        for rival in alive:
            os.killpg(rival.pid, signal.SIGKILL)
            rival.communicate()
