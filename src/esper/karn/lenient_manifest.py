"""Manifests that may be damaged, and their fields by the names of `run_started`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from esper.leyline.errors import RunError
from esper.leyline.events import RunStarted
from esper.nissa.journal_reader import EVENTS, segments
from esper.nissa.run import is_owned, read_manifest

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
