"""One frame as plain text, for pipes, logs and files."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from esper.karn.watch import cells
from esper.karn.watch.watched_run import WatchedRun

MOST_ENVS, MOST_EVENTS = 40, 15
"""Maximum number of rows of each list."""


def frame(watched: WatchedRun, width: int) -> str:
    """Return the contents of the screen without colour, one below the other."""
    run = watched.state
    parts: list[Any] = [cells.header(watched, width), cells.alarms(watched), ""]
    columns = [column for column in cells.ENV_COLUMNS if width >= column.least]
    if latest := run.latest:
        table = Table(*(column.title for column in columns), box=None, pad_edge=False)
        for e in latest[:MOST_ENVS]:
            table.add_row(*(column.cell(run, e) for column in columns))
        parts.append(table)
        if len(latest) > MOST_ENVS:
            parts.append(f"… and {len(latest) - MOST_ENVS} more environments")
        most = max(latest, key=lambda e: sum(slot.was_used() for slot in e.slots.values()))
        if most.slots:
            parts += ["", cells.plain(f"slots of {most.name}"), cells.slot_table(run, most)]
        parts += ["", cells.ppo_line(run), cells.ops_line(run)]
    if run.events:
        parts += ["", "events, newest last"]
        parts += [cells.event_line(run, row) for _, row in list(run.events)[-MOST_EVENTS:]]
    out = StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part, overflow="ellipsis", no_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()
