"""Events missing from a run's journal, compared with the counts that the run wrote to its manifest at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.nissa.journal_reader import Damage, Extent, read

JOURNAL = "journal"
"""Field of the manifest: rank → `{"events": n}`, the number of events that the rank emitted in the whole run.

If events are missing in the journal at the end, also `{"lost": {"events": n, "first_seq": …, "last_seq": …}}`.
"""


def lost_events(manifest: Mapping[str, Any], extents: Mapping[int, Extent], *, has_end: bool) -> list[str]:
    """Describe the missing events; empty if there are none. No other code decides this.

    extents   rank → how far its journal was read, and the gaps in it
    has_end   whether the journal has a `run_finished` event
    """
    counts = _recorded_counts(manifest)
    texts = []
    for rank in sorted({*counts, *extents}):
        extent = extents.get(rank, Extent(0, 0))
        emitted, lost = counts.get(rank, (0, 0))
        missing = max(lost, extent.missing + max(0, emitted - extent.next_seq))
        if missing:
            of_rank = f" of rank {rank}" if len({*counts, *extents}) > 1 else ""
            texts.append(f"{missing} event{'s' * (missing != 1)}{of_rank} missing")
    has_ended = bool(counts) or manifest.get("status") == "finished"
    if has_ended and not has_end and counts.get(0, (1, 0))[0] != 0:
        texts.append("no run_finished event")
    return texts


def missing_events(run_dir: Path, emitted: Mapping[int, int]) -> dict[int, list[range]]:
    """Return rank → its seqs below `emitted[rank]` that are not in the journal, for ranks that miss any."""
    damage = Damage()
    for _ in read(run_dir, damage):
        pass
    extents = damage.extents()
    missing = {}
    for rank, stop in sorted(emitted.items()):
        end = extents.get(rank, Extent(0, 0)).next_seq
        if gaps := [*damage.gaps(rank), *([range(end, stop)] if end < stop else [])]:
            missing[rank] = gaps
    return missing


def _recorded_counts(manifest: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Return rank → the number of events it emitted and of those lost, according to the manifest."""
    recorded = manifest.get(JOURNAL)
    counts: dict[int, tuple[int, int]] = {}
    for rank, facts in recorded.items() if isinstance(recorded, dict) else ():
        events, lost = (facts.get("events"), facts.get("lost")) if isinstance(facts, dict) else (None, None)
        lost_count = lost.get("events") if isinstance(lost, dict) else 0
        if str(rank).isdecimal() and type(events) is int:
            counts[int(rank)] = events, lost_count if type(lost_count) is int else 0
    return counts
