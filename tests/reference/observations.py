"""Reference for `batch_obs_to_features` and `compute_batch_masks`: one environment and one slot at a time.

It builds one report object per environment, loops over environments and slots in Python, writes single elements
into tensors, and stacks a few small mask tensors per environment at the end.

`benchmarks.observations` times these functions too. For a fair comparison, columns that stay 0 are not written for
an empty slot, a one-hot is one write, and constant prices are copied at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS, HEAD_OPTIONS, NUM_OPS, Head, Op, Operator
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import COOLING, SeedStage
from esper.tamiyo.policy.feature_table import BASE, ENV_COLUMN, PER_SLOT, SLOT_COLUMN
from esper.tamiyo.policy.features import ObsContext, num_features

SLOT_FIELDS = [f.name for f in fields(SlotTable) if f.metadata["axes"] == "ES"]
ENV_FIELDS = [f.name for f in fields(SlotTable) if f.metadata["axes"] in ("E", "EW")]


@dataclass(slots=True)
class Report:
    """One environment as plain Python: its values, its slots' values, and the legal operations [O][S]."""

    env: dict[str, Any]
    slots: list[dict[str, Any]]
    legal: list[list[bool]]


def reports(table: SlotTable, ops: Any) -> list[Report]:
    env_columns = {name: getattr(table, name).tolist() for name in ENV_FIELDS}
    slot_columns = {name: getattr(table, name).tolist() for name in SLOT_FIELDS}
    return [
        Report(
            env={name: column[e] for name, column in env_columns.items()},
            slots=[{name: column[e][s] for name, column in slot_columns.items()} for s in range(table.num_slots)],
            legal=ops[e].tolist(),
        )
        for e in range(table.num_envs)
    ]


def slow_features(reports: Sequence[Report], context: ObsContext, prices: Tensor) -> Tensor:
    """Return features [E, F], computed element by element. `prices` [S, 24] come from `slow_prices`."""
    slots = len(context.slot_width)
    out = torch.zeros(len(reports), num_features(slots))
    for e, report in enumerate(reports):
        _slow_env(out, e, report, context)
        for s in range(slots):
            _slow_slot(out, e, s, report, context, prices)
    return out


def slow_prices(takes: Any, context: ObsContext) -> Tensor:
    """Return the constant features [S, 24]: the size of every blueprint at every slot, −1 where not taken."""
    rows = []
    for s in range(len(takes)):
        params = [context.slot_params[s][b] / context.host_params for b in range(1, len(BLUEPRINTS))]
        macs = [context.slot_macs[s][b] / context.host_macs for b in range(1, len(BLUEPRINTS))]
        plantable = [bool(t) for t in takes[s][1 : len(BLUEPRINTS)]] * 2
        rows.append([_size(r) if t else -1.0 for r, t in zip(params + macs, plantable, strict=True)])
    return torch.tensor(rows)


def _soft(x: float, scale: float, unmeasured: float = 0.0) -> float:
    if math.isnan(x):
        return unmeasured
    x = max(-1e6, min(1e6, x))
    return x / (abs(x) + scale)


def _size(ratio: float) -> float:
    return min(math.log2(1 + ratio) / 8, 1.0)


def _level(quality: float, context: ObsContext) -> float:
    if math.isnan(quality):
        return -1.0
    return max(0.0, min(1.0, (quality - context.quality_zero) / context.quality_span))


def _loss(loss: float, context: ObsContext) -> float:
    if math.isnan(loss):
        return -1.0
    return min(math.log1p(max(loss, 0.0) / (context.chance_loss or 1.0)) / 7, 1.0)


def _trend(history: Sequence[float]) -> float:
    points = [(float(i), q) for i, q in enumerate(history) if math.isfinite(q)]
    if len(points) < 2:
        return math.nan
    mean_i, mean_q = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((i - mean_i) * (q - mean_q) for i, q in points) / sum((i - mean_i) ** 2 for i, _ in points)


def _seed_macs(slot: Mapping[str, Any], s: int, context: ObsContext) -> float:
    is_active = slot["stage"] in (SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED)
    return float(context.slot_macs[s][slot["blueprint"]]) if is_active else 0.0


