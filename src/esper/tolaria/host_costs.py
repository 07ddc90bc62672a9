"""Blueprints that each slot accepts, and costs of a host and of every blueprint at every slot, measured on a body.

`leyline/slot_table.py` adds them up for the seeds in a table.

Legend: S slots, B blueprints.
"""

from __future__ import annotations

import numpy as np

from esper.kasmina.blueprints import blueprint_index, count_macs, registered
from esper.kasmina.body import Body
from esper.kasmina.fork_state import attached
from esper.kasmina.forking import ForkPlan
from esper.kasmina.probing import PROBE_SAMPLES, quietly
from esper.leyline.slot_table import Bools, Ints


def takes_of(body: Body) -> Bools:
    """Return which blueprints each slot accepts, [S, B]."""
    numbers = {name: blueprint_index(name) for name in registered()}
    takes = np.zeros((len(body.slots), max(numbers.values()) + 1), dtype=bool)
    for s, names in enumerate(body.valid_blueprints().values()):
        takes[s, [numbers[b] for b in names]] = True
    return takes


def blueprint_costs(body: Body) -> tuple[Ints, Ints]:
    """Return the parameters and the multiply-adds per sample of every blueprint at every slot, [S, B] each."""
    params, macs = np.zeros((2, *takes_of(body).shape), dtype=np.int64)
    for s, costs in enumerate(body.costs().values()):
        for name, cost in costs.items():
            b = blueprint_index(name)
            params[s, b] = cost.params
            macs[s, b] = cost.macs
    return params, macs


def host_macs_and_order(body: Body) -> tuple[int, list[str]]:
    """Return the host's multiply-adds per sample and its slots in execution order, from one forward pass on the probe.

    All seeds are switched off for the pass: the result does not depend on what has grown.
    """
    modules = dict(body.model.named_modules())
    slots = list(body.slots.values())
    reached: list[str] = []
    handles = [
        modules[slot.module_name].register_forward_hook(lambda *_, name=slot.name: reached.append(name))
        for slot in slots
    ]
    everything_off = ForkPlan.single([False] * len(slots), [slot.name for slot in slots])
    try:
        with attached(everything_off, slots, body.model):
            macs = count_macs(lambda: quietly(body.model, body.probe))
    finally:
        for handle in handles:
            handle.remove()
    return macs // PROBE_SAMPLES, list(dict.fromkeys(reached))
