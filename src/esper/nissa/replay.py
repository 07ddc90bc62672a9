"""The journal of a run as typed records, as its sinks received them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from esper.leyline.events import KINDS, Event
from esper.nissa.journal_reader import read
from esper.nissa.record import Record


def replay(run: Path, kinds: Collection[type[Event]] = tuple(KINDS.values())) -> Iterator[Record]:
    """Yield the recorded events of these kinds in order. Events of unknown kinds or with wrong fields are skipped."""
    for seq, time_s, rank, kind, data, replaced in read(run):
        event_type = KINDS.get(kind)
        if event_type is None or event_type not in kinds:
            continue
        try:
            event = msgspec.convert(data, event_type)
        except (ValueError, RecursionError):
            continue
        yield Record(seq, time_s, rank, event, replaced)