def _slow_env(out: Tensor, e: int, report: Report, context: ObsContext) -> None:
    at, env, span = ENV_COLUMN, report.env, context.quality_span
    steps_left = max(context.horizon - env["step"], 0)
    out[e, at["time"]] = 1 - steps_left / context.horizon
    out[e, at["steps_left"]] = min(math.log2(1 + steps_left) / 10, 1.0)
    out[e, at["quality"]] = _level(env["quality"], context)
    out[e, at["val_loss"]] = _loss(env["val_loss"], context)
    for k in (1, 2, 3, 4):
        out[e, at[f"quality_{k}"]] = _level(env["quality_history"][-1 - k], context)
        out[e, at[f"val_loss_{k}"]] = _loss(env["loss_history"][-1 - k], context)
    out[e, at["overfit"]] = _soft((env["val_loss"] - env["train_loss"]) / (context.chance_loss or 1.0), 0.1)
    out[e, at["quality_slope"]] = _soft(_trend(env["quality_history"]) / span, 0.01)
    live_gain = env["quality"] - env["committed_quality"]
    out[e, at["live_gain"]] = _soft(live_gain / span, 0.1)
    out[e, at["live_gain_known"]] = 0.0 if math.isnan(live_gain) else 1.0
    out[e, at["below_best"]] = _soft((env["quality_best_env"] - env["quality"]) / span, 0.1, -1.0)
    out[e, at["seeds_so_far"]] = _soft(env["next_serial"], 5)

    added = sum(slot["params"] for slot in report.slots)
    macs = sum(_seed_macs(slot, s, context) for s, slot in enumerate(report.slots))
    budget = context.params_budget
    out[e, at["params"]] = _size(added / context.host_params)
    out[e, at["macs"]] = _size(macs / context.host_macs)
    out[e, at["budget_left"]] = max(-1.0, min(1.0, 1 - (context.host_params + added) / budget)) if budget else 1.0
    out[e, at["has_budget"]] = 1.0 if budget else 0.0
    out[e, at["host_params"]] = min(math.log2(context.host_params) / 32, 1.0)
    out[e, at["host_macs"]] = min(math.log2(context.host_macs) / 40, 1.0)

    stages = [slot["stage"] for slot in report.slots if slot["enabled"]]
    for name in ("TRAINING", "BLENDING", "HOLDING", "FOSSILIZED"):
        out[e, at[f"share_{name.lower()}"]] = stages.count(SeedStage[name]) / max(len(stages), 1)
    out[e, at["share_free"]] = stages.count(SeedStage.DORMANT) / max(len(stages), 1)
    out[e, at["share_cooling"]] = sum(stage in COOLING for stage in stages) / max(len(stages), 1)
    out[e, at[f"last_{Op(env['last_op']).name.lower()}"]] = 1.0


