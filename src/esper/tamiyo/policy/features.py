"""Observations of the policy: named columns, computed by a fixed number of array operations for any E and S.

Every column is bounded by a fixed formula, so no running normaliser is needed. Three terms recur:

    soft s (x)   x / (|x| + s): linear around 0, one half at s, always within ±1
    size (r)     log2(1 + r) / 8, at most 1: the unit in which rent is charged
    −1           in a column that is otherwise ≥ 0: never measured. A signed column is 0 then, and the
                 column named in its meaning tells both cases apart

Environment columns come first, then the slots one after another: `obs[:, BASE:].reshape(E, S, PER_SLOT)`.
`feature_table.py` defines the columns and their order. Code here addresses them by name only, so a column can be
moved in the table without a change here.

Legend: E environments, S slots, B blueprints, F features, P features per slot, K slot columns that change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import log2
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from esper.leyline.actions import BLUEPRINTS, SPEED_TICKS
from esper.leyline.errors import ConfigError
from esper.leyline.slot_table import HISTORY, Bools, Floats, Ints, SlotTable, seed_macs
from esper.leyline.stages import COOLDOWN_TICKS, COOLING, NUM_STAGES, PERMISSIVE, SeedStage, Thresholds
from esper.tamiyo.policy import feature_table as columns
from esper.tamiyo.policy.feature_table import (
    BASE,
    ENV_COLUMN,
    ENV_FEATURES,
    PER_SLOT,
    SLOT_COLUMN,
    SLOT_FEATURES,
    Feature,
)

Float32 = npt.NDArray[np.float32]
Stage = SeedStage

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
    def constants(self) -> Float32:
        """[S, P] the slot columns that do not change: width, depth, and the size of every blueprint; 0 elsewhere."""
        row = np.zeros((len(self.slot_width), PER_SLOT), dtype=np.float32)
        row[:, SLOT_COLUMN["width"]] = np.minimum(np.log2(np.maximum(self.slot_width, 1)) / 12, 1)
        row[:, SLOT_COLUMN["depth"]] = self.slot_depth
        row[:, _PRICE_PARAMS] = _size(np.asarray(self.slot_params)[:, _PLANTABLE] / self.host_params)
        row[:, _PRICE_MACS] = _size(np.asarray(self.slot_macs)[:, _PLANTABLE] / self.host_macs)
        return row

    @cached_property
    def per_host(self) -> Float32:
        """[2, 1, 1] factors that convert parameters and multiply-adds to fractions of the host's."""
        return np.array([1 / self.host_params, 1 / self.host_macs], dtype=np.float32)[:, None, None]

    @cached_property
    def soft_scale(self) -> Float32:
        """[K, 1, 1] scale of every softened slot column, in the unit of its raw values."""
        scales = [s.scale * (self.quality_span if s.of_quality else 1) for s in SOFT_SLOT.values()]
        return np.array(scales, dtype=np.float32)[:, None, None]


def num_features(slots: int) -> int:
    """Return the number of columns F of an observation."""
    return BASE + slots * PER_SLOT


def feature_names(slots: int) -> list[str]:
    """Return the names of all columns [F]. Names of slot columns start with the slot's number."""
    return [f.name for f in ENV_FEATURES] + [f"slot{s}.{f.name}" for s in range(slots) for f in SLOT_FEATURES]


class Soft(NamedTuple):
    """Definition of a softened slot column: scale, value that stands for unmeasured, and raw value."""

    scale: float
    of_quality: bool = False
    unmeasured: float = 0.0
    raw: Callable[[SlotTable, ObsContext], Floats | Ints] | None = None
    """Function that returns the raw values [E, S]; None: the column of the same name in the table."""


