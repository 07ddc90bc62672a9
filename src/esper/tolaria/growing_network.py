"""One network that grows: body, optimiser, structural changes, training steps, weight average, measuring, saving.

    network = GrowingNetwork(body, optimizer, incubation="shadow", ema_decay=0.98)
    network.apply_effects(effects, table)                  # build, drop or commit seeds; move their parameters
    train_epoch(network, batches, shadow_every=2)          # the training epoch of a growing network
    network.evaluate(batches, score)                       # every on/off configuration, on the averaged weights
    network.state()                                        # everything besides the weights, for `load_state`

These steps are implemented here, on clipping and the shadow pass of `kasmina`. `BatchedEpoch` in `batched_training.py`
runs the steps of training on stacked tensors for several networks at once; the formulas are shared, and
`test_stacked_training_equals_the_loop_under_growth` of `tests/tolaria/test_batched_training.py` compares the results.
`network_state.py` says what a saved state contains. `Engine` holds one `HostNetwork` per environment, `esper.Grower`
wraps one `GrowingNetwork` for a loop that belongs to the user, and `BatchedTrainer` runs the same `train_epoch`.

Quality is measured on `WeightAverage`, a moving average of the weights: at a constant learning rate the accuracy of raw
weights varies by points from batch to batch, that of their average by a tenth of a point.

Legend: E environments, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.blueprints import seeded
from esper.kasmina.body import Body
from esper.kasmina.forking import Norm
from esper.kasmina.optimizer_sync import GradientMeter, GradientStats, OptimizerSync, clip_separately, gradient_norms
from esper.kasmina.slot import Incubation, Slot
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Effect, EffectKind
from esper.leyline.slot_table import Floats, SlotTable
from esper.leyline.stages import SeedStage
from esper.tolaria.coalitions import Coalitions, Measured, Score, evaluate
from esper.tolaria.network_state import NetworkState, load_network, network_state

Norms = TypeVar("Norms")


class EpochSteps(Protocol[Norms]):
    """The steps of a training batch, in the order in which `train_epoch` calls them."""

    def zero_grad(self) -> None:
        """Clear the gradients of host and seeds."""
        ...

    def forward_backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Run the main pass; return mean loss and accuracy, detached and still on the device."""
        ...

    def shadow_backward(self, x: Tensor, y: Tensor) -> None:
        """Add the gradient of each TRAINING seed, computed with that seed switched on."""
        ...

    def clip(self) -> Norms:
        """Clip the host and each growing seed separately; return the norms of their gradient tensors."""
        ...

    def gradients_due(self, batch: int) -> bool:
        """Return whether some seed's gradient statistics are to be sampled on this batch."""
        ...

    def sample_gradients(self, norms: Norms) -> None:
        """Store the gradient statistics of the seeds that are due and have a gradient."""
        ...

    def optimizer_step(self) -> None:
        """Update the weights, then their average."""
        ...


def train_epoch(network: EpochSteps[Any], batches: Iterable[tuple[Tensor, Tensor]], *, shadow_every: int) -> Tensor:
    """Train on every batch and return mean loss and accuracy, still on the device.

    This is the only training epoch of a growing network. One network runs it by itself; a stack of equal networks
    runs it with batched steps (`batched_training.py`).
    """
    total: Tensor | None = None
    count = 0
    for i, (x, y) in enumerate(batches):
        network.zero_grad()
        result = network.forward_backward(x, y)
        if i % shadow_every == 0:
            network.shadow_backward(x, y)
        norms = network.clip()
        if network.gradients_due(i):
            network.sample_gradients(norms)
        network.optimizer_step()
        total = result if total is None else total + result
        count += 1
    assert total is not None, "an epoch has at least one batch"
    return total / count


