"""Blueprints: functions that build seeds, each registered for the layouts it supports.

A seed returns the change Δ(h), not h + Δ, and must pass `registry.check`.
Read `registry.py` first. `builtin.py` contains the built-in blueprints.
"""

from esper.kasmina.blueprints import builtin  # noqa: F401  (registers the built-in ones)
from esper.kasmina.blueprints.registry import Cost as Cost
from esper.kasmina.blueprints.registry import Noop as Noop
from esper.kasmina.blueprints.registry import blueprint as blueprint
from esper.kasmina.blueprints.registry import blueprint_index as blueprint_index
from esper.kasmina.blueprints.registry import blueprint_name as blueprint_name
from esper.kasmina.blueprints.registry import blueprints_for as blueprints_for
from esper.kasmina.blueprints.registry import build as build
from esper.kasmina.blueprints.registry import check as check
from esper.kasmina.blueprints.registry import check_own as check_own
from esper.kasmina.blueprints.registry import cost as cost
from esper.kasmina.blueprints.registry import count_macs as count_macs
from esper.kasmina.blueprints.registry import factory_of as factory_of
from esper.kasmina.blueprints.registry import fitted as fitted
from esper.kasmina.blueprints.registry import registered as registered
from esper.kasmina.blueprints.registry import seeded as seeded
from esper.kasmina.blueprints.registry import unregister as unregister
