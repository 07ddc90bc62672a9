"""A record: an event with its place in the run."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from esper.leyline.events import Event, encode


class Record(NamedTuple):
    seq: int  # per rank, from 0: a hole that `replaced` does not explain is a loss
    time_s: float
    rank: int
    event: Event
    replaced: int = 0  # seqs right before this one that are no loss: gauges that newer ones replaced


SEAL = b',"crc":'


def line(record: Record) -> bytes:
    """One line of a journal: flat JSON, the place first, a checksum of all before it last."""
    place = f'{{"seq":{record.seq},"time_s":{record.time_s:.6f},"rank":{record.rank},'
    if record.replaced:
        place += f'"replaced":{record.replaced},'
    return sealed(place.encode() + encode(record.event)[1:-1])


def sealed(told: bytes) -> bytes:
    """A line of an object that lacks its closing brace."""
    return b"%b%b%d}\n" % (told, SEAL, crc32(told))


def is_whole(text: bytes) -> bool:
    """Whether a line is as it was written."""
    at = text.rfind(SEAL)
    return at > 0 and text[at:].rstrip(b"\n") == b"%b%d}" % (SEAL, crc32(text[:at]))
