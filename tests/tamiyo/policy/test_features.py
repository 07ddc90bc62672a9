"""Test the observation features: equal to the reference, bounded, named, never constant, never duplicated."""

import dataclasses
import importlib.util
import itertools
import math
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.commands.features import run_features
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import legal
from esper.leyline.slot_table import SlotTable, live_costs, seed_macs
from esper.leyline.stages import STRICT, SeedStage
from esper.tamiyo.policy import feature_table, features
from esper.tamiyo.policy.feature_table import (
    BASE,
    ENV_COLUMN,
    FEATURES,
    PER_SLOT,
    SLOT_COLUMN,
)
from esper.tamiyo.policy.features import SOFT_SLOT, ObsContext, batch_obs_to_features, feature_names, num_features
from tests.reference.observations import reports, slow_features, slow_prices
from tests.support.observation_context import example_context
from tests.support.random_tables import LIVELY, random_table

INF, NAN = float("inf"), float("nan")


def observe(table, context, rules=LIVELY):
    return batch_obs_to_features(table, context, legal=allowed(table, rules))


def allowed(table, rules=LIVELY):
    with np.errstate(invalid="ignore"):  # some tests write infinities to the table
        return legal(table, rules)


def reference(table, context):
    rows = reports(table, allowed(table))
    return slow_features(rows, context, slow_prices(table.takes, context)).numpy()


def assert_same(table, context):
    ours, slow = observe(table, context), reference(table, context)
    names = feature_names(table.num_slots)
    wrong = {names[f] for f in np.nonzero(np.abs(ours - slow) > 1e-6)[1]}
    assert not wrong
    assert np.isfinite(ours).all()


def env(obs, name):
    return obs[:, ENV_COLUMN[name]]


def slot(obs, name):
    return obs[:, BASE:].reshape(len(obs), -1, PER_SLOT)[..., SLOT_COLUMN[name]]


def other_contexts(slots):
    """Yield contexts that differ in every field."""
    first = example_context(slots)
    yield first
    yield dataclasses.replace(
        first, horizon=25, host_params=31, host_macs=77, slot_width=first.slot_width * 5, params_budget=0,
        slot_params=first.slot_params * 1000, slot_macs=first.slot_macs // 3, slot_depth=1 - first.slot_depth,
        chance_loss=None, quality_zero=-2.0, quality_span=4.0, thresholds=STRICT,
    )  # fmt: skip
    yield dataclasses.replace(first, params_budget=7000, quality_span=0.5, slot_depth=first.slot_depth / 2)


# --- equality with the reference


@pytest.mark.parametrize(("envs", "slots"), [(300, 3), (60, 1), (30, 9), (10, 25), (1, 3)])
def test_features_match_the_reference_on_random_tables(envs, slots):
    table = random_table(envs, slots, seed=envs)
    for context in other_contexts(slots):
        assert_same(table, context)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), envs=st.integers(1, 12), slots=st.integers(1, 5), epochs=st.integers(0, 40))
def test_features_match_the_reference_for_any_table_shape(seed, envs, slots, epochs):
    table = random_table(envs, slots, seed=seed, epochs=epochs)
    rng = np.random.default_rng(seed)
    table.enabled[:] = rng.random(table.enabled.shape) < 0.8
    table.takes[:] = rng.random(table.takes.shape) < 0.7
    assert_same(table, next(itertools.islice(other_contexts(slots), seed % 3, None)))


def test_features_match_the_reference_at_boundaries():
    corners = list(
        itertools.product(
            [s for s in SeedStage if s is not SeedStage.DORMANT],
            [
                (0, 0, 1.0),
                (3, 0, 1.0),
                (3, 2, 0.0),
                (3, 3, 0.5),
                (8, 7, 1.0),
                (8, 0, 0.0),
            ],  # ramp length, position, target
            [0, 4, 5, 9, 10, 11, 200],  # dwell and age
            [-1, 0, 3],  # epochs since the contribution was measured
        )
    )
    table = SlotTable.empty(len(corners), 1)
    for e, (stage, (length, place, target), age, measured) in enumerate(corners):
        table.stage[e] = stage
        table.ramp_len[e], table.ramp_pos[e], table.alpha_to[e], table.alpha_from[e] = length, place, target, 0.7
        table.dwell[e] = table.age[e] = age
        table.contribution_age[e] = measured
        table.blueprint[e], table.operator[e], table.params[e] = 1 + e % 12, e % 3, e * 50
        table.alpha[e], table.cooldown[e] = e % 11 / 10, e % 8
        table.step[e], table.quality[e], table.next_serial[e] = e % 70, e % 7 / 6, e % 30
    for context in itertools.islice(other_contexts(1), 2):
        assert_same(table, context)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, -1e-3, 0.1, -0.5, 1.0, 1e9, -1e9, INF, -INF, NAN])
