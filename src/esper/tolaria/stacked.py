"""Stacked training: E equal hosts as one wide host, for hosts so small that calling torch outweighs the arithmetic.

    stack = Stack(plots)
    stack.train_epoch(steps)      # what `plot.train_epoch(step)` does, for all plots at once
    stack.result(env)             # mean loss and accuracy of one, or the error that befell it

The host's own code runs once for all, widened (`wide.py`). That this comes to the same is not believed but tried when
the stack is built; what cannot be widened is left to the loop. Host weights lie in one matrix [E, N] for the length of
an epoch: gathered from the plots before, written back into their own tensors after. No environment's numbers depend on
what lives in another.

Legend: E environments, N host parameters, B samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.sgd import sgd

from esper.kasmina.blueprints import seeded
from esper.kasmina.slot import Slot
from esper.leyline.errors import ConfigError
from esper.leyline.seeding import derive_seed
from esper.leyline.stages import SeedStage
from esper.tolaria.tasks import IGNORED, per_sample_correct
from esper.tolaria.wide import Wide

if TYPE_CHECKING:
    from esper.tolaria.engine import Plot

Strategy = Literal["loop", "stacked", "auto"]
OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
"""What SGD is told of a parameter."""
TRIAL_BATCHES, TRIALS = 4, 4
WORTH_IT = 0.4
"""The stack is chosen if bare hosts take at most this share of the loop's time. A lone TRAINING seed costs the loop one
host's shadow pass and the stack that of all: measured, hosts that gain 1.8× bare lose (0.6×) with learners in 3 slots,
hosts that gain 3.4× do not."""


class Stack:
    """Trains plots of one task side by side. It keeps nothing between epochs but the host's code."""

    def __init__(self, plots: Sequence[Plot]) -> None:
        self.plots, self.task, self.config, self.data = list(plots), plots[0].task, plots[0].config, plots[0].data
        try:
            if why := cannot(plots):
                raise ConfigError(why)
            self.wide = Wide(plots[0].body)
            self._try()
        except Exception as error:
            raise ConfigError(f"these hosts cannot be trained as one stack: {error}. Use strategy 'loop'") from error
        self.errors: dict[int, Exception] = {}
        self.results = torch.zeros(0)

    @torch.no_grad()
    def _try(self) -> None:
        """Widened, the hosts must answer as they do one by one, and none feel what another sees."""
        rows, samples = len(self.plots), self.data.train.x
        epoch = _Epoch(self, [0] * rows)
        x = samples[torch.arange(3 * rows) % len(samples)].unflatten(0, (rows, 3))
        bodies = [plot.body.eval() for plot in self.plots]
        self.wide.module.eval()
        together = self.wide(epoch.tensors(), epoch.felt, x)
        blinded = x.clone()
        blinded[0] = torch.nan if x.is_floating_point() else 0
        beside = self.wide(epoch.tensors(), epoch.felt, blinded)
        alone = torch.stack([body(each) for body, each in zip(bodies, x, strict=True)])
        for module in (self.wide.module, *bodies):
            module.train()
        known = epoch.known
        if together.shape != alone.shape or not torch.allclose(together[known], alone[known], rtol=1e-3, atol=1e-4):
            raise ConfigError("widened, they do not answer as they do one by one")
        if not torch.equal(together[1:], beside[1:]):
            raise ConfigError("widened, some feel what others see")

    def train_epoch(self, steps: Sequence[int]) -> None:
        """One epoch of every plot; whatever goes wrong is said by `result`."""
        self.errors, self.results = {}, torch.zeros(len(self.plots), 2, device=self.config.device)
        self.wide.begin()
        try:
            with seeded(derive_seed(self.plots[0].world, "stack", steps[0])):  # leaves the caller's luck as it was
                epoch = _Epoch(self, steps)
                self.results = epoch.run(self.task.batches_per_epoch)
                epoch.write_back()
        except Exception as error:
            self.errors = dict.fromkeys(range(len(self.plots)), error)
        for e, plot in enumerate(self.plots):
            if not is_known(plot):
                self._train_alone(e, plot, steps[e])
        owner = {slot: e for e, plot in enumerate(self.plots) for slot in plot.body.slots.values()}
        self.errors.update({owner[slot]: error for slot, error in self.wide.errors.items()})

    def _train_alone(self, e: int, plot: Plot, step: int) -> None:
        """A plot whose seeds may do anything, by the loop; in the stack its row ran as if it were without them."""
        self.errors.pop(e, None)
        try:
            self.results[e] = plot.train_epoch(step)
        except Exception as error:
            self.errors[e] = error

    def result(self, env: int) -> Tensor:
        """Mean loss and accuracy of one environment's epoch, still on the device."""
        if env in self.errors:
            raise self.errors[env]
        return self.results[env]


