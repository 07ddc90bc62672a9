"""Seeds for sequences [B, T, D]. Those that act on the last dimension only also support vectors [B, D].

For layout "sequence" all are causal: Δ at a token depends on that token and earlier ones only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from esper.kasmina.blueprints.maps import Renorm, zeroed
from esper.kasmina.blueprints.registry import blueprint
from esper.kasmina.feature_spec import Layout

LAST_DIM = (Layout.SEQUENCE, Layout.VECTOR, Layout.BIDIRECTIONAL)


@blueprint("norm", layouts=LAST_DIM)
def norm(dim: int) -> nn.Module:
    """Return a learned interpolation to layer-normalised features."""
    return Renorm(nn.LayerNorm(dim))


@blueprint("lora", layouts=LAST_DIM)
def lora(dim: int) -> nn.Module:
    """Return a low-rank linear map of rank 8."""
    return _low_rank(dim, 8)


@blueprint("lora_large", layouts=LAST_DIM)
def lora_large(dim: int) -> nn.Module:
    """Return a low-rank linear map of rank 32."""
    return _low_rank(dim, 32)


@blueprint("mlp_small", layouts=LAST_DIM)
def mlp_small(dim: int) -> nn.Module:
    """Return a two-layer MLP with hidden width 2·D."""
    return _mlp(dim, 2 * dim)


@blueprint("mlp", layouts=LAST_DIM)
def mlp(dim: int) -> nn.Module:
    """Return a two-layer MLP with hidden width 4·D."""
    return _mlp(dim, 4 * dim)


@blueprint("attention", layouts=(Layout.SEQUENCE,))
def attention(dim: int) -> nn.Module:
    """Return causal self-attention."""
    return CausalAttention(dim)


@blueprint("attention", layouts=(Layout.BIDIRECTIONAL,))
def bidirectional_attention(dim: int) -> nn.Module:
    """Return self-attention over all tokens."""
    return BidirectionalAttention(dim)


@blueprint("flex_attention", layouts=(Layout.SEQUENCE,))
def flexible_attention(dim: int) -> nn.Module:
    """Return causal self-attention that uses FlexAttention on CUDA."""
    return FlexAttention(dim)


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
        split = self.qkv(h).unflatten(-1, (3, self.heads, -1))  # [B, T, 3, heads, D / heads]
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, T, D / heads]
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention over [B, heads, T, D / heads]."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class BidirectionalAttention(CausalAttention):
    """The same weights without a mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention over [B, heads, T, D / heads]."""
        return F.scaled_dot_product_attention(q, k, v)


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
