"""Lines of coloured text and tables, independent of the terminal: shared by the app and the plain frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.cells import cell_len, set_cell_size

from esper.leyline.text import printable

Piece = tuple[str, str]
"""A text and its tone."""
Line = tuple[Piece, ...]
Row = TypeVar("Row")


def plain(line: Line) -> str:
    """Return a line without colours."""
    return printable("".join(text for text, _ in line), None).rstrip()


def fit(text: str, width: int, *, right: bool = False, keep_end: bool = False) -> str:
    """Return exactly `width` cells: padded, or cut with an ellipsis."""
    size = cell_len(text)
    if size > width:
        if keep_end:
            while cell_len(text) > max(0, width - 1):
                text = text[1:]
            text = "…" + text
        else:
            text = set_cell_size(text, max(0, width - 1)) + "…"
        return set_cell_size(text, width)
    return " " * (width - size) + text if right else text + " " * (width - size)


def whole_words(text: str, width: int) -> str:
    """Cut at the end of a clause, or else of a word."""
    if cell_len(text) <= width:
        return text
    cut = set_cell_size(text, max(0, width - 1)).rstrip()
    ends = [at for mark in (", ", " (", " ") if (at := cut.rfind(mark)) >= width // 2]
    return (cut[: ends[0]] if ends else cut).rstrip(" ,;:") + "…"


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap at words."""
    out: list[str] = []
    line = ""
    for word in text.split():
        longer = f"{line} {word}" if line else word
        if line and cell_len(longer) > width - len(indent) * bool(out):
            out.append((indent if out else "") + line)
            line = word
        else:
            line = longer
    return [*out, (indent if out else "") + line]


def joined(parts: Iterable[Sequence[Piece]], width: int, gap: str = "   ") -> Line:
    """Join as many complete parts as fit, the first ones first."""
    line: list[Piece] = []
    used = 0
    for part in parts:
        size = sum(cell_len(text) for text, _ in part) + (len(gap) if line else 0)
        if used + size > width:
            continue
        line += [(gap, "plain"), *part] if line else list(part)
        used += size
    return tuple(line)


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column: its title, width and cell function."""

    title: str
    width: int
    cell: Callable[[Row, int], Line]
    right: bool = False
    drop: int = 0  # the highest is dropped first if space is short; 0 is never dropped
    grow: int = 0  # maximum number of additional characters


@dataclass(frozen=True, slots=True)
class Table(Generic[Row]):
    """Columns with their final widths."""

    columns: tuple[tuple[Column[Row], int], ...]
    width: int

    def head(self) -> Line:
        """Return the header line."""
        text = " ".join(fit(c.title, w, right=c.right) for c, w in self.columns)
        return ((fit(text, self.width), "head"),)

    def line(self, row: Row) -> Line:
        """Return the line of a row."""
        out: list[Piece] = []
        for column, width in self.columns:
            pieces = column.cell(row, width)
            size = sum(cell_len(text) for text, _ in pieces)
            if size > width:
                pieces = ((fit(plain(pieces), width), pieces[0][1]),)
                size = width
            pad = ((" " * (width - size), "plain"),)
            out += [*((*pad, *pieces) if column.right else (*pieces, *pad)), (" ", "plain")]
        return tuple(piece for piece in out[:-1] if piece[0])


def table(columns: Sequence[Column[Row]], width: int) -> Table[Row]:
    """Return a table of the columns that fit, widened where there is space, the first ones first."""
    shown = list(columns)
    while sum(c.width + 1 for c in shown) - 1 > width and any(c.drop for c in shown):
        shown.remove(max(shown, key=lambda c: c.drop))
    room = width - sum(c.width + 1 for c in shown) + 1
    widths = []
    for column in shown:
        more = max(0, min(column.grow, room))
        widths.append(column.width + more)
        room -= more
    return Table(tuple(zip(shown, widths, strict=True)), width)
