"""Evaluate many on/off configurations of the seeds in one pass: the batch forks where they differ.

A plan is lent to the slots for one forward call without gradients. Before the first fork every tensor
has leading dimension B; at a fork it becomes rows × B, one row per configuration that can still be told
apart, so whatever lies before is computed once. A slot forks at itself, or, where a skip connection or
an extra input goes around it, at the input of an enclosing module.

Legend: B samples, R rows after the forks so far, K configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Norm = nn.modules.batchnorm._BatchNorm


class ForkPoint(NamedTuple):
    """Where a slot's configurations part: after the slot's own module, or at a module's input ("" = the model)."""

    at_input: bool
    name: str


class ForkError(Exception):
    """The model mixes samples, or reached its slots in another way than when it was probed."""


@dataclass(frozen=True, slots=True)
class Fork:
    """One fork: which row before it each row after it continues, and which slots are on there."""

    point: ForkPoint
    parents: list[int]  # [R]
    on: dict[str, list[bool]]  # slot → [R], for every slot decided so far
    main: int  # the row that continues the main configuration


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive rows as (first, last + 1)."""
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield rows[start], rows[i - 1] + 1
            start = i


def _pick(x: Tensor, rows: Sequence[int], batch: int) -> Tensor:
    """These rows of x, by slices: they keep its memory format, which an index would not."""
    if len(rows) * batch == x.shape[0] and list(rows) == list(range(len(rows))):
        return x
    return torch.cat([x[a * batch : b * batch] for a, b in _runs(rows)])


@dataclass(slots=True)
class ForkPlan:
    """Configurations [K, slots] as forks in the order in which the model meets them."""

    forks: list[Fork]
    order: list[int]
    """The configuration of each row at the end."""
    players: frozenset[str]
    """The slots that the configurations speak of; others do what their stage says."""
    batch: int = 0
    done: int = 0
    norms: RowNorms | None = None

    @classmethod
    def build(cls, configs: Sequence[Sequence[bool]], slots: Sequence[str], points: dict[str, ForkPoint],
              sequence: Sequence[ForkPoint], main: Sequence[bool]) -> ForkPlan:  # fmt: skip
        """Distinct configurations over `slots`, forking at `points`, met in this `sequence`."""
        groups = [[s for s in slots if points[s] == p] for p in sequence]
        prefixes: list[tuple[bool, ...]] = [()]
        decided: list[str] = []
        forks = []
        for point, group in zip(sequence, groups, strict=True):
            if not group:
                continue
            decided += group
            columns = [slots.index(s) for s in decided]
            seen = {tuple(c[i] for i in columns) for c in configs}
            width = len(columns) - len(group)
            born = sorted(seen, key=lambda p: (p[width:], prefixes.index(p[:width])))
            if len(born) == len(prefixes) and not any(any(p[width:]) for p in born):
                decided = decided[:width]  # nobody is on here: nothing to decide
                continue
            parents = [prefixes.index(p[:width]) for p in born]
            on = {s: [p[i] for p in born] for i, s in enumerate(decided)}
            forks.append(Fork(point, parents, on, born.index(tuple(main[i] for i in columns))))
            prefixes = born
        columns = [slots.index(s) for s in decided]
        order = [[tuple(c[i] for i in columns) for c in configs].index(p) for p in prefixes]
        return cls(forks, order, frozenset(slots))

    @classmethod
    def single(cls, config: Sequence[bool], slots: Sequence[str]) -> ForkPlan:
        """One configuration alone: no fork, only switches."""
        root = ForkPoint(True, "")
        return cls.build([config], list(slots), dict.fromkeys(slots, root), [root], config)

    @property
    def rows(self) -> int:
        return len(self.forks[self.done - 1].parents) if self.done else 1

    @property
    def main_row(self) -> int:
        return self.forks[self.done - 1].main if self.done else 0

    def _next_is(self, point: ForkPoint) -> bool:
        return self.done < len(self.forks) and self.forks[self.done].point == point

    def at_slot(self, name: str, h: Tensor, switched_on: Callable[[Tensor], Tensor]) -> Tensor:
        """The features of every row after this slot."""
        if h.shape[0] != self.rows * self.batch:
            raise ForkError(f"slot {name!r} met {h.shape[0]} samples, expected {self.rows} × {self.batch}")
        sources = list(range(self.rows))
        if self._next_is(ForkPoint(False, name)):
            sources = self.forks[self.done].parents
            self.done += 1
        decided = self.forks[self.done - 1].on if self.done else {}
        on = decided.get(name, [False] * len(sources))
        lit = [s for s, is_on in zip(sources, on, strict=True) if is_on]
        if not lit:
            return _pick(h, sources, self.batch)
        changed = switched_on(_pick(h, lit, self.batch))
        if len(lit) == len(on):
            return changed
        pieces, next_lit = [], 0
        for is_on, first, last in _stretches(on):
            if is_on:
                pieces.append(changed[next_lit * self.batch : (next_lit + last - first) * self.batch])
                next_lit += last - first
            else:
                pieces += [h[a * self.batch : b * self.batch] for a, b in _runs(sources[first:last])]
        return torch.cat(pieces)

    def at_input(self, name: str, arguments: Any) -> Any:
        """Arguments of a module as the rows after its fork, if it forks here and now."""
        if not self._next_is(ForkPoint(True, name)):
            return arguments
        before, parents = self.rows * self.batch, self.forks[self.done].parents
        self.done += 1

        def expand(x: Any) -> Any:
            return _pick(x, parents, self.batch) if is_batched(x, before) else x

        return pytree.tree_map(expand, arguments)

    def finish(self) -> None:
        if self.done != len(self.forks):
            raise ForkError(f"the model met {self.done} of {len(self.forks)} forks")

    def split(self, output: Any) -> list[Any]:
        """The output of each configuration, in the order they were given."""
        by_config: list[Any] = [None] * len(self.order)
        for row, config in enumerate(self.order):
            by_config[config] = take_row(output, row, self.rows, self.batch)
        return by_config


def _stretches(on: Sequence[bool]) -> Iterator[tuple[bool, int, int]]:
    start = 0
    for i in range(1, len(on) + 1):
        if i == len(on) or on[i] != on[start]:
            yield on[start], start, i
            start = i


def is_batched(x: Any, samples: int) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == samples


def take_row(output: Any, row: int, rows: int, batch: int) -> Any:
    """One row of every tensor in an output. What did not fork (a scalar loss, say) is None, never a mixture."""

    def cut(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x[row * batch : (row + 1) * batch] if is_batched(x, rows * batch) else None

    return pytree.tree_map(cut, output)


@dataclass(slots=True)
class RowNorms:
    """BatchNorm statistics per row: what a norm behind a slot would have learnt without that seed.

    Its running statistics belong to the main configuration. For another row they are moved by what a
    fixed set of images says of the difference: mean + (m_row − m_main), var · (v_row / v_main). The same
    images serve both, so their sampling noise cancels, and the main row keeps its statistics exactly.
    """

    calibrating: bool = True
    calls: dict[Norm, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)  # scale, shift [R, C] per call
    reference: dict[Norm, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Mean and variance of the main configuration per call, where rows are evaluated one by one."""
    position: dict[Norm, int] = field(default_factory=dict)
    referring: bool = False

    def begin(self) -> None:
        self.position = dict.fromkeys(self.position, 0)

    def __call__(self, norm: Norm, x: Tensor, plan: ForkPlan) -> Tensor:
        rows, batch = plan.rows, plan.batch
        call = self.position.setdefault(norm, 0)
        self.position[norm] = call + 1
        x5 = x.view(rows, batch, x.shape[1], *x.shape[2:])
        if self.calibrating:
            known = self.calls.setdefault(norm, [])
            del known[call:]
            known.append(self._statistics(norm, x5, call, plan.main_row))
        scale, shift = self.calls[norm][call]
        shape = (scale.shape[0], 1, x.shape[1], *[1] * (x.ndim - 2))
        return torch.addcmul(shift.view(shape), x5, scale.view(shape)).view_as(x)

    def _statistics(self, norm: Norm, x5: Tensor, call: int, main: int) -> tuple[Tensor, Tensor]:
        dims = (1, *range(3, x5.ndim))
        var, mean = torch.var_mean(x5.float(), dims, correction=0)  # [R, C]
        if self.referring:
            self.reference.setdefault(norm, []).append((mean, var))
        alone = norm in self.reference
        mean0, var0 = self.reference[norm][call] if alone else (mean[main : main + 1], var[main : main + 1])
        assert norm.running_mean is not None
        assert norm.running_var is not None
        mean = norm.running_mean.float() + (mean - mean0)
        ratio = torch.where(var == var0, 1.0, (var + norm.eps) / (var0 + norm.eps))
        var = norm.running_var.float() * ratio
        weight = norm.weight if norm.weight is not None else torch.ones_like(mean[0])
        bias = norm.bias if norm.bias is not None else torch.zeros_like(mean[0])
        scale = weight / torch.sqrt(var + norm.eps)
        return scale.to(x5.dtype), (bias - mean * scale).to(x5.dtype)


