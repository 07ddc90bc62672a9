"""Test the policy network: weights shared by any number of slots, and equal results of act and evaluate."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from esper.leyline.actions import BLUEPRINTS, HEAD_OPTIONS, NUM_OPS, RELEVANCE, Head, Op
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import is_legal, legal
from esper.leyline.slot_table import SlotTable
from esper.tamiyo.network import (
    LEAST_DEVIATION,
    MOST_DEVIATION,
    NetworkConfig,
    TamiyoNetwork,
    entropy,
    known_blueprints,
    log_distribution,
)
from esper.tamiyo.policy.action_masks import (
    CANONICAL,
    DEFAULT_FIXED,
    MaskLayout,
    compute_batch_masks,
    conditioned,
    slot_given_op,
)
from esper.tamiyo.policy.feature_table import BASE, PER_SLOT, SLOT_COLUMN
from esper.tamiyo.policy.features import ObsContext, batch_obs_to_features, num_features
from tests.support.random_tables import LIVELY, random_table

BUILT_IN = len(BLUEPRINTS)
EXTRA = 4  # number of custom blueprints


def network(seed=0, lively=True, **settings):
    """Return a small network. With `lively`, output weights are scaled up to give peaked distributions."""
    torch.manual_seed(seed)
    net = TamiyoNetwork(NetworkConfig(width=16, **settings))
    if lively:
        with torch.no_grad():
            for layer in (net.op_head[-1], net.slot_score, net.choices):
                layer.weight.mul_(60.0)
            net.op_head[-1].bias.zero_()
    return net


@cache
def random_inputs(envs, slots, seed, blueprints=BUILT_IN, fixed=()):
    """Return (table, obs, masks, layout) of random states with different blueprints per slot. Do not modify."""
    rng = np.random.default_rng(seed)
    arrays = random_table(envs, slots, seed, epochs=40).arrays()
    arrays["takes"] = rng.random((slots, blueprints)) < 0.5
    arrays["takes"][:, 0] = False
    arrays["enabled"] = rng.random((envs, slots)) < 0.9
    table = SlotTable(**arrays)
    context = ObsContext(
        horizon=60, host_params=5000, host_macs=90_000, slot_width=np.full(slots, 8),
        slot_params=rng.integers(10, 900, (slots, blueprints)), slot_macs=rng.integers(10, 9000, (slots, blueprints)),
        slot_depth=np.linspace(0, 1, slots), chance_loss=2.3,
    )  # fmt: skip
    allowed = legal(table, LIVELY)
    obs = torch.from_numpy(batch_obs_to_features(table, context, legal=allowed))
    masks = torch.from_numpy(compute_batch_masks(table, allowed, fixed=dict(fixed)))
    return table, obs, masks, MaskLayout(slots=slots, blueprints=blueprints)


def random_numbers(*shape, seed=0):
    return torch.rand(*shape, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def permuted(obs, masks, layout, order):
    """Return observations and masks of the same environments with permuted slots."""
    base, slots = obs[:, :BASE], obs[:, BASE:].unflatten(-1, (-1, PER_SLOT))
    obs = torch.cat([base, slots[:, order].flatten(1)], -1)
    masks = masks.clone()
    for where, shape in ((layout.slot_by_op, (NUM_OPS, -1)), (layout.blueprint_by_slot, (1, layout.slots, -1))):
        rows = masks[:, where].unflatten(-1, shape)
        masks[:, where] = (rows[..., order] if where == layout.slot_by_op else rows[:, :, order]).flatten(1)
    return obs, masks


def values_and_log_probs(net, obs, masks, layout, op, slot):
    """Return values [E] and log-probabilities [E, 8, W] given op and slot."""
    state, slots = net._encode(obs)
    logits = net._logits(state, slots, op, slot, layout.widest)
    return net._value(state), log_distribution(logits, conditioned(masks, layout, op, slot), net.config.epsilon)


# --- weights shared by all slots


@pytest.mark.parametrize("slots", [2, 5])
def test_network_is_equivariant_to_slot_order(slots):
    _, obs, masks, layout = random_inputs(60, slots, seed=slots)
    net = network()
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(1))
    moved_obs, moved_masks = permuted(obs, masks, layout, order)
    place = torch.argsort(order)  # the new position of each slot
    for op in (Op.GERMINATE, Op.PRUNE, Op.SET_ALPHA_TARGET):
        possible = masks[:, op]
        op_row = torch.full((len(obs),), int(op))
        slot = slot_given_op(masks, layout, op_row).int().argmax(-1)
        value, here = values_and_log_probs(net, obs, masks, layout, op_row, slot)
        moved_value, there = values_and_log_probs(net, moved_obs, moved_masks, layout, op_row, place[slot])
        torch.testing.assert_close(moved_value, value, atol=1e-5, rtol=1e-5)
        assert possible.any()
        here, there = here[possible].detach().exp(), there[possible].detach().exp()
        torch.testing.assert_close(there[:, Head.SLOT, :slots], here[:, Head.SLOT, order], atol=1e-5, rtol=1e-4)
        assert here[:, Head.SLOT].std() > 0.01
        assert not torch.allclose(here[:, Head.SLOT], there[:, Head.SLOT])
        others = [h for h in Head if h != Head.SLOT]
        torch.testing.assert_close(there[:, others], here[:, others], atol=1e-5, rtol=1e-4)


def test_same_weights_serve_3_9_and_25_slots():
    net = network()
    for slots in (3, 9, 25):
        table, obs, masks, layout = random_inputs(50, slots, seed=7)
        choice = net.act(obs, masks, layout, random_numbers(50))
        assert is_legal(table, choice.actions.numpy(), LIVELY).all()
        assert choice.values.shape == (50,)
        assert torch.isfinite(choice.log_probs).all()
        if slots > 3:
            assert choice.actions[:, Head.SLOT].max() > 3


def test_layers_have_the_configured_width_and_default_is_small():
    assert sum(p.numel() for p in TamiyoNetwork().parameters()) < 80_000
    layers = [m for m in TamiyoNetwork(NetworkConfig(width=8)).modules() if isinstance(m, nn.Linear)]
    outputs = {NUM_OPS, 1, sum(len(HEAD_OPTIONS[h] or ()) for h in Head if h not in (Head.OP, Head.SLOT))}
    assert {m.out_features for m in layers} == {8} | outputs


@pytest.mark.parametrize(
    "wrong", [{"width": 0}, {"width": 8193}, {"epsilon": 1.0}, {"epsilon": -0.1}, {"patience": 51.0}]
)
def test_invalid_network_config_is_rejected(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        NetworkConfig(**wrong)


def test_initial_policy_prefers_wait_by_patience():
    _, obs, masks, layout = random_inputs(80, 3, seed=3)
    net = TamiyoNetwork(NetworkConfig(patience=2.5, epsilon=0.0))
    zero = torch.zeros(80, dtype=torch.long)
    _, log_probs = values_and_log_probs(net, obs, masks, layout, zero, zero)
    legal_ops, op = masks[:, layout.op], log_probs[:, Head.OP, :NUM_OPS].detach()
    assert legal_ops[:, 1:].any()
    odds = (op[:, :1] - op)[legal_ops & (torch.arange(NUM_OPS) > 0)]
    torch.testing.assert_close(odds, torch.full_like(odds, 2.5), atol=0.4, rtol=0.0)


# --- acting


FIXES = ((), tuple(DEFAULT_FIXED.items()), ((Head.OP, int(Op.GERMINATE)), (Head.BLUEPRINT, 3)))


@pytest.mark.parametrize("fixed", FIXES, ids=["free", "usual", "one op"])
@pytest.mark.parametrize("blueprints", [BUILT_IN, BUILT_IN + EXTRA])
@pytest.mark.parametrize("sampled", [True, False])
def test_act_is_legal_on_thousands_of_tables(fixed, blueprints, sampled):
    for seed, slots in ((0, 1), (1, 3), (2, 7)):
        table, obs, masks, layout = random_inputs(700, slots, seed, blueprints, fixed)
        net = network(seed)
        choice = net.act(obs, masks, layout, random_numbers(700, seed=seed) if sampled else None)
        actions = choice.actions.numpy()
        assert is_legal(table, actions, LIVELY).all()
        op = actions[:, Head.OP]
        assert masks[torch.arange(700), choice.actions[:, Head.OP]].all()
        assert (actions[op == Op.GERMINATE, Head.BLUEPRINT] < BUILT_IN).all()
        for head in Head:
            unread = ~RELEVANCE[op, head]
            assert (actions[unread, head] == CANONICAL[head]).all()
            assert not choice.log_probs[torch.from_numpy(unread), head].any()
            if head in dict(fixed) and head != Head.OP:
                assert (actions[~unread, head] == dict(fixed)[head]).all()


def test_act_without_random_numbers_is_greedy():
    _, obs, masks, layout = random_inputs(200, 3, seed=5)
    net = network()
    choice = net.act(obs, masks, layout, None)
    op, slot = choice.actions[:, Head.OP], choice.actions[:, Head.SLOT]
    _, log_probs = values_and_log_probs(net, obs, masks, layout, op, slot)
    torch.testing.assert_close(choice.log_probs, log_probs.amax(-1).detach(), atol=1e-5, rtol=1e-5)


def test_choice_frequencies_match_log_probabilities():
    """Sample one environment 40 000 times: joint frequencies match the product of the heads' probabilities."""
    _, obs, masks, layout = random_inputs(200, 3, seed=5)
    net, samples_drawn = network(patience=0.0), 40_000
    row = int(masks[:, layout.op].sum(-1).argmax())
    many = lambda x: x[row].expand(samples_drawn, -1)  # noqa: E731
    choice = net.act(many(obs), many(masks), layout, random_numbers(samples_drawn, seed=9))
    joint, group, count = torch.unique(choice.actions, dim=0, return_inverse=True, return_counts=True)
    chance = torch.zeros(len(joint), dtype=torch.double)
    chance[group] = choice.log_probs.double().sum(-1).exp()
    error = (torch.bincount(group).double() / samples_drawn - chance) / (chance * (1 - chance) / samples_drawn).sqrt()
    assert len(joint) > 20
    assert error[count > 30].abs().max() < 4.5