class _Epoch:
    """The hosts' weights as a matrix, and the seeds of all plots in one list."""

    def __init__(self, stack: Stack, steps: Sequence[int]) -> None:
        self.stack, self.plots, self.steps = stack, stack.plots, steps
        self.known = [e for e, plot in enumerate(self.plots) if is_known(plot)]
        models = [plot.body.model for plot in self.plots]
        self.names, first = zip(*models[0].named_parameters(), strict=True)
        self.shapes = [p.shape for p in first]
        self.sizes = [p.numel() for p in first]
        self.own_buffers = list(zip(*(m.buffers() for m in models), strict=True))
        names = [n for n, _ in models[0].named_buffers()]
        self.buffers = {n: torch.stack(own) for n, own in zip(names, self.own_buffers, strict=True)}
        averages = {p: a for plot in self.plots for p, a in zip(plot.average.params, plot.average.average, strict=True)}
        options: dict[Tensor, tuple[Any, ...]] = {}
        state: dict[Tensor, dict[str, Any]] = {}
        for plot in self.plots:
            options |= {p: tuple(g[k] for k in OPTIONS) for g in plot.optimizer.param_groups for p in g["params"]}
            state |= {p: plot.optimizer.state[p] for p in plot.body.parameters() if plot.task.momentum}
        for p, known in state.items():
            known.setdefault("momentum_buffer", torch.zeros_like(p))

        hosts = [p for m in models for p in m.parameters()]
        self.own: list[list[Tensor]] = [list(hosts), [averages[p] for p in hosts]]
        self.own += [[state[p]["momentum_buffer"] for p in hosts]] if state else []
        self.matrices = [torch.cat([t.detach().reshape(-1) for t in own]).view(len(models), -1) for own in self.own]
        self.weights, self.average = self.matrices[0].requires_grad_(), self.matrices[1]  # [E, N]
        self._list_seeds()
        self.seed_averages = [averages[p] for p in self.seeds]
        groups: dict[tuple[Any, ...], list[Tensor]] = {options[hosts[0]]: [self.weights]}
        for p in self.seeds:
            groups.setdefault(options[p], []).append(p)
        self.groups = [(dict(zip(OPTIONS, key, strict=True)), params) for key, params in groups.items()]
        self.momenta: dict[Tensor, Tensor] = {}
        if state:  # the very buffers that the seeds' own optimisers hold
            self.momenta = {self.weights: self.matrices[2]} | {p: state[p]["momentum_buffer"] for p in self.seeds}

    def _list_seeds(self) -> None:
        self.seeds: list[nn.Parameter] = []
        self.seed_rows: list[int] = []
        self.clip_group: dict[nn.Parameter, int] = {}  # 0…E-1 are the hosts with their fossils, then each growing seed
        self.growing: list[tuple[int, str, list[nn.Parameter]]] = []  # row, slot, parameters
        self.felt: list[tuple[int, Slot]] = []
        self.learners: dict[str, list[tuple[int, Slot]]] = {}
        for e, plot in enumerate(self.plots):
            plot.body.train()
            for name, slot in plot.body.slots.items() if e in self.known else ():
                params = list(slot.parameters())
                self.seeds += params
                self.seed_rows += [e] * len(params)
                if slot.seed is not None and (slot.stage >= SeedStage.BLENDING or slot.incubating):
                    self.felt.append((e, slot))
                elif slot.stage == SeedStage.TRAINING:
                    self.learners.setdefault(name, []).append((e, slot))
                group = e
                if params and slot.stage != SeedStage.FOSSILIZED:
                    group = len(self.plots) + len(self.growing)
                    self.growing.append((e, name, params))
                self.clip_group.update(dict.fromkeys(params, group))

    @torch.no_grad()
    def write_back(self) -> None:
        """Into the plots' own tensors: whoever refers to them sees what was learnt."""
        known, many = self.known, len(self.sizes)
        for own, matrix in zip(self.own, self.matrices, strict=True):
            to = [t for e in known for t in own[e * many : (e + 1) * many]]
            rows = [matrix[e].split(self.sizes) for e in known]
            torch._foreach_copy_(to, [c.view(s) for row in rows for c, s in zip(row, self.shapes, strict=True)])
        for each, stacked in zip(self.own_buffers, self.buffers.values(), strict=True):
            torch._foreach_copy_([each[e] for e in known], [stacked[e] for e in known])
        for e in known:
            self.plots[e].average.updates += self.stack.task.batches_per_epoch

    def tensors(self, *, forgetful: bool = False) -> dict[str, Tensor]:
        """Parameters and buffers of the hosts, rows first; a pass with copies of the buffers leaves no trace."""
        pieces = zip(self.names, self.weights.split(self.sizes, 1), self.shapes, strict=True)
        buffers = {n: b.clone() for n, b in self.buffers.items()} if forgetful else self.buffers
        return {n: c.view(-1, *s) for n, c, s in pieces} | buffers

    def run(self, batches: int) -> Tensor:
        """Mean losses and accuracies [E, 2]."""
        config, meter = self.stack.config, self.plots[0].meter
        total = self.weights.new_zeros(len(self.plots), 2)
        self.told_rates = self._average_rates(batches)
        self.rates = self.weights.new_tensor(self.told_rates)  # [batches, E]
        for i, (x, y) in enumerate(self._minibatches()):
            for p in (self.weights, *self.seeds):
                p.grad = None
            output = self.stack.wide(self.tensors(), self.felt, x)
            losses = mean_losses(output, y)
            losses.sum().backward()
            if i % config.shadow_every == 0 and config.incubation == "shadow":
                for learners in self.learners.values():
                    self._teach(learners, x, y)
            norms = self._clip(self.stack.task.clip)
            if meter.due(i):
                self._meter(norms)
            self._descend()
            self._update_average(i)
            right = per_sample_correct(output.detach().flatten(0, 1), y.flatten(0, 1)).view(len(y), -1).mean(1)
            total += torch.stack([losses.detach(), right], 1)
        return total / batches

    def _minibatches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The plots' minibatches, rows first."""
        task, data, rows = self.stack.task, self.stack.data, len(self.plots)
        each = list(zip(self.plots, self.steps, strict=True))
        if task.augment:
            for batches in zip(*(task.minibatches(data, plot.world, step) for plot, step in each), strict=True):
                yield torch.stack([x for x, _ in batches]), torch.stack([y for _, y in batches])
            return
        orders = torch.stack([task.order(data, plot.world, step) for plot, step in each], 1)  # [batches, E, B]
        for index in orders.flatten(1).to(data.train.y.device):
            x, y = data.train.take(index)
            yield x.unflatten(0, (rows, -1)), y.unflatten(0, (rows, -1))

    def _teach(self, learners: list[tuple[int, Slot]], x: Tensor, y: Tensor) -> None:
        """The shadow pass of the TRAINING seeds of one slot: see `Body.shadow_backward`.

        All rows take part, learners or not: a kernel's rounding may hang on how many there are.
        """
        with ExitStack() as shadows:
            for _, slot in learners:
                shadows.enter_context(_shadowed(slot))
            output = self.stack.wide(self.tensors(forgetful=True), (*self.felt, *learners), x)
            params = [p for _, slot in learners for p in slot.parameters() if p.requires_grad]
            lessons = [slot.lesson for _, slot in learners if slot.lesson is not None]
            if not lessons:
                return
            grads = torch.autograd.grad(mean_losses(output, y).sum(), [*params, *lessons], allow_unused=True)
        for p, g in zip(params, grads, strict=False):  # the lessons' own are not wanted
            if g is not None:
                p.grad = torch.empty_like(p).copy_(g)  # laid out as p is: fused SGD reads both as they lie in memory

    @torch.no_grad()
    def _clip(self, most: float) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
        """As `clip_separately`, for all plots: norms of the hosts with their fossils [E], and of every seed tensor."""
        host = self.weights.grad
        assert host is not None
        with_grad = [p for p in self.seeds if p.grad is not None]
        grads = [p.grad for p in with_grad if p.grad is not None]
        squares = torch.linalg.vector_norm(host, dim=1).square()
        squares = torch.cat([squares, squares.new_zeros(len(self.growing))])
        each: tuple[Tensor, ...] = ()
        if grads:
            group = torch.tensor([self.clip_group[p] for p in with_grad], device=host.device)
            norms = torch.stack(torch._foreach_norm(grads))
            squares.index_add_(0, group, norms.square())
            each = norms.unbind(0)
        total = squares.sqrt()
        scale = (most / (total + 1e-6)).clamp(max=1.0)
        host *= scale[: len(self.plots), None]
        if grads:
            torch._foreach_mul_(grads, list(scale.index_select(0, group).unbind(0)))
        return total[: len(self.plots)], dict(zip(with_grad, each, strict=True))

    @torch.no_grad()
    def _descend(self) -> None:
        """A step of SGD, with the momenta of the plots' own optimisers."""
        for options, params in self.groups:
            moved = {p: p.grad for p in params if p.grad is not None}
            momenta = [self.momenta.get(p) for p in moved]
            sgd([*moved], [*moved.values()], momenta, has_sparse_grad=False, fused=True, **options)

    def _meter(self, norms: tuple[Tensor, dict[nn.Parameter, Tensor]]) -> None:
        hosts, each = norms
        for e, name, params in self.growing:
            found = [each[p] for p in params if p in each]
            if found:
                plot = self.plots[e]
                plot.meter.take(hosts[e], {name: torch.stack(found)}, plot.host_size, plot.sizes)

    def _average_rates(self, batches: int) -> list[list[float]]:
        """How far each plot's average moves on each batch: see `WeightAverage.update`."""
        decay = self.stack.config.ema_decay
        updates = [[plot.average.updates + i for plot in self.plots] for i in range(1, batches + 1)]
        return [[1.0 - min(decay, (1 + u) / (10 + u)) for u in row] for row in updates]

    @torch.no_grad()
    def _update_average(self, batch: int) -> None:
        weight = self.rates[batch, :, None]
        self.average.mul_(1.0 - weight).addcmul_(self.weights, weight)
        if self.seeds:
            each = self.told_rates[batch]
            torch._foreach_lerp_(self.seed_averages, [*self.seeds], [each[e] for e in self.seed_rows])


