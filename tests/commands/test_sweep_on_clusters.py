"""The examples of docs/sweeps.md for batch systems: their files are parsed, their commands run as there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from esper.nissa.run import read_manifest
from tests.support import ROOT

TEXT = (ROOT / "docs" / "sweeps.md").read_text()
PLAN = """
worlds = [100, 2]
[common]
task = "digits"
epochs = {epochs}
[settings.none]
controller = "none"
[settings.schedule]
controller = "schedule"
"""
JOB = {"apiVersion", "kind", "metadata", "spec"}
JOB_SPEC = {"completionMode", "completions", "parallelism", "backoffLimit", "template"}
POD_SPEC = {"restartPolicy", "terminationGracePeriodSeconds", "containers", "volumes"}
CONTAINER = {"name", "image", "command", "volumeMounts"}
SKYPILOT = {"num_nodes", "resources", "file_mounts", "setup", "run", "workdir"}


def example(heading: str) -> str:
    """Return the code block below a heading."""
    match = re.search(rf"^## {heading}\n\n```\w+\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert match is not None
    return match.group(1)


def kubernetes() -> dict[str, Any]:
    return yaml.safe_load(example("Kubernetes indexed job"))


def skypilot() -> dict[str, Any]:
    return yaml.safe_load(example("SkyPilot"))


def shards_of(command: str) -> int:
    return int(re.search(r"/(\d+)( &.*)?$", command.strip(), re.MULTILINE).group(1))  # type: ignore[union-attr]


def test_kubernetes_job_is_valid_and_starts_every_shard() -> None:
    job = kubernetes()
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (job.keys(), job["apiVersion"], job["kind"]) == (JOB, "batch/v1", "Job")
    assert spec.keys() == JOB_SPEC
    assert pod.keys() == POD_SPEC
    assert container.keys() == CONTAINER
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == shards_of(container["command"][2])
    assert pod["restartPolicy"] in ("OnFailure", "Never")  # others are refused for jobs
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] >= 120  # `esper sweep` waits as long for its runs


def test_skypilot_task_is_valid_and_starts_every_shard() -> None:
    task = skypilot()
    assert task.keys() == SKYPILOT
    assert task["num_nodes"] == shards_of(task["run"])


def test_slurm_script_is_valid_and_starts_every_shard() -> None:
    script = example("Slurm array")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", script, re.MULTILINE))
    assert options.keys() == {"array", "cpus-per-task", "time", "requeue", "signal"}
    assert options["array"] == f"1-{shards_of(script)}"
    assert int(options["signal"].rpartition("@")[2]) >= 120


class Node:
    """A directory that stands for /shared, with `esper` and `scontrol` on the path."""

    def __init__(self, place: Path, epochs: int) -> None:
        self.place, self.shared = place, place / "shared"
        self.shared.mkdir()
        for name in ("plan.toml", "shared/plan.toml"):
            (place / name).write_text(PLAN.format(epochs=epochs))
        tools = {"esper": f'exec {sys.executable} -m esper "$@"', "scontrol": f'echo "$@" >> {place}/scontrol.txt'}
        (place / "bin").mkdir()
        for name, line in tools.items():
            path = place / "bin" / name
            path.write_text(f"#!/bin/sh\n{line}\n")
            path.chmod(0o755)

    def start(self, command: list[str], **variables: str) -> subprocess.Popen[str]:
        env = os.environ | {"PATH": f"{self.place}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **variables}
        command = [part.replace("/shared", str(self.shared)) for part in command]
        return subprocess.Popen(
            command, cwd=self.place, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )


@pytest.mark.slow
def test_commands_of_all_examples_run_their_shards(tmp_path: Path) -> None:
    """Slurm takes world 100, Kubernetes world 101; the third shard, on SkyPilot, has no world left."""
    node = Node(tmp_path, epochs=1)
    commands = [
        (["bash", "-c", example("Slurm array")], {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "77"}),
        (kubernetes()["spec"]["template"]["spec"]["containers"][0]["command"], {"JOB_COMPLETION_INDEX": "1"}),
        (["bash", "-c", skypilot()["run"]], {"SKYPILOT_NODE_RANK": "2"}),
    ]
    for number, (command, variables) in enumerate(commands):
        process = node.start(command, **variables)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
        runs = [path.parent for path in (node.shared / "sweep").rglob("manifest.json")]
        assert {read_manifest(run)["status"] for run in runs} == {"finished"}, output
        assert len(runs) == (2, 4, 4)[number]
    assert (node.shared / "sweep" / "sweep.json").exists()
    assert not (tmp_path / "scontrol.txt").exists()


@pytest.mark.slow
def test_preempted_slurm_task_saves_and_requeues_itself(tmp_path: Path) -> None:
    node = Node(tmp_path, epochs=2000)
    process = node.start(
        ["bash", "-c", example("Slurm array")], SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="77"
    )  # fmt: skip
    run = node.shared / "sweep" / "none" / "100"
    end = time.monotonic() + 240
    while not list(run.glob("checkpoints/*/index.json")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 77_1\n"
    assert read_manifest(run)["status"] == "interrupted"
    assert not list((node.shared / "sweep" / "leases").glob("*-*"))
