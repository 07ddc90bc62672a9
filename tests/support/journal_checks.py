"""Checks of a journal that only tests need."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from esper.nissa.journal_reader import Damage, Entry, Extent, read


def missing_seqs(entries: Iterable[Entry]) -> dict[int, list[range]]:
    """Return the missing seqs of each rank that has any. Gauges replaced by newer ones are not missing."""
    present: dict[int, set[int]] = {}
    for entry in entries:
        present.setdefault(entry.rank, set()).update(range(entry.seq - entry.replaced, entry.seq + 1))
    by_rank: dict[int, list[range]] = {}
    for rank, seqs in sorted(present.items()):
        ends = sorted(seqs)
        gaps = zip([-1, *ends], ends, strict=False)
        if missing := [range(low + 1, high) for low, high in gaps if high > low + 1]:
            by_rank[rank] = missing
    return by_rank


def next_seq(run_dir: Path, rank: int = 0) -> int:
    """Return the seq after the last one in the journal of a rank."""
    damage = Damage()
    for _ in read(run_dir, damage):
        pass
    return damage.extents().get(rank, Extent(0, 0)).next_seq
