"""Compute in multiply-adds, counted by running each pass once per structure.

    meter = ComputeMeter()
    meter.epoch_macs(network)          # multiply-adds of this network's next training epoch
    meter.measuring_macs(network, …)   # multiply-adds of one validation with its coalitions

Counted are matrix products and convolutions. Training is forward and backward of the host, its live seeds and the
shadow passes. Measuring (validation, coalitions, statistics of norms) is counted apart. The counts are exact because
they come from the operations that the passes run, on a copy of the body.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from esper.tolaria.coalitions import CALIBRATION_SAMPLES, Score, evaluate

if TYPE_CHECKING:
    from esper.tolaria.host_network import HostNetwork

SAMPLES = 2
"""Samples of the counted batch. BatchNorm needs two; multiply-adds are proportional to the number of samples."""


class PassMacs(NamedTuple):
    """Multiply-adds per sample of the passes of a training batch, forward and backward."""

    main: int
    shadow: int
    """All shadow passes of a batch that has them; 0 if no seed is TRAINING in isolation."""


class MeasuringMacs(NamedTuple):
    """Multiply-adds of measuring, per validation sample and per calibration sample, over all configurations."""

    validation: int
    calibration: int


class MacCounter(TorchDispatchMode):
    """Adds up the operations for which `torch.utils.flop_counter` has a formula.

    `FlopCounterMode` itself does not work with `torch.autograd.grad`, which shadow passes use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it."""
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def count_macs(run: Callable[[], object]) -> int:
    """Return the multiply-adds of the matrix products and convolutions that `run` performs."""
    with sdpa_kernel(SDPBackend.MATH), MacCounter() as counter:  # there is no formula for fused attention on a CPU
        run()
    return counter.flops // 2


def pass_macs(network: HostNetwork) -> PassMacs:
    """Count the passes of one training batch on a copy of the body. The network is not changed."""
    body = copy.deepcopy(network.body)
    body.train()
    split = network.data.train
    x, y = split.take(torch.arange(SAMPLES, device=split.y.device))

    def loss() -> torch.Tensor:
        return network.batch_loss(body, x, y)

    with torch.random.fork_rng(devices=[]):
        main = count_macs(lambda: loss().backward())
        shadow = count_macs(lambda: body.shadow_backward(loss)) if network.has_learner else 0
    return PassMacs(main // SAMPLES, shadow // SAMPLES)


def measuring_macs(network: HostNetwork, score: Score) -> MeasuringMacs:
    """Count the configurations of one validation on a copy of the body. The network is not changed."""
    body = copy.deepcopy(network.body)
    body.forking.proven.update(point for point in body.forking.points.values() if point is not None)  # no extra checks
    split = network.data.train
    x, y = split.take(torch.arange(2 * SAMPLES, device=split.y.device))
    calibration = x[:SAMPLES]

    def count(samples: int) -> int:
        batch = [(x[:samples], y[:samples])]
        return count_macs(lambda: evaluate(body, batch, score, calibration=calibration))

    with torch.random.fork_rng(devices=[]):
        few, twice = count(SAMPLES), count(2 * SAMPLES)
    return MeasuringMacs((twice - few) // SAMPLES, (2 * few - twice) // SAMPLES)


class ComputeMeter:
    """Counts multiply-adds of networks of one task; each structure is counted once."""

    def __init__(self) -> None:
        self._counted: dict[tuple[object, ...], PassMacs] = {}
        self._measured: dict[tuple[object, ...], MeasuringMacs] = {}

    def epoch_macs(self, network: HostNetwork) -> int:
        """Return the multiply-adds of one training epoch of this network as it is now."""
        key = structure_key(network)
        if key not in self._counted:
            self._counted[key] = pass_macs(network)
        each, task = self._counted[key], network.task
        shadowed = ceil(task.batches_per_epoch / network.config.shadow_every)
        return task.batch * (task.batches_per_epoch * each.main + shadowed * each.shadow)

    def measuring_macs(self, network: HostNetwork, score: Score, samples: int, calibration: int) -> int:
        """Return the multiply-adds of one validation with this many samples and calibration samples."""
        key = (*structure_key(network), *(slot.name for slot in network.body.players()))
        if key not in self._measured:
            self._measured[key] = measuring_macs(network, score)
        each = self._measured[key]
        return samples * each.validation + min(calibration, CALIBRATION_SAMPLES) * each.calibration


def structure_key(network: HostNetwork) -> tuple[object, ...]:
    """Return what the compute of a network's passes depends on."""
    return tuple(
        (slot.blueprint, slot.operator, slot.stage, any(p.requires_grad for p in slot.parameters()))
        for slot in network.body.slots.values()
    )