def is_known(plot: Plot) -> bool:
    """Whether all its seeds do nothing but answer, in the host's precision: modules of torch or ours, without memory,
    chance or hooks."""
    host = next(plot.body.model.parameters())
    return not any(
        isinstance(m, _DropoutNd) or m._buffers or m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
        or not type(m).__module__.startswith(("torch.nn.", "esper."))
        or any((p.dtype, p.device) != (host.dtype, host.device) for p in m.parameters(recurse=False))
        for slot in plot.body.slots.values() if slot.seed is not None
        for m in slot.seed.modules()
    )  # fmt: skip


@contextmanager
def _shadowed(slot: Slot) -> Iterator[None]:
    """`Body.shadowed`, without its care for what seeds remember: these remember nothing."""
    slot.shadow = True
    try:
        yield
    finally:
        slot.shadow, slot.lesson = False, None


def mean_losses(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each row [rows]: the mean over its samples and tokens that count."""
    each = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none", ignore_index=IGNORED)
    return each.view(len(target), -1).sum(1) / (target != IGNORED).flatten(1).sum(1)


def cannot(plots: Sequence[Plot]) -> str:
    """Why these plots cannot be trained as one stack; nothing if they can, as far as is known without trying."""
    first = plots[0]
    if len(plots) < 2:
        return "there is only one"
    if first.task.batch < 2:
        return "their batches are single samples"
    if first.config.compile:
        return "their forward pass is compiled"
    if type(first.optimizer) is not torch.optim.SGD:
        return f"{type(first.optimizer).__name__} counts steps per parameter, which rows of one matrix cannot"
    if any(isinstance(m, _DropoutNd) and m.p > 0 for m in first.body.model.modules()):
        return "dropout would fall otherwise than in the loop"
    if any(isinstance(m, nn.BatchNorm2d) and m.momentum is None for m in first.body.model.modules()):
        return "their BatchNorm averages over all time"
    if not all(p.requires_grad for plot in plots for p in plot.body.model.parameters()):
        return "some host parameters are frozen"
    return ""


def choose(plots: Sequence[Plot]) -> Literal["loop", "stacked"]:
    """The faster strategy, by a short measurement on fresh plots of the same worlds: these are left as they are.

    Measured without seeds: see `WORTH_IT`. Hosts that cannot be widened, or that come to another
    loss, are left to the loop.
    """
    if cannot(plots):
        return "loop"
    first = plots[0]
    task = replace(first.task, batches_per_epoch=TRIAL_BATCHES)
    fresh = [type(first)(task, first.data, plot.world, first.config) for plot in plots]
    alone, rows = type(first)(task, first.data, first.world, first.config), len(plots)
    times: list[tuple[float, float]] = []
    try:
        stack = Stack(fresh)
        for trial in range(TRIALS):
            start = time.perf_counter()
            expected = alone.train_epoch(trial)
            middle = time.perf_counter()
            stack.train_epoch([trial] * rows)
            times.append(((middle - start) * rows, time.perf_counter() - middle))
            if not torch.allclose(stack.result(0), expected, rtol=1e-2):
                return "loop"
    except Exception:
        return "loop"
    loop, stacked = (min(each[1:]) for each in zip(*times, strict=True))  # the first warms up
    return "stacked" if stacked < WORTH_IT * loop else "loop"
