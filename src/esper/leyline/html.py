"""Small HTML tables for notebooks. All texts are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

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
        inner = "".join(f'<{tag} style="{s}">{escape(c)}</{tag}>' for s, c in zip(styles, cells, strict=True))
        return f"<tr>{inner}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    below = f'<p style="margin: 4px 0; opacity: 0.75">{escape(note)}</p>' if note else ""
    return (
        f'<div style="overflow-x: auto"><p style="margin: 4px 0">{escape(caption)}</p>'
        '<table style="border-collapse: collapse">'
        f"<thead>{row(header, 'th')}</thead><tbody>{body}</tbody></table>{below}</div>"
    )
