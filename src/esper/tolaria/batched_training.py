"""Batched training of E equal hosts in one pass, for hosts so small that the overhead of torch calls dominates.

    trainer = BatchedTrainer(networks)
    trainer.train_epoch(steps)      # as `network.train_epoch(step)`, for all networks at once
    trainer.result(env)             # mean loss and accuracy of one network; raises the error of its epoch

The host's forward code runs once for all hosts, with batched layers (`batched_modules.py`). The constructor tests that
the outputs are the same and raises ConfigError otherwise. During an epoch the host weights are one matrix [E, N]:
copied from the networks before it, written back into their tensors after it. The results of one environment do not
depend on the seeds of another.

Legend: E environments, N host parameters, B samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.sgd import sgd

from esper.kasmina.blueprints import seeded
from esper.kasmina.optimizer_sync import clip_factor
from esper.kasmina.slot import Mode, Slot
from esper.leyline.errors import ConfigError
from esper.leyline.rng import derive_seed
from esper.leyline.stages import SeedStage
from esper.tolaria.batched_modules import Wide
from esper.tolaria.growing_network import BatchStatistics, averaging_rate, inverse_momenta, train_epoch
from esper.tolaria.tasks import IGNORED, per_sample_correct

if TYPE_CHECKING:
    from esper.tolaria.engine import HostNetwork

Strategy = Literal["loop", "stacked", "auto"]
OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
"""Options of an SGD parameter group."""
TRIAL_BATCHES, TRIALS = 4, 4
BatchNorms = tuple[Tensor, dict[nn.Parameter, Tensor]]
"""Gradient norms of the hosts with their fossils [E], and of every seed tensor."""
MOST_TIME_SHARE = 0.4
"""Batched training is chosen if hosts without seeds take at most this share of the loop's time. A single TRAINING seed
costs the loop one host's shadow pass, and batched training that of all hosts. Measured: hosts that are 1.8× faster
without seeds are slower (0.6×) with TRAINING seeds in 3 slots; hosts that are 3.4× faster without seeds are not."""


class BatchedTrainer:
    """Trains networks of one task in one pass. Between epochs it keeps only the batched host module."""

    def __init__(self, networks: Sequence[HostNetwork]) -> None:
        self.networks = list(networks)
        self.task = networks[0].task
        self.config = networks[0].config
        self.data = networks[0].data
        try:
            if why := obstacle_to_batching(networks):
                raise ConfigError(why)
            self.wide = Wide(networks[0].body)
            self._try()
        except Exception as error:
            raise ConfigError(f"these hosts cannot be trained as one stack: {error}. Use strategy 'loop'") from error
        self.errors: dict[int, Exception] = {}
        self.results = torch.zeros(0)

    @torch.no_grad()
    def _try(self) -> None:
        """Raise unless batched outputs equal those of single hosts, and no host's output depends on another's input."""
        rows = len(self.networks)
        samples = self.data.train.x
        epoch = BatchedEpoch(self, [0] * rows)
        x = samples[torch.arange(3 * rows) % len(samples)].unflatten(0, (rows, 3))
        bodies = [network.body.eval() for network in self.networks]
        self.wide.module.eval()
        together = self.wide(epoch.tensors(), epoch.active, x)
        blinded = x.clone()
        blinded[0] = torch.nan if x.is_floating_point() else 0
        beside = self.wide(epoch.tensors(), epoch.active, blinded)
        alone = torch.stack([body(each) for body, each in zip(bodies, x, strict=True)])
        for module in (self.wide.module, *bodies):
            module.train()
        trained = epoch.trained
        if together.shape != alone.shape or not torch.allclose(together[trained], alone[trained], rtol=1e-3, atol=1e-4):
            raise ConfigError("the stacked outputs differ from those of the single hosts. Use strategy='loop'")
        if not torch.equal(together[1:], beside[1:]):
            raise ConfigError("some outputs depend on the inputs of other hosts. Use strategy='loop'")

    def train_epoch(self, steps: Sequence[int]) -> None:
        """Train one epoch of every network. Errors are stored and raised by `result`."""
        self.errors = {}
        self.results = torch.zeros(len(self.networks), 2, device=self.config.device)
        self.wide.begin()
        try:
            with seeded(derive_seed(self.networks[0].world, "stack", steps[0])):  # restores the caller's generator
                epoch = BatchedEpoch(self, steps)
                self.results = epoch.run()
                epoch.write_back()
        except Exception as error:
            self.errors = dict.fromkeys(range(len(self.networks)), error)
        for e, network in enumerate(self.networks):
            if not can_be_batched(network):
                self._train_alone(e, network, steps[e])
        owner = {slot: e for e, network in enumerate(self.networks) for slot in network.body.slots.values()}
        self.errors.update({owner[slot]: error for slot, error in self.wide.errors.items()})

    def _train_alone(self, e: int, network: HostNetwork, step: int) -> None:
        """Train a network by itself because its seeds cannot be batched; its row of the batch ran without seeds."""
        self.errors.pop(e, None)
        try:
            self.results[e] = network.train_epoch(step)
        except Exception as error:
            self.errors[e] = error

    def result(self, env: int) -> Tensor:
        """Return mean loss and accuracy of one environment's epoch, still on the device; raise its error, if any."""
        if env in self.errors:
            raise self.errors[env]
        return self.results[env]