def _slow_slot(out: Tensor, e: int, s: int, report: Report, context: ObsContext, prices: Tensor) -> None:
    at, slot, env, span = SLOT_COLUMN, report.slots[s], report.env, context.quality_span
    start = BASE + s * PER_SLOT
    stage = SeedStage(slot["stage"])
    out[e, start + at[f"stage_{stage.name.lower()}"]] = 1.0
    out[e, start + at["width"]] = min(math.log2(max(context.slot_width[s], 1)) / 12, 1.0)
    out[e, start + at["depth"]] = float(context.slot_depth[s])
    first = start + at[f"price_params_{BLUEPRINTS[1]}"]
    out[e, first : first + prices.shape[1]] = prices[s]
    for op in list(Op)[1:]:
        if report.legal[op][s]:
            out[e, start + at[f"may_{op.name.lower()}"]] = 1.0
    out[e, start + at["enabled"]] = 1.0 if slot["enabled"] else 0.0
    if stage is SeedStage.DORMANT:
        for name in ("contribution_se", "contribution_age", "prospect_se", "grad_norm", "grad_ratio", "grad_health"):
            out[e, start + at[name]] = -1.0
        return

    if 0 < slot["blueprint"] < len(BLUEPRINTS):
        out[e, start + at[f"blueprint_{BLUEPRINTS[slot['blueprint']]}"]] = 1.0
    if slot["operator"] >= 0:
        out[e, start + at[f"operator_{Operator(slot['operator']).name.lower()}"]] = 1.0
    ramp_left = max(slot["ramp_len"] - slot["ramp_pos"], 0)
    moving = stage is SeedStage.BLENDING and ramp_left > 0
    out[e, start + at["alpha"]] = slot["alpha"]
    out[e, start + at["alpha_target"]] = slot["alpha_to"]
    out[e, start + at["alpha_slope"]] = (slot["alpha_to"] - slot["alpha_from"]) / slot["ramp_len"] if moving else 0.0
    out[e, start + at["ramp_left"]] = min(ramp_left, 8) / 8
    out[e, start + at["cooldown"]] = slot["cooldown"] / 7
    out[e, start + at["grad_health"]] = -1.0 if math.isnan(slot["grad_health"]) else slot["grad_health"]
    out[e, start + at["params"]] = _size(slot["params"] / context.host_params)
    out[e, start + at["macs"]] = _size(_seed_macs(slot, s, context) / context.host_macs)

    requested = {SeedStage.TRAINING: context.thresholds.blend_dwell, SeedStage.BLENDING: context.thresholds.hold_dwell}
    out[e, start + at["dwell"]] = _soft(slot["dwell"], 10)
    out[e, start + at["dwell_left"]] = _soft(max(requested.get(stage, 0) - slot["dwell"], 0), 5)
    out[e, start + at["age"]] = _soft(slot["age"], 20)
    out[e, start + at["gain_since_birth"]] = _soft((env["quality"] - slot["quality_birth"]) / span, 0.1)
    out[e, start + at["gain_since_stage"]] = _soft((env["quality"] - slot["quality_stage"]) / span, 0.1)
    out[e, start + at["below_seed_best"]] = _soft((slot["quality_best"] - env["quality"]) / span, 0.1)
    bound = slot["contribution"] - context.thresholds.z * slot["contribution_se"]
    measured = slot["contribution_age"] >= 0
    out[e, start + at["contribution"]] = _soft(slot["contribution"] / span, 0.1)
    out[e, start + at["contribution_bound"]] = _soft(bound / span, 0.1)
    out[e, start + at["contribution_se"]] = _soft(slot["contribution_se"] / span, 0.02, -1.0)
    out[e, start + at["contribution_age"]] = _soft(slot["contribution_age"], 3) if measured else -1.0
    out[e, start + at["contribution_velocity"]] = _soft(slot["contribution_velocity"] / span, 0.05)
    out[e, start + at["prospect"]] = _soft(slot["prospect"] / span, 0.1)
    out[e, start + at["prospect_se"]] = _soft(slot["prospect_se"] / span, 0.02, -1.0)
    out[e, start + at["interaction"]] = _soft(slot["interaction"] / span, 0.1)
    out[e, start + at["grad_norm"]] = _soft(slot["grad_norm"], 1, -1.0)
    out[e, start + at["grad_ratio"]] = _soft(slot["grad_ratio"], 1, -1.0)
    out[e, start + at["velocity_known"]] = 0.0 if math.isnan(slot["contribution_velocity"]) else 1.0
    out[e, start + at["interaction_known"]] = 0.0 if math.isnan(slot["interaction"]) else 1.0


def slow_masks(reports: Sequence[Report], takes: Any, fixed: Mapping[Head, int]) -> Tensor:
    """Return masks [E, M], stacked from one set of small tensors per environment."""
    plantable = takes.tolist()
    per_env = [slow_action_masks(report, plantable, fixed) for report in reports]
    stacked = {key: torch.stack([masks[key] for masks in per_env]) for key in per_env[0]}
    return torch.cat([part.flatten(1) for part in stacked.values()], dim=1)


def slow_action_masks(report: Report, plantable: list[list[bool]], fixed: Mapping[Head, int]) -> dict[str, Tensor]:
    slots, blueprints = len(plantable), len(plantable[0])
    blueprint_by_slot = torch.tensor(
        [[plantable[s][b] and fixed.get(Head.BLUEPRINT, b) == b for b in range(blueprints)] for s in range(slots)]
    )

    slot_by_op = torch.zeros(NUM_OPS, slots, dtype=torch.bool)
    op_mask = torch.zeros(NUM_OPS, dtype=torch.bool)
    slot_by_op[Op.WAIT, 0] = True
    op_mask[Op.WAIT] = True
    for op in list(Op)[1:]:
        for s in range(slots):
            if not report.legal[op][s] or fixed.get(Head.SLOT, s) != s:
                continue
            fixed_blueprint = fixed.get(Head.BLUEPRINT)
            if op is Op.GERMINATE and fixed_blueprint is not None and not plantable[s][fixed_blueprint]:
                continue
            slot_by_op[op, s] = True
            op_mask[op] = True
    if Head.OP in fixed:
        only = fixed[Head.OP] if bool(op_mask[fixed[Head.OP]]) else Op.WAIT
        op_mask = torch.zeros(NUM_OPS, dtype=torch.bool)
        op_mask[only] = True

    masks = {"op": op_mask, "slot_by_op": slot_by_op, "blueprint_by_slot": blueprint_by_slot}
    for head in (Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE):
        size = len(HEAD_OPTIONS[head] or ())
        masks[head.name] = torch.zeros(size, dtype=torch.bool)
        for choice in [fixed[head]] if head in fixed else range(size):
            masks[head.name][choice] = True
    return masks