class GrowingNetwork:
    """A body, its optimiser and everything that must follow when its structure changes.

    rng_seed         random seed of the initial weights of seeds
    incubation       how a TRAINING seed learns: "shadow" or "straight_through"
    gradient_stride  batches between samples of gradient statistics
    ema_decay        decay of the weight average that quality is measured on; None measures the raw weights
    max_norm         limit of the gradient norm of the host and of each growing seed
    seed_options     options of the optimiser's group for seeds, such as lr
    """

    def __init__(
        self,
        body: Body,
        optimizer: Optimizer,
        *,
        rng_seed: int = 0,
        incubation: Incubation = "shadow",
        gradient_stride: int = 10,
        ema_decay: float | None = None,
        max_norm: float = float("inf"),
        **seed_options: Any,
    ) -> None:
        self.optimizer_sync = OptimizerSync(body, optimizer, rng_seed=rng_seed, **seed_options)
        self.body = body
        self.optimizer = optimizer
        self.max_norm = max_norm
        body.incubation = incubation
        self.average = None if ema_decay is None else WeightAverage(body, ema_decay)
        self.meter = GradientMeter(gradient_stride)
        self.unsampled: set[str] = set()
        """Slots whose seed's gradients are due to be sampled."""
        self.optimizer_sync.on_change.append(self._forget_gradients)
        self.regroup()

    @property
    def slot_names(self) -> list[str]:
        """Names of the slots, in the order of the table's columns."""
        return self.optimizer_sync.names

    @property
    def host_size(self) -> int:
        """Number of parameters of the host, without seeds."""
        return self._host_size

    @property
    def params(self) -> int:
        """Number of parameters of host, seeds and gates, frozen ones included."""
        return sum(p.numel() for p in self.body.parameters())

    # -- structure

    def apply_effects(self, effects: Sequence[Effect], table: SlotTable, env: int = 0) -> None:
        """Build, drop and commit seeds as the effects say; update optimiser, average and slots."""
        self.optimizer_sync.carry_out(list(effects), table, env)
        changed = any(effect.env == env for effect in effects)
        if changed and self.average is not None:
            self.average.resync()
        if changed or self._stages != [slot.stage for slot in self.body.slots.values()]:
            self.regroup()

    def regroup(self) -> None:
        """Recompute what depends on the stages: the host with its fossils is one group, each growing seed another."""
        self._stages = [slot.stage for slot in self.body.slots.values()]
        host = list(self.body.model.parameters())
        self._host_size = sum(p.numel() for p in host)
        self.growing: dict[str, list[nn.Parameter]] = {}
        for name, slot in self.body.slots.items():
            params = list(slot.parameters())
            if slot.stage == SeedStage.FOSSILIZED:
                host += params
            elif params:
                self.growing[name] = params
        self.clip_groups = [host, *self.growing.values()]
        self.sizes = {name: sum(p.numel() for p in params) for name, params in self.growing.items()}
        self.has_learner = bool(self.body.training_slots) and self.body.incubation == "shadow"

    def _forget_gradients(self, effect: Effect, slot: Slot) -> None:
        """Discard the statistics of a seed that was built or dropped, so that its successor starts without any."""
        if effect.kind in (EffectKind.BUILD, EffectKind.DROP):
            self.meter.forget(slot.name)
            self.unsampled.discard(slot.name)

    # -- the steps of a training batch that every loop needs

    def zero_grad(self) -> None:
        """Clear the gradients of host and seeds."""
        self.optimizer.zero_grad(set_to_none=True)

    def clip(self, max_norm: float | None = None) -> list[Tensor]:
        """Clip each group to `max_norm`; return the norm of every gradient tensor, group by group."""
        return clip_separately(self.clip_groups, self.max_norm if max_norm is None else max_norm)

    def gradients_due(self, batch: int) -> bool:
        """Return whether some growing seed's gradients are to be sampled on this batch.

        Every `gradient_stride` batches each growing seed becomes due, and stays due until it has a gradient: a
        TRAINING seed has none on batches without a shadow pass.
        """
        if self.meter.due(batch):
            self.unsampled = set(self.growing)
        return bool(self.unsampled)

    def sample_gradients(self, norms: Sequence[Tensor] | None = None, scale: Tensor | None = None) -> None:
        """Sample the seeds that are due. `norms` are those of `clip`; `scale` is the factor of a gradient scaler."""
        seeds = [gradient_norms(params) for params in self.growing.values()] if norms is None else norms[1:]
        pairs = zip(self.growing, seeds, strict=True)
        due_norms = {name: each for name, each in pairs if name in self.unsampled and each.numel()}
        if not due_norms:
            return
        host = gradient_norms(self.clip_groups[0]) if norms is None else norms[0]
        if scale is not None:
            host = host / scale
            due_norms = {name: each / scale for name, each in due_norms.items()}
        self.unsampled -= due_norms.keys()
        self.meter.take(host, due_norms, self.host_size, self.sizes)

    def optimizer_step(self) -> None:
        """Update the weights, then their average."""
        self.optimizer.step()
        if self.average is not None:
            self.average.update()

    # -- measuring

    def averaged(self) -> AbstractContextManager[None]:
        """Within the context the body has its averaged weights, if an average is kept."""
        return nullcontext() if self.average is None else self.average.applied()

    def evaluate(self, batches: Iterable[tuple[Any, Any]], score: Score, **options: Any) -> Coalitions:
        """Score every configuration of the live seeds; options as of `coalitions.evaluate`."""
        with self.averaged():
            return evaluate(self.body, batches, score, **options)

    def write_scores(self, table: SlotTable, env: int, measured: Measured) -> Floats:
        """Write committed quality and prospects to the table; return contributions and standard errors [2, S]."""
        worth: Floats = np.full((2, len(self.slot_names)), np.nan)
        table.committed_quality[env] = measured.committed
        for s, name in enumerate(self.slot_names):
            if name in measured.contribution:
                worth[:, s] = measured.contribution[name]
            if name in measured.prospect:
                table.prospect[env, s], table.prospect_se[env, s] = measured.prospect[name]
        return worth

    def write_gradients(self, table: SlotTable, env: int, stats: dict[str, GradientStats]) -> None:
        """Write gradient statistics to the table; slots that were not sampled keep their last values."""
        for name, each in stats.items():
            at = env, self.slot_names.index(name)
            table.grad_norm[at] = each.norm
            table.grad_ratio[at] = each.ratio
            table.grad_health[at] = each.health

    # -- saving

    def state(self) -> NetworkState:
        """Return everything besides the weights that determines how training continues. Tensors are not copied."""
        return network_state(self)

    def load_state(
        self,
        state: NetworkState,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        table: SlotTable,
        env: int = 0,
    ) -> None:
        """Load a state with its weights and gradients. Row `env` of `table` must hold the saved values."""
        load_network(self, state, weights, gradients, table, env)


