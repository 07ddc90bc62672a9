"""Augmentation of minibatches.

Legend: B images, C channels, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def crop_and_flip(x: Tensor, *, pad: int, black: Sequence[float], generator: torch.Generator) -> Tensor:
    """Return `x [B, C, H, W]` with each image shifted by up to `pad` pixels and mirrored with probability 1/2.

    The border is filled with `black`, one value per channel. Cropping and mirroring all images is a single gather over
    pixels; the result is `channels_last`. `generator` is a CPU generator, so the shifts are the same on every device.
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

    # copy whole rows of pixels: a copy with an inner loop over 3 channels is slow
    edge = torch.tensor(black, dtype=x.dtype, device=x.device).repeat(wide)
    padded = edge.expand(batch, high, wide * channels).contiguous()
    inner = slice(pad * channels, (pad + width) * channels)
    padded[:, pad : pad + height, inner] = x.permute(0, 2, 3, 1).reshape(batch, height, width * channels)
    pixels = padded.view(-1, channels).index_select(0, index)
    return pixels.view(batch, height, width, channels).permute(0, 3, 1, 2)
