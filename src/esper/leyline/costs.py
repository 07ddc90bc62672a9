"""What a host and its seeds cost, for whoever charges rent, shows it or reports it.

Legend: E environments, S slots, B blueprints.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from esper.leyline.slot_table import Ints, SlotTable
from esper.leyline.stages import NUM_STAGES, SeedStage

_HAS_SAY = np.isin(np.arange(NUM_STAGES), (SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED))


class Priced(Protocol):
    """Anything that knows the prices: multiply-adds are those of one sample."""

    @property
    def host_params(self) -> int: ...
    @property
    def host_macs(self) -> int: ...
    @property
    def slot_macs(self) -> Ints: ...  # [S, B] what each blueprint adds at each slot


def seed_macs(table: SlotTable, slot_macs: Ints) -> Ints:
    """[E, S] multiply-adds of every seed that has a say: BLENDING, HOLDING or FOSSILIZED.

    A seed that has none is left out of the forward pass, so it costs the host nothing yet.
    """
    slots, blueprints = slot_macs.shape
    has_say = _HAS_SAY[table.stage]
    price = slot_macs.ravel().take(np.maximum(table.blueprint, 0) + np.arange(slots) * blueprints)
    return np.asarray(price * has_say)


def network_params(table: SlotTable, host_params: int) -> Ints:
    """[E] parameters of the host and of every seed that has a say: of the network that an export holds."""
    return np.asarray(host_params + (table.params * _HAS_SAY[table.stage]).sum(axis=1))


def live_costs(table: SlotTable, prices: Priced) -> tuple[Ints, Ints]:
    """Parameters [E] and multiply-adds [E] of host and seeds together.

    Parameters count from germination to removal, because they exist and are trained; multiply-adds
    count once the seed has a say.
    """
    params = prices.host_params + table.params.sum(axis=1)
    macs = prices.host_macs + seed_macs(table, prices.slot_macs).sum(axis=1)
    return params, macs
