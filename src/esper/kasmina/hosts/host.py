"""Interface of hosts. A new host is one file with a subclass, and one row of `HOSTS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from torch import nn

from esper.leyline.errors import ConfigError

Impairment = Literal["none", "kernel", "kernels", "norms", "width", "missing"]
"""What one block of a host lacks: nothing, neighbouring pixels, three quarters of its width, or all of it. With
"kernels" and "norms", it and all later blocks lack neighbouring pixels or normalisation."""


class Host(nn.Module):
    """Base class of the built-in hosts. It has no parameters and no forward of its own."""

    data_kind: ClassVar[str]
    """The kind of data that the host is made for: "image", "vector" or "text"."""
    width_name: ClassVar[str]
    """The argument that sets the width: channels of the first block, or units of a layer."""
    depth_name: ClassVar[str]
    """The argument that sets the depth: layers, or blocks of a stage."""
    window: int | None = None
    """A text is cut into samples of this many tokens; None for hosts that do not take text."""
    classes: int
    """The number of classes of the output."""

    def sites(self) -> dict[str, str]:
        """Return the module name of each slot `r{row}c{col}`, in execution order."""
        raise NotImplementedError

    def needs(self, kind: str, shape: tuple[int, ...]) -> str | None:
        """Return what samples the host needs, or None if samples of this kind and shape fit."""
        raise NotImplementedError

    def fits_classes(self, classes: int) -> bool:
        """Return whether the output fits data of this many classes."""
        return classes == self.classes

    @classmethod
    def small(cls, shape: tuple[int, ...], classes: int) -> dict[str, Any]:
        """Return the arguments of a small host for samples of this shape."""
        raise NotImplementedError

    @classmethod
    def wider(cls, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the next wider host: by default, one more of `width_name`."""
        return {**kwargs, cls.width_name: kwargs[cls.width_name] + 1}

    @classmethod
    def deeper(cls, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the next deeper host: by default, one more of `depth_name`."""
        return {**kwargs, cls.depth_name: kwargs.get(cls.depth_name, 1) + 1}


def impaired_widths(inputs: int, widths: list[int], impaired: int, impairment: str) -> list[int]:
    """Return the output width of every block of a host, of which block `impaired` has an impairment.

    A block of cut width has a quarter of its units, at least 1. A missing block passes its input on.
    """
    if impairment not in get_args(Impairment):
        raise ConfigError(f"impairment must be one of {', '.join(get_args(Impairment))}, got {impairment!r}")
    if impairment == "none":
        return list(widths)
    if not 0 <= impaired < len(widths):
        raise ConfigError(f"impaired must be the number of a block, 0 to {len(widths) - 1}, got {impaired}")
    out = list(widths)
    if impairment == "width":
        out[impaired] = max(1, widths[impaired] // 4)
    elif impairment == "missing":
        out[impaired] = inputs if impaired == 0 else widths[impaired - 1]
    return out


def image_needs(channels: int, pixels: int, kind: str, shape: tuple[int, ...]) -> str | None:
    """Return the text of `Host.needs` for images of `channels` channels and at least `pixels`² pixels."""
    if kind == "image" and shape[0] == channels and min(shape[1:]) >= pixels:
        return None
    return f"images of {channels} channels and at least {pixels}×{pixels} pixels"
