"""Sinks: the destinations of records. Any object with the two methods of `Sink` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from esper.nissa.record import Record


class Sink(Protocol):
    """Receives the records of one run in order, always from the same dedicated thread.

    A sink that also has `flush()` is durable: the hub's flush calls it and waits for it.
    """

    def write(self, records: Sequence[Record]) -> None:
        """Write the records in order. On an error the same records are given again."""
        ...

    def close(self) -> None:
        """Release what the sink holds. Called once, after the last record."""
        ...
