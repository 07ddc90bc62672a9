"""Rules shared by tests."""

from __future__ import annotations

from esper.leyline.lifecycle import Rules

ISOLATED = Rules(birth="isolated")
"""Default rules with isolated birth: a seed passes through GERMINATED and TRAINING before it blends."""
