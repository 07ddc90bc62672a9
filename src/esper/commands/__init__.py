"""Implementations of the commands. Like `cli`, these modules may import every package; only `cli` imports them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from esper.leyline.errors import EsperError
from esper.leyline.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from esper.nissa.recorder import Run


def plainly(console: Console, text: str) -> None:
    """Print text that contains a path unchanged, on one line."""
    console.print(printable(text, None), markup=False, highlight=False, soft_wrap=True)


def natural_width(table: Table, console: Console) -> int:
    """Return the width of a table without wrapping."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=100_000), table).maximum


@contextmanager
def losses_decide_exit_code(run: Run) -> Iterator[None]:
    """After the block, exit with code 1 if part of the run's record could not be written, even if the block fails.

    What is missing was printed at the end of the run.
    """
    try:
        yield
    except (OSError, EsperError) as error:  # the disk may still be full
        if not run.losses:
            raise
        print(f"esper: {printable(str(error))}", file=sys.stderr)
    if run.losses:
        raise SystemExit(1)
