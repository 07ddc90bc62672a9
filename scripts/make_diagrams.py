"""Draw the diagrams of docs/concepts.md as SVG: the life of a seed, one step, forked evaluation.

    python scripts/make_diagrams.py            # write docs/images/diagram-*.svg
    python scripts/make_diagrams.py --check    # exit with code 1 if one is not up to date

The arrows of the life of a seed are those of `esper.leyline.stages.NEXT_STAGES`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

from esper.leyline.stages import NEXT_STAGES, SeedStage

INK = "#1c2733"
LINE = "#5b6b7a"
PAPER = "#ffffff"
PLAIN = "#eef2f6"
GREEN = "#d3ecdd"
BLUE = "#d6e7f8"
AMBER = "#fbe6c2"
RED = "#f6d8d3"


class Drawing:
    """An SVG under construction. Boxes have names, and arrows connect them."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = (width, height)
        self.title = title
        self.parts: list[str] = []
        self.boxes: dict[str, tuple[float, float, float, float]] = {}

    def box(self, name: str, x: float, y: float, w: float, h: float, *lines: str, fill: str = PLAIN) -> None:
        """Draw a box; the first line is bold."""
        self.boxes[name] = (x, y, w, h)
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{LINE}"/>')
        top = y + h / 2 - 8 * (len(lines) - 1) + 5
        for i, line in enumerate(lines):
            self.text(x + w / 2, top + 16 * i, line, bold=i == 0, size=13 if i == 0 else 12)

    def text(
        self, x: float, y: float, line: str, *, bold: bool = False, size: int = 12, anchor: str = "middle"
    ) -> None:
        """Write a line of text."""
        weight = ' font-weight="600"' if bold else ""
        style = f'font-size="{size}" text-anchor="{anchor}"{weight} fill="{INK}"'
        self.parts.append(f'<text x="{x}" y="{y}" {style}>{escape(line)}</text>')

    def arrow(
        self, points: list[tuple[float, float]], label: str = "", *, at: tuple[float, float] | None = None
    ) -> None:
        """Draw an arrow along these points, with a label at `at`."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.5" marker-end="url(#tip)"/>')
        if label and at:
            self.text(*at, label, size=11)

    def connect(self, a: str, b: str, label: str = "") -> None:
        """Draw a straight arrow between two boxes that lie side by side or one above the other."""
        ax, ay, aw, ah = self.boxes[a]
        bx, by, bw, bh = self.boxes[b]
        if bx >= ax + aw:
            start, end = (ax + aw, ay + ah / 2), (bx - 2, by + bh / 2)
        elif bx + bw <= ax:
            start, end = (ax, ay + ah / 2), (bx + bw + 2, by + bh / 2)
        else:
            down = by > ay
            start = (ax + aw / 2, ay + ah if down else ay)
            end = (bx + bw / 2, by - 2 if down else by + bh + 2)
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 6)
        self.arrow([start, end], label, at=middle)

    def svg(self) -> str:
        """Return the document."""
        width, height = self.size
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0L8 4L0 8Z" fill="{LINE}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui, sans-serif" role="img"><title>{escape(self.title)}</title>{tip}'
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


# -- the life of a seed ------------------------------------------------------------------------------------------------

Stage = SeedStage
PLACES = {
    Stage.DORMANT: (20, 40, PLAIN, "empty slot"),
    Stage.GERMINATED: (190, 40, GREEN, "Δ = 0"),
    Stage.TRAINING: (360, 110, BLUE, "learns apart"),
    Stage.BLENDING: (530, 40, AMBER, "h + alpha·Δ"),
    Stage.HOLDING: (700, 40, AMBER, "alpha = 1"),
    Stage.FOSSILIZED: (870, 40, GREEN, "part of the host"),
    Stage.PRUNED: (530, 220, RED, "removed"),
    Stage.EMBARGOED: (360, 220, RED, "cooldown"),
    Stage.RESETTING: (190, 220, RED, "cooldown"),
}
"""Position, colour and meaning of each stage."""
WIDTH, HEIGHT = 130, 48


def seed_life() -> Drawing:
    """Draw every stage and every allowed transition."""
    drawing = Drawing(1020, 290, "Life of a seed")
    for stage, (x, y, fill, meaning) in PLACES.items():
        drawing.box(stage.name, x, y, WIDTH, HEIGHT, stage.name, meaning, fill=fill)
    for stage, targets in NEXT_STAGES.items():
        for target in sorted(targets):
            transition(drawing, stage, target)
    drawing.text(445, 58, "open birth", size=11)
    drawing.text(285, 154, "isolated birth", size=11, anchor="start")
    drawing.text(640, 200, "prune: any stage of a growing seed, from its minimum age on", size=11, anchor="start")
    return drawing


def transition(drawing: Drawing, stage: SeedStage, target: SeedStage) -> None:
    """Draw one transition."""
    ax, ay, aw, ah = drawing.boxes[stage.name]
    bx, by, bw, bh = drawing.boxes[target.name]
    if target == Stage.PRUNED:
        lane = {Stage.GERMINATED: 176, Stage.TRAINING: 190, Stage.BLENDING: 0, Stage.HOLDING: 176}[stage]
        end = bx + bw / 2 + {Stage.GERMINATED: -40, Stage.TRAINING: -20, Stage.BLENDING: 0, Stage.HOLDING: 30}[stage]
        start = ax + aw / 2 + (0 if stage != Stage.GERMINATED else -20)
        if lane:
            drawing.arrow([(start, ay + ah), (start, lane), (end, lane), (end, by - 2)])
        else:
            drawing.arrow([(start, ay + ah), (end, by - 2)])
    elif stage == Stage.RESETTING:
        drawing.arrow(
            [(ax, ay + ah / 2), (bx + bw / 2, ay + ah / 2), (bx + bw / 2, by + bh + 2)], "empty again", at=(105, 262)
        )
    elif stage == Stage.HOLDING and target == Stage.BLENDING:
        drawing.arrow(
            [(ax + 40, ay), (ax + 40, 22), (bx + bw - 40, 22), (bx + bw - 40, by - 2)], "lower alpha", at=(680, 17)
        )
    elif (stage, target) == (Stage.GERMINATED, Stage.BLENDING):
        drawing.arrow([(ax + aw, ay + ah / 2), (bx - 2, by + bh / 2)])
    elif (stage, target) == (Stage.GERMINATED, Stage.TRAINING):
        drawing.arrow([(ax + aw / 2 + 20, ay + ah), (ax + aw / 2 + 20, by + bh / 2), (bx - 2, by + bh / 2)])
    elif (stage, target) == (Stage.TRAINING, Stage.BLENDING):
        drawing.arrow([(ax + aw, ay + ah / 2), (bx + 25, ay + ah / 2), (bx + 25, by + bh + 2)])
    else:
        drawing.connect(stage.name, target.name)


# -- one step ----------------------------------------------------------------------------------------------------------


def one_step() -> Drawing:
    """Draw one step of growth as data flow."""
    drawing = Drawing(1020, 300, "One step as data flow")
    row = [
        ("table", ("slot table", "stage, alpha, worth"), GREEN),
        ("legal", ("legal", "operations × slots"), PLAIN),
        ("act", ("controller", "one action"), AMBER),
        ("apply", ("apply, tick", "stages, alpha"), PLAIN),
        ("sync", ("change modules", "build, drop, commit"), PLAIN),
    ]
    for i, (name, lines, fill) in enumerate(row):
        drawing.box(name, 20 + 205 * i, 40, 160, 56, *lines, fill=fill)
        if i:
            drawing.connect(row[i - 1][0], name)
    low = [
        ("train", ("train an epoch", "host and seeds"), BLUE),
        ("measure", ("measure", "seeds on and off"), BLUE),
        ("govern", ("governor", "restore failed hosts"), PLAIN),
        ("record", ("record", "quality, contribution"), PLAIN),
    ]
    for i, (name, lines, fill) in enumerate(low):
        drawing.box(name, 840 - 205 * i, 150, 160, 56, *lines, fill=fill)
        if i:
            drawing.connect(low[i - 1][0], name)
    drawing.connect("sync", "train")
    x, y, _, h = drawing.boxes["record"]
    drawing.arrow([(x, y + h / 2), (100, y + h / 2), (100, 98)])
    drawing.box("reward", 225, 236, 160, 44, "reward", "policy update", fill=AMBER)
    drawing.box("events", 430, 236, 160, 44, "events", "journal", fill=GREEN)
    drawing.connect("record", "reward")
    drawing.arrow([(305, 206), (305, 221), (510, 221), (510, 234)])
    return drawing


# -- forked evaluation -------------------------------------------------------------------------------------------------


def forked_evaluation() -> Drawing:
    """Draw how one pass evaluates all coalitions of two seeds."""
    drawing = Drawing(1020, 330, "Forked evaluation of two slots")
    drawing.box("batch", 20, 130, 110, 50, "batch", "B samples", fill=GREEN)
    drawing.box("first", 160, 130, 120, 50, "layers before", "slot 1: once", fill=BLUE)
    drawing.connect("batch", "first")
    for i, (state, y) in enumerate((("seed 1 off", 70), ("seed 1 on", 190))):
        drawing.box(f"one{i}", 330, y, 110, 50, state, "B rows", fill=AMBER if i else PLAIN)
        drawing.arrow([(280, 155), (300, 155), (300, y + 25), (328, y + 25)])
        drawing.box(f"middle{i}", 470, y, 120, 50, "layers between", "one of 2 × B rows", fill=BLUE)
        drawing.connect(f"one{i}", f"middle{i}")
    coalitions = (("none", 30), ("seed 2", 100), ("seed 1", 170), ("both", 240))
    for i, (name, y) in enumerate(coalitions):
        middle = 95 if i < 2 else 215
        drawing.box(
            f"two{i}", 640, y, 110, 50, f"seed 2 {'on' if i % 2 else 'off'}", "B rows", fill=AMBER if i % 2 else PLAIN
        )
        drawing.arrow([(590, middle), (612, middle), (612, y + 25), (638, y + 25)])
        drawing.box(f"score{i}", 800, y, 200, 50, f"coalition: {name}", "score of each sample", fill=GREEN)
        drawing.connect(f"two{i}", f"score{i}")
    drawing.text(
        510,
        312,
        "The part before slot 1 runs once, the part between on 2B rows, the part behind slot 2 on 4B rows.",
    )
    return drawing


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "seed-life": seed_life,
    "one-step": one_step,
    "forked-evaluation": forked_evaluation,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a diagram is not up to date")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository root")
    options = parser.parse_args()
    outdated = 0
    for name, draw in DIAGRAMS.items():
        path = options.root / "docs" / "images" / f"diagram-{name}.svg"
        svg = draw().svg()
        if not path.exists() or path.read_text() != svg:
            outdated += 1
            print(f"{'not up to date' if options.check else 'wrote'}: {path}")
            if not options.check:
                path.write_text(svg)
    sys.exit(1 if options.check and outdated else 0)


if __name__ == "__main__":
    main()
