"""Masks of allowed actions, for all environments at once, as one packed bool array [E, M].

    op · slot_by_op · blueprint_by_slot · style · tempo · alpha_target · alpha_speed · alpha_curve

Options are chosen in that order: the op, then the slot given the op, then the blueprint given the slot.
`conditioned` turns a packed row and the chosen op and slot into the mask of every head, so that rollout and update
use the same distribution. Legality is decided by the lifecycle rules, not here.

Legend: E environments, S slots, O operations, B blueprints, M mask columns, W options of the widest head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper.leyline.actions import HEAD_OPTIONS, NUM_HEADS, NUM_OPS, RELEVANCE, Head, Op
from esper.leyline.errors import ConfigError
from esper.leyline.slot_table import Bools, SlotTable

FIXED_OPTIONS = {Head.TEMPO: "STANDARD", Head.ALPHA_SPEED: "MEDIUM", Head.ALPHA_CURVE: "LINEAR"}
"""Heads that a policy does not choose by default, because they matter less than the others."""


def option(head: Head, name: str) -> int:
    """Return the number of a head's option."""
    return (HEAD_OPTIONS[head] or ()).index(name)


DEFAULT_FIXED: Mapping[Head, int] = {head: option(head, name) for head, name in FIXED_OPTIONS.items()}
CANONICAL = np.zeros(NUM_HEADS, dtype=np.int64)
"""Option of each head that the op does not read: the only one allowed, so its log-probability is 0."""
for _head, _name in {Head.STYLE: "SIGMOID_ADD", Head.TEMPO: "STANDARD", Head.ALPHA_TARGET: "FULL"}.items():
    CANONICAL[_head] = option(_head, _name)

_TAIL = (Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE)
_TAIL_SIZES = tuple(len(HEAD_OPTIONS[head] or ()) for head in _TAIL)

Array = TypeVar("Array", npt.NDArray[Any], Tensor)


@dataclass(frozen=True)
class MaskLayout:
    """Positions of the parts of a packed mask."""

    slots: int
    blueprints: int

    @property
    def op(self) -> slice:
        """[O] operations."""
        return slice(0, NUM_OPS)

    @cached_property
    def slot_by_op(self) -> slice:
        """[O, S] slots per operation, flattened."""
        return slice(NUM_OPS, NUM_OPS * (1 + self.slots))

    @cached_property
    def blueprint_by_slot(self) -> slice:
        """[S, B] blueprints per slot, flattened."""
        start = self.slot_by_op.stop
        return slice(start, start + self.slots * self.blueprints)

    @cached_property
    def tail(self) -> dict[Head, slice]:
        """Heads whose options depend on the op only."""
        stops = self.blueprint_by_slot.stop + np.cumsum(_TAIL_SIZES)
        return {
            head: slice(int(stop) - size, int(stop)) for head, size, stop in zip(_TAIL, _TAIL_SIZES, stops, strict=True)
        }

    @cached_property
    def size(self) -> int:
        """Number of columns M."""
        return int(self.tail[Head.ALPHA_CURVE].stop)

    @cached_property
    def head_sizes(self) -> tuple[int, ...]:
        """Number of options of each head, in the order of action columns."""
        return (self.slots, self.blueprints, *_TAIL_SIZES, NUM_OPS)

    @cached_property
    def widest(self) -> int:
        """Largest number of options W of a head."""
        return max(self.head_sizes)

    @cached_property
    def widest_given_slot(self) -> int:
        """Largest number of options of the heads that are chosen after op and slot."""
        return max(self.head_sizes[Head.BLUEPRINT : Head.OP])


@lru_cache(maxsize=64)
def _layout(slots: int, blueprints: int) -> MaskLayout:
    return MaskLayout(slots=slots, blueprints=blueprints)


@lru_cache(maxsize=64)
def _template(layout: MaskLayout, fixed: tuple[tuple[Head, int], ...]) -> Bools:
    """Return the constant part of a mask [M]: WAIT at the first slot, and the tail heads' options or the fixed one."""
    for head, choice in fixed:
        if not 0 <= choice < layout.head_sizes[head]:
            size = layout.head_sizes[head]
            raise ConfigError(f"head {head.name} has {size} options, 0 to {size - 1}; it cannot be fixed at {choice}")
    row = np.zeros(layout.size, dtype=bool)
    chosen = dict(fixed)
    for head, where in layout.tail.items():
        row[where] = True if head not in chosen else np.arange(where.stop - where.start) == chosen[head]
    row[layout.slot_by_op.start] = True
    row.setflags(write=False)
    return row


