"""The simulator: the same table and rules as the engine, independent environments, and the properties of growth."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina.blueprints import cost
from esper.kasmina.blueprints.registry import FeatureSpec, Layout
from esper.leyline.actions import BLUEPRINTS, STYLES, Head, Op, Operator
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Rules, legal
from esper.leyline.rng import bell, random_bits, uniform, world_keys
from esper.leyline.slot_table import SlotTable, live_costs
from esper.leyline.stages import NEXT_STAGES, SeedStage
from esper.simic.evaluation.sim_oracle import FollowPlans, best_schedule, plantings, simulate_episode, values
from esper.simic.rewards import RewardConfig
from esper.simic.simulated_worlds import (
    BASE_WIDTH,
    IMAGE,
    INTERACTION,
    MAP_BLUEPRINTS,
    draw_worlds,
    host_shape,
)
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.controllers import CONTROLLERS, Random, make_controller, wait_everywhere
from tests.support.random_tables import LIVELY, random_legal_actions
from tests.support.rules import ISOLATED
from tests.support.scoreboard import oracle, scoreboard

Stage = SeedStage
QUIET = SimConfig(noise=0.0)
dice = st.integers(0, 2**32 - 1)
CONV_LIGHT, NORM = BLUEPRINTS.index("conv_light"), BLUEPRINTS.index("norm")


def plant(sim: Simulator, slot: int, blueprint: int, style: int = 0) -> np.ndarray:
    actions = wait_everywhere(sim.table.num_envs)
    actions[:, Head.OP], actions[:, Head.SLOT] = Op.GERMINATE, slot
    actions[:, Head.BLUEPRINT], actions[:, Head.STYLE] = blueprint, style
    return actions


def wait(sim: Simulator, steps: int) -> None:
    for _ in range(steps):
        sim.step(wait_everywhere(sim.table.num_envs))


def history(sim: Simulator, actions: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
    rows = []
    for a in actions:
        sim.step(a)
        rows.append({**sim.table.clone().arrays(), "baseline": sim.baseline_quality, "true": sim.true_quality})
    return rows


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


# -- randomness


@pytest.mark.parametrize("slots", [1, 3, 9, 25])
def test_environment_alone_equals_itself_among_many_bit_for_bit(slots):
    config, rng = SimConfig(slots=slots), np.random.default_rng(slots)
    worlds = [7, 3, 2**62 + 1, 0, *range(100, 133)]
    several = Simulator(config, worlds, LIVELY)
    actions, together = [], []
    for _ in range(40):
        actions.append(random_legal_actions(several.table, LIVELY, rng))
        together += history(several, [actions[-1]])
    for e in (0, 2, 36):
        alone = history(Simulator(config, [worlds[e]], LIVELY), [a[e : e + 1] for a in actions])
        for mine, theirs in zip(alone, together, strict=True):
            for name, value in mine.items():
                other = theirs[name] if name == "takes" else theirs[name][e : e + 1]
                assert same(value, other), name


def test_runs_are_deterministic_per_world_and_controller():
    runs = [
        simulate_episode(Simulator(SimConfig(), w), Random(3), RewardConfig())
        for w in (range(8), range(8), range(8, 16))
    ]
    np.testing.assert_array_equal(runs[0].discounted, runs[1].discounted)
    np.testing.assert_array_equal(runs[0].quality, runs[1].quality)
    assert (runs[0].quality != runs[2].quality).all()


def test_reset_starts_new_worlds_in_the_same_table():
    sim = Simulator(SimConfig(), range(8))
    table = sim.table
    first = simulate_episode(sim, Random(1), RewardConfig())
    again = simulate_episode(sim, Random(1), RewardConfig())
    np.testing.assert_array_equal(first.quality, again.quality)
    sim.reset(range(8, 16))
    assert sim.table is table
    np.testing.assert_array_equal(sim.truth.potential, draw_worlds(range(8, 16), SimConfig()).potential)
    assert not table.diff(SlotTable.empty(8, 3, takes=table.takes))
    with pytest.raises(ConfigError, match="build another"):
        sim.reset([1])


def test_hashed_draws_are_uniform_normal_and_distinct_per_address():
    keys = world_keys(range(2000))
    flat, round_ = uniform(random_bits(keys, "a", 20)), bell(random_bits(keys, "b", 20))
    assert np.abs(np.histogram(flat, 10, (0, 1))[0] / flat.size - 0.1).max() < 0.01
    assert abs(round_.mean()) < 0.02
    assert abs(round_.std() - 1) < 0.02
    assert np.abs(round_).max() < 3.5
    steps = [random_bits(keys, p, 20, np.full(2000, t)) for p in "ab" for t in range(5)]
    assert len(np.unique(np.concatenate(steps))) == sum(s.size for s in steps)
    for other in (random_bits(keys, "a", 21)[:, 1:], random_bits(world_keys(range(1, 2001)), "a", 20)):
        assert abs(np.corrcoef(flat.ravel(), uniform(other).ravel())[0, 1]) < 0.02


# -- properties of growth


def test_without_growth_a_host_equals_its_baseline():
    sim = Simulator(SimConfig(), range(32))
    for _ in range(40):
        wait(sim, 1)
        np.testing.assert_array_equal(sim.table.quality, sim.baseline_quality)
        np.testing.assert_array_equal(sim.table.committed_quality, sim.table.quality)


def test_germination_and_training_seeds_do_not_change_the_output():
    grown, bare = (Simulator(SimConfig(), range(64), ISOLATED) for _ in range(2))
    grown.step(plant(grown, 1, CONV_LIGHT))
    wait(bare, 1)
    while True:
        np.testing.assert_array_equal(grown.true_quality, bare.true_quality)
        np.testing.assert_array_equal(grown.table.quality, bare.table.quality)
        if grown.table.dwell[0, 1] == 10:
            break
        wait(grown, 1), wait(bare, 1)
    assert (grown.skill[:, 1] > 0).mean() > 0.8
    assert (grown.table.params[:, 1] > 0).all()
    wait(grown, 4), wait(bare, 4)
    assert (grown.table.alpha[:, 1] > 0).mean() > 0.8
    assert (grown.true_quality != bare.true_quality).mean() > 0.8


def test_open_birth_does_not_disturb_the_host():
    sim = Simulator(QUIET, range(64))
    sim.step(plant(sim, 1, CONV_LIGHT))
    assert (sim.table.alpha[:, 1] == 1).all()
    assert (sim.shock == 0).all()


def test_alpha_0_has_no_effect_and_effects_grow_with_alpha():
    sim = Simulator(msgspec.structs.replace(QUIET, shock=0.0, stillborn_share=0.0), range(64), ISOLATED)
    sim.step(plant(sim, 0, CONV_LIGHT))
    wait(sim, 10)
    assert (sim.table.stage[:, 0] == Stage.BLENDING).all()
    assert (sim.table.alpha == 0).all()
    potential = sim.truth.potential[:, 0, CONV_LIGHT]
    gains = []
    for _ in range(5):
        gains.append(sim.true_quality - sim.truth.host_quality(sim.table.step))
        wait(sim, 1)
    assert (sim.table.alpha[:, 0] == 1).all()
    assert (gains[0] == 0).all()
    growing = np.diff(np.abs(gains), axis=0)
    assert (growing > 0).all()
    assert (np.sign(gains[-1]) == np.sign(potential)).all()


def test_gains_diminish_and_fossils_keep_learning():
    sim = Simulator(msgspec.structs.replace(QUIET, stillborn_share=0.0), range(64))
    sim.step(plant(sim, 2, NORM))
    skills = [sim.skill[:, 2].copy()]
    for _ in range(9):
        wait(sim, 1)
        skills.append(sim.skill[:, 2].copy())
    steps = np.diff(skills, axis=0)
    assert (steps > 0).all()
    assert (np.diff(steps, axis=0) < 0).all()
    wait(sim, 8)
    commit = wait_everywhere(64)
    commit[:, Head.OP], commit[:, Head.SLOT] = Op.FOSSILIZE, 2
    assert sim.step(commit).happened.all()
    before = sim.skill[:, 2].copy()
    wait(sim, 3)
    assert (sim.skill[:, 2] > before).all()


def test_next_seed_of_a_slot_starts_from_zero():
    sim = Simulator(msgspec.structs.replace(QUIET, stillborn_share=0.0), range(8))
    sim.step(plant(sim, 0, CONV_LIGHT))
    first = sim.skill[:, 0].copy()
    wait(sim, 7)
    cut = wait_everywhere(8)
    cut[:, Head.OP], cut[:, Head.ALPHA_SPEED] = Op.PRUNE, 0
    sim.step(cut)
    wait(sim, 7)
    assert sim.step(plant(sim, 0, CONV_LIGHT)).happened.all()
    np.testing.assert_array_equal(sim.skill[:, 0], first)


def test_seed_being_pruned_does_not_learn():
    sim = Simulator(msgspec.structs.replace(QUIET, stillborn_share=0.0), range(8))
    sim.step(plant(sim, 0, CONV_LIGHT))
    wait(sim, 16)
    lower = wait_everywhere(8)
    lower[:, Head.OP], lower[:, Head.ALPHA_TARGET] = Op.SET_ALPHA_TARGET, 0
    assert sim.step(lower).happened.all()
    before = sim.skill[:, 0].copy()
    wait(sim, 2)
    assert sim.table.frozen[:, 0].all()
    np.testing.assert_array_equal(sim.skill[:, 0], before)
    wait(sim, 5)
    assert (sim.skill[:, 0] > before).all()


def test_pruning_removes_the_gain_and_disturbs_the_host_temporarily():
    sim = Simulator(QUIET, range(64))
    sim.step(plant(sim, 0, CONV_LIGHT))
    wait(sim, 16)
    holding = sim.table.stage[:, 0] == Stage.HOLDING
    cut = wait_everywhere(64)
    cut[:, Head.OP], cut[:, Head.SLOT], cut[:, Head.ALPHA_SPEED] = Op.PRUNE, 0, 0
    sim.step(cut)
    bare = sim.truth.host_quality(sim.table.step)
    assert (sim.true_quality[holding] < bare[holding] - 0.01).all()
    assert (live_costs(sim.table, sim.context)[0] == sim.shape.host_params).all()
    wait(sim, 12)
    np.testing.assert_allclose(sim.true_quality, sim.truth.host_quality(sim.table.step), atol=1e-4)


def test_late_seed_is_worth_less():
    worlds, option = range(40), (1, BLUEPRINTS.index("conv_heavy"), 0)
    early = simulate_episode(Simulator(QUIET, worlds), FollowPlans([(option,)]), RewardConfig()).total

    class Late(FollowPlans):
        def act(self, table, legal):
            return super().act(table, legal) if table.step[0] >= 22 else wait_everywhere(table.num_envs)

    late = simulate_episode(Simulator(QUIET, worlds), Late([(option,)]), RewardConfig()).total
    helpful = draw_worlds(worlds, QUIET).potential[:, 1, option[1]] > 0
    assert (early > late)[helpful].all()


def test_similar_neighbours_are_redundant_and_different_ones_help():
    assert (np.diag(INTERACTION)[[BLUEPRINTS.index(b) for b in MAP_BLUEPRINTS]] < 0).all()
    assert INTERACTION[BLUEPRINTS.index("depthwise"), NORM] > 0
    np.testing.assert_array_equal(INTERACTION, INTERACTION.T)


def test_stillborn_seeds_have_the_configured_rate_and_never_blend():
    config = SimConfig(bad_share=0.3, stillborn_share=0.2, surprise=0.0)
    truth = draw_worlds(range(2000), config)
    assert truth.stillborn[:, :, 1:8].mean() == pytest.approx(0.2, abs=0.01)
    assert (truth.potential[truth.stillborn] == 0).all()
    sim = Simulator(config, range(64), ISOLATED)
    sim.step(plant(sim, 0, CONV_LIGHT))
    wait(sim, 14)
    dead = sim.truth.stillborn[:, 0, CONV_LIGHT]
    assert 0 < dead.sum() < 64
    assert (sim.table.stage[dead, 0] == Stage.TRAINING).all()
    assert (sim.table.stage[~dead, 0] == Stage.BLENDING).all()


def test_gate_halves_harm_and_operators_suit_blueprints():
    gated = next(i for i, s in enumerate(STYLES) if s.operator == Operator.GATE)
    times = next(i for i, s in enumerate(STYLES) if s.operator == Operator.MULTIPLY)
    sims = {style: Simulator(QUIET, range(200)) for style in (0, times, gated)}
    for style, sim in sims.items():
        sim.step(plant(sim, 0, NORM, style))
        wait(sim, 3)
    plain, multiplied, shut = (s.strength()[:, 0] for s in sims.values())
    harm = plain < 0
    np.testing.assert_allclose(shut[harm], plain[harm] * 0.5)
    np.testing.assert_allclose(shut[~harm], plain[~harm] * 0.9)
    np.testing.assert_allclose(multiplied, plain * 1.15)


# -- slow references


def brute_value(sim: Simulator, e: int, on: dict[int, float]) -> float:
    """Return the gain of environment e with these slots at these alphas, by the definition of the model."""
    table, truth = sim.table, sim.truth
    strength = sim.strength()[e]
    now = [strength[s] * on.get(s, 0.0) for s in range(table.num_slots)]
    raw = sum(now)
    for s in range(table.num_slots - 1):
        if now[s] > 0 and now[s + 1] > 0:
            raw += INTERACTION[table.blueprint[e, s], table.blueprint[e, s + 1]] * min(now[s], now[s + 1])
    host = truth.host_quality(table.step)[e]
    mature = (host - truth.start[e]) / (truth.ceiling[e] - truth.start[e])
    return mature * (truth.room[e] * (1 - np.exp(-raw / truth.room[e])) if raw > 0 else raw)


@settings(max_examples=8, deadline=None)
@given(seed=dice)
def test_quality_contributions_and_prospects_equal_switching_seeds_by_hand(seed):
    rng = np.random.default_rng(seed)
    sim = Simulator(
        msgspec.structs.replace(QUIET, slots=4, stillborn_share=0.0), range(seed % 1000, seed % 1000 + 12), LIVELY
    )
    for _ in range(rng.integers(20, 45)):
        sim.step(random_legal_actions(sim.table, LIVELY, rng))
    table = sim.table
    for e in range(12):
        on = {s: float(table.alpha[e, s]) for s in range(4)}
        value = brute_value(sim, e, on)
        host = sim.truth.host_quality(table.step)[e]
        assert sim.true_quality[e] == pytest.approx(np.clip(host + value - sim.shock[e], 0.01, 0.99), abs=1e-12)
        fossils = {s: a for s, a in on.items() if table.stage[e, s] == Stage.FOSSILIZED}
        without_live = table.quality[e] - value + brute_value(sim, e, fossils)
        assert table.committed_quality[e] == pytest.approx(np.clip(without_live, 0, 1), abs=1e-6)
        for s in range(4):
            if table.stage[e, s] in (Stage.BLENDING, Stage.HOLDING) and on[s] > 0:
                loss = value - brute_value(sim, e, {**on, s: 0.0})
                assert table.contribution[e, s] == pytest.approx(loss, abs=1e-6)
                assert table.contribution_age[e, s] == 0
            if table.stage[e, s] == Stage.TRAINING:
                assert table.prospect[e, s] == pytest.approx(brute_value(sim, e, {**on, s: 1.0}) - value, abs=1e-6)


@pytest.mark.slow
def test_costs_equal_those_of_the_real_blueprints():
    shape = host_shape(SimConfig())
    for s in range(3):
        width, side = BASE_WIDTH * 2**s, (IMAGE >> s) // 2
        assert shape.width[s] == width
        for name in MAP_BLUEPRINTS:
            real = cost(name, FeatureSpec(Layout.MAP, width, (width, side, side)))
            assert shape.params[s, BLUEPRINTS.index(name)] == real.params, name
            assert shape.macs[s, BLUEPRINTS.index(name)] == pytest.approx(real.macs, abs=width), name


# -- measurements


def test_measured_contributions_have_noise_of_the_stated_error():
    noisy, quiet = (Simulator(c, range(1500), ISOLATED) for c in (SimConfig(), QUIET))
    for sim in (noisy, quiet):
        sim.step(plant(sim, 1, CONV_LIGHT))
        wait(sim, 4)
    learning = noisy.table.stage[:, 1] == Stage.TRAINING
    z = ((noisy.table.prospect - quiet.table.prospect) / noisy.table.prospect_se)[learning, 1]
    assert abs(z.mean()) < 4 / np.sqrt(len(z))
    assert z.std() == pytest.approx(1, abs=0.08)
    for sim in (noisy, quiet):
        wait(sim, 12)
    holding = noisy.table.stage[:, 1] == Stage.HOLDING
    z = ((noisy.table.contribution - quiet.table.contribution) / noisy.table.contribution_se)[holding, 1]
    assert abs(z.mean()) < 4 / np.sqrt(len(z))
    assert z.std() == pytest.approx(1, abs=0.08)


def test_noise_is_correlated_between_epochs_and_new_for_the_next_seed():
    errors = []
    configs = SimConfig(bad_share=0.0), msgspec.structs.replace(QUIET, bad_share=0.0)
    sims = [Simulator(config, range(800), ISOLATED) for config in configs]
    for t in range(20):
        for sim in sims:
            actions = plant(sim, 0, CONV_LIGHT) if t in (0, 16) else wait_everywhere(800)
            if t == 8:
                actions[:, Head.OP], actions[:, Head.SLOT] = Op.PRUNE, 0
            assert sim.step(actions).happened.all()
        errors.append(((sims[0].table.prospect - sims[1].table.prospect) / sims[0].table.prospect_se)[:, 0])
    assert 0.4 < np.corrcoef(errors[3], errors[6])[0, 1] < 0.6
    assert abs(np.corrcoef(errors[6], errors[18])[0, 1]) < 0.12


def test_every_measured_column_varies():
    rng, sim = np.random.default_rng(0), Simulator(SimConfig(slots=4), range(32), LIVELY)
    by_name: dict[str, list[np.ndarray]] = {}
    for _ in range(60):
        sim.step(random_legal_actions(sim.table, LIVELY, rng))
        for name, column in sim.table.arrays().items():
            by_name.setdefault(name, []).append(column[np.isfinite(column)].astype(float))
    for name, columns in by_name.items():
        # there is no governor, since no simulated host diverges, and nothing is evaluated
        if name not in ("enabled", "rollbacks", "measure_macs"):
            assert np.unique(np.concatenate(columns)).size > 1, name


@settings(max_examples=10, deadline=None)
@given(seed=dice, slots=st.sampled_from([1, 3, 9]))
def test_random_legal_play_keeps_the_table_valid(seed, slots):
    rng, rules = np.random.default_rng(seed), (LIVELY, Rules(), ISOLATED)[seed % 3]
    moves = 3 if rules.birth == "open" else 2  # an op and a tick move a seed once each, an open birth moves it twice
    sim = Simulator(SimConfig(slots=slots), rng.integers(0, 2**32, 8), rules)
    for t in range(40):
        before = sim.table.stage.copy()
        actions = random_legal_actions(sim.table, rules, rng)
        assert sim.step(actions).happened.all()
        table = sim.table
        assert (table.step == t + 1).all()
        is_active = np.isin(table.stage, (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED))
        assert (table.alpha[~is_active] == 0).all()
        assert ((table.alpha >= 0) & (table.alpha <= 1)).all()
        alive = (table.stage >= Stage.GERMINATED) & (table.stage <= Stage.FOSSILIZED)
        assert (table.params[~alive] == 0).all()
        assert (table.params[alive] > 0).all()
        assert ((sim.skill >= 0) & (sim.skill <= 1)).all()
        for quality in (table.quality, table.committed_quality, sim.baseline_quality):
            assert ((quality >= 0) & (quality <= 1)).all()
        assert (table.val_loss > table.train_loss * 0.98).all()
        assert np.isfinite(table.contribution[alive & is_active & (table.contribution_age >= 0)]).all()
        for was, now in zip(before.ravel(), table.stage.ravel(), strict=True):
            reach, two = {Stage(was)}, {Stage(was)}
            for _ in range(moves):
                two = {n for r in two for n in NEXT_STAGES[r]}
                reach |= two
            assert Stage(now) in reach


@pytest.mark.parametrize("name", CONTROLLERS)
def test_every_controller_runs_unchanged(name):
    sim = Simulator(SimConfig(), range(16))
    controller = make_controller(name)
    for _ in range(40):
        may = legal(sim.table, sim.rules)
        assert sim.step(controller.act(sim.table, may)).happened.all()
    assert (sim.table.next_serial > 0).any() == (name != "none")


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"noise": -1.0}, {"bad_share": 0.8, "stillborn_share": 0.3}], ids=str)
def test_impossible_config_is_refused(wrong):
    with pytest.raises(ConfigError):
        SimConfig(**wrong)


# -- the optimum

SMALL = SimConfig(slots=2, horizon=30)


def test_oracle_is_the_best_of_all_plans_and_of_fixed_schedules():
    options = plantings([3], SMALL)  # in world 3 the greedy plan is not the best
    every = [(), *((a,) for a in options), *((a, b) for a in options for b in options if a[0] != b[0])]
    returns = values(every, [3], SMALL)[0]
    plan, value = oracle(SMALL, 3)
    assert value == pytest.approx(returns.max())
    assert plan == every[int(returns.argmax())]
    worlds = range(2)
    fixed, mean = best_schedule(SMALL, worlds)
    each = values([fixed], worlds, SMALL)[:, 0]
    assert mean == pytest.approx(each.mean())
    assert all(oracle(SMALL, w)[1] >= v - 1e-12 for w, v in zip(worlds, each, strict=True))


def test_no_other_style_beats_the_oracle_in_one_world():
    for world in range(2):
        plan, value = oracle(SMALL, world)
        others = [tuple((s, b, style) for s, b, _ in plan) for style in (0, 1, 3)]
        assert values(others, [world], SMALL).max() <= value + 1e-12


def test_beam_search_is_near_optimal_and_handles_many_slots():
    exact, beamed = best_schedule(SMALL, range(2)), best_schedule(SMALL, range(2), beam=5)
    assert 0.9 * exact[1] <= beamed[1] <= exact[1]
    plan, value = oracle(SimConfig(slots=9), 0, beam=3, longest=2)
    assert len(plan) == 2
    assert value > 0


def test_plan_is_carried_out_as_written():
    plan = ((2, NORM, 1), (0, CONV_LIGHT, 0))
    sim = Simulator(SimConfig(stillborn_share=0.0), range(8))
    simulate_episode(sim, FollowPlans([plan]), RewardConfig())
    assert (sim.table.stage[:, [0, 2]] == Stage.FOSSILIZED).all()
    assert (sim.table.stage[:, 1] == Stage.DORMANT).all()
    assert (sim.table.blueprint[:, [2, 0]] == [NORM, CONV_LIGHT]).all()
    assert (sim.table.serial[:, [2, 0]] == [0, 1]).all()
    assert (sim.table.operator[:, [2, 0]] == [Operator.MULTIPLY, Operator.ADD]).all()


@pytest.mark.slow
def test_controllers_rank_from_oracle_to_random():
    scores = {s.name: s for s in scoreboard(SimConfig(), range(24), range(1000, 1032), beam=12)}
    order = ["random", "heuristic", "best fixed", "best fixed, pruned", "oracle"]
    for worse, better in pairwise(order):
        assert scores[better].total > scores[worse].total + 0.005, (worse, better)
    assert scores["none"].total == 0
    assert scores["oracle"].total > 1.5 * scores["best fixed"].total
