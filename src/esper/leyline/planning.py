"""Choose seeds by what each of them gained in a trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Placement = tuple[str, str]
"""Slot and blueprint."""
Gains = Mapping[Placement, float]
"""Quality that each seed adds."""
KEEP = 0.6
"""A plan has no seed that gains less than this share of the largest gain."""


def planned(gains: Gains, fits: Callable[[dict[str, str]], bool], keep: float = KEEP) -> dict[str, str]:
    """Return one seed per slot in descending order of gain, as long as the structure fits.

    Seeds that gain nothing, or less than the share `keep` of the largest gain, are left out.
    """
    plan: dict[str, str] = {}
    least = keep * max(gains.values(), default=0.0)
    for (slot, name), gain in sorted(gains.items(), key=lambda each: -each[1]):
        if gain > 0 and gain >= least and slot not in plan and fits(plan | {slot: name}):
            plan[slot] = name
    return plan
