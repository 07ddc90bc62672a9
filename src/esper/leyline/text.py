"""Text from files for display: bounded length, no characters that control a terminal or a page; small HTML tables."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LONGEST = 2000
"""Maximum number of characters of one text in a report or on a screen. The journal is not truncated."""
LONGEST_SETTING = 200
"""Maximum number of characters of the name or the value of a setting."""


def cut(text: str, most: int = LONGEST) -> str:
    """Return the text, or its first `most` characters and how many are left out, in constant time."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def not_installed(packages: Sequence[str]) -> str:
    """Return the names of missing packages and the request to install them.

    >>> not_installed(["starlette", "uvicorn"])
    'starlette and uvicorn, which are not installed. Install them'
    """
    verb, pronoun = ("is", "it") if len(packages) == 1 else ("are", "them")
    return f"{' and '.join(packages)}, which {verb} not installed. Install {pronoun}"


def printable(text: str, most: int | None = LONGEST, *, keep: str = "") -> str:
    """Return the text with every non-printable character replaced by its escape, such as \\x1b.

    These are control characters, line ends, bidirectional overrides, invisible and unassigned characters. Spaces of any
    width and the characters in `keep` are kept. A text longer than `most` characters is truncated.
    """
    text = text if most is None else cut(text, most)
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs" or c in keep else c.encode("unicode_escape").decode()
        for c in text
    )


def escape(text: str) -> str:
    """Return the text escaped for an HTML or SVG element or attribute."""
    return html.escape(printable(text, None, keep="\n"))


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings by dotted name, as printable text.

    >>> flat_settings({"ppo": {"lr": 0.1}, "task": "rescue"})
    {'ppo.lr': '0.1', 'task': 'rescue'}
    """
    out: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            out |= flat_settings(value, f"{prefix}{name}.")
        else:
            out[printable(f"{prefix}{name}", LONGEST_SETTING)] = printable(str(value), LONGEST_SETTING)
    return out


CELL = "padding: 2px 8px; text-align: {}; vertical-align: top; white-space: nowrap"


def html_table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), note: str = ""
) -> str:
    """Return a table with inline styles, which need no style sheet.

    >>> html_table("a < b", ["x"], [["1"]])[:72]
    '<div style="overflow-x: auto"><p style="margin: 4px 0">a &lt; b</p><tabl'
    """

    def row(cells: Sequence[str], tag: str) -> str:
        styles = [CELL.format("right" if i in numbers else "left") for i in range(len(cells))]
        inner = "".join(f'<{tag} style="{s}">{html.escape(c)}</{tag}>' for s, c in zip(styles, cells, strict=True))
        return f"<tr>{inner}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    below = f'<p style="margin: 4px 0; opacity: 0.75">{html.escape(note)}</p>' if note else ""
    return (
        f'<div style="overflow-x: auto"><p style="margin: 4px 0">{html.escape(caption)}</p>'
        '<table style="border-collapse: collapse">'
        f"<thead>{row(header, 'th')}</thead><tbody>{body}</tbody></table>{below}</div>"
    )
