"""PPO: equal to a reference that goes step by step and head by head, its health checks, and its ability to learn."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from esper.leyline.actions import BLUEPRINTS, HEAD_OPTIONS, NUM_HEADS, NUM_OPS, RELEVANCE, Head, Op
from esper.leyline.errors import ConfigError, TrainingError
from esper.leyline.events import encode
from esper.simic.agent.advantages import normalized_advantages
from esper.simic.agent.ppo import PPO, PPOConfig, ReturnScale, counted, critic_health, losses
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.env import GrowthVectorEnv
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork, known_blueprints
from esper.tamiyo.policy.action_masks import MaskLayout, conditioned, forced
from esper.tamiyo.policy.feature_table import BASE, ENV_COLUMN
from esper.tamiyo.policy.features import num_features
from tests.support.random_tables import LIVELY

BUILT_IN = len(BLUEPRINTS)
CONFIG = PPOConfig(minibatches=2, epochs=2)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def network(seed=0, **settings):
    torch.manual_seed(seed)
    return TamiyoNetwork(NetworkConfig(width=16, **{"patience": 0.5, **settings}))


def empty_buffer(steps, envs, layout):
    return TamiyoRolloutBuffer(steps=steps, envs=envs, features=num_features(layout.slots), masks=layout.size)


def random_masks(rng, envs, layout):
    """Return packed masks that the rules could give: some environments can only wait, some slots take one blueprint."""
    masks = np.zeros((envs, layout.size), dtype=bool)
    by_op = masks[:, layout.slot_by_op].reshape(envs, NUM_OPS, layout.slots)
    by_op[:, 1:] = (rng.random((envs, NUM_OPS - 1, layout.slots)) < 0.5) & (rng.random((envs, 1, 1)) < 0.75)
    by_op[:, 0, 0] = True
    takes = rng.random((envs, layout.slots, layout.blueprints)) < 0.15
    takes[:, np.arange(layout.slots), rng.integers(1, layout.blueprints, layout.slots)] = True
    masks[:, layout.blueprint_by_slot] = takes.reshape(envs, -1)
    masks[:, layout.op] = by_op.any(2)
    for head, where in layout.tail.items():
        masks[:, where] = True if head != Head.TEMPO else np.arange(3) == 1
    return masks


def synthetic_rollout(net, *, steps=14, envs=6, counts=None, slots=3, blueprints=BUILT_IN, seed=0):
    """Return a rollout of synthetic data with several episodes per column and short columns."""
    rng, layout = np.random.default_rng(seed), MaskLayout(slots=slots, blueprints=blueprints)
    buffer = empty_buffer(steps, envs, layout)
    counts = np.full(envs, steps) if counts is None else np.asarray(counts)
    for t in range(steps):
        obs = torch.from_numpy(rng.uniform(-1, 1, (envs, num_features(slots))).astype(np.float32))
        masks = torch.from_numpy(random_masks(rng, envs, layout))
        choice = net.act(obs, masks, layout, torch.from_numpy(rng.random((envs, NUM_HEADS))))
        done = (rng.random(envs) < 0.15) | (t == counts - 1)
        buffer.add(
            obs=obs, masks=masks, actions=choice.actions, log_probs=choice.log_probs, values=choice.values,
            rewards=rng.normal(0.3, 1.0, envs).astype(np.float32), done=done, truncated=np.zeros(envs, dtype=bool),
            forced=forced(masks, layout), alive=t < counts,
        )  # fmt: skip
    return buffer.finish(), layout


def simulated(net, envs=16, fixed=None, rules=None, seed=0, horizon=30):
    """Return a rollout of whole episodes on simulated hosts."""
    env = GrowthVectorEnv(Simulator(SimConfig(horizon=horizon), range(envs), rules), range(envs), fixed=fixed)
    buffer, rng = empty_buffer(horizon, envs, env.layout), np.random.default_rng(seed)
    obs, info = env.reset()
    for _ in range(horizon):
        features, masks = torch.from_numpy(obs), torch.from_numpy(info["masks"])
        choice = net.act(features, masks, env.layout, torch.from_numpy(rng.random((envs, NUM_HEADS))))
        obs, paid, ended, cut, info = env.step(choice.actions.numpy())
        buffer.add(
            obs=features, masks=masks, actions=choice.actions, log_probs=choice.log_probs, values=choice.values,
            rewards=paid, done=ended, truncated=cut, forced=forced(masks, env.layout),
        )  # fmt: skip
    return buffer.finish(), env.layout


def prepare_update(buffer, layout, net, config=CONFIG):
    """Do what an update does before its first minibatch."""
    buffer.compute_advantages_and_returns(config.gamma, config.gae_lambda)
    buffer.forced |= forced(known_blueprints(buffer.masks, layout), layout)
    buffer.advantages.copy_(normalized_advantages(buffer.advantages, buffer.valid & ~buffer.forced))
    net.renormalise(*ReturnScale().update(buffer.returns[buffer.valid]))


def one_batch(buffer):
    """Return all valid steps as one minibatch."""
    return next(iter(buffer.minibatches(1, seeded())))


def gradients(net, layout, batch, config=CONFIG, coef=0.01):
    net.zero_grad(set_to_none=True)
    losses(net, layout, config, batch, coef)[0].backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in net.parameters()])


def shift_weights(net, amount=0.05, seed=1):
    """Shift every weight a little, as if steps had been taken since the rollout."""
    generator = seeded(seed)
    with torch.no_grad():
        for p in net.parameters():
            p += amount * torch.randn(p.shape, generator=generator)


def weights(net):
    return {name: x.clone() for name, x in net.state_dict().items()}


# --- the loss, and a reference implementation


def slow_head(logits, legal, epsilon):
    """Return the probability of every legal option, and the normalised entropy, of one head of one step."""
    top = max(logits[k] for k in legal)
    total = sum(math.exp(logits[k] - top) for k in legal)
    chance = {k: (1 - epsilon) * math.exp(logits[k] - top) / total + epsilon / len(legal) for k in legal}
    spread = -sum(p * math.log(p) for p in chance.values())
    return chance, spread / math.log(len(legal)) if len(legal) > 1 else 0.0


def slow_losses(net, layout, config, buffer, coef):
    """Return the loss of a whole rollout: environment by environment, step by step, head by head, in plain Python."""
    policy = value = spread = kl = 0.0
    decided = steps = clipped = 0
    used = dict.fromkeys(Head, 0)
    for e in range(buffer.envs):
        for t in range(int(buffer.step_counts[e])):
            state, slots = net._encode(buffer.obs[t, e][None])
            action = buffer.actions[t, e]
            op, slot = action[None, Head.OP], action[None, Head.SLOT]
            steps += 1
            target = (float(buffer.returns[t, e]) - float(net.mean)) / float(net.std)
            value += 0.5 * (float(net._value(state)) - target) ** 2
            masks = known_blueprints(buffer.masks[t, e][None], layout)
            if not bool(masks[0, 1:NUM_OPS].any()):
                continue  # only WAIT is legal: the step trains the critic alone
            decided += 1
            logits = net._logits(state, slots, op, slot, layout.widest)[0].tolist()
            mask = conditioned(masks, layout, op, slot)[0].tolist()
            gain = float(buffer.advantages[t, e])
            for head in Head:
                legal = [k for k, ok in enumerate(mask[head]) if ok]
                if not RELEVANCE[int(op), head] or len(legal) < 2:
                    continue
                chance, undecided = slow_head(logits[head], legal, net.config.epsilon)
                change = math.log(chance[int(action[head])]) - float(buffer.log_probs[t, e, head])
                ratio = math.exp(change)
                near = min(max(ratio, 1 - config.clip_ratio), 1 + config.clip_ratio)
                policy -= min(ratio * gain, near * gain)
                spread -= undecided
                kl += ratio - 1 - change
                used[head] += 1
                clipped += abs(ratio - 1) > config.clip_ratio
    policy, spread, kl, value = policy / decided, spread / decided, kl / decided, value / steps
    return {
        "loss": policy + config.value_coef * value + coef * spread,
        "policy_loss": policy, "value_loss": value, "entropy_loss": spread, "kl": kl,
        "clip_fraction": clipped / sum(used.values()),
        **{f"learnable_{head.name}": count / decided for head, count in used.items()},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("blueprints", "counts"), [(13, None), (13, [14, 3, 9, 1, 14, 0]), (16, [14, 14, 6, 14, 2, 10])]
)
def test_loss_equals_the_slow_reference(blueprints, counts):
    net = network()
    buffer, layout = synthetic_rollout(net, counts=counts, blueprints=blueprints, seed=blueprints)
    prepare_update(buffer, layout, net)
    shift_weights(net)
    with torch.no_grad():
        _, stats = losses(net, layout, CONFIG, one_batch(buffer), 0.03)
        expected = slow_losses(net, layout, CONFIG, buffer, 0.03)
    assert expected["clip_fraction"] > 0.02
    for name, number in expected.items():
        assert stats[name] == pytest.approx(number, rel=2e-4, abs=2e-5), name


def test_reported_numbers_are_per_head_over_the_steps_where_it_has_an_effect():
    net = network()
    buffer, layout = synthetic_rollout(net)
    prepare_update(buffer, layout, net)
    batch = one_batch(buffer)
    stats = losses(net, layout, CONFIG, batch, 0.01)[1]
    with torch.no_grad():
        judged = net.evaluate(batch.obs, batch.masks, batch.actions, layout)
    counts = counted(batch.masks, layout, batch.actions, ~batch.forced)
    decided = int((~batch.forced).sum())
    for head in Head:
        mattered = counts[..., head]
        assert stats[f"learnable_{head.name}"] == pytest.approx(int(mattered.sum()) / decided)
        if head == Head.TEMPO:  # fixed in these masks: never a choice
            assert not mattered.any()
            assert math.isnan(stats["entropy_TEMPO"])
        else:
            assert stats[f"entropy_{head.name}"] == pytest.approx(float(judged.entropy[..., head][mattered].mean()))


# --- which parts receive a gradient


def test_each_loss_term_has_its_own_gradient():
    net = network()
    buffer, layout = synthetic_rollout(net)
    prepare_update(buffer, layout, net)
    batch = one_batch(buffer)
    still = msgspec.structs.replace(CONFIG, value_coef=0.0)
    nothing = PPOConfig(value_coef=0.0, minibatches=2)
    without_gain = {**{f: getattr(batch, f) for f in batch.__slots__}, "advantages": torch.zeros_like(batch.advantages)}
    calm = type(batch)(**without_gain)
    assert gradients(net, layout, batch, still, 0.0).norm() > 1e-3  # policy alone
    assert gradients(net, layout, calm, CONFIG, 0.0).norm() > 1e-3  # value alone
    assert gradients(net, layout, calm, nothing, 0.01).norm() > 1e-5  # entropy alone
    assert gradients(net, layout, calm, nothing, 0.0).norm() == 0.0


def test_advantages_of_forced_steps_have_no_effect():
    net = network()
    buffer, layout = synthetic_rollout(net, counts=[14, 3, 9, 1, 14, 7])
    prepare_update(buffer, layout, net)
    batch = one_batch(buffer)
    before = gradients(net, layout, batch)
    assert batch.forced.any()
    batch.advantages[batch.forced] = 1e3
    assert torch.equal(gradients(net, layout, batch), before)
    batch.advantages[batch.forced] = torch.nan
    assert torch.equal(gradients(net, layout, batch), before)
    batch.advantages[~batch.forced] += 1.0
    assert not torch.equal(gradients(net, layout, batch), before)


def test_stored_log_probabilities_count_only_where_a_head_has_an_effect():
    net = network()
    buffer, layout = synthetic_rollout(net, counts=[14, 3, 9, 1, 14, 7])
    prepare_update(buffer, layout, net)
    batch = one_batch(buffer)
    before = gradients(net, layout, batch)
    counts = counted(batch.masks, layout, batch.actions, ~batch.forced)
    batch.log_probs[~counts] = torch.nan
    assert torch.equal(gradients(net, layout, batch), before)
    batch.log_probs[counts] -= 0.05
    assert not torch.equal(gradients(net, layout, batch), before)


def test_forced_step_trains_the_critic_alone():
    net = network()
    buffer, layout = synthetic_rollout(net)
    prepare_update(buffer, layout, net)
    buffer.forced.fill_(True)
    net.zero_grad()
    losses(net, layout, CONFIG, one_batch(buffer), 0.01)[0].backward()
    for part in (net.op_head, net.slot_score, net.choices, net.from_state, net.from_slot, net.op_embedding):
        assert all(not p.grad.any() for p in part.parameters())
    assert all(p.grad.any() for p in net.value_head.parameters())
    assert net.slot_encoder[0].weight.grad.any()


def test_update_discounts_by_gamma_and_weighs_by_lambda():
    """With λ = 1 returns are discounted sums of rewards; with λ = 0 they are one reward and the next value."""
    net = network()
    sums, _ = synthetic_rollout(net)
    one_step, layout = synthetic_rollout(net)
    PPO(net, layout, msgspec.structs.replace(CONFIG, gamma=0.5, gae_lambda=1.0)).update(sums, seeded())
    PPO(network(), layout, msgspec.structs.replace(CONFIG, gamma=0.5, gae_lambda=0.0)).update(one_step, seeded())

    following = torch.zeros(sums.envs)
    expected = torch.zeros_like(sums.rewards)
    for t in reversed(range(sums.steps)):
        following = expected[t] = sums.rewards[t] + 0.5 * following * ~sums.done[t]
    torch.testing.assert_close(sums.returns, expected)
    next_values = torch.cat([one_step.values[1:], torch.zeros(1, one_step.envs)])
    torch.testing.assert_close(one_step.returns, one_step.rewards + 0.5 * next_values * ~one_step.done)


def test_garbage_after_the_end_of_a_column_has_no_effect():
    net = network()
    buffer, layout = synthetic_rollout(net, counts=[14, 3, 9, 1, 14, 7])
    poisoned, _ = synthetic_rollout(net, counts=[14, 3, 9, 1, 14, 7])
    padding = ~poisoned.valid
    for name in ("obs", "log_probs", "values", "rewards", "bootstrap"):
        getattr(poisoned, name)[padding] = torch.nan
    poisoned.masks[padding] = False
    poisoned.actions[padding] = 10**6
    poisoned.done[padding] = True
    updated = []
    for rollout in (buffer, poisoned):
        learner = network()
        stats = PPO(learner, layout, CONFIG).update(rollout, seeded())
        assert stats.skipped == 0
        updated.append(weights(learner))
    assert all(torch.equal(updated[0][name], updated[1][name]) for name in updated[0])


def test_step_with_only_unknown_blueprints_is_forced_for_this_network():
    net = network()
    buffer, layout = synthetic_rollout(net, blueprints=16)
    buffer.masks[3, :, 1:NUM_OPS] = False
    buffer.masks[3, :, Op.GERMINATE] = True
    takes = buffer.masks[3][:, layout.blueprint_by_slot].unflatten(-1, (3, 16))
    takes[:, :, :BUILT_IN], takes[:, :, BUILT_IN:] = False, True
    buffer.masks[3][:, layout.blueprint_by_slot] = takes.flatten(1)
    buffer.actions[3] = torch.tensor([0, 0, 2, 1, 2, 0, 0, 0])
    buffer.log_probs[3] = 0.0
    buffer.forced[3] = False  # by the rules a seed could be germinated
    PPO(net, layout, CONFIG).update(buffer, seeded())
    assert buffer.forced[3].all()
    assert not buffer.advantages[3].any()


def test_slot_with_one_known_blueprint_gives_that_head_no_gradient():
    layout = MaskLayout(slots=1, blueprints=14)
    masks = torch.zeros(1, 1, layout.size, dtype=torch.bool)
    masks[..., [Op.WAIT, Op.GERMINATE, layout.slot_by_op.start, layout.slot_by_op.start + Op.GERMINATE]] = True
    masks[..., [layout.blueprint_by_slot.start + 4, layout.blueprint_by_slot.start + 13]] = True
    for where in layout.tail.values():
        masks[..., where] = True
    actions = torch.tensor([[[0, 4, 0, 0, 0, 0, 0, int(Op.GERMINATE)]]])
    free = torch.ones(1, 1, dtype=torch.bool)
    counts = counted(known_blueprints(masks, layout), layout, actions, free)[0, 0]
    assert [h for h in Head if counts[h]] == [Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET, Head.OP]


def test_one_round_gives_every_row_of_every_free_head_a_gradient():
    """Every output must receive a gradient from a real rollout, so that no loss term is left unconnected."""
    net = network(patience=0.0)
    buffer, layout = simulated(net, envs=32, fixed={}, rules=LIVELY)
    prepare_update(buffer, layout, net)
    net.zero_grad()
    losses(net, layout, CONFIG, one_batch(buffer), 0.0)[0].backward()
    mattered = counted(buffer.masks, layout, buffer.actions, buffer.valid & ~buffer.forced)
    assert (net.op_head[-1].weight.grad.abs().sum(1) > 0).all()
    assert (net.slot_score.weight.grad != 0).any()
    row = 0
    for head in (h for h in Head if h not in (Head.OP, Head.SLOT)):
        here = mattered[..., head]
        assert here.any(), head.name
        mask = conditioned(buffer.masks, layout, buffer.actions[..., Head.OP], buffer.actions[..., Head.SLOT])
        size = len(HEAD_OPTIONS[head] or ())
        open_options = mask[..., head, :][here].any(0)[:size]
        reached = net.choices.weight.grad[row : row + size].abs().sum(1) > 0
        assert torch.equal(reached, open_options), head.name
        row += size
    assert all(p.grad is not None and p.grad.any() for name, p in net.named_parameters()), "some part learns nothing"


# --- health


def test_update_reports_its_statistics():
    net = network()
    buffer, layout = simulated(net)
    stats = PPO(net, layout, PPOConfig(lr=3e-3)).update(buffer, seeded())
    assert stats.skipped == 0
    assert stats.minibatches == 4 * stats.epochs
    assert stats.kl > 0
    assert 0 <= stats.clip_fraction <= 1
    assert stats.ratio_min < 1 < stats.ratio_max
    assert stats.grad_norm > 0
    assert stats.explained_variance <= 1
    assert stats.value_nrmse > 0
    assert stats.entropy["op"] > 0
    assert stats.entropy["tempo"] is None  # fixed: it never mattered
    assert stats.learnable["tempo"] == 0
    assert 0 < stats.learnable["op"] <= 1
    assert encode(stats)


def test_critic_statistics_match_values_computed_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert critic_health(returns, returns) == (1.0, 0.0)
    ev, nrmse = critic_health(torch.full((4,), 2.5), returns)
    assert ev == pytest.approx(0.0)
    assert nrmse == pytest.approx((1.25 / (5 / 3)) ** 0.5)
    assert critic_health(returns + 7.0, returns)[0] == pytest.approx(1.0)  # a shift costs no variance
    assert critic_health(returns, torch.ones(4)) == (None, None)
    assert critic_health(returns[:1], returns[:1]) == (None, None)


@pytest.mark.parametrize("changed", ["weights", "masks", "log_probs", "obs"])
def test_rollout_of_another_policy_is_refused(changed):
    net = network()
    buffer, layout = synthetic_rollout(net)
    if changed == "weights":
        shift_weights(net)
    elif changed == "masks":
        buffer.masks[..., layout.op] |= torch.arange(NUM_OPS) == Op.ADVANCE
    else:
        getattr(buffer, changed).add_(0.01)
    before = weights(net)
    with pytest.raises(TrainingError, match="ratio differs from 1"):
        PPO(net, layout, CONFIG).update(buffer, seeded())
    for name, x in net.state_dict().items():  # the value head may be in other units by then
        if not name.startswith(("value_head", "mean", "std")):
            assert torch.equal(x, before[name]), name


def test_first_ratios_of_a_rollout_are_1():
    net = network()
    buffer, layout = simulated(net, fixed={})
    prepare_update(buffer, layout, net)
    for batch in buffer.minibatches(4, seeded()):
        assert losses(net, layout, CONFIG, batch, 0.01)[1]["ratio_off"] < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_skips_the_update_and_the_third_stops_the_run(bad):
    net = network()
    ppo = PPO(net, MaskLayout(slots=3, blueprints=13), CONFIG)
    before = weights(net)
    for turn in range(3):
        buffer, _ = synthetic_rollout(net, seed=turn)
        buffer.rewards[4, 2] = bad
        if turn < 2:
            stats = ppo.update(buffer, seeded())
            assert (stats.skipped, stats.minibatches, stats.round) == (1, 0, turn + 1)
            assert stats.kl is None
            assert encode(stats)
        else:
            with pytest.raises(TrainingError, match=r"3 updates in a row .* not finite"):
                ppo.update(buffer, seeded())
        assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())


def test_healthy_update_resets_the_count_of_bad_ones():
    net = network()
    layout = MaskLayout(slots=3, blueprints=13)
    ppo = PPO(net, layout, CONFIG)
    for turn, is_bad in enumerate([True, True, False, True, True]):
        buffer, _ = synthetic_rollout(net, seed=turn)
        if is_bad:
            buffer.rewards[0, 0] = math.nan
        assert (ppo.update(buffer, seeded()).minibatches == 0) == is_bad
    assert ppo.bad_in_a_row == 2


def test_one_bad_minibatch_is_skipped_and_the_others_are_used():
    net = network()
    buffer, layout = synthetic_rollout(net)
    buffer.obs[5, 1] = math.nan  # an observation, so that advantages stay finite
    ppo = PPO(net, layout, CONFIG)
    before = weights(net)
    stats = ppo.update(buffer, seeded())
    assert stats.skipped == stats.epochs
    assert stats.minibatches == stats.epochs
    assert ppo.bad_in_a_row == 0
    assert all(torch.isfinite(x).all() for x in net.state_dict().values())
    assert any(not torch.equal(x, before[name]) for name, x in net.state_dict().items())


def test_non_finite_gradients_change_no_weight():
    net = network()
    buffer, layout = synthetic_rollout(net)
    net.op_head[-1].weight.register_hook(lambda grad: grad * math.inf)
    before = weights(net)
    stats = PPO(net, layout, CONFIG).update(buffer, seeded())
    assert stats.minibatches == 0
    assert stats.skipped == 4
    assert torch.equal(net.op_head[-1].weight, before["op_head.2.weight"])
    assert torch.equal(net.slot_encoder[0].weight, before["slot_encoder.0.weight"])


def test_target_kl_stops_the_passes():
    far = PPOConfig(epochs=8, minibatches=2, target_kl=1e9)
    near = PPOConfig(epochs=8, minibatches=2, lr=0.02, target_kl=0.01)
    net = network()
    buffer, layout = synthetic_rollout(net)
    assert PPO(net, layout, far).update(buffer, seeded()).epochs == 8
    net = network()
    buffer, layout = synthetic_rollout(net)
    stats = PPO(net, layout, near).update(buffer, seeded())
    assert stats.epochs < 8
    assert stats.minibatches == 2 * stats.epochs


def test_gradients_are_clipped_to_the_maximum_norm():
    config = msgspec.structs.replace(CONFIG, max_grad_norm=0.5)
    net = network()
    buffer, layout = synthetic_rollout(net)
    ppo, norms = PPO(net, layout, config), []
    step = ppo.optimizer.step

    def watched():
        norms.append(float(nn.utils.get_total_norm([p.grad for p in net.parameters()])))
        step()

    ppo.optimizer.step = watched
    stats = ppo.update(buffer, seeded())
    assert stats.grad_norm > 0.5  # as it was before
    assert max(norms) == pytest.approx(0.5, rel=1e-3)


def test_entropy_weight_decreases_over_the_rounds():
    ppo = PPO(network(), MaskLayout(slots=3, blueprints=13), PPOConfig(entropy_coef=0.1, entropy_final=0.02), rounds=5)
    stats = []
    for ppo.round in range(7):
        stats.append(ppo.entropy_coef)
    assert stats == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02, 0.02, 0.02])


def test_learning_rate_decreases_over_the_rounds_and_reaches_the_optimizer():
    net = network()
    buffer, layout = simulated(net)
    ppo = PPO(net, layout, PPOConfig(lr=1e-3, lr_final=0.2, minibatches=2), rounds=5)
    rates = []
    for ppo.round in range(7):
        rates.append(ppo.lr)
    assert rates == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4, 2e-4, 2e-4, 2e-4])
    ppo.round = 2
    assert ppo.update(buffer, seeded()).lr == pytest.approx(6e-4)
    assert ppo.optimizer.param_groups[0]["lr"] == pytest.approx(6e-4)


def test_update_adds_the_valid_observations_to_the_statistics():
    net = network(standardise=True)
    buffer, layout = synthetic_rollout(net, counts=[14, 3, 9, 14, 1, 14])
    ppo = PPO(net, layout, CONFIG)
    ppo.update(buffer, seeded())
    rows = buffer.obs[buffer.valid]
    torch.testing.assert_close(net.obs_mean[:BASE], rows[:, :BASE].mean(0), atol=1e-5, rtol=0.0)
    assert float(net.obs_count) == 1
    assert ppo.update(synthetic_rollout(net, seed=1)[0], seeded()).kl is not None  # first ratios are still 1


def test_update_is_repeatable_bit_for_bit():
    results = []
    for _ in range(2):
        net = network()
        buffer, layout = simulated(net)
        PPO(net, layout, CONFIG).update(buffer, seeded(5))
        results.append(weights(net))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize(
    "wrong",
    [{"lr": 0.0}, {"clip_ratio": 1.0}, {"clip_ratio": math.nan}, {"gamma": 1.1}, {"gae_lambda": -0.1}, {"epochs": 0},
     {"lr_final": 1.5}, {"entropy_final": math.nan}, {"weight_decay": math.inf}, {"entropy_coef": -0.1},
     {"minibatches": 0}, {"target_kl": 0.0}, {"value_coef": -1.0}, {"max_grad_norm": 0.0}],
    ids=str,
)  # fmt: skip
def test_invalid_settings_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PPOConfig(**wrong)


# --- the return normaliser


def test_return_scale_is_mean_and_spread():
    scale = ReturnScale()
    assert scale.now() == (0.0, 1.0)
    first = torch.tensor([1.0, 3.0])
    assert scale.update(first) == pytest.approx((2.0, 1.0))  # the first rollout counts in full
    mean, std = scale.update(torch.tensor([10.0, 10.0]))
    old, new = 0.1 * 0.9, 0.1
    assert mean == pytest.approx((old * 2 + new * 10) / (old + new))
    assert std == pytest.approx(math.sqrt((old * 5 + new * 100) / (old + new) - mean**2))
    assert scale.update(torch.empty(0)) == (mean, std)


def test_return_scale_converges_decays_slowly_and_is_never_0():
    scale = ReturnScale()
    for _ in range(200):
        mean, std = scale.update(torch.full((5,), 1e2))
    assert mean == pytest.approx(1e2)
    assert std == pytest.approx(1e-3)
    for _ in range(100):
        mean, std = scale.update(torch.tensor([-1.0, 1.0]))
    assert abs(mean) < 0.01
    assert std == pytest.approx(1.0, abs=0.2)


def test_return_scale_is_saved_and_loaded():
    scale, other = ReturnScale(), ReturnScale()
    scale.update(torch.tensor([1.0, 2.0, 7.0]))
    other.load(scale.state())
    more = torch.tensor([3.0, 4.0])
    assert other.update(more) == scale.update(more)


def test_update_reads_values_in_units_of_the_returns():
    net = network()
    buffer, layout = synthetic_rollout(net)
    buffer.rewards.mul_(50.0).add_(20.0)
    stats = PPO(net, layout, CONFIG).update(buffer, seeded())
    returns = buffer.returns[buffer.valid]
    assert float(net.mean) == pytest.approx(float(returns.mean()), rel=1e-4)
    assert float(net.std) == pytest.approx(float(returns.std()), rel=0.02)
    assert stats.value_loss < 3.0


# --- learning


SHOWN, RIGHT = ENV_COLUMN["quality_1"], (5, 8)
"""A column of the observation, and the blueprint that is rewarded when it shows 0 or 1."""


def puzzle_masks(envs, layout):
    """Return masks of WAIT and of GERMINATE with one of three blueprints in any slot."""
    masks = torch.zeros(envs, layout.size, dtype=torch.bool)
    by_op = torch.zeros(envs, NUM_OPS, layout.slots, dtype=torch.bool)
    by_op[:, 0, 0] = True
    by_op[:, Op.GERMINATE] = True
    masks[:, layout.slot_by_op] = by_op.flatten(1)
    masks[:, layout.op] = by_op.any(-1)
    masks[:, layout.blueprint_by_slot] = torch.isin(torch.arange(layout.blueprints), torch.tensor([2, *RIGHT])).repeat(
        layout.slots
    )
    for where in layout.tail.values():
        masks[:, where.start] = True
    return masks


def puzzle_round(net, layout, generator, *, envs=48, length=4):
    """Play episodes of one step: a bit is shown, the matching blueprint pays 1, waiting 0.2, anything else 0."""
    buffer, masks, shares = empty_buffer(length, envs, layout), puzzle_masks(envs, layout), []
    ends = torch.ones(envs, dtype=torch.bool)
    for _ in range(length):
        bit = torch.randint(2, (envs,), generator=generator)
        obs = 0.1 * torch.randn(envs, num_features(layout.slots), generator=generator)
        obs[:, SHOWN] = bit.float()
        chances = torch.rand(envs, NUM_HEADS, generator=generator, dtype=torch.double)
        choice = net.act(obs, masks, layout, chances)
        planted = choice.actions[:, Head.OP] == Op.GERMINATE
        right = planted & (choice.actions[:, Head.BLUEPRINT] == torch.tensor(RIGHT)[bit])
        buffer.add(
            obs=obs, masks=masks, actions=choice.actions, log_probs=choice.log_probs, values=choice.values,
            rewards=right.float() + 0.2 * ~planted, done=ends, truncated=~ends, forced=forced(masks, layout),
        )  # fmt: skip
        shares.append(float(right.float().mean()))
    return buffer.finish(), sum(shares) / len(shares)


def test_correct_answer_to_the_observation_is_learnt():
    layout, generator, rounds = MaskLayout(slots=2, blueprints=13), seeded(1), 16
    net = network(patience=0.0)
    ppo = PPO(net, layout, PPOConfig(lr=5e-3, minibatches=2, gae_lambda=1.0, gamma=1.0), rounds=rounds)
    shares = []
    for _ in range(rounds):
        buffer, share = puzzle_round(net, layout, generator)
        ppo.update(buffer, generator)
        shares.append(share)
    assert shares[0] < 0.3  # random op and one blueprint of three
    assert shares[-1] > 0.8


def test_horizon_is_terminal_and_is_not_bootstrapped():
    net = network()
    buffer, _ = simulated(net)
    assert buffer.done[-1].all()
    assert not buffer.done[:-1].any()
    assert not buffer.truncated.any()
    buffer.bootstrap[-1] = 1e6  # must not be read
    _, returns = buffer.compute_advantages_and_returns(1.0, 1.0)
    torch.testing.assert_close(returns[0], buffer.rewards.sum(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(returns[-1], buffer.rewards[-1], atol=1e-5, rtol=1e-4)
