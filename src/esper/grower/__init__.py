"""Growth inside a training loop that belongs to the user. Read first: `grower.py`.

This package wires the others together for one model: rules, growing network, controller, worth, checkpoints. It may
import every package except `karn`, `nissa` and the command line.
"""

from esper.grower.explanations import SlotView, StepReport
from esper.grower.grower import Grower

__all__ = ["Grower", "SlotView", "StepReport"]
