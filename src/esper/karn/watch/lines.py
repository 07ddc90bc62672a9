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
    return printable("".join(said for said, _ in line), None).rstrip()


def fit(said: str, width: int, *, right: bool = False, keep_end: bool = False) -> str:
    """Return exactly `width` cells: padded, or cut with an ellipsis."""
    size = cell_len(said)
    if size > width:
        if keep_end:
            while cell_len(said) > max(0, width - 1):
                said = said[1:]
            said = "…" + said
        else:
            said = set_cell_size(said, max(0, width - 1)) + "…"
        return set_cell_size(said, width)
    return " " * (width - size) + said if right else said + " " * (width - size)


def whole_words(said: str, width: int) -> str:
    """Cut at the end of a clause, or else of a word."""
    if cell_len(said) <= width:
        return said
    cut = set_cell_size(said, max(0, width - 1)).rstrip()
    ends = [at for mark in (", ", " (", " ") if (at := cut.rfind(mark)) >= width // 2]
    return (cut[: ends[0]] if ends else cut).rstrip(" ,;:") + "…"


def wrap(said: str, width: int, indent: str = "") -> list[str]:
    """Wrap at words."""
    out: list[str] = []
    line = ""
    for word in said.split():
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
        size = sum(cell_len(said) for said, _ in part) + (len(gap) if line else 0)
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
        said = " ".join(fit(c.title, w, right=c.right) for c, w in self.columns)
        return ((fit(said, self.width), "head"),)

    def line(self, row: Row) -> Line:
        """Return the line of a row."""
        out: list[Piece] = []
        for column, width in self.columns:
            pieces = column.cell(row, width)
            size = sum(cell_len(said) for said, _ in pieces)
            if size > width:
                pieces = ((fit(plain(pieces), width), pieces[0][1]),)
                size = width
            pad = ((" " * (width - size), "plain"),)
            out += [*((*pad, *pieces) if column.right else (*pieces, *pad)), (" ", "plain")]
        return tuple(piece for piece in out[:-1] if piece[0])


def table(columns: Sequence[Column[Row]], width: int) -> Table[Row]:
    """Return a table of the columns that fit, widened where there is space, the first ones first."""
    kept = list(columns)
    while sum(c.width + 1 for c in kept) - 1 > width and any(c.drop for c in kept):
        kept.remove(max(kept, key=lambda c: c.drop))
    room = width - sum(c.width + 1 for c in kept) + 1
    widths = []
    for column in kept:
        more = max(0, min(column.grow, room))
        widths.append(column.width + more)
        room -= more
    return Table(tuple(zip(kept, widths, strict=True)), width)
