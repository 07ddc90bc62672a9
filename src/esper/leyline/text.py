"""Text from files, made safe to show: of bounded length, and without characters that act on a terminal or a page."""

from __future__ import annotations

import html

LONGEST = 2000
"""Characters of one text in a report or on a screen; the journal has them all."""


def cut(text: str, most: int = LONGEST) -> str:
    """The text, or its beginning and how much is left out. Costs the same however long it is."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def printable(text: str, most: int | None = LONGEST, *, keep: str = "") -> str:
    """Return the text with every character that cannot be printed written as its escape, such as \\x1b.

    These are control characters, line ends, bidirectional overrides, invisible and unassigned characters. Those in
    `keep` stay. Of a text longer than `most` characters only the beginning is returned.
    """
    text = text if most is None else cut(text, most)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def escape(text: str) -> str:
    """Return the text as the content of an HTML or SVG element or attribute."""
    return html.escape(printable(text, None, keep="\n"))
