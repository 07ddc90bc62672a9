"""Blending of a seed's Δ with the host's features h: operators, gate, and isolation during training.

Shapes: maps [B, C, H, W], sequences [B, T, D], vectors [B, D]. Dtype and memory format of h are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.feature_spec import SPATIAL, Layout
from esper.leyline.actions import Operator

GATE_BIAS = 2.0
"""Initial gate bias. σ(2) ≈ 0.88 lets the seed learn at once without saturating the gate."""

TINY = 1e-12
"""Lower bound that keeps 1/rms finite where Δ and h are 0."""

MOST_PULL = 2.0
"""Upper bound of the pull in `Leash`, as a multiple of the gradient, so that positions with h = 0 do not dominate."""


def blend(h: Tensor, delta: Tensor, weight: Tensor, operator: Operator, out: Tensor | None = None) -> Tensor:
    """Return the features with the seed's change. The gradient of h has full strength at any weight.

    `weight` is alpha, a 0-dim tensor; for GATE it is alpha · gate(h). Without gradients the result can go to `out`.
    """
    delta, weight = delta.to(h.dtype), weight.to(h.dtype)  # dtypes may differ under autocast
    if operator == Operator.MULTIPLY:
        return torch.addcmul(h, h, weight * torch.tanh(delta), out=out)
    return torch.addcmul(h, delta, weight, out=out)  # one pass over memory; h + w·Δ takes two


class Gate(nn.Module):
    """Learned factor of Δ, 0…1, per sample (map, signal, volume, vector) or per token (sequence).

    A token's gate depends on that token alone: a mean over the sequence would not be causal.
    """

    def __init__(self, dim: int, layout: Layout) -> None:
        super().__init__()
        width = max(8, dim // 4)
        self.spatial = SPATIAL.get(layout, 0)
        self.hidden = nn.Linear(dim, width)
        self.score = nn.Linear(width, 1)
        nn.init.normal_(self.score.weight, std=0.1)  # outputs start near the bias, yet `hidden` gets a gradient
        nn.init.constant_(self.score.bias, GATE_BIAS)

    def forward(self, h: Tensor) -> Tensor:
        """Return the gate as [B, 1, 1, 1], [B, T, 1] or [B, 1], which broadcasts against h."""
        pooled = h.mean(tuple(range(-self.spatial, 0))) if self.spatial else h
        gate = torch.sigmoid(self.score(F.gelu(self.hidden(pooled))))
        for _ in range(self.spatial):
            gate = gate.unsqueeze(-1)
        return gate


class FeelNothing(torch.autograd.Function):
    """Return exactly `host` in the forward pass, and pass the gradient to both inputs in the backward pass.

    The seed learns from the host's error, and the host's gradient is the same as without a seed. A sum such as
    `host + (delta - delta.detach())` would turn one inf in the seed into a NaN in the host.
    """

    @staticmethod
    def forward(_ctx: Any, host: Tensor, _delta: Tensor) -> Tensor:
        """Return a copy of `host`."""
        return host.clone()  # a view would forbid in-place operations after the slot

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient for both inputs."""
        return grad, grad


class Leash(torch.autograd.Function):
    """Return Δ unchanged; backward adds a pull towards 0 as strong as the gradient where rms Δ = rms h.

    Straight-through gives a seed no feedback on its own output, so without a pull Δ diverges (measured: to 78–1567
    times h). With it Δ converges to −rms h · E[g] / E[rms g], with rms over the channels of a position and g the
    gradient there: as large as h where g is always the same, 0 where g averages out.
    """

    @staticmethod
    def forward(ctx: Any, delta: Tensor, h: Tensor, channel_axis: int) -> Tensor:
        """Return Δ and save Δ and rms h."""
        ctx.channel_axis = channel_axis
        ctx.save_for_backward(delta, _rms(h, channel_axis))
        return delta.view_as(delta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient plus the pull."""
        delta, reach = ctx.saved_tensors
        axis = ctx.channel_axis
        reach = torch.maximum(reach, _rms(delta, axis) / MOST_PULL).clamp(min=TINY)
        return grad + (delta * (_rms(grad, axis) / reach)).to(grad.dtype), None, None


def _rms(t: Tensor, channel_axis: int) -> Tensor:
    """Return the rms over the channels of each position, in float32 at least: squares overflow float16."""
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    return wide.square().mean(channel_axis, keepdim=True).sqrt()


def straight_through(h: Tensor, delta: Tensor, channel_axis: int) -> Tensor:
    """Return exactly h, while the seed behind Δ is trained through `Leash`. Needs no shadow pass."""
    return FeelNothing.apply(h, Leash.apply(delta, h.detach(), channel_axis))


def detached(h: Tensor) -> Tensor:
    """Return the features without a gradient path to the host.

    The result requires a gradient that is never used: GroupNorm's backward on channels_last features that do not
    require one crashes torch 2.13 on the CPU.
    """
    if torch.compiler.is_compiling():  # requires_grad_() on an intermediate breaks the graph
        return _Detached.apply(h)
    return h.detach().requires_grad_()


class _Detached(torch.autograd.Function):
    """`detach` for compiled graphs: no gradient reaches h, but the output requires one if h does."""

    @staticmethod
    def forward(_ctx: Any, h: Tensor) -> Tensor:
        """Return a view of h."""
        return h.view_as(h)

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> None:
        """Return no gradient."""
        return None
