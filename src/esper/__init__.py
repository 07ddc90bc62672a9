"""Esper: neural networks that grow while they train.

    body = esper.graft(model, at=["layer1", "layer2"], probe=x)
    grower = esper.Grower(body, optimizer, controller="schedule")
    grower.step(val_batches)            # once per epoch of your own loop
    plain = esper.harden(body)

Names are imported on first use, so that `import esper` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from esper.installation import warn_if_mixed

__version__ = "0.2.0"

_HOME = {
    "graft": "esper.kasmina.graft",
    "harden": "esper.kasmina.harden",
    "Body": "esper.kasmina.body",
    "Rules": "esper.leyline.lifecycle",
    "blueprint": "esper.kasmina.blueprints",
    "register_copy": "esper.kasmina.copied_blocks",
    "repeatable_blocks": "esper.kasmina.copied_blocks",
    "Grower": "esper.grower",
    "StepReport": "esper.grower",
    "SlotView": "esper.grower",
    "audition": "esper.grower.audition",
    "Audition": "esper.grower.audition",
    "Worth": "esper.simic.attribution",
    "plot_worth": "esper.karn.worth_plot",
    "record": "esper.nissa.recorder",
    "load_data": "esper.tolaria.data",
    "Task": "esper.tolaria.tasks",
    "Family": "esper.tolaria.families",
    "Engine": "esper.tolaria.engine",
    "EngineConfig": "esper.tolaria.engine_config",
    "GrownHost": "esper.tolaria.best_host",
    "GrowthEnv": "esper.simic.single_env",
    "GrowthVectorEnv": "esper.simic.env",
    "SimConfig": "esper.simic.simulated_worlds",
    "Simulator": "esper.simic.simulator",
    "SlotTable": "esper.leyline.slot_table",
    "SeedStage": "esper.leyline.stages",
    "Thresholds": "esper.leyline.stages",
    "PERMISSIVE": "esper.leyline.stages",
    "STRICT": "esper.leyline.stages",
    "EsperError": "esper.leyline.errors",
}
__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from esper.grower import Grower as Grower
    from esper.grower import SlotView as SlotView
    from esper.grower import StepReport as StepReport
    from esper.grower.audition import Audition as Audition
    from esper.grower.audition import audition as audition
    from esper.karn.worth_plot import plot_worth as plot_worth
    from esper.kasmina.blueprints import blueprint as blueprint
    from esper.kasmina.body import Body as Body
    from esper.kasmina.copied_blocks import register_copy as register_copy
    from esper.kasmina.copied_blocks import repeatable_blocks as repeatable_blocks
    from esper.kasmina.graft import graft as graft
    from esper.kasmina.harden import harden as harden
    from esper.leyline.errors import EsperError as EsperError
    from esper.leyline.lifecycle import Rules as Rules
    from esper.leyline.slot_table import SlotTable as SlotTable
    from esper.leyline.stages import PERMISSIVE as PERMISSIVE
    from esper.leyline.stages import STRICT as STRICT
    from esper.leyline.stages import SeedStage as SeedStage
    from esper.leyline.stages import Thresholds as Thresholds
    from esper.nissa.recorder import record as record
    from esper.simic.attribution import Worth as Worth
    from esper.simic.env import GrowthVectorEnv as GrowthVectorEnv
    from esper.simic.simulated_worlds import SimConfig as SimConfig
    from esper.simic.simulator import Simulator as Simulator
    from esper.simic.single_env import GrowthEnv as GrowthEnv
    from esper.tolaria.best_host import GrownHost as GrownHost
    from esper.tolaria.data import load_data as load_data
    from esper.tolaria.engine import Engine as Engine
    from esper.tolaria.engine_config import EngineConfig as EngineConfig
    from esper.tolaria.families import Family as Family
    from esper.tolaria.tasks import Task as Task


warn_if_mixed()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name == "grower":
        return importlib.import_module("esper.grower")
    raise AttributeError(f"module 'esper' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