class BatchedEpoch:
    """One epoch: the hosts' weights as a matrix, and the seeds of all networks in one list."""

    def __init__(self, trainer: BatchedTrainer, steps: Sequence[int]) -> None:
        self.trainer = trainer
        self.networks = trainer.networks
        self.steps = steps
        self.trained = [e for e, network in enumerate(self.networks) if can_be_batched(network)]
        models = [network.body.model for network in self.networks]
        self.names, first = zip(*models[0].named_parameters(), strict=True)
        self.shapes = [p.shape for p in first]
        self.sizes = [p.numel() for p in first]
        self.own_buffers = list(zip(*(m.buffers() for m in models), strict=True))
        names = [n for n, _ in models[0].named_buffers()]
        self.buffers = {n: torch.stack(own) for n, own in zip(names, self.own_buffers, strict=True)}
        averages: dict[Tensor, Tensor] = {}
        for network in self.networks:
            averages |= network.average.by_tensor()
        averaged = [(n, own) for n, own in zip(names, self.own_buffers, strict=True) if own[0] in averages]
        self.own_statistics = [[averages[b] for b in own] for _, own in averaged]
        statistics = [self.buffers[n] for n, _ in averaged]  # [E, …] each: running statistics of norms
        self.norms = BatchStatistics(statistics, inverse_momenta(models[0]))
        self.statistic_averages = [torch.stack(own) for own in self.own_statistics]
        options: dict[Tensor, tuple[Any, ...]] = {}
        state: dict[Tensor, dict[str, Any]] = {}
        for network in self.networks:
            options |= {p: tuple(g[k] for k in OPTIONS) for g in network.optimizer.param_groups for p in g["params"]}
            state |= {p: network.optimizer.state[p] for p in network.body.parameters() if network.task.momentum}
        for p, values in state.items():
            values.setdefault("momentum_buffer", torch.zeros_like(p))

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
        if state:  # the seeds' buffers are those of their networks' optimisers, not copies
            self.momenta = {self.weights: self.matrices[2]} | {p: state[p]["momentum_buffer"] for p in self.seeds}

    def _list_seeds(self) -> None:
        self.seeds: list[nn.Parameter] = []
        self.seed_rows: list[int] = []
        self.clip_group: dict[nn.Parameter, int] = {}  # 0…E-1: the hosts with their fossils; then one per growing seed
        self.growing: list[tuple[int, str, list[nn.Parameter]]] = []  # row, slot, parameters
        self.active: list[tuple[int, Slot]] = []
        self.learners: dict[str, list[tuple[int, Slot]]] = {}
        for e, network in enumerate(self.networks):
            network.body.train()
            for name, slot in network.body.slots.items() if e in self.trained else ():
                params = list(slot.parameters())
                self.seeds += params
                self.seed_rows += [e] * len(params)
                if slot.seed is not None and slot.mode in (Mode.BLEND, Mode.STRAIGHT_THROUGH):
                    self.active.append((e, slot))
                elif slot.stage == SeedStage.TRAINING:
                    self.learners.setdefault(name, []).append((e, slot))
                group = e
                if params and slot.stage != SeedStage.FOSSILIZED:
                    group = len(self.networks) + len(self.growing)
                    self.growing.append((e, name, params))
                self.clip_group.update(dict.fromkeys(params, group))

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the trained values into the networks' own tensors, so that references to them stay valid."""
        trained = self.trained
        many = len(self.sizes)
        for own, matrix in zip(self.own, self.matrices, strict=True):
            to = [t for e in trained for t in own[e * many : (e + 1) * many]]
            rows = [matrix[e].split(self.sizes) for e in trained]
            torch._foreach_copy_(to, [c.view(s) for row in rows for c, s in zip(row, self.shapes, strict=True)])
        for each, stacked in zip(self.own_buffers, self.buffers.values(), strict=True):
            torch._foreach_copy_([each[e] for e in trained], [stacked[e] for e in trained])
        for own, stacked in zip(self.own_statistics, self.statistic_averages, strict=True):
            torch._foreach_copy_([own[e] for e in trained], [stacked[e] for e in trained])
        for e in trained:
            self.networks[e].average.updates += self.trainer.task.batches_per_epoch

    def tensors(self, *, copy_buffers: bool = False) -> dict[str, Tensor]:
        """Return parameters and buffers of the hosts, [E, …] each. If `copy_buffers`, buffers are copies.

        A shadow pass uses copies, so that it does not change the statistics of norms.
        """
        pieces = zip(self.names, self.weights.split(self.sizes, 1), self.shapes, strict=True)
        buffers = {n: b.clone() for n, b in self.buffers.items()} if copy_buffers else self.buffers
        return {n: c.view(-1, *s) for n, c, s in pieces} | buffers

    def run(self) -> Tensor:
        """Train one epoch; return mean losses and accuracies [E, 2]."""
        config = self.trainer.config
        batches = self.trainer.task.batches_per_epoch
        averages = [network.average for network in self.networks]  # as in `WeightAverage.update`
        self.rates_list = [[averaging_rate(a.decay, a.updates + i) for a in averages] for i in range(1, batches + 1)]
        self.rates = self.weights.new_tensor(self.rates_list)  # [batches, E]
        self.batch = 0
        return train_epoch(self, self._minibatches(), shadow_every=config.shadow_every)

    # -- the steps of a training batch: see `EpochSteps`

    def zero_grad(self) -> None:
        """Clear the gradients of all hosts and seeds."""
        for p in (self.weights, *self.seeds):
            p.grad = None

    def forward_backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Run the main pass of all networks; return mean losses and accuracies [E, 2]."""
        output = self.trainer.wide(self.tensors(), self.active, x)
        losses = mean_losses(output, y)
        losses.sum().backward()
        correct = per_sample_correct(output.detach().flatten(0, 1), y.flatten(0, 1)).view(len(y), -1).mean(1)
        return torch.stack([losses.detach(), correct], 1)

    def shadow_backward(self, x: Tensor, y: Tensor) -> None:
        """Add the gradients of the TRAINING seeds, one pass per slot that holds any."""
        if self.trainer.config.incubation == "shadow":
            for learners in self.learners.values():
                self._shadow_pass(learners, x, y)

    def gradients_due(self, batch: int) -> bool:
        """Return whether some network has a seed whose gradients are to be sampled on this batch."""
        due = [network.gradients_due(batch) for network in self.networks]  # call all: each records which seeds are due
        return any(due)

    def sample_gradients(self, norms: BatchNorms) -> None:
        """Let each network sample the seeds that are due."""
        hosts, each = norms
        for e in self.trained:
            network = self.networks[e]
            seeds = [[each[p] for p in params if p in each] for params in network.growing.values()]
            network.sample_gradients([hosts[e], *(torch.stack(n) if n else hosts.new_zeros(0) for n in seeds)])

    def optimizer_step(self) -> None:
        """Update the weights of all networks, then their averages."""
        self._descend()
        self._update_average(self.batch)
        self.batch += 1

    def _minibatches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the networks' minibatches, [E, B, …] each."""
        task = self.trainer.task
        data = self.trainer.data
        rows = len(self.networks)
        each = list(zip(self.networks, self.steps, strict=True))
        if task.augment:
            for batches in zip(*(task.minibatches(data, network.world, step) for network, step in each), strict=True):
                yield torch.stack([x for x, _ in batches]), torch.stack([y for _, y in batches])
            return
        orders = torch.stack([task.order(data, network.world, step) for network, step in each], 1)  # [batches, E, B]
        for index in orders.flatten(1).to(data.train.y.device):
            x, y = data.train.take(index)
            yield x.unflatten(0, (rows, -1)), y.unflatten(0, (rows, -1))

    def _shadow_pass(self, learners: list[tuple[int, Slot]], x: Tensor, y: Tensor) -> None:
        """Run the shadow pass of the TRAINING seeds of one slot: see `Body.shadow_backward`.

        Separate from it because one pass of the wide module serves the seeds of several networks. All rows take part,
        with or without such a seed: rounding in a kernel may depend on the number of rows.
        """
        with ExitStack() as shadows:
            for _, slot in learners:
                shadows.enter_context(slot.shadowing())  # these seeds have no buffers to restore
            output = self.trainer.wide(self.tensors(copy_buffers=True), (*self.active, *learners), x)
            params = [p for _, slot in learners for p in slot.parameters() if p.requires_grad]
            shadow_inputs = [slot.shadow_input for _, slot in learners if slot.shadow_input is not None]
            if not shadow_inputs:
                return
            grads = torch.autograd.grad(mean_losses(output, y).sum(), [*params, *shadow_inputs], allow_unused=True)
        for p, g in zip(params, grads, strict=False):  # the features' own gradients are not needed
            if g is not None:
                p.grad = torch.empty_like(p).copy_(g)  # same memory layout as p: fused SGD ignores strides

    @torch.no_grad()
    def clip(self) -> BatchNorms:
        """Clip as `clip_separately` does, for all networks at once; return the norms before clipping.

        Separate from it because the groups are rows of one matrix and lists of seed tensors, reduced in one sweep.
        """
        most = self.trainer.task.clip
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
        scale = clip_factor(total, most)
        host *= scale[: len(self.networks), None]
        if grads:
            torch._foreach_mul_(grads, list(scale.index_select(0, group).unbind(0)))
        return total[: len(self.networks)], dict(zip(with_grad, each, strict=True))

    @torch.no_grad()
    def _descend(self) -> None:
        """Run one SGD step with the momentum buffers of the networks' own optimisers.

        Calls the function of `torch.optim.SGD`: the optimisers hold the networks' own tensors, not the matrix.
        """
        for options, params in self.groups:
            moved = {p: p.grad for p in params if p.grad is not None}
            momenta = [self.momenta.get(p) for p in moved]
            sgd([*moved], [*moved.values()], momenta, has_sparse_grad=False, fused=True, **options)

    @torch.no_grad()
    def _update_average(self, batch: int) -> None:
        """Move the averages towards the current weights, as `WeightAverage.update` does.

        Separate from it because each row of the stacked tensors has its own rate.
        """
        weight = self.rates[batch, :, None]
        self.average.mul_(1.0 - weight).addcmul_(self.weights, weight)
        for average, value in zip(self.statistic_averages, self.norms.of_batch(), strict=True):
            average.lerp_(value, weight)
        if self.seeds:
            each = self.rates_list[batch]
            torch._foreach_lerp_(self.seed_averages, [*self.seeds], [each[e] for e in self.seed_rows])


