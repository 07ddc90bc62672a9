"""Worth of the seeds of one body, with standard errors, as a table, a dict and a plot.

*Gain* is the improvement of a grown network over its no-growth baseline. *Dependence* is the quality lost when a part
is switched off now. The host adapts to a fossil, so its dependence does not measure its gain.
Contributions here are leave-one-out differences: evidence for uncommitted seeds, dependence for fossils.

Legend: n players.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from esper.leyline.errors import ConfigError
from esper.leyline.text import escape, html_table

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


ROW, BAR, LEFT, WIDTH, CELL = 44, 13, 150, 360, 44
BLUE, ORANGE, DARK = (57, 106, 177), (218, 124, 48), (50, 50, 50)
BARS = (("contribution", BLUE), ("shapley", ORANGE))
Colour = tuple[int, int, int]


class _Canvas:
    """Rectangles, lines and texts, written as SVG or, with Pillow, as PNG."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.shapes: list[tuple[str, tuple[float, ...], Colour, str]] = []

    def box(self, x: float, y: float, w: float, h: float, colour: Colour) -> None:
        self.shapes.append(("box", (x, y, w, h), colour, ""))

    def line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self.shapes.append(("line", (x0, y0, x1, y1), DARK, ""))

    def text(self, x: float, y: float, text: str) -> None:
        self.shapes.append(("text", (x, y), DARK, text))

    def svg(self) -> str:
        forms = {
            "box": '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="rgb{}"/>',
            "line": '<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="rgb{}"/>',
            "text": '<text x="{:.1f}" y="{:.1f}" fill="rgb{}">{}</text>',
        }
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:.0f}" height="{self.height:.0f}" '
            'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        )
        shapes = [forms[kind].format(*at, colour, escape(text)) for kind, at, colour, text in self.shapes]
        return "\n".join([head, *shapes, "</svg>\n"])

    def png(self, path: Path) -> None:
        try:
            from PIL import Image, ImageDraw
        except ImportError as error:
            raise ConfigError(
                f"writing {path.name} needs Pillow: pip install 'esper-lite[images]', or use the suffix .svg"
            ) from error
        image = Image.new("RGB", (round(self.width), round(self.height)), "white")
        pen = ImageDraw.Draw(image)
        for kind, at, colour, text in self.shapes:
            if kind == "box":
                pen.rectangle((at[0], at[1], at[0] + at[2], at[1] + at[3]), fill=colour)
            elif kind == "line":
                pen.line(at, fill=colour)
            else:
                pen.text((at[0], at[1] - 11), text, fill=colour)
        image.save(path)


def plot_worth(worth: Worth, path: str | Path) -> Path:
    """Draw the result of `Grower.worth`: bars with standard errors, interactions as a heat map.

    Args:
        worth: The result of `Grower.worth`.
        path: File to write: .svg, or .png if Pillow is installed.

    Returns:
        The path.

    Raises:
        ConfigError: The suffix is neither .svg nor .png.

    Example:
        >>> esper.plot_worth(grower.worth([(x, y)]), "worth.svg").name
        'worth.svg'
    """
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"the suffix of a plot must be .svg or .png, got {path.name!r}")
    facts = worth.to_dict()
    slots, size = facts["slots"], max(len(facts["slots"]), 2)
    canvas = _Canvas(LEFT + WIDTH + 110 + size * CELL, 90 + size * ROW)
    quality, se, committed = (_shown(facts[name]) for name in ("quality", "quality_se", "committed"))
    canvas.text(16, 24, f"quality {quality} ± {se} (standard error), without these seeds {committed}")
    _bars(canvas, slots)
    _heat_map(canvas, slots, LEFT + WIDTH + 90, 62)
    if path.suffix.lower() == ".svg":
        path.write_text(canvas.svg(), encoding="utf-8")
    else:
        canvas.png(path)
    return path


def _bars(canvas: _Canvas, slots: dict[str, Any]) -> None:
    spans = [
        (slot[name] - 2 * (slot[f"{name}_se"] or 0.0), slot[name] + 2 * (slot[f"{name}_se"] or 0.0))
        for slot in slots.values()
        for name, _ in BARS
        if slot[name] is not None
    ]
    low, high = min([0.0, *(a for a, _ in spans)]), max([0.0, *(b for _, b in spans)])
    scale = WIDTH / ((high - low) or 1.0)
    zero = LEFT - low * scale
    canvas.box(LEFT, 36, 10, 10, BLUE)
    canvas.text(LEFT + 15, 46, "contribution (of fossils: dependence)")
    canvas.box(LEFT + 230, 36, 10, 10, ORANGE)
    canvas.text(LEFT + 245, 46, "Shapley value; lines: ± 2 standard errors")
    for i, (name, slot) in enumerate(slots.items()):
        top = 62 + i * ROW
        canvas.text(16, top + 18, name + (" (fossil)" if slot["kind"] == "dependence" else ""))
        for k, (column, colour) in enumerate(BARS):
            value, se = slot[column], slot[f"{column}_se"]
            if value is None:
                continue
            y = top + k * (BAR + 3)
            canvas.box(zero + min(value, 0.0) * scale, y, abs(value) * scale, BAR, colour)
            if se is not None:
                ends = [zero + (value + side * 2 * se) * scale for side in (-1, 1)]
                canvas.line(ends[0], y + BAR / 2, ends[1], y + BAR / 2)
                for end in ends:
                    canvas.line(end, y + 2, end, y + BAR - 2)
            canvas.text(LEFT + WIDTH + 14, y + 11, f"{value:+.4f}")
    canvas.line(zero, 56, zero, 62 + len(slots) * ROW)


def _heat_map(canvas: _Canvas, slots: dict[str, Any], left: float, top: float) -> None:
    column = {name: j for j, name in enumerate(slots)}
    pairs = [
        (i, column[other], value)
        for i, slot in enumerate(slots.values())
        for other, value in slot["interaction"].items()
        if value is not None
    ]
    if not pairs:
        return
    canvas.text(left, top - 16, "interactions")
    largest = max(abs(value) for *_, value in pairs) or 1.0
    for i, j, value in pairs:
        red, green, blue = (round(255 + (c - 255) * abs(value) / largest) for c in (ORANGE if value > 0 else BLUE))
        canvas.box(left + j * CELL, top + i * CELL, CELL - 2, CELL - 2, (red, green, blue))
        canvas.text(left + j * CELL + 4, top + i * CELL + 26, f"{value:+.3f}")


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
