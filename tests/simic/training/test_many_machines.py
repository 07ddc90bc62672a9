"""`torchrun --nnodes=2 -m esper train` on two network namespaces: same result, lost machines, elastic restart."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from esper.simic.training.heartbeat import SILENCE
from tests.support import ROOT
from tests.support.command_line import esper_in_process
from tests.support.network import cut_cable, missing_requirement, two_machines
from tests.support.run_outcomes import TINY, newest, outcome_of

reason = missing_requirement()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason)]
BOUND_S = 40
"""Seconds within which every survivor ends after a loss, with the default heartbeat."""
SHORT_SILENCE_S = {"machine frozen": "6"}
"""Silence timeouts of losses that would wait for the default one, of 20 s. The loss "cable cut" waits for that."""
ROUNDS = ["--rounds", "6"]


class Cluster:
    """Two machines that run one command under torchrun, each with an agent and one rank."""

    def __init__(self, machines: tuple[str, str], logs: Path) -> None:
        self.machines, self.logs = machines, logs
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str | Path, restarts: int = 0, silence_s: str | None = None) -> None:
        env = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
        if silence_s is not None:
            env[SILENCE] = silence_s
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        for number, machine in enumerate(self.machines):
            torchrun = [
                "ip", "netns", "exec", machine, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                "--nproc-per-node", "1", "--node-rank", str(number), "--rdzv-backend", "c10d", "--rdzv-endpoint",
                "10.213.7.1:29511", "--rdzv-id", "esper", "--local-addr", f"10.213.7.{number + 1}",
                "--max-restarts", str(restarts), "--rdzv-conf", f"is_host={1 - number},join_timeout=120",
                "-m", "esper", "train", *map(str, command),
            ]  # fmt: skip
            log = (self.logs / f"machine-{number}.log").open("wb")
            self.agents.append(subprocess.Popen(torchrun, env=env, stdout=log, stderr=log, start_new_session=True))

    def log(self, number: int) -> str:
        return (self.logs / f"machine-{number}.log").read_text(errors="replace")

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a machine that trains."""
        family = psutil.Process(self.agents[number].pid).children(recursive=True)
        return next(p for p in family if "esper" in p.cmdline() and "torch.distributed.run" not in p.cmdline())

    def until(self, condition: Callable[[], bool], timeout: float = 240) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, self.log(0)[-2000:] + self.log(1)[-2000:]
            time.sleep(0.1)

    def signal(self, number: int, which: signal.Signals) -> None:
        """Send a signal to every process of a machine."""
        agent = psutil.Process(self.agents[number].pid)
        for process in [*agent.children(recursive=True), agent]:
            process.send_signal(which)

    def end(self) -> None:
        for agent in self.agents:
            try:
                family = psutil.Process(agent.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                family = []
            for process in family:
                process.kill()
            agent.kill()
            agent.wait()


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, reaped or not: an agent that waits for its store reaps nothing."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with two_machines() as machines:
        cluster = Cluster(machines, tmp_path)
        try:
            yield cluster
        finally:
            cluster.end()


@pytest.fixture(scope="module")
def single_process_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    assert esper_in_process("train", "--out", run, *TINY, *ROUNDS).returncode == 0
    return run


def test_two_machines_train_the_same_policy_as_one_process(
    cluster: Cluster, single_process_run: Path, tmp_path: Path
) -> None:
    cluster.start("--out", tmp_path / "run", *TINY, *ROUNDS)
    assert [agent.wait(timeout=300) for agent in cluster.agents] == [0, 0], cluster.log(0) + cluster.log(1)
    assert outcome_of(tmp_path / "run") == outcome_of(single_process_run)


LOSSES: dict[str, tuple[Callable[[Cluster], None], tuple[int, ...]]] = {
    "cable cut": (lambda cluster: cut_cable(cluster.machines[1]), (0, 1)),
    "machine killed": (lambda cluster: cluster.signal(1, signal.SIGKILL), (0,)),
    "machine frozen": (lambda cluster: cluster.signal(1, signal.SIGSTOP), (0,)),
    "rank 0 lost": (lambda cluster: cluster.signal(0, signal.SIGKILL), (1,)),
}


@pytest.mark.parametrize("how", LOSSES)
def test_lost_machine_ends_the_others_and_the_run_resumes(how: str, cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    lose, survivors = LOSSES[how]
    cluster.start("--out", run, *TINY, "--rounds", "4000", silence_s=SHORT_SILENCE_S.get(how))
    cluster.until(lambda: newest(run) >= "round-000002")
    ranks = {number: cluster.rank(number) for number in survivors}
    start = time.monotonic()
    lose(cluster)
    cluster.until(lambda: all(has_ended(rank) for rank in ranks.values()), timeout=120)
    seconds = time.monotonic() - start
    print(f"{how}: survivors ended after {seconds:.1f} s")
    assert seconds <= BOUND_S
    for number in survivors:
        log = cluster.log(number)
        is_named = f"esper: rank {1 - number}" in log and f"Resume with: esper train --resume {run}" in log
        was_stopped = "esper: rank 1 is stopping" in log  # by its agent, which noticed first that its store is lost
        assert is_named or (how == "rank 0 lost" and was_stopped), log[-3000:]
    if 0 in survivors:  # machine 0 has the agents' store: without it the other agent cannot report how its rank ended
        cluster.until(lambda: bool(re.search(r"exitcode\s*: 3", cluster.log(0))), timeout=60)
    cluster.end()
    shown = esper_in_process("train", "--resume", run, "--show")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["rounds"] == 4000


def test_elastic_restart_resumes_the_run(cluster: Cluster, single_process_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cluster.start("--out", run, *TINY, *ROUNDS, restarts=1)
    cluster.until(lambda: newest(run) >= "round-000002")
    cluster.rank(1).kill()
    assert [agent.wait(timeout=300) for agent in cluster.agents] == [0, 0], cluster.log(0) + cluster.log(1)
    assert "resuming from round-" in cluster.log(0)
    assert outcome_of(run) == outcome_of(single_process_run)
