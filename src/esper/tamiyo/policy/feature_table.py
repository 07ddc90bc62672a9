"""Columns of an observation: name, meaning, formula and range, in the order in which a policy reads them.

`features.py` computes them by name and defines the terms *soft*, *size* and −1. A policy is valid only for the names
and the order with which it was trained. Groups of columns that are computed together have names of their own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from esper.leyline.actions import BLUEPRINTS, Op, Operator
from esper.leyline.stages import SeedStage


class Feature(NamedTuple):
    """One column of an environment or of each of its slots."""

    name: str
    scope: Literal["env", "slot"]
    meaning: str
    formula: str
    low: float
    high: float


def _env(name: str, meaning: str, formula: str, low: float = 0, high: float = 1) -> Feature:
    return Feature(name, "env", meaning, formula, low, high)


def _slot(name: str, meaning: str, formula: str, low: float = 0, high: float = 1) -> Feature:
    return Feature(name, "slot", meaning, formula, low, high)


_PLANTABLE = BLUEPRINTS[1:]  # noop cannot be chosen
_EARLIER = [(k, f"{k} epoch{'s' * (k > 1)} ago") for k in (1, 2, 3, 4)]

QUALITY = (
    _env("quality", "quality now", "(quality − zero) / span in 0…1, or −1", -1),
    *(_env(f"quality_{k}", f"quality {ago}", "as quality", -1) for k, ago in _EARLIER),
)
VAL_LOSS = (
    _env("val_loss", "validation loss, in losses of guessing", "ln(1 + loss / chance) / 7 ≤ 1, or −1", -1),
    *(_env(f"val_loss_{k}", f"validation loss {ago}", "as val_loss", -1) for k, ago in _EARLIER),
)
LAST_OP = tuple(_env(f"last_{op.name.lower()}", f"the last op was {op.name}", "0 or 1") for op in Op)
_ENV = (
    _env("time", "share of the episode that is over", "step / T"),
    _env("steps_left", "steps left, on a logarithmic scale", "log2(1 + T − step) / 10, at most 1"),
    *QUALITY,
    *VAL_LOSS,
    _env("overfit", "validation minus training loss; known with val_loss", "soft 0.1 ((val − train) / chance)", -1),
    _env("quality_slope", "trend of ten epochs; known with quality_1", "soft 0.01 (least-squares slope / span)", -1),
    _env("live_gain", "gain of uncommitted seeds; see live_gain_known", "soft 0.1 ((quality − committed) / span)", -1),
    _env("below_best", "how far quality lies below its best so far", "soft 0.1 ((best − quality) / span), or −1", -1),
    _env("seeds_so_far", "seeds planted in this episode", "soft 5 (seeds)"),
    _env("live_gain_known", "the host without its uncommitted seeds has been measured", "0 or 1"),
    _env("params", "parameters the seeds have added", "size (seed parameters / host parameters)"),
    _env("macs", "multiply-adds added by seeds from BLENDING on", "size (seed macs / host macs)"),
    _env("budget_left", "share of the parameter budget left; 1 without one", "1 − parameters / budget in −1…1", -1),
    _env("has_budget", "there is a parameter budget", "0 or 1"),
    _env("host_params", "parameters of the host", "log2(parameters) / 32, at most 1"),
    _env("host_macs", "multiply-adds of the host on one sample", "log2(macs) / 40, at most 1"),
    _env("share_free", "share of enabled slots that are DORMANT", "count / enabled"),
    _env("share_training", "share of enabled slots in TRAINING", "count / enabled"),
    _env("share_blending", "share of enabled slots in BLENDING", "count / enabled"),
    _env("share_holding", "share of enabled slots in HOLDING", "count / enabled"),
    _env("share_fossilized", "share of enabled slots that are FOSSILIZED", "count / enabled"),
    _env("share_cooling", "share of enabled slots that cool down", "count / enabled"),
    *LAST_OP,
)  # fmt: skip

STAGE = tuple(_slot(f"stage_{s.name.lower()}", f"the slot shows {s.name}", "0 or 1") for s in SeedStage)
BLUEPRINT = tuple(
    _slot(f"blueprint_{b}", f"the seed, or the one just pruned, is of blueprint {b}", "0 or 1") for b in _PLANTABLE
)
OPERATOR = tuple(_slot(f"operator_{o.name.lower()}", f"the seed joins by {o.name}", "0 or 1") for o in Operator)
PRICE_PARAMS = tuple(
    _slot(f"price_params_{b}", f"parameters of {b} here", "size (parameters / host), or −1: not taken", -1)
    for b in _PLANTABLE
)
PRICE_MACS = tuple(
    _slot(f"price_macs_{b}", f"multiply-adds of {b} here", "size (macs / host), or −1: not taken", -1)
    for b in _PLANTABLE
)
_PLACE = (
    _slot("width", "channels of the features here", "log2(channels) / 12, at most 1"),
    _slot("depth", "where the slot lies in the forward pass", "0 first … 1 last"),
)
MAY = tuple(_slot(f"may_{op.name.lower()}", f"rules and gates allow {op.name}", "0 or 1") for op in list(Op)[1:])
LIVE = (
    *MAY,
    _slot("enabled", "the slot is in use", "0 or 1"),
    _slot("alpha", "weight of the seed in the features", "alpha"),
    _slot("alpha_target", "value that alpha moves to", "alpha_to"),
    _slot("alpha_slope", "change of alpha per epoch while it moves", "(alpha_to − alpha_from) / ramp length", -1),
    _slot("ramp_left", "epochs left of the ramp that runs or waits", "epochs / 8"),
    _slot("cooldown", "epochs until a pruned slot is empty", "ticks / 7"),
    _slot("grad_health", "health of the seed's gradients", "health, or −1", -1),
    _slot("params", "parameters of this seed", "size (parameters / host)"),
    _slot("macs", "multiply-adds of this seed, from BLENDING on", "size (macs / host)"),
    _slot("dwell", "epochs in this stage", "soft 10 (epochs)"),
    _slot("dwell_left", "epochs that the next gate still requires", "soft 5 (required epochs − dwell)"),
    _slot("age", "epochs since germination", "soft 20 (epochs)"),
    _slot("gain_since_birth", "host quality since germination", "soft 0.1 ((quality − at birth) / span)", -1),
    _slot("gain_since_stage", "host quality since this stage began", "soft 0.1 ((quality − at its start) / span)", -1),
    _slot("below_seed_best", "how far quality lies below the seed's best", "soft 0.1 ((best − quality) / span)", -1),
    _slot("contribution", "quality with minus without; known with its se", "soft 0.1 (contribution / span)", -1),
    _slot("contribution_bound", "its lower bound, as gates see it", "soft 0.1 ((contribution − z · se) / span)", -1),
    _slot("contribution_se", "its standard error", "soft 0.02 (se / span), or −1", -1),
    _slot("contribution_age", "epochs since it was measured in this stage", "soft 3 (epochs), or −1", -1),
    _slot("contribution_velocity", "how it changes; see velocity_known", "soft 0.05 (velocity / span)", -1),
    _slot("prospect", "what it would add at full strength; known with its se", "soft 0.1 (prospect / span)", -1),
    _slot("prospect_se", "its standard error", "soft 0.02 (se / span), or −1", -1),
    _slot("interaction", "sum of pairwise interactions; see interaction_known", "soft 0.1 (interaction / span)", -1),
    _slot("grad_norm", "norm of the seed's gradient", "soft 1 (norm), or −1", -1),
    _slot("grad_ratio", "seed over host gradient, each per root parameter", "soft 1 (ratio), or −1", -1),
    _slot("velocity_known", "the contribution has been measured at least twice", "0 or 1"),
    _slot("interaction_known", "interactions have been measured", "0 or 1"),
)  # fmt: skip

FEATURES: tuple[Feature, ...] = (
    *_ENV, *STAGE, *BLUEPRINT, *OPERATOR, *_PLACE, *PRICE_PARAMS, *PRICE_MACS, *LIVE
)  # fmt: skip
ENV_FEATURES = tuple(f for f in FEATURES if f.scope == "env")
SLOT_FEATURES = tuple(f for f in FEATURES if f.scope == "slot")
BASE, PER_SLOT = len(ENV_FEATURES), len(SLOT_FEATURES)
ENV_COLUMN = {f.name: i for i, f in enumerate(ENV_FEATURES)}
SLOT_COLUMN = {f.name: i for i, f in enumerate(SLOT_FEATURES)}