def test_extreme_measurements_are_bounded_and_match_the_reference(value):
    table = random_table(12, 3, seed=1)
    odd = np.random.default_rng(0).random(table.stage.shape) < 0.5
    alive = odd & (table.stage != SeedStage.DORMANT)
    for name in SOFT_SLOT:
        column = getattr(table, name, None)
        if column is not None and column.dtype.kind == "f":
            column[alive] = value
    for column in (table.quality_birth, table.quality_stage, table.quality_best):
        column[alive] = value
    table.quality[::2] = table.val_loss[::2] = table.train_loss[1::2] = value
    table.loss_history[:, -3] = table.quality_history[::3, -3] = value
    for context in other_contexts(3):
        ours = observe(table, context)
        np.testing.assert_allclose(ours, reference(table, context), atol=2e-6)
        assert_bounded(ours, 3)


# --- names and ranges


def test_names_are_unique_and_in_column_order():
    names = feature_names(3)
    assert len(names) == len(set(names)) == num_features(3) == BASE + 3 * PER_SLOT
    assert names[BASE + PER_SLOT + SLOT_COLUMN["alpha"]] == "slot1.alpha"
    assert len(FEATURES) == BASE + PER_SLOT


def test_columns_are_addressed_by_name(monkeypatch):
    """A copy of the module that reads a permuted table computes the same values under the same names."""
    rng = np.random.default_rng(3)
    for scope in ("ENV", "SLOT"):
        shuffled = rng.permutation(list(getattr(feature_table, f"{scope}_COLUMN"))).tolist()
        monkeypatch.setattr(feature_table, f"{scope}_COLUMN", {name: i for i, name in enumerate(shuffled)})
    live = feature_table.LIVE
    monkeypatch.setattr(feature_table, "LIVE", tuple(live[i] for i in rng.permutation(len(live))))
    spec = importlib.util.spec_from_file_location("permuted_features", features.__file__)
    permuted = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, permuted)
    spec.loader.exec_module(permuted)

    table, context = random_table(40, 3, seed=3), example_context(3)
    fields = {f.name: getattr(context, f.name) for f in dataclasses.fields(context)}
    obs = permuted.batch_obs_to_features(table, permuted.ObsContext(**fields), legal=allowed(table))
    expected = observe(table, context)
    slots = obs[:, BASE:].reshape(len(obs), -1, PER_SLOT)
    for name, column in feature_table.ENV_COLUMN.items():
        np.testing.assert_array_equal(obs[:, column], env(expected, name), err_msg=name)
    for name, column in feature_table.SLOT_COLUMN.items():
        np.testing.assert_array_equal(slots[..., column], slot(expected, name), err_msg=name)


def assert_bounded(obs, slots):
    low = [f.low for f in FEATURES[:BASE]] + [f.low for f in FEATURES[BASE:]] * slots
    high = [f.high for f in FEATURES[:BASE]] + [f.high for f in FEATURES[BASE:]] * slots
    assert (obs >= np.array(low)).all()
    assert (obs <= np.array(high)).all()


STATIC_WITHIN_A_HOST = {
    "has_budget": "a run has a budget or has none",
    "host_params": "a size of the host",
    "host_macs": "a size of the host",
    "width": "a size of the slot",
    "depth": "the place of the slot",
    **{f"price_{what}_{b}": "a price at the slot" for what in ("params", "macs") for b in BLUEPRINTS[1:]},
}


@pytest.fixture(scope="module")
def lifecycle_observations():
    """Return observations of random tables per context: many lifecycles and ages, with and without limits on
    germination, some slots disabled."""
    observed = [[], [], []]
    for seed, rules in enumerate((LIVELY, msgspec.structs.replace(LIVELY, one_at_a_time=True))):
        table, rng = random_table(500, 3, seed=seed), np.random.default_rng(seed)
        table.enabled[:] = rng.random(table.enabled.shape) < 0.9
        table.train_loss[:] += rng.normal(0, 0.1, 500)  # random tables have a constant overfit
        table.takes[0, 1 + seed :: 2] = False
        for rows, context in zip(observed, other_contexts(3), strict=True):
            rows.append(observe(table, context, rules))
    return [np.concatenate(rows).astype(np.float64) for rows in observed]


