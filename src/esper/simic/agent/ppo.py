"""PPO for Tamiyo: clipped updates per action head.

    ppo = PPO(network, layout, PPOConfig())
    report = ppo.update(buffer, generator)

Every head has its own ratio and clip. It contributes on the steps on which the op reads it and it had more than one
option. Sums over heads are divided by the number of steps with a choice, so a head that is rarely used has a small
weight. Steps on which only WAIT was legal train the critic, not the actor.

Legend: T steps, E environments, N steps of a minibatch.
"""

from __future__ import annotations

import math
import time

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline.actions import RELEVANCE, Head
from esper.leyline.errors import ConfigError, TrainingError
from esper.leyline.events import Number, Update
from esper.simic.agent.advantages import normalized_advantages
from esper.simic.agent.rollout_buffer import Minibatch, TamiyoRolloutBuffer
from esper.tamiyo.network import TamiyoNetwork, known_blueprints
from esper.tamiyo.policy.action_masks import MaskLayout, conditioned, forced

MAX_LOG_RATIO = 20.0
"""Bound of the absolute log-ratio between new and old probabilities, against overflow."""
FIRST_RATIO_TOLERANCE = 1e-4
"""Maximum deviation of a ratio from 1 before the first step of an update, when the policy is still the one that
acted."""
MOST_BAD_UPDATES = 3
"""Number of consecutive updates without a finite step after which training fails."""
MOST_MINIBATCHES = 1 << 16
_RELEVANCE = torch.tensor(RELEVANCE)


class PPOConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the policy update."""

    lr: float = 1e-3
    """AdamW starts with this learning rate, above 0."""
    lr_final: float = 1.0
    """The learning rate changes linearly over the run's rounds to this fraction of `lr`, 0 to 1."""
    gamma: float = 0.99
    """Rewards are discounted by this factor per step, 0 to 1."""
    gae_lambda: float = 0.95
    """Generalised advantage estimation uses this lambda, 0 to 1."""
    clip_ratio: float = 0.2
    """The probability ratio is clipped to this distance from 1, above 0 and below 1."""
    epochs: int = 4
    """An update makes at most this many passes over a rollout, ≥ 1. `target_kl` can end them earlier."""
    minibatches: int = 4
    """A pass divides the steps of a rollout at random into this many minibatches, 1 to 65,536, at most one per step."""
    target_kl: float = 0.02
    """No further pass starts after one whose mean KL divergence exceeds 1.5 times this target in nats, above 0."""
    value_coef: float = 0.5
    """The value loss has this weight, ≥ 0."""
    entropy_coef: float = 0.01
    """The entropy bonus starts with this weight, ≥ 0. The entropy of a head is a fraction of its maximum."""
    entropy_final: float = 0.002
    """The weight of the entropy bonus changes linearly over the run's rounds to this value, ≥ 0."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm, above 0."""
    weight_decay: float = 0.0
    """AdamW uses this weight decay, ≥ 0."""

    def __post_init__(self) -> None:
        for name in ("lr", "clip_ratio", "target_kl", "max_grad_norm"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"ppo.{name} must be above 0 and finite, got {getattr(self, name)}")
        for name in ("gamma", "gae_lambda", "lr_final"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"ppo.{name} must lie between 0 and 1, got {getattr(self, name)}")
        if not self.clip_ratio < 1.0:
            raise ConfigError(f"ppo.clip_ratio must lie between 0 and 1, got {self.clip_ratio}")
        if self.epochs < 1:
            raise ConfigError(f"ppo.epochs must be ≥ 1, got {self.epochs}")
        if not 1 <= self.minibatches <= MOST_MINIBATCHES:
            raise ConfigError(f"ppo.minibatches must lie in 1…{MOST_MINIBATCHES}, got {self.minibatches}")
        for name in ("value_coef", "entropy_coef", "entropy_final", "weight_decay"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"ppo.{name} must be ≥ 0 and finite, got {getattr(self, name)}")


class ReturnScale:
    """Exponential moving mean and standard deviation of returns: the only normaliser of the update."""

    def __init__(self, keep: float = 0.9) -> None:
        self.keep = keep
        self.mean = 0.0
        self.square = 0.0
        self.weight = 0.0

    def update(self, returns: Tensor) -> tuple[float, float]:
        """Update the averages with a rollout's returns. Return the new mean and standard deviation."""
        if not returns.numel():
            return self.now()
        new = returns.double()
        self.mean = self.keep * self.mean + (1 - self.keep) * float(new.mean())
        self.square = self.keep * self.square + (1 - self.keep) * float(new.square().mean())
        self.weight = self.keep * self.weight + (1 - self.keep)
        return self.now()

    def now(self) -> tuple[float, float]:
        """Return the current mean and standard deviation; 0 and 1 before the first rollout."""
        if not self.weight:
            return 0.0, 1.0
        mean = self.mean / self.weight
        return mean, max(math.sqrt(max(self.square / self.weight - mean * mean, 0.0)), 1e-3)

    def state(self) -> dict[str, float]:
        """Return the averages, for a checkpoint."""
        return {"mean": self.mean, "square": self.square, "weight": self.weight}

    def load(self, state: dict[str, float]) -> None:
        """Restore a result of `state`."""
        self.mean = state["mean"]
        self.square = state["square"]
        self.weight = state["weight"]


