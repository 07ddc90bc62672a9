"""Parameters and multiply-adds of a host and its seeds, for rewards, views and reports.

Legend: E environments, S slots, B blueprints.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from esper.leyline.slot_table import Ints, SlotTable
from esper.leyline.stages import NUM_STAGES, SeedStage

_HAS_SAY = np.isin(np.arange(NUM_STAGES), (SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED))


class Priced(Protocol):
    """Provider of costs. Multiply-adds are per sample."""

    @property
    def host_params(self) -> int:
        """Return the number of parameters of the host."""
        ...

    @property
    def host_macs(self) -> int:
        """Return the multiply-adds of the host."""
        ...

    @property
    def slot_macs(self) -> Ints:
        """Return the multiply-adds of each blueprint at each slot, [S, B]."""
        ...


def seed_macs(table: SlotTable, slot_macs: Ints) -> Ints:
    """Return the multiply-adds [E, S] of every seed that is BLENDING, HOLDING or FOSSILIZED.

    Seeds in other stages are not part of the forward pass, so they cost the host nothing.
    """
    slots, blueprints = slot_macs.shape
    has_say = _HAS_SAY[table.stage]
    price = slot_macs.ravel().take(np.maximum(table.blueprint, 0) + np.arange(slots) * blueprints)
    return np.asarray(price * has_say)


def network_params(table: SlotTable, host_params: int | Ints) -> Ints:
    """Return the parameters [E] of the host and of its BLENDING, HOLDING and FOSSILIZED seeds: those of an export."""
    return np.asarray(host_params + (table.params * _HAS_SAY[table.stage]).sum(axis=1))


def live_costs(table: SlotTable, prices: Priced) -> tuple[Ints, Ints]:
    """Return parameters [E] and multiply-adds [E] of host and seeds together.

    Parameters count from germination to removal, because they exist and are trained. Multiply-adds count from
    BLENDING on.
    """
    params = prices.host_params + table.params.sum(axis=1)
    macs = prices.host_macs + seed_macs(table, prices.slot_macs).sum(axis=1)
    return params, macs
