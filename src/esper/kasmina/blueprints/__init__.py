"""Blueprints: the recipes of seeds. One function each, registered for the layouts it serves.

A seed returns the change Δ(h) it proposes, never h + Δ, and obeys the laws of `registry.check`.
Read `registry.py` first; `maps.py` and `sequences.py` are the built-in sets.
"""

from esper.kasmina.blueprints import maps, sequences  # noqa: F401  (registers the built-in sets)
from esper.kasmina.blueprints.registry import (
    Cost,
    Noop,
    blueprint,
    blueprint_index,
    blueprint_name,
    blueprints_for,
    build,
    check,
    check_own,
    cost,
    registered,
    seeded,
    unregister,
)

__all__ = [
    "Cost",
    "Noop",
    "blueprint",
    "blueprint_index",
    "blueprint_name",
    "blueprints_for",
    "build",
    "check",
    "check_own",
    "cost",
    "registered",
    "seeded",
    "unregister",
]
