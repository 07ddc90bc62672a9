"""Test the lifecycle of one seed against values computed by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from esper.leyline import STRICT, Curve, Head, Op, Operator, SeedStage, SlotTable, Thresholds
from esper.leyline.actions import NUM_HEADS, STYLES
from esper.leyline.errors import ConfigError
from esper.leyline.gates import failed_checks, open_gates
from esper.leyline.lifecycle import (
    Effect,
    EffectKind,
    Outcome,
    Rules,
    apply,
    expel,
    is_legal,
    legal,
    record_contribution,
    record_epoch,
    tick,
)
from esper.leyline.stages import Check
from tests.support.rules import ISOLATED

Stage = SeedStage
AUTO = ISOLATED
BY_HAND = Rules(birth="isolated", auto_train=False, auto_blend=False, auto_hold=False)
QUICK = msgspec.structs.replace(BY_HAND, thresholds=Thresholds(blend_dwell=0, blend_health=None), auto_hold=True)
HALF, MOST, FULL = 0, 1, 2
INSTANT, FAST, MEDIUM, SLOW = 0, 1, 2, 3
STYLE = {style.name: i for i, style in enumerate(STYLES)}


def row(op: Op, slot: int = 0, **heads: int) -> list[int]:
    """Return an action. Default: conv_light, SIGMOID_ADD, STANDARD, FULL, INSTANT, LINEAR."""
    action = dict.fromkeys(range(NUM_HEADS), 0)
    action |= {Head.OP: op, Head.SLOT: slot, Head.BLUEPRINT: 1, Head.STYLE: STYLE["SIGMOID_ADD"]}
    action |= {Head.TEMPO: 1, Head.ALPHA_TARGET: FULL}
    action |= {Head[name.upper()]: value for name, value in heads.items()}
    return [action[h] for h in range(NUM_HEADS)]


def act(table: SlotTable, rules: Rules, op: Op, slot: int = 0, **heads: int) -> Outcome:
    """Apply the same action in every environment."""
    return apply(table, np.array([row(op, slot, **heads)] * table.num_envs), rules)


def may(table: SlotTable, rules: Rules, op: Op, slot: int = 0) -> bool:
    return bool(legal(table, rules)[0, op, slot])


def measure(table: SlotTable, *, quality: float = 0.5, contribution: float = 0.05, se: float = 0.001) -> None:
    """Record an epoch in which every value is measured and passes the gates."""
    each = np.full(table.num_envs, quality)
    record_epoch(table, quality=each, val_loss=1 - each, train_loss=1 - each)
    table.grad_health[:], table.grad_ratio[:] = 1.0, 1.0
    blended = (table.stage == Stage.BLENDING) | (table.stage == Stage.HOLDING)
    record_contribution(table, np.where(blended, contribution, np.nan), np.where(blended, se, np.nan))


def grown(stage: SeedStage, rules: Rules = QUICK, slots: int = 2, **heads: int) -> SlotTable:
    """Return a table whose slot 0 has just entered `stage` by explicit actions, old enough to be pruned."""
    table = SlotTable.empty(1, slots)
    act(table, rules, Op.GERMINATE, **heads)
    for _ in range(6):
        tick(table, rules)
    measure(table)
    for _ in range(20):
        if table.stage[0, 0] == stage:
            return table
        if not act(table, rules, Op.ADVANCE).happened[0] and may(table, rules, Op.FOSSILIZE):
            act(table, rules, Op.FOSSILIZE)
        if table.stage[0, 0] == stage:
            return table
        tick(table, rules)
        measure(table)
    raise AssertionError(f"no seed became {stage.name}")


# --- timeline


def test_seed_without_actions_follows_the_reference_timeline():
    table, alphas, stages = SlotTable.empty(1, 1), {}, {}
    for epoch in range(17):
        assert may(table, AUTO, Op.FOSSILIZE) == (epoch == 16)
        act(table, AUTO, Op.GERMINATE if epoch == 0 else Op.WAIT)
        tick(table, AUTO)
        measure(table)
        alphas[epoch], stages[epoch] = float(table.alpha[0, 0]), Stage(table.stage[0, 0])

    assert [stages[e] for e in (0, 9)] == [Stage.TRAINING] * 2
    assert [stages[e] for e in (10, 14)] == [Stage.BLENDING] * 2
    assert stages[15] == Stage.HOLDING
    assert [alphas[e] for e in range(11)] == [0.0] * 11
    assert [round(alphas[e], 3) for e in range(11, 16)] == [0.024, 0.230, 0.770, 0.976, 1.0]
    assert alphas[15] == 1.0


@pytest.mark.parametrize(("tempo", "earliest"), [(0, 14), (1, 16), (2, 19)])
def test_tempo_sets_the_earliest_fossilisation(tempo, earliest):
    table = SlotTable.empty(1, 1)
    for epoch in range(earliest + 1):
        assert may(table, AUTO, Op.FOSSILIZE) == (epoch == earliest)
        act(table, AUTO, Op.GERMINATE if epoch == 0 else Op.WAIT, tempo=tempo)
        tick(table, AUTO)
        measure(table)


def test_explicit_advance_moves_alpha_in_the_same_epoch():
    table = grown(Stage.TRAINING)
    act(table, QUICK, Op.ADVANCE)
    assert table.alpha[0, 0] == 0.0
    tick(table, QUICK)
    assert table.stage[0, 0] == Stage.BLENDING
    assert table.alpha[0, 0] == pytest.approx(0.0244, abs=1e-3)


def test_automatic_advance_moves_alpha_one_epoch_later():
    rules = Rules(birth="isolated", thresholds=QUICK.thresholds, auto_train=False)
    table = grown(Stage.GERMINATED, rules)
    act(table, rules, Op.ADVANCE)
    tick(table, rules)
    assert (table.stage[0, 0], table.alpha[0, 0]) == (Stage.BLENDING, 0.0)
    tick(table, rules)
    assert table.alpha[0, 0] > 0.0


def test_tick_advances_at_most_one_stage():
    rules = Rules(birth="isolated", thresholds=QUICK.thresholds)
    table = SlotTable.empty(1, 1)
    act(table, rules, Op.GERMINATE)
    stages = []
    for _ in range(7):
        tick(table, rules)
        stages.append(Stage(table.stage[0, 0]))
    assert stages == [Stage.TRAINING, *[Stage.BLENDING] * 5, Stage.HOLDING]


def test_counters_advance_only_in_tick():
    table = grown(Stage.TRAINING)
    before = table.clone()
    for _ in range(3):
        measure(table)
        act(table, QUICK, Op.WAIT)
    for clock in ("dwell", "age", "step", "cooldown", "ramp_pos"):
        assert clock not in table.diff(before)
    tick(table, QUICK)
    assert table.dwell[0, 0] == before.dwell[0, 0] + 1
    assert table.age[0, 0] == before.age[0, 0] + 1
    assert table.step[0] == before.step[0] + 1


def test_transition_records_previous_stage_and_stage_quality():
    table = grown(Stage.TRAINING)
    dwell = int(table.dwell[0, 0])
    measure(table, quality=0.625)
    act(table, QUICK, Op.ADVANCE)
    assert (table.prev_stage[0, 0], table.prev_dwell[0, 0], table.dwell[0, 0]) == (Stage.TRAINING, dwell, 0)
    assert table.quality_stage[0, 0] == 0.625
    assert table.quality_birth[0, 0] == 0.5


# --- germination


def test_germinate_writes_the_chosen_options():
    table = SlotTable.empty(1, 3)
    outcome = act(table, AUTO, Op.GERMINATE, 1, blueprint=5, style=STYLE["GATED_GATE"], tempo=2, alpha_target=MOST)
    assert outcome.effects == [Effect(EffectKind.BUILD, 0, 1)]
    assert table.stage[0].tolist() == [Stage.DORMANT, Stage.GERMINATED, Stage.DORMANT]
    assert table.blueprint[0, 1] == 5
    assert table.operator[0, 1] == Operator.GATE
    assert table.curve[0, 1] == Curve.LINEAR  # a gated seed ramps linearly
    assert table.tempo[0, 1] == table.ramp_len[0, 1] == 8
    assert table.alpha[0, 1] == 0.0
    assert table.alpha_to[0, 1] == np.float32(0.7)
    assert table.serial[0].tolist() == [-1, 0, -1]


def test_serial_numbers_are_unique():
    table = SlotTable.empty(1, 1)
    for expected in range(3):
        act(table, AUTO, Op.GERMINATE)
        assert table.serial[0, 0] == expected
        expel(table, np.ones((1, 1), dtype=bool))
        for _ in range(7):
            tick(table, AUTO)
        assert table.serial[0, 0] == -1


def test_germinate_rejects_blueprints_the_slot_does_not_take():
    takes = np.zeros((2, 13), dtype=bool)
    takes[1, 3] = True
    table = SlotTable.empty(1, 2, takes=takes)
    assert not may(table, AUTO, Op.GERMINATE, 0)
    assert may(table, AUTO, Op.GERMINATE, 1)
    assert not act(table, AUTO, Op.GERMINATE, 1, blueprint=2).happened[0]
    assert act(table, AUTO, Op.GERMINATE, 1, blueprint=3).happened[0]


def test_noop_blueprint_cannot_be_germinated():
    assert not act(SlotTable.empty(1, 1), AUTO, Op.GERMINATE, blueprint=0).happened[0]


def test_disabled_slot_allows_wait_only():
    table = SlotTable.empty(1, 2)
    table.enabled[0, 0] = False
    assert legal(table, AUTO)[0, :, 0].nonzero()[0].tolist() == [Op.WAIT]
    assert may(table, AUTO, Op.GERMINATE, 1)


@pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING])
def test_one_at_a_time_blocks_a_second_germination(stage):
    table = grown(stage)
    assert not may(table, QUICK, Op.GERMINATE, 1)
    assert may(table, Rules(one_at_a_time=False), Op.GERMINATE, 1)


@pytest.mark.parametrize("stage", [Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED])
def test_germination_is_legal_beside_a_blended_seed(stage):
    assert may(grown(stage), QUICK, Op.GERMINATE, 1)


def test_max_seeds_counts_fossils_and_not_cooldown():
    one, two = Rules(max_seeds=1, one_at_a_time=False), Rules(max_seeds=2, one_at_a_time=False)
    fossil = grown(Stage.FOSSILIZED)
    assert not may(fossil, one, Op.GERMINATE, 1)
    assert may(fossil, two, Op.GERMINATE, 1)
    cooling = grown(Stage.TRAINING)
    act(cooling, QUICK, Op.PRUNE)
    assert may(cooling, one, Op.GERMINATE, 1)


# --- prune and cooldown


def test_seed_cannot_be_pruned_before_five_epochs():
    table = SlotTable.empty(1, 1)
    for epoch in range(6):
        assert may(table, AUTO, Op.PRUNE) == (epoch == 5)
        act(table, AUTO, Op.GERMINATE if epoch == 0 else Op.WAIT)
        tick(table, AUTO)


@pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING])
@pytest.mark.parametrize("speed", [INSTANT, SLOW])
def test_seed_without_alpha_is_pruned_immediately(stage, speed):
    table = grown(stage)
    outcome = act(table, QUICK, Op.PRUNE, alpha_speed=speed)
    assert table.stage[0, 0] == Stage.PRUNED
    assert outcome.effects == [Effect(EffectKind.DROP, 0, 0)]


@pytest.mark.parametrize("records_per_epoch", [0, 1, 3])
def test_slot_pruned_at_step_t_is_dormant_after_step_t_plus_6(records_per_epoch):
    table = grown(Stage.HOLDING, slots=3)
    act(table, QUICK, Op.PRUNE)
    labels = [Stage(table.stage[0, 0])]
    for _ in range(7):
        assert not legal(table, QUICK)[0, Op.GERMINATE].any()  # blocked in every slot
        assert legal(table, QUICK)[0].any(axis=1).nonzero()[0].tolist() == [Op.WAIT]
        tick(table, QUICK)
        for _ in range(records_per_epoch):
            measure(table)
        labels.append(Stage(table.stage[0, 0]))
    assert labels == [Stage.PRUNED, *[Stage.EMBARGOED] * 5, Stage.RESETTING, Stage.DORMANT]
    assert legal(table, QUICK)[0, Op.GERMINATE].all()


def test_slot_is_reset_after_cooldown():
    table = grown(Stage.HOLDING)
    act(table, QUICK, Op.PRUNE)
    table.grad_health[:] = np.nan
    for _ in range(7):
        tick(table, QUICK)
    fresh = SlotTable.empty(1, 2)
    per_env = {"step", "next_serial", "last_op", "train_loss", "val_loss", "quality", "quality_best_env"}
    table.grad_ratio[0, 1] = np.nan  # `measure` writes to every slot
    assert set(table.diff(fresh)) <= per_env | {"loss_history", "quality_history"}


@pytest.mark.parametrize(("speed", "ticks"), [(FAST, 3), (MEDIUM, 5), (SLOW, 8)])
@pytest.mark.parametrize("stage", [Stage.BLENDING, Stage.HOLDING])
def test_scheduled_prune_ramps_down_frozen_to_pruned(stage, speed, ticks):
    table = grown(stage, QUICK)
    for _ in range(5):  # until the first ramp ends
        tick(table, BY_HAND)
    outcome = act(table, BY_HAND, Op.PRUNE, alpha_speed=speed)
    assert outcome.happened[0]
    assert outcome.effects == []  # the seed is not dropped yet
    assert table.alpha[0, 0] == 1.0
    for ticks_left in range(ticks, 0, -1):
        assert table.stage[0, 0] == Stage.BLENDING
        assert table.frozen[0, 0]
        assert not may(table, BY_HAND, Op.PRUNE)
        assert not may(table, BY_HAND, Op.SET_ALPHA_TARGET)
        effects = tick(table, BY_HAND)
        assert effects == ([Effect(EffectKind.DROP, 0, 0)] if ticks_left == 1 else [])
    assert (table.stage[0, 0], table.alpha[0, 0], table.frozen[0, 0]) == (Stage.PRUNED, 0.0, False)
    assert table.cooldown[0, 0] == 7


def test_slot_pruned_by_ramp_at_step_u_is_dormant_after_step_u_plus_7():
    table = grown(Stage.HOLDING)
    act(table, QUICK, Op.PRUNE, alpha_speed=FAST)
    for _ in range(3):
        tick(table, QUICK)
    labels = []
    for _ in range(8):
        labels.append(Stage(table.stage[0, 0]))
        tick(table, QUICK)
    assert labels == [Stage.PRUNED, *[Stage.EMBARGOED] * 5, Stage.RESETTING, Stage.DORMANT]


def test_fossil_allows_wait_only_and_is_not_removed():
    table = grown(Stage.FOSSILIZED)
    assert legal(table, QUICK)[0, :, 0].nonzero()[0].tolist() == [Op.WAIT]
    before = table.clone()
    assert expel(table, np.ones((1, 2), dtype=bool)) == []
    assert table.diff(before) == {}


def test_expel_removes_fossils_on_request():
    table = grown(Stage.FOSSILIZED)
    assert expel(table, np.array([[True, False]]), fossils=True) == [Effect(EffectKind.DROP, 0, 0)]
    assert (table.stage[0, 0], table.alpha[0, 0], table.cooldown[0, 0]) == (Stage.PRUNED, 0.0, 7)
    assert expel(table, np.array([[True, False]]), fossils=True) == []  # slots in cooldown have no seed


def test_expel_removes_every_seed_but_fossils():
    for stage in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING):
        table = SlotTable.empty(1, 1) if stage == Stage.GERMINATED else grown(stage, slots=1)
        if stage == Stage.GERMINATED:
            act(table, QUICK, Op.GERMINATE)  # age 0: PRUNE is not legal
        assert expel(table, np.ones((1, 1), dtype=bool)) == [Effect(EffectKind.DROP, 0, 0)]
        assert (table.stage[0, 0], table.alpha[0, 0], table.cooldown[0, 0]) == (Stage.PRUNED, 0.0, 7)


def test_expel_stops_a_ramp():
    table = grown(Stage.BLENDING)
    tick(table, QUICK)
    assert table.moving[0, 0]
    expel(table, np.array([[True, False]]))
    assert not table.moving[0, 0]
    assert table.ramp_len[0, 0] == table.ramp_pos[0, 0] == table.alpha_to[0, 0] == 0
    assert tick(table, QUICK) == []
    assert table.alpha[0, 0] == 0.0


# --- alpha


def test_moving_seed_cannot_be_pruned_or_retargeted():
    table = grown(Stage.BLENDING)
    assert table.age[0, 0] >= 5
    for _ in range(5):
        assert table.moving[0, 0]
        assert not may(table, BY_HAND, Op.PRUNE)
        assert not may(table, BY_HAND, Op.SET_ALPHA_TARGET)
        tick(table, BY_HAND)
    assert not table.moving[0, 0]
    assert may(table, BY_HAND, Op.PRUNE)
    assert may(table, BY_HAND, Op.SET_ALPHA_TARGET)


@pytest.mark.parametrize(("target", "alpha"), [(HALF, 0.5), (MOST, 0.7)])
def test_partial_target_stays_in_blending_until_full(target, alpha):
    table = grown(Stage.BLENDING, alpha_target=target)
    for _ in range(20):
        tick(table, QUICK)
    assert table.stage[0, 0] == Stage.BLENDING
    assert table.alpha[0, 0] == np.float32(alpha)
    assert act(table, QUICK, Op.SET_ALPHA_TARGET, alpha_target=FULL, alpha_speed=FAST).happened[0]
    stages = []
    for _ in range(3):
        tick(table, QUICK)
        stages.append(Stage(table.stage[0, 0]))
    assert stages == [Stage.BLENDING, Stage.BLENDING, Stage.HOLDING]
    assert table.alpha[0, 0] == 1.0


def test_partial_target_returns_from_holding_to_blending():
    table = grown(Stage.HOLDING)
    act(table, QUICK, Op.SET_ALPHA_TARGET, alpha_target=HALF, alpha_speed=FAST)
    assert (table.stage[0, 0], table.prev_stage[0, 0]) == (Stage.BLENDING, Stage.HOLDING)
    assert table.alpha[0, 0] == 1.0


def test_frozen_ends_with_a_partial_ramp_down():
    table = grown(Stage.HOLDING)
    act(table, QUICK, Op.SET_ALPHA_TARGET, alpha_target=HALF, alpha_speed=FAST)
    frozen = []
    for _ in range(3):
        frozen.append(bool(table.frozen[0, 0]))
        tick(table, QUICK)
    assert frozen == [True, True, True]
    assert not table.frozen[0, 0]
    assert table.alpha[0, 0] == 0.5


def test_seed_ramping_up_is_not_frozen():
    table = grown(Stage.BLENDING)
    assert table.moving[0, 0]
    assert not table.frozen[0, 0]


def test_full_target_in_holding_changes_only_the_operator():
    table = grown(Stage.HOLDING)
    before = table.clone()
    outcome = act(table, QUICK, Op.SET_ALPHA_TARGET, style=STYLE["LINEAR_ADD"], alpha_target=FULL, alpha_speed=SLOW)
    assert outcome.happened[0]
    assert outcome.effects == []  # LINEAR_ADD and SIGMOID_ADD are the same operator
    assert not table.moving[0, 0]
    assert not {"stage", "alpha", "dwell", "operator"} & set(table.diff(before))

    outcome = act(table, QUICK, Op.SET_ALPHA_TARGET, style=STYLE["GATED_GATE"], alpha_target=FULL, alpha_speed=SLOW)
    assert outcome.effects == [Effect(EffectKind.SET_OPERATOR, 0, 0)]
    assert (table.stage[0, 0], table.operator[0, 0], table.alpha[0, 0]) == (Stage.HOLDING, Operator.GATE, 1.0)


def test_instant_retarget_sets_alpha_immediately():
    table = grown(Stage.HOLDING)
    act(table, QUICK, Op.SET_ALPHA_TARGET, alpha_target=MOST, alpha_speed=INSTANT)
    assert (table.stage[0, 0], table.alpha[0, 0]) == (Stage.BLENDING, np.float32(0.7))
    assert not table.moving[0, 0]


# --- gates


def gate_of(table: SlotTable, rules: Rules = AUTO) -> tuple[bool, set[Check]]:
    failed = failed_checks(table, rules.thresholds)
    return bool(open_gates(table, rules.thresholds)[0, 0]), {check for check in failed if failed[check][0, 0]}


@pytest.mark.parametrize(
    ("stage", "column", "rules", "check"),
    [
        (Stage.TRAINING, "grad_health", AUTO, Check.GRADIENT_HEALTH),
        (Stage.TRAINING, "grad_ratio", Rules(thresholds=STRICT), Check.GRADIENT_RATIO),
        (Stage.TRAINING, "quality_stage", Rules(thresholds=STRICT), Check.IMPROVEMENT),
        (Stage.HOLDING, "contribution", AUTO, Check.CONTRIBUTION),
        (Stage.HOLDING, "contribution_se", AUTO, Check.CONTRIBUTION),
        (Stage.HOLDING, "contribution_se", Rules(thresholds=Thresholds(z=0.0)), Check.CONTRIBUTION),
    ],
)
def test_unmeasured_value_closes_the_gate(stage, column, rules, check):
    table = grown(stage)
    table.dwell[:], table.quality[:] = 99, 0.9
    assert gate_of(table, rules) == (True, set())
    getattr(table, column)[:] = np.nan
    assert gate_of(table, rules) == (False, {check})


def test_unmeasured_quality_fails_the_improvement_check():
    table = grown(Stage.TRAINING)
    table.dwell[:], table.quality[:] = 99, np.nan
    assert gate_of(table, Rules(thresholds=STRICT)) == (False, {Check.IMPROVEMENT})


@pytest.mark.parametrize(
    ("rules", "stage", "column", "enough", "too_little", "check"),
    [
        (AUTO, Stage.TRAINING, "dwell", 10, 9, Check.DWELL),
        (AUTO, Stage.TRAINING, "grad_health", 0.7, 0.699, Check.GRADIENT_HEALTH),
        (Rules(thresholds=STRICT), Stage.TRAINING, "grad_ratio", 0.10, 0.0999, Check.GRADIENT_RATIO),
        (Rules(thresholds=STRICT), Stage.TRAINING, "quality", 0.5051, 0.5049, Check.IMPROVEMENT),
        (Rules(thresholds=STRICT), Stage.TRAINING, "dwell", 10, 9, Check.DWELL),
        (Rules(thresholds=STRICT), Stage.BLENDING, "dwell", 10, 9, Check.DWELL),
        (Rules(thresholds=STRICT), Stage.HOLDING, "contribution", 0.01, 0.0099, Check.CONTRIBUTION),
    ],
)
def test_thresholds_are_inclusive(rules, stage, column, enough, too_little, check):
    table = grown(stage)
    table.dwell[:], table.quality[:] = 99, 0.9
    table.contribution_se[:], table.ramp_pos[:], table.alpha[0, 0] = 0.0, table.ramp_len, table.alpha_to[0, 0]
    getattr(table, column)[:] = enough
    assert gate_of(table, rules) == (True, set())
    getattr(table, column)[:] = too_little
    assert gate_of(table, rules) == (False, {check})


def test_contribution_gate_subtracts_z_standard_errors():
    table = grown(Stage.HOLDING)
    rules = Rules(thresholds=Thresholds(fossil_contribution=0.01, z=2.5))
    table.contribution[:] = 0.02
    for se, is_open in ((0.0, True), (0.0039, True), (0.0041, False)):
        table.contribution_se[:] = se
        assert gate_of(table, rules)[0] == is_open
        assert may(table, rules, Op.FOSSILIZE) == is_open


def test_default_fossil_gate_requires_only_a_measurement():
    table = grown(Stage.HOLDING)
    table.contribution[:] = -5.0
    assert gate_of(table) == (True, set())


def test_hold_gate_requires_full_alpha_at_rest():
    table = grown(Stage.BLENDING)
    assert gate_of(table) == (False, {Check.ALPHA_AT_FULL})  # moving
    parked = grown(Stage.BLENDING, alpha_target=HALF)
    for _ in range(5):
        tick(parked, QUICK)
    assert gate_of(parked) == (False, {Check.ALPHA_AT_FULL})


def test_fossilisation_is_never_automatic():
    table = grown(Stage.HOLDING)
    for _ in range(50):
        tick(table, AUTO)
        measure(table)
    assert table.stage[0, 0] == Stage.HOLDING


def test_advance_is_illegal_where_it_is_automatic():
    table = grown(Stage.GERMINATED)
    assert may(table, QUICK, Op.ADVANCE)
    assert not may(table, AUTO, Op.ADVANCE)


# --- measurements


def test_contribution_velocity_starts_at_the_second_measurement():
    table = grown(Stage.BLENDING, QUICK)
    table.contribution[:] = table.contribution_velocity[:] = table.contribution_prev[:] = np.nan
    measured = np.array([[True, False]])
    velocities, previous = [], []
    for value in (0.1, 0.2, 0.4, 0.4):
        record_contribution(table, np.where(measured, value, np.nan), np.where(measured, 0.01, np.nan))
        velocities.append(float(table.contribution_velocity[0, 0]))
        previous.append(float(table.contribution_prev[0, 0]))
    assert velocities[0] != velocities[0]  # undefined after one measurement
    assert velocities[1:] == pytest.approx([0.03, 0.7 * 0.03 + 0.3 * 0.2, 0.7 * (0.7 * 0.03 + 0.3 * 0.2)])
    assert previous[1:] == pytest.approx([0.1, 0.2, 0.4])
    assert np.isnan(table.contribution[0, 1])


def test_contribution_age_counts_epochs_since_measurement():
    table = grown(Stage.BLENDING)
    assert table.contribution_age[0].tolist() == [-1, -1]
    tick(table, QUICK)
    assert table.contribution_age[0, 0] == -1  # stays -1 until measured
    ages = []
    for measured in (True, False, False, True):
        worth = np.array([[0.1 if measured else np.nan, np.nan]])
        record_contribution(table, worth, worth)
        ages.append(int(table.contribution_age[0, 0]))
        tick(table, QUICK)
    assert ages == [0, 1, 2, 0]
    assert table.contribution_age[0, 1] == -1


def test_missing_measurement_keeps_the_previous_value():
    table = grown(Stage.HOLDING)
    before = table.clone()
    record_contribution(table, np.full((1, 2), np.nan), np.full((1, 2), np.nan))
    assert table.diff(before) == {}


def test_record_keeps_the_best_and_a_short_history():
    table = SlotTable.empty(2, 1)
    for epoch in range(12):
        quality = np.array([0.1 * (epoch % 4), np.nan])
        record_epoch(table, quality=quality, val_loss=1 - quality, train_loss=quality)
    np.testing.assert_allclose(table.quality_history[0, -4:], [0.0, 0.1, 0.2, 0.3], atol=1e-6)
    np.testing.assert_allclose(table.loss_history[0, -1], 0.7, atol=1e-6)
    assert table.quality_best_env[0] == np.float32(0.1 * 3)
    assert np.isnan(table.quality_best_env[1])


def test_first_measured_quality_is_the_baseline():
    table = SlotTable.empty(1, 1)
    act(table, AUTO, Op.GERMINATE)  # before any measurement
    tick(table, AUTO)
    assert np.isnan(table.quality_birth[0, 0])
    for quality in (0.3, 0.2, 0.6, 0.4):
        measure(table, quality=quality)
    assert table.quality_birth[0, 0] == table.quality_stage[0, 0] == np.float32(0.3)
    assert table.quality_best[0, 0] == np.float32(0.6)


# --- invalid actions


@pytest.mark.parametrize("value", [-1, -100, 13, 10**6])
@pytest.mark.parametrize("head", [Head.SLOT, Head.ALPHA_SPEED, Head.ALPHA_CURVE, Head.OP])
def test_out_of_range_action_changes_nothing(head, value):
    table = grown(Stage.HOLDING)
    act(table, QUICK, Op.WAIT)
    before = table.clone()
    action = np.array([row(Op.PRUNE)])
    action[0, head] = value
    assert not is_legal(table, action, QUICK)[0]
    assert not apply(table, action, QUICK).happened[0]
    assert table.diff(before) == {}


def test_irrelevant_heads_are_ignored():
    table = grown(Stage.HOLDING)
    action = np.array([row(Op.PRUNE)])
    action[0, [Head.BLUEPRINT, Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET]] = -1
    assert apply(table, action, QUICK).happened[0]


def test_illegal_action_is_recorded_as_wait():
    table = grown(Stage.TRAINING)
    act(table, QUICK, Op.ADVANCE)
    assert table.last_op[0] == Op.ADVANCE
    act(table, QUICK, Op.FOSSILIZE)
    assert table.last_op[0] == Op.WAIT


@pytest.mark.parametrize("nonsense", [{"max_seeds": -1}, {"min_prune_age": -1}])
def test_rules_reject_negative_values(nonsense):
    with pytest.raises(ConfigError, match="must be ≥ 0, got"):
        Rules(**nonsense)


# -- open birth


OPEN = Rules(birth="open")


def test_open_birth_blends_at_full_strength_in_the_same_epoch():
    table = SlotTable.empty(1, 2)
    outcome = act(table, OPEN, Op.GERMINATE, blueprint=1, alpha_target=2)
    assert [effect.kind for effect in outcome.effects] == [EffectKind.BUILD]
    assert (table.prev_stage[0, 0], table.stage[0, 0]) == (SeedStage.GERMINATED, SeedStage.BLENDING)
    tick(table, OPEN)
    assert (table.stage[0, 0], table.alpha[0, 0]) == (SeedStage.HOLDING, 1.0)


def test_open_birth_ramps_alpha_from_the_first_epoch():
    rules = Rules(birth="open", open_ramp=4)
    table = SlotTable.empty(1, 2)
    act(table, rules, Op.GERMINATE, blueprint=1, style=0, alpha_target=2)  # LINEAR_ADD
    alphas = []
    for _ in range(4):
        tick(table, rules)
        alphas.append(float(table.alpha[0, 0]))
    assert alphas == [0.25, 0.5, 0.75, 1.0]
    assert table.stage[0, 0] == SeedStage.HOLDING


def test_open_birth_without_a_ramp_length_uses_the_tempo():
    rules = Rules(birth="open", open_ramp=None)
    table = SlotTable.empty(1, 2)
    act(table, rules, Op.GERMINATE, blueprint=1, tempo=0, alpha_target=2)
    for _ in range(3):
        assert table.stage[0, 0] == SeedStage.BLENDING
        tick(table, rules)
    assert table.alpha[0, 0] == 1.0


def test_open_birth_does_not_block_the_next_germination():
    table = SlotTable.empty(1, 2)
    act(table, OPEN, Op.GERMINATE, 0, blueprint=1)
    tick(table, OPEN)
    assert may(table, OPEN, Op.GERMINATE, 1)


def test_open_birth_rejects_unknown_settings():
    for wrong in ({"birth": "sudden"}, {"open_ramp": -1}):
        with pytest.raises(ConfigError, match=r"birth|open_ramp"):
            Rules(**wrong)
