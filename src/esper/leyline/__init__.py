"""Contracts: the words and tables that every other part shares. Imports no torch and nothing of ours.

Read first: `stages.py` (a seed's life), `actions.py` (what a controller can say), `slot_table.py`.
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