# --- evaluate equals act


@pytest.mark.parametrize("blueprints", [BUILT_IN, BUILT_IN + EXTRA])
def test_evaluate_reproduces_act(blueprints):
    _, obs, masks, layout = random_inputs(240, 3, 11, blueprints)
    net = network()
    net.renormalise(0.7, 2.5)
    choice = net.act(obs, masks, layout, random_numbers(240))
    judged = net.evaluate(obs, masks, choice.actions, layout)
    torch.testing.assert_close(judged.log_probs, choice.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(judged.entropy[..., Head.OP], choice.entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(judged.values, choice.values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(judged.raw_values * 2.5 + 0.7, judged.values)


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.integers(0, 79), min_size=1, max_size=80, unique=True), seed=st.integers(0, 3))
def test_results_of_a_row_do_not_depend_on_the_others(rows, seed):
    """Any minibatch gives the probabilities and values of the rollout."""
    _, obs, masks, layout = random_inputs(80, 3, 11)
    net, uniform = network(seed), random_numbers(80, seed=seed)
    whole, some = net.act(obs, masks, layout, uniform), net.act(obs[rows], masks[rows], layout, uniform[rows])
    assert torch.equal(some.actions, whole.actions[rows])
    judged = net.evaluate(obs[rows], masks[rows], some.actions, layout)
    for result in (some, judged):
        torch.testing.assert_close(result.log_probs, whole.log_probs[rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(result.values, whole.values[rows], atol=1e-5, rtol=1e-5)


def test_leading_dimensions_may_be_steps_and_environments():
    _, obs, masks, layout = random_inputs(80, 3, 11)
    net = network()
    actions = net.act(obs, masks, layout, random_numbers(80)).actions
    flat = net.evaluate(obs, masks, actions, layout)
    grid = net.evaluate(*(x.unflatten(0, (20, 4)) for x in (obs, masks, actions)), layout)
    for name in ("log_probs", "entropy", "values", "raw_values"):
        torch.testing.assert_close(getattr(grid, name).flatten(0, 1), getattr(flat, name), atol=1e-5, rtol=1e-5)


def test_heads_are_conditioned_on_op_and_slot():
    _, obs, _, layout = random_inputs(100, 3, seed=5)
    net = network()
    state, slots = net._encode(obs)
    ask = lambda op, slot: net._logits(  # noqa: E731
        state, slots, torch.full((100,), op), torch.full((100,), slot), layout.widest
    ).detach()
    one, other_op, other_slot = ask(1, 0), ask(2, 0), ask(1, 2)
    assert torch.equal(one[:, Head.OP], other_op[:, Head.OP])
    for head in (h for h in Head if h != Head.OP):
        assert not torch.allclose(one[:, head], other_op[:, head])
    assert torch.equal(one[:, Head.SLOT], other_slot[:, Head.SLOT])
    for head in (h for h in Head if h not in (Head.OP, Head.SLOT)):
        assert not torch.allclose(one[:, head], other_slot[:, head])


def test_each_head_option_has_its_own_output():
    net = network()
    sizes = {h: len(HEAD_OPTIONS[h] or ()) for h in Head if h not in (Head.OP, Head.SLOT)}
    assert net.choices.out_features == sum(sizes.values())
    _, obs, _, layout = random_inputs(10, 3, seed=5)
    state, slots = net._encode(obs)
    zero = torch.zeros(10, dtype=torch.long)
    row = 0
    for head, size in sizes.items():
        for option in range(size):
            with torch.no_grad():
                before = net._logits(state, slots, zero, zero, layout.widest)
                net.choices.bias[row] += 1.0
                changed = net._logits(state, slots, zero, zero, layout.widest) - before
            expected = torch.zeros(8, layout.widest)
            expected[head, option] = 1.0
            offered = torch.arange(layout.widest) < torch.tensor(layout.head_sizes)[:, None]  # the rest is unused
            torch.testing.assert_close(changed * offered, expected.expand(10, -1, -1), atol=1e-4, rtol=0.0)
            row += 1


# --- values, and blueprints without an output


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (3.0, 0.1), (-200.0, 50.0)])
def test_renormalise_keeps_values(mean, std):
    _, obs, masks, layout = random_inputs(50, 3, seed=5)
    net = network()
    net.renormalise(0.4, 3.0)
    before = net.act(obs, masks, layout, None)
    net.renormalise(mean, std)
    after = net.act(obs, masks, layout, None)
    torch.testing.assert_close(after.values, before.values, atol=1e-4, rtol=1e-4)
    assert torch.equal(after.log_probs, before.log_probs)
    assert (float(net.mean), float(net.std)) == pytest.approx((mean, std))


# --- standardised observations


def test_statistics_of_observations_weigh_all_rollouts_equally():
    net = network(standardise=True)
    rollouts = [random_inputs(50, 3, seed=seed)[1] for seed in (1, 2, 3)]
    for obs in rollouts:
        net.observe(obs)

    def parts(obs: torch.Tensor) -> list[torch.Tensor]:
        slots = obs[:, BASE:].reshape(-1, PER_SLOT)
        return [obs[:, :BASE], slots[slots[:, SLOT_COLUMN["enabled"]] > 0]]  # padding does not count

    means = torch.stack([torch.cat([part.mean(0) for part in parts(obs)]) for obs in rollouts])
    squares = torch.stack([torch.cat([part.square().mean(0) for part in parts(obs)]) for obs in rollouts])
    var = squares.mean(0) - means.mean(0).square()
    torch.testing.assert_close(net.obs_mean, means.mean(0), atol=1e-5, rtol=0.0)
    torch.testing.assert_close(net.obs_std.square(), var, atol=1e-5, rtol=0.0)


def test_scale_of_an_observation_has_no_effect_on_a_standardised_policy():
    _, obs, masks, layout = random_inputs(50, 3, seed=5)
    net, other = (network(standardise=True) for _ in range(2))
    net.observe(obs)
    factor = torch.where(net.obs_std > 4 * LEAST_DEVIATION, 0.5, 1.0)  # columns that vary enough after scaling, too
    factor[BASE + SLOT_COLUMN["enabled"]] = 1.0  # it selects slots as well
    assert (factor < 1).sum() > 40
    scaled = torch.cat([obs[:, :BASE] * factor[:BASE], obs[:, BASE:] * factor[BASE:].repeat(3)], 1)
    other.observe(scaled)

    choice = net.act(obs, masks, layout, None)

    expected = other.act(scaled, masks, layout, None)
    torch.testing.assert_close(choice.log_probs, expected.log_probs, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(choice.values, expected.values, atol=1e-4, rtol=1e-4)
    assert net._standardised(1000 * obs[:, :BASE], slice(BASE)).abs().max() == MOST_DEVIATION


def test_blueprints_without_an_output_are_masked():
    blueprints = BUILT_IN + 2
    takes = np.zeros((3, blueprints), dtype=bool)
    takes[0, [4, blueprints - 1]] = takes[1, blueprints - 1] = True
    table = SlotTable.empty(2, 3, takes=takes)
    table.enabled[1, 0] = False
    layout = MaskLayout(slots=3, blueprints=blueprints)
    packed = torch.from_numpy(compute_batch_masks(table, legal(table, LIVELY)))
    before = packed.clone()
    masks = known_blueprints(packed, layout)
    assert torch.equal(packed, before)  # a copy: the input is unchanged
    by_op = masks[:, layout.slot_by_op].unflatten(-1, (NUM_OPS, 3))
    assert masks[:, Op.GERMINATE].tolist() == [True, False]
    assert by_op[:, Op.GERMINATE].tolist() == [[True, False, False], [False] * 3]
    assert masks[:, layout.blueprint_by_slot].unflatten(-1, (3, blueprints)).nonzero()[:, 1:].tolist() == [[0, 4]] * 2
    assert masks[:, Op.WAIT].all()
    assert torch.equal(known_blueprints(masks, layout), masks)


def test_wait_remains_where_only_unknown_blueprints_fit():
    _, _, masks, layout = random_inputs(20, 3, seed=5, blueprints=BUILT_IN + EXTRA)
    masks = masks.clone()
    masks[:, layout.op] = False
    masks[:, Op.GERMINATE] = True  # as with a fixed op
    takes = masks[:, layout.blueprint_by_slot].unflatten(-1, (layout.slots, layout.blueprints))
    takes[..., :BUILT_IN] = False
    masks[:, layout.blueprint_by_slot] = takes.flatten(1)
    completed = known_blueprints(masks, layout)
    assert completed[:, Op.WAIT].all()
    assert not completed[:, Op.GERMINATE].any()


def test_masks_of_built_in_blueprints_are_unchanged():
    _, _, masks, layout = random_inputs(20, 3, seed=5)
    assert known_blueprints(masks, layout) is masks


def test_network_accepts_any_number_of_slots():
    net = network()
    for slots in (1, 4):
        state, encoded = net._encode(torch.zeros(2, num_features(slots)))
        assert state.shape == (2, 16)
        assert encoded.shape == (2, slots, 16)


def test_entropy_covers_only_relevant_heads():
    _, obs, masks, layout = random_inputs(200, 3, seed=5)
    net = network()
    choice = net.act(obs, masks, layout, random_numbers(200))
    op, slot = choice.actions[:, Head.OP], choice.actions[:, Head.SLOT]
    _, log_probs = values_and_log_probs(net, obs, masks, layout, op, slot)
    expected = entropy(log_probs, conditioned(masks, layout, op, slot)).detach()
    torch.testing.assert_close(choice.entropy, expected[:, Head.OP], atol=1e-5, rtol=1e-5)
    judged = net.evaluate(obs, masks, choice.actions, layout).entropy.detach()
    torch.testing.assert_close(judged, expected, atol=1e-5, rtol=1e-5)
    assert not judged[torch.from_numpy(~RELEVANCE[op.numpy()])].any()
