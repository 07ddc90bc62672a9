"""Test that benchmarks run from the repository root and that `benchmarks.train` times the real training code."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from typing import Any

import pytest

from benchmarks import episodes, observations, simulator
from benchmarks.hosts import reference_task
from benchmarks.train import BareLoop, Case, HeldBackend, compare
from esper.simic.agent.ppo import PPO
from esper.simic.evaluation import no_growth_baseline
from esper.simic.training.checkpointer import Checkpointer
from esper.simic.training.config import load_config
from esper.simic.training.vectorized import round_worlds
from esper.tolaria.families import FAMILIES
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
@pytest.mark.parametrize(
    ("name", "repeats"), [("body", 3), ("worth", 3), ("hub", 3), ("hot_paths", 3), ("workers", 1), ("episodes", 1)]
)
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


def test_episodes_benchmark_counts_the_work_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_growth_baseline, "trained", lambda *_: pytest.fail("a baseline was trained"))
    family = FAMILIES["mend_mlp_digits"]
    worlds = round_worlds(load_config(sets=["task=mend_mlp_digits", "envs=3", "seed=4"]), 0)
    draws = [family.draw(world) for world in worlds]
    assert len({draw.epochs for draw in draws}) > 1
    played = episodes.play_round(episodes.Case("mend_mlp_digits", envs=3), rng_seed=4)
    batches = [draw.epochs * family.batches_per_epoch for draw in draws]
    assert played.episodes == 3
    assert played.decisions == sum(draw.epochs for draw in draws)
    assert played.batches == sum(batches)
    assert played.samples == sum(count * draw.batch for count, draw in zip(batches, draws, strict=True))
    assert played.seconds > 0


def test_episodes_benchmark_divides_rates_of_the_same_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_speed(speed: float) -> list[episodes.RoundWork]:
        """Return a round of each task; a slow repeat slows the second one more, so that ratios differ."""
        return [
            episodes.RoundWork(20 / speed, episodes=2, decisions=80, batches=1_600, samples=102_400),
            episodes.RoundWork(10 / speed**2, episodes=4, decisions=40, batches=400, samples=12_800),
            episodes.RoundWork(10 / speed, episodes=1, decisions=12, batches=144, samples=4_608),
        ]

    rounds = {0: [at_speed(1.0), at_speed(1.0)], 1: [at_speed(0.5), at_speed(1.0)]}
    monkeypatch.setattr(episodes, "play_all", lambda workers, *_: [rounds[worker] for worker in range(workers)])
    reference, family = episodes.measure(workers=2, repeats=2, quick=False)["rows"][:2]
    assert reference["episodes_per_minute"] == pytest.approx(2 * 6.0)  # median of 6, 6, 3 and 6, in two processes
    assert family["episodes_ratios"] == pytest.approx([4.0, 4.0, 2.0, 4.0])
    assert family["episodes_ratio"] == pytest.approx(4.0)
    assert family["episodes_ratio_of_totals"] == pytest.approx((16 / 70) / (8 / 100))
    assert family["decisions_ratio"] == pytest.approx(1.0)
    assert family["batches_ratio"] == pytest.approx(0.5)
    assert reference["batches_ratio"] == reference["batches_ratio_of_totals"] == 1.0
    assert (family["decisions_per_episode"], family["samples_per_batch"]) == (10.0, 32.0)


def test_observations_benchmark_reports_each_function_and_size() -> None:
    rows = observations.rows(repeats=1, quick=True)
    assert {(row["what"], row["envs"], row["slots"]) for row in rows} == {
        (what, *size) for what in ("features", "masks", "legal") for size in ((4, 3), (128, 25))
    }
    assert all(row["us"] > 0 and (row["what"] == "legal" or row["ratio"] > 0) for row in rows)


def test_package_contains_no_benchmarks() -> None:
    assert not [p for p in (ROOT / "src").rglob("*.py") if "bench" in p.stem]