def compute_batch_masks(table: SlotTable, legal: Bools, *, fixed: Mapping[Head, int] | None = None) -> Bools:
    """Return the packed masks [E, M] of all environments, given the legal operations [E, O, S].

    `fixed` restricts heads to one option each. Ops that have no slot left are not allowed. WAIT is always
    allowed unless another op is fixed and possible, so at least one op is allowed.
    """
    takes = table.takes
    fixed = fixed or {}
    envs, _, slots = legal.shape
    layout = _layout(slots, takes.shape[1])
    masks = np.empty((envs, layout.size), dtype=bool)
    masks[:] = _template(layout, tuple(fixed.items()))

    by_op = masks[:, layout.slot_by_op].reshape(envs, NUM_OPS, slots)  # a view
    by_op[:, 1:] = legal[:, 1:]
    if Head.BLUEPRINT in fixed:
        takes = takes & (np.arange(layout.blueprints) == fixed[Head.BLUEPRINT])
        by_op[:, Op.GERMINATE] &= takes.any(axis=1)
    if Head.SLOT in fixed:
        by_op[:, 1:] &= np.arange(slots) == fixed[Head.SLOT]
    masks[:, layout.blueprint_by_slot] = takes.ravel()

    ops = masks[:, layout.op]  # a view
    np.any(by_op, axis=2, out=ops)
    if Head.OP in fixed:
        possible = ops[:, fixed[Head.OP]].copy()
        ops[:] = False
        ops[:, fixed[Head.OP]] = possible
        ops[:, Op.WAIT] |= ~possible
    return masks


def padded_masks(masks: Bools, layout: MaskLayout, slots: int) -> Bools:
    """Return packed masks [E, M] for `slots` slots, of which those beyond the layout's own are never allowed."""
    wide = _layout(slots, layout.blueprints)
    if wide == layout:
        return masks
    out = np.zeros((len(masks), wide.size), dtype=bool)
    for part, axes in ((layout.slot_by_op, (NUM_OPS, -1)), (layout.blueprint_by_slot, (-1, layout.blueprints))):
        target = wide.slot_by_op if part == layout.slot_by_op else wide.blueprint_by_slot
        narrow = masks[:, part].reshape(len(masks), *axes)
        own_part = out[:, target].reshape(len(masks), *axes)  # a view
        own_part[:, : narrow.shape[1], : narrow.shape[2]] = narrow
    out[:, wide.op] = masks[:, layout.op]
    out[:, wide.blueprint_by_slot.stop :] = masks[:, layout.blueprint_by_slot.stop :]
    return out


def padded_legal(legal: Bools, slots: int) -> Bools:
    """Return legal operations [E, O, S'] for `slots` slots [E, O, S]; only WAIT is legal on the added ones."""
    envs, ops, own = legal.shape
    out = np.zeros((envs, ops, slots), dtype=bool)
    out[..., :own] = legal
    out[:, Op.WAIT] = True
    return out


def forced(masks: Array, layout: MaskLayout) -> Array:
    """Return [*] whether only WAIT is legal, so that there is no choice to learn from."""
    return ~masks[..., layout.op][..., 1:].any(-1)  # type: ignore[return-value]  # numpy may return scalars


def slot_given_op(masks: Tensor, layout: MaskLayout, op: Tensor) -> Tensor:
    """Return the slots [*, S] in which this op [*] is legal."""
    return _pick_row(masks[..., layout.slot_by_op], (NUM_OPS, layout.slots), op)


def blueprint_given_slot(masks: Tensor, layout: MaskLayout, slot: Tensor) -> Tensor:
    """Return the blueprints [*, B] that fit this slot [*]."""
    return _pick_row(masks[..., layout.blueprint_by_slot], (layout.slots, layout.blueprints), slot)


def _pick_row(packed: Tensor, shape: tuple[int, int], row: Tensor) -> Tensor:
    table = packed.unflatten(-1, shape)  # [*, R, C]
    index = row[..., None, None].expand(*row.shape, 1, shape[1])
    return table.gather(-2, index).squeeze(-2)


def conditioned(masks: Tensor, layout: MaskLayout, op: Tensor, slot: Tensor) -> Tensor:
    """Return the mask [*, 8, W] of every head given op [*] and slot [*], False beyond a head's options.

    Only the canonical option of a head that the op does not read is allowed.
    """
    tail = slice(layout.tail[Head.STYLE].start, layout.tail[Head.ALPHA_CURVE].stop)
    by_slot, by_op = blueprint_given_slot(masks, layout, slot), slot_given_op(masks, layout, op)
    heads = torch.cat([by_op, by_slot, masks[..., tail], masks[..., layout.op]], -1)
    reads, canonical = _tables(layout, masks.device)
    open_ = padded(heads.float(), layout.head_sizes, layout.widest).bool()  # indexing bools is slow
    return (open_ & reads[op]) | canonical[op]


def padded(side_by_side: Tensor, sizes: Sequence[int], width: int) -> Tensor:
    """Return [*, 8, W] from the concatenated options of all heads [*, Σ sizes]; padding has arbitrary values."""
    index = _places(tuple(sizes), width, side_by_side.device)
    return side_by_side.index_select(-1, index).unflatten(-1, (len(sizes), width))


@lru_cache(maxsize=64)
def _places(sizes: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    """Return [8·W] the index of each padded position in the concatenated options."""
    first = np.cumsum((0, *sizes[:-1]))
    index = first[:, None] + np.minimum(np.arange(width), np.array(sizes)[:, None] - 1)
    return torch.tensor(index.ravel(), device=device)


@lru_cache(maxsize=64)
def _tables(layout: MaskLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return [O, 8, W] the options that an op reads, and the canonical ones of heads that it does not read."""
    option = np.arange(layout.widest)
    read = RELEVANCE[..., None]
    reads = read & (option < np.array(layout.head_sizes)[:, None])
    canonical = ~read & (option == CANONICAL[:, None])
    return torch.tensor(reads, device=device), torch.tensor(canonical, device=device)
