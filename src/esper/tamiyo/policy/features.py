"""Observations of the policy: named columns, computed by a fixed number of array operations for any E and S.

Every column is bounded by a fixed formula, so no running normaliser is needed. Three terms recur:

    soft s (x)   x / (|x| + s): linear around 0, one half at s, always within ±1
    size (r)     log2(1 + r) / 8, at most 1: the unit in which rent is charged
    −1           in a column that is otherwise ≥ 0: never measured. A signed column is 0 then, and the
                 column named in its meaning tells both cases apart

Environment columns come first, then the slots one after another: `obs[:, BASE:].reshape(E, S, PER_SLOT)`.
Slot columns form three blocks, in the order of their cost: one-hots, constants, columns that change.

Legend: E environments, S slots, B blueprints, F features, P features per slot, W epochs of history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import log2
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from esper.leyline.actions import BLUEPRINTS, NUM_OPS, SPEED_TICKS
from esper.leyline.costs import seed_macs
from esper.leyline.errors import ConfigError
from esper.leyline.slot_table import HISTORY, Bools, Floats, Ints, SlotTable
from esper.leyline.stages import COOLDOWN_TICKS, COOLING, NUM_STAGES, PERMISSIVE, SeedStage, Thresholds
from esper.tamiyo.policy.feature_table import FEATURES, Feature

__all__ = [
    "BASE",
    "FEATURES",
    "PER_SLOT",
    "Feature",
    "ObsContext",
    "batch_obs_to_features",
    "feature_names",
    "num_features",
]

Float32 = npt.NDArray[np.float32]
Stage = SeedStage

ENV_FEATURES = tuple(f for f in FEATURES if f.scope == "env")
SLOT_FEATURES = tuple(f for f in FEATURES if f.scope == "slot")
BASE, PER_SLOT = len(ENV_FEATURES), len(SLOT_FEATURES)
ENV_COLUMN = {f.name: i for i, f in enumerate(ENV_FEATURES)}
SLOT_COLUMN = {f.name: i for i, f in enumerate(SLOT_FEATURES)}

NUM_PLANTABLE = len(BLUEPRINTS) - 1  # all built-in blueprints except noop
SIZE_OCTAVES = 8.0
"""`size` saturates at a ratio of 2**8 to the host."""
HUGE = 1e6  # soft is 1 beyond it; clipping avoids inf / inf for infinite gradients


@dataclass(frozen=True, eq=False, kw_only=True)
class ObsContext:
    """What the policy observes of a host besides the table: sizes, prices and limits. Constant during a run."""

    horizon: int
    """Steps per episode, ≥ 1."""
    host_params: int
    """Parameters of the host without seeds, ≥ 1."""
    host_macs: int
    """Multiply-adds of the host per sample, ≥ 1."""
    slot_width: Ints  # [S] channels of the features
    slot_params: Ints  # [S, B] parameters that each blueprint would add
    slot_macs: Ints  # [S, B]
    slot_depth: Floats  # [S] 0…1 in the order of the forward pass
    params_budget: int = 0
    """Maximum number of parameters of host and seeds together; 0 for no limit."""
    chance_loss: float | None = None
    """Loss of guessing, in which losses are expressed; None leaves them unscaled."""
    quality_zero: float = 0.0
    quality_span: float = 1.0
    """Qualities are shown as (quality − zero) / span. Accuracies need no change of the defaults."""
    thresholds: Thresholds = PERMISSIVE
    """Thresholds of the gates: minimum dwell times, and z of a contribution's lower bound."""

    def __post_init__(self) -> None:
        slots = len(self.slot_width)
        if min(self.horizon, self.host_params, self.host_macs, slots) < 1 or not self.quality_span > 0:
            raise ConfigError(
                "horizon, host_params, host_macs, the number of slots and quality_span must be positive, got "
                f"{self.horizon}, {self.host_params}, {self.host_macs}, {slots} and {self.quality_span}"
            )
        shapes = [np.shape(a) for a in (self.slot_params, self.slot_macs, self.slot_depth)]
        blueprints = shapes[0][-1] if shapes[0] else 0
        if shapes != [(slots, blueprints), (slots, blueprints), (slots,)] or blueprints < len(BLUEPRINTS):
            raise ConfigError(
                f"for {slots} slots slot_params and slot_macs must be [{slots}, B] with B ≥ {len(BLUEPRINTS)} "
                f"and slot_depth [{slots}], got {', '.join(map(str, shapes))}"
            )

    @property
    def loss_unit(self) -> float:
        """Unit of losses: `chance_loss`, or 1 if there is none."""
        return self.chance_loss or 1.0

    @cached_property
    def dwell_needed(self) -> Ints:
        """[stages] number of epochs that the gate out of each stage requires."""
        need = np.zeros(NUM_STAGES, dtype=np.int32)
        need[[Stage.TRAINING, Stage.BLENDING]] = self.thresholds.blend_dwell, self.thresholds.hold_dwell
        return need

    @cached_property
    def static(self) -> Float32:
        """[S, 2 + 2·12] width, depth, and the size of every built-in blueprint in parameters and multiply-adds."""
        plantable = slice(1, len(BLUEPRINTS))
        width = np.minimum(np.log2(np.maximum(self.slot_width, 1)) / 12, 1)
        params = _size(np.asarray(self.slot_params)[:, plantable] / self.host_params)
        macs = _size(np.asarray(self.slot_macs)[:, plantable] / self.host_macs)
        return np.column_stack([width, self.slot_depth, params, macs]).astype(np.float32)

    @cached_property
    def per_host(self) -> Float32:
        """[2, 1, 1] factors that convert parameters and multiply-adds to fractions of the host's."""
        return np.array([1 / self.host_params, 1 / self.host_macs], dtype=np.float32)[:, None, None]

    @cached_property
    def soft_scale(self) -> Float32:
        """[K, 1, 1] scale of every softened slot column, in the unit of its raw values."""
        scales = [s.scale * (self.quality_span if s.of_quality else 1) for s in SOFT_SLOT.values()]
        return np.array(scales, dtype=np.float32)[:, None, None]


