"""Test the chart of `benchmarks.train`: stacked parts on one scale, with marks at their values."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.bars import COLOURS, REST, Bar, bars

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [
    Bar("host, 0 seeds", {"train": 0.9, "validate": 0.1, "policy": 0.02, "telemetry": 0.03}, goal=1.0),
    Bar("host <3> seeds", {"train": 0.95, "coalitions": 0.2, "norms": 0.1, "worth": 0.01}, goal=1.25),
]


def test_bar_lengths_and_mark_positions_match_the_values():
    tree = ET.fromstring(bars(ROWS, "a & b"))
    rects = [r for r in tree.iter(f"{SVG}rect") if r.get("height") == "24"]
    lines = list(tree.iter(f"{SVG}line"))
    bare = float(lines[-1].get("x1"))
    left = min(float(r.get("x")) for r in rects)
    one = bare - left  # pixels per step of the bare loop
    for i, row in enumerate(ROWS):
        mine = rects[5 * i : 5 * i + 5]
        assert [r.get("fill") for r in mine] == [*COLOURS.values(), REST]
        wide = {fill: float(r.get("width")) / one for fill, r in zip([*COLOURS, "all else"], mine, strict=True)}
        rest = sum(v for name, v in row.parts.items() if name not in COLOURS)
        widths = {name: row.parts.get(name, 0.0) for name in COLOURS}
        assert wide == pytest.approx(widths | {"all else": rest}, abs=1e-3)
        assert float(lines[i].get("x1")) - left == pytest.approx(row.goal * one, abs=0.2)
    message = [t.text for t in tree.iter(f"{SVG}text")]
    assert {"host <3> seeds", "1.05", "1.26", "a & b", "all else"} <= set(message)