class PPO:
    """Updates a policy and reports diagnostics."""

    def __init__(
        self, network: TamiyoNetwork, layout: MaskLayout, config: PPOConfig | None = None, *, rounds: int = 1
    ) -> None:
        self.network = network
        self.layout = layout
        self.config = config or PPOConfig()
        self.rounds = rounds
        self.optimizer = torch.optim.AdamW(
            network.parameters(), lr=self.config.lr, eps=1e-5, weight_decay=self.config.weight_decay
        )
        self.scale = ReturnScale()
        self.round = 0
        self.bad_in_a_row = 0

    @property
    def progress(self) -> float:
        """Fraction of the rounds that are over: 0 in the first, 1 in the last."""
        return min(1.0, self.round / max(1, self.rounds - 1))

    @property
    def entropy_coef(self) -> float:
        """Current weight of the entropy bonus."""
        return self.config.entropy_coef + self.progress * (self.config.entropy_final - self.config.entropy_coef)

    @property
    def lr(self) -> float:
        """Current learning rate."""
        return self.config.lr * (1.0 + self.progress * (self.config.lr_final - 1.0))

    def update(self, buffer: TamiyoRolloutBuffer, generator: torch.Generator, *, imitate: bool = False) -> Update:
        """Update the policy from one finished rollout. Return the diagnostics.

        With `imitate`, the buffer's actions are those of a teacher, and their likelihood is increased.
        """
        start = time.perf_counter()
        config = self.config
        buffer.compute_advantages_and_returns(config.gamma, config.gae_lambda)
        valid = buffer.valid
        returns = buffer.returns
        # a step whose only plantable blueprints are unknown to the network has no choice
        buffer.forced |= forced(known_blueprints(buffer.masks, self.layout), self.layout)
        critic = critic_health(buffer.values[valid], returns[valid])
        healthy = bool(torch.isfinite(returns[valid]).all())  # sync: once per update
        tally = Tally()
        passes = 0
        if healthy:
            buffer.advantages.copy_(normalized_advantages(buffer.advantages, valid & ~buffer.forced))
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
            self.network.renormalise(*self.scale.update(returns[valid]))
            for _ in range(config.epochs):
                passes += 1
                for minibatch in buffer.minibatches(config.minibatches, generator):
                    self._step(minibatch, tally, imitate)
                if tally.kl_of_pass() > 1.5 * config.target_kl:
                    break
            self.network.observe(buffer.obs[valid])
        else:
            tally.skipped += 1
        self._check(tally)
        lr = self.lr
        self.round += 1
        return self._report(tally, critic, passes, lr, (time.perf_counter() - start) * 1e3)

    def _step(self, batch: Minibatch, tally: Tally, imitate: bool) -> None:
        """Take a clipped gradient step on one minibatch and record its diagnostics. Skip it if it is not finite."""
        loss, stats = losses(self.network, self.layout, self.config, batch, self.entropy_coef, imitate=imitate)
        if not tally.count and stats["ratio_off"] > FIRST_RATIO_TOLERANCE:
            raise TrainingError(
                f"before the first step of an update a probability ratio differs from 1 by {stats['ratio_off']:.2g}: "
                "rollout and update use different policies (weights, masks or precision differ)"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), self.config.max_grad_norm)
        if not (math.isfinite(stats["loss"]) and bool(torch.isfinite(norm))):  # sync: skip steps that are not finite
            tally.skipped += 1
            return
        self.optimizer.step()
        tally.stats.append(stats | {"grad_norm": float(norm)})

    def _check(self, tally: Tally) -> None:
        self.bad_in_a_row = 0 if tally.count else self.bad_in_a_row + 1
        if self.bad_in_a_row >= MOST_BAD_UPDATES:
            raise TrainingError(
                f"{self.bad_in_a_row} updates in a row had no finite step: rewards, returns or gradients are NaN or "
                "infinite. The policy is as it was before them; look at the run's `step` events for rewards that are "
                "not finite, or lower ppo.lr"
            )

    def _report(self, tally: Tally, critic: tuple[Number, Number], passes: int, lr: float, wall_ms: float) -> Update:
        m = tally.mean
        averaged = ("policy_loss", "value_loss", "entropy_loss", "kl", "clip_fraction", "grad_norm")
        return Update(
            round=self.round,
            epochs=passes,
            minibatches=tally.count,
            **{name: m(name) for name in averaged},
            ratio_min=min((s["ratio_min"] for s in tally.stats), default=None),
            ratio_max=max((s["ratio_max"] for s in tally.stats), default=None),
            explained_variance=critic[0],
            value_nrmse=critic[1],
            lr=lr,
            skipped=tally.skipped,
            entropy={h.name.lower(): m(f"entropy_{h.name}") for h in Head},
            learnable={h.name.lower(): m(f"learnable_{h.name}") for h in Head},
            wall_ms=wall_ms,
        )


