"""A record: an event with its place in the run."""

from __future__ import annotations

from typing import NamedTuple

from esper.leyline.events import Event, encode


class Record(NamedTuple):
    seq: int  # per rank, from 0: a hole is a loss, and visible
    time_s: float
    rank: int
    event: Event


def line(record: Record) -> bytes:
    """One line of a journal: flat JSON, the place first."""
    place = f'{{"seq":{record.seq},"time_s":{record.time_s:.6f},"rank":{record.rank},'
    return place.encode() + encode(record.event)[1:] + b"\n"
