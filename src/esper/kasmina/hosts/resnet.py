"""A residual convolutional classifier: stages of pre-activation blocks, each stage at half the resolution."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.hosts.host import Host, image_needs
from esper.leyline.errors import ConfigError


class ResidualBlock(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))). A block that changes the shape projects x by a 1×1 convolution.

    The projection selects the pixels first instead of a convolution with a stride: the gradient of the weights of a
    1×1 convolution with stride 2 and two to seven channels in channels_last writes outside its memory in torch 2.13
    on the CPU.
    """

    def __init__(self, dim_in: int, dim_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(dim_in)
        self.conv1 = nn.Conv2d(dim_in, dim_out, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(dim_out)
        self.conv2 = nn.Conv2d(dim_out, dim_out, 3, padding=1, bias=False)
        same = stride == 1 and dim_in == dim_out
        self.project = None if same else nn.Conv2d(dim_in, dim_out, 1, bias=False)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after this block."""
        active = F.relu(self.norm1(x))
        skip = x if self.project is None else self.project(active[..., :: self.stride, :: self.stride])
        return skip + self.conv2(F.relu(self.norm2(self.conv1(active))))


class ResidualCNNHost(Host):
    """A 3×3 convolution, `stages` × `blocks` residual blocks, norm, ReLU, mean over the pixels and a linear head.

    Input: images `[B, in_channels, H, W]`; output: logits `[B, classes]`. The first stage has `base` channels. The
    first block of every later stage doubles the channels and halves H and W, rounded up.
    """

    data_kind = "image"
    width_name = "base"
    depth_name = "blocks"

    def __init__(self, *, in_channels: int, classes: int, base: int, stages: int, blocks: int = 1) -> None:
        super().__init__()
        if min(in_channels, classes, base, stages, blocks) < 1:
            raise ConfigError(
                "a residual CNN host needs at least one input channel, class, base channel, stage and block per "
                f"stage, got {in_channels=}, {classes=}, {base=}, {stages=}, {blocks=}"
            )
        self.in_channels = in_channels
        self.classes = classes
        self.least_pixels = 2 ** (stages - 1)
        widths = [base * 2**stage for stage in range(stages) for _ in range(blocks)]
        self.stem = nn.Conv2d(in_channels, base, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            ResidualBlock(before, width, stride=width // before)
            for before, width in zip([base, *widths], widths, strict=False)
        )
        self.norm = nn.BatchNorm2d(widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, classes]`."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.norm(x)).mean((2, 3)))

    def sites(self) -> dict[str, str]:
        """Return one slot after each block."""
        return {f"r0c{i}": f"blocks.{i}" for i in range(len(self.blocks))}

    def needs(self, kind: str, shape: tuple[int, ...]) -> str | None:
        """Return what images the host needs, or None if these fit."""
        return image_needs(self.in_channels, self.least_pixels, kind, shape)

    @classmethod
    def small(cls, shape: tuple[int, ...], classes: int) -> dict[str, Any]:
        """Return the arguments of a small host for images of this shape."""
        return {"in_channels": shape[0], "classes": classes, "base": 8, "stages": 2, "blocks": 1}
