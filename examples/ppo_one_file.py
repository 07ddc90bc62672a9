"""Masked, factored PPO on simulated hosts, in one file.

    python examples/ppo_one_file.py --rounds 60 --envs 32

The package implements the same algorithm in `tamiyo/network.py`, `simic/agent/` and `simic/training/`, with what
long runs need: episodes of different lengths, custom blueprints, telemetry and checkpoints. This file follows the data
flow for whole episodes. It imports only the environment, the observation layout and the action masks from Esper. A
test checks that both implementations have the same weights after an update.

Legend: T steps, E environments, N steps of a minibatch, S slots, D width, W options of the widest head.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.leyline.actions import HEAD_OPTIONS, NUM_HEADS, NUM_OPS, RELEVANCE, Head, Op
from esper.simic.env import GrowthVectorEnv
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.policy import BASE, PER_SLOT, MaskLayout, conditioned, slot_given_op


@dataclass(frozen=True)
class Settings:
    rounds: int = 60
    envs: int = 32
    seed: int = 0
    width: int = 64
    patience: float = 2.5  # initial logit of WAIT; without it a new policy prunes seeds before they can learn
    epsilon: float = 0.02  # weight of the uniform distribution over legal choices
    lr: float = 1e-3
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    epochs: int = 4  # passes over a rollout
    minibatches: int = 4  # per pass
    target_kl: float = 0.02
    value_coef: float = 0.5
    entropy_coef: float = 0.01
    entropy_final: float = 0.002
    max_grad_norm: float = 1.0


# --- the policy: observation → op, slot given op, other heads given op and slot

REST = {h: len(HEAD_OPTIONS[h] or ()) for h in Head if h not in (Head.OP, Head.SLOT)}
READS = torch.tensor(RELEVANCE)  # [O, 8] which heads an op reads


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Policy(nn.Module):
    """A shared slot encoder with pooling, a state encoder, and heads. Weights have the names of TamiyoNetwork's."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        d = settings.width
        self.slot_encoder = nn.Sequential(linear(PER_SLOT, d), nn.ReLU(), linear(d, d), nn.ReLU())
        self.state_encoder = nn.Sequential(linear(BASE + 2 * d, d), nn.ReLU(), linear(d, d), nn.ReLU())
        self.op_head = nn.Sequential(linear(d, d), nn.ReLU(), linear(d, NUM_OPS, gain=0.01))
        self.op_head[-1].bias.data[Op.WAIT] = settings.patience
        self.value_head = nn.Sequential(linear(d, d), nn.ReLU(), linear(d, 1, gain=0.1))
        self.op_embedding = nn.Embedding(NUM_OPS, d)
        self.from_state, self.from_slot = linear(d, d), linear(d, d)
        self.slot_score = linear(d, 1, gain=0.01)
        self.choices = linear(d, sum(REST.values()), gain=0.01)
        self.register_buffer("mean", torch.zeros(()))  # of returns; the value head predicts normalised returns
        self.register_buffer("std", torch.ones(()))

    def encode(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encodings of the state [*, D] and of every slot [*, S, D]."""
        base, slots = obs[..., :BASE], self.slot_encoder(obs[..., BASE:].unflatten(-1, (-1, PER_SLOT)))
        return self.state_encoder(torch.cat([base, slots.mean(-2), slots.amax(-2)], -1)), slots

    def logits(self, state: Tensor, slots: Tensor, op: Tensor, slot: Tensor, widest: int) -> Tensor:
        """Return the logits of every head given op and slot, padded to one tensor [*, 8, W]."""
        out = state.new_zeros(*op.shape, NUM_HEADS, widest)
        out[..., Head.OP, :NUM_OPS] = self.op_head(state)
        query = self.from_state(state) + self.op_embedding(op)
        aware = torch.relu(query[..., None, :] + self.from_slot(slots))  # [*, S, D] each slot, given the op
        out[..., Head.SLOT, : slots.shape[-2]] = self.slot_score(aware).squeeze(-1)
        chosen = self.choices(torch.take_along_dim(aware, slot[..., None, None], -2).squeeze(-2))
        for head, part in zip(REST, chosen.split(list(REST.values()), -1), strict=True):
            out[..., head, : part.shape[-1]] = part
        return out

    def value(self, state: Tensor) -> Tensor:
        """Return the normalised value [*]: (value − `mean`) / `std`."""
        return self.value_head(state).squeeze(-1)


# --- the action distribution, used in the rollout and in the update


def log_distribution(logits: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """Return log((1 − ε)·softmax + ε·uniform) over the legal options, −inf elsewhere."""
    soft = torch.softmax(logits.masked_fill(~mask, -torch.inf), -1)
    mixed = (1 - epsilon) * soft + epsilon / mask.sum(-1, keepdim=True)
    return torch.where(mask, mixed, 1.0).log().masked_fill(~mask, -torch.inf)


def entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the entropy divided by its maximum, 0…1; 0 where there is at most one legal option."""
    safe, count = log_probs.masked_fill(~mask, 0.0), mask.sum(-1)
    h = -(safe.exp() * safe * mask).sum(-1)
    return torch.where(count > 1, h / count.clamp(min=2).log(), 0.0)


def draw(log_probs: Tensor, generator: torch.Generator) -> Tensor:
    """Sample one option per row: the argmax of log p − log(exponential noise)."""
    clocks = torch.empty_like(log_probs).exponential_(generator=generator)
    return (log_probs - clocks.log()).argmax(-1)


# --- the rollout: E whole episodes in parallel, every field [T, E, …]


@torch.no_grad()
def rollout(env: GrowthVectorEnv, policy: Policy, settings: Settings, generator: torch.Generator) -> dict[str, Tensor]:
    layout, rows = env.layout, []
    obs, info = env.reset()
    for _ in range(env.horizon):
        observed, masks = torch.from_numpy(obs), torch.from_numpy(info["masks"])
        state, slots = policy.encode(observed)
        op = draw(log_distribution(policy.op_head(state), masks[:, layout.op], settings.epsilon), generator)
        scores = policy.logits(state, slots, op, torch.zeros_like(op), layout.widest)[:, Head.SLOT, : layout.slots]
        slot = draw(log_distribution(scores, slot_given_op(masks, layout, op), settings.epsilon), generator)
        logits = policy.logits(state, slots, op, slot, layout.widest)
        log_probs = log_distribution(logits, conditioned(masks, layout, op, slot), settings.epsilon)
        actions = draw(log_probs, generator)
        actions[:, Head.OP], actions[:, Head.SLOT] = op, slot
        obs, paid, ended, _, info = env.step(actions.numpy())  # apply, tick, train an epoch, validate
        rows.append(
            {
                "obs": observed, "masks": masks, "actions": actions, "rewards": torch.from_numpy(paid),
                "log_probs": log_probs.gather(-1, actions[..., None]).squeeze(-1),
                "values": policy.value(state) * policy.std + policy.mean, "done": torch.from_numpy(ended),
            }
        )  # fmt: skip
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# --- the update


def advantages_of(rewards: Tensor, values: Tensor, done: Tensor, gamma: float, lam: float) -> Tensor:
    """Return GAE advantages [T, E]. Episodes end at the horizon, without a bootstrap value."""
    out, later, following = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        goes_on = ~done[t]
        delta = rewards[t] + gamma * following * goes_on - values[t]
        out[t] = later = delta + gamma * lam * goes_on * later
        following = values[t]
    return out


class ReturnScale:
    """Moving mean and standard deviation of returns, by which values are normalised."""

    def __init__(self) -> None:
        self.mean = self.square = self.weight = 0.0

    def update(self, returns: Tensor) -> tuple[float, float]:
        new = returns.double()
        self.mean = 0.9 * self.mean + 0.1 * float(new.mean())
        self.square = 0.9 * self.square + 0.1 * float(new.square().mean())
        self.weight = 0.9 * self.weight + 0.1
        mean = self.mean / self.weight
        return mean, max(math.sqrt(max(self.square / self.weight - mean * mean, 0.0)), 1e-3)


@torch.no_grad()
def rescale_values(policy: Policy, mean: float, std: float) -> None:
    """Change the normalisation of returns and adapt the value head so that its predictions stay the same."""
    last = policy.value_head[-1]
    last.weight *= policy.std / std
    last.bias.copy_((policy.std * last.bias + policy.mean - mean) / std)
    policy.mean.fill_(mean)
    policy.std.fill_(std)


def loss_of(
    policy: Policy, layout: MaskLayout, settings: Settings, batch: dict[str, Tensor], entropy_coef: float
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a minibatch [N, …] and its statistics."""
    state, slots = policy.encode(batch["obs"])
    actions, masks = batch["actions"], batch["masks"]
    op, slot = actions[..., Head.OP], actions[..., Head.SLOT]
    mask = conditioned(masks, layout, op, slot)
    log_probs = log_distribution(policy.logits(state, slots, op, slot, layout.widest), mask, settings.epsilon)
    chosen = log_probs.gather(-1, actions[..., None]).squeeze(-1)

    # a head is trained where there was a choice of op, the chosen op uses the head, and the head had several options
    counts = batch["free"][..., None] & READS[op] & (mask.sum(-1) > 1)  # [N, 8]
    decided = batch["free"].sum().clamp(min=1)
    change = torch.where(counts, chosen - batch["log_probs"], 0.0).clamp(-20, 20)
    ratio, gain = change.exp(), batch["advantages"][..., None]
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)

    policy_loss = -(torch.minimum(ratio * gain, clipped * gain) * counts).sum() / decided
    value_loss = 0.5 * (policy.value(state) - (batch["returns"] - policy.mean) / policy.std).square().mean()
    entropy_loss = -(entropy(log_probs, mask) * counts).sum() / decided
    loss = policy_loss + settings.value_coef * value_loss + entropy_coef * entropy_loss
    with torch.no_grad():
        kl, off = ((ratio - 1 - change) * counts).sum() / decided, (ratio - 1).abs().max()
    stats = {"kl": kl.item(), "value_loss": value_loss.item(), "ratio_off": off.item()}
    return loss, stats


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, layout: MaskLayout, settings: Settings, scale: ReturnScale,
    data: dict[str, Tensor], entropy_coef: float, generator: torch.Generator,
) -> dict[str, float]:  # fmt: skip
    """Train on a rollout for several epochs; stop early if the KL divergence exceeds its target."""
    advantages = advantages_of(data["rewards"], data["values"], data["done"], settings.gamma, settings.lam)
    data["returns"] = advantages + data["values"]
    data["free"] = free = data["masks"][..., layout.op][..., 1:].any(-1)  # some op other than WAIT was legal
    centred = torch.where(free, advantages - advantages[free].mean(), 0.0)
    data["advantages"] = centred / centred[free].square().mean().sqrt().clamp(min=1e-3)
    rescale_values(policy, *scale.update(data["returns"]))

    flat = {name: x.flatten(0, 1) for name, x in data.items()}  # [T·E, …]
    stats: list[dict[str, float]] = []
    for _ in range(settings.epochs):
        this_pass = len(stats)
        order = torch.randperm(free.numel(), generator=generator)
        for some in order.tensor_split(settings.minibatches):  # random steps of all environments
            loss, numbers = loss_of(policy, layout, settings, {k: x[some] for k, x in flat.items()}, entropy_coef)
            assert stats or numbers["ratio_off"] < 1e-4, "rollout and update compute different log-probabilities"
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            optimizer.step()
            stats.append(numbers)
        moved = stats[this_pass:]
        if sum(t["kl"] for t in moved) / len(moved) > 1.5 * settings.target_kl:
            break
    return {name: sum(t[name] for t in stats) / len(stats) for name in stats[0]}


def train(settings: Settings) -> Policy:
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    envs = settings.envs
    env = GrowthVectorEnv(Simulator(SimConfig(), range(envs)), lambda n: range(n * envs, (n + 1) * envs))  # new worlds
    policy = Policy(settings)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.lr, eps=1e-5, weight_decay=0.0)
    scale = ReturnScale()
    for number in range(settings.rounds):
        data = rollout(env, policy, settings, generator)
        done = min(1.0, number / max(1, settings.rounds - 1))
        coef = settings.entropy_coef + done * (settings.entropy_final - settings.entropy_coef)
        stats = update(policy, optimizer, env.layout, settings, scale, data, coef, generator)
        acted = (data["actions"][..., Head.OP] != Op.WAIT)[data["free"]].float().mean()
        returns, quality = data["rewards"].sum(0), env.backend.table.quality
        print(
            f"round {number:3}  return {returns.mean():+.4f}  quality {quality.mean():.3f}  acted {acted:.2f}  "
            f"kl {stats['kl']:.4f}  value loss {stats['value_loss']:.3f}",
            flush=True,
        )
    return policy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learn to grow simulated hosts.")
    for name in ("rounds", "envs", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings, name))
    torch.set_num_threads(1)  # more threads do not speed up networks of this size
    train(Settings(**vars(parser.parse_args())))
