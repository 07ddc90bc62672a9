"""Rules shared by tests."""

from __future__ import annotations

from esper.kasmina.lifecycle import Rules

ISOLATED = Rules(birth="isolated")
"""Default rules with isolated birth: a seed passes through GERMINATED and TRAINING before it blends."""
