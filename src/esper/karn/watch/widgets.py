"""The widget of all screens: a list of lines that creates only visible lines and redraws only changed ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from esper.karn.watch.lines import Line
from esper.leyline.text import printable

STYLES = {
    "plain": Style(),
    "dim": Style(dim=True),
    "strong": Style(bold=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "note": Style(color="cyan"),
    "accent": Style(color="magenta"),
    "bar": Style(color="cyan"),
    "head": Style(dim=True, underline=True),
    "badge-good": Style(color="green", bold=True, reverse=True),
    "badge-warn": Style(color="yellow", bold=True, reverse=True),
    "badge-bad": Style(color="red", bold=True, reverse=True),
    "badge-note": Style(color="cyan", bold=True, reverse=True),
}
"""The terminal's sixteen colours, which fit any background. No information is shown by colour alone."""
GROUND = Style(color="default", bgcolor="default")
CURSOR = Style(reverse=True)


@lru_cache(maxsize=4096)
def strip(line: Line, width: int, is_cursor: bool) -> Strip:
    """Return a line as a Textual strip, with one segment per change of tone to keep drawing cheap."""
    base = GROUND + CURSOR if is_cursor else GROUND
    segments = [
        Segment(printable("".join(text for text, _ in pieces), None), base + STYLES[tone])
        for tone, pieces in groupby(line, key=lambda piece: piece[1])
    ]
    return Strip(segments).adjust_cell_length(width, base)


class Lines(ScrollView, can_focus=False):
    """A scrollable list of `count` lines, each created when it becomes visible."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._make: Callable[[int], Line] = lambda _: ()
        self._count = 0
        self._cursor: int | None = None
        self._drawn: dict[int, tuple[Line, bool]] = {}

    def show(self, count: int, make: Callable[[int], Line], cursor: int | None = None) -> None:
        """Show these lines from now on."""
        self._make, self._cursor = make, cursor
        if count != self._count:
            self._count = count
            self.virtual_size = Size(0, count)
        before, self._drawn = self._drawn, {}
        top, width, height = self.scroll_offset.y, self.size.width, self.size.height
        changed = [y for y in range(height) if before.get(top + y) != self._line(top + y)]
        if changed:
            self.refresh(Region(0, changed[0], width, changed[-1] - changed[0] + 1))

    def show_all(self, lines: list[Line]) -> None:
        """Show a list of lines."""
        self.show(len(lines), lines.__getitem__)

    def reveal(self, index: int) -> None:
        """Scroll as little as needed to make a line visible."""
        top, height = self.scroll_offset.y, max(1, self.size.height)
        if not top <= index < top + height:
            self.scroll_to(y=index if index < top else index - height + 1, animate=False)

    @property
    def is_at_end(self) -> bool:
        """Whether the list is scrolled to its end."""
        return self.scroll_offset.y >= self.max_scroll_y

    def _line(self, index: int) -> tuple[Line, bool]:
        if index not in self._drawn:
            exists = 0 <= index < self._count
            self._drawn[index] = (self._make(index) if exists else (), exists and index == self._cursor)
        return self._drawn[index]

    def render_line(self, y: int) -> Strip:
        """Return the strip at a row of the widget."""
        line, is_cursor = self._line(y + self.scroll_offset.y)
        return strip(line, self.size.width, is_cursor)

    def on_resize(self) -> None:
        """Discard the drawn lines."""
        self._drawn = {}
