"""Built-in blueprints.

Each seed ends in a zero-initialised projection without a norm, so Δ starts at 0. A norm after the zero would scale the
first gradient by 1/√eps. A ReLU after it would never activate.

First the seeds for maps [B, C, H, W], signals [B, C, L] and volumes [B, C, D, H, W], then those for sequences
[B, T, D]. Sequence seeds that act on the last dimension only also support vectors [B, D]. For layout "sequence" all are
causal: Δ at a token depends on that token and earlier ones only. The tables at the end register them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from esper.kasmina.blueprints.registry import SPATIAL, Factory, Layout, Noop, blueprint

Layer = TypeVar("Layer", bound=nn.Module)
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def conv_block(dim: int, kernel: int, spatial: int) -> nn.Module:
    """Return norm, activation and a convolution of this width."""
    return nn.Sequential(group_norm(dim), rectifier(), zeroed(conv(dim, dim, kernel, spatial)))


def conv_heavy(dim: int, spatial: int) -> nn.Module:
    """Return two blocks of norm, activation and a convolution of width 3."""
    first = (group_norm(dim), rectifier(), conv(dim, dim, 3, spatial))
    return nn.Sequential(*first, group_norm(dim), rectifier(), zeroed(conv(dim, dim, 3, spatial)))


def depthwise(dim: int, spatial: int) -> nn.Module:
    """Return a depthwise-separable convolution of width 3."""
    return nn.Sequential(
        conv(dim, dim, 3, spatial, groups=dim), group_norm(dim), rectifier(), zeroed(conv(dim, dim, 1, spatial))
    )


def bottleneck(dim: int, spatial: int) -> nn.Module:
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


def transformer_block(dim: int) -> nn.Module:
    """Return a whole pre-norm transformer block.

    It has no built-in name: one more name in `BLUEPRINTS` would change the inputs of every trained policy. Register it
    with `esper.blueprint("block", layouts="sequence")(transformer_block)`.
    """
    return TransformerBlock(dim)


def _low_rank(dim: int, rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, rank, bias=False), zeroed(nn.Linear(rank, dim, bias=False)))


def _mlp(dim: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, width), nn.GELU(), zeroed(nn.Linear(width, dim)))


class CausalAttention(nn.Module):
    """Causal self-attention with up to four heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = next(heads for heads in (4, 2, 1) if dim % heads == 0)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = zeroed(nn.Linear(dim, dim))

    def forward(self, h: Tensor) -> Tensor:
        """Return Δ(h), [B, T, D]."""
        q, k, v = self.split(h)
        return self.merged(self.attend(q, k, v))

    def split(self, h: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each [B, heads, T, D / heads]."""
        split = self.qkv(h).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, heads, D / heads]
        return split.permute(2, 0, 3, 1, 4).unbind(0)

    def merged(self, attended: Tensor) -> Tensor:
        """Return Δ from the values attended to, [B, heads, T, D / heads]."""
        return self.out(attended.transpose(1, 2).flatten(-2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention over [B, heads, T, D / heads]."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class BidirectionalAttention(CausalAttention):
    """The same weights, attending to all positions but those that the mask of the host module excludes."""

    takes_mask = True

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return Δ(h), [B, T, D]. The mask is as for `scaled_dot_product_attention`."""
        q, k, v = self.split(h)
        return self.merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class FlexAttention(CausalAttention):
    """The same weights and values, computed on CUDA by FlexAttention, which skips masked blocks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention over [B, heads, T, D / heads]."""
        return flex_causal(q, k, v) if _flex_runs(q) else super().attend(q, k, v)


class TransformerBlock(nn.Module):
    """Pre-norm causal attention and an MLP of width 4·D, without the residual connection around both."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = CausalAttention(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = _mlp(dim, 4 * dim)

    def forward(self, h: Tensor) -> Tensor:
        """Return Δ(h), [B, T, D]."""
        attended = self.attention(self.norm1(h))
        return attended + self.mlp(self.norm2(h + attended))


def _flex_runs(q: Tensor | fx.Proxy) -> bool:
    """Return whether FlexAttention supports this query."""
    if isinstance(q, fx.Proxy):  # a traced graph uses standard attention
        return False
    return q.is_cuda and q.shape[-1] >= 16 and q.dtype != torch.float64  # limits of the FlexAttention kernels


def flex_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by FlexAttention, compiled unless called on the CPU or within a compiled graph."""
    eager = torch.compiler.is_compiling() or not q.is_cuda
    attend: Any = flex_attention if eager else _compiled_flex()
    return attend(q, k, v, block_mask=_causal_mask(q.shape[-2], str(q.device)))


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)  # eager FlexAttention materialises all scores


@lru_cache(maxsize=8)
def _causal_mask(length: int, device: str) -> BlockMask:
    return create_block_mask(_not_later, None, None, length, length, device=device)


def _not_later(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


SPATIAL_SEEDS: dict[str, Callable[[int, int], nn.Module]] = {
    "norm": lambda dim, _spatial: Renorm(group_norm(dim)),
    "attention": SqueezeExcite,
    "conv_small": lambda dim, spatial: conv_block(dim, 1, spatial),
    "conv_light": lambda dim, spatial: conv_block(dim, 3, spatial),
    "conv_heavy": conv_heavy,
    "depthwise": depthwise,
    "bottleneck": bottleneck,
}
"""Blueprints for maps, signals and volumes: functions of the number of channels and of spatial axes."""
LAST_DIM_SEEDS: dict[str, Factory] = {
    "norm": lambda dim: Renorm(nn.LayerNorm(dim)),
    "lora": lambda dim: _low_rank(dim, 8),
    "lora_large": lambda dim: _low_rank(dim, 32),
    "mlp_small": lambda dim: _mlp(dim, 2 * dim),
    "mlp": lambda dim: _mlp(dim, 4 * dim),
}
"""Blueprints for sequences and vectors that treat each position alone."""


def _for_axes(make: Callable[[int, int], nn.Module], spatial: int) -> Factory:
    return lambda dim: make(dim, spatial)


blueprint("noop", layouts=Layout)(lambda _dim: Noop())
for _name, _make in SPATIAL_SEEDS.items():
    for _layout, _axes in SPATIAL.items():
        blueprint(_name, layouts=_layout)(_for_axes(_make, _axes))
for _name, _factory in LAST_DIM_SEEDS.items():
    blueprint(_name, layouts=(Layout.SEQUENCE, Layout.VECTOR, Layout.BIDIRECTIONAL))(_factory)
blueprint("attention", layouts=Layout.SEQUENCE)(CausalAttention)
blueprint("attention", layouts=Layout.BIDIRECTIONAL)(BidirectionalAttention)
blueprint("flex_attention", layouts=Layout.SEQUENCE)(FlexAttention)
