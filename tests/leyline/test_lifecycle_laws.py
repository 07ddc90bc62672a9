"""Test lifecycle properties that hold for any table, rules and sequence of actions, legal or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from esper.leyline import HEAD_OPTIONS, NEXT_STAGES, Head, Op, SeedStage, SlotTable
from esper.leyline.actions import ALPHA_TARGETS, NUM_HEADS, STYLE_OPERATOR
from esper.leyline.lifecycle import (
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
from esper.leyline.stages import COOLING
from tests.support.lifecycle_inputs import any_rules, mixed_actions, reached
from tests.support.random_tables import LIVELY, random_actions, random_legal_actions, random_measurements, random_table

Stage = SeedStage
seeds = st.integers(0, 2**32 - 1)
LISTED = np.eye(len(Stage), dtype=bool)  # a stage may stay the same
for _stage, _after in NEXT_STAGES.items():
    LISTED[_stage, list(_after)] = True


@dataclass
class Step:
    """One step of many environments, with the table before it, after `apply` and after `tick`."""

    before: SlotTable
    applied: SlotTable
    ticked: SlotTable
    actions: np.ndarray
    outcome: Outcome


def random_steps(rules: Rules, seed: int, *, slots: int = 3, steps: int = 20) -> Iterator[Step]:
    """Yield random steps under these rules from random states. Half of the actions are legal."""
    rng = np.random.default_rng(seed)
    table = reached(slots).rows(rng.integers(0, 512, 32))
    for _ in range(steps):
        before, actions = table.clone(), mixed_actions(table, rules, rng)
        outcome = apply(table, actions, rules)
        applied = table.clone()
        tick(table, rules)
        yield Step(before, applied, table.clone(), actions, outcome)
        random_measurements(table, rng)


def every_action(table: SlotTable, op: Op, slot: int, seed: int) -> np.ndarray:
    """Return one action per environment with this op and slot and random other heads."""
    rng = np.random.default_rng(seed)
    actions = random_actions(table, rng)
    actions[:, Head.OP], actions[:, Head.SLOT] = op, slot
    actions[:, Head.BLUEPRINT] = 1 + rng.integers(0, table.takes.shape[1] - 1, table.num_envs)
    return actions


def assert_listed_after_action(before: SlotTable, after: SlotTable, rules: Rules) -> None:
    """Assert that an action made only listed transitions. An open birth makes two: 0 → GERMINATED → BLENDING."""
    born_open = (before.stage == Stage.DORMANT) & (after.stage == Stage.BLENDING) & (rules.birth == "open")
    assert (after.prev_stage[born_open] == Stage.GERMINATED).all()
    assert LISTED[np.where(born_open, Stage.GERMINATED, before.stage), after.stage].all()


def is_one_of(stage: np.ndarray, *stages: SeedStage) -> np.ndarray:
    return np.isin(stage, stages)


# --- transitions


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_only_listed_transitions_occur(rules, seed):
    for step in random_steps(rules, seed):
        assert_listed_after_action(step.before, step.applied, rules)
        assert LISTED[step.applied.stage, step.ticked.stage].all()


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_illegal_action_changes_only_last_op(rules, seed):
    for step in random_steps(rules, seed):
        illegal = np.nonzero(~step.outcome.happened)[0]
        changed = step.applied.rows(illegal).diff(step.before.rows(illegal))
        assert set(changed) <= {"last_op"}
        assert (step.applied.last_op[illegal] == Op.WAIT).all()
        assert not {effect.env for effect in step.outcome.effects} & set(illegal.tolist())


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_action_changes_only_its_slot(rules, seed):
    for step in random_steps(rules, seed, steps=5):
        chosen_slot = np.where(step.outcome.happened, step.actions[:, Head.SLOT], 0)
        elsewhere = np.arange(step.before.num_slots) != chosen_slot[:, None]
        for name, changed in step.applied.diff(step.before).items():
            if name not in ("last_op", "next_serial"):
                assert not (changed & elsewhere).any(), name


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_fossils_keep_stage_alpha_and_serial(rules, seed):
    for step in random_steps(rules, seed):
        fossil = step.before.stage == Stage.FOSSILIZED
        assert (step.ticked.stage[fossil] == Stage.FOSSILIZED).all()
        assert (step.ticked.alpha[fossil] == 1.0).all()
        assert (step.ticked.serial[fossil] == step.before.serial[fossil]).all()


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_cooldown_decreases_by_one_per_tick(rules, seed):
    for step in random_steps(rules, seed):
        cooling = is_one_of(step.applied.stage, *COOLING)
        assert ((step.applied.cooldown > 0) == cooling).all()
        ticks_left = step.applied.cooldown[cooling] - 1
        assert (step.ticked.cooldown[cooling] == ticks_left).all()
        assert (step.ticked.stage[cooling][ticks_left == 0] == Stage.DORMANT).all()
        assert is_one_of(step.ticked.stage[cooling][ticks_left > 0], Stage.EMBARGOED, Stage.RESETTING).all()


# --- legality


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_operation_happens_exactly_where_legal(rules, seed):
    rng = np.random.default_rng(seed)
    table = reached(3).rows(rng.integers(0, 512, 64))
    table.enabled[:] = (rng.random(table.stage.shape) < 0.8) | (table.stage != Stage.DORMANT)
    may = legal(table, rules)
    for op in Op:
        for slot in range(table.num_slots):
            actions = every_action(table, op, slot, seed)
            after = table.clone()
            happened = apply(after, actions, rules).happened
            assert (happened == may[:, op, slot]).all(), op.name
            assert (happened == is_legal(table, actions, rules)).all()
            assert_done(op, slot, actions, happened, table, after, rules)


def assert_done(op, slot, actions, happened, before, after, rules):
    """Assert the result of the operation in the environments where it happened."""
    was, now = before.rows(np.nonzero(happened)[0]), after.rows(np.nonzero(happened)[0])
    a = actions[happened]
    stage, alpha, target = now.stage[:, slot], now.alpha[:, slot], now.alpha_to[:, slot]
    moving = now.moving[:, slot]
    assert (now.last_op == op).all()
    if op == Op.WAIT:
        assert set(now.diff(was)) <= {"last_op"}
    elif op == Op.GERMINATE:
        if rules.birth == "open":
            assert (stage == Stage.BLENDING).all()
            assert np.where(moving, alpha == 0, alpha == ALPHA_TARGETS[a[:, Head.ALPHA_TARGET]]).all()
        else:
            assert (stage == Stage.GERMINATED).all()
            assert (alpha == 0).all()
        assert (now.serial[:, slot] == was.next_serial).all()
        assert (now.next_serial == was.next_serial + 1).all()
    elif op == Op.SET_ALPHA_TARGET:
        assert (target == ALPHA_TARGETS[a[:, Head.ALPHA_TARGET]]).all()
        assert (moving | (alpha == target)).all()
        assert (now.operator[:, slot] == STYLE_OPERATOR[a[:, Head.STYLE]]).all()
    elif op == Op.PRUNE:
        leaving = moving & (target == 0) & now.frozen[:, slot] & (alpha == was.alpha[:, slot])
        assert (leaving | (stage == Stage.PRUNED)).all()
        assert (alpha[stage == Stage.PRUNED] == 0).all()
    elif op == Op.FOSSILIZE:
        assert (stage == Stage.FOSSILIZED).all()
    else:
        assert (stage == was.stage[:, slot] + 1).all()


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_wait_is_always_legal(rules, seed):
    table = reached(5).rows(np.random.default_rng(seed).integers(0, 512, 64))
    table.enabled[:] = False
    assert legal(table, rules)[:, Op.WAIT].all()
    assert not legal(table, rules)[:, 1:].any()


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_moving_seed_is_never_pruned_or_retargeted(rules, seed):
    for step in random_steps(rules, seed, steps=8):
        may, moving = legal(step.before, rules), step.before.moving
        assert not may[:, [Op.PRUNE, Op.SET_ALPHA_TARGET]][np.broadcast_to(moving[:, None], (32, 2, 3))].any()


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_one_at_a_time_blocks_germination_during_cooldown(rules, seed):
    for step in random_steps(rules, seed, steps=8):
        cooling = is_one_of(step.before.stage, *COOLING).any(axis=1)
        may = legal(step.before, rules)[:, Op.GERMINATE].any(axis=1)
        assert not (rules.one_at_a_time and (may & cooling).any())


# --- alpha


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_alpha_is_in_unit_range_and_zero_unless_blended(rules, seed):
    for step in random_steps(rules, seed):
        for table in (step.applied, step.ticked):
            assert ((table.alpha >= 0) & (table.alpha <= 1)).all()
            is_active = is_one_of(table.stage, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
            assert (table.alpha[~is_active] == 0).all()
            assert (table.alpha[is_one_of(table.stage, Stage.HOLDING, Stage.FOSSILIZED)] == 1).all()


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_alpha_is_monotone_in_a_ramp_and_ends_on_target(rules, seed):
    for step in random_steps(rules, seed):
        start, end = step.applied, step.ticked
        moving = start.moving
        up = start.alpha_to > start.alpha_from
        change = end.alpha - start.alpha
        assert (np.where(up, change, -change)[moving] >= 0).all()
        assert (change[~moving] == 0).all()
        arrived = moving & (start.ramp_pos + 1 == start.ramp_len)
        assert (end.alpha[arrived] == start.alpha_to[arrived]).all()
        assert not end.moving[arrived].any()


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_frozen_holds_exactly_while_alpha_ramps_down(rules, seed):
    for step in random_steps(rules, seed):
        for table in (step.applied, step.ticked):
            assert (table.frozen <= table.moving).all()
            assert (table.frozen == (table.moving & (table.alpha_to < table.alpha_from))).all()
        leaving = step.applied.moving & (step.applied.alpha_to == 0)
        assert step.applied.frozen[leaving].all()
        assert (step.ticked.moving | (step.ticked.stage == Stage.PRUNED))[leaving].all()


# --- independence of environments


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_environments_are_independent(rules, seed):
    rng = np.random.default_rng(seed)
    together = reached(3).rows(rng.integers(0, 512, 6))
    together.reset([0, 1])  # new environments beside busy ones
    apart = [together.rows([e]) for e in range(6)]
    for t in range(10):
        may = legal(together, rules)
        assert all((legal(alone, rules)[0] == may[e]).all() for e, alone in enumerate(apart))
        actions = mixed_actions(together, rules, rng)
        outcome = apply(together, actions, rules)
        dropped = tick(together, rules)
        for e, alone in enumerate(apart):
            own = apply(alone, actions[e : e + 1], rules)
            assert own.happened[0] == outcome.happened[e]
            assert own.effects == [f._replace(env=0) for f in outcome.effects if f.env == e]
            assert tick(alone, rules) == [f._replace(env=0) for f in dropped if f.env == e]
            assert alone.diff(together.rows([e])) == {}
        random_measurements(together, np.random.default_rng(seed + t))
        apart = [together.rows([e]) for e in range(6)]


def test_results_do_not_depend_on_environment_order():
    table, rng = random_table(32, 3, seed=1), np.random.default_rng(2)
    order = rng.permutation(32)
    shuffled, actions = table.rows(order), random_legal_actions(table, LIVELY, rng)
    apply(table, actions, LIVELY)
    apply(shuffled, actions[order], LIVELY)
    tick(table, LIVELY)
    tick(shuffled, LIVELY)
    assert shuffled.diff(table.rows(order)) == {}


# --- effects


@settings(max_examples=8, deadline=None)
@given(rules=any_rules, seed=seeds)
def test_effects_suffice_to_track_modules_and_operators(rules, seed):
    rng = np.random.default_rng(seed)
    table = SlotTable.empty(16, 3)
    modules: dict[tuple[int, int], int] = {}  # the operator last set for each module
    for t in range(40):
        actions = mixed_actions(table, rules, rng)
        effects = apply(table, actions, rules).effects
        effects += tick(table, rules)
        if t % 10 == 9:
            effects += expel(table, rng.random(table.stage.shape) < 0.2)
        for kind, e, s in effects:
            if kind == EffectKind.BUILD:
                assert (e, s) not in modules
                modules[e, s] = int(STYLE_OPERATOR[actions[e, Head.STYLE]])
            elif kind == EffectKind.DROP:
                del modules[e, s]
            elif kind == EffectKind.SET_OPERATOR:
                modules[e, s] = int(STYLE_OPERATOR[actions[e, Head.STYLE]])
            else:
                assert (e, s) in modules
                assert table.stage[e, s] == Stage.FOSSILIZED
        living = np.argwhere(is_one_of(table.stage, *list(Stage)[1:6]))
        assert modules == {(e, s): int(table.operator[e, s]) for e, s in living.tolist()}
        random_measurements(table, rng)


# --- the same properties as a state machine: hypothesis shrinks a failure to the shortest sequence of steps

anything = st.integers(-2, 15)
sensible = st.tuples(
    *[st.integers(0, len(HEAD_OPTIONS[h] or "012") - 1) for h in Head if h != Head.OP], st.sampled_from(list(Op))
)
values = st.sampled_from([float("nan"), -0.1, 0.0, 0.01, 0.5, 0.9, 1.0])


class LifecycleMachine(RuleBasedStateMachine):
    """One environment of three slots under arbitrary actions."""

    @initialize(rules=any_rules)
    def begin(self, rules):
        self.rules, self.table = rules, SlotTable.empty(1, 3)
        self.fossils: set[int] = set()

    def happened_since(self, before: SlotTable) -> None:
        assert LISTED[before.stage, self.table.stage].all()

    @rule(action=sensible)
    def act(self, action):
        before = self.table.clone()
        may = legal(before, self.rules)[0, action[Head.OP], action[Head.SLOT]]
        plants = action[Head.OP] == Op.GERMINATE
        takes = before.takes[action[Head.SLOT], action[Head.BLUEPRINT]]
        outcome = apply(self.table, np.array([action]), self.rules)
        assert outcome.happened[0] == (may and (takes or not plants))
        assert_listed_after_action(before, self.table, self.rules)

    @rule(action=st.lists(anything, min_size=NUM_HEADS, max_size=NUM_HEADS))
    def apply_any_action(self, action):
        before = self.table.clone()
        if not apply(self.table, np.array([action]), self.rules).happened[0]:
            assert set(self.table.diff(before)) <= {"last_op"}
        assert_listed_after_action(before, self.table, self.rules)

    @rule(epochs=st.integers(1, 6))
    def pass_time(self, epochs):
        for _ in range(epochs):
            before = self.table.clone()
            tick(self.table, self.rules)
            self.happened_since(before)
            assert self.table.step[0] == before.step[0] + 1

    @rule(quality=values, worth=values, se=values, health=values)
    def look(self, quality, worth, se, health):
        clocks = {"stage", "dwell", "age", "cooldown", "step", "alpha", "ramp_pos"}
        before, each = self.table.clone(), np.array([quality])
        record_epoch(self.table, quality=each, val_loss=each, train_loss=each)
        record_contribution(self.table, np.full((1, 3), worth), np.full((1, 3), se))
        self.table.grad_health[:] = self.table.grad_ratio[:] = health
        assert not clocks & set(self.table.diff(before))

    @rule(which=st.lists(st.booleans(), min_size=3, max_size=3))
    def step_in(self, which):
        before = self.table.clone()
        expel(self.table, np.array([which]))
        self.happened_since(before)

    @invariant()
    def laws_hold(self):
        if not hasattr(self, "table"):
            return
        table = self.table
        fossils = set(table.serial[table.stage == Stage.FOSSILIZED].tolist())
        assert fossils >= self.fossils
        self.fossils = fossils
        assert legal(table, self.rules)[:, Op.WAIT].all()
        assert ((table.alpha >= 0) & (table.alpha <= 1)).all()
        assert ((table.cooldown > 0) == is_one_of(table.stage, *COOLING)).all()
        assert ((table.serial == -1) == (table.stage == Stage.DORMANT)).all()
        assert table.serial.max() < table.next_serial[0]


LifecycleMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_any_lifecycle_satisfies_the_invariants = LifecycleMachine.TestCase
