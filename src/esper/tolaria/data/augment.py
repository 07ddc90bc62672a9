"""Augmentation of whole minibatches: `B` images, `C` channels, `H` × `W` pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def crop_and_flip(x: Tensor, *, pad: int, black: Sequence[float], generator: torch.Generator) -> Tensor:
    """Each image of `x [B, C, H, W]` shifted by up to `pad` pixels and mirrored half of the time.

    What slides in is `black`, one value per channel. Pixels are rows of one table, so crop and mirror of all
    images together are a single gather; the result is `channels_last`. `generator` lives on the CPU, so
    every device sees the same shifts.
    """
    batch, channels, height, width = x.shape
    draws = torch.randint(0, 2 * pad + 1, (2, batch), generator=generator)
    mirror = torch.randint(0, 2, (batch, 1), generator=generator)
    high, wide = height + 2 * pad, width + 2 * pad

    column = torch.arange(width)
    rows = torch.arange(height) + draws[0, :, None]  # [B, H], in the padded image
    columns = torch.where(mirror == 1, width - 1 - column, column) + draws[1, :, None]  # [B, W]
    first = torch.arange(batch)[:, None] * high
    index = ((first + rows)[:, :, None] * wide + columns[:, None, :]).flatten().to(x.device)  # [B·H·W]

    # whole rows of pixels are copied, not single ones: 3 channels would make a slow inner loop
    edge = torch.tensor(black, dtype=x.dtype, device=x.device).repeat(wide)
    padded = edge.expand(batch, high, wide * channels).contiguous()
    inner = slice(pad * channels, (pad + width) * channels)
    padded[:, pad : pad + height, inner] = x.permute(0, 2, 3, 1).reshape(batch, height, width * channels)
    pixels = padded.view(-1, channels).index_select(0, index)
    return pixels.view(batch, height, width, channels).permute(0, 3, 1, 2)
