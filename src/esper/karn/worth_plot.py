"""Draws what seeds are worth: contributions and Shapley values with standard errors, interactions as a heat map."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from esper.leyline.errors import ConfigError
from esper.leyline.text import escape

ROW = 44
BAR = 13
LEFT = 150
WIDTH = 360
CELL = 44
BLUE = (57, 106, 177)
ORANGE = (218, 124, 48)
DARK = (50, 50, 50)
BARS = (("contribution", BLUE), ("shapley", ORANGE))
Colour = tuple[int, int, int]


class Measured(Protocol):
    """What is drawn: a `Worth`, which views cannot import."""

    def to_dict(self) -> dict[str, Any]:
        """Return qualities of the whole and, by slot, contributions, Shapley values and interactions."""


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


def plot_worth(worth: Measured, path: str | Path) -> Path:
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
    slots = facts["slots"]
    size = max(len(facts["slots"]), 2)
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