class Soft(NamedTuple):
    """Definition of a softened slot column: raw value, scale, and the value that stands for unmeasured."""

    raw: Callable[[SlotTable, ObsContext], Any]  # [E, S]
    scale: float
    of_quality: bool = False
    unmeasured: float = 0.0


SOFT_SLOT: dict[str, Soft] = {
    "dwell": Soft(lambda t, c: t.dwell, 10),
    "dwell_left": Soft(lambda t, c: np.maximum(c.dwell_needed.take(t.stage) - t.dwell, 0), 5),
    "age": Soft(lambda t, c: t.age, 20),
    "gain_since_birth": Soft(lambda t, c: t.quality[:, None] - t.quality_birth, 0.1, True),
    "gain_since_stage": Soft(lambda t, c: t.quality[:, None] - t.quality_stage, 0.1, True),
    "below_seed_best": Soft(lambda t, c: t.quality_best - t.quality[:, None], 0.1, True),
    "contribution": Soft(lambda t, c: t.contribution, 0.1, True),
    "contribution_bound": Soft(lambda t, c: t.contribution - np.float32(c.thresholds.z) * t.contribution_se, 0.1, True),
    "contribution_se": Soft(lambda t, c: t.contribution_se, 0.02, True, -1),
    "contribution_age": Soft(lambda t, c: np.where(t.contribution_age < 0, np.nan, t.contribution_age), 3, False, -1),
    "contribution_velocity": Soft(lambda t, c: t.contribution_velocity, 0.05, True),
    "prospect": Soft(lambda t, c: t.prospect, 0.1, True),
    "prospect_se": Soft(lambda t, c: t.prospect_se, 0.02, True, -1),
    "interaction": Soft(lambda t, c: t.interaction, 0.1, True),
    "grad_norm": Soft(lambda t, c: t.grad_norm, 1, False, -1),
    "grad_ratio": Soft(lambda t, c: t.grad_ratio, 1, False, -1),
}
_SOFT_FILL = np.array([s.unmeasured for s in SOFT_SLOT.values()], dtype=np.float32)[:, None, None]
_SOFT_INDEX = {name: k for k, name in enumerate(SOFT_SLOT)}
_LIVE = SLOT_COLUMN["may_germinate"]  # start of the block of changing columns
_PLANE = {name: column - _LIVE for name, column in SLOT_COLUMN.items() if column >= _LIVE}
_STATIC = slice(SLOT_COLUMN["width"], _LIVE)
_BLUEPRINT_AT, _OPERATOR_AT = SLOT_COLUMN["blueprint_conv_light"] - 1, SLOT_COLUMN["operator_add"]

_POWERS = (np.arange(HISTORY, dtype=np.float64) - (HISTORY - 1))[:, None] ** np.arange(3)  # of the epoch, current = 0
_SHOWN_HISTORY = slice(-2, -6, -1)  # 1, 2, 3, 4 epochs ago
_SHARE_STAGES = np.array([Stage.DORMANT, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED])
_COOLING_STAGES = slice(COOLING[0], COOLING[-1] + 1)
_BLENDING = int(Stage.BLENDING)  # numpy compares with a plain int faster than with an enum


def num_features(slots: int) -> int:
    """Return the number of columns F of an observation."""
    return BASE + slots * PER_SLOT


def feature_names(slots: int) -> list[str]:
    """Return the names of all columns [F]. Names of slot columns start with the slot's number."""
    return [f.name for f in ENV_FEATURES] + [f"slot{s}.{f.name}" for s in range(slots) for f in SLOT_FEATURES]