@contextmanager
def own_generator(rng_seed: int, device: str) -> Iterator[None]:
    """Within the context the generators of the CPU and of `device` start from `rng_seed`; restored afterwards."""
    if torch.device(device).type != "cuda":
        with seeded(rng_seed):
            yield
        return
    with torch.random.fork_rng(devices=[device]), seeded(rng_seed), torch.cuda.device(device):
        torch.cuda.manual_seed(rng_seed)
        yield


class WeightAverage:
    """Exponential moving average of a module's parameters and norm statistics, with warm-up."""

    def __init__(self, module: nn.Module, decay: float = 0.98) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"the decay of the weight average must lie in [0, 1), got {decay}")
        self.module = module
        self.decay = decay
        self.updates = 0
        self.tensors: list[Tensor] = []
        """The live tensors: the parameters, then the running statistics of norms."""
        self.average: list[Tensor] = []
        self.resync()

    def resync(self) -> None:
        """Follow a structural change: kept tensors keep their average, new ones start from their values."""
        before = self.by_tensor()
        self.tensors = [*self.module.parameters(), *norm_statistics(self.module)]
        self.average = [before[t] if t in before else t.detach().clone() for t in self.tensors]
        self.start_epoch()
        self._params = self.tensors[: len(self.tensors) - len(self._norms.running)]

    def start_epoch(self) -> None:
        """Note the running statistics of norms, from which the next update computes those of its batch."""
        self._norms = BatchStatistics(norm_statistics(self.module), inverse_momenta(self.module))

    def restart(self) -> None:
        """Restart the average from the current weights."""
        self.updates = 0
        self.tensors = []
        self.average = []
        self.resync()

    def by_tensor(self) -> dict[Tensor, Tensor]:
        """Return the average of each live tensor."""
        return dict(zip(self.tensors, self.average, strict=True))

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights; call it once per batch."""
        self.updates += 1
        values = [*self._params, *self._norms.of_batch()]
        torch._foreach_lerp_(self.average, values, averaging_rate(self.decay, self.updates))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the module has the averaged weights. No data is copied."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for t, a in zip(self.tensors, self.average, strict=True):
            t.data, a.data = a.data, t.data


class BatchStatistics:
    """Statistics of the last training batch in every BatchNorm, computed from the running statistics.

    running          the live running means and variances, of one network or stacked for several
    inverse_momenta  1 / momentum of each, see `inverse_momenta`
    """

    def __init__(self, running: list[Tensor], inverse_momenta: list[float]) -> None:
        self.running = running
        self.before = [b.clone() for b in running]
        self.inverse_momenta = inverse_momenta

    @torch.no_grad()
    def of_batch(self) -> list[Tensor]:
        """Return means and variances of the batch since the last call; the running ones where no batch was seen."""
        if not self.running:
            return []
        change = torch._foreach_sub(self.running, self.before)
        torch._foreach_mul_(change, self.inverse_momenta)
        torch._foreach_add_(change, self.before)
        torch._foreach_copy_(self.before, self.running)
        return list(change)


def inverse_momenta(module: nn.Module) -> list[float]:
    """Return 1 / momentum for each of `norm_statistics`; 1 for norms without a momentum."""
    norms = [m for m in module.modules() if isinstance(m, Norm)]
    pairs = [(m.momentum, b) for m in norms for b in (m.running_mean, m.running_var)]
    return [1.0 / momentum if momentum else 1.0 for momentum, b in pairs if b is not None]


def norm_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running means and variances of the BatchNorms in a module."""
    norms = [m for m in module.modules() if isinstance(m, Norm)]
    return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]


