"""Worth of the seeds of one body, with standard errors, as a table and a dict. `esper.plot_worth` draws it.

*Gain* is the improvement of a grown network over its no-growth baseline. *Dependence* is the quality lost when a part
is switched off now. For a fossil, on which the host has come to rely, dependence says little about its gain.
Contributions here are leave-one-out differences: evidence for uncommitted seeds, dependence for fossils.

Legend: n players.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LEGEND = (
    "contribution: quality with all seeds minus quality without this growing seed",
    "dependence:   the same of a committed seed; above its gain, as the host adapted",
    "Shapley φ:    its share of quality, averaged over every order of adding seeds",
    "interactions: sum over pairs; above 0 the seeds reinforce each other",
)
"""The meaning of the columns of a printed `Worth`."""


@dataclass(frozen=True, slots=True)
class Worth:
    """All measurements of one body at one time; NaN where nothing was measured. Errors are standard errors."""

    slots: tuple[str, ...]
    """The players: live seeds, and fossils if they were included."""
    fossils: tuple[bool, ...]
    """Which players are committed: their contribution is dependence."""
    quality: float
    """Quality with all players on."""
    quality_se: float
    committed: float
    """Quality with all players off."""
    contribution: Array  # [n]
    contribution_se: Array
    solo: Array  # [n] player alone minus no player
    solo_se: Array
    shapley: Array  # [n]
    shapley_se: Array
    shapley_design_se: Array  # [n] due to coalitions not evaluated
    interaction: Array  # [n, n]
    interaction_se: Array
    evaluations: int
    prospect: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Expected gain of each TRAINING seed at alpha = 1, and its standard error."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, one entry per slot; None where nothing was measured."""
        names = ("contribution", "contribution_se", "solo", "solo_se", "shapley", "shapley_se", "shapley_design_se")
        slots: dict[str, dict[str, Any]] = {}
        for i, slot in enumerate(self.slots):
            slots[slot] = {"kind": "dependence" if self.fossils[i] else "contribution"}
            slots[slot] |= {name: _number(getattr(self, name)[i]) for name in names}
            for name in ("interaction", "interaction_se"):
                row = getattr(self, name)[i]
                slots[slot][name] = {other: _number(row[j]) for j, other in enumerate(self.slots) if j != i}
        prospects = {
            slot: {"prospect": _number(p), "prospect_se": _number(se)} for slot, (p, se) in self.prospect.items()
        }
        quality = {name: _number(getattr(self, name)) for name in ("quality", "quality_se", "committed")}
        return quality | {"evaluations": self.evaluations, "slots": slots, "prospects": prospects}

    def __str__(self) -> str:
        lines = [
            f"quality {self.quality:.4f} ± {self.quality_se:.4f}, without these seeds {self.committed:.4f} "
            "(±: standard error)"
        ]
        if self.slots:
            lines.append(f"{'slot':<20} {'':<12} {'without it':>16} {'Shapley φ':>16} {'interactions':>12}")
        for i, name in enumerate(self.slots):
            kind = "dependence" if self.fossils[i] else "contribution"
            others = [self.interaction[i, j] for j in range(len(self.slots)) if j != i]
            pairs = f"{np.nansum(others):+.4f}" if others and np.isfinite(others).any() else ""
            lines.append(
                f"{name:<20} {kind:<12} {_with_error(self.contribution[i], self.contribution_se[i]):>16} "
                f"{_with_error(self.shapley[i], self.shapley_se[i]):>16} {pairs:>12}"
            )
        for name, (value, se) in self.prospect.items():
            lines.append(f"{name:<20} {'prospect':<12} {_with_error(value, se):>16}")
        return "\n".join([*lines, *(LEGEND if self.slots else ())])


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _with_error(value: float, se: float) -> str:
    return "" if not np.isfinite(value) else f"{value:+.4f} ± {se:.4f}" if np.isfinite(se) else f"{value:+.4f}"
