"""Seeds for maps [B, C, H, W], signals [B, C, L] and volumes [B, C, D, H, W].

Each ends in a zero-initialised projection without a norm, so Δ starts at 0.

A norm after the zero would scale the first gradient by 1/√eps. A ReLU after it would never activate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import Noop, blueprint
from esper.kasmina.feature_spec import SPATIAL, Layout

Layer = TypeVar("Layer", bound=nn.Module)
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class SpatialFactory(Protocol):
    """Function from the number of channels and of spatial axes to a seed."""

    def __call__(self, dim: int, *, spatial: int) -> nn.Module:
        """Return a seed."""
        ...


def spatial_blueprint(name: str) -> Callable[[SpatialFactory], SpatialFactory]:
    """Register a function as the blueprint `name` for maps, signals and volumes."""

    def register(factory: SpatialFactory) -> SpatialFactory:
        for layout, spatial in SPATIAL.items():
            blueprint(name, layouts=(layout,))(partial(factory, spatial=spatial))
        return factory

    return register


@blueprint("noop", layouts=Layout)
def noop(_dim: int) -> nn.Module:
    """Return a seed that changes nothing."""
    return Noop()


@spatial_blueprint("norm")
def norm(dim: int, *, spatial: int) -> nn.Module:  # noqa: ARG001
    """Return a learned interpolation to group-normalised features."""
    return Renorm(group_norm(dim))


@spatial_blueprint("attention")
def attention(dim: int, *, spatial: int) -> nn.Module:
    """Return a squeeze-and-excitation seed (channel attention)."""
    return SqueezeExcite(dim, spatial)


@spatial_blueprint("conv_small")
def conv_small(dim: int, *, spatial: int) -> nn.Module:
    """Return norm, activation and a convolution of width 1."""
    return nn.Sequential(group_norm(dim), rectifier(), zeroed(conv(dim, dim, 1, spatial)))


@spatial_blueprint("conv_light")
def conv_light(dim: int, *, spatial: int) -> nn.Module:
    """Return norm, activation and a convolution of width 3."""
    return nn.Sequential(group_norm(dim), rectifier(), zeroed(conv(dim, dim, 3, spatial)))


@spatial_blueprint("conv_heavy")
def conv_heavy(dim: int, *, spatial: int) -> nn.Module:
    """Return two blocks of norm, activation and a convolution of width 3."""
    return nn.Sequential(
        group_norm(dim),
        rectifier(),
        conv(dim, dim, 3, spatial),
        group_norm(dim),
        rectifier(),
        zeroed(conv(dim, dim, 3, spatial)),
    )


@spatial_blueprint("depthwise")
def depthwise(dim: int, *, spatial: int) -> nn.Module:
    """Return a depthwise-separable convolution of width 3."""
    return nn.Sequential(
        conv(dim, dim, 3, spatial, groups=dim), group_norm(dim), rectifier(), zeroed(conv(dim, dim, 1, spatial))
    )


@spatial_blueprint("bottleneck")
def bottleneck(dim: int, *, spatial: int) -> nn.Module:
    """Return a bottleneck of convolutions of width 1, 3 and 1 with a quarter of the channels, at least 8."""
    width = max(8, dim // 4)
    inner = (conv(dim, width, 1, spatial), rectifier(), conv(width, width, 3, spatial), rectifier())
    return nn.Sequential(group_norm(dim), *inner, zeroed(conv(width, dim, 1, spatial)))


class Renorm(nn.Module):
    """Δ = tanh θ · (norm(h) − h): a learned interpolation from the features to their normalised form."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.theta = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        """Return Δ(h)."""
        return torch.tanh(self.theta) * (self.norm(h) - h)


class SqueezeExcite(nn.Module):
    """Δ = h · tanh(excite(squeeze(mean h))): scale each channel depending on the sample."""

    def __init__(self, dim: int, spatial: int) -> None:
        super().__init__()
        self.spatial = spatial
        width = max(1, dim // 4)
        self.squeeze = nn.Linear(dim, width, bias=False)
        self.excite = zeroed(nn.Linear(width, dim))

    def forward(self, h: Tensor) -> Tensor:
        """Return Δ(h)."""
        pooled = h.mean(tuple(range(-self.spatial, 0)))  # [B, C]
        scale = torch.tanh(self.excite(F.gelu(self.squeeze(pooled))))  # gelu: with so few units a dead one is costly
        for _ in range(self.spatial):
            scale = scale.unsqueeze(-1)
        return h * scale


def rectifier() -> nn.Module:
    """Return a leaky ReLU. With a plain ReLU a few steps at a high learning rate can kill a small seed permanently."""
    return nn.LeakyReLU(0.1)


def conv(dim_in: int, dim_out: int, kernel: int, spatial: int, *, groups: int = 1) -> nn.Module:
    """Return a size-preserving convolution without bias, with Kaiming initialisation."""
    layer = CONVOLUTIONS[spatial](dim_in, dim_out, kernel, padding=kernel // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


def zeroed(layer: Layer) -> Layer:
    """Set all parameters of a seed's last projection to zero, so that Δ starts at 0. Return the layer."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def group_norm(dim: int) -> nn.GroupNorm:
    """Return a GroupNorm with the most groups that have at least 16 channels each, else one group.

    Groups of one channel would erase constant channels and 1×1 maps, and the seed could not learn.
    """
    groups = next((g for g in (32, 16, 8, 4, 2) if dim % g == 0 and dim // g >= 16), 1)
    return nn.GroupNorm(groups, dim)
