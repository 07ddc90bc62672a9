"""What a slot knows about its place: the kind and width of the features that pass there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Layout(StrEnum):
    """How the features at a slot are laid out; a blueprint says which layouts it serves."""

    MAP = "map"  # [B, C, H, W]
    SEQUENCE = "sequence"  # [B, T, D]
    VECTOR = "vector"  # [B, D]


@dataclass(frozen=True, slots=True)
class Site:
    """The features at one slot, as a probe saw them."""

    layout: Layout
    dim: int
    """Channels of a map, width of a sequence or vector."""
    shape: tuple[int, ...]
    """One sample's shape, without the batch."""
    channels_last: bool = False
    """A map whose channels lie next to each other in memory: seeds are laid out the same way."""
