"""A multi-layer perceptron for vectors and tiny images: the smallest host."""

from __future__ import annotations

from torch import Tensor, nn

from esper.leyline.errors import ConfigError


class MLPHost(nn.Module):
    """`layers` × (linear, ReLU) of one width, then a linear head: `[B, …]` to logits `[B, classes]`."""

    def __init__(self, *, inputs: int, classes: int, width: int, layers: int) -> None:
        super().__init__()
        if min(inputs, classes, width, layers) < 1:
            raise ConfigError(
                "an MLP host needs at least one input, class, unit and layer, got "
                f"inputs={inputs}, classes={classes}, width={width}, layers={layers}"
            )
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs if i == 0 else width, width), nn.ReLU()) for i in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, classes]`."""
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def sites(self) -> dict[str, str]:
        """Return one slot after each layer."""
        return {f"r0c{i}": f"layers.{i}" for i in range(len(self.layers))}
