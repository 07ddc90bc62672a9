"""`esper dash`: a live page of the runs below a directory, in the browser."""

from __future__ import annotations

import importlib.util
import os
import webbrowser
from pathlib import Path

from esper.leyline.errors import ConfigError, EsperError
from esper.leyline.text import printable

NICENESS = 3
"""Viewers give way to training on the same machine: the server has a lower priority."""


def run_dash(directory: Path, port: int, open_browser: bool) -> None:
    """Serve the page until interrupted."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise EsperError(
            f"`esper dash` needs {' and '.join(missing)}, which is not installed. Install it with: "
            "pip install 'esper-lite[web]'. Or write one file with: esper report RUN"
        )
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: pass a directory of runs, or one run directory")
    from esper.karn.dash.server import serve

    def ready(url: str) -> None:
        print(f"runs in {printable(str(directory))}: {url}", flush=True)
        print("Only this machine can open the page, with this address. Ctrl-C ends it.", flush=True)
        if open_browser:
            webbrowser.open(url)

    os.nice(NICENESS)
    try:
        serve(directory, port, ready)
    except OSError as error:
        raise ConfigError(f"cannot listen on port {port}: {error.strerror}. Use --port to choose another") from error