@contextmanager
def estimated_statistics(module: nn.Module, draw: Callable[[], Tensor]) -> Iterator[None]:
    """Within the context the BatchNorms have the statistics of drawn inputs under the present weights.

    Statistics that were collected during training do not fit averaged weights after the activations of a layer
    changed suddenly. A norm in eval mode while the module trains was frozen: it keeps its statistics.
    """
    tracking = [m for m in module.modules() if isinstance(m, Norm) and m.running_mean is not None]
    norms = [m for m in tracking if m.training or not module.training]
    if not norms:
        yield
        return
    kept = [(b, b.clone()) for m in norms for b in m.buffers(recurse=False)]
    momenta = [m.momentum for m in norms]
    was_training = [m for m in module.modules() if m.training]
    module.eval()
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    try:
        with torch.no_grad():
            module(draw())
        module.eval()
        yield
    finally:
        module.eval()
        for each in was_training:
            each.training = True
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for buffer, value in kept:
            buffer.copy_(value)


def averaging_rate(decay: float, updates: int) -> float:
    """Return the interpolation weight of update number `updates`; it is larger during the warm-up."""
    return 1.0 - min(decay, (1 + updates) / (10 + updates))


def vital_tensors(
    modules: Sequence[nn.Module], average: WeightAverage, optimizer: torch.optim.Optimizer
) -> list[Tensor]:
    """Return what must stay finite: weights, their averages and optimiser state, and the statistics of norms."""
    averages = average.by_tensor()
    params = [p for module in modules for p in module.parameters()]
    live: list[Tensor] = [*params, *(b for module in modules for b in norm_statistics(module))]
    return [*live, *(averages[t] for t in live), *state_tensors(optimizer, params)]


def state_tensors(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the tensors of the optimiser's state for these parameters."""
    return [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]


@torch.no_grad()
def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in these tensors, on the device; NaN if any value is NaN."""
    numbers = [t for t in tensors if t.is_floating_point() and t.numel()]
    return torch.stack([n.float() for n in torch._foreach_norm(numbers, inf)]).max()