def still(obs):
    return {name.split(".")[-1] for name in np.array(feature_names(3))[(obs == obs[0]).all(axis=0)].tolist()}


def test_no_column_is_constant(lifecycle_observations):
    assert still(np.concatenate(lifecycle_observations)) == set()


def test_only_sizes_and_prices_are_constant_within_a_host(lifecycle_observations):
    for obs in lifecycle_observations:
        assert still(obs) <= set(STATIC_WITHIN_A_HOST) | {"budget_left"}  # constant 1 without a budget
    assert "budget_left" not in still(lifecycle_observations[0])


def test_no_column_duplicates_another(lifecycle_observations):
    """Within a host no two varying columns are perfectly correlated, except prices."""
    for obs in lifecycle_observations:
        one_slot = obs[:, : BASE + PER_SLOT]
        moves = one_slot.std(axis=0) > 0
        names = np.array(feature_names(1))[moves].tolist()
        correlation = np.triu(np.corrcoef(one_slot[:, moves].T), 1)
        pairs = [(names[i], names[j]) for i, j in zip(*np.nonzero(np.abs(correlation) > 0.9999), strict=True)]
        assert [p for p in pairs if not all("price" in name for name in p)] == []


def test_every_column_stays_in_its_range(lifecycle_observations):
    for obs in lifecycle_observations:
        assert_bounded(obs, 3)


def test_features_command_prints_every_name(capsys):
    run_features(None, as_json=False)
    printed = capsys.readouterr().out
    for feature in FEATURES:
        assert feature.name in printed


# --- distinct values for distinct states


def test_unmeasured_values_differ_from_zero():
    table = SlotTable.empty(1, 2)
    obs = observe(table, example_context(2))
    for name in ("quality", "quality_1", "val_loss", "val_loss_4", "below_best"):
        assert env(obs, name) == -1
    for name in ("contribution_se", "contribution_age", "prospect_se", "grad_norm", "grad_ratio", "grad_health"):
        assert (slot(obs, name) == -1).all()
    assert env(obs, "live_gain_known") == 0
    assert (slot(obs, "velocity_known") == 0).all()
    assert (slot(obs, "interaction_known") == 0).all()


def test_contribution_of_an_earlier_stage_has_no_age():
    table = SlotTable.empty(1, 1)
    table.stage[:], table.contribution[:], table.contribution_se[:] = SeedStage.HOLDING, 0.1, 0.02
    stale = observe(table, example_context(1))
    table.contribution_age[:] = 0
    fresh = observe(table, example_context(1))

    assert slot(stale, "contribution") == slot(fresh, "contribution") == pytest.approx(0.5)
    assert slot(fresh, "contribution_bound") == pytest.approx((0.1 - 2.5 * 0.02) / (0.05 + 0.1))
    assert slot(stale, "contribution_age") == -1
    assert slot(fresh, "contribution_age") == 0


def test_infinite_gradient_norm_is_large_and_not_unmeasured():
    table = random_table(4, 2, seed=0)
    table.grad_norm[:] = INF
    assert (slot(observe(table, example_context(2)), "grad_norm") > 0.999).all()


def test_prices_encode_relative_size_and_availability():
    table = SlotTable.empty(1, 2)
    table.takes[1, BLUEPRINTS.index("norm")] = False
    context = example_context(2)
    prices = np.array(context.slot_params)
    prices[0, BLUEPRINTS.index("norm")] = context.host_params  # as large as the host: log2(1 + 1) = 1
    obs = observe(table, dataclasses.replace(context, slot_params=prices))
    assert slot(obs, "price_params_norm")[0, 0] == pytest.approx(1 / 8)
    assert slot(obs, "price_params_norm")[0, 1] == slot(obs, "price_macs_norm")[0, 1] == -1


def test_custom_blueprint_is_encoded_by_its_costs():
    own = len(BLUEPRINTS)
    table = SlotTable.empty(1, 1, takes=np.ones((1, own + 1), dtype=bool))
    table.stage[:], table.blueprint[:], table.params[:] = SeedStage.HOLDING, own, 6400
    first = example_context(1)
    wider = {n: np.append(getattr(first, n), [[first.host_macs]], axis=1) for n in ("slot_params", "slot_macs")}
    obs = observe(table, dataclasses.replace(first, **wider))
    assert all(slot(obs, f"blueprint_{b}") == 0 for b in BLUEPRINTS[1:])
    assert slot(obs, "params") == slot(obs, "macs") == pytest.approx(1 / 8)