def batch_obs_to_features(
    table: SlotTable, context: ObsContext, *, legal: Bools, out: Float32 | None = None
) -> Float32:
    """Return the observations [E, F] of all environments, written into `out` if given.

    `legal` [E, O, S] holds the operations that the rules allow now; gates are not computed a second time.
    """
    envs, slots = table.stage.shape
    shape = (envs, num_features(slots))
    if len(context.slot_width) != slots:
        raise ConfigError(f"the context describes {len(context.slot_width)} slots, the table has {slots}")
    if out is None:
        out = np.empty(shape, dtype=np.float32)
    elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ConfigError(f"out must be a contiguous float32 array {shape}, got {out.dtype} {out.shape}")
    with np.errstate(invalid="ignore", over="ignore"):  # infinities are clipped or treated as unmeasured
        macs = seed_macs(table, context.slot_macs)
        out[:, :BASE] = _env_columns(table, context, macs).T
        _write_slots(out, table, context, legal, macs)
    return out


def _soft(x: Floats, scale: Floats | float) -> Floats:
    """Compute x / (|x| + scale) in place and return it."""
    np.clip(x, -HUGE, HUGE, out=x)
    below = np.abs(x)
    below += scale
    x /= below
    return x


def _size(ratio: Floats) -> Floats:
    """Return log2(1 + ratio) / 8, at most 1."""
    return np.minimum(np.log2(1 + ratio) / SIZE_OCTAVES, 1)


def _fill(x: Floats, value: Floats | float) -> Bools:
    """Replace NaN by `value` in place. Return where."""
    missing = np.isnan(x)
    np.copyto(x, value, where=missing)
    return missing


# --- environment columns


def _env_columns(table: SlotTable, context: ObsContext, macs: Ints) -> Float32:
    """Return the environment columns [BASE, E]."""
    at, envs = ENV_COLUMN, table.num_envs
    cols = np.zeros((BASE, envs), dtype=np.float32)
    left = np.maximum(context.horizon - table.step, 0)
    cols[at["time"]] = 1 - left / context.horizon
    cols[at["steps_left"]] = np.minimum(np.log2(1 + left) / 10, 1)

    quality = cols[at["quality"] : at["quality"] + 5]
    quality[0], quality[1:] = table.quality, table.quality_history[:, _SHOWN_HISTORY].T
    quality -= context.quality_zero
    quality /= context.quality_span
    np.clip(quality, 0, 1, out=quality)
    _fill(quality, -1)

    loss = cols[at["val_loss"] : at["val_loss"] + 5]
    loss[0], loss[1:] = table.val_loss, table.loss_history[:, _SHOWN_HISTORY].T
    loss /= context.loss_unit
    np.maximum(loss, 0, out=loss)
    np.minimum(np.log1p(loss, out=loss) / 7, 1, out=loss)
    _fill(loss, -1)

    span, soft = context.quality_span, cols[at["overfit"] : at["seeds_so_far"] + 1]
    soft[0] = (table.val_loss - table.train_loss) / (0.1 * context.loss_unit)
    soft[1] = _slope(table.quality_history) / (0.01 * span)
    soft[2] = (table.quality - table.committed_quality) / (0.1 * span)
    soft[3] = (table.quality_best_env - table.quality) / (0.1 * span)
    soft[4] = table.next_serial / 5
    unknown = _fill(_soft(soft, 1.0), _ENV_SOFT_FILL)
    cols[at["live_gain_known"]] = ~unknown[2]

    added = table.params.sum(axis=1)
    sizes = cols[at["params"] : at["macs"] + 1]
    sizes[0], sizes[1] = added, macs.sum(axis=1)
    sizes *= context.per_host[..., 0]
    sizes[:] = _size(sizes)
    budget = context.params_budget
    cols[at["budget_left"]] = np.clip(1 - (context.host_params + added) / budget, -1, 1) if budget else 1
    cols[at["has_budget"]] = budget > 0
    cols[at["host_params"]] = min(log2(context.host_params) / 32, 1)
    cols[at["host_macs"]] = min(log2(context.host_macs) / 40, 1)

    shares = cols[at["share_free"] : at["share_cooling"] + 1]
    count = _stage_counts(table)  # [stages, E]
    shares[:-1], shares[-1] = count[_SHARE_STAGES], count[_COOLING_STAGES].sum(axis=0)
    shares /= np.maximum(count.sum(axis=0), 1)

    cols[at["last_wait"] + table.last_op, np.arange(envs)] = 1
    return cols


_ENV_SOFT_FILL = np.array([0, 0, 0, -1, 0], dtype=np.float32)[:, None]


