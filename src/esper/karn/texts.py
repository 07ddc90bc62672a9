"""Texts from outside, made fit to show: not longer than anybody reads, and unable to break a line or a terminal."""

from __future__ import annotations

LONGEST = 2000
"""Characters of one text in a report or on a screen; the journal has them all."""


def cut(text: str, most: int = LONGEST) -> str:
    """The text, or its beginning and how much is left out. Costs the same however long it is."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def printable(text: str, most: int = LONGEST) -> str:
    """On one line, with what cannot be printed spelled out as in a program's text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut(text, most))