def test_budget_left_decreases_with_parameters():
    table, context = SlotTable.empty(3, 1), dataclasses.replace(example_context(1), params_budget=12_800)
    table.params[:, 0] = 0, 6400, 12_800
    np.testing.assert_allclose(env(observe(table, context), "budget_left"), [0.5, 0.0, -0.5], atol=1e-6)
    free = dataclasses.replace(context, params_budget=0)
    assert (env(observe(table, free), "budget_left") == 1).all()
    assert (env(observe(table, free), "has_budget") == 0).all()


def test_quality_slope_is_a_least_squares_slope():
    table = SlotTable.empty(3, 1)
    table.quality_history[0] = 0.3 + 0.01 * np.arange(10)
    table.quality_history[1, -3:] = 0.5, NAN, 0.46
    table.quality_history[2, -1] = 0.5  # one point: no slope
    np.testing.assert_allclose(env(observe(table, example_context(1)), "quality_slope"), [0.5, -2 / 3, 0.0], atol=1e-5)


# --- arguments


def test_out_array_is_overwritten():
    table, context = random_table(8, 3, seed=3), example_context(3)
    out = np.full((8, num_features(3)), NAN, dtype=np.float32)
    result = batch_obs_to_features(table, context, legal=legal(table, LIVELY), out=out)
    assert result is out
    assert np.array_equal(out, observe(table, context))


def test_batch_obs_to_features_does_not_modify_the_table():
    table = random_table(8, 3, seed=4)
    before = table.clone()
    observe(table, example_context(3))
    assert not table.diff(before)


def test_environments_are_independent():
    table, context = random_table(9, 4, seed=5), example_context(4)
    together = observe(table, context)
    for e in range(9):
        assert np.array_equal(observe(table.rows([e]), context)[0], together[e])


@pytest.mark.parametrize(
    "out",
    [
        np.empty((8, 5), dtype=np.float32),
        np.empty((8, num_features(3))),
        np.empty((8, 2 * num_features(3)), dtype=np.float32)[:, ::2],
    ],
)
def test_invalid_out_array_is_rejected(out):
    table = random_table(8, 3, seed=3, epochs=2)
    with pytest.raises(ConfigError, match="contiguous float32"):
        batch_obs_to_features(table, example_context(3), legal=legal(table, LIVELY), out=out)


def test_invalid_context_is_rejected():
    first = example_context(3)
    with pytest.raises(ConfigError, match="the context describes 3 slots, the table has 2"):
        observe(SlotTable.empty(1, 2), first)
    with pytest.raises(ConfigError, match="slot_depth"):
        dataclasses.replace(first, slot_depth=np.zeros(2))
    with pytest.raises(ConfigError, match="B ≥ 13"):
        dataclasses.replace(first, slot_params=np.zeros((3, 5)), slot_macs=np.zeros((3, 5)))
    with pytest.raises(ConfigError, match="positive"):
        dataclasses.replace(first, horizon=0)


# --- costs


def test_live_costs_match_a_plain_loop():
    table, context = random_table(200, 4, seed=7), example_context(4)
    params, macs = live_costs(table, context)
    for e in range(200):
        expected_params, expected_macs = context.host_params, context.host_macs
        for s in range(4):
            expected_params += table.params[e, s]
            if SeedStage(table.stage[e, s]).name in ("BLENDING", "HOLDING", "FOSSILIZED"):
                expected_macs += context.slot_macs[s, table.blueprint[e, s]]
        assert (params[e], macs[e]) == (expected_params, expected_macs)


def test_empty_table_has_the_costs_of_its_host():
    context = example_context(2)
    params, macs = live_costs(SlotTable.empty(3, 2), context)
    assert (params == context.host_params).all()
    assert (macs == context.host_macs).all()
    assert not seed_macs(SlotTable.empty(3, 2), context.slot_macs).any()


def test_budget_and_chance_loss_are_optional():
    prices = np.ones((1, len(BLUEPRINTS)), dtype=np.int64)
    context = ObsContext(
        horizon=1, host_params=1, host_macs=1, slot_width=np.ones(1, int), slot_params=prices, slot_macs=prices,
        slot_depth=np.zeros(1),
    )  # fmt: skip
    table = SlotTable.empty(1, 1)
    table.val_loss[:] = math.e - 1
    assert env(observe(table, context), "val_loss") == pytest.approx(1 / 7)
