"""A causal language model similar to GPT-2. `B` sequences, `T` tokens, `D` width, `V` vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.hosts.host import Host
from esper.leyline.errors import ConfigError


class CausalAttention(nn.Module):
    """Causal self-attention: `[B, T, D]` to `[B, T, D]`."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended features."""
        # unflatten and flatten need no batch size: one fx or export graph works for every batch size
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        # no dropout on the attention weights: it needs `self.training`, which is constant in a traced graph
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        return self.proj(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and an MLP of width 4·D, each with a residual connection."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = CausalAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after this block."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


SEGMENTS = 3


class TransformerHost(Host):
    """Tokens `[B, T]` to next-token logits `[B, T, V]`, T ≤ `block_size`. The head shares the embedding weights.

    The layers form `segments` equal groups, with one slot at the end of each. With `segments=None` there is a slot
    after every layer, or after the embedding if there are no layers. `extra_slots` more slots follow the last layer:
    each blueprint planted there adds to the depth.
    """

    data_kind = "text"

    def __init__(
        self,
        *,
        vocab: int,
        dim: int,
        heads: int,
        layers: int,
        block_size: int,
        segments: int | None = SEGMENTS,
        extra_slots: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if min(vocab, dim, heads, block_size, 1 if segments is None else segments) < 1 or layers < 0:
            raise ConfigError(
                "every size of a transformer host must be at least 1, only layers may be 0, got "
                f"{vocab=}, {dim=}, {heads=}, {layers=}, {block_size=}, {segments=}"
            )
        if dim % heads:
            raise ConfigError(f"dim must be a multiple of heads, got dim={dim}, heads={heads}")
        if segments and (layers % segments or not layers):
            raise ConfigError(
                f"layers must be a multiple of segments and not 0, got {layers=}, {segments=}. "
                "Set segments=None for a slot after every layer, or after the embedding if there are no layers"
            )
        if extra_slots < 0:
            raise ConfigError(f"extra_slots must be ≥ 0, got {extra_slots}")
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout must lie in [0, 1), got {dropout}")

        self.classes = vocab
        self.window = block_size
        self.layers_per_slot = 1 if segments is None else layers // segments
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(block_size, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.extra = nn.ModuleList(nn.Identity() for _ in range(extra_slots))
        self.norm = nn.LayerNorm(dim)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Initialise as GPT-2: std 0.02, divided by √(2 × `layers`) for projections into the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                adds_to_stream = name.endswith(("proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds_to_stream else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return next-token logits."""
        x = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])  # [B, T, D]
        for block in (*self.blocks, *self.extra):
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)  # [B, T, V]

    def sites(self) -> dict[str, str]:
        """Return one slot after the last layer of each segment or after the embedding, then the extra ones."""
        ends = range(self.layers_per_slot - 1, len(self.blocks), self.layers_per_slot)
        # without layers, the first slot follows `dropout`, the module that returns the embedded tokens
        modules = [f"blocks.{end}" for end in ends] or ["dropout"]
        modules += [f"extra.{i}" for i in range(len(self.extra))]
        return {f"r0c{i}": module for i, module in enumerate(modules)}

    def needs(self, kind: str, shape: tuple[int, ...]) -> str | None:
        """Return what samples the host needs, or None if these fit."""
        most = self.positions.num_embeddings
        return None if kind == "text" and shape[0] <= most else f"windows of at most {most} tokens"

    def fits_classes(self, classes: int) -> bool:
        """Return whether the vocabulary has at least this many tokens."""
        return classes <= self.classes

    @classmethod
    def small(cls, shape: tuple[int, ...], classes: int) -> dict[str, Any]:
        """Return the arguments of a small host for windows of this many tokens."""
        return {"vocab": classes, "block_size": shape[0], "dim": 64, "heads": 4, "layers": 3}

    @classmethod
    def wider(cls, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with one more feature per attention head."""
        return {**kwargs, "dim": kwargs["dim"] + kwargs["heads"]}

    @classmethod
    def deeper(cls, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with one more layer per segment, or one more layer with `segments=None`."""
        return {**kwargs, "layers": kwargs["layers"] + (kwargs.get("segments", SEGMENTS) or 1)}
