"""Training compute in multiply-adds, counted by running each pass once per structure.

    meter = ComputeMeter()
    meter.epoch_macs(network)        # multiply-adds of this network's next training epoch

Counted are matrix products and convolutions, forward and backward, of the host, its live seeds and the shadow passes.
Measuring (validation, coalitions, tests) is not part of it. The count is exact because it comes from the operations
that the passes run, on a copy of the body.
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

if TYPE_CHECKING:
    from esper.tolaria.host_network import HostNetwork

SAMPLES = 2
"""Samples of the counted batch. BatchNorm needs two; multiply-adds are proportional to the number of samples."""


class PassMacs(NamedTuple):
    """Multiply-adds per sample of the passes of a training batch, forward and backward."""

    main: int
    shadow: int
    """All shadow passes of a batch that has them; 0 if no seed is TRAINING in isolation."""


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


class ComputeMeter:
    """Counts training multiply-adds of networks of one task; each structure is counted once."""

    def __init__(self) -> None:
        self._counted: dict[tuple[object, ...], PassMacs] = {}

    def epoch_macs(self, network: HostNetwork) -> int:
        """Return the multiply-adds of one training epoch of this network as it is now."""
        slots = network.body.slots.values()
        key = tuple(
            (slot.blueprint, slot.operator, slot.stage, any(p.requires_grad for p in slot.parameters()))
            for slot in slots
        )
        if key not in self._counted:
            self._counted[key] = pass_macs(network)
        each, task = self._counted[key], network.task
        shadowed = ceil(task.batches_per_epoch / network.config.shadow_every)
        return task.batch * (task.batches_per_epoch * each.main + shadowed * each.shadow)
