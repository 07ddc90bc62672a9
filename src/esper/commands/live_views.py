"""`esper dash` and `esper watch`: show runs while they are running, or afterwards, in the browser or the terminal."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
import webbrowser
from pathlib import Path

from esper.commands.explained_run import explain_run
from esper.leyline.errors import ConfigError, EsperError
from esper.leyline.text import not_installed, printable

NICENESS = 3
"""Viewers give way to training on the same machine: the server has a lower priority."""


def run_dash(directory: Path, port: int, open_browser: bool) -> None:
    """Serve the page until interrupted."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise EsperError(
            f"`esper dash` needs {not_installed(missing)} with: "
            "pip install 'esper-lite[web]'. Or write one file with: esper report RUN"
        )
    if not directory.is_dir():
        raise ConfigError(
            f"there is no directory {directory}. Start a run, for instance: esper grow --task rescue. Or pass a "
            "directory of runs, or one run directory"
        )
    from esper.karn.dash.server import serve

    def ready(url: str) -> None:
        print(f"runs in {printable(str(directory))}: {url}", flush=True)
        print("Only this machine can open the page, with this address. Ctrl-C ends it.", flush=True)
        if open_browser:
            webbrowser.open(url)

    os.nice(NICENESS)
    try:
        serve(directory, port, ready, explain_run)
    except OSError as error:
        raise ConfigError(f"cannot listen on port {port}: {error.strerror}. Use --port to choose another") from error


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
