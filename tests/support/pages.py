"""The Markdown pages of the project and what they contain."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.support import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")])
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PARSER = MarkdownIt("commonmark").enable("table")


def page_id(path: Path) -> str:
    """Return the path of a page in the repository, as the id of a test."""
    return path.relative_to(ROOT).as_posix()


def markdown_of(path: Path) -> str:
    """Return the text of a page, or of the Markdown cells of a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def inline_tokens(path: Path) -> list[Token]:
    """Return the inline tokens of a page in order: texts, links, images, code."""
    return [token for block in PARSER.parse(markdown_of(path)) for token in block.children or ()]


def links_of(path: Path) -> list[str]:
    """Return the targets of all links and images of a page."""
    names = {"link_open": "href", "image": "src"}
    tokens = inline_tokens(path)
    html = re.findall(r'<(?:img|a)\b[^>]*?\b(?:src|href)="([^"]+)"', markdown_of(path))
    return [str(token.attrs[names[token.type]]) for token in tokens if token.type in names] + html


def anchors_of(path: Path) -> set[str]:
    """Return the anchors of a page's headings: lower case, without punctuation, hyphens between words."""
    blocks = PARSER.parse(markdown_of(path))
    headings = [after.content for token, after in itertools.pairwise(blocks) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
