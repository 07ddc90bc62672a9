"""A record: an event with its position in the run, and its encoding as a journal line."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from esper.leyline.events import Event, encode


class Record(NamedTuple):
    """An event with its seq, time and rank."""

    seq: int  # per rank, from 0: a gap that `replaced` does not explain is a loss
    time_s: float
    rank: int
    event: Event
    replaced: int = 0  # seqs right before this one that are not lost: their gauges were replaced by newer ones


SEAL = b',"crc":'


def line(record: Record) -> bytes:
    """Encode a record as a journal line: flat JSON, position first, checksum of everything before it last."""
    place = f'{{"seq":{record.seq},"time_s":{record.time_s:.6f},"rank":{record.rank},'
    if record.replaced:
        place += f'"replaced":{record.replaced},'
    return sealed(place.encode() + encode(record.event)[1:-1])


def sealed(body: bytes) -> bytes:
    """Append the checksum, closing brace and line end to an object that lacks its closing brace."""
    return b"%b%b%d}\n" % (body, SEAL, crc32(body))


def is_whole(text: bytes) -> bool:
    """Return whether a line matches its checksum."""
    at = text.rfind(SEAL)
    return at > 0 and text[at:].rstrip(b"\n") == b"%b%d}" % (SEAL, crc32(text[:at]))
