"""`esper runs`: what was run, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.nissa.run import RunInfo, list_runs

STYLES = {"running": "green", "failed": "red", "killed": "red", "unreadable": "red", "interrupted": "yellow"}
ROOMY = 110
"""From this width on there is room for every column."""


def run_runs(root: Path, as_json: bool) -> None:
    rows = list_runs(root)
    if as_json:
        print(json.dumps([asdict(row) | {"path": str(row.path)} for row in rows], indent=2))
        return
    console = Console()
    if not rows:
        console.print(f"No runs in {root}. Start one, for instance: esper grow --task rescue", soft_wrap=True)
        return
    names = [name for name in COLUMNS if console.width >= ROOMY or name not in ("started (UTC)", "size")]
    table = Table(box=None, pad_edge=False)
    for name in names:
        numeric, shrinks = name in ("time", "steps", "size"), name in ("task", "controller")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=not shrinks)
    for row in rows:
        table.add_row(*(COLUMNS[name](row) for name in names))
    console.print(table)


def _started(row: RunInfo) -> str:
    return (row.started or "–")[:16].replace("T", " ")


def _time(row: RunInfo) -> str:
    if row.seconds is None:
        return "–"
    minutes, seconds = divmod(round(row.seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _size(row: RunInfo) -> str:
    size = float(row.size_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


COLUMNS: dict[str, Callable[[RunInfo], str | Text]] = {
    "run": lambda row: Text(row.id),
    "task": lambda row: Text(row.task or "–"),
    "controller": lambda row: Text(row.controller or "–"),
    "status": lambda row: Text(row.status, STYLES.get(row.status, "")),
    "started (UTC)": _started,
    "time": _time,
    "steps": lambda row: "–" if row.env_steps is None else f"{row.env_steps:,}",
    "size": _size,
}
