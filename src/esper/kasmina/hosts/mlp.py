"""A multi-layer perceptron for vectors and tiny images: the smallest host."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from esper.kasmina.hosts.host import Host, impaired_widths
from esper.leyline.errors import ConfigError


class MLPHost(Host):
    """`layers` × (linear, ReLU) of one width, then a linear head: `[B, …]` to logits `[B, classes]`.

    Layer `impaired` has a quarter of the width ("width") or passes its input on ("missing").
    """

    data_kind = "vector"
    width_name = "width"
    depth_name = "layers"

    def __init__(
        self, *, inputs: int, classes: int, width: int, layers: int, impaired: int = 0, impairment: str = "none"
    ) -> None:
        super().__init__()
        if min(inputs, classes, width, layers) < 1:
            raise ConfigError(
                "an MLP host needs at least one input, class, unit and layer, got "
                f"inputs={inputs}, classes={classes}, width={width}, layers={layers}"
            )
        self.inputs = inputs
        self.classes = classes
        if impairment in ("kernel", "kernels", "norms"):
            raise ConfigError(
                "an MLP host has no kernels and no norms; its impairment is 'none', 'width' or 'missing', got "
                f"{impairment!r}"
            )
        widths = [inputs, *impaired_widths(inputs, [width] * layers, impaired, impairment)]
        self.layers = nn.ModuleList(
            nn.Identity()
            if impairment == "missing" and i == impaired
            else nn.Sequential(nn.Linear(widths[i], widths[i + 1]), nn.ReLU())
            for i in range(layers)
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, classes]`."""
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def sites(self) -> dict[str, str]:
        """Return one slot after each layer."""
        return {f"r0c{i}": f"layers.{i}" for i in range(len(self.layers))}

    def needs(self, kind: str, shape: tuple[int, ...]) -> str | None:
        """Return what samples the host needs, or None if these fit; images are flattened."""
        fits = kind != "text" and math.prod(shape) == self.inputs
        return None if fits else f"{self.inputs} values per sample"

    @classmethod
    def small(cls, shape: tuple[int, ...], classes: int) -> dict[str, Any]:
        """Return the arguments of a small host for samples of this shape."""
        return {"inputs": math.prod(shape), "classes": classes, "width": 32, "layers": 3}
