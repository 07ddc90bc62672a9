"""A convolutional classifier whose blocks double the channels, with pooling between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from esper.kasmina.hosts.host import Host, image_needs, impaired_widths
from esper.leyline.errors import ConfigError


class CNNHost(Host):
    """`blocks` × (convolution, BatchNorm, ReLU), max pooling after the first `pools` of them, and a linear head.

    Input: images `[B, in_channels, H, W]`; output: logits `[B, classes]`. Each pool halves H and W. The memory
    format follows that of the images and weights.

    With `doublings`, only that many blocks double the channels; the later ones keep them. Block `impaired` lacks
    something: its convolution sees single pixels ("kernel"), so do those of all later blocks ("kernels"), it and all
    later blocks have no BatchNorm ("norms"), it has a quarter of its channels ("width"), or it passes its input on
    ("missing").
    """

    data_kind = "image"
    width_name = "base"

    def __init__(
        self, *, in_channels: int, classes: int, base: int, blocks: int, pools: int | None = None, kernel: int = 3,
        doublings: int | None = None, impaired: int = 0, impairment: str = "none",
    ) -> None:  # fmt: skip
        super().__init__()
        pools = blocks if pools is None else pools
        if min(in_channels, classes, base, blocks) < 1:
            raise ConfigError(
                "a CNN host needs at least one input channel, class, base channel and block, got "
                f"in_channels={in_channels}, classes={classes}, base={base}, blocks={blocks}"
            )
        if not 0 <= pools <= blocks:
            raise ConfigError(f"pools must lie between 0 and the number of blocks, {blocks}, got {pools}")
        if doublings is not None and doublings < 0:
            raise ConfigError(f"doublings must be ≥ 0, got {doublings}")
        if kernel < 1 or kernel % 2 == 0:
            raise ConfigError(f"kernel must be odd, so that padding keeps the size, got {kernel}")

        self.in_channels = in_channels
        self.classes = classes
        most = blocks if doublings is None else doublings
        full = [base * 2 ** min(i, most) for i in range(blocks)]
        widths = [in_channels, *impaired_widths(in_channels, full, impaired, impairment)]
        last = {"kernel": impaired, "kernels": blocks - 1}.get(impairment, -1)  # last block that sees single pixels
        kernels = [1 if impaired <= i <= last else kernel for i in range(blocks)]
        normed = blocks if impairment != "norms" else impaired  # number of blocks with BatchNorm
        self.blocks = nn.ModuleList(
            nn.Identity()
            if impairment == "missing" and i == impaired
            else _block(widths[i], widths[i + 1], kernels[i], has_norm=i < normed)
            for i in range(blocks)
        )
        self.pools = nn.ModuleList(nn.MaxPool2d(2) for _ in range(pools))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, classes]`."""
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i < len(self.pools):
                x = self.pools[i](x)
        return self.head(x.mean((2, 3)))

    def sites(self) -> dict[str, str]:
        """Return the slots in execution order: row 0 after each block, row 1 after its pool."""
        sites = {}
        for i in range(len(self.blocks)):
            sites[f"r0c{i}"] = f"blocks.{i}"
            if i < len(self.pools):
                sites[f"r1c{i}"] = f"pools.{i}"
        return sites

    def needs(self, kind: str, shape: tuple[int, ...]) -> str | None:
        """Return what images the host needs, or None if these fit: every pool halves H and W."""
        return image_needs(self.in_channels, 2 ** len(self.pools), kind, shape)

    @classmethod
    def small(cls, shape: tuple[int, ...], classes: int) -> dict[str, Any]:
        """Return the arguments of a small host for images of this shape."""
        return {"in_channels": shape[0], "classes": classes, "base": 8, "blocks": 2}

    @classmethod
    def deeper(cls, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with one more block; the number of pools does not change."""
        pools = kwargs.get("pools")
        return {**kwargs, "pools": kwargs["blocks"] if pools is None else pools, "blocks": kwargs["blocks"] + 1}


def _block(inputs: int, outputs: int, kernel: int, *, has_norm: bool) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=not has_norm)
    norm: list[nn.Module] = [nn.BatchNorm2d(outputs)] if has_norm else []
    return nn.Sequential(convolution, *norm, nn.ReLU())
