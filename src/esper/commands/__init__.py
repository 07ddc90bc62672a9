"""Implementations of the commands. Like `cli`, these modules may import every package; only `cli` imports them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.leyline.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from esper.recording import Run


def plainly(console: Console, text: str) -> None:
    """Print text that contains a path unchanged, on one line."""
    console.print(printable(text, None), markup=False, highlight=False, soft_wrap=True)


def must_be_recorded(run: Run) -> None:
    """Exit with code 1 if part of the run's record could not be written. What is missing was printed at its end."""
    if run.losses:
        raise SystemExit(1)
