"""Tamiyo's policy network: slot encoder, state encoder, value head and conditional action heads.

    slots ──► shared encoder ─────► pooled ───┐
    base  ────────────────────────────────────┴─► state encoder ──► value
                                                       │
                                                       ├─► op
                                                       ├─► slot      given the op, one score per slot
                                                       └─► others    given the op and the slot

A decision depends on the current observation only, which has the history that matters: trends of quality and loss,
ages of seeds, operations so far. A recurrent core was no better (docs/studies/sim_ablation.md).

All slots share the same weights: a policy trained with 3 slots works with 25, and permuting slots permutes their
scores. The options are fixed by leyline's tables; the network does not choose user-defined blueprints.

`log_distribution` is shared by rollouts and updates, so that both compute the same probabilities. Every head is a
masked softmax over one padded tensor, mixed with a small share of the uniform distribution over the legal options.
Every legal option has a probability of at least ε/n and, unlike with a hard floor, a gradient.

Legend: E environments, N decisions, S slots, D width of encodings, W widest head.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.leyline.actions import BLUEPRINTS, HEAD_OPTIONS, NUM_OPS, Head, Op
from esper.leyline.errors import ConfigError
from esper.tamiyo.policy.action_masks import MaskLayout, conditioned, padded, slot_given_op
from esper.tamiyo.policy.feature_table import BASE, PER_SLOT, SLOT_COLUMN

MOST_WIDTH = 8192
"""Maximum width of a policy's layers. At this width one layer takes half a gigabyte; more is likely a typing error."""
LEAST_DEVIATION = 0.01
"""Minimum standard deviation by which a column of the observation is divided."""
MOST_DEVIATION = 5.0
"""Bound of a standardised column."""
_ENABLED = SLOT_COLUMN["enabled"]
_GIVEN_SLOT = slice(Head.BLUEPRINT, Head.OP)
_SIZES = tuple(len(HEAD_OPTIONS[h] or ()) for h in list(Head)[_GIVEN_SLOT])


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of a policy. The defaults are small, since a round has only a few thousand decisions to learn from."""

    width: int = 64
    """Every layer has this many units, 1 to 8192."""
    epsilon: float = 0.02
    """The uniform distribution over legal options has this weight in every head's mixture, at least 0 and below 1. It
    keeps exploration and gradients above 0."""
    standardise: bool = False
    """If true, the columns of an observation are divided by their standard deviation in the rollouts so far. Columns
    that vary little, such as the quality after one epoch, are hardly visible otherwise."""
    patience: float = 2.5
    """An untrained policy prefers WAIT to any other op by this log-odds, −50 to 50. At 0 it acts whenever it can,
    prunes every seed before its worth is measured, and learns that growing is useless."""

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MOST_WIDTH:
            raise ConfigError(f"network.width must lie in 1…{MOST_WIDTH}, got {self.width}")
        if not 0.0 <= self.epsilon < 1.0:
            raise ConfigError(f"network.epsilon must lie in [0, 1), got {self.epsilon}")
        if not -50.0 <= self.patience <= 50.0:
            raise ConfigError(f"network.patience is a log-odds between −50 and 50, got {self.patience}")


@dataclass(slots=True)
class Choice:
    """Actions of the policy and its estimates, per environment."""

    actions: Tensor  # [E, 8] int64
    log_probs: Tensor  # [E, 8] per head; 0 where a head had only one option
    values: Tensor  # [E]
    entropy: Tensor  # [E] of the op head, as a fraction of the maximum


@dataclass(slots=True)
class Evaluation:
    """Current estimates of the policy for earlier actions, [*, …]."""

    log_probs: Tensor  # per head
    entropy: Tensor  # per head
    values: Tensor  # in units of return
    raw_values: Tensor  # normalised, as output by the value head


class TamiyoNetwork(nn.Module):
    """The policy network. Its inputs are tensors only."""

    mean: Tensor
    std: Tensor
    obs_count: Tensor
    obs_mean: Tensor
    obs_std: Tensor

    def __init__(self, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or NetworkConfig()
        d = config.width
        self.slot_encoder = nn.Sequential(
            _linear(PER_SLOT, d), nn.ReLU(inplace=True), _linear(d, d), nn.ReLU(inplace=True)
        )
        self.state_encoder = nn.Sequential(
            _linear(BASE + 2 * d, d), nn.ReLU(inplace=True), _linear(d, d), nn.ReLU(inplace=True)
        )
        self.op_head = nn.Sequential(_linear(d, d), nn.ReLU(inplace=True), _linear(d, NUM_OPS, gain=0.01))
        last = self.op_head[-1]
        assert isinstance(last, nn.Linear)
        nn.init.constant_(last.bias[Op.WAIT], config.patience)
        self.value_head = nn.Sequential(_linear(d, d), nn.ReLU(inplace=True), _linear(d, 1, gain=0.1))
        self.op_embedding = nn.Embedding(NUM_OPS, d)
        self.from_state, self.from_slot = _linear(d, d), _linear(d, d)
        self.slot_score = _linear(d, 1, gain=0.01)
        self.choices = _linear(d, sum(_SIZES), gain=0.01)
        # statistics of returns: the value head predicts normalised values, whatever the reward's unit
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))
        if config.standardise:  # statistics of observations: environment columns, then slot columns
            self.register_buffer("obs_count", torch.zeros(()))
            self.register_buffer("obs_mean", torch.zeros(BASE + PER_SLOT))
            self.register_buffer("obs_std", torch.ones(BASE + PER_SLOT))

    # -- components

    def _encode(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encodings of the state [*, D] and of every slot [*, S, D]."""
        base, slots = obs[..., :BASE], obs[..., BASE:].contiguous().unflatten(-1, (-1, PER_SLOT))
        is_real = slots[..., _ENABLED, None]  # [*, S, 1] 1 or 0; padded slots are not enabled
        if self.config.standardise:
            base = self._standardised(base, slice(BASE))
            slots = self._standardised(slots, slice(BASE, None))
        slots = self.slot_encoder(slots) * is_real  # encodings are ≥ 0, so 0 changes neither sum nor maximum
        count = is_real.sum(-2).clamp(min=1.0)
        return self.state_encoder(torch.cat([base, slots.sum(-2) / count, slots.amax(-2)], -1)), slots

    def _standardised(self, obs: Tensor, columns: slice) -> Tensor:
        """Return these columns in standard deviations from their means, clipped."""
        deviation = (obs - self.obs_mean[columns]) / self.obs_std[columns].clamp(min=LEAST_DEVIATION)
        return deviation.clamp_(-MOST_DEVIATION, MOST_DEVIATION)

    def _logits(self, state: Tensor, slots: Tensor, op: Tensor, slot: Tensor, widest: int) -> Tensor:
        """Return the logits of every head given op and slot, padded: [*, 8, W]."""
        conditional = self._conditioned_slots(state, slots, op)
        return self._padded(self.op_head(state), self.slot_score(conditional).squeeze(-1), conditional, slot, widest)

    def _conditioned_slots(self, state: Tensor, slots: Tensor, op: Tensor) -> Tensor:
        """Return slot encodings conditioned on the environment's state and on the op: [*, S, D]."""
        context = self.from_state(state) + self.op_embedding(op)  # [*, D]
        return F.relu(self.from_slot(slots).add_(context[..., None, :]), inplace=True)

    def _padded(self, ops: Tensor, scores: Tensor, conditional: Tensor, slot: Tensor, widest: int) -> Tensor:
        """Return the logits of all heads in one tensor; the conditional heads are evaluated at the chosen slot."""
        index = slot[..., None, None].expand(*slot.shape, 1, conditional.shape[-1])
        chosen = self.choices(conditional.gather(-2, index).squeeze(-2))
        sizes = (scores.shape[-1], *_SIZES, NUM_OPS)
        return padded(torch.cat([scores, chosen, ops], -1), sizes, widest)

    def _value(self, state: Tensor) -> Tensor:
        return self.value_head(state).squeeze(-1)

    # -- acting and evaluation

    @torch.no_grad()
    def act(self, obs: Tensor, masks: Tensor, layout: MaskLayout, uniform: Tensor | None) -> Choice:
        """Return actions for every environment, sampled with `uniform` [E, 8] in [0, 1), or the likeliest ones if
        None."""
        masks = known_blueprints(masks, layout)
        state, slots = self._encode(obs)
        epsilon = self.config.epsilon

        def draw(log_probs: Tensor, head: Head | slice) -> Tensor:
            return likeliest(log_probs) if uniform is None else pick(log_probs, uniform[..., head])

        ops = self.op_head(state)
        op = draw(log_distribution(ops, masks[..., layout.op], epsilon), Head.OP)
        conditional = self._conditioned_slots(state, slots, op)
        scores = self.slot_score(conditional).squeeze(-1)
        slot = draw(log_distribution(scores, slot_given_op(masks, layout, op), epsilon), Head.SLOT)
        logits = self._padded(ops, scores, conditional, slot, layout.widest)
        mask = conditioned(masks, layout, op, slot)
        log_probs = log_distribution(logits, mask, epsilon)
        rest = draw(log_probs[..., _GIVEN_SLOT, : layout.widest_given_slot], _GIVEN_SLOT)
        actions = torch.cat([slot[..., None], rest, op[..., None]], -1)
        chosen = log_probs.gather(-1, actions[..., None]).squeeze(-1)
        values = self._value(state) * self.std + self.mean
        op_entropy = entropy(log_probs[..., Head.OP, :NUM_OPS], mask[..., Head.OP, :NUM_OPS])
        return Choice(actions, chosen, values, op_entropy)

    @torch.no_grad()
    def probabilities(self, obs: Tensor, masks: Tensor, actions: Tensor, layout: MaskLayout) -> Tensor:
        """Return the probability of every option [N, 8, W].

        Those of slots are given the op in `actions`, the others given op and slot. A head that the op does not read has
        one option.
        """
        masks = known_blueprints(masks, layout)
        state, slots = self._encode(obs)
        op, slot = actions[..., Head.OP], actions[..., Head.SLOT]
        logits = self._logits(state, slots, op, slot, layout.widest)
        return log_distribution(logits, conditioned(masks, layout, op, slot), self.config.epsilon).exp()

    def evaluate(self, obs: Tensor, masks: Tensor, actions: Tensor, layout: MaskLayout) -> Evaluation:
        """Evaluate actions [*, 8] taken at these observations and masks."""
        masks = known_blueprints(masks, layout)
        state, slots = self._encode(obs)
        op, slot = actions[..., Head.OP], actions[..., Head.SLOT]
        mask = conditioned(masks, layout, op, slot)
        log_probs = log_distribution(self._logits(state, slots, op, slot, layout.widest), mask, self.config.epsilon)
        chosen = log_probs.gather(-1, actions[..., None]).squeeze(-1)
        raw = self._value(state)
        return Evaluation(chosen, entropy(log_probs, mask), raw * self.std + self.mean, raw)

    @torch.no_grad()
    def observe(self, obs: Tensor) -> None:
        """Update the statistics by which observations are standardised with those of one more rollout, [N, F].

        All rollouts have the same weight. Without `standardise` nothing is done.
        """
        if not self.config.standardise:
            return
        slots = obs[:, BASE:].reshape(-1, PER_SLOT)
        parts = obs[:, :BASE], slots[slots[:, _ENABLED] > 0]
        mean = torch.cat([part.mean(0) for part in parts])
        var = torch.cat([part.var(0, correction=0) for part in parts])
        share = 1.0 / (float(self.obs_count) + 1.0)
        change = mean - self.obs_mean
        if self.obs_count:
            var = (1 - share) * self.obs_std.square() + share * var + share * (1 - share) * change.square()
        self.obs_count += 1.0
        self.obs_mean += share * change
        self.obs_std.copy_(var.sqrt())

    @torch.no_grad()
    def renormalise(self, mean: float, std: float) -> None:
        """Set the mean and standard deviation of returns without changing the value head's predictions."""
        last = self.value_head[-1]
        assert isinstance(last, nn.Linear)
        last.weight *= self.std / std
        last.bias.copy_((self.std * last.bias + self.mean - mean) / std)
        self.mean.fill_(mean)
        self.std.fill_(std)


