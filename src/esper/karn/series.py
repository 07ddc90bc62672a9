"""Numbers in bounded memory: `Series` keeps rows, `Means` keeps means by a whole number such as the round.

A series keeps all rows while they are few, then the minimum and maximum of equal groups.
Legend: n rows, C columns, B groups of `stride` consecutive rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_GROUPS = 2048
"""Number of groups at which pairs of neighbours are merged and the stride doubles."""
BLOCK_ROWS = 256
"""Rows that are collected before they are grouped, unless the stride is larger. Both are powers of two."""
MOST_NON_FINITE = 32
"""Maximum number of values that are not finite and whose place is kept."""
LARGEST = 1e300
"""Values from here on count as not finite, since differences of them overflow."""
Row = tuple[Any, ...]
Array = npt.NDArray[np.float64]


class Series:
    """Rows in the order they were added. The first column rises: it says where a row is, for instance its step.

    None means not measured. A value that is not finite is stored as a gap and listed in `non_finite`.
    The state depends on the rows alone, not on when it was read.
    """

    __slots__ = ("_high", "_limit", "_low", "_non_finite", "columns", "rows", "stride")

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self.stride = 1
        self.rows: list[Row] = []  # the newest ones, not grouped yet
        self._low: Array | None = None  # [B, C]
        self._high: Array | None = None
        self._non_finite: list[tuple[float, str]] = []
        self._limit = MOST_GROUPS  # number of rows at which they are grouped

    def add(self, row: Row) -> None:
        """Append a row: one number or None per column."""
        rows = self.rows
        rows.append(row)
        if len(rows) >= self._limit:
            self._group()

    def cut(self, first: float) -> None:
        """Remove the rows from `first` on, because a resumed run repeats them. Groups that begin before it stay."""
        while self.rows and self.rows[-1][0] >= first:
            self.rows.pop()
        if not self.rows and self._low is not None and self._high is not None:
            stays = self._low[:, 0] < first
            self._low, self._high = self._low[stays], self._high[stays]
        self._non_finite = [each for each in self._non_finite if each[0] < first]

    def __len__(self) -> int:
        """Return the number of groups, the last and incomplete one included."""
        return (0 if self._low is None else len(self._low)) + -(-len(self.rows) // self.stride)

    def table(self) -> tuple[Array, Array]:
        """Return the minimum and the maximum per group, [B, C] each, NaN where nothing was measured."""
        low, high = grouped(to_array(self.rows, len(self.columns)), self.stride)
        if self._low is None or self._high is None:
            return low, high
        return np.concatenate((self._low, low)), np.concatenate((self._high, high))

    def column(self, name: str) -> list[float | None]:
        """Return the maximum of one column per group, None where nothing was measured."""
        values = self.table()[1][:, self.columns.index(name)]
        return [None if v != v else v for v in values.tolist()]

    def last(self, name: str) -> Any:
        """Return the last measured value of a column, as it was recorded; None if there is none."""
        at = self.columns.index(name)
        value = next((row[at] for row in reversed(self.rows) if row[at] is not None), None)
        if value is None and self._high is not None:
            value = next((v for v in reversed(self._high[:, at].tolist()) if v == v), None)
        return value

    def non_finite(self) -> list[tuple[float, str]]:
        """Return the places of the first values that are not finite: (first column, name of the column)."""
        return (self._non_finite + not_finite(self.rows, self.columns))[:MOST_NON_FINITE]

    def _group(self) -> None:
        """Group all collected rows, and merge pairs of groups until there are at most MOST_GROUPS."""
        self._non_finite = self.non_finite()
        low, high = self.table()
        self.rows = []
        while len(low) >= MOST_GROUPS:
            if len(low) % 2:  # after a cut: the last group stays alone
                low, high = np.concatenate((low, low[-1:])), np.concatenate((high, high[-1:]))
            low, high = np.fmin(low[0::2], low[1::2]), np.fmax(high[0::2], high[1::2])
            self.stride *= 2
        self._low, self._high = low, high
        self._limit = max(BLOCK_ROWS, self.stride)


def to_array(rows: Sequence[Row], columns: int) -> Array:
    """Return rows as an array [n, C]. None and values that are not finite are NaN."""
    try:
        array = np.array(rows, np.float64).reshape(-1, columns)
    except OverflowError:  # an integer beyond the range of floats
        array = np.array([[v if v is None or abs(v) < LARGEST else math.inf for v in row] for row in rows], np.float64)
    array[~(np.abs(array) < LARGEST)] = np.nan
    return array


def grouped(array: Array, stride: int) -> tuple[Array, Array]:
    """Return the minimum and maximum of every `stride` rows; the last group may have fewer."""
    if stride == 1 or not len(array):
        return array, array
    rest = -len(array) % stride
    full = np.concatenate((array, np.full((rest, array.shape[1]), np.nan))).reshape(-1, stride, array.shape[1])
    return np.fmin.reduce(full, axis=1), np.fmax.reduce(full, axis=1)


def not_finite(rows: Sequence[Row], columns: Sequence[str]) -> list[tuple[float, str]]:
    """Return the places of measured values that are not finite."""
    gaps = sum(row.count(None) for row in rows)
    if gaps == np.isnan(to_array(rows, len(columns))).sum():
        return []
    return [
        (row[0], name)
        for row in rows
        for name, value in zip(columns, row, strict=True)
        if value is not None and not abs(value) < LARGEST
    ]


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
