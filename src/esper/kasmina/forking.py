"""Evaluate many on/off configurations of the seeds in one forward pass by forking the batch.

A plan is attached to the slots for one forward call without gradients. Before the first fork every tensor
has first dimension B. At a fork it becomes rows × B, one row per configuration that differs so far, so
everything before the fork is computed once. A slot forks at its own output or, where a skip connection or
an extra input bypasses it, at the input of an enclosing module.

Legend: B samples, R rows after the forks so far, K configurations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Norm = nn.modules.batchnorm._BatchNorm


class ForkPoint(NamedTuple):
    """Point where a slot's configurations diverge: after its own module, or at a module's input ("" = the model)."""

    at_input: bool
    name: str


ArgumentForm = tuple[str, list[bool]]
"""Tree structure of a module's arguments, and per leaf whether it may have a batch dimension."""


class ForkError(Exception):
    """Raised if the model mixes samples, or reaches its slots differently than during the probe."""


@dataclass(frozen=True, slots=True)
class Fork:
    """One fork: the parent row of each row after it, and which slots are on in each row."""

    point: ForkPoint
    parents: list[int]  # [R]
    on: dict[str, list[bool]]  # slot → [R], for every slot decided so far
    main: int  # row of the main configuration


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive rows as (first, last + 1)."""
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield rows[start], rows[i - 1] + 1
            start = i


def _pick(x: Tensor, rows: Sequence[int], batch: int) -> Tensor:
    """Return these rows of x. Slices keep its memory format; indexing would not."""
    if len(rows) * batch == x.shape[0] and list(rows) == list(range(len(rows))):
        return x
    return torch.cat([x[a * batch : b * batch] for a, b in _runs(rows)])


@dataclass(slots=True)
class ForkPlan:
    """Configurations [K, slots] as a sequence of forks, in the order in which the model reaches them."""

    forks: list[Fork]
    order: list[int]
    """Configuration index of each row after the last fork."""
    players: frozenset[str]
    """Slots that the configurations cover. Other slots behave according to their stage."""
    arguments: dict[str, ArgumentForm] = field(default_factory=dict)
    """Module name → which of its arguments have a batch dimension, as seen in the probe."""
    batch: int = 0
    done: int = 0
    norms: RowNorms | None = None

    @classmethod
    def build(cls, configs: Sequence[Sequence[bool]], slots: Sequence[str], points: dict[str, ForkPoint],
              sequence: Sequence[ForkPoint], main: Sequence[bool]) -> ForkPlan:  # fmt: skip
        """Return a plan for distinct configurations over `slots` that fork at `points`, reached in order `sequence`."""
        groups = [[s for s in slots if points[s] == p] for p in sequence]
        prefixes: list[tuple[bool, ...]] = [()]
        decided: list[str] = []
        forks = []
        for point, group in zip(sequence, groups, strict=True):
            if not group:
                continue
            decided += group
            columns = [slots.index(s) for s in decided]
            rows = {tuple(c[i] for i in columns) for c in configs}
            width = len(columns) - len(group)
            splits = len(rows) > len(prefixes)  # else rows keep their order: equal row counts mean equal rows
            ordered = sorted(rows, key=lambda p: (p[width:] if splits else (), prefixes.index(p[:width])))
            if not splits and not any(any(p[width:]) for p in ordered):
                decided = decided[:width]  # no seed is on here: no fork needed
                continue
            parents = [prefixes.index(p[:width]) for p in ordered]
            on = {s: [p[i] for p in ordered] for i, s in enumerate(decided)}
            forks.append(Fork(point, parents, on, ordered.index(tuple(main[i] for i in columns))))
            prefixes = ordered
        columns = [slots.index(s) for s in decided]
        order = [[tuple(c[i] for i in columns) for c in configs].index(p) for p in prefixes]
        return cls(forks, order, frozenset(slots))

    @classmethod
    def single(cls, config: Sequence[bool], slots: Sequence[str]) -> ForkPlan:
        """Return a plan for one configuration: no fork, only on/off switches."""
        root = ForkPoint(True, "")
        return cls.build([config], list(slots), dict.fromkeys(slots, root), [root], config)

    def singles(self) -> list[ForkPlan]:
        """Return one single-configuration plan per row after the last fork."""
        slots = sorted(self.players)
        decided = self.forks[-1].on if self.forks else {}
        off = [False] * len(self.order)
        return [ForkPlan.single([decided.get(s, off)[row] for s in slots], slots) for row in range(len(self.order))]

    @property
    def alone(self) -> bool:
        """Return whether there is one configuration: nothing forks, so the model may mix samples."""
        return len(self.order) == 1

    @property
    def rows(self) -> int:
        """Return the number of rows after the forks done so far."""
        return len(self.forks[self.done - 1].parents) if self.done else 1

    @property
    def main_row(self) -> int:
        """Return the row of the main configuration after the forks done so far."""
        return self.forks[self.done - 1].main if self.done else 0

    def _next_is(self, point: ForkPoint) -> bool:
        return self.done < len(self.forks) and self.forks[self.done].point == point

    def at_slot(self, name: str, h: Tensor, switched_on: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """Return the features of every row after the slot `name`."""
        if self.alone:
            is_on = bool(self.forks) and self.forks[-1].on.get(name, [False])[0]
            return switched_on(h, None) if is_on else h
        if h.shape[0] != self.rows * self.batch:
            raise ForkError(f"slot {name!r} received {h.shape[0]} samples, expected {self.rows} × {self.batch}")
        sources = list(range(self.rows))
        if self._next_is(ForkPoint(False, name)):
            sources = self.forks[self.done].parents
            self.done += 1
        decided = self.forks[self.done - 1].on if self.done else {}
        on = decided.get(name, [False] * len(sources))
        sources_on = [s for s, is_on in zip(sources, on, strict=True) if is_on]
        if not sources_on:
            return _pick(h, sources, self.batch)
        if len(sources_on) == len(on):
            return switched_on(_pick(h, sources_on, self.batch), None)
        num_off = len(on) - len(sources_on)
        if not any(on[:num_off]):  # rows that are off come first: the seed writes the others in place
            rows = torch.empty_like(h[:1].expand(len(on) * self.batch, *h.shape[1:]), memory_format=_format(h))
            unchanged = [h[a * self.batch : b * self.batch] for a, b in _runs(sources[:num_off])]
            torch.cat(unchanged, out=rows[: num_off * self.batch])
            switched_on(_pick(h, sources_on, self.batch), rows[num_off * self.batch :])
            return rows
        changed = iter(switched_on(_pick(h, sources_on, self.batch), None).split(self.batch))
        before = h.split(self.batch)
        return torch.cat([next(changed) if is_on else before[s] for s, is_on in zip(sources, on, strict=True)])

    def at_input(self, name: str, arguments: Any) -> Any:
        """Return the arguments of a module, expanded to the rows after its fork if it forks here."""
        if self.alone or not self._next_is(ForkPoint(True, name)):
            return arguments
        before = self.rows * self.batch
        parents = self.forks[self.done].parents
        self.done += 1
        leaves, form = pytree.tree_flatten(arguments)
        flags = batched_leaves(arguments, before, self.arguments.get(name))
        pairs = zip(leaves, flags, strict=True)
        return pytree.tree_unflatten([_pick(x, parents, self.batch) if yes else x for x, yes in pairs], form)

    def finish(self) -> None:
        """Raise ForkError if the model did not reach every fork."""
        if self.done != len(self.forks) and not self.alone:
            raise ForkError(f"the model reached {self.done} of {len(self.forks)} forks")

    def split(self, output: Any) -> list[Any]:
        """Return the output of each configuration, in the given order.

        A tensor computed before the last fork (an early exit) is shared by every row that descends from its row.
        A tensor whose size matches no fork (a scalar loss, for example) becomes None.
        """
        if self.alone:
            return [output]
        by_config: list[Any] = [None] * len(self.order)
        for row, config in enumerate(self.order):
            rows = {}  # number of samples at a fork → ancestor row at that fork
            for fork in reversed(self.forks):
                rows[len(fork.parents) * self.batch] = row
                row = fork.parents[row]
            by_config[config] = take_row(output, {**rows, self.batch: 0}, self.batch)
        return by_config


def _format(x: Tensor) -> torch.memory_format:
    """Return the memory format of x."""
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def is_batched(x: Any, samples: int) -> bool:
    """Return whether x is a tensor with first dimension `samples`."""
    return isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == samples


def argument_form(arguments: Any, samples: int) -> ArgumentForm:
    """Return the tree structure of the arguments, and per leaf False if it is a tensor without a batch dimension."""
    leaves, form = pytree.tree_flatten(arguments)
    return str(form), [not isinstance(x, Tensor) or is_batched(x, samples) for x in leaves]


def batched_leaves(arguments: Any, samples: int, probed: ArgumentForm | None = None) -> list[bool]:
    """Return per leaf whether it has a batch dimension: its size fits and the probe did not rule it out.

    The probe is needed because a mask [T, T] also fits if the batch has T samples.
    """
    leaves, form = pytree.tree_flatten(arguments)
    flags = probed[1] if probed is not None and probed[0] == str(form) else [True] * len(leaves)
    return [flag and is_batched(x, samples) for x, flag in zip(leaves, flags, strict=True)]


def as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def leaves_of(output: Any) -> list[Any]:
    """Return all leaves of an output, including those in dataclasses that pytree does not flatten."""
    leaves = pytree.tree_leaves(output)
    return [y for x in leaves for y in (leaves_of(vars(x)) if is_dataclass(x) else [x])]


def same(a: Any, b: Any, tolerance: float = 1e-3) -> bool:
    """Return whether two outputs agree up to the rounding caused by a different batch size. NaN equals NaN."""
    compared = 0
    for x, y in zip(leaves_of(a), leaves_of(b), strict=True):
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.is_floating_point():
            if x.shape != y.shape:
                return False
            x, y = x.nan_to_num(), y.nan_to_num()
            scale = y.abs().amax().clamp(min=1e-6) if y.numel() else 1.0
            most = max(tolerance, 8 * torch.finfo(x.dtype).eps)  # half precision needs a larger tolerance
            if not bool(((x - y).abs() <= most * scale).all()):  # sync: once, at graft
                return False
            compared += 1
    return compared > 0


def take_row(output: Any, rows: dict[int, int], batch: int) -> Any:
    """Return one row of every tensor in an output. `rows` maps a tensor's number of samples to its row."""

    def cut(x: Any) -> Any:
        if is_dataclass(x):  # pytree treats it as a leaf
            changed = copy.copy(x)
            for each in fields(x):
                object.__setattr__(changed, each.name, take_row(getattr(x, each.name), rows, batch))
            return changed
        if not isinstance(x, Tensor):
            return x
        row = rows.get(x.shape[0]) if x.ndim else None
        return None if row is None else x[row * batch : (row + 1) * batch]

    return pytree.tree_map(cut, output)