SOFT_SLOT: dict[str, Soft] = {
    "dwell": Soft(10),
    "dwell_left": Soft(5, raw=lambda t, c: np.maximum(c.dwell_needed.take(t.stage) - t.dwell, 0)),
    "age": Soft(20),
    "gain_since_birth": Soft(0.1, True, raw=lambda t, _: t.quality[:, None] - t.quality_birth),
    "gain_since_stage": Soft(0.1, True, raw=lambda t, _: t.quality[:, None] - t.quality_stage),
    "below_seed_best": Soft(0.1, True, raw=lambda t, _: t.quality_best - t.quality[:, None]),
    "contribution": Soft(0.1, True),
    "contribution_bound": Soft(
        0.1, True, raw=lambda t, c: t.contribution - np.float32(c.thresholds.z) * t.contribution_se
    ),
    "contribution_se": Soft(0.02, True, -1),
    "contribution_age": Soft(
        3, False, -1, raw=lambda t, _: np.where(t.contribution_age < 0, np.nan, t.contribution_age)
    ),
    "contribution_velocity": Soft(0.05, True),
    "prospect": Soft(0.1, True),
    "prospect_se": Soft(0.02, True, -1),
    "interaction": Soft(0.1, True),
    "grad_norm": Soft(1, False, -1),
    "grad_ratio": Soft(1, False, -1),
}
_SOFT_FILL = np.array([s.unmeasured for s in SOFT_SLOT.values()], dtype=np.float32)[:, None, None]
_ENV_SOFT = {"overfit": 0, "quality_slope": 0, "live_gain": 0, "below_best": -1, "seeds_so_far": 0}
"""Softened environment columns, with the values that stand for unmeasured."""
_ENV_SOFT_FILL = np.array(list(_ENV_SOFT.values()), dtype=np.float32)[:, None]


def _columns(group: Iterable[Feature | str], column: Mapping[str, int]) -> Ints:
    """Return the numbers of these columns."""
    return np.array([column[f if isinstance(f, str) else f.name] for f in group])


def _index(group: Iterable[Feature | str], column: Mapping[str, int]) -> slice | Ints:
    """Return an index of these columns: a slice, which is faster, if they are adjacent."""
    numbers = _columns(group, column)
    is_run = np.array_equal(numbers, np.arange(numbers[0], numbers[0] + len(numbers)))
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if is_run else numbers


_QUALITY, _VAL_LOSS = _index(columns.QUALITY, ENV_COLUMN), _index(columns.VAL_LOSS, ENV_COLUMN)
_ENV_SIZES = _index(["params", "macs"], ENV_COLUMN)
_ENV_SOFT_INDEX = _index(_ENV_SOFT, ENV_COLUMN)
_LAST_OP = _columns(columns.LAST_OP, ENV_COLUMN)  # [ops]
_SHARES = {
    "share_free": Stage.DORMANT, "share_training": Stage.TRAINING, "share_blending": Stage.BLENDING,
    "share_holding": Stage.HOLDING, "share_fossilized": Stage.FOSSILIZED,
}  # fmt: skip
_SHARE_INDEX = _index(_SHARES, ENV_COLUMN)
_SHARE_STAGES = np.array(list(_SHARES.values()))

_STAGE = _columns(columns.STAGE, SLOT_COLUMN)  # [stages]
_BLUEPRINT = _columns([columns.BLUEPRINT[0], *columns.BLUEPRINT], SLOT_COLUMN)  # [B]; noop has no column of its own
_OPERATOR = _columns(columns.OPERATOR, SLOT_COLUMN)  # [operators]
_PRICE_PARAMS = _index(columns.PRICE_PARAMS, SLOT_COLUMN)
_PRICE_MACS = _index(columns.PRICE_MACS, SLOT_COLUMN)
_PLANTABLE = slice(1, len(BLUEPRINTS))  # all built-in blueprints except noop
_LIVE = _index(columns.LIVE, SLOT_COLUMN)
_PLANE = {f.name: k for k, f in enumerate(columns.LIVE)}
_MAY = _index(columns.MAY, _PLANE)
_SIZES = _index(["params", "macs"], _PLANE)
_SOFT = _index(SOFT_SLOT, _PLANE)

