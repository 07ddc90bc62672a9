"""Test that benchmarks run from the repository root and that `benchmarks.train` times the real training code."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from typing import Any

import pytest

from benchmarks import observations, simulator
from benchmarks.hosts import reference_task
from benchmarks.train import BareLoop, Case, HeldBackend, compare
from esper.simic.agent.ppo import PPO
from esper.simic.training.checkpointer import Checkpointer
from tests.support import ROOT

SHARED = {"__init__", "bars", "bare_loop", "hosts", "measure", "recorded_run"}
BENCHMARKS = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if p.stem not in SHARED)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as leaving:
        importlib.import_module(f"benchmarks.{name}").main()
    assert leaving.value.code == 0
    assert "--repeats" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "repeats"), [("body", 3), ("worth", 3), ("hub", 3), ("hot_paths", 3), ("workers", 1)])
def test_benchmark_prints_json(
    name: str, repeats: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the module as `python -m` does, in this process: a new one would import torch again."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--repeats", str(repeats), "--json"])
    runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("blueprints", [(), ("conv_light",)])
def test_train_benchmark_times_update_checkpoint_and_telemetry(
    blueprints: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, int] = {}
    for owner, name in ((PPO, "update"), (Checkpointer, "save_if_due"), (HeldBackend, "step"), (BareLoop, "step")):
        monkeypatch.setattr(owner, name, counted(calls, f"{owner.__name__}.{name}", getattr(owner, name)))
    row = compare(Case("small", reference_task(8, 8), envs=2, steps=2, blueprints=blueprints), repeats=2)

    assert calls["PPO.update"] == 3  # the first round is not counted
    assert calls["Checkpointer.save_if_due"] >= 3
    assert calls["HeldBackend.step"] == calls["BareLoop.step"] == 6
    assert {"train", "policy", "update", "checkpoint", "telemetry"} <= row["phases_ms"].keys()
    assert row["phases_ms"]["update"] > 0.0
    assert ("coalitions" in row["phases_ms"]) == bool(blueprints)
    assert row["events_per_s"] > 0.0
    assert row["s_per_env_step"] > 0.0
    assert row["ratio"] >= row["ratio_with_coalitions"] > 0.0


def counted(calls: dict[str, int], name: str, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        return function(*args, **kwargs)

    return call


def test_simulator_benchmark_reports_steps_per_second_per_env_count() -> None:
    rows = simulator.rows(repeats=1, quick=True)
    assert [r["envs"] for r in rows] == [1, 16, 128, 1024]
    assert all(r["env_steps_per_s"] > 0 for r in rows)
    assert rows[0]["ratio"] == 1


def test_observations_benchmark_reports_each_function_and_size() -> None:
    rows = observations.rows(repeats=1, quick=True)
    assert {(row["what"], row["envs"], row["slots"]) for row in rows} == {
        (what, *size) for what in ("features", "masks", "legal") for size in ((4, 3), (128, 25))
    }
    assert all(row["us"] > 0 and (row["what"] == "legal" or row["ratio"] > 0) for row in rows)


def test_package_contains_no_benchmarks() -> None:
    assert not [p for p in (ROOT / "src").rglob("*.py") if "bench" in p.stem]
