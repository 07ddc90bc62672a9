"""Fork state of a body: where its slots fork, whether that is proven, and the forked forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.kasmina.forking import (
    ArgumentForm,
    ForkError,
    ForkPlan,
    ForkPoint,
    argument_form,
    as_arguments,
    batched_leaves,
    replaced_norms,
    same,
)
from esper.kasmina.probing import PROBE_SAMPLES, call
from esper.kasmina.slot import Mode, Slot
from esper.leyline.stages import SeedStage

FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
"""Exceptions that a model may raise when shapes do not fit."""


class ForkState:
    """All fork state of one body, as `body.forking`.

    Example: a model `head(b(a(x)))` with slots after `a` and `b`, and a batch of B samples. Nothing bypasses the slots,
    so each forks at its own output: `points = {"a": (False, "a"), "b": (False, "b")}`, reached in this `sequence`.

        plan = body.forking.plan([(0, 0), (0, 1), (1, 0), (1, 1)], ["a", "b"], main=(1, 1))

                 fork at a                    fork at b
        x ── a ──┬── row 0: a off ──┐      ┌── row 0: parent 0, b off = configuration 0
         [B]     └── row 1: a on  ──┴── b ─┼── row 1: parent 1, b off = configuration 2
                            [2·B]          ├── row 2: parent 0, b on  = configuration 1
                                           └── row 3: parent 1, b on  = configuration 3 (main)
                                                      [4·B] ── head ── [4·B]

        plan.forks[0]   parents [0, 0]        on {"a": [False, True]}
        plan.forks[1]   parents [0, 1, 0, 1]  on {"a": [False, True, False, True], "b": [False, False, True, True]}
        plan.order      [0, 2, 1, 3]

    Module `a` runs on B samples, `b` on 2·B and the head on 4·B; one pass per configuration would run each on 4·B.
    At a fork the rows that are off come first, so the seed runs on one slice. `plan.split` returns the rows of the
    output by configuration.
    """

    def __init__(self, model: nn.Module, slots: Mapping[str, Slot]) -> None:
        self.model = model
        self.slots = slots
        self.points: dict[str, ForkPoint | None] = {}  # None: this slot cannot fork
        self.sequence: list[ForkPoint] = []  # the points in the order in which the model reaches them
        self.arguments: dict[str, ArgumentForm] = {}  # module name ("" = model) → which arguments are batched
        self.proven: set[ForkPoint] = set()  # points where forked and single passes agreed on a real batch
        self.failure = ""  # reason why configurations are evaluated one by one; "" while forking is used

    def plan(self, configs: Sequence[Sequence[bool]], slots: Sequence[str], main: Sequence[bool]) -> ForkPlan:
        """Return a fork plan for these configurations. Raise ForkError if one of the slots cannot fork."""
        if self.failure:
            raise ForkError(self.failure)
        points: dict[str, ForkPoint] = {}
        for name in slots:
            point = self.points[name]
            if point is None:
                reason = "samples of a batch influence each other behind it"
                if self.slots[name].spec.batch_axis:
                    reason = "its features have the batch on axis 1. Graft after a module whose output has it on axis 0"
                raise ForkError(f"slot {name!r} cannot fork: {reason}")
            points[name] = point
        plan = ForkPlan.build(configs, list(slots), points, self.sequence, main)
        plan.arguments = self.arguments
        return plan

    def give_up(self, reason: str) -> None:
        """Evaluate configurations one by one from now on. Warn on the first call."""
        if not self.failure:
            self.failure = reason
            warnings.warn(f"configurations of this model are evaluated one by one: {reason}", stacklevel=2)

    @torch.no_grad()
    def run(self, batch: Any, size: int, plan: ForkPlan) -> Any:
        """Run one batch of `size` samples under every row of a plan. Return the output, rows × size samples long.

        Raise ForkError if the model accepts each configuration alone but not several at once. An error that a single
        configuration also raises is the model's own and is not wrapped.
        """
        try:
            return self._run(batch, size, plan)
        except FAILURES as error:
            if plan.alone or not plan.done:
                raise
            for single in plan.singles():
                self._run(batch, size, single)
            raise ForkError(f"the model does not accept several configurations at once ({error})") from error

    def _run(self, batch: Any, size: int, plan: ForkPlan) -> Any:
        plan.batch = size
        plan.done = 0
        with attached(plan, self.slots.values(), self.model):
            args, kwargs = plan.at_input("", as_arguments(batch))
            with torch.compiler.set_stance("force_eager"):
                output = self.model(*args, **kwargs)
        plan.finish()
        return output

    def outputs(self, batch: Any, size: int, plan: ForkPlan) -> list[Any]:
        """Return the output of each configuration of a plan."""
        return plan.split(self.run(batch, size, plan))

    def cut(self, batch: Any, size: int, start: int, stop: int) -> Any:
        """Return the samples `start` to `stop` of a batch of `size`."""
        leaves, form = pytree.tree_flatten(batch)
        flags = batched_leaves(as_arguments(batch), size, self.arguments.get(""))
        return pytree.tree_unflatten([x[start:stop] if f else x for x, f in zip(leaves, flags, strict=True)], form)

    # -- search for the fork points, once, at graft

    @torch.no_grad()
    def find_points(self, probe: Any) -> None:
        """Find the innermost fork point of each slot, and the order in which the model reaches them."""
        training = [m for m in self.model.modules() if m.training]
        self.model.eval()
        try:
            with torch.random.fork_rng(devices=[]):
                sequence = self._possible_points(probe)
                self.points = {name: self._find_point(slot, probe, sequence) for name, slot in self.slots.items()}
        finally:
            for module in training:
                module.training = True
        self.sequence = [point for point in sequence if point in self.points.values()]

    def _possible_points(self, probe: Any) -> list[ForkPoint]:
        """Return every possible fork point in the order of one plain run. Also record which arguments are batched."""
        reached = [ForkPoint(True, "")]
        handles = []

        def enter(name: str) -> Any:
            def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
                reached.append(ForkPoint(True, name))
                self.arguments.setdefault(name, argument_form((args, kwargs), PROBE_SAMPLES))

            return hook

        def leave(name: str) -> Any:
            return lambda *_: reached.append(ForkPoint(False, name))

        try:
            for name in {n for s in self.slots.values() for n in _enclosing(s.module_name) if n}:
                handles.append(self.model.get_submodule(name).register_forward_pre_hook(enter(name), with_kwargs=True))
            for slot in self.slots.values():
                handles.append(self.model.get_submodule(slot.module_name).register_forward_hook(leave(slot.name)))
            call(self.model, probe)
        finally:
            for handle in handles:
                handle.remove()
        return list(dict.fromkeys(reached))

    def _find_point(self, slot: Slot, probe: Any, sequence: list[ForkPoint]) -> ForkPoint | None:
        """Return the innermost point at which this slot can fork, or None."""
        slot.seed = _Noise(slot.spec.batch_axis)
        slot.stage = SeedStage.TRAINING
        own = slot.name
        size = PROBE_SAMPLES
        candidates = [ForkPoint(False, own), *(ForkPoint(True, name) for name in _enclosing(slot.module_name))]
        try:
            expected = [self.outputs(probe, size, ForkPlan.single([on], [own]))[0] for on in (False, True)]
            for point in candidates:
                if point not in sequence:
                    continue  # some modules are never called, such as a ModuleList
                plan = ForkPlan.build([[False], [True]], [own], {own: point}, [point], [True])
                plan.arguments = self.arguments
                try:
                    outputs = self.outputs(probe, size, plan)
                except ForkError:
                    continue  # shapes do not fit: a connection bypasses this point
                if all(same(a, b) for a, b in zip(outputs, expected, strict=True)):
                    return point
            return None
        except ForkError:
            return None  # the batch is not the first dimension here
        except FAILURES as error:
            warnings.warn(
                f"the model fails when noise changes the features at slot {own!r} ({type(error).__name__}: {error}), "
                "so it is not known whether its batch can fork: configurations are evaluated one by one",
                stacklevel=5,
            )
            return None
        finally:
            slot.remove_seed()
            slot.stage = SeedStage.DORMANT


@contextmanager
def attached(plan: ForkPlan, slots: Iterable[Slot], model: nn.Module) -> Iterator[None]:
    """Attach a plan to its players' slots, to the modules at whose input it forks and to the norms. Detach on exit."""
    players = [(slot, slot.mode) for slot in slots if slot.name in plan.players]
    handles = []
    try:
        for slot, _ in players:
            slot.mode = Mode.FORK
            slot.fork = plan
        for name in {f.point.name for f in plan.forks if f.point.at_input and f.point.name}:

            def expand(_module: nn.Module, args: Any, kwargs: Any, name: str = name) -> Any:
                return plan.at_input(name, (args, kwargs))

            handles.append(model.get_submodule(name).register_forward_pre_hook(expand, with_kwargs=True))
        with replaced_norms(plan):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for slot, mode in players:
            slot.mode = mode
            slot.fork = None


class _Noise(nn.Module):
    """Stand-in seed for the probe: per-sample noise as large as the features, so that mixing of samples is visible."""

    def __init__(self, batch_axis: int) -> None:
        super().__init__()
        self.batch_axis = batch_axis

    def forward(self, features: Tensor) -> Tensor:
        """Return the same noise for every row."""
        h = features.transpose(0, self.batch_axis)
        generator = torch.Generator().manual_seed(h[0].numel())
        noise = torch.randn(PROBE_SAMPLES, *h.shape[1:], generator=generator).to(h)
        size = h.float().square().mean().sqrt()  # equal in a forked pass and in a single one
        noise = noise * torch.where(size > 0, size, 1.0).to(h)
        if h.shape[0] % PROBE_SAMPLES:
            raise ForkError("the first dimension is not a multiple of the batch")
        return noise.repeat(h.shape[0] // PROBE_SAMPLES, *[1] * (h.ndim - 1)).transpose(0, self.batch_axis)


def _enclosing(name: str) -> Iterator[str]:
    """Yield the name of a module, then of the enclosing modules from the nearest to the model itself ("")."""
    parts = name.split(".")
    for i in range(len(parts), -1, -1):
        yield ".".join(parts[:i])