_POWERS = (np.arange(HISTORY, dtype=np.float64) - (HISTORY - 1))[:, None] ** np.arange(3)  # of the epoch, current = 0
_SHOWN_HISTORY = slice(-2, -6, -1)  # 1, 2, 3, 4 epochs ago
_COOLING_STAGES = slice(COOLING[0], COOLING[-1] + 1)
_BLENDING = int(Stage.BLENDING)  # numpy compares with a plain int faster than with an enum


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


def padded_features(obs: Float32, slots: int) -> Float32:
    """Return observations [E, F] for `slots` slots. The columns of added slots are 0, so they are not enabled."""
    if obs.shape[1] == num_features(slots):
        return obs
    out = np.zeros((len(obs), num_features(slots)), dtype=np.float32)
    out[:, : obs.shape[1]] = obs
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


def _fill(x: Floats, value: Floats | float) -> None:
    """Replace NaN by `value` in place."""
    np.copyto(x, value, where=np.isnan(x))


# --- environment columns


def _env_columns(table: SlotTable, context: ObsContext, macs: Ints) -> Float32:
    """Return the environment columns [BASE, E]."""
    at = ENV_COLUMN
    envs = table.num_envs
    cols = np.zeros((BASE, envs), dtype=np.float32)
    steps_left = np.maximum(context.horizon - table.step, 0)
    cols[at["time"]] = 1 - steps_left / context.horizon
    cols[at["steps_left"]] = np.minimum(np.log2(1 + steps_left) / 10, 1)

    quality = np.vstack([table.quality, table.quality_history[:, _SHOWN_HISTORY].T], dtype=np.float32)
    quality -= context.quality_zero
    quality /= context.quality_span
    np.clip(quality, 0, 1, out=quality)
    _fill(quality, -1)
    cols[_QUALITY] = quality

    loss = np.vstack([table.val_loss, table.loss_history[:, _SHOWN_HISTORY].T], dtype=np.float32)
    loss /= context.loss_unit
    np.maximum(loss, 0, out=loss)
    np.minimum(np.log1p(loss, out=loss) / 7, 1, out=loss)
    _fill(loss, -1)
    cols[_VAL_LOSS] = loss

    span = context.quality_span
    cols[at["overfit"]] = (table.val_loss - table.train_loss) / (0.1 * context.loss_unit)
    cols[at["quality_slope"]] = _slope(table.quality_history) / (0.01 * span)
    cols[at["live_gain"]] = (table.quality - table.committed_quality) / (0.1 * span)
    cols[at["live_gain_known"]] = ~np.isnan(cols[at["live_gain"]])
    cols[at["below_best"]] = (table.quality_best_env - table.quality) / (0.1 * span)
    cols[at["seeds_so_far"]] = table.next_serial / 5
    soft = _soft(cols[_ENV_SOFT_INDEX], 1.0)
    _fill(soft, _ENV_SOFT_FILL)
    cols[_ENV_SOFT_INDEX] = soft

    added = table.params.sum(axis=1)
    sizes = np.array([added, macs.sum(axis=1)], dtype=np.float32)
    sizes *= context.per_host[..., 0]
    cols[_ENV_SIZES] = _size(sizes)
    budget = context.params_budget
    cols[at["budget_left"]] = np.clip(1 - (context.host_params + added) / budget, -1, 1) if budget else 1
    cols[at["has_budget"]] = budget > 0
    cols[at["host_params"]] = min(log2(context.host_params) / 32, 1)
    cols[at["host_macs"]] = min(log2(context.host_macs) / 40, 1)

    count = _stage_counts(table)  # [stages, E]
    enabled = np.maximum(count.sum(axis=0), 1)
    cols[_SHARE_INDEX] = count[_SHARE_STAGES] / enabled
    cols[at["share_cooling"]] = count[_COOLING_STAGES].sum(axis=0) / enabled

    cols[_LAST_OP[table.last_op], np.arange(envs)] = 1
    return cols


