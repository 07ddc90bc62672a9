"""The result of one call of `Grower.step`."""

from __future__ import annotations

from dataclasses import dataclass

from esper.leyline.actions import Op


@dataclass(frozen=True, slots=True)
class StepReport:
    """The measurements and changes of one call of `Grower.step`."""

    quality: float
    committed: float
    """Quality with every uncommitted seed off."""
    op: Op
    slot: str
    """The slot that the operation applied to; empty for WAIT."""
    effects: tuple[str, ...]
    """The structural changes, such as "build layer1"."""
