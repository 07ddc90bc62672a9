"""What the commands do. Like `cli`, these modules may use every part; nothing imports them but `cli`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.leyline.text import printable

if TYPE_CHECKING:
    from rich.console import Console


def plainly(console: Console, text: str) -> None:
    """Print words with a path in them: as they are, on one line."""
    console.print(printable(text, None), markup=False, highlight=False, soft_wrap=True)
