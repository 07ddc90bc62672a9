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

from esper.simic.attribution.shapley import Array


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
        return {
            "quality": _number(self.quality),
            "quality_se": _number(self.quality_se),
            "committed": _number(self.committed),
            "evaluations": self.evaluations,
            "slots": {
                name: {
                    "kind": "dependence" if self.fossils[i] else "contribution",
                    "contribution": _number(self.contribution[i]),
                    "contribution_se": _number(self.contribution_se[i]),
                    "solo": _number(self.solo[i]),
                    "solo_se": _number(self.solo_se[i]),
                    "shapley": _number(self.shapley[i]),
                    "shapley_se": _number(self.shapley_se[i]),
                    "shapley_design_se": _number(self.shapley_design_se[i]),
                    "interaction": {
                        other: _number(self.interaction[i, j]) for j, other in enumerate(self.slots) if j != i
                    },
                    "interaction_se": {
                        other: _number(self.interaction_se[i, j]) for j, other in enumerate(self.slots) if j != i
                    },
                }
                for i, name in enumerate(self.slots)
            },
            "prospects": {
                name: {"prospect": _number(p), "prospect_se": _number(se)} for name, (p, se) in self.prospect.items()
            },
        }

    def __str__(self) -> str:
        lines = [
            f"quality {self.quality:.4f} ± {self.quality_se:.4f}, without these seeds {self.committed:.4f} "
            "(±: standard error)"
        ]
        if self.slots:
            lines.append(f"{'slot':<20} {'':<12} {'without it':>18} {'Shapley':>18} {'interactions':>14}")
        for i, name in enumerate(self.slots):
            kind = "dependence" if self.fossils[i] else "contribution"
            others = [self.interaction[i, j] for j in range(len(self.slots)) if j != i]
            pairs = f"{np.nansum(others):+.4f}" if others and np.isfinite(others).any() else ""
            lines.append(
                f"{name:<20} {kind:<12} {_with_error(self.contribution[i], self.contribution_se[i]):>18} "
                f"{_with_error(self.shapley[i], self.shapley_se[i]):>18} {pairs:>14}"
            )
        for name, (value, se) in self.prospect.items():
            lines.append(f"{name:<20} {'prospect':<12} {_with_error(value, se):>18}")
        return "\n".join(lines)


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _with_error(value: float, se: float) -> str:
    return "" if not np.isfinite(value) else f"{value:+.4f} ± {se:.4f}" if np.isfinite(se) else f"{value:+.4f}"