def _slope(history: Floats) -> Floats:
    """Return [E] the slope per epoch of the least-squares line through the finite values; NaN below two of them."""
    finite = np.isfinite(history)
    n, x, xx = (finite @ _POWERS).T
    y, xy, _ = (np.where(finite, history, 0) @ _POWERS).T
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
    view[..., _LIVE] = _live_planes(table, context, legal, macs).transpose(1, 2, 0)


def _unchanging(takes: Bools, context: ObsContext) -> Float32:
    """Return one row [S·P] for all environments: sizes and prices, −1 for blueprints that do not fit, 0 elsewhere."""
    row = context.constants.copy()
    fits = takes[:, _PLANTABLE]
    for prices in (_PRICE_PARAMS, _PRICE_MACS):
        row[:, prices] = np.where(fits, row[:, prices], -1)
    return row.reshape(-1)


@lru_cache(maxsize=16)
def _slot_starts(envs: int, slots: int) -> Ints:
    """Return [E, S] the index of each slot's first column in the flattened observation."""
    return np.arange(envs)[:, None] * num_features(slots) + BASE + np.arange(slots) * PER_SLOT


def _write_one_hots(flat: Float32, table: SlotTable) -> None:
    """Write stage, blueprint and operator as one-hots into columns that are 0."""
    start = _slot_starts(*table.stage.shape)
    built_in = (table.blueprint > 0) & (table.blueprint < len(BLUEPRINTS))
    flat[start + _STAGE[table.stage]] = 1
    flat[start + _BLUEPRINT[np.where(built_in, table.blueprint, 0)]] = built_in.astype(np.float32)
    flat[start + _OPERATOR[np.maximum(table.operator, 0)]] = (table.operator >= 0).astype(np.float32)


def _live_planes(table: SlotTable, context: ObsContext, legal: Bools, macs: Ints) -> Float32:
    """Return the columns that change from step to step [K, E, S], one contiguous plane per column."""
    at = _PLANE
    planes = np.empty((len(columns.LIVE), *table.stage.shape), dtype=np.float32)
    planes[_MAY] = legal[:, 1:].transpose(1, 0, 2)
    planes[at["enabled"]] = table.enabled
    planes[at["alpha"]] = table.alpha
    planes[at["alpha_target"]] = table.alpha_to
    ticks_left = np.maximum(table.ramp_len - table.ramp_pos, 0)
    slope = np.subtract(table.alpha_to, table.alpha_from, out=planes[at["alpha_slope"]])
    slope /= np.maximum(table.ramp_len, 1)
    slope *= (table.stage == _BLENDING) & (ticks_left > 0)
    planes[at["ramp_left"]] = np.minimum(ticks_left, SPEED_TICKS[-1]) / np.float32(SPEED_TICKS[-1])
    planes[at["cooldown"]] = table.cooldown / np.float32(COOLDOWN_TICKS)
    planes[at["grad_health"]] = table.grad_health
    _fill(planes[at["grad_health"]], -1)

    size = np.array([table.params, macs], dtype=np.float32)
    size *= context.per_host
    size += 1
    np.log(size, out=size)
    size *= 1 / (SIZE_OCTAVES * np.log(2))
    planes[_SIZES] = np.minimum(size, 1, out=size)

    for name, column in SOFT_SLOT.items():
        planes[at[name]] = getattr(table, name) if column.raw is None else column.raw(table, context)
    planes[at["velocity_known"]] = ~np.isnan(planes[at["contribution_velocity"]])
    planes[at["interaction_known"]] = ~np.isnan(planes[at["interaction"]])
    soft = _soft(planes[_SOFT], context.soft_scale)
    _fill(soft, _SOFT_FILL)
    planes[_SOFT] = soft
    return planes
