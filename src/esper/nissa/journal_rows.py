"""Journal lines decoded directly to typed events with their position, for views that read whole journals.

This is the fastest way to read a journal: a line becomes one struct, without a dictionary in between. Lines that do
not fit their kind are returned too, so that a view can count them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Union
from zlib import crc32

import msgspec

from esper.leyline.events import KINDS, Event
from esper.leyline.stages import SeedStage
from esper.nissa.journal_reader import MOST_SEQ, MOST_TIME_S, Follower, decoded_entry
from esper.nissa.record import SEAL

PORTION = 1_000
"""Rows that are read at once. They fit the cache: larger portions are slower."""


class OtherRow(msgspec.Struct, frozen=True):
    """A line of an unknown kind, or one whose fields have wrong types (`is_known`)."""

    seq: int
    time_s: float
    rank: int
    kind: str
    is_known: bool
    replaced: int = 0


Index = Annotated[int, msgspec.Meta(gt=-(1 << 53), lt=1 << 53)]
Stage = Annotated[int, msgspec.Meta(ge=0, le=int(max(SeedStage)))]
POSITION: list[tuple[str, Any] | tuple[str, Any, Any]] = [
    ("seq", Annotated[int, msgspec.Meta(ge=0, lt=MOST_SEQ)]),
    ("time_s", Annotated[float, msgspec.Meta(gt=-MOST_TIME_S, lt=MOST_TIME_S)]),
    ("rank", int), ("replaced", Annotated[int, msgspec.Meta(ge=0)], 0), ("crc", int, -1),
]  # fmt: skip
BOUNDED = {"env": Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)], "episode": Index, "step": Index, "round": Index,
           "stages": tuple[Stage, ...]}  # fmt: skip
"""Fields with a narrower type than that of the event, so that no view has to check them."""


def _row_type(kind: str, event: type[msgspec.Struct]) -> type[Any]:
    names = [field.name for field in msgspec.structs.fields(event) if field.required]
    fields = [(name, BOUNDED[name]) for name in names if name in BOUNDED]
    return msgspec.defstruct(kind, [*POSITION, *fields], bases=(event,), tag=kind, frozen=True, kw_only=True, gc=False)


ROWS: dict[str, type[Any]] = {kind: _row_type(kind, event) for kind, event in KINDS.items()}
"""Kind → its event class with the position and checksum of the line."""
_decoder = msgspec.json.Decoder(Union[tuple(ROWS.values())])  # noqa: UP007  # the kinds are not known here
_decode = _decoder.decode


def decoded_rows(lines: list[bytes], rank: int) -> list[Any]:
    """Decode lines of this rank, see `decoded_row`; without the damaged ones. Fast if no line is odd."""
    try:
        rows: list[Any] = _decoder.decode_lines(b"\n".join(lines))
    except (msgspec.DecodeError, RecursionError):
        rows = []
    checksums = [crc32(line[: line.rfind(SEAL)]) for line in lines]
    if [row.crc for row in rows] == checksums and all(row.rank == rank and row.replaced <= row.seq for row in rows):
        return rows
    return [row for line in lines if (row := decoded_row(line, rank))]


def decoded_row(line: bytes, rank: int) -> Any:
    """Decode a line of this rank as a row of `ROWS` or an `OtherRow`. Return None if the line is damaged."""
    try:
        row: Any = _decode(line)
    except (msgspec.DecodeError, RecursionError):  # also numbers that are not finite, which are spelled as words
        return _other(line, rank)
    is_whole = row.crc == crc32(line[: line.rfind(SEAL)]) and row.rank == rank and row.replaced <= row.seq
    return row if is_whole else None


def _other(line: bytes, rank: int) -> Any:
    entry = decoded_entry(line, rank)
    if entry is None:
        return None
    seq, time_s, _, kind, data, replaced = entry
    if kind not in ROWS:
        return OtherRow(seq, time_s, rank, kind, False, replaced)
    position = {"seq": seq, "time_s": time_s, "rank": rank, "replaced": replaced}
    try:
        return msgspec.convert(data | position, ROWS[kind])
    except (ValueError, RecursionError):
        return OtherRow(seq, time_s, rank, kind, True, replaced)


def follow(run: Path) -> Follower[Any]:
    """Return a follower of a run whose entries are rows."""
    return Follower(run, decoded_rows)


def replay(run: Path, kinds: Collection[type[Event]]) -> Iterator[Any]:
    """Yield the rows of these kinds in order. A row is an instance of the class of its kind."""
    row_types = {ROWS[tag] for tag, kind in KINDS.items() if kind in kinds}
    follower = follow(run)
    while rows := follower.poll(PORTION):
        yield from (row for row in rows if type(row) in row_types)
