"""A convolutional classifier whose blocks double the channels, with pooling between them."""

from __future__ import annotations

from torch import Tensor, nn

from esper.leyline.errors import ConfigError


class CNNHost(nn.Module):
    """`blocks` × (convolution, BatchNorm, ReLU), max pooling after the first `pools` of them, and a linear head.

    Input: images `[B, in_channels, H, W]`; output: logits `[B, classes]`. Each pool halves H and W. The memory
    format follows that of the images and weights.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        classes: int,
        base: int,
        blocks: int,
        pools: int | None = None,
        kernel: int = 3,
    ) -> None:
        super().__init__()
        pools = blocks if pools is None else pools
        if min(in_channels, classes, base, blocks) < 1:
            raise ConfigError(
                "a CNN host needs at least one input channel, class, base channel and block, got "
                f"in_channels={in_channels}, classes={classes}, base={base}, blocks={blocks}"
            )
        if not 0 <= pools <= blocks:
            raise ConfigError(f"pools must lie between 0 and the number of blocks, {blocks}, got {pools}")
        if kernel < 1 or kernel % 2 == 0:
            raise ConfigError(f"kernel must be odd, so that padding keeps the size, got {kernel}")

        widths = [in_channels, *(base * 2**i for i in range(blocks))]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(widths[i], widths[i + 1], kernel, padding=kernel // 2, bias=False),
                nn.BatchNorm2d(widths[i + 1]),
                nn.ReLU(),
            )
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
