"""Sinks: where records go. Two methods; whoever has them is a sink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from esper.nissa.record import Record


class Sink(Protocol):
    """Receives the records of one run, in order, always from one thread that is its own.

    A sink that also has `flush()` is durable: the hub's flush calls it, and returns when it has.
    """

    def write(self, records: Sequence[Record]) -> None: ...
    def close(self) -> None: ...
