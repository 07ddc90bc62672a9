"""Rewards: returns follow their definition, cycles and crashes never pay, and scalar references agree."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.actions import BLUEPRINTS, HEAD_OPTIONS, Head, Op
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.leyline.lifecycle import Rules
from esper.leyline.slot_table import live_costs
from esper.leyline.stages import SeedStage
from esper.simic.rewards import REWARDS, WITH_POTENTIAL, Frame, RewardConfig, rent, reward, reward_mode, utility
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.controllers import Schedule, wait_everywhere
from esper.tolaria.rollout import rollout
from tests.support.random_tables import LIVELY, random_legal_actions
from tests.support.rules import ISOLATED

quick = settings(max_examples=40, deadline=None)
dice = st.integers(0, 2**32 - 1)
discounts = st.sampled_from([1.0, 0.995, 0.9])
CONFIGS = [RewardConfig(mode=mode) for mode in REWARDS]
HORIZON, SLOTS = 30, 4


def random_frame(rng: np.random.Generator, envs: int = 6, **changes: object) -> Frame:
    """Return any state, valid or not, of good and bad, small and huge networks."""
    stage = rng.integers(0, 9, (envs, SLOTS))
    host_params, host_macs = 1000.0, 50_000.0
    committed_params = host_params * 2 ** rng.uniform(0, 3, envs)
    committed_macs = host_macs * 2 ** rng.uniform(0, 3, envs)
    frame = Frame(
        step=rng.integers(0, HORIZON + 1, envs),
        quality=np.where(rng.random(envs) < 0.2, rng.choice([np.nan, np.inf, -np.inf]), rng.random(envs)),
        baseline_quality=np.where(rng.random(envs) < 0.1, np.nan, rng.random(envs)),
        committed_quality=rng.random(envs),
        params=committed_params * 2 ** rng.uniform(0, 2, envs),
        macs=committed_macs * 2 ** rng.uniform(0, 2, envs),
        committed_params=committed_params,
        committed_macs=committed_macs,
        train_ratio=2 ** rng.uniform(0, 2, envs),
        val_loss=np.where(rng.random(envs) < 0.1, np.nan, 3.0 * rng.random(envs)),
        acted=rng.random(envs) < 0.5,
        stage=stage,
        dwell=rng.integers(0, HORIZON, stage.shape),
        contribution=np.where(rng.random(stage.shape) < 0.3, np.nan, rng.normal(0, 0.3, stage.shape)),
        rollbacks=rng.integers(0, 3, envs),
        host_params=host_params,
        host_macs=host_macs,
        chance_loss=2.3,
        horizon=HORIZON,
    )
    return replace(frame, **changes)


# -- scalar references: the same rewards, one environment and one plain number at a time


def one(frame: Frame, e: int) -> dict:
    """Return environment e as plain numbers."""
    values = {f.name: getattr(frame, f.name) for f in fields(frame)}
    return {k: v if np.isscalar(v) else v[e].tolist() for k, v in values.items()}


def crashed(f: dict) -> bool:
    return f["step"] > 0 and not math.isfinite(f["quality"])


def rent_of(f: dict, params: float, macs: float, c: RewardConfig) -> float:
    rent = c.rent_params * math.log2(params / f["host_params"]) + c.rent_macs * math.log2(macs / f["host_macs"])
    return rent + c.rent_training * math.log2(f["train_ratio"])


def gain_of(f: dict, c: RewardConfig) -> float:
    baseline = f["baseline_quality"] if math.isfinite(f["baseline_quality"]) else c.worst_quality
    return 0.0 if f["step"] == 0 else f["quality"] - baseline


def utility_of(f: dict, c: RewardConfig) -> float:
    return c.floor if crashed(f) else max(c.floor, gain_of(f, c) - rent_of(f, f["params"], f["macs"], c))


def credit_of(f: dict, c: RewardConfig) -> float:
    if crashed(f):
        return c.floor
    is_active = [w for s, w in zip(f["stage"], f["contribution"], strict=True) if s in (3, 4, 5) and math.isfinite(w)]
    return max(c.floor, sum(is_active) - rent_of(f, f["params"], f["macs"], c))


def potential_of(f: dict, c: RewardConfig) -> float:
    if crashed(f) or f["step"] >= f["horizon"]:
        return 0.0
    return c.stage_bonus * sum({1: 1.0, 2: 2.0, 3: 3.5, 4: 5.5, 5: 6.0}.get(s, 0.0) for s in f["stage"])


def progress_of(a: dict, b: dict, c: RewardConfig) -> float:
    return c.gamma * potential_of(b, c) - potential_of(a, c)


def final_of(b: dict, c: RewardConfig) -> float:
    if b["step"] < b["horizon"]:
        return 0.0
    return c.terminal_weight * (c.floor if crashed(b) else max(c.floor, gain_of(b, c)))


def shaped_reference(a: dict, b: dict, c: RewardConfig) -> float:
    return credit_of(b, c) - credit_of(a, c) + progress_of(a, b, c) + final_of(b, c)


def escrow_reference(a: dict, b: dict, c: RewardConfig) -> float:
    if b["step"] < b["horizon"]:
        return credit_of(b, c) - credit_of(a, c)
    only_fossils = b | {"stage": [s if s == 5 else 0 for s in b["stage"]]}
    return credit_of(only_fossils, c) - credit_of(a, c)


def committed_of(f: dict, c: RewardConfig, drip: float) -> float:
    if crashed(f):
        return c.floor
    total = 0.0
    for stage, worth, dwell in zip(f["stage"], f["contribution"], f["dwell"], strict=True):
        if stage == 5:
            over = 1.0 if f["step"] >= f["horizon"] else min(1.0, dwell / f["horizon"])
            total += (worth if worth >= 0.01 else -0.01) * (1 - drip * (1 - over))
    return max(c.floor, total - rent_of(f, f["params"], f["macs"], c))


def basic_reference(a: dict, b: dict, c: RewardConfig, drip: float = 0.0) -> float:
    return committed_of(b, c, drip) - committed_of(a, c, drip) + progress_of(a, b, c) + final_of(b, c)


def simplified_reference(a: dict, b: dict, c: RewardConfig) -> float:
    paid = progress_of(a, b, c) - 0.0005 * b["acted"]
    if crashed(b):
        return paid + c.floor
    if b["step"] < b["horizon"]:
        return paid
    good = sum(s == 5 and w >= 0.01 for s, w in zip(b["stage"], b["contribution"], strict=True))
    return paid + max(c.floor, gain_of(b, c) + 0.02 * good)


def minimal_reference(a: dict, b: dict, c: RewardConfig) -> float:
    pruned = sum(s in (1, 2, 3, 4) and t in (6, 7, 8) for s, t in zip(a["stage"], b["stage"], strict=True))
    return sparse_reference(a, b, c) - 0.005 * (len(a["stage"]) if crashed(b) else pruned)


def loss_value_of(f: dict, c: RewardConfig) -> float:
    if crashed(f):
        return c.floor
    units = 1.0 if f["step"] == 0 else f["val_loss"] / f["chance_loss"]
    units = units if math.isfinite(units) else -c.floor
    return max(c.floor, -units - rent_of(f, f["params"], f["macs"], c))


def loss_reference(a: dict, b: dict, c: RewardConfig) -> float:
    return loss_value_of(b, c) - loss_value_of(a, c) + progress_of(a, b, c) + final_of(b, c)


def sparse_reference(_a: dict, b: dict, c: RewardConfig) -> float:
    if b["step"] < b["horizon"]:
        return 0.0
    if crashed(b) or not math.isfinite(b["committed_quality"]):
        return c.floor
    value = b["committed_quality"] - rent_of(b, b["committed_params"], b["committed_macs"], c)
    return min(max(value, c.floor), 1.0)


REFERENCES = {
    "utility": lambda a, b, c: utility_of(b, c) - utility_of(a, c),
    "shaped": shaped_reference,
    "escrow": escrow_reference,
    "basic": basic_reference,
    "basic_plus": lambda a, b, c: basic_reference(a, b, c, drip=0.7),
    "simplified": simplified_reference,
    "sparse": sparse_reference,
    "minimal": minimal_reference,
    "loss": loss_reference,
}


@pytest.mark.parametrize("mode", REFERENCES)
@quick
@given(seed=dice, scale=st.sampled_from([1.0, 10.0]))
def test_every_mode_equals_its_scalar_reference(mode, seed, scale):
    rng = np.random.default_rng(seed)
    rents = {"rent_params": 0.01, "rent_macs": 0.03, "rent_training": 0.02}
    config = RewardConfig(mode=mode, scale=scale, rollback_penalty=0.2, **rents)
    before, after = random_frame(rng), random_frame(rng)

    paid = reward(before, after, config)

    for e, amount in enumerate(paid):
        a, b = one(before, e), one(after, e)
        expected = scale * (
            REFERENCES[mode](a, b, config) - config.rollback_penalty * (b["rollbacks"] > a["rollbacks"])
        )
        assert amount == pytest.approx(expected, abs=1e-9)


def test_every_mode_has_a_reference_here():
    assert set(REFERENCES) == set(REWARDS)


# -- properties


def played(seed: int, steps: int, envs: int = 4) -> list[Frame]:
    """Return the frames of a random legal episode in the simulator."""
    rng = np.random.default_rng(seed)
    sim = Simulator(SimConfig(horizon=steps), rng.integers(0, 2**40, envs), LIVELY)
    frames = [Frame.of(sim.table, sim.context, sim.baseline_quality)]
    for _ in range(steps):
        assert sim.step(random_legal_actions(sim.table, sim.rules, rng)).happened.all()
        frames.append(Frame.of(sim.table, sim.context, sim.baseline_quality))
    return frames


@settings(max_examples=12, deadline=None)
@given(seed=dice, gamma=discounts)
def test_utility_return_is_the_discounted_mean_of_utility_and_its_end(seed, gamma):
    config, frames = RewardConfig(), played(seed, steps=30)
    values = np.array([utility(f, config) for f in frames])  # [T + 1, E]
    horizon = len(frames) - 1

    rewards = [reward(a, b, config) for a, b in pairwise(frames)]

    discounted = sum(gamma**t * r for t, r in enumerate(rewards))
    discounted_mean = (1 - gamma) * sum(gamma ** (t - 1) * values[t] for t in range(1, horizon))
    np.testing.assert_allclose(
        discounted, discounted_mean + gamma ** (horizon - 1) * values[-1] - values[0], atol=1e-12
    )
    assert (values[0] == 0).all()


@settings(max_examples=12, deadline=None)
@given(seed=dice)
@pytest.mark.parametrize("mode", sorted(WITH_POTENTIAL))
def test_stage_potential_cancels_out_over_an_episode(mode, seed):
    plain, config = RewardConfig(mode=mode, stage_bonus=0.0), RewardConfig(mode=mode, stage_bonus=0.05)
    frames = played(seed, steps=30)
    pairs = list(pairwise(frames))
    assert any((f.stage > 0).any() for f in frames)

    extra = sum(config.gamma**t * (reward(a, b, config) - reward(a, b, plain)) for t, (a, b) in enumerate(pairs))

    np.testing.assert_allclose(extra, 0.0, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.mode)
@quick
@given(seed=dice, length=st.integers(1, 6))
def test_cycle_back_to_the_same_state_earns_nothing(config, seed, length):
    rng = np.random.default_rng(seed)
    calm = {"rollbacks": np.zeros(6, dtype=int)}
    way = [random_frame(rng, step=np.full(6, 3 + k), **calm) for k in range(length)]
    back = replace(way[0], step=way[0].step + length)  # the same state, later

    earned = sum(reward(a, b, config) for a, b in zip(way, [*way[1:], back], strict=True))

    assert (earned <= 1e-12).all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.mode)
@quick
@given(seed=dice, length=st.integers(1, 6), crashes=st.integers(1, 3))
def test_cycle_through_a_crash_earns_nothing_and_costs_the_penalty(config, seed, length, crashes):
    rng = np.random.default_rng(seed)
    count = np.zeros(6, dtype=int)
    here = random_frame(rng, step=np.full(6, 3), rollbacks=count)
    earned = np.zeros(6)
    for k in range(1, crashes + 1):
        way = [here]
        way += [random_frame(rng, step=here.step + i, rollbacks=here.rollbacks) for i in range(1, length)]
        back = replace(here, step=here.step + length, rollbacks=count + k)  # the content of the snapshot
        earned += sum(reward(a, b, config) for a, b in pairwise([*way, back]))
        here = back
    assert (earned <= -crashes * config.rollback_penalty * config.scale + 1e-12).all()


@pytest.mark.parametrize(("rules", "period"), [(ISOLATED, 15), (Rules(), 20)], ids=["isolated", "open"])
def test_repeated_germinating_and_pruning_earns_no_more_than_waiting(rules, period):
    def earned(acts: bool) -> dict[str, np.ndarray]:
        sim = Simulator(SimConfig(horizon=80, noise=0.0), range(8), rules)  # longer than the cycles: no final reward
        before = Frame.of(sim.table, sim.context, sim.baseline_quality)
        total = {c.mode: np.zeros(8) for c in CONFIGS}
        for t in range(3 * period):
            actions = wait_everywhere(8)
            actions[:, Head.BLUEPRINT] = 1
            if acts:
                actions[:, Head.OP] = {0: Op.GERMINATE, 7: Op.PRUNE}.get(t % period, Op.WAIT)
            assert sim.step(actions).happened.all()
            after = Frame.of(sim.table, sim.context, sim.baseline_quality)
            for c in CONFIGS:
                total[c.mode] += reward(before, after, c)
            before = after
        assert (sim.table.stage == SeedStage.DORMANT).all()
        assert (sim.table.next_serial == 3 * acts).all()
        return total

    cycled, waited = earned(True), earned(False)
    for mode, total in cycled.items():
        assert (total <= waited[mode] + 1e-9).all(), mode
        if mode != "loss":  # the only mode that pays for what the host learns without growth
            assert (waited[mode] == 0).all(), mode


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.mode)
def test_rejected_operation_pays_as_much_as_waiting(config):
    """Every environment has a live seed; FOSSILIZE in an empty slot and germination on top of a seed are illegal."""
    refused, waited = (Simulator(SimConfig(horizon=20), range(8)) for _ in range(2))
    germinate = wait_everywhere(8)
    germinate[:, [Head.BLUEPRINT, Head.OP]] = 1, Op.GERMINATE
    for sim in (refused, waited):
        assert sim.step(germinate).happened.all()
    frames = [Frame.of(sim.table, sim.context, sim.baseline_quality) for sim in (refused, waited)]
    for t in range(19):
        illegal = germinate.copy()
        if t % 2:
            illegal[:, [Head.SLOT, Head.OP]] = 1, Op.FOSSILIZE
        assert not refused.step(illegal).happened.any()
        waited.step(wait_everywhere(8))
        after = [Frame.of(sim.table, sim.context, sim.baseline_quality) for sim in (refused, waited)]
        paid = [reward(a, b, config) for a, b in zip(frames, after, strict=True)]
        np.testing.assert_array_equal(*paid)
        frames = after


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.mode)
@quick
@given(seed=dice)
def test_every_slot_counts_alike(config, seed):
    """Permuting the slots changes no reward: there is no slot that is read instead of the others."""
    rng = np.random.default_rng(seed)
    before, after, order = random_frame(rng), random_frame(rng), rng.permutation(SLOTS)

    def permuted(frame: Frame) -> Frame:
        columns = {name: getattr(frame, name)[:, order] for name in ("stage", "dwell", "contribution")}
        return replace(frame, **columns)

    paid = reward(permuted(before), permuted(after), config)

    np.testing.assert_allclose(paid, reward(before, after, config), atol=1e-12)


@pytest.mark.parametrize("slot", range(SLOTS))
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.mode not in ("utility", "sparse")], ids=lambda c: c.mode)
def test_modes_that_pay_for_seeds_read_every_slot(config, slot):
    stage = np.full((6, SLOTS), int(SeedStage.HOLDING))
    calm = {"step": np.full(6, 5), "quality": np.full(6, 0.5), "rollbacks": np.zeros(6, dtype=int)}
    calm |= {"params": np.full(6, 1000.0), "macs": np.full(6, 50_000.0), "val_loss": np.ones(6)}
    before = random_frame(np.random.default_rng(0), stage=stage, contribution=np.full(stage.shape, 0.05), **calm)
    after = replace(before, step=before.step + 1)
    changed = {"stage": stage.copy(), "contribution": before.contribution.copy()}
    changed["stage"][:, slot] = SeedStage.PRUNED
    changed["contribution"][:, slot] = np.nan

    paid = reward(before, replace(after, **changed), config)

    assert (paid < reward(before, after, config)).all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.mode)
@quick
@given(seed=dice, broken=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_crash_pays_less_than_anything_else_and_is_never_nan(config, seed, broken):
    rng = np.random.default_rng(seed)
    before = random_frame(rng)
    step = np.maximum(before.step + 1, 1)
    sound = random_frame(rng, step=step, quality=rng.random(6), rollbacks=np.zeros(6, dtype=int))
    crash = replace(random_frame(rng, step=step), quality=np.full(6, broken), rollbacks=sound.rollbacks)

    paid = reward(before, crash, config)

    assert np.isfinite(paid).all()
    assert (paid <= reward(before, sound, config) + 1e-12).all()
    if config.mode not in ("sparse", "minimal"):
        assert (paid <= 1e-12).all()  # not even from a very bad state


def test_crash_does_not_pay_even_from_the_worst_host_with_falling_rent():
    rng, config = np.random.default_rng(0), RewardConfig()
    miserable = random_frame(
        rng, step=np.full(6, 5), quality=np.zeros(6), baseline_quality=np.full(6, 0.99), params=np.full(6, 1e9)
    )
    crash = replace(miserable, quality=np.full(6, np.nan), params=np.full(6, 1000.0), baseline_quality=np.full(6, 0.1))
    assert (reward(miserable, replace(crash, rollbacks=np.zeros(6, dtype=int)), config) <= 0).all()


@quick
@given(seed=dice)
def test_rollback_pays_for_the_restored_state_minus_the_penalty(seed):
    rng, config = np.random.default_rng(seed), RewardConfig(rollback_penalty=0.25)
    before = random_frame(rng)
    restored = random_frame(rng, rollbacks=before.rollbacks + rng.integers(1, 3))
    expected = utility(restored, config) - utility(before, config) - 0.25
    np.testing.assert_allclose(reward(before, restored, config), expected)


def test_crash_and_rollback_cost_the_penalty():
    rng, config = np.random.default_rng(1), RewardConfig()
    good = random_frame(rng, step=np.full(6, 5), quality=np.full(6, 0.7), rollbacks=np.zeros(6, dtype=int))
    crash = replace(good, quality=np.full(6, np.nan))
    restored = replace(good, rollbacks=np.ones(6, dtype=int))
    earned = reward(good, crash, config) + reward(crash, restored, config)
    np.testing.assert_allclose(earned, -config.rollback_penalty)


def test_doubling_the_parameters_costs_half_a_point_and_no_growth_nothing():
    sim = Simulator(SimConfig(), [0, 1])
    sim.step(wait_everywhere(2))
    frame = Frame.of(sim.table, sim.context, sim.baseline_quality)
    assert (utility(frame, RewardConfig()) == 0).all()
    assert utility(replace(frame, params=frame.params * 2), RewardConfig()) == pytest.approx(-0.005)
    assert utility(replace(frame, macs=frame.macs * 4), RewardConfig()) == pytest.approx(-0.01)


def test_rent_on_training_is_zero_without_growth_and_lower_for_a_later_seed():
    config = RewardConfig(rent_params=0.0, rent_macs=0.0, rent_training=0.01)
    paid = []
    for start in (2, 8, 99):
        sim = Simulator(SimConfig(), [0], Rules(birth="open"))
        for _ in rollout(sim, Schedule(["conv_heavy"], start=start, slots=1), 12):
            pass
        frame = Frame.of(sim.table, sim.context, sim.baseline_quality)
        expected = 0.01 * math.log2(sim.table.train_macs[0] / sim.table.host_train_macs[0])
        assert rent(frame.params, frame.macs, frame, config) == pytest.approx(expected)
        paid.append(expected)
    assert paid[0] > paid[1] > paid[2] == 0


def test_rent_on_macs_starts_with_alpha_and_on_parameters_at_germination():
    sim = Simulator(SimConfig(horizon=60), range(16), LIVELY)
    rng, stages = np.random.default_rng(8), set()
    for _ in range(40):
        sim.step(random_legal_actions(sim.table, sim.rules, rng))
        frame, table = Frame.of(sim.table, sim.context, sim.baseline_quality), sim.table
        for e in range(16):
            charged = {"params": 0, "macs": 0, "committed_params": 0, "committed_macs": 0}
            for s, stage in enumerate(table.stage[e].tolist()):
                stages.add(stage)
                params, macs = (price[s, table.blueprint[e, s]] for price in (sim.shape.params, sim.shape.macs))
                charged["params"] += params if SeedStage.GERMINATED <= stage <= SeedStage.FOSSILIZED else 0
                charged["macs"] += macs if SeedStage.BLENDING <= stage <= SeedStage.FOSSILIZED else 0
                charged["committed_params"] += params if stage == SeedStage.FOSSILIZED else 0
                charged["committed_macs"] += macs if stage == SeedStage.FOSSILIZED else 0
            for name, more in charged.items():
                host = frame.host_macs if "macs" in name else frame.host_params
                assert getattr(frame, name)[e] == host + more, name
    assert len(stages) == 9


def test_frame_is_a_copy_and_matches_the_simulators_counts():
    rng = np.random.default_rng(3)
    sim = Simulator(SimConfig(slots=5), range(16), LIVELY)
    for _ in range(25):
        sim.step(random_legal_actions(sim.table, sim.rules, rng))
    frame = Frame.of(sim.table, sim.context, sim.baseline_quality)
    np.testing.assert_array_equal(frame.params, live_costs(sim.table, sim.context)[0])
    np.testing.assert_array_equal(frame.macs, sim.macs)
    assert (frame.committed_params <= frame.params).all()
    assert (frame.committed_params < frame.params).any()
    assert (frame.committed_macs <= frame.macs).all()
    assert (frame.committed_macs < frame.macs).any()
    copies = frame.stage.copy(), frame.quality.copy(), frame.step.copy()
    sim.reset()
    for now, then in zip((frame.stage, frame.quality, frame.step), copies, strict=True):
        np.testing.assert_array_equal(now, then)


def test_sparse_pays_only_at_the_end_for_committed_seeds():
    rng, config = np.random.default_rng(5), RewardConfig(mode="sparse")
    frames = [random_frame(rng, step=np.full(6, k), rollbacks=np.zeros(6, dtype=int)) for k in (HORIZON - 1, HORIZON)]
    end = replace(frames[1], quality=rng.random(6))
    assert (reward(frames[0], frames[0], config) == 0).all()
    paid = reward(frames[0], end, config)
    np.testing.assert_array_equal(
        paid, reward(frames[0], replace(end, quality=rng.random(6), params=end.params * 9), config)
    )
    assert (paid != 0).any()


def test_minimal_charges_a_seed_that_is_pruned_at_once_or_over_some_epochs():
    for speed in ("INSTANT", "FAST"):
        sim = Simulator(SimConfig(noise=0.0), [0])
        actions = wait_everywhere(1)
        actions[0, Head.OP], actions[0, Head.BLUEPRINT] = Op.GERMINATE, BLUEPRINTS.index("conv_light")
        frames = [Frame.of(sim.table, sim.context, sim.baseline_quality)]
        sim.step(actions)
        frames.append(Frame.of(sim.table, sim.context, sim.baseline_quality))
        actions[0, Head.ALPHA_SPEED] = (HEAD_OPTIONS[Head.ALPHA_SPEED] or ()).index(speed)
        for _ in range(12):
            can_prune = sim.legal[0, Op.PRUNE].any() and frames[-1].stage[0, 0] <= SeedStage.HOLDING
            actions[0, Head.OP] = Op.PRUNE if can_prune else Op.WAIT
            sim.step(actions)
            frames.append(Frame.of(sim.table, sim.context, sim.baseline_quality))
        assert frames[-1].stage[0, 0] not in (SeedStage.BLENDING, SeedStage.HOLDING)
        paid = {
            mode: sum(reward(a, b, RewardConfig(mode=mode)) for a, b in pairwise(frames))
            for mode in ("sparse", "minimal")
        }
        assert paid["minimal"] - paid["sparse"] == pytest.approx(-0.005)


def test_new_mode_is_one_function_and_unknown_names_list_the_valid_ones():
    try:

        @reward_mode("constant")
        def constant(_before, after, _config):
            return np.ones(len(after.step))

        frame = random_frame(np.random.default_rng(0), rollbacks=np.zeros(6, dtype=int))
        assert (reward(frame, frame, RewardConfig(mode="constant", scale=2.0)) == 2.0).all()
    finally:
        REWARDS.pop("constant")
    with pytest.raises(UnknownNameError, match="utility"):
        RewardConfig(mode="utilty")


@pytest.mark.parametrize(
    "wrong", [{"scale": 0.0}, {"rent_params": -1.0}, {"gamma": 1.5}, {"floor": 0.1}, {"floor": -math.inf}], ids=str
)
def test_invalid_config_is_refused(wrong):
    with pytest.raises(ConfigError):
        RewardConfig(**wrong)
