"""Selection of a run: a run directory, a directory of runs (its newest), an id in `runs`, or "latest"."""

from __future__ import annotations

from pathlib import Path

from esper.leyline.errors import DataError

RUNS = Path("runs")
MANIFEST, EVENTS = "manifest.json", "events"


def is_run(path: Path) -> bool:
    """Return whether a directory is a run."""
    return (path / MANIFEST).is_file() or (path / EVENTS).is_dir()


def newest(root: Path) -> Path | None:
    """Return the run below `root` that started last, by modification time and then by name."""
    runs = [p for p in root.iterdir() if p.is_dir() and is_run(p)]
    return max(runs, key=lambda p: (_began(p), p.name), default=None)


def _began(run: Path) -> float:
    """Return the modification time of its journal directory or manifest: neither is older than the run."""
    for part in (run / EVENTS, run / MANIFEST):
        if part.exists():
            return part.stat().st_mtime
    return 0.0


def find_run(asked: Path, root: Path = RUNS) -> Path | None:
    """Return the run directory; None if there is no run *yet*, so that a reader can wait for it."""
    if asked.is_dir():
        return asked if is_run(asked) else newest(asked)
    if str(asked) == "latest":
        if root.is_dir():
            return newest(root)
        raise DataError(f"no run yet: there is no directory {root}/ here. Begin one, or name the directory of a run")
    known = sorted(p.name for p in root.iterdir() if is_run(p)) if root.is_dir() else []
    found = [name for name in known if name.startswith(asked.name)] if len(asked.parts) == 1 else []
    if len(found) == 1:
        return root / found[0]
    if found:
        raise DataError(f"{len(found)} runs begin with {str(asked)!r}: {', '.join(found[:5])}. Say more of the name")
    newest_ones = ", ".join(reversed(known[-5:])) or "none"
    raise DataError(
        f"no run at {str(asked)!r}. Runs in {root}/: {newest_ones}. Name one of them, a directory, or latest"
    )
