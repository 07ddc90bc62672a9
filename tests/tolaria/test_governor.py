"""Test the governor's anomaly detection, its loss history and its snapshots."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Rules, legal
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Thresholds
from esper.tamiyo.controllers import Random, Schedule, wait_everywhere
from esper.tolaria.engine import Engine
from esper.tolaria.engine_config import EngineConfig, GovernorConfig
from esper.tolaria.governor import ALARMS, Alarm, Governor, judge, typical
from esper.tolaria.tasks import Task, get_task
from tests.support.random_tables import LIVELY, random_legal_actions

CHANCE = math.log(10)
CONFIG = GovernorConfig()
QUICK = Rules(birth="isolated", thresholds=Thresholds(blend_dwell=2), min_prune_age=0)
numbers = st.one_of(st.floats(0.0, 12.0), st.sampled_from([math.nan, math.inf, -math.inf, 2.3, CHANCE]))
histories = st.lists(st.floats(0.0, 4.0), max_size=20)


@lru_cache
def digits() -> Task:
    return replace(get_task("digits"), batches_per_epoch=4, val_size=100)


def alarm_after(history: list[float], val: float, train: float = 1.0, vital: float = 1.0, failed: bool = False) -> str:
    """Return the alarm of one environment after this history of normal losses."""
    losses = np.full((1, CONFIG.window), np.nan)
    losses[0, CONFIG.window - len(history) :] = history
    one = (np.array([x]) for x in (val, train, vital))
    return ALARMS[judge(losses, *one, np.array([failed]), chance=CHANCE, config=CONFIG).alarm[0]]


# -- scalar reference


def reference(history: list[float], val: float, train: float, vital: float, failed: bool) -> tuple[str, float]:
    """Return the alarm of one environment and its limit (NaN if it has none), in plain Python."""
    c = CONFIG
    if failed:
        return "exception", math.nan
    if not (math.isfinite(val) and math.isfinite(train)):
        return "nonfinite_loss", math.nan
    if not math.isfinite(vital):
        return "nonfinite_weights", math.nan
    if len(history) < c.enough:
        return ("divergence", c.early * CHANCE) if val > c.early * CHANCE else ("", math.nan)
    median = statistics.median(history)
    spread = 1.4826 * statistics.median(abs(x - median) for x in history)
    limit = max(c.above_chance * CHANCE, median + c.spreads * spread)
    if val > limit:
        return "divergence", limit
    lead = CHANCE - median
    clearly = lead > min(c.lead_spreads * spread, c.clear_lead * CHANCE) and lead > c.least_lead * CHANCE
    if clearly and val >= CHANCE - c.lead_left * lead:
        return "collapse", CHANCE - c.lead_left * lead
    return "", math.nan


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(histories, numbers, numbers, numbers, st.booleans()), min_size=1, max_size=6))
def test_judge_matches_the_scalar_reference(cases: list[tuple[Any, ...]]) -> None:
    losses = np.full((len(cases), CONFIG.window), np.nan)
    for e, (history, *_) in enumerate(cases):
        losses[e, CONFIG.window - len(history) :] = history
    val, train, vital = (np.array([c[i] for c in cases]) for i in (1, 2, 3))
    failed = np.array([c[4] for c in cases])
    judgment = judge(losses, val, train, vital, failed, chance=CHANCE, config=CONFIG)
    for e, case in enumerate(cases):
        alarm, limit = reference(*case)
        assert ALARMS[judgment.alarm[e]] == alarm
        np.testing.assert_allclose(judgment.limit[e], limit)
        if alarm == "nonfinite_loss":
            assert not math.isfinite(judgment.value[e])
        if alarm in ("divergence", "collapse"):
            assert judgment.value[e] == case[1]


@settings(max_examples=200, deadline=None)
@given(st.lists(histories, min_size=1, max_size=5))
def test_typical_matches_the_statistics_module(rows: list[list[float]]) -> None:
    losses = np.full((len(rows), 20), np.nan)
    for e, row in enumerate(rows):
        losses[e, 20 - len(row) :] = row
    counts, median, spread = typical(losses)
    for e, row in enumerate(rows):
        assert counts[e] == len(row)
        if row:
            assert median[e] == pytest.approx(statistics.median(row))
            mad = statistics.median(abs(x - statistics.median(row)) for x in row)
            assert spread[e] == pytest.approx(1.4826 * mad, abs=1e-12)


# -- anomalies


WEAK = [2.21, 2.2, 2.19, 2.2, 2.18, 2.19, 2.17, 2.18, 2.16, 2.17]  # a host slightly better than guessing


@pytest.mark.parametrize(
    ("history", "loss", "alarm"),
    [
        ([], 9.0, ""),  # a high first loss is accepted
        ([], 9.3, "divergence"),  # up to a limit
        ([0.5] * 4, 3.0, ""),  # too few losses
        ([0.5] * 5, 3.0, "divergence"),
        ([0.5] * 5, 1.5, ""),  # worse, yet better than guessing
        ([0.5, 0.6, 0.4, 0.5, 0.6, 0.4], 2.2, "collapse"),
        ([2.2, 1.8, 1.4, 1.1, 0.9, 0.7], 2.25, "collapse"),  # after fast learning
        ([2.2, 1.7, 2.1, 1.6, 1.9, 2.2], 2.28, ""),  # noisy and close to chance
        (WEAK, 2.2, ""),
        (WEAK, 2.3, "collapse"),  # weak hosts are guarded as well
        (WEAK, 2.5, "collapse"),
        (WEAK, 3.0, "divergence"),
        ([2.0, 2.01] * 10, 2.28, "collapse"),
        ([2.0, 2.01] * 10, 2.2, ""),
        ([2.29, 2.3, 2.31] * 4, 2.31, ""),  # never better than chance
        ([2.3, 2.299, 2.298, 2.297, 2.296, 2.295], 2.3, ""),  # start of training
        ([3.0, 3.2, 2.9, 3.1, 3.3, 2.8], 3.4, ""),  # overconfident, but not worse than before
        ([3.0, 3.2, 2.9, 3.1, 3.3, 2.8], 6.0, "divergence"),
    ],
)
def test_alarm_depends_on_loss_history_and_chance_loss(history: list[float], loss: float, alarm: str) -> None:
    assert alarm_after(history, loss) == alarm


@pytest.mark.parametrize("slope", [-0.1, -0.02, 0.0, 0.01, 0.05])
def test_steady_trend_raises_no_alarm(slope: float) -> None:
    losses = [2.2 + slope * i for i in range(60) if 2.2 + slope * i > 0]
    for i in range(6, len(losses)):
        assert alarm_after(losses[max(0, i - 20) : i], losses[i]) == ""


def test_alarm_precedence_is_exception_loss_weights() -> None:
    assert alarm_after([], math.nan, vital=math.inf) == "nonfinite_loss"
    assert alarm_after([], 1.0, train=math.inf, vital=math.inf) == "nonfinite_loss"
    assert alarm_after([], 1.0, vital=math.nan) == "nonfinite_weights"
    assert alarm_after([], math.nan, vital=math.nan, failed=True) == "exception"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"window": 0}, "governor.window must be finite and ≥ 1, got 0"),
        ({"enough": 21}, r"governor.enough must be ≤ window \(20\), got 21"),
        ({"patience": 0}, "governor.patience must be finite and ≥ 1"),
        ({"least_lead": 0.5}, r"governor.least_lead must be ≤ clear_lead \(0.4\), got 0.5"),
        ({"spreads": -1.0}, "governor.spreads must be finite and ≥ 0"),
        ({"above_chance": 0.5}, "governor.above_chance must be finite and ≥ 1"),
        ({"early": math.nan}, "governor.early must be finite and ≥ 1"),
        ({"lead_left": 1.0}, r"governor.lead_left must be below 1, got 1.0"),
    ],
)
def test_invalid_governor_config_is_rejected(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GovernorConfig(**wrong)


# -- counters and history


class DrivenGovernor:
    """Governor of real networks, driven with given losses."""

    def __init__(self, **config: Any) -> None:
        self.engine = Engine(digits(), [0, 1], config=EngineConfig(governor=GovernorConfig(**config)))
        self.governor: Governor = self.engine.governor
        self.table: SlotTable = self.engine.table

    def step(self, *losses: float, train: float | None = None) -> list[int]:
        self.governor.begin(self.table)
        self.table.step[:] += 1
        trained = np.array(losses) if train is None else np.full(2, train)
        alarms = self.governor.judge(self.table, np.array(losses), trained, np.ones(2))
        for env in alarms:
            self.governor.roll_back(env, self.table)
        self.governor.end(self.table)
        return alarms

    @property
    def alarms(self) -> list[Alarm]:
        return self.governor.alarms


def test_divergence_and_collapse_roll_back_after_patience() -> None:
    driven = DrivenGovernor()
    for _ in range(6):
        assert driven.step(1.0, 2.1) == []
        assert driven.alarms == []
    assert driven.step(5.0, 2.2) == []
    assert [(a.env, a.alarm, a.action, a.restored_step) for a in driven.alarms] == [(0, "divergence", "counted", None)]
    assert driven.alarms[0].value == 5.0
    assert driven.alarms[0].limit == pytest.approx(1.25 * CHANCE)
    assert driven.step(5.0, 2.3) == []
    assert [a.alarm for a in driven.alarms] == ["divergence", "collapse"]
    assert driven.step(5.0, 2.0) == [0]  # the other has recovered
    assert [(a.action, a.restored_step) for a in driven.alarms] == [("rolled back", 5)]
    assert driven.governor.counted.tolist() == [0, 0]
    assert driven.table.rollbacks.tolist() == [1, 0]
    assert driven.step(1.0, 2.0) == driven.alarms == []


def test_bad_validation_with_good_training_does_not_roll_back() -> None:
    driven = DrivenGovernor()
    for _ in range(6):
        driven.step(1.0, 1.0)
    for _ in range(6):
        assert driven.step(5.0, 2.3, train=0.9) == []
        assert [(a.alarm, a.action) for a in driven.alarms] == [("divergence", "seen"), ("collapse", "seen")]
    assert driven.governor._rows.step.tolist() == [5, 5]  # no snapshot of such a state
    assert np.nanmax(driven.governor.losses) == 1.0
    assert driven.step(5.0, 5.0) == driven.step(5.0, 5.0) == []
    assert driven.step(5.0, 5.0, train=0.9) == []  # not consecutive
    assert driven.governor.counted.tolist() == [0, 0]


def test_consecutive_anomalies_add_up_until_a_normal_loss() -> None:
    driven = DrivenGovernor()
    for _ in range(6):
        driven.step(1.0, 1.0)
    assert driven.step(5.0, 5.0) == driven.step(2.3, 5.0) == []
    assert driven.step(5.0, 1.0) == [0]
    assert driven.step(5.0, 5.0) == driven.step(5.0, 5.0) == []
    assert driven.governor.counted.tolist() == [2, 2]


def test_history_excludes_anomalies_and_is_rolled_back() -> None:
    driven = DrivenGovernor()
    for loss in (1.0, 1.1, 1.2, 1.3, 1.4):
        driven.step(loss, loss)
    losses_before = driven.governor.losses.copy()
    assert driven.table.step[0] == 5  # a snapshot is taken
    driven.step(1.5, 1.5)
    for _ in range(2):
        driven.step(9.0, 1.5)
        assert (driven.governor.losses[0, -1], driven.governor.losses[0, -2]) == (1.5, 1.4)
    assert driven.step(9.0, 1.5) == [0]
    np.testing.assert_array_equal(driven.governor.losses[0], losses_before[0])
    assert driven.governor.losses[1, -1] == 1.5


def test_history_holds_the_last_twenty_losses() -> None:
    driven = DrivenGovernor()
    for i in range(30):
        driven.step(1.0 + i / 100, 1.0)
    np.testing.assert_allclose(driven.governor.losses[0], 1.0 + np.arange(10, 30) / 100)


def test_snapshots_are_taken_at_start_and_every_fifth_normal_step() -> None:
    driven = DrivenGovernor()
    snapshots = []
    for i in range(1, 14):
        driven.step(9.0 if i == 10 else 1.0, 1.0)
        snapshots.append(driven.governor._rows.step.tolist())
    assert [t[1] for t in snapshots] == [0] * 4 + [5] * 5 + [10] * 4
    assert [t[0] for t in snapshots] == [0] * 4 + [5] * 9  # not during an anomaly


# -- normal training raises no alarms


@pytest.mark.slow
@pytest.mark.parametrize(("task", "epochs"), [("digits", 24), ("rescue", 20), ("quick", 20)])
@pytest.mark.parametrize("controller", ["schedule", "random", "reckless"])
def test_normal_training_is_never_rolled_back(task: str, epochs: int, controller: str) -> None:
    rules, rng = LIVELY if controller == "reckless" else Rules(), np.random.default_rng(3)
    worlds = [11, 12, 13] if task == "digits" else [11]
    engine = Engine(get_task(task), worlds, rules=rules)
    chosen = {"schedule": Schedule, "random": Random}.get(controller)
    acting = chosen() if chosen else None
    for _ in range(epochs):
        allowed = legal(engine.table, rules)
        engine.step(acting.act(engine.table, allowed) if acting else random_legal_actions(engine.table, rules, rng))
        assert all(alarm.action != "rolled back" for alarm in engine.alarms), engine.alarms
    assert not engine.table.rollbacks.any()


def test_governor_config_does_not_change_a_normal_run() -> None:
    def run(**config: Any) -> Engine:
        engine = Engine(digits(), [3], rules=QUICK, config=EngineConfig(governor=GovernorConfig(**config)))
        for _ in range(12):
            engine.step(Schedule().act(engine.table, legal(engine.table, QUICK)))
        return engine

    one, two = run(), run(snapshot_every=1, patience=1)
    assert not one.table.diff(two.table)
    for name, value in one.networks[0].body.state_dict().items():
        assert torch.equal(value, two.networks[0].body.state_dict()[name])


def test_wait_raises_no_alarm() -> None:
    engine = Engine(digits(), [0])
    for _ in range(8):
        engine.step(wait_everywhere(1))
        assert engine.alarms == []
