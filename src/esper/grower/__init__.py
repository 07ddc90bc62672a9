"""Growth inside a training loop that belongs to the user. Read first: `grower.py`.

This package wires the others together for one model: rules, growing network, controller, worth, checkpoints. It may
import every package except `karn`, `nissa` and the command line.
"""

from esper.grower.explanations import SlotView
from esper.grower.grower import Grower
from esper.grower.step_report import StepReport

__all__ = ["Grower", "SlotView", "StepReport"]
