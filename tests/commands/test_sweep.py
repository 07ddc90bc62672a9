"""`esper sweep`: a plan is settings × worlds; leases, interruption, resumption, and the comparison at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper.commands.grow import GrowOptions, run_grow
from esper.commands.sweep import STALE_S, Lease, SweepPlan, read_plan, run_sweep
from esper.leyline.errors import ConfigError, RunError
from esper.nissa.run import read_manifest

PLAN = """
worlds = [100, 2]
[common]
task = "digits"
epochs = 3
[settings.none]
controller = "none"
[settings.schedule]
controller = "schedule"
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def test_sweep_runs_every_setting_in_every_world_once_and_compares(plan: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "sweep"
    for shard in ("1/2", "2/2"):
        run_sweep(plan, shard=shard, workers=2, out=out)
    text = capsys.readouterr().out
    assert re.search(r"\[2/2\] \w+ world 101: \d+ s, about 0 min left", text)
    assert "2 of 4 runs" in text
    assert "schedule" in text
    assert "2 worlds" in text
    assert (out / "sweep.svg").read_text().startswith("<svg")
    comparison = json.loads((out / "sweep.json").read_text())
    assert [len(arm["paths"]) for arm in comparison["arms"]] == [2, 2]
    assert comparison["pairs"][0]["worlds"] == [100, 101]
    manifests = {path: path.stat().st_mtime_ns for path in out.rglob("manifest.json")}
    assert len(manifests) == 4
    assert not list((out / "leases").glob("*-*"))
    run_sweep(plan, shard="1/1", workers=1, out=out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("manifest.json")} == manifests
    assert "4 runs, 4 of them finished before" in capsys.readouterr().out


@pytest.mark.slow
def test_interrupted_sweep_continues_where_it_stopped(plan: Path, tmp_path: Path) -> None:
    out, straight = tmp_path / "sweep", tmp_path / "straight"
    plan.write_text(PLAN.replace("[100, 2]", "[100, 1]").replace("epochs = 3", "epochs = 40"))
    command = [sys.executable, "-m", "esper", "sweep", str(plan), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    run = out / "none" / "100"
    end = time.monotonic() + 120
    while not list(run.glob("checkpoints/*/index.json")):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert read_manifest(run)["status"] == "interrupted"
    assert not (out / "leases" / "none-100").exists()
    run_sweep(plan, shard="1/1", workers=1, out=out)
    assert len(read_manifest(run)["sessions"]) == 1
    for job in read_plan(plan).jobs():  # in this process, which has imported torch
        run_grow(read_plan(plan).of(job.arm, job.world), GrowOptions(out=straight / job.arm / str(job.world)))
    run_sweep(plan, shard="1/1", workers=1, out=straight)
    pairs = [json.loads((place / "sweep.json").read_text())["pairs"] for place in (out, straight)]
    assert pairs[0] == pairs[1]


@pytest.mark.slow
def test_leased_run_is_left_to_its_owner(plan: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "sweep"
    plan.write_text(PLAN.replace("[100, 2]", "[100, 1]"))
    (out / "leases").mkdir(parents=True)
    lease = Lease.take(out / "leases" / "none-100")
    assert lease is not None
    assert Lease.take(out / "leases" / "none-100") is None
    run_sweep(plan, shard="1/1", workers=1, out=out)
    text = capsys.readouterr().out
    assert "none world 100 is run by another process" in text
    assert "1 of 2 runs" in text
    lease.release()


def test_lease_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "arm-100"
    code = "import os, pathlib, sys; from esper.commands.sweep import Lease; Lease.take(pathlib.Path(sys.argv[1])); "
    subprocess.run([sys.executable, "-c", code + "os._exit(0)", str(path)], check=True)
    assert path.exists()
    lease = Lease.take(path)
    assert lease is not None
    lease.release()
    assert not path.exists()


def test_lease_of_another_machine_is_taken_over_when_it_is_silent(tmp_path: Path) -> None:
    path = tmp_path / "arm-100"
    path.write_text("another-machine 12\n")
    assert Lease.take(path) is None
    long_ago = time.time() - STALE_S - 1
    os.utime(path, (long_ago, long_ago))
    assert Lease.take(path) is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worlds = [0", "cannot be used"),
        ("worlds = [0, 2]\n[settings.a]\n", "two or more arms"),
        (PLAN.replace("[100, 2]", "[100, 0]"), r"count ≥ 1, got \[100, 0\]"),
        (PLAN.replace("epochs = 3", "epoch = 3"), "unknown field `epoch`"),
        (PLAN.replace("epochs = 3", "epochs = 0"), "epochs must be ≥ 1, got 0"),
        (PLAN.replace("epochs = 3", "threads = 0"), "threads must be ≥ 1, got 0"),
        (PLAN.replace("epochs = 3", "seed = 3"), "worlds instead of the option seed"),
        (PLAN.replace('"schedule"', '"none"'), "two arms have the same settings"),
        (PLAN + 'task = "fashion"', "all arms must have the same task"),
        (PLAN.replace("settings.none", 'settings."../x"'), "names of arms"),
    ],
)
def test_invalid_plan_is_refused_with_the_reason(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_plan(path)


@pytest.mark.slow
def test_failed_run_does_not_stop_the_others(plan: Path, tmp_path: Path) -> None:

    plan.write_text(PLAN.replace("[100, 2]", "[100, 1]").replace('"schedule"', '"no_such_controller"'))
    with pytest.raises(RunError, match=r"1 of 2 runs failed, first schedule world 100 \(exit code 2, see .*logs"):
        run_sweep(plan, shard="1/1", workers=1, out=tmp_path / "sweep")
    assert read_manifest(tmp_path / "sweep" / "none" / "100")["status"] == "finished"


def test_jobs_complete_paired_worlds_early() -> None:
    plan = SweepPlan(worlds=(3, 2), settings={"a": {"controller": "none"}, "b": {}})
    assert [(job.arm, job.world) for job in plan.jobs()] == [("a", 3), ("b", 3), ("a", 4), ("b", 4)]
