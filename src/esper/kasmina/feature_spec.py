"""Sites: layout, width and shape of the features at a slot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Layout(StrEnum):
    """Layout of the features at a slot. A blueprint declares which layouts it supports."""

    MAP = "map"  # [B, C, H, W]
    SEQUENCE = "sequence"  # [B, T, D]
    VECTOR = "vector"  # [B, D]


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The features at one slot, as observed in the probe."""

    layout: Layout
    dim: int
    """Number of channels of a map, or width of a sequence or vector."""
    shape: tuple[int, ...]
    """Shape of one sample, without the batch dimension."""
    channels_last: bool = False
    """Whether a map has channels_last memory format. Seeds are built in the same format."""
    batch_axis: int = 0
    """Axis of the features that holds the batch: 1 for recurrent states and time-major sequences, else 0."""
