"""What a task asks of a host. A new host is one file with a subclass, and one row of `HOSTS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn


class Host(nn.Module):
    """Base class of the built-in hosts. It has no parameters and no forward of its own."""

    data_kind: ClassVar[str]
    """The kind of data that the host is made for: "image", "vector" or "text"."""
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
        """Return the arguments of the next wider host."""
        raise NotImplementedError

    @classmethod
    def deeper(cls, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the next deeper host."""
        raise NotImplementedError


def image_needs(channels: int, pixels: int, kind: str, shape: tuple[int, ...]) -> str | None:
    """Return the text of `Host.needs` for images of `channels` channels and at least `pixels`² pixels."""
    if kind == "image" and shape[0] == channels and min(shape[1:]) >= pixels:
        return None
    return f"images of {channels} channels and at least {pixels}×{pixels} pixels"
