"""`esper watch`: show a run while it is running, or afterwards."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from pathlib import Path

from esper.leyline.errors import EsperError

PLAIN_WIDTH = 100
"""Width in characters of a frame that is written to a pipe or a file."""


def run_watch(run: Path, once: bool) -> None:
    """Open the live view. Print one plain frame if `once`, or if the output is not a terminal."""
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        _print_frame(run)
    else:
        _open(run)


def _open(run: Path) -> None:
    if importlib.util.find_spec("textual") is None:
        raise EsperError(
            "`esper watch` needs Textual, which is not installed. Install it with: pip install 'esper-lite[tui]'. "
            "Or print one plain frame with: esper watch --once"
        )
    from esper.karn.watch.app import WatchApp

    WatchApp(run).run()


def _print_frame(run: Path) -> None:
    from esper.karn.watch.cells import frame
    from esper.karn.watch.watched_run import WatchedRun
    from esper.leyline.text import printable

    watched = WatchedRun(run, time.time)
    watched.read()
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns if sys.stdout.isatty() else PLAIN_WIDTH
    text = frame(watched, max(60, width)) if watched.state.position else printable(watched.nothing())
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))