def known_blueprints(masks: Tensor, layout: MaskLayout) -> Tensor:
    """Return masks without blueprints unknown to the network, and without GERMINATE where no other would fit."""
    extra = layout.blueprints - len(BLUEPRINTS)
    if extra <= 0:
        return masks
    masks = masks.clone()
    takes = masks[..., layout.blueprint_by_slot].unflatten(-1, (layout.slots, layout.blueprints))
    takes[..., len(BLUEPRINTS) :] = False
    by_op = masks[..., layout.slot_by_op].unflatten(-1, (NUM_OPS, layout.slots))
    by_op[..., Op.GERMINATE, :] &= takes.any(-1)
    ops = masks[..., layout.op]  # a view, as the two above
    ops[..., Op.GERMINATE] &= by_op[..., Op.GERMINATE, :].any(-1)
    ops[..., Op.WAIT] |= ~ops.any(-1)  # at least one op stays legal
    return masks


def _linear(inputs: int, outputs: int, gain: float = float(np.sqrt(2))) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def log_distribution(logits: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """Return log((1 − ε)·softmax + ε·uniform) over the legal options [*, W]; −inf elsewhere. At least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    masked = torch.where(mask, logits, -torch.inf)
    if not epsilon:
        return torch.log_softmax(masked, dim=-1)
    share = epsilon / mask.sum(-1, keepdim=True)  # added everywhere, which avoids log(0)
    mixed = torch.add(share, torch.softmax(masked, dim=-1), alpha=1 - epsilon)
    return torch.where(mask, mixed.log(), -torch.inf)


def entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the entropy [*] as a fraction of its maximum; 0 where only one option is legal."""
    safe = torch.where(mask, log_probs, 0.0)
    h = -(safe.exp() * safe).sum(-1)  # illegal options contribute 1·0
    count = mask.sum(-1)
    return torch.where(count > 1, h / count.clamp(min=2).log(), 0.0)


def pick(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the options [*] that the numbers `uniform` [*] in [0, 1) select.

    Options of probability 0 are never picked.
    """
    cdf = log_probs.exp().cumsum(-1, dtype=torch.float64)
    return (cdf <= (uniform * cdf[..., -1])[..., None]).sum(-1)


def likeliest(log_probs: Tensor) -> Tensor:
    """Return the options [*] of the highest probability."""
    return log_probs.argmax(-1)
