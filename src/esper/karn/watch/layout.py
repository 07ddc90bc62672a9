"""Distribution of rows: environments and slots come first, events take the rest."""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn.watch.model import WatchModel

WIDE = 150
"""Minimum width at which events are shown beside the tables."""
TALL = 34
"""Minimum height at which the best episodes are a table and the environments have a summary line."""
FIXED = 4
"""Rows of the header, the anomalies and the keys."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of each part without its header; 0 hides it."""

    envs: int
    slots: int
    events: int
    best: int  # rows of the table
    best_line: int
    ppo: int
    mix: int
    summary: int
    gap: int  # empty rows above each table
    right: int  # width of the events column; 0: below the tables


def plan(model: WatchModel, width: int, height: int, matching: int) -> Plan:
    """Return the rows of each part for this screen size."""
    tall = height >= TALL
    ppo, mix = int(model.update is not None), int(bool(model.ops))
    best = min(len(model.best), max(3, height // 8)) if tall else 0
    best_line = int(bool(model.best) and not tall)
    right = max(64, width * 2 // 5) if width >= WIDE else 0
    summary = gap = int(tall)
    heads = 1 + 1 + gap + (1 + gap if best else 0)  # of environments, slots, the best
    body = height - FIXED - ppo - mix - best_line - summary
    want_envs, want_slots = max(1, matching), max(1, len(model.slot_names))
    if right:
        rows = max(2, body - heads - best)
        slots = min(want_slots, max(rows // 2, rows - want_envs))
        envs = max(1, min(want_envs, rows - slots))
        events = max(1, body + summary - 1)
        return Plan(envs, slots, events, best, best_line, ppo, mix, summary, gap, right)
    rows = max(3, body - heads - best - 1 - gap)
    spare = rows - max(2, min(rows // 3, 12))
    slots = max(1, min(want_slots, max(spare // 2, spare - want_envs)))
    envs = max(1, min(want_envs, spare - slots))
    return Plan(envs, slots, max(1, rows - envs - slots), best, best_line, ppo, mix, summary, gap, 0)
