"""Rows of numbers in little memory, for the measurements of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from esper.karn.charts import Value
from esper.karn.lenient_manifest import Data

UNMEASURED = -sys.float_info.max
"""Encoding of None in a table of floats. NaN cannot be used: it is a measured value."""


class NumberTable:
    """Rows of numbers ordered by their first field. Of rows with the same first field the last one counts.

    Rows are converted to an array only on request: most rows of a large run are never drawn.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self.fields = tuple(fields)
        self.pick = itemgetter(*fields)
        self._flat: list[Any] = []

    def add(self, d: Data) -> None:
        """Append a row. Missing fields are None."""
        try:
            self._flat += self.pick(d)
        except KeyError:  # written by a version with fewer fields
            self._flat += map(d.get, self.fields)

    def __len__(self) -> int:
        return len(self._flat) // len(self.fields)

    def array(self) -> npt.NDArray[np.float64]:
        """Return [rows, fields]. None and values that are not numbers are UNMEASURED."""
        numbers = [v if isinstance(v, float | int) else UNMEASURED for v in self._flat]
        rows = np.array(numbers, np.float64).reshape(-1, len(self.fields))
        if len(rows) > 1 and not (np.diff(rows[:, 0]) > 0).all():  # a resumed run repeats some steps
            _, newest = np.unique(rows[::-1, 0], return_index=True)
            rows = rows[::-1][newest]
        return rows

    def last(self, name: str) -> Any:
        """Return the field of the row added last, as it was recorded; None if there is no row."""
        return self._flat[self.fields.index(name) - len(self.fields)] if self._flat else None

    def column(self, name: str) -> list[Value]:
        """Return one column, None where not measured."""
        return [None if v == UNMEASURED else v for v in self.array()[:, self.fields.index(name)].tolist()]