def can_be_batched(network: HostNetwork) -> bool:
    """Return whether all seeds of a network can be batched.

    They must be modules of torch or Esper in the host's dtype and device, without buffers, dropout or hooks.
    """
    host = next(network.body.model.parameters())
    return not any(
        isinstance(m, _DropoutNd) or m._buffers or m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
        or not type(m).__module__.startswith(("torch.nn.", "esper."))
        or any((p.dtype, p.device) != (host.dtype, host.device) for p in m.parameters(recurse=False))
        for slot in network.body.slots.values() if slot.seed is not None
        for m in slot.seed.modules()
    )  # fmt: skip


def mean_losses(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of each row, [E]: the mean over its samples and its tokens that are not ignored."""
    each = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none", ignore_index=IGNORED)
    return each.view(len(target), -1).sum(1) / (target != IGNORED).flatten(1).sum(1)


def obstacle_to_batching(networks: Sequence[HostNetwork]) -> str:
    """Return why these networks cannot be trained as one batch; empty if no reason is known before trying."""
    first = networks[0]
    if len(networks) < 2:
        return "there is only one"
    if first.task.batch < 2:
        return "their batches are single samples"
    if first.config.compile:
        return "their forward pass is compiled"
    if type(first.optimizer) is not torch.optim.SGD:
        return f"{type(first.optimizer).__name__} counts steps per parameter, which rows of one matrix cannot"
    if any(isinstance(m, _DropoutNd) and m.p > 0 for m in first.body.model.modules()):
        return "dropout would draw other random numbers than in the loop"
    if any(isinstance(m, nn.BatchNorm2d) and m.momentum is None for m in first.body.model.modules()):
        return "their BatchNorm averages over all time"
    if not all(p.requires_grad for network in networks for p in network.body.model.parameters()):
        return "some host parameters are frozen"
    return ""


def faster_strategy(networks: Sequence[HostNetwork]) -> Literal["loop", "stacked"]:
    """Return the faster strategy, measured for a few batches on new networks of the same worlds.

    They have no seeds: see `MOST_TIME_SHARE`. The result is "loop" if batching fails or gives another loss.
    `networks` are not changed.
    """
    if obstacle_to_batching(networks):
        return "loop"
    first = networks[0]
    task = replace(first.task, batches_per_epoch=TRIAL_BATCHES)
    fresh = [type(first)(task, first.data, network.world, first.config) for network in networks]
    alone = type(first)(task, first.data, first.world, first.config)
    rows = len(networks)
    times: list[tuple[float, float]] = []
    try:
        stack = BatchedTrainer(fresh)
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
    loop, stacked = (min(each[1:]) for each in zip(*times, strict=True))  # the first trial is a warm-up
    return "stacked" if stacked < MOST_TIME_SHARE * loop else "loop"
