"""Test SlotTable: clone, rows, restore, reset and diff copy arrays and share no memory."""

from __future__ import annotations

import numpy as np
import pytest

from esper.leyline import BLUEPRINTS, SeedStage, SlotTable
from esper.leyline.lifecycle import is_legal
from esper.leyline.slot_table import HISTORY, SEED_COLUMNS
from tests.support.random_tables import LIVELY, random_legal_actions, random_measurements, random_table

PICKS = [slice(None), slice(1, 4), [0], [5, 2], np.array([3, 1, 7])]


@pytest.fixture
def table() -> SlotTable:
    return random_table(8, 3, seed=5)


def test_empty_table_has_no_measurements():
    table = SlotTable.empty(2, 3)
    assert (table.num_envs, table.num_slots) == (2, 3)
    assert (table.stage == SeedStage.DORMANT).all()
    assert table.quality_history.shape == (2, HISTORY)
    for name in ("quality", "contribution", "prospect", "grad_health", "loss_history"):
        assert np.isnan(getattr(table, name)).all(), name
    for name in ("serial", "blueprint", "operator", "contribution_age"):
        assert (getattr(table, name) == -1).all(), name
    assert table.enabled.all()
    assert table.takes.shape == (3, len(BLUEPRINTS))
    assert table.takes[:, 1:].all()
    assert not table.takes[:, 0].any()


def test_empty_copies_takes():
    takes = np.eye(2, 15, dtype=bool)
    table = SlotTable.empty(1, 2, takes=takes)
    takes[:] = False
    assert table.takes.sum() == 2
    assert table.takes.shape == (2, 15)


def test_clone_is_equal_and_shares_no_memory(table):
    clone = table.clone()
    assert clone.diff(table) == {}
    for name, array in clone.arrays().items():
        assert array.dtype == table.arrays()[name].dtype
        assert not np.shares_memory(array, table.arrays()[name]), name


@pytest.mark.parametrize("pick", PICKS, ids=str)
def test_rows_returns_an_independent_table(table, pick):
    rows = table.rows(pick)
    assert np.array_equal(rows.stage, table.stage[pick])
    assert np.array_equal(rows.takes, table.takes)
    for name, array in rows.arrays().items():
        assert not np.shares_memory(array, table.arrays()[name]), name


@pytest.mark.parametrize("pick", PICKS, ids=str)
def test_restore_changes_only_the_given_environments(table, pick):
    saved = table.clone()
    random_measurements(table, np.random.default_rng(0))
    table.reset([0, 1, 2, 3])
    changed = table.clone()
    table.restore(saved, pick)
    others = np.setdiff1d(np.arange(8), np.arange(8)[pick])
    assert table.rows(pick).diff(saved.rows(pick)) == {}
    assert table.rows(others).diff(changed.rows(others)) == {}


def test_restore_writes_in_place(table):
    alpha = table.alpha
    table.restore(SlotTable.empty(8, 3))
    assert table.alpha is alpha
    assert (alpha == 0).all()


def test_reset_clears_all_but_enabled_and_takes(table):
    table.enabled[2, 1] = False
    table.takes[0, 4] = False
    fresh = SlotTable.empty(8, 3)
    table.reset([2])
    assert set(table.rows([2]).diff(fresh.rows([2]))) == {"enabled", "takes"}
    table.reset()
    assert set(table.diff(fresh)) == {"enabled", "takes"}


def test_blank_resets_only_the_given_seeds(table):
    before = table.clone()
    where = np.zeros((8, 3), dtype=bool)
    where[np.argmax(table.stage.max(axis=1)), 0] = True
    table.blank(where)
    fresh = SlotTable.empty(8, 3)
    for column in SEED_COLUMNS:
        now = getattr(table, column.name)
        np.testing.assert_array_equal(now[where], getattr(fresh, column.name)[where])
        np.testing.assert_array_equal(now[~where], getattr(before, column.name)[~where])
    assert set(table.diff(before)) <= {column.name for column in SEED_COLUMNS}


def test_diff_returns_positions_and_treats_nan_as_equal():
    table = SlotTable.empty(2, 2)
    before = table.clone()
    assert table.diff(before) == {}
    table.contribution[1, 0] = 0.5
    table.stage[0, 1] = SeedStage.TRAINING
    changed = table.diff(before)
    assert set(changed) == {"contribution", "stage"}
    assert changed["contribution"].tolist() == [[False, False], [True, False]]
    assert changed["stage"].tolist() == [[False, True], [False, False]]
    assert set(before.diff(table)) == set(changed)


# --- random tables


def test_random_table_covers_all_states():
    table = random_table(128, 25, seed=0)
    blending = table.stage == SeedStage.BLENDING
    fresh = np.isnan(table.contribution)
    assert set(np.unique(table.stage)) == set(SeedStage)
    assert set(np.unique(table.operator)) == {-1, 0, 1, 2}
    assert set(np.unique(table.curve)) == {0, 1, 2, 3, 4}
    assert set(np.unique(table.blueprint)) == {-1, *range(1, 13)}
    assert set(np.unique(table.last_op)) == set(range(6))
    for what in (
        table.moving & (table.alpha_to == 0),  # ramping down to 0
        table.frozen & (table.alpha_to > 0),  # ramping down to a partial target
        table.moving & ~table.frozen,
        blending & ~table.moving & (table.alpha < 1),  # at rest below full alpha
        blending & ~table.moving & (table.alpha == 1),
        (table.stage == SeedStage.HOLDING) & fresh,
        (table.stage == SeedStage.HOLDING) & ~fresh,
        np.isnan(table.contribution_velocity) & ~fresh,  # measured once
        np.isnan(table.grad_health) & (table.stage == SeedStage.TRAINING),
        np.isnan(table.quality)[:, None] & (table.stage == SeedStage.DORMANT),  # before the first measurement
    ):
        assert what.sum() >= 2


@pytest.mark.parametrize(("envs", "slots"), [(1, 1), (4, 3), (64, 5)])
def test_random_table_is_deterministic(envs, slots):
    one, again, other = (random_table(envs, slots, seed) for seed in (3, 3, 4))
    assert one.diff(again) == {}
    assert one.diff(other) != {}


def test_random_legal_actions_are_legal():
    table, rng = random_table(256, 4, seed=1), np.random.default_rng(0)
    table.takes[:] = rng.random(table.takes.shape) < 0.3
    for _ in range(5):
        assert is_legal(table, random_legal_actions(table, LIVELY, rng), LIVELY).all()
