"""Plot of worth: bars with error bars on the left, a heat map of pairwise interactions on the right."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from esper.leyline.errors import ConfigError
from esper.leyline.text import escape
from esper.simic.attribution.worth import Worth

ROW, BAR, LEFT, WIDTH, CELL = 44, 13, 150, 360, 44
BLUE, ORANGE = (57, 106, 177), (218, 124, 48)


class _Canvas:
    """Collects rectangles, lines and texts, and writes them as SVG or as PNG with Pillow."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.shapes: list[tuple[str, tuple[float, ...], tuple[int, int, int], str]] = []

    def box(self, x: float, y: float, w: float, h: float, colour: tuple[int, int, int]) -> None:
        """Add a filled rectangle."""
        self.shapes.append(("box", (x, y, w, h), colour, ""))

    def line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """Add a line."""
        self.shapes.append(("line", (x0, y0, x1, y1), (60, 60, 60), ""))

    def text(self, x: float, y: float, said: str) -> None:
        """Add a text."""
        self.shapes.append(("text", (x, y), (30, 30, 30), said))

    def svg(self) -> str:
        """Return the drawing as SVG."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:.0f}" height="{self.height:.0f}" '
            'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        ]
        for kind, at, colour, said in self.shapes:
            rgb = "rgb({},{},{})".format(*colour)
            if kind == "box":
                parts.append(
                    '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" '.format(*at) + f'fill="{rgb}"/>'
                )
            elif kind == "line":
                parts.append('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" '.format(*at) + f'stroke="{rgb}"/>')
            else:
                parts.append('<text x="{:.1f}" y="{:.1f}" '.format(*at) + f'fill="{rgb}">{escape(said)}</text>')
        return "\n".join([*parts, "</svg>\n"])

    def png(self, path: Path) -> None:
        """Write the drawing as PNG. Raise ConfigError if Pillow is not installed."""
        try:
            from PIL import Image, ImageDraw
        except ImportError as error:
            raise ConfigError("a PNG needs Pillow (pip install 'esper-lite[images]'); or name a file.svg") from error
        image = Image.new("RGB", (round(self.width), round(self.height)), "white")
        pen = ImageDraw.Draw(image)
        for kind, at, colour, said in self.shapes:
            if kind == "box":
                pen.rectangle((at[0], at[1], at[0] + at[2], at[1] + at[3]), fill=colour)
            elif kind == "line":
                pen.line(at, fill=colour)
            else:
                pen.text((at[0], at[1] - 11), said, fill=colour)
        image.save(path)


def draw(worth: Worth, path: Path) -> Path:
    """Write the plot as .svg or .png, depending on the suffix, and return its path."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"a picture is a .svg or a .png, got {path.name!r}")
    n = len(worth.slots)
    canvas = _Canvas(LEFT + WIDTH + 110 + max(n, 2) * CELL, 90 + max(n, 2) * ROW)
    quality = f"quality {worth.quality:.4f} ± {worth.quality_se:.4f} (standard error)"
    canvas.text(16, 24, f"{quality}, without these seeds {worth.committed:.4f}")
    _bars(canvas, worth)
    _heat(canvas, worth, LEFT + WIDTH + 90, 62)
    if path.suffix.lower() == ".svg":
        path.write_text(canvas.svg(), encoding="utf-8")
    else:
        canvas.png(path)
    return path


def _bars(canvas: _Canvas, worth: Worth) -> None:
    rows = [(worth.contribution, worth.contribution_se, BLUE), (worth.shapley, worth.shapley_se, ORANGE)]
    reach = [np.abs(v[np.isfinite(v)]) + np.nan_to_num(2 * se[np.isfinite(v)]) for v, se, _ in rows]
    most = max((float(r.max()) for r in reach if len(r)), default=0.0) or 1.0
    low = min((float((v - np.nan_to_num(2 * se))[np.isfinite(v)].min(initial=0.0)) for v, se, _ in rows), default=0.0)
    zero = LEFT + WIDTH * max(0.0, -low) / (most + max(0.0, -low))
    scale = WIDTH / (most + max(0.0, -low))
    canvas.box(LEFT, 36, 10, 10, BLUE)
    canvas.text(LEFT + 15, 46, "without it (of fossils: dependence)")
    canvas.box(LEFT + 230, 36, 10, 10, ORANGE)
    canvas.text(LEFT + 245, 46, "Shapley; bars: ± 2 standard errors")
    for i, name in enumerate(worth.slots):
        top = 62 + i * ROW
        canvas.text(16, top + 18, name + (" (fossil)" if worth.fossils[i] else ""))
        for k, (value, se, colour) in enumerate(rows):
            if not np.isfinite(value[i]):
                continue
            y = top + k * (BAR + 3)
            start, length = min(value[i], 0.0) * scale, abs(value[i]) * scale
            canvas.box(zero + start, y, length, BAR, colour)
            if np.isfinite(se[i]):
                a, b = (zero + (value[i] + side * 2 * se[i]) * scale for side in (-1, 1))
                canvas.line(a, y + BAR / 2, b, y + BAR / 2)
                for end in (a, b):
                    canvas.line(end, y + 2, end, y + BAR - 2)
            canvas.text(LEFT + WIDTH + 14, y + 11, f"{value[i]:+.4f}")
    canvas.line(zero, 56, zero, 62 + len(worth.slots) * ROW)


def _heat(canvas: _Canvas, worth: Worth, left: float, top: float) -> None:
    finite = np.abs(worth.interaction[np.isfinite(worth.interaction)])
    if not len(finite):
        return
    canvas.text(left, top - 16, "interactions")
    most = float(finite.max()) or 1.0
    for i in range(len(worth.slots)):
        for j in range(len(worth.slots)):
            value = worth.interaction[i, j]
            if np.isfinite(value):
                share = min(1.0, abs(float(value)) / most)
                hot = ORANGE if value > 0 else BLUE
                colour = tuple(round(255 + (c - 255) * share) for c in hot)
                canvas.box(left + j * CELL, top + i * CELL, CELL - 2, CELL - 2, colour)  # type: ignore[arg-type]
                canvas.text(left + j * CELL + 4, top + i * CELL + 26, f"{value:+.3f}")
