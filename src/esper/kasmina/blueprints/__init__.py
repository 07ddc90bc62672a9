"""Blueprints: functions that build seeds, each registered for the layouts it supports.

A seed returns the change Δ(h), not h + Δ, and must pass `registry.check`.
Read `registry.py` first. `maps.py` and `sequences.py` contain the built-in blueprints.
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
