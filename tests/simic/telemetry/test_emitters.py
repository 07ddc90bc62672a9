"""Emitters: every seed's lifecycle can be reconstructed from the emitted events alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina.blueprints import blueprint_name
from esper.leyline import events
from esper.leyline.actions import Head, Op
from esper.leyline.events import Event, Level, NullReceiver
from esper.leyline.lifecycle import Outcome, Rules, apply, expel, legal, tick
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import NEXT_STAGES, SeedStage, Thresholds
from esper.simic.attribution import CounterfactualHelper
from esper.simic.telemetry.emitters import StepStats, TelemetryEmitter
from esper.tamiyo.controllers import Schedule
from esper.tolaria.engine import Engine
from esper.tolaria.rollout import PhaseTimers, rollout
from esper.tolaria.tasks import get_task
from tests.support.random_tables import LIVELY, random_actions, random_legal_actions, random_measurements
from tests.support.rules import ISOLATED

SLOTS = ("r0c0", "r0c1", "r0c2")
QUICK = Rules(birth="isolated", thresholds=Thresholds(blend_dwell=1, blend_health=None))


class Listener(list):
    """A hub that keeps events in a list, and checks that each can be encoded."""

    def __init__(self, level: Level = Level.DEBUG) -> None:
        self.level = level

    def wants(self, kind: type[Event]) -> bool:
        return self.level >= kind.LEVEL

    def emit(self, event: Event) -> None:
        events.encode(event)
        self.append(event)

    def of(self, kind: type[Event]) -> list:
        return [e for e in self if type(e) is kind]


def play(rules: Rules, envs: int, steps: int, seed: int, level: Level = Level.DEBUG, sane: float = 0.9):
    """Play random actions; return the hub, the table after each step, and the emitter."""
    rng, table, hub = np.random.default_rng(seed), SlotTable.empty(envs, len(SLOTS)), Listener(level)
    emit = TelemetryEmitter(hub, slots=SLOTS, worlds=range(envs), host_params=1000, level=level)
    steps_played = []
    for _ in range(steps):
        allowed = legal(table, rules)
        requested = random_legal_actions(table, rules, rng) if rng.random() < sane else random_actions(table, rng)
        done = apply(table, requested, rules)
        ticked = tick(table, rules)
        random_measurements(table, rng)
        emit.step(table, requested, Outcome(done.happened, done.effects + ticked), allowed)
        steps_played.append((table.clone(), requested, done.happened))
    return hub, steps_played, emit


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), rules=st.sampled_from([Rules(), ISOLATED, LIVELY]))
def test_lifecycles_from_events_equal_those_in_the_table(seed, rules):
    hub, played, _ = play(rules, envs=4, steps=60, seed=seed)
    stage = {(e, s): SeedStage.DORMANT for e in range(4) for s in SLOTS}
    values = iter(hub.of(events.Lifecycle))
    event = next(values, None)
    for step, (table, requested, happened) in enumerate(played, 1):
        while event is not None and event.step == step:
            at = event.env, event.slot
            was, now = SeedStage[event.was], SeedStage[event.now]
            assert was == stage[at]
            assert now in NEXT_STAGES[was], (was, now)
            s = SLOTS.index(event.slot)
            if event.cause == "controller":
                assert happened[event.env]
                assert requested[event.env, Head.SLOT] == s
                assert requested[event.env, Head.OP] != Op.WAIT
            if now == SeedStage.GERMINATED:
                assert event.seed == table.serial[event.env, s]
                assert event.blueprint == blueprint_name(int(table.blueprint[event.env, s]))
            stage[at] = now
            event = next(values, None)
        for (e, name), last_stage in stage.items():
            assert table.stage[e, SLOTS.index(name)] == last_stage
    assert event is None


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rules=st.sampled_from([Rules(), QUICK, LIVELY]))
def test_lifecycles_ended_by_the_governor_are_reported_completely(seed, rules):
    rng, table, hub = np.random.default_rng(seed), SlotTable.empty(4, len(SLOTS)), Listener()
    emit = TelemetryEmitter(hub, slots=SLOTS, worlds=range(4), host_params=1000)
    stage = {(e, s): SeedStage.DORMANT for e in range(4) for s in SLOTS}
    expelled = 0
    for _ in range(50):
        requested = random_legal_actions(table, rules, rng)
        done = apply(table, requested, rules)
        ticked = tick(table, rules)
        random_measurements(table, rng)
        undone = rng.random(4) < 0.15
        gone = expel(table, undone[:, None] & (rng.random(table.stage.shape) < 0.8), fossils=True)
        table.rollbacks[undone] += 1
        hub.clear()
        emit.step(table, requested, Outcome(done.happened, done.effects + ticked + gone))
        for event in hub.of(events.Lifecycle):
            was, now = SeedStage[event.was], SeedStage[event.now]
            assert was == stage[event.env, event.slot]
            assert now in NEXT_STAGES[was] or event.cause == "governor"
            assert (was, now) != (SeedStage.GERMINATED, SeedStage.BLENDING) or rules.birth == "open"
            stage[event.env, event.slot] = now
        values = {(x.env, SLOTS.index(x.slot)) for x in hub.of(events.Lifecycle) if x.cause == "governor"}
        assert {(e, s) for _, e, s in gone} <= values
        assert all(undone[e] and table.stage[e, s] == SeedStage.PRUNED for e, s in values)
        expelled += len(gone)
        assert all(table.stage[e, SLOTS.index(name)] == last_stage for (e, name), last_stage in stage.items())
    assert expelled > 3


def test_every_action_of_the_controller_is_reported_as_its_own():
    hub, played, _ = play(LIVELY, envs=8, steps=60, seed=3)
    moved = {Op.GERMINATE, Op.FOSSILIZE, Op.ADVANCE}
    acts = {
        (step, e)
        for step, (_, requested, happened) in enumerate(played, 1)
        for e in range(8)
        if happened[e] and requested[e, Head.OP] in moved
    }
    values = {(x.step, x.env) for x in hub.of(events.Lifecycle) if x.cause == "controller"}
    assert acts <= values
    assert len(acts) > 50


def test_moves_report_the_contribution_known_before_them():
    hub, played, _ = play(LIVELY, envs=8, steps=60, seed=3)
    tables = [SlotTable.empty(8, len(SLOTS)), *(table for table, _, _ in played)]
    measured = 0
    for event in hub.of(events.Lifecycle):
        before, s = tables[event.step - 1], SLOTS.index(event.slot)
        is_known = before.serial[event.env, s] == event.seed and event.now != "GERMINATED"
        known = float(before.contribution[event.env, s]) if is_known else np.nan
        assert event.contribution == (None if np.isnan(known) else known)
        measured += event.contribution is not None
    assert measured > 20


def test_step_reports_each_environment_and_null_where_unmeasured():
    hub, played, _ = play(Rules(), envs=3, steps=30, seed=1)
    steps = hub.of(events.Step)
    assert len(steps) == 3 * 30
    table = played[-1][0]
    for event in steps[-3:]:
        e = event.env
        assert event.step == 30
        assert event.quality == pytest.approx(float(table.quality[e]))
        assert event.stages == tuple(table.stage[e].tolist())
        assert event.params == 1000 + table.params[e].sum()
    assert any(x.committed_quality is None for x in steps)
    assert all(x.reward is None and x.value is None for x in steps)


def test_wait_is_reported_at_debug_only_and_refusals_are_flagged():
    loud, played, _ = play(LIVELY, envs=4, steps=40, seed=2, sane=0.5)
    quiet, _, _ = play(LIVELY, envs=4, steps=40, seed=2, level=Level.NORMAL, sane=0.5)
    assert len(loud.of(events.Decision)) == 160
    assert [d for d in loud.of(events.Decision) if d.op != "WAIT"] == quiet.of(events.Decision)
    refused = sum(int((~happened).sum()) for _, _, happened in played)
    assert sum(not d.happened for d in loud.of(events.Decision)) == refused > 0


def test_levels_omit_kinds_and_off_omits_all():
    minimal, _, _ = play(LIVELY, envs=2, steps=20, seed=0, level=Level.MINIMAL)
    assert {type(e) for e in minimal} == {events.Lifecycle}
    play_off, _, _ = play(LIVELY, envs=2, steps=20, seed=0, level=Level.OFF)
    assert play_off == []


def test_out_of_range_action_is_reported_by_number():
    table, hub = SlotTable.empty(1, 3), Listener()
    emit = TelemetryEmitter(hub, slots=SLOTS, worlds=[0], host_params=10, level=Level.DEBUG)
    requested = np.array([[99, 99, 9, 9, 9, 9, 9, Op.GERMINATE]])
    done = apply(table, requested, Rules())
    emit.step(table, requested, done)
    (values,) = hub.of(events.Decision)
    assert (values.slot, values.blueprint, values.happened) == ("99", "99", False)


def test_real_engine_reports_steps_worth_gradients_episodes_and_phases():
    torch.manual_seed(0)
    engine, hub = Engine(get_task("digits"), [0, 1], rules=ISOLATED), Listener(Level.NORMAL)
    emit = TelemetryEmitter(hub, slots=engine.task.slots, worlds=[0, 1], host_params=engine.networks[0].host_size)
    controller, helper = Schedule(), CounterfactualHelper()
    for _ in range(16):
        allowed = legal(engine.table, engine.rules)
        requested = controller.act(engine.table, allowed)
        emit.step(engine.table, requested, engine.step(requested), allowed, StepStats(reward=np.array([0.5, -0.5])))
        with engine.phases("worth"):
            worths = helper.process_batch(engine)
        emit.worth(engine.table, worths)
        emit.phases(engine.phases)
    emit.episode(engine.table, ["a", "b"], test_quality=[0.5, 0.6])
    emit.phases(engine.phases, last=True)

    assert {type(e).__name__ for e in hub} == {
        "Step", "Decision", "Lifecycle", "Gradient", "SeedWorth", "Episode", "PhaseProfile",
    }  # fmt: skip
    assert [x.reward for x in hub.of(events.Step)[:2]] == [0.5, -0.5]
    assert [x.train_macs for x in hub.of(events.Step)[-2:]] == engine.table.train_macs.tolist()
    assert any(w.prospect is not None for w in hub.of(events.SeedWorth))
    judged = [w for w in hub.of(events.SeedWorth) if w.contribution is not None]
    assert judged
    assert all(w.contribution_se is not None and w.shapley is not None for w in judged)
    first, second = hub.of(events.Episode)
    assert (first.name, second.name, second.test_quality) == ("a", "b", 0.6)
    assert first.germinated == sum(x.now == "GERMINATED" and x.env == 0 for x in hub.of(events.Lifecycle)) > 0
    assert first.structure == {"r0c0": "mlp_small"}
    assert {p.phase for p in hub.of(events.PhaseProfile)} >= {"apply", "train", "validate", "coalitions", "worth"}


@pytest.mark.parametrize("ramp", [0, 3])
def test_open_births_are_reported_stage_by_stage(ramp):
    rules = Rules(birth="open", open_ramp=ramp)
    engine, hub = Engine(get_task("digits"), [0], rules=rules), Listener(Level.NORMAL)
    emit = TelemetryEmitter(hub, slots=engine.task.slots, worlds=[0], host_params=engine.networks[0].host_size)
    for step in rollout(engine, Schedule(start=0), 7):
        emit.step(engine.table, step.actions, step.result, step.allowed)
    emit.episode(engine.table, ["a"])
    first = [(x.was, x.now, x.cause) for x in hub.of(events.Lifecycle) if x.slot == "r0c0"]
    assert first == [
        ("DORMANT", "GERMINATED", "controller"), ("GERMINATED", "BLENDING", "rules"), ("BLENDING", "HOLDING", "rules"),
        ("HOLDING", "FOSSILIZED", "controller"),
    ]  # fmt: skip
    assert hub.of(events.Episode)[0].germinated == 3


def test_episodes_are_counted_and_begin_with_empty_slots():
    hub, _, emit = play(LIVELY, envs=2, steps=20, seed=5)
    emit.begin([7, 8])
    fresh = SlotTable.empty(2, 3)
    requested = np.zeros((2, 8), dtype=np.int64)
    del hub[:]
    emit.step(fresh, requested, apply(fresh, requested, LIVELY))
    assert hub.of(events.Lifecycle) == []
    assert [(s.episode, s.world) for s in hub.of(events.Step)] == [(2, 7), (2, 8)]


def test_without_listeners_no_event_is_built():
    table = SlotTable.empty(2, 3)
    emit = TelemetryEmitter(NullReceiver(), slots=SLOTS, worlds=[0, 1], host_params=10)
    requested = np.zeros((2, 8), dtype=np.int64)
    emit.step(table, requested, apply(table, requested, Rules()))
    emit.worth(table, [])
    emit.phases(PhaseTimers(), last=True)
    emit.episode(table, ["a", "b"])
