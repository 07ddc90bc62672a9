"""How a seed's Δ meets the host's features h: the operators, the gate, and isolation while it learns.

Shapes: maps [B, C, H, W], sequences [B, T, D], vectors [B, D]. Dtype and memory format of h are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.site import Layout
from esper.leyline.actions import Operator

GATE_BIAS = 2.0
"""σ(2) ≈ 0.88: open enough that the seed learns at once, far enough from 1 that the gate can still move."""

TINY = 1e-12
"""Keeps 1/rms finite at Δ = 0; its power −1.5, met in backward, still fits float32."""


def blend(h: Tensor, delta: Tensor, weight: Tensor, operator: Operator) -> Tensor:
    """The features with the seed's change in them; h itself keeps its full gradient at any weight.

    `weight` is alpha, a 0-dim tensor; for GATE it is alpha · gate(h).
    """
    delta, weight = delta.to(h.dtype), weight.to(h.dtype)  # under autocast they may differ
    if operator == Operator.MULTIPLY:
        return torch.addcmul(h, h, weight * torch.tanh(delta))
    return torch.addcmul(h, delta, weight)  # one pass over memory, where h + w·Δ takes two


class Gate(nn.Module):
    """How much of Δ each sample (map, vector) or each token (sequence) lets in, 0…1.

    A token's gate sees that token alone: a mean over the sequence would tell it of the future.
    """

    def __init__(self, dim: int, layout: Layout) -> None:
        super().__init__()
        width = max(8, dim // 4)
        self.pools = layout == Layout.MAP
        self.hidden = nn.Linear(dim, width)
        self.score = nn.Linear(width, 1)
        nn.init.normal_(self.score.weight, std=0.1)  # near the bias for all, yet hidden learns from the first
        nn.init.constant_(self.score.bias, GATE_BIAS)

    def forward(self, h: Tensor) -> Tensor:
        """[B, 1, 1, 1], [B, T, 1] or [B, 1]: broadcasts against h."""
        seen = h.mean((-2, -1)) if self.pools else h
        gate = torch.sigmoid(self.score(F.gelu(self.hidden(seen))))
        return gate[:, :, None, None] if self.pools else gate


class FeelNothing(torch.autograd.Function):
    """Let a seed learn without the host feeling it: forward is exactly `host`.

    Backward hands the gradient to both, so the seed learns from the host's error
    while the host's own gradient stays as if there were no seed. A sum such as
    `host + (delta - delta.detach())` would turn one inf in the seed into a NaN host.
    """

    @staticmethod
    def forward(ctx: Any, host: Tensor, delta: Tensor) -> Tensor:
        return host.view_as(host)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def bound(delta: Tensor, h: Tensor) -> Tensor:
    """Δ scaled down where needed so that rms Δ ≤ rms h over the channels of each position.

    Straight-through gives a seed no feedback on its own output, so without a bound Δ runs away
    (measured: to 78–1567 times h). Growing Δ beyond the bound earns no gradient; h gets none.
    """
    channels = 1 if h.ndim == 4 else -1
    wide = delta.to(torch.promote_types(delta.dtype, torch.float32))  # a square overflows float16
    power = wide.square().mean(channels, keepdim=True)
    limit = h.detach().to(wide.dtype).square().mean(channels, keepdim=True).sqrt()
    scale = (limit * torch.rsqrt(power + TINY)).clamp(max=1.0)
    return (wide * scale).to(delta.dtype)


def straight_through(h: Tensor, delta: Tensor) -> Tensor:
    """Exactly h, while the seed behind Δ learns within bounds: isolation in a loop we do not own."""
    return FeelNothing.apply(h, bound(delta, h))


def detached(h: Tensor) -> Tensor:
    """The features as a seed may see them without the host feeling it.

    They ask for a gradient that nobody reads: GroupNorm's backward on channels_last features that
    ask for none crashes torch 2.13 on the CPU.
    """
    if torch.compiler.is_compiling():  # where requires_grad_() on an intermediate breaks the graph
        return _Unfelt.apply(h)
    return h.detach().requires_grad_()


class _Unfelt(torch.autograd.Function):
    """`detach` for a compiled graph: no gradient reaches h, yet the output asks for one if h does."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None
