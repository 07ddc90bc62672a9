"""Why a policy decided as it did: probabilities of the alternatives, and which inputs moved the decision.

The influence of an input is the log-probability of the chosen action minus that with the input at its neutral value,
the mean of its column over all recorded steps. Above 0, the actual value made the action more likely.

The importance of a column is how much decisions change when its values are permuted among all recorded steps: the mean
Kullback-Leibler divergence, in nats, of the distributions of all heads of the chosen action. It measures what the
policy uses, not what would be useful.

Legend: N decisions, F features, S slots, W options of the widest head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS, HEAD_OPTIONS, RELEVANCE, Head, Op
from esper.leyline.errors import ConfigError
from esper.tamiyo.decision_record import DecisionRecord
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy.feature_table import BASE, ENV_FEATURES, PER_SLOT, SLOT_COLUMN, SLOT_FEATURES, Feature

_ENABLED = SLOT_COLUMN["enabled"]


@dataclass(frozen=True, slots=True)
class Influence:
    """How one input moved a decision."""

    name: str
    slot: str
    """Name of the slot; empty for inputs of the environment."""
    value: float
    neutral: float
    effect: float
    """Log-probability of the chosen action minus that with the neutral value."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision of a policy."""

    env: int
    step: int
    world: int
    op: str
    slot: str
    """Empty if the operation has none."""
    heads: dict[str, str]
    """Chosen option of every other head that the operation reads."""
    probability: float
    """Of the whole action."""
    value: float
    """Return that the policy expected."""
    ops: dict[str, float]
    """Probability of every legal operation."""
    slots: dict[str, float]
    """Probability of every legal slot, given the operation."""
    options: dict[str, dict[str, float]]
    """Probability of every legal option of the other heads, given operation and slot."""
    influences: list[Influence]
    """Strongest first."""


@dataclass(frozen=True, slots=True)
class Importance:
    """How much a policy uses one column."""

    feature: Feature
    low: float
    high: float
    sd: float
    nats: float

    def as_row(self) -> dict[str, str | float]:
        """Return the importance as plain data."""
        name = self.feature.name
        scope = self.feature.scope
        return {"name": name, "scope": scope, "low": self.low, "high": self.high, "sd": self.sd, "nats": self.nats}


def operations(record: DecisionRecord, env: int) -> dict[int, str]:
    """Return the operations of an environment other than WAIT, by step. None are known of one that is not recorded."""
    if not 0 <= env < len(record.facts.worlds):
        return {}
    ops = record.actions[: int(record.lengths[env]), env, Head.OP].tolist()
    return {step: Op(op).name for step, op in enumerate(ops, start=1) if op != Op.WAIT}


def explain(record: DecisionRecord, env: int, step: int) -> Explanation:
    """Explain the decision of environment `env` before epoch `step`, counted from 1."""
    envs = len(record.facts.worlds)
    if not 0 <= env < envs:
        raise ConfigError(f"decisions of environments 0 to {envs - 1} are recorded, got {env}")
    length = int(record.lengths[env])
    if not 1 <= step <= length:
        raise ConfigError(f"the episode of environment {env} has steps 1 to {length}, got {step}")
    network = record.network()
    layout = record.layout
    at = (step - 1, env)
    obs, masks, action = (f[at][None] for f in (record.obs, record.masks, record.actions))
    op, slot = Op(int(action[0, Head.OP])), int(action[0, Head.SLOT])
    chances = network.probabilities(obs, masks, action, layout)[0]  # [8, W]
    slot_names = record.facts.slots
    ops = _named([o.name for o in Op], chances[Head.OP])
    reads = RELEVANCE[op]
    heads = [h for h in Head if h not in (Head.OP, Head.SLOT) and reads[h]]
    options = {h.name.lower(): _named(_options(h), chances[h]) for h in heads}
    log_prob, value = _log_probs(network, record, obs, masks, action)
    return Explanation(
        env=env, step=step, world=record.facts.worlds[env], op=op.name,
        slot=slot_names[slot] if reads[Head.SLOT] else "",
        heads={h.name.lower(): _options(h)[int(action[0, h])] for h in heads}, probability=float(log_prob.exp()),
        value=float(value), ops=ops, slots=_named(slot_names, chances[Head.SLOT]) if reads[Head.SLOT] else {},
        options=options, influences=_influences(network, record, obs, masks, action),
    )  # fmt: skip


