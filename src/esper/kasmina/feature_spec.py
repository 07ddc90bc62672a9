"""Sites: layout, width and shape of the features at a slot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Layout(StrEnum):
    """Layout of the features at a slot. A blueprint declares which layouts it supports."""

    MAP = "map"  # [B, C, H, W]
    SEQUENCE = "sequence"  # [B, T, D], a position may depend on earlier ones only
    VECTOR = "vector"  # [B, D]
    BIDIRECTIONAL = "bidirectional"  # [B, T, D], positions of the model depend on later ones
    SIGNAL = "signal"  # [B, C, L], positions of the model depend on later ones
    VOLUME = "volume"  # [B, C, D, H, W]


SPATIAL = {Layout.SIGNAL: 1, Layout.MAP: 2, Layout.VOLUME: 3}
"""Number of axes after the channels, for layouts with the channels on axis 1."""


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The features at one slot, as observed in the probe."""

    layout: Layout
    dim: int
    """Number of channels of a map, signal or volume, or width of a sequence or vector."""
    shape: tuple[int, ...]
    """Shape of one sample, without the batch dimension."""
    channels_last: bool = False
    """Whether a map has channels_last memory format. Seeds are built in the same format."""
    batch_axis: int = 0
    """Axis of the features that holds the batch: 1 for recurrent states and time-major sequences, else 0."""
    swapped: tuple[int, int] | None = None
    """Two axes that are swapped for the seed, which takes [B, T, D]: (0, 1) for [T, B, D], (1, 2) for [B, D, T]."""

    @property
    def channel_axis(self) -> int:
        """Return the axis of the features that holds the channels or the width."""
        return 1 if self.layout in SPATIAL or self.swapped == (1, 2) else -1

    def batch_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of a batch of `size` samples."""
        return (*self.shape[: self.batch_axis], size, *self.shape[self.batch_axis :])
