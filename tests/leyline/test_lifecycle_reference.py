"""Test that the vectorised rules equal the scalar reference in every column for any table, action and rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esper.leyline import Op, SeedStage, SlotTable, lifecycle
from esper.leyline.actions import NUM_OPS
from esper.leyline.gates import failed_checks, open_gates
from esper.leyline.lifecycle import Rules
from tests.reference import lifecycle as reference
from tests.support.lifecycle_inputs import any_rules, mixed_actions, reached
from tests.support.random_tables import random_measurements


def assert_same(ours: SlotTable, theirs: SlotTable) -> None:
    for name, mine in ours.arrays().items():
        other = theirs.arrays()[name]
        if mine.dtype.kind == "f":
            np.testing.assert_allclose(mine, other, rtol=0, atol=2e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(mine, other, err_msg=name)


def add_edge_cases(table: SlotTable, rng: np.random.Generator) -> None:
    """Modify a table in place: disabled slots, few blueprints, missing and borderline measurements."""
    table.enabled[:] = (rng.random(table.stage.shape) < 0.9) | (table.stage != SeedStage.DORMANT)
    table.takes[:, 1:] = rng.random(table.takes[:, 1:].shape) < rng.choice([0.05, 0.9])
    for column in (table.grad_health, table.grad_ratio, table.contribution, table.contribution_se):
        lost, borderline = rng.random((2, *table.stage.shape)) < 0.1
        column[lost] = np.nan
        column[borderline] = rng.choice([-0.02, 0.0, 0.01, 0.1, 0.5, 0.7], borderline.sum())
    table.quality[rng.random(table.num_envs) < 0.1] = np.nan


def effects_of(effects: list[lifecycle.Effect], env: int) -> set[tuple[str, int]]:
    return {(effect.kind.name, effect.slot) for effect in effects if effect.env == env}


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rules=any_rules, seed=st.integers(0, 2**32 - 1))
def test_legal_gates_apply_and_tick_match_the_scalar_reference(slots, rules, seed):
    rng = np.random.default_rng(seed)
    table = reached(slots).rows(rng.integers(0, 512, 24))
    add_edge_cases(table, rng)
    for _ in range(3):
        envs = reference.read(table)
        assert_same_legality(table, envs, rules)

        actions = mixed_actions(table, rules, rng)
        expected = table.clone()
        outcome = lifecycle.apply(table, actions, rules)
        for e, env in enumerate(envs):
            happened, effects = reference.apply(env, actions[e].tolist(), rules)
            assert happened == outcome.happened[e]
            assert set(effects) == effects_of(outcome.effects, e)
        reference.write(envs, expected)
        assert_same(table, expected)

        dropped = lifecycle.tick(table, rules)
        for e, env in enumerate(envs):
            assert set(reference.tick(env, rules)) == effects_of(dropped, e)
        reference.write(envs, expected)
        assert_same(table, expected)
        random_measurements(table, rng)


def assert_same_legality(table: SlotTable, envs: list[reference.Env], rules: Rules) -> None:
    open_gate, failed = open_gates(table, rules.thresholds), failed_checks(table, rules.thresholds)
    may = lifecycle.legal(table, rules)
    for e, env in enumerate(envs):
        for s, slot in enumerate(env.slots):
            assert open_gate[e, s] == reference.gate_is_open(env, slot, rules)
            assert {check for check in failed if failed[check][e, s]} == set(reference.failed_checks(env, slot, rules))
            for op in Op:
                assert may[e, op, s] == reference.is_legal(env, op, s, rules), (op.name, slot)
    assert may.shape == (len(envs), NUM_OPS, table.num_slots)


@settings(max_examples=6, deadline=None)
@given(rules=any_rules, seed=st.integers(0, 2**32 - 1))
def test_full_lifecycles_match_the_scalar_reference(rules, seed):
    rng = np.random.default_rng(seed)
    table = SlotTable.empty(8, 3)
    envs = reference.read(table)
    for _ in range(40):
        actions = mixed_actions(table, rules, rng)
        lifecycle.apply(table, actions, rules)
        lifecycle.tick(table, rules)
        for env, row in zip(envs, actions.tolist(), strict=True):
            reference.apply(env, row, rules)
            reference.tick(env, rules)
        expected = table.clone()
        reference.write(envs, expected)
        assert_same(table, expected)
        random_measurements(table, rng)
        measured = reference.read(table)
        for env, report in zip(envs, measured, strict=True):  # copy measurements to the reference
            env.quality = report.quality
            for mine, theirs in zip(env.slots, report.slots, strict=True):
                result = ("params", "quality", "contribution", "prospect", "interaction", "grad")
                for name in reference.COLUMNS:
                    if name.startswith(result):
                        setattr(mine, name, getattr(theirs, name))