def _options(head: Head) -> tuple[str, ...]:
    return tuple(BLUEPRINTS if head == Head.BLUEPRINT else HEAD_OPTIONS[head] or ())


def _named(names: tuple[str, ...] | list[str], chances: Tensor) -> dict[str, float]:
    """Return the options of probability above 0, likeliest first."""
    probabilities = {name: float(p) for name, p in zip(names, chances.tolist(), strict=False) if p > 0}
    return dict(sorted(probabilities.items(), key=lambda item: -item[1]))


def _log_probs(
    network: TamiyoNetwork, record: DecisionRecord, obs: Tensor, masks: Tensor, actions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of whole actions [N] and the values [N]."""
    with torch.no_grad():
        rows = network.evaluate(obs, masks, actions, record.layout)
    return rows.log_probs.sum(-1), rows.values


def neutral_values(record: DecisionRecord) -> Tensor:
    """Return the mean of every column over all recorded steps [BASE + PER_SLOT], over enabled slots."""
    rows = record.obs[record.valid]
    slots = rows[:, BASE:].unflatten(-1, (-1, PER_SLOT))
    real = slots[..., _ENABLED] > 0
    return torch.cat([rows[:, :BASE].mean(0), slots[real].mean(0)])


def _influences(
    network: TamiyoNetwork, record: DecisionRecord, obs: Tensor, masks: Tensor, action: Tensor
) -> list[Influence]:
    neutral = neutral_values(record)
    slots = [s for s in range(record.layout.slots) if obs[0, BASE + s * PER_SLOT + _ENABLED] > 0]
    columns: list[tuple[int, Feature, str, float]] = [(i, f, "", float(neutral[i])) for i, f in enumerate(ENV_FEATURES)]
    for s in slots:
        first = BASE + s * PER_SLOT
        columns += [
            (first + i, f, record.facts.slots[s], float(neutral[BASE + i]))
            for i, f in enumerate(SLOT_FEATURES)
            if i != _ENABLED  # says which slots exist
        ]
    changed = obs.repeat(len(columns) + 1, 1)  # the last row is unchanged
    changed[torch.arange(len(columns)), torch.tensor([c[0] for c in columns])] = torch.tensor([c[3] for c in columns])
    rows = len(changed)
    log_probs, _ = _log_probs(network, record, changed, masks.expand(rows, -1), action.expand(rows, -1))
    effects = (log_probs[-1] - log_probs).tolist()
    influences = [
        Influence(f.name, slot, float(obs[0, at]), mean, effect)
        for (at, f, slot, mean), effect in zip(columns, effects, strict=False)
    ]
    return sorted(influences, key=lambda each: -abs(each.effect))


def importances(record: DecisionRecord, rng_seed: int = 0) -> list[Importance]:
    """Return the importance of every column, largest first."""
    network = record.network()
    layout = record.layout
    valid = record.valid
    obs, masks, actions = (f[valid] for f in (record.obs, record.masks, record.actions))
    before = network.probabilities(obs, masks, actions, layout)
    rng = np.random.default_rng(rng_seed)
    slots = obs[:, BASE:].unflatten(-1, (-1, PER_SLOT))
    real = slots[..., _ENABLED] > 0  # [N, S]

    def changed_by(permuted: Tensor) -> float:
        after = network.probabilities(permuted, masks, actions, layout)
        ratio = torch.where(before > 0, before / after.clamp(min=1e-30), 1.0)
        return float((before * ratio.log()).sum((-1, -2)).mean())

    ranking = []
    for i, feature in enumerate(ENV_FEATURES):
        permuted = obs.clone()
        permuted[:, i] = obs[torch.from_numpy(rng.permutation(len(obs))), i]
        ranking.append(_importance(feature, obs[:, i], changed_by(permuted)))
    for i, feature in enumerate(SLOT_FEATURES):
        values = slots[..., i][real]
        if i == _ENABLED:
            ranking.append(_importance(feature, values, 0.0))
            continue
        column = slots.clone()
        column[..., i][real] = values[torch.from_numpy(rng.permutation(len(values)))]
        ranking.append(_importance(feature, values, changed_by(torch.cat([obs[:, :BASE], column.flatten(1)], -1))))
    return sorted(ranking, key=lambda each: -each.nats)


def _importance(feature: Feature, values: Tensor, nats: float) -> Importance:
    return Importance(
        feature, float(values.min()), float(values.max()), float(values.std()) if len(values) > 1 else 0.0, nats
    )