def _slope(history: Floats) -> Floats:
    """Return [E] the slope per epoch of the least-squares line through the finite values; NaN below two of them."""
    seen = np.isfinite(history)
    n, x, xx = (seen @ _POWERS).T
    y, xy, _ = (np.where(seen, history, 0) @ _POWERS).T
    spread = n * xx - x * x
    return np.asarray((n * xy - x * y) / np.where(spread > 0, spread, np.nan))


def _stage_counts(table: SlotTable) -> Floats:
    """Return [stages, E] the number of enabled slots in each stage."""
    envs = table.num_envs
    index = table.stage * np.intp(envs) + np.arange(envs)[:, None]
    counts = np.bincount(index.ravel(), table.enabled.ravel(), NUM_STAGES * envs)
    return np.asarray(counts, dtype=np.float64).reshape(NUM_STAGES, envs)


# --- slot columns


def _write_slots(out: Float32, table: SlotTable, context: ObsContext, legal: Bools, macs: Ints) -> None:
    envs, slots = table.stage.shape
    view = out[:, BASE:].reshape(envs, slots, PER_SLOT)  # [E, S, P], not a copy
    out[:, BASE:] = _unchanging(table.takes, context)
    _write_one_hots(out.reshape(-1), table)
    view[..., _LIVE:] = _live_planes(table, context, legal, macs).transpose(1, 2, 0)


def _unchanging(takes: Bools, context: ObsContext) -> Float32:
    """Return one row [S·P] for all environments: sizes and prices, −1 for blueprints that do not fit, 0 elsewhere."""
    row = np.zeros((len(takes), PER_SLOT), dtype=np.float32)
    row[:, _STATIC] = context.static
    plantable = takes[:, 1 : 1 + NUM_PLANTABLE]
    prices = row[:, _STATIC.start + 2 : _STATIC.stop].reshape(-1, 2, NUM_PLANTABLE)
    np.copyto(prices, -1, where=~plantable[:, None])
    return row.reshape(-1)


@lru_cache(maxsize=16)
def _slot_starts(envs: int, slots: int) -> Ints:
    """Return [E, S] the index of each slot's first column in the flattened observation."""
    return np.arange(envs)[:, None] * num_features(slots) + BASE + np.arange(slots) * PER_SLOT


def _write_one_hots(flat: Float32, table: SlotTable) -> None:
    """Write stage, blueprint and operator as one-hots into columns that are 0."""
    start = _slot_starts(*table.stage.shape)
    built_in = (table.blueprint > 0) & (table.blueprint <= NUM_PLANTABLE)
    flat[start + table.stage] = 1
    flat[start + (_BLUEPRINT_AT + np.where(built_in, table.blueprint, 1))] = built_in.astype(np.float32)
    flat[start + (_OPERATOR_AT + np.maximum(table.operator, 0))] = (table.operator >= 0).astype(np.float32)


def _live_planes(table: SlotTable, context: ObsContext, legal: Bools, macs: Ints) -> Float32:
    """Return the columns that change from step to step [K, E, S], one contiguous plane per column."""
    at = _PLANE
    planes = np.empty((PER_SLOT - _LIVE, *table.stage.shape), dtype=np.float32)
    planes[: NUM_OPS - 1] = legal[:, 1:].transpose(1, 0, 2)
    planes[at["enabled"]] = table.enabled
    planes[at["alpha"]] = table.alpha
    planes[at["alpha_target"]] = table.alpha_to
    left = np.maximum(table.ramp_len - table.ramp_pos, 0)
    slope = np.subtract(table.alpha_to, table.alpha_from, out=planes[at["alpha_slope"]])
    slope /= np.maximum(table.ramp_len, 1)
    slope *= (table.stage == _BLENDING) & (left > 0)
    planes[at["ramp_left"]] = np.minimum(left, SPEED_TICKS[-1]) / np.float32(SPEED_TICKS[-1])
    planes[at["cooldown"]] = table.cooldown / np.float32(COOLDOWN_TICKS)
    planes[at["grad_health"]] = table.grad_health
    _fill(planes[at["grad_health"]], -1)

    size = planes[at["params"] : at["macs"] + 1]
    size[0], size[1] = table.params, macs
    size *= context.per_host
    size += 1
    np.log(size, out=size)
    size *= 1 / (SIZE_OCTAVES * np.log(2))
    np.minimum(size, 1, out=size)

    soft = planes[at["dwell"] : at["grad_ratio"] + 1]
    for plane, column in zip(soft, SOFT_SLOT.values(), strict=True):
        plane[:] = column.raw(table, context)
    unknown = _fill(_soft(soft, context.soft_scale), _SOFT_FILL)
    planes[at["velocity_known"]] = ~unknown[_SOFT_INDEX["contribution_velocity"]]
    planes[at["interaction_known"]] = ~unknown[_SOFT_INDEX["interaction"]]
    return planes
