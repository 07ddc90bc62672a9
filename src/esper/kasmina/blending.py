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
"""Keeps 1/rms finite where Δ and h are 0."""

MOST_PULL = 2.0
"""How many times the gradient a leash pulls at most: a position where h = 0 must not drown all others."""


def blend(h: Tensor, delta: Tensor, weight: Tensor, operator: Operator, out: Tensor | None = None) -> Tensor:
    """The features with the seed's change in them; h itself keeps its full gradient at any weight.

    `weight` is alpha, a 0-dim tensor; for GATE it is alpha · gate(h). Without gradients it can write into `out`.
    """
    delta, weight = delta.to(h.dtype), weight.to(h.dtype)  # under autocast they may differ
    if operator == Operator.MULTIPLY:
        return torch.addcmul(h, h, weight * torch.tanh(delta), out=out)
    return torch.addcmul(h, delta, weight, out=out)  # one pass over memory, where h + w·Δ takes two


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
        return host.clone()  # a view would forbid an in-place operation behind the slot

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


class Leash(torch.autograd.Function):
    """Δ itself; backward adds a pull towards 0 that equals the gradient in strength where rms Δ = rms h.

    Straight-through gives a seed no feedback on its own output, so without a pull Δ runs away (measured:
    to 78–1567 times h). With it Δ settles at −rms h · E[g] / E[rms g], rms over the channels of a position
    and g the gradient there: as large as h where g always says the same, 0 where it contradicts itself.
    """

    @staticmethod
    def forward(ctx: Any, delta: Tensor, h: Tensor) -> Tensor:
        ctx.save_for_backward(delta, _rms(h))
        return delta.view_as(delta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        delta, reach = ctx.saved_tensors
        reach = torch.maximum(reach, _rms(delta) / MOST_PULL).clamp(min=TINY)
        return grad + (delta * (_rms(grad) / reach)).to(grad.dtype), None


def _rms(t: Tensor) -> Tensor:
    """Over the channels of each position; in float32 at least, for a square overflows float16."""
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    return wide.square().mean(1 if t.ndim == 4 else -1, keepdim=True).sqrt()


def straight_through(h: Tensor, delta: Tensor) -> Tensor:
    """Exactly h, while the seed behind Δ learns on a leash: isolation in a loop we do not own."""
    return FeelNothing.apply(h, Leash.apply(delta, h.detach()))


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
