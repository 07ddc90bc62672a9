"""How a grower measures its body: quality, contributions and worth."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from esper.grower.qualities import NeedsTargets, Quality, scored
from esper.grower.ranks import Ranks, ValidationShare
from esper.kasmina.body import Body
from esper.leyline import lifecycle
from esper.leyline.errors import ConfigError
from esper.leyline.slot_table import SlotTable
from esper.simic.attribution import CounterfactualEngine, Worth, report
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.tolaria.coalitions import Coalitions, Measured, measure
from esper.tolaria.growing_network import GrowingNetwork


class Measuring:
    """The part of a grower that measures its body."""

    body: Body
    network: GrowingNetwork
    table: SlotTable
    ranks: Ranks
    emit: TelemetryEmitter
    _quality: Quality | NeedsTargets

    def check(self, val_batch: Any) -> None:
        """Evaluate the quality on one validation batch as `step` does, without changing anything.

        Args:
            val_batch: A batch as in `step`.

        Raises:
            ConfigError: The quality does not fit; the message has the expected and the actual shapes.

        Example:
            >>> grower.check((x, y))
        """
        self._evaluate([val_batch])

    def worth(self, val_batches: Iterable[Any], *, budget: int | None = None, tolerance: float | None = None) -> Worth:
        """Measure what every seed is worth now: print the result, call its `to_dict`, or `esper.plot_worth`.

        Committed seeds are included with their *dependence*: what the network would lose without them now, which is
        more than they contributed.

        Args:
            val_batches: Batches as in `step`.
            budget: With more than six seeds, the maximum number of coalitions to evaluate.
            tolerance: Stop earlier, once the sampling error of every Shapley value is at most this.

        Returns:
            Contributions, interactions and Shapley values with standard errors.

        Raises:
            ConfigError: The quality does not fit the batches.

        Example:
            >>> grower.germinate("1", "mlp_small")
            >>> worth = grower.worth([(x, y)])
            >>> worth.slots
            ('1',)
        """
        batches, score = scored(val_batches, self._quality)
        worth = report(self.body, batches, score, budget=budget, tolerance=tolerance)
        self.emit.worth(self.table, [worth])
        return worth

    # -- internal

    def _evaluate(self, val_batches: Iterable[Any], *gather: Callable[[list[Any]], list[Any]]) -> Coalitions:
        batches, score = scored(val_batches, self._quality, *gather)
        result = self.network.evaluate(batches, score)
        if result.scores.ndim != 2:
            raise ConfigError(
                f"a quality returns one score per sample, [B]; this one returned [B, {result.scores.shape[2]}]. "
                "Return the mean over the last axis"
            )
        return result

    def _measure(self, val_batches: Iterable[Any] | None) -> Measured | None:
        """Write the measurements on all ranks' batches to the table and return them; None if there are no batches."""
        result = None
        share = ValidationShare(() if val_batches is None else val_batches, self.ranks)
        if val_batches is not None:
            result = self._evaluate(share, self.ranks.gather)
        else:
            self.ranks.must_evaluate_together(None)
            if isinstance(self._quality, NeedsTargets):
                self.ranks.gather([])
        result = self.ranks.pool(result, share.checksum)
        if result is None:
            return None
        measured = measure(result)
        if not math.isfinite(measured.quality):
            warnings.warn(
                f"the quality after epoch {int(self.table.step[0])} is {measured.quality}: outputs on the validation "
                "batches are not finite. Lower the learning rate, or load the last checkpoint",
                stacklevel=3,
            )
        self.emit.worth(self.table, [CounterfactualEngine.worth(result)])
        worth = self.network.write_scores(self.table, 0, measured)
        unknown = np.full(1, np.nan)
        lifecycle.record_epoch(self.table, quality=np.array([measured.quality]), val_loss=unknown, train_loss=unknown)
        lifecycle.record_contribution(self.table, worth[:1], worth[1:])
        return measured
