"""The result of one call of `Grower.step`."""

from __future__ import annotations

from dataclasses import dataclass

from esper.leyline.actions import Op
from esper.leyline.html import html_table


@dataclass(frozen=True, slots=True)
class StepReport:
    """The measurements and changes of one call of `Grower.step`.

    Example:
        >>> report = grower.step([(x, y)])
        >>> report.op.name, report.slot, report.effects
        ('WAIT', '', ())
    """

    quality: float
    """Quality of the whole network on the validation batches; NaN if nothing was measured."""
    committed: float
    """Quality with every uncommitted seed off."""
    op: Op
    """The operation that the controller chose."""
    slot: str
    """The slot that the operation applied to; empty for WAIT."""
    effects: tuple[str, ...]
    """The structural changes, such as "build layer1"."""

    def _repr_html_(self) -> str:
        chosen = f"{self.op.name} {self.slot}".strip()
        rows = [(f"{self.quality:.4f}", f"{self.committed:.4f}", chosen, ", ".join(self.effects))]
        header = ("quality", "without uncommitted seeds", "operation", "changes")
        return html_table("Step", header, rows, numbers=(0, 1))
