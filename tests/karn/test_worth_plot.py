"""Plots of worth as SVG and PNG."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from esper import plot_worth
from esper.leyline.errors import ConfigError
from esper.simic.attribution import CounterfactualEngine
from esper.tolaria.coalitions import Coalitions
from tests.support.worth import complete_worth, unmeasured_worth

SVG = "{http://www.w3.org/2000/svg}"
WORTHS = {
    "three": complete_worth(3, fossils=("b",)),
    "one": complete_worth(1),
    "nobody": complete_worth(0),
    "unknown": unmeasured_worth(),
    "eight": complete_worth(8),
    "one sample": complete_worth(2, samples=1),
}


@pytest.mark.parametrize("name", WORTHS)
def test_plot_is_valid_self_contained_svg_or_png(name: str, tmp_path: Path):
    worth = WORTHS[name]
    path = plot_worth(worth, tmp_path / "worth.svg")
    root = ElementTree.parse(path).getroot()
    width, height = float(root.get("width")), float(root.get("height"))
    for bar in list(root.iter(f"{SVG}rect"))[1:]:
        x, y, w, h = (float(bar.get(k)) for k in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    for line in root.iter(f"{SVG}line"):
        assert all(0 <= float(line.get(k)) <= width for k in ("x1", "x2"))
    image = Image.open(plot_worth(worth, str(tmp_path / "worth.PNG")))
    assert image.size == (round(width), round(height))
    assert len(image.getcolors(100_000)) > 1


def test_plot_shows_every_seed_bar_and_pair(tmp_path: Path):
    root = ElementTree.parse(plot_worth(WORTHS["three"], tmp_path / "worth.svg")).getroot()
    message = [t.text for t in root.iter(f"{SVG}text")]
    assert {"a", "b (fossil)", "c", "interactions"} <= set(message)
    assert len(list(root.iter(f"{SVG}rect"))) == 1 + 2 + 6 + 6  # paper, legend, 2 bars a seed, pairs both ways
    assert f"{WORTHS['three'].contribution[0]:+.4f}" in message


def test_negative_worth_is_drawn_to_the_left_of_zero(tmp_path: Path):
    scores = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    configs = [(False, False), (True, False), (False, True), (True, True)]
    worth = CounterfactualEngine.worth(Coalitions(("bad", "good"), 2, configs, scores))
    root = ElementTree.parse(plot_worth(worth, tmp_path / "worth.svg")).getroot()
    bad, good = [float(b.get("x")) for b in list(root.iter(f"{SVG}rect"))[3:7]][::2]
    assert bad < good


def test_names_with_markup_are_escaped(tmp_path: Path):
    scores = torch.zeros(2, 4)
    worth = CounterfactualEngine.worth(Coalitions(("<a & b>",), 1, [(False,), (True,)], scores))
    message = [t.text for t in ElementTree.parse(plot_worth(worth, tmp_path / "w.svg")).getroot().iter(f"{SVG}text")]
    assert "<a & b>" in message


def test_unknown_file_suffix_is_refused_with_a_remedy(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"must be \.svg or \.png, got 'worth\.pdf'"):
        plot_worth(complete_worth(2), tmp_path / "worth.pdf")


def test_missing_pillow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"Pillow.*\.svg"):
        plot_worth(complete_worth(2), tmp_path / "worth.png")
    assert plot_worth(complete_worth(2), tmp_path / "worth.svg").exists()
