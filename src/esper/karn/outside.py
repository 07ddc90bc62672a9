"""What comes from files that may be damaged: the manifest if it can be read, entries if they make sense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from esper.leyline.errors import RunError
from esper.leyline.events import KINDS, RunStarted
from esper.nissa.journal import EVENTS, segments
from esper.nissa.run import is_owned, read_manifest

Data = dict[str, Any]


def manifest_of(path: Path) -> tuple[Data, str | None]:
    """The manifest, and what is wrong with it. A run without a readable one is still a run if it has a journal."""
    try:
        return read_manifest(path), None
    except RunError as error:
        if not segments(Path(path) / EVENTS):
            raise
        return ({"status": "running"} if is_owned(path) else {}), str(error)


def checker(kind: str) -> Callable[[Data], object]:
    """Raises a ValueError at a field of the wrong type. A field may be missing: older versions knew fewer."""
    fields = [(f.name, f.type, msgspec.UNSET) for f in msgspec.structs.fields(KINDS[kind])]
    lenient = msgspec.defstruct(kind, fields)
    return lambda data: msgspec.convert(data, lenient)


CHECKS = {kind: checker(kind) for kind in KINDS}


def fact(manifest: Data, name: str) -> Any:
    """What the manifest says under a name of `run_started`; None where that is of another type."""
    value = manifest.get(name)
    types = {f.name: f.type for f in msgspec.structs.fields(RunStarted)}
    try:
        return value if value is None or name not in types else msgspec.convert(value, types[name])
    except ValueError:
        return None


def slot_names(manifest: Data) -> tuple[str, ...]:
    """The names of the slots, in the order of the arrays in `step`; empty where the manifest does not tell."""
    return tuple(fact(manifest, "slots") or ())
