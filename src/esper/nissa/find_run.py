"""Selection of a run: a run directory, a directory of runs (its newest), an id in `runs`, or "latest"."""

from __future__ import annotations

from pathlib import Path

from esper.leyline.errors import DataError
from esper.nissa.journal_reader import EVENTS
from esper.nissa.run import MANIFEST
from esper.nissa.run_list import run_directories

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
