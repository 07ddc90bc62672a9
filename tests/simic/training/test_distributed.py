"""A run by several processes equals the run by one: the same weights, rewards and events."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.errors import ConfigError
from esper.nissa.run import read_manifest
from esper.simic.training.distributed import ProcessGroup
from tests.support.command_line import esper_in_process
from tests.support.fork_server import exit_codes, start
from tests.support.run_outcomes import TINY, esper, events, finished, is_whole, newest, outcome_of

HOSTS = [
    "--task", "digits", "--rounds", "2", "--envs", "4", "--epochs", "8", "--set", "worlds=3",
    "--set", "network.width=16", "--set", "ppo.minibatches=2", "--no-compare",
]  # fmt: skip
ROUNDS = ["--rounds", "3"]


@given(st.integers(1, 40), st.data())
def test_shares_cover_all_environments_once_and_evenly(envs: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, envs))
    shares = [range(envs)[ProcessGroup(rank, size).share(envs)] for rank in range(size)]
    assert [e for share in shares for e in share] == list(range(envs))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_processes_than_environments_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 processes cannot share 2"):
        ProcessGroup(0, 3).share(2)


def test_rows_are_placed_at_their_environments() -> None:
    rows = np.arange(4, dtype=np.float32).reshape(2, 2)
    placed = ProcessGroup(1, 3).pad_rows(rows, 5, blank=9)
    assert placed.tolist() == [[9, 9], [9, 9], [0, 1], [2, 3], [9, 9]]
    assert torch.equal(ProcessGroup().pad_rows(rows, 2), torch.from_numpy(rows))


def exchange_messages(rank: int, file: str, out: str) -> None:
    """Write down what one rank of three receives; runs in its own process."""
    os.environ["ESPER_RENDEZVOUS"] = f"{rank}/3/{file}"
    group = ProcessGroup.join()
    field = torch.full((2, 7), float("nan"))
    field[:, group.share(7)] = torch.tensor([[-0.0], [float("inf")]]) if rank == 1 else float(rank + 1)
    flags = torch.zeros(2, 7, dtype=torch.bool)
    flags[1, group.share(7)] = True
    group.gather([field, flags])
    message = group.broadcast({"path": "ä", "n": [1, 2]} if group.is_rank_zero else None)
    same = same_or_not(group, b"x" * 32)
    other = same_or_not(group, bytes([rank]) * 32)
    results = [field.view(torch.int32).tolist(), flags.tolist(), message, group.gather_ints(rank * 10), same, other]
    Path(out).write_text(repr(results))
    group.leave()


def same_or_not(group: ProcessGroup, digest: bytes) -> str:
    try:
        group.agree(lambda: digest, "these bytes")
    except Exception as error:
        return str(error)
    return "agreed"


def test_ranks_receive_every_bit_of_each_other(tmp_path: Path) -> None:
    meet = str(tmp_path / "meet")
    assert exit_codes([start(exchange_messages, rank, meet, str(tmp_path / str(rank))) for rank in range(3)]) == [
        0,
        0,
        0,
    ]
    field, flags, message, each, same, other = eval((tmp_path / "0").read_text(), {})
    assert all((tmp_path / str(rank)).read_text() == (tmp_path / "0").read_text() for rank in (1, 2))
    bits = torch.tensor([[1.0] * 3 + [-0.0] * 2 + [3.0] * 2, [1.0] * 3 + [float("inf")] * 2 + [3.0] * 2])
    assert field == bits.view(torch.int32).tolist()
    assert flags == [[False] * 7, [True] * 7]
    assert message == {"path": "ä", "n": [1, 2]}
    assert each == [0, 10, 20]
    assert same == "agreed"
    assert re.search("these bytes differ between rank 0 and rank 1, 2", other)


def record_barrier(rank: int, file: str, through: str) -> None:
    """Delay rank 1 at the barrier; rank 0 records whether it waited."""
    enter = torch.distributed.init_process_group

    def init_with_delay(*args: object, **kwargs: object) -> None:
        enter(*args, **kwargs)
        time.sleep(1.0)
        Path(through).touch()

    if rank == 1:
        torch.distributed.init_process_group = init_with_delay
    os.environ["ESPER_RENDEZVOUS"] = f"{rank}/2/{file}"
    group = ProcessGroup.join()
    assert Path(through).exists()
    group.leave()


def test_no_rank_continues_before_all_passed_the_barrier(tmp_path: Path) -> None:
    """Rank 0 removes the rendezvous directory, and a rank still looking for it would wait for hours."""
    places = (str(tmp_path / "meet"), str(tmp_path / "through"))
    assert exit_codes([start(record_barrier, rank, *places) for rank in range(2)]) == [0, 0]


@pytest.fixture(scope="module")
def single_process_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    assert esper_in_process("train", "--out", run, *TINY, *ROUNDS).returncode == 0
    return run


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_run_is_the_same_for_any_number_of_workers(workers: int, single_process_run: Path, tmp_path: Path) -> None:
    output = finished(esper("train", "--out", tmp_path / "run", "--workers", str(workers), *TINY, *ROUNDS))
    assert "Learning" in output
    assert "Traceback" not in output
    assert outcome_of(tmp_path / "run") == outcome_of(single_process_run)
    assert {p.name[:5] for p in (tmp_path / "run" / "events").iterdir()} == {f"rank{r}" for r in range(workers)}
    assert is_whole(tmp_path / "run")


@pytest.mark.slow
def test_real_hosts_are_the_same_for_three_ranks_under_torchrun(tmp_path: Path) -> None:
    assert esper_in_process("train", "--out", tmp_path / "one", *HOSTS).returncode == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "esper",
               "train", "--out", str(tmp_path / "three"), *HOSTS]  # fmt: skip
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    assert events(tmp_path / "three") == events(tmp_path / "one")
    assert outcome_of(tmp_path / "three") == outcome_of(tmp_path / "one")


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    end = time.monotonic() + 60
    while not (family := psutil.Process(process.pid).children()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return family


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "code"), [("ctrl-c", 130), ("worker", 3), ("rank 0", -9), ("term", 143)])
def test_process_group_still_starting_ends_when_one_rank_does(ends: str, code: int, tmp_path: Path) -> None:
    process = esper(
        "train", "--out", tmp_path / "run", "--workers", "2", *TINY, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    (worker,) = workers_of(process)
    if ends == "ctrl-c":
        os.killpg(process.pid, signal.SIGINT)
    elif ends == "worker":
        worker.kill()
    else:
        process.send_signal(signal.SIGKILL if ends == "rank 0" else signal.SIGTERM)
    output = finished(process, code, timeout=60)
    if ends == "worker":
        assert "worker 1 of 2 ended (signal 9)" in output
    assert psutil.wait_procs([worker], timeout=30)[1] == []
    assert not (tmp_path / "run").exists()
    if ends != "rank 0":
        assert not list(tmp_path.glob("esper-*"))


@pytest.mark.slow
def test_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    process = esper("train", "--out", tmp_path / "run", "--workers", "2", *TINY, "--rounds", "400")
    try:
        until(process, lambda: newest(tmp_path / "run") >= "round-000002")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(family) == 2
        doors = [c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert doors, "they must meet somewhere"
        assert set(doors) <= {"127.0.0.1", "::1"}
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_killed_rank_ends_the_run_and_it_resumes_with_another_number(tmp_path: Path) -> None:
    run, rounds = tmp_path / "run", ["--rounds", "9"]
    process = esper("train", "--out", run, "--workers", "3", *TINY, *rounds)
    until(process, lambda: newest(run) >= "round-000002")
    victim = psutil.Process(process.pid).children()[1]
    victim.kill()
    output = finished(process, code=3)
    assert re.search(r"esper: worker [12] of 3 ended \(.*--resume", output, re.S), output
    assert "Traceback" not in output
    assert not psutil.pid_exists(victim.pid)
    assert read_manifest(run)["status"] == "failed"
    assert esper_in_process("train", "--resume", run, "--workers", "1", "--no-compare").returncode == 0
    assert esper_in_process("train", "--out", tmp_path / "uninterrupted", *TINY, *rounds).returncode == 0
    assert outcome_of(run) == outcome_of(tmp_path / "uninterrupted")
    assert is_whole(run)


def until(process: subprocess.Popen[bytes], true: object, timeout: float = 240) -> None:
    end = time.monotonic() + timeout
    while not true():  # type: ignore[operator]
        if process.poll() is not None or time.monotonic() > end:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
            raise AssertionError(f"exit code {process.poll()}: {process.communicate()}")
        time.sleep(0.02)
