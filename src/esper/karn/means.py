"""Means of numbers by a whole number such as the round, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from esper.karn.series import LARGEST

MOST_KEYS = 1024
"""Maximum number of keys. If there are more, two neighbouring keys share a mean, then four, and so on."""
Mean = list[float]  # number, sum, minimum, maximum


class Means:
    """Number, mean, minimum and maximum per key and column. None and values that are not finite do not count."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self.stride = 1
        self._cells: dict[int, list[Mean]] = {}

    def add(self, key: int, values: Sequence[float | None]) -> None:
        """Add one value per column."""
        cells = self._cells.get(key // self.stride)
        if cells is None:
            cells = self._cells[key // self.stride] = [[0, 0.0, math.inf, -math.inf] for _ in self.columns]
        for cell, value in zip(cells, values, strict=True):
            if value is not None and abs(value) < LARGEST:
                cell[0] += 1
                cell[1] += value
                if value < cell[2]:
                    cell[2] = value
                if value > cell[3]:
                    cell[3] = value
        while len(self._cells) > MOST_KEYS:
            self._coarsen()

    def __len__(self) -> int:
        return len(self._cells)

    def keys(self) -> list[int]:
        """Return the first key of every group, in order."""
        return [key * self.stride for key in sorted(self._cells)]

    def column(self, name: str) -> list[tuple[float, float, float] | None]:
        """Return mean, minimum and maximum per key, in the order of `keys`; None where nothing was measured."""
        at = self.columns.index(name)
        cells = (self._cells[key][at] for key in sorted(self._cells))
        return [(cell[1] / cell[0], cell[2], cell[3]) if cell[0] else None for cell in cells]

    def _coarsen(self) -> None:
        self.stride *= 2
        finer, self._cells = self._cells, {}
        for key, cells in sorted(finer.items()):
            if key // 2 in self._cells:
                for cell, other in zip(self._cells[key // 2], cells, strict=True):
                    number, total, low, high = cell
                    cell[:] = number + other[0], total + other[1], min(low, other[2]), max(high, other[3])
            else:
                self._cells[key // 2] = cells
