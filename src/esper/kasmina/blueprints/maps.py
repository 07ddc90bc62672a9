"""Seeds for feature maps [B, C, H, W]. Each ends in a zero projection with no norm after it: Δ = 0 at birth.

A norm after the zero would blow up the first gradient by 1/√eps; a relu after it would stay shut for ever.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import Noop, blueprint
from esper.kasmina.site import Layout

MAP = (Layout.MAP,)
Layer = TypeVar("Layer", bound=nn.Module)


@blueprint("noop", layouts=Layout)
def noop(dim: int) -> nn.Module:
    return Noop()


@blueprint("norm", layouts=MAP)
def norm(dim: int) -> nn.Module:
    return Renorm(group_norm(dim))


@blueprint("attention", layouts=MAP)
def attention(dim: int) -> nn.Module:
    return SqueezeExcite(dim)


@blueprint("conv_small", layouts=MAP)
def conv_small(dim: int) -> nn.Module:
    return nn.Sequential(group_norm(dim), rectifier(), zeroed(conv(dim, dim, 1)))


@blueprint("conv_light", layouts=MAP)
def conv_light(dim: int) -> nn.Module:
    return nn.Sequential(group_norm(dim), rectifier(), zeroed(conv(dim, dim, 3)))


@blueprint("conv_heavy", layouts=MAP)
def conv_heavy(dim: int) -> nn.Module:
    return nn.Sequential(
        group_norm(dim), rectifier(), conv(dim, dim, 3), group_norm(dim), rectifier(), zeroed(conv(dim, dim, 3))
    )


@blueprint("depthwise", layouts=MAP)
def depthwise(dim: int) -> nn.Module:
    return nn.Sequential(conv(dim, dim, 3, groups=dim), group_norm(dim), rectifier(), zeroed(conv(dim, dim, 1)))


@blueprint("bottleneck", layouts=MAP)
def bottleneck(dim: int) -> nn.Module:
    width = max(8, dim // 4)
    return nn.Sequential(
        group_norm(dim),
        conv(dim, width, 1),
        rectifier(),
        conv(width, width, 3),
        rectifier(),
        zeroed(conv(width, dim, 1)),
    )


class Renorm(nn.Module):
    """Δ = tanh θ · (norm(h) − h): a dial from the features as they are to their normalised form."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.theta = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.theta) * (self.norm(h) - h)


class SqueezeExcite(nn.Module):
    """Δ = h · tanh(excite(squeeze(mean h))): each channel turned up or down by what the sample holds."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        width = max(1, dim // 4)
        self.squeeze = nn.Linear(dim, width, bias=False)
        self.excite = zeroed(nn.Linear(width, dim))

    def forward(self, h: Tensor) -> Tensor:
        pooled = h.mean((-2, -1))  # [B, C]
        scale = torch.tanh(self.excite(F.gelu(self.squeeze(pooled))))  # gelu: of so few units none may die
        return h * scale[:, :, None, None]


def rectifier() -> nn.Module:
    """Leaky: behind a plain relu a few steps at a high learning rate shut a small seed for good."""
    return nn.LeakyReLU(0.1)


def conv(dim_in: int, dim_out: int, kernel: int, *, groups: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(dim_in, dim_out, kernel, padding=kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


def zeroed(layer: Layer) -> Layer:
    """The last projection of a seed: zero, so the seed is the identity until it has learnt."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def group_norm(dim: int) -> nn.GroupNorm:
    """As many groups as leave 16 channels in each, else one.

    Groups of one channel would erase what a constant channel says, and a whole 1×1 map: a dead seed.
    """
    groups = next((g for g in (32, 16, 8, 4, 2) if dim % g == 0 and dim // g >= 16), 1)
    return nn.GroupNorm(groups, dim)
