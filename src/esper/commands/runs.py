"""`esper runs`: list runs and how they ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.commands import natural_width
from esper.leyline.errors import ConfigError
from esper.leyline.text import printable
from esper.nissa.run_list import RunInfo, list_runs, run_size

STYLES = {"running": "green", "failed": "red", "killed": "red", "unreadable": "red", "interrupted": "yellow"}
DROPPED = ("started (UTC)", "size")
"""Columns that are dropped first on a narrow terminal."""
DEFAULT_ROOT = Path("runs")


def run_runs(root: Path, as_json: bool, console: Console | None = None) -> None:
    """List the runs below `root`. Only the default directory need not exist."""
    if not root.is_dir() and (root != DEFAULT_ROOT or root.exists()):
        reason = "it is a file" if root.exists() else "it does not exist"
        raise ConfigError(f"no runs at {root}: {reason}. Pass a directory of runs; default: {DEFAULT_ROOT}")
    rows = list_runs(root)
    if as_json:
        print(
            json.dumps(
                [asdict(row) | {"path": str(row.path), "size_bytes": run_size(row.path)} for row in rows], indent=2
            )
        )
        return
    console = console or Console()
    if not rows:
        console.print(f"No runs in {root}. Start one, for instance: esper grow --task rescue", soft_wrap=True)
        return
    names = list(COLUMNS)
    if console.is_terminal:
        for name in DROPPED:
            if natural_width(as_table(rows, names), console) > console.width:
                names.remove(name)
    else:
        console.width = max(console.width, natural_width(as_table(rows, names), console))
    console.print(as_table(rows, names))
    if hidden := [name for name in DROPPED if name not in names]:
        console.print(Text(f"hidden, the terminal is too narrow: {', '.join(hidden)}; use --json for all", "dim"))


def as_table(rows: list[RunInfo], names: list[str]) -> Table:
    """Return a table of these columns."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        numeric, shrinks = name in ("time", "steps", "size"), name in ("task", "controller")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=not shrinks)
    for row in rows:
        table.add_row(*(COLUMNS[name](row) for name in names))
    return table


def _status(row: RunInfo) -> Text:
    """Return the status of a run and its missing events."""
    text = ", ".join([printable(row.status, 100), *row.losses])
    return Text(text, "red" if row.losses else STYLES.get(row.status, ""))


def _started(row: RunInfo) -> str:
    return printable((row.started or "–")[:16].replace("T", " "))


def _time(row: RunInfo) -> str:
    if row.seconds is None:
        return "–"
    minutes, seconds = divmod(round(row.seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _size(row: RunInfo) -> str:
    size = float(run_size(row.path))
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


COLUMNS: dict[str, Callable[[RunInfo], str | Text]] = {
    "run": lambda row: Text(printable(row.name, 200)),
    "task": lambda row: Text(printable(row.task or "–", 100)),
    "controller": lambda row: Text(printable(row.controller or "–", 100)),
    "status": lambda row: _status(row),
    "started (UTC)": lambda row: Text(_started(row)),
    "time": _time,
    "steps": lambda row: "–" if row.env_steps is None else f"{row.env_steps:,}",
    "size": _size,
}
