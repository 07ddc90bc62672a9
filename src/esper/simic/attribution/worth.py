"""Worth of the seeds of one body, with standard errors, as a table and a dict. `karn/worth_plot.py` draws it.

*Gain* is the improvement of a grown network over its no-growth baseline. *Dependence* is the quality lost when a part
is switched off now. The host adapts to a fossil, so its dependence does not measure its gain.
Contributions here are leave-one-out differences: evidence for uncommitted seeds, dependence for fossils.

Legend: n players.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from esper.leyline.text import html_table

Array = npt.NDArray[np.float64]

LEGEND = (
    "contribution: quality with all seeds minus quality without this growing seed",
    "dependence:   the same of a committed seed; above its gain, as the host adapted",
    "Shapley φ:    its share of quality, averaged over every order of adding seeds",
    "interactions: sum over pairs; above 0 the seeds reinforce each other",
)
"""The meaning of the kinds and columns of a printed `Worth`."""
PROSPECT = "prospect:     the same of a seed in training, as if it were blended in fully"
"""The meaning of the kind `prospect`, printed if there is one."""
HEADER = ("slot", "kind", "with − without", "Shapley φ", "interactions")


@dataclass(frozen=True, slots=True)
class Worth:
    """All measurements of one body at one time; NaN where nothing was measured. Errors are standard errors.

    Example:
        >>> grower.germinate("1", "mlp_small")
        >>> worth = grower.worth([(x, y)])
        >>> worth.slots, worth.fossils, worth.contribution.shape
        (('1',), (False,), (1,))
    """

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
        """Return the measurements as plain numbers, for JSON.

        Returns:
            quality, quality_se, committed, evaluations, slots (one entry per slot) and prospects; None where nothing
            was measured.

        Example:
            >>> sorted(grower.worth([(x, y)]).to_dict())
            ['committed', 'evaluations', 'prospects', 'quality', 'quality_se', 'slots']
        """
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

    @property
    def _headline(self) -> str:
        quality = f"quality {self.quality:.4f} ± {self.quality_se:.4f}"
        if not self.slots and not self.prospect:
            return f"{quality} (±: standard error). There are no seeds"
        return f"{quality}, without these seeds {self.committed:.4f} (±: standard error)"

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return the cells of the table, with the columns of `HEADER`."""
        rows = []
        for i, name in enumerate(self.slots):
            kind = "dependence" if self.fossils[i] else "contribution"
            others = [self.interaction[i, j] for j in range(len(self.slots)) if j != i]
            pairs = f"{np.nansum(others):+.4f}" if others and np.isfinite(others).any() else ""
            difference = _with_error(self.contribution[i], self.contribution_se[i])
            rows.append((name, kind, difference, _with_error(self.shapley[i], self.shapley_se[i]), pairs))
        rows += [(name, "prospect", _with_error(*each), "", "") for name, each in self.prospect.items()]
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        if not rows:
            return self._headline
        lines = [
            f"{name:<20} {kind:<12} {difference:>16} {shapley:>16} {pairs:>12}".rstrip()
            for name, kind, difference, shapley, pairs in [HEADER, *rows]
        ]
        return "\n".join([self._headline, *lines, *self._legend()])

    def _legend(self) -> tuple[str, ...]:
        return (*LEGEND, PROSPECT) if self.prospect else LEGEND

    def _repr_html_(self) -> str:
        return html_table(self._headline, HEADER, self._rows(), numbers=(2, 3, 4), note=". ".join(self._legend()) + ".")


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _with_error(value: float, se: float) -> str:
    return "" if not np.isfinite(value) else f"{value:+.4f} ± {se:.4f}" if np.isfinite(se) else f"{value:+.4f}"
