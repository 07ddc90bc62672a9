"""Code shared by `esper train --resume` and `esper grow --resume`: find the checkpoint, refuse inexact resumes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from esper.leyline.errors import ConfigError, RunError
from esper.leyline.text import printable
from esper.nissa.journal_reader import head, is_regular
from esper.nissa.run import CHECKPOINTS, LOCK, MANIFEST, Lock, read_manifest, write_manifest
from esper.simic.training.distributed import RENDEZVOUS
from esper.tolaria.checkpoint import Checkpoints, Saved

KINDS = {"train": "run", "grow": "grow"}
"""Command → the kind of its checkpoints."""
OWN_LOOP = "A run of your own loop (esper.record) is resumed in that loop: grower.load(directory of grower.save)"


def owns_run() -> bool:
    """Return whether this process is the rank that owns the run directory, known before the ranks have met."""
    return RENDEZVOUS not in os.environ and os.environ.get("RANK", "0") == "0"


@contextmanager
def ownership(path: Path | None) -> Iterator[Lock | None]:
    """Own the run within the context, so that its checkpoints do not change. Raise RunError if another process does.

    Yields None if there is no run at `path`, or if another rank has to own it.
    """
    is_run = path is not None and any((path / name).exists() for name in (MANIFEST, LOCK, CHECKPOINTS))
    if path is None or not is_run or not owns_run():
        yield None
        return
    lock = Lock(path)
    try:
        yield lock
    finally:
        lock.release()


def checkpoint_of(path: Path, command: str, facts: Callable[[Saved], dict[str, Any]]) -> Saved:
    """Return the newest complete checkpoint of a run of this command. The caller must hold `ownership`.

    A lost or damaged manifest is rebuilt from the checkpoint: `facts` returns its task and settings.
    """
    saved = Checkpoints(path / CHECKPOINTS).newest() if path.is_dir() else None
    if saved is not None and saved.kind != KINDS[command]:
        other = next((name for name, kind in KINDS.items() if kind == saved.kind), None)
        remedy = f". Resume it with: esper {other} --resume {path}" if other else f". {OWN_LOOP}"
        raise RunError(f"{path} is not a run of `esper {command}`: its checkpoints are of kind {saved.kind!r}{remedy}")
    _read_or_rebuild(path, saved, facts)
    if saved is None:
        raise RunError(
            f"{path} has no complete checkpoint to resume from. `esper {command}` writes the first one when it starts. "
            + OWN_LOOP
        )
    return saved


def _read_or_rebuild(path: Path, saved: Saved | None, facts: Callable[[Saved], dict[str, Any]]) -> None:
    try:
        read_manifest(path)
        return
    except RunError:
        if saved is None or not is_regular(path / MANIFEST):  # a link or a special file is not replaced
            raise
    warnings.warn(f"the manifest of {path} is missing or damaged; it is rebuilt from {saved.path.name}", stacklevel=2)
    rebuilt = {"run_id": path.absolute().name, "status": "killed"} | facts(saved)
    if begun := [entry for entry in head(path) if entry.time_s >= 0]:
        rebuilt["started"] = datetime.fromtimestamp(begun[0].time_s, UTC).isoformat(timespec="milliseconds")
    write_manifest(path, rebuilt)


def refuse_settings(overrides: list[str], allowed: str) -> None:
    """Raise ConfigError if settings were given together with --resume."""
    if overrides:
        raise ConfigError(
            f"a resumed run keeps its settings: {', '.join(overrides)} cannot be given with --resume ({allowed} can)"
        )


def must_fit(changed: list[str], allow_inexact: bool) -> None:
    """Refuse to resume if a change could affect bit-exactness, unless the user allows it."""
    if changed and not allow_inexact:
        raise ConfigError(
            f"the run cannot be resumed bit-exactly: {'; '.join(changed)}. Restore these, or add --allow-inexact"
        )
    if changed:
        print(f"esper: resuming, but not bit-exactly: {printable('; '.join(changed))}", file=sys.stderr)