def losses(
    network: TamiyoNetwork, layout: MaskLayout, config: PPOConfig, batch: Minibatch, entropy_coef: float,
    *, imitate: bool = False,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Return the loss of a minibatch and its diagnostics. With `imitate`, the actor's loss is the cross-entropy."""
    masks = known_blueprints(batch.masks, layout)
    now = network.evaluate(batch.obs, masks, batch.actions, layout)
    counts = counted(masks, layout, batch.actions, ~batch.forced)  # [N, 8]
    decided = (~batch.forced).sum().clamp(min=1)

    before = now.log_probs.detach() if imitate else batch.log_probs
    change = torch.where(counts, now.log_probs - before, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = change.exp()
    gain = torch.ones_like(change) if imitate else batch.advantages[..., None]
    clipped = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
    policy_loss = -torch.where(counts, torch.minimum(ratio * gain, clipped * gain), 0.0).sum() / decided

    target = (batch.returns - network.mean) / network.std
    value_loss = 0.5 * (now.raw_values - target).square().mean()

    per_head = (now.entropy * counts).sum(0) / counts.sum(0).clamp(min=1)
    entropy_loss = -(now.entropy * counts).sum() / decided
    loss = policy_loss + config.value_coef * value_loss + entropy_coef * entropy_loss

    with torch.no_grad():
        kl = ((ratio - 1 - change) * counts).sum() / decided
        outside = ((ratio - 1).abs() > config.clip_ratio) & counts
        used = counts.sum(0)
        numbers = torch.stack(
            [
                loss, policy_loss, value_loss, entropy_loss, kl, outside.sum() / counts.sum().clamp(min=1),
                ratio.min(), ratio.max(), (ratio - 1).abs().max(), *per_head, *(used / decided), *used,
            ]
        ).tolist()  # sync: once per minibatch  # fmt: skip
    names = (
        "loss", "policy_loss", "value_loss", "entropy_loss", "kl", "clip_fraction", "ratio_min", "ratio_max",
        "ratio_off",
    )  # fmt: skip
    stats = dict(zip(names, numbers, strict=False))
    entropies, shares, uses = np.array(numbers[len(names) :]).reshape(3, len(Head)).tolist()
    for h in Head:
        stats[f"entropy_{h.name}"] = entropies[h] if uses[h] else math.nan
        stats[f"learnable_{h.name}"] = shares[h]
    return loss, stats


def counted(masks: Tensor, layout: MaskLayout, actions: Tensor, free: Tensor) -> Tensor:
    """Return where a head contributes, [N, 8]: on free steps whose op reads it, if it had several options."""
    op = actions[..., Head.OP]
    relevant = _RELEVANCE.to(masks.device)[op]
    several = conditioned(masks, layout, op, actions[..., Head.SLOT]).sum(-1) > 1
    return relevant & several & free[..., None]


def critic_health(values: Tensor, returns: Tensor) -> tuple[Number, Number]:
    """Return the explained variance, and the values' RMSE over the standard deviation of returns.

    The critic is better than predicting the mean return if the second number is below 1.
    """
    if returns.numel() < 2:
        return None, None
    spread = float(returns.var())
    if not spread > 1e-12:
        return None, None
    return 1 - float((returns - values).var()) / spread, float((returns - values).square().mean()) ** 0.5 / spread**0.5


class Tally:
    """Diagnostics of the minibatches of one update."""

    def __init__(self) -> None:
        self.stats: list[dict[str, float]] = []
        self.skipped = 0
        self._pass = 0

    @property
    def count(self) -> int:
        """Number of minibatches."""
        return len(self.stats)

    def kl_of_pass(self) -> float:
        """Return the mean KL of the minibatches since the last call."""
        new, self._pass = self.stats[self._pass :], len(self.stats)
        return sum(s["kl"] for s in new) / len(new) if new else 0.0

    def mean(self, name: str) -> Number:
        """Return the mean of a diagnostic over minibatches, ignoring NaN; None if there is none."""
        values = [s[name] for s in self.stats if not math.isnan(s[name])]
        return sum(values) / len(values) if values else None
