"""Contracts: the enums, tables and data types that all packages share. Imports no torch and no other package.

Read first: `stages.py`, `actions.py` (what a controller can choose), `slot_table.py`, then `lifecycle.py` (the rules).
"""

from esper.leyline.actions import BLUEPRINTS, HEAD_OPTIONS, RELEVANCE, STYLES, Curve, Head, Op, Operator
from esper.leyline.errors import EsperError
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import NEXT_STAGES, PERMISSIVE, STRICT, SeedStage, Thresholds

__all__ = [
    "BLUEPRINTS",
    "HEAD_OPTIONS",
    "NEXT_STAGES",
    "PERMISSIVE",
    "RELEVANCE",
    "STRICT",
    "STYLES",
    "Curve",
    "EsperError",
    "Head",
    "Op",
    "Operator",
    "SeedStage",
    "SlotTable",
    "Thresholds",
]
