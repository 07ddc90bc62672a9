"""Detect that a training loop clips host and seeds by their joint gradient norm, which ends the isolation of a seed.

While a seed is TRAINING, the gradients of one parameter of the host and one of the seed are copied after each backward
pass, and compared with what the optimiser gets. One common factor means joint clipping.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from esper.kasmina.body import Body
from esper.kasmina.slot import Slot

TOLERANCE = 1e-3
"""Largest relative difference of two factors that count as equal."""


class ClippingWatch:
    """Watch the gradients of a body whose seeds are TRAINING. Warn once if they were clipped together."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._slot: Slot | None = None
        self._params: list[nn.Parameter] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._copies: dict[nn.Parameter, Tensor] = {}
        self._has_warned = False

    def before_step(self, *, compare: bool) -> None:
        """Before an optimiser step, compare the gradients if `compare`, and follow the seed that is TRAINING now."""
        slot = next(iter(self.body.training_slots), None)
        if compare and slot is not None and slot is self._slot and len(self._copies) == 2:
            self._compare(*(_factor(p.grad, copy) for p, copy in self._copies.items()))
        self._copies.clear()
        if slot is not self._slot:
            self._watch(slot)

    def after_shadow(self) -> None:
        """Copy the seed's gradient, which a shadow pass assigns without a backward hook."""
        if self._slot is not None and self._params:
            self._copy(self._params[-1])

    def _watch(self, slot: Slot | None) -> None:
        """Copy gradients after each backward pass while this slot's seed is TRAINING; None ends it."""
        for handle in self._handles:
            handle.remove()
        chosen = [] if slot is None or self._has_warned else [_smallest(self.body.model), _smallest(slot)]
        self._params = [p for p in chosen if p is not None]
        self._handles = [p.register_post_accumulate_grad_hook(self._copy) for p in self._params]
        self._slot = slot

    def _copy(self, p: Tensor) -> None:
        if isinstance(p, nn.Parameter) and p.grad is not None:
            self._copies[p] = p.grad.detach().clone()

    def _compare(self, host: float, seed: float) -> None:
        """Warn if both gradients were multiplied by one factor. A power of two is that of a gradient scaler."""
        if math.isclose(host, seed, rel_tol=TOLERANCE) and host > 0 and math.frexp(host)[0] != 0.5 and host < 0.999:
            assert self._slot is not None
            warnings.warn(
                f"the gradients of the host and of the seed in {self._slot.name!r} were clipped by their joint norm: "
                "the seed affects the host while it is TRAINING. Replace torch.nn.utils.clip_grad_norm_ by "
                "grower.clip_grad_norm_(max_norm), which clips the host and each seed separately.",
                stacklevel=2,
            )
            self._has_warned = True
            self._watch(None)


def _smallest(module: nn.Module) -> nn.Parameter | None:
    """Return the trainable parameter with the fewest elements, of those that have a gradient if there are any."""
    params = [p for p in module.parameters() if p.requires_grad]
    return min([p for p in params if p.grad is not None] or params, key=lambda p: p.numel(), default=None)


def _factor(now: Tensor | None, before: Tensor) -> float:
    """Return the number by which a gradient was multiplied; NaN if it changed otherwise or cannot be determined."""
    if now is None or now.shape != before.shape:
        return math.nan
    at = before.abs().argmax()
    factor = now.flatten()[at] / before.flatten()[at]
    is_multiple = torch.allclose(now, before * factor, rtol=TOLERANCE, atol=0.0)
    return float(factor) if is_multiple else math.nan  # sync: while a seed is TRAINING, on sampled batches
