"""Runs on disk: `list_runs` lists them, `find_run` selects one, `manifest_of` reads a manifest that may be damaged.

A row of the list comes from the manifest of a run and the ends of its journal. Runs may lie in groups: OUT/a and OUT/b
of `esper train --ab`, or DIR/ARM/WORLD of `esper sweep`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from esper.leyline.errors import DataError, RunError
from esper.leyline.events import RunStarted
from esper.nissa.journal_reader import EVENTS, Extent, head, segments, tail
from esper.nissa.missed_events import lost_events
from esper.nissa.run import (
    LOCK,
    MANIFEST,
    MOST_SECONDS,
    earlier_seconds,
    epoch_s,
    is_owned,
    plausible,
    read_manifest,
    seconds_between,
)

MOST_DEPTH = 3
"""Levels of directories in which runs are searched."""
MOST_STEPS = 10**15
"""Upper bound for the number of steps. Larger numbers are ignored."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One row of a list of runs. None where the files do not contain the value."""

    path: Path
    name: str
    """Path below the listed directory. Copies have the same id."""
    id: str
    task: str | None
    controller: str | None
    status: str
    """finished, failed, interrupted, running, killed, or unreadable (damaged manifest)."""
    started: str | None
    seconds: float | None
    """Seconds from the start to the end, or to the last event."""
    env_steps: int | None
    losses: list[str]
    """Missing events, counted from the journal's end alone. `esper report` also finds gaps before that."""


def list_runs(root: Path) -> list[RunInfo]:
    """Return the runs below `root`, newest first. Runs without a start time come last."""
    rows = [run_info(path, path.relative_to(root).as_posix()) for path in run_directories(Path(root), (MANIFEST, LOCK))]
    return newest_first(rows)


def newest_first(rows: list[RunInfo]) -> list[RunInfo]:
    """Return rows by their start, the newest first. Runs without a start time come last."""
    rows = sorted(rows, key=lambda row: row.id, reverse=True)
    return sorted(rows, key=lambda row: row.started or "", reverse=True)


def run_directories(root: Path, marks: Sequence[str]) -> list[Path]:
    """Return the run directories below `root`, at most MOST_DEPTH levels below it.

    A directory in `root` is a run if it has one of the files `marks`; below that, other programs may use the same
    names, and a run has a manifest and a journal. Directories inside of a run, hidden ones, and those behind links are
    not searched.
    """
    paths: list[Path] = []
    level = [Path(root)]
    for depth in range(MOST_DEPTH):
        groups = []
        for path in (path for folder in level for path in _subdirectories(folder)):
            is_marked = (os.path.exists(path / mark) for mark in ((MANIFEST, EVENTS) if depth else marks))
            if all(is_marked) if depth else any(is_marked):
                paths.append(path)
            elif not path.is_symlink():
                groups.append(path)
        level = groups
    return paths


def _subdirectories(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()]
    except OSError:  # not readable, or removed meanwhile
        return []


def run_info(path: Path, name: str) -> RunInfo:
    """Return the row of one run directory."""
    try:
        manifest = read_manifest(path)
    except RunError:
        manifest = {"status": "unreadable"}
    config = manifest.get("config")
    fields = (config if isinstance(config, dict) else {}) | manifest
    try:
        first, last = head(path), tail(path)
    except (OSError, RunError):  # not readable, removed meanwhile, or no journal
        first = last = []
    extents = {entry.rank: Extent(entry.seq + 1, 0) for entry in sorted(last, key=lambda entry: entry.seq)}
    env_steps = fields.get("env_steps")
    has_end = False
    for entry in last:
        if entry.kind == "run_finished":
            env_steps = entry.data.get("env_steps", env_steps)
            has_end = True
    begun = fields.get("resumed", fields.get("started"))
    seconds = seconds_between(begun, fields.get("finished"))
    if seconds is None and first and last:
        seconds = last[-1].time_s - (epoch_s(fields.get("resumed")) or first[0].time_s)
    seconds = plausible(seconds, MOST_SECONDS)
    steps = plausible(env_steps, MOST_STEPS)
    return RunInfo(
        path=path,
        name=name,
        id=_text(fields.get("run_id")) or path.name,
        task=_text(fields.get("task")),
        controller=_text(fields.get("controller")),
        status=manifest["status"],
        started=_text(fields.get("started")),
        seconds=None if seconds is None else max(0.0, seconds) + earlier_seconds(manifest),
        env_steps=None if steps is None else int(steps),
        losses=lost_events(manifest, extents, has_end=has_end),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def run_size(path: Path) -> int:
    """Return the size of all files of a run in bytes."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


RUNS = Path("runs")


def is_run(path: Path) -> bool:
    """Return whether a directory is a run."""
    return (path / MANIFEST).is_file() or (path / EVENTS).is_dir()


def newest(root: Path) -> Path | None:
    """Return the run below `root` that started last, by modification time and then by name."""
    return max(run_directories(root, (MANIFEST, EVENTS)), key=lambda p: (_began(p), p.name), default=None)


def _began(run: Path) -> float:
    """Return the modification time of its journal directory or manifest: neither is older than the run."""
    for part in (run / EVENTS, run / MANIFEST):
        if part.exists():
            return part.stat().st_mtime
    return 0.0


def find_run(location: Path, root: Path = RUNS) -> Path | None:
    """Return the run directory; None if there is no run *yet*, so that a reader can wait for it."""
    if location.is_dir():
        return location if is_run(location) else newest(location)
    if str(location) == "latest":
        if root.is_dir():
            return newest(root)
        raise DataError(
            f"there is no run yet: the directory {root}/ does not exist. Start a run, or pass a run directory"
        )
    names = sorted(p.name for p in root.iterdir() if is_run(p)) if root.is_dir() else []
    matches = [name for name in names if name.startswith(location.name)] if len(location.parts) == 1 else []
    if len(matches) == 1:
        return root / matches[0]
    if matches:
        raise DataError(
            f"{len(matches)} runs begin with {str(location)!r}: {', '.join(matches[:5])}. Use a longer prefix"
        )
    newest_ones = ", ".join(reversed(names[-5:])) or "none"
    raise DataError(
        f"no run at {str(location)!r}. Runs in {root}/: {newest_ones}. Pass one of them, a directory, or latest"
    )


Data = dict[str, Any]


def manifest_of(path: Path) -> tuple[Data, str | None]:
    """Return the manifest and why it cannot be read. Without a readable manifest the run needs a journal."""
    try:
        return read_manifest(path), None
    except RunError as error:
        if not segments(Path(path) / EVENTS):
            raise
        return ({"status": "running"} if is_owned(path) else {}), str(error)


def fact(manifest: Data, name: str) -> Any:
    """Return a manifest value under a field name of `run_started`; None if its type differs."""
    value = manifest.get(name)
    types = {f.name: f.type for f in msgspec.structs.fields(RunStarted)}
    try:
        return value if value is None or name not in types else msgspec.convert(value, types[name])
    except ValueError:
        return None
