"""Events missing from a run's journal, compared with the counts that the run wrote to its manifest at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esper.nissa.journal_reader import Extent

JOURNAL = "journal"
"""Field of the manifest: rank → `{"events": n}`, the number of events that the rank emitted in the whole run."""


def lost_events(manifest: Mapping[str, Any], extents: Mapping[int, Extent], *, has_end: bool) -> list[str]:
    """Describe the missing events; empty if there are none. No other code decides this.

    extents   rank → how far its journal was read, and the gaps in it
    has_end   whether the journal has a `run_finished` event
    """
    emitted = emitted_events(manifest)
    texts = []
    for rank in sorted({*emitted, *extents}):
        extent = extents.get(rank, Extent(0, 0))
        missing = extent.missing + max(0, emitted.get(rank, 0) - extent.next_seq)
        if missing:
            of_rank = f" of rank {rank}" if len({*emitted, *extents}) > 1 else ""
            texts.append(f"{missing} event{'s' * (missing != 1)}{of_rank} missing")
    has_ended = bool(emitted) or manifest.get("status") == "finished"
    if has_ended and not has_end and emitted.get(0) != 0:
        texts.append("no run_finished event")
    return texts


def emitted_events(manifest: Mapping[str, Any]) -> dict[int, int]:
    """Return rank → number of events it emitted according to the manifest; empty if not recorded."""
    recorded = manifest.get(JOURNAL)
    counts: dict[int, int] = {}
    for rank, facts in recorded.items() if isinstance(recorded, dict) else ():
        events = facts.get("events") if isinstance(facts, dict) else None
        if str(rank).isdecimal() and type(events) is int:
            counts[int(rank)] = events
    return counts
