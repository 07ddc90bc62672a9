"""Real processes and signals: a rank waiting for another handles them, and a lost rank ends the run resumably."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.nissa.run import read_manifest
from esper.simic.training.distributed import ProcessGroup
from esper.simic.training.heartbeat import RankLostError, silence_s
from tests.support.fork_server import exit_codes, start
from tests.support.run_outcomes import TINY, esper, finished, newest

LONG = "600"
"""Silence timeout in seconds, longer than any test waits."""


def waiting(run: Path, silence: str) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """Return the processes of a run of two ranks after two rounds: rank 0 and the worker."""
    env = os.environ | {"ESPER_SILENCE_S": silence}
    process = esper("train", "--out", run, "--workers", "2", *TINY, "--rounds", "4000", env=env)
    end = time.monotonic() + 240
    while newest(run) < "round-000002":
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    (worker,) = psutil.Process(process.pid).children()
    return process, worker


def end(process: subprocess.Popen[bytes]) -> None:
    """End a whole process group, stopped members included."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until_no_round_ends(run: Path) -> None:
    """Return once no round ends any more: rank 0 waits for the stopped one."""
    before = ""
    while newest(run) != before:
        before = newest(run)
        time.sleep(1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_rank_waiting_for_another_exits_on_the_first_signal(number: int, code: int, tmp_path: Path) -> None:
    process, worker = waiting(tmp_path / "run", LONG)
    try:
        worker.suspend()
        wait_until_no_round_ends(tmp_path / "run")
        process.send_signal(number)
        output = finished(process, code, timeout=60)
    finally:
        end(process)
    assert f"Resume with: esper train --resume {tmp_path / 'run'}" in output.replace("\n", "")
    assert "Traceback" not in output
    assert read_manifest(tmp_path / "run")["status"] == "interrupted"
    assert not worker.is_running()


@pytest.mark.slow
def test_stopped_worker_ends_the_run_resumably(tmp_path: Path) -> None:
    process, worker = waiting(tmp_path / "run", "6")
    try:
        worker.suspend()
        output = finished(process, 3, timeout=60)
    finally:
        end(process)
    assert "rank 1 has not answered for 6 s" in output
    assert f"The last checkpoint is {newest(tmp_path / 'run')}. Resume with: esper train --resume" in output.replace(
        "\n", " "
    )
    assert "Traceback" not in output
    assert read_manifest(tmp_path / "run")["status"] == "failed"
    assert not worker.is_running()


@pytest.mark.slow
def test_stopped_rank_zero_ends_the_others_and_itself_when_continued(tmp_path: Path) -> None:
    process, worker = waiting(tmp_path / "run", "6")
    try:
        process.send_signal(signal.SIGSTOP)
        wait_for_end(worker)
        process.send_signal(signal.SIGCONT)
        output = finished(process, 3, timeout=60)
    finally:
        end(process)
    assert "rank 0 has not answered for 6 s" in output
    assert "after rank 0 has ended" in output.replace("\n", " ")
    assert "worker 1 of 2 ended" in output
    assert read_manifest(tmp_path / "run")["status"] == "failed"


def wait_for_end(worker: psutil.Process) -> None:
    """Return once a process has ended; its parent is stopped, so it stays a zombie."""
    limit = time.monotonic() + 60
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
def test_whole_run_suspended_longer_than_the_silence_timeout_continues(tmp_path: Path) -> None:
    process, worker = waiting(tmp_path / "run", "6")
    try:
        process.send_signal(signal.SIGSTOP)
        worker.suspend()
        time.sleep(8.0)
        then = newest(tmp_path / "run")
        worker.resume()
        process.send_signal(signal.SIGCONT)
        limit = time.monotonic() + 120
        while newest(tmp_path / "run") <= then:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit
            time.sleep(0.05)
    finally:
        end(process)


def lose_rank_two(rank: int, file: str, out: str, how: str) -> None:
    """Connect, then lose rank 2 while the others wait for it; each writes down the rank it reports as lost."""
    os.environ["ESPER_RENDEZVOUS"] = f"{rank}/3/{file}"
    os.environ["ESPER_SILENCE_S"] = "6"
    group = ProcessGroup.join()
    group.gather_ints(rank)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    try:
        group.gather([torch.zeros(2, 3)])
    except RankLostError as error:
        Path(out).write_text(f"{error.rank}")
    group.leave()


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_every_rank_learns_which_one_was_lost(how: str, tmp_path: Path) -> None:
    meet = str(tmp_path / "meet")
    *others, lost = [start(lose_rank_two, rank, meet, str(tmp_path / str(rank)), how) for rank in range(3)]
    try:
        assert exit_codes(others) == [0, 0]
    finally:
        lost.kill()
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "7200"])
def test_invalid_silence_timeout_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_SILENCE_S", text)
    with pytest.raises(ConfigError, match=f"ESPER_SILENCE_S .* above 0 and below 7200, got {text!r}"):
        silence_s()