class _NormForward:
    """Stands in for a norm's forward while a plan is lent."""

    def __init__(self, norm: Norm, plan: ForkPlan) -> None:
        self.norm, self.plan = norm, plan

    def __call__(self, x: Tensor) -> Tensor:
        norms = self.plan.norms
        if norms is None or (self.plan.rows == 1 and not norms.reference and not norms.referring):
            return type(self.norm).forward(self.norm, x)
        return norms(self.norm, x, self.plan)


@contextmanager
def lent(plan: ForkPlan, slots: Sequence[Any], modules: dict[str, nn.Module], norms: Sequence[Norm]) -> Iterator[None]:
    """Lend the plan to the slots, the fork modules and the norms; take it back whatever happens."""
    handles = []
    try:
        for slot in slots:
            slot.fork = plan
        for point in {f.point for f in plan.forks if f.point.at_input and f.point.name}:

            def expand(module: nn.Module, args: Any, kwargs: Any, name: str = point.name) -> Any:
                return plan.at_input(name, (args, kwargs))

            handles.append(modules[point.name].register_forward_pre_hook(expand, with_kwargs=True))
        if plan.norms is not None:
            plan.norms.begin()
            for norm in norms:
                norm.__dict__["forward"] = _NormForward(norm, plan)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for norm in norms:
            norm.__dict__.pop("forward", None)
        for slot in slots:
            slot.fork = None
