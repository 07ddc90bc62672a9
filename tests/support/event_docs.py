"""The event reference of docs/telemetry.md, generated from the event classes."""

from __future__ import annotations

import types
import typing

import msgspec

from esper.karn.views import field_notes, meaning, table_name
from esper.leyline.events import KINDS


def events_markdown() -> str:
    """Return every kind and field in the format of the documentation."""
    parts = []
    for name, kind in KINDS.items():
        promise = "must-keep" if kind.KEEP else f"gauge per {', '.join(kind.KEY)}"
        about = f"{promise}; from level {kind.LEVEL.name.lower()}; table `{table_name(name)}`"
        parts.append(f"**`{name}`** ({about}). {meaning(kind)}\n")
        notes = field_notes(kind)
        parts.append("| field | type | meaning |\n|---|---|---|")
        for field in msgspec.structs.fields(kind):
            parts.append(f"| `{field.name}` | {plain_type(field.type)} | {notes.get(field.name, '')} |")
        parts.append("")
    return "\n".join(parts)


def plain_type(hint: typing.Any) -> str:
    """Return the description of a type."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("null" if t is types.NoneType else plain_type(t) for t in inner)
    if typing.get_origin(hint) is tuple:
        return f"list of {plain_type(inner[0])}"
    if typing.get_origin(hint) is dict:
        return f"{plain_type(inner[0])} → {plain_type(inner[1])}"
    return {int: "whole number", float: "number", str: "text", bool: "yes or no"}[hint]