@dataclass(slots=True)
class RowNorms:
    """BatchNorm statistics per row: an estimate of what a norm behind a slot would have without that seed.

    The running statistics belong to the main configuration. For another row they are adjusted by the difference
    measured on a fixed set of images. With r = v_row / v_main: mean = m_row + √r · (mean − m_main), var = r · var.
    Both sides use the same images, so a row that does not differ keeps its statistics exactly. The lag of the running
    statistics is scaled by the row's standard deviation; without that scaling the error was twice as large.
    """

    norms: list[Norm]
    calibrating: bool = True
    calls: dict[Norm, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Per call of a norm two tensors [R, C]: scale and shift, or mean and variance for a custom forward."""
    reference: dict[Norm, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Mean and variance of the main configuration per call, used when rows are evaluated one by one."""
    position: dict[Norm, int] = field(default_factory=dict)
    referring: bool = False

    def begin(self) -> None:
        """Reset the call counters before a forward pass."""
        self.position = dict.fromkeys(self.position, 0)

    def __call__(self, norm: Norm, x: Tensor, plan: ForkPlan, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """Normalise x with the statistics of each row. Measure them first while calibrating."""
        if x.shape[0] % plan.rows:
            raise ForkError(f"a BatchNorm received {x.shape[0]} samples, not a multiple of {plan.rows} rows")
        x5 = x.view(plan.rows, -1, *x.shape[1:])  # after flattening [B, T] a row has B · T samples
        call = self.position.setdefault(norm, 0)
        self.position[norm] = call + 1
        stock = plain.__func__ is Norm.forward if hasattr(plain, "__func__") else False
        if self.calibrating:
            calls = self.calls.setdefault(norm, [])
            del calls[call:]
            mean, var = self._statistics(norm, x5, call, plan.main_row)
            calls.append(_as_scale_and_shift(norm, mean, var) if stock else (mean, var))
        a, b = self.calls[norm][call]
        if not stock:
            return torch.cat([_with_statistics(norm, plain, *each) for each in zip(x5, a, b, strict=True)])
        shape = (plan.rows, 1, x.shape[1], *[1] * (x.ndim - 2))
        return torch.addcmul(b.to(x.dtype).view(shape), x5, a.to(x.dtype).view(shape)).view_as(x)

    def _statistics(self, norm: Norm, x5: Tensor, call: int, main: int) -> tuple[Tensor, Tensor]:
        """Return mean and variance of every row, each [R, C]."""
        dims = (1, *range(3, x5.ndim))
        var, mean = torch.var_mean(x5.float(), dims, correction=0)
        if self.referring:
            self.reference.setdefault(norm, []).append((mean, var))
        alone = norm in self.reference
        mean0, var0 = self.reference[norm][call] if alone else (mean[main : main + 1], var[main : main + 1])
        assert norm.running_mean is not None
        assert norm.running_var is not None
        ratio = torch.where(var == var0, 1.0, (var + norm.eps) / (var0 + norm.eps))
        root = ratio.sqrt()
        return norm.running_mean.float() * root + (mean - mean0 * root), norm.running_var.float() * ratio


def _as_scale_and_shift(norm: Norm, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Return the affine form of a norm with these statistics."""
    weight = norm.weight if norm.weight is not None else torch.ones_like(mean[0])
    bias = norm.bias if norm.bias is not None else torch.zeros_like(mean[0])
    scale = weight / torch.sqrt(var + norm.eps)
    return scale, bias - mean * scale


def _with_statistics(norm: Norm, plain: Callable[[Tensor], Tensor], x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Call a norm's own forward with other running statistics."""
    own_statistics = norm.running_mean, norm.running_var
    norm.running_mean, norm.running_var = mean, var
    try:
        return plain(x)
    finally:
        norm.running_mean, norm.running_var = own_statistics


class _NormForward:
    """Replacement for a norm's `forward` while a plan is attached."""

    def __init__(self, norm: Norm, plan: ForkPlan) -> None:
        self.norm = norm
        self.plan = plan
        self.plain = norm.forward

    def __call__(self, x: Tensor) -> Tensor:
        norms = self.plan.norms
        if norms is None or (self.plan.rows == 1 and not norms.reference and not norms.referring):
            return self.plain(x)
        return norms(self.norm, x, self.plan, self.plain)


@contextmanager
def replaced_norms(plan: ForkPlan) -> Iterator[None]:
    """Replace the forward of the plan's norms by one with statistics per row. Restore it on exit."""
    if plan.norms is None:
        yield
        return
    norms = plan.norms.norms
    forwards = [norm.__dict__.get("forward") for norm in norms]  # a library may have set an instance attribute
    plan.norms.begin()
    try:
        for norm in norms:
            norm.__dict__["forward"] = _NormForward(norm, plan)
        yield
    finally:
        for norm, forward in zip(norms, forwards, strict=True):
            norm.__dict__.pop("forward", None)
            if forward is not None:
                norm.__dict__["forward"] = forward
