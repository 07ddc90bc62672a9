"""Every relative link of every page points to a file and a heading that exist."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support import ROOT
from tests.support.pages import NOTEBOOKS, PAGES, anchors_of, links_of, page_id

OUTSIDE = ("https://", "mailto:")
NAMED = re.compile(r"`((?:src|tests|docs|scripts|benchmarks|examples)/[a-z0-9_/]+\.[a-z]+)`")
"""A file of the repository that a page names. `docs/studies/NAME.md` is not one: capitals are placeholders."""


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in links_of(page):
        if link.startswith(OUTSIDE):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=page_id)
def test_relative_links_point_to_existing_files_and_headings(page):
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A heading, with `code`\n")
    page.write_text(
        "[a](other.md) [b](other.md#a-heading-with-code) [c](https://example.org) [d](#own)\n\n# Own\n\n"
        '[e](none.md) ![f](none.png) [g](other.md#none) [h](#none) [i](http://example.org)\n\n<img src="none.svg">\n'
    )
    assert broken_links(page) == ["none.md", "none.png", "other.md#none", "#none", "http://example.org", "none.svg"]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_a_page_names_exist(page):
    missing = [name for name in NAMED.findall(page.read_text()) if not (ROOT / name).exists()]
    assert missing == []
