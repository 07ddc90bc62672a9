"""Random numbers by address, for all environments at once: of (world, purpose, step, counter) and of nothing else.

So it does not matter how many environments stand side by side, in what order, or in which process. The same bits come
out on every machine: integers only, no library's generator.

Legend: E environments, n numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from esper.leyline.seeding import derive_seed
from esper.leyline.slot_table import Floats, Ints

Bits = npt.NDArray[np.uint64]


def _mix(bits: Bits) -> Bits:
    """The finaliser of splitmix64: neighbouring numbers become unrelated ones."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def world_keys(worlds: Sequence[int] | Ints) -> Bits:
    """[E] a key for each world; everything random hangs on it."""
    return _mix(np.asarray([int(w) % 2**64 for w in worlds], dtype=np.uint64) + np.uint64(derive_seed("world")))


def random_bits(keys: Bits, purpose: str, counters: int | Ints, step: Ints | None = None) -> Bits:
    """[E, n] bits that belong to (world, purpose, step, counter); counters are 0…n−1 or given, [E, n]."""
    address = keys ^ np.uint64(derive_seed(purpose))
    if step is not None:
        address = _mix(address + step.astype(np.uint64))
    counter = np.asarray(np.arange(counters) if isinstance(counters, int) else counters, dtype=np.uint64)
    return _mix(_mix(address)[:, None] + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def uniform(bits: Bits) -> Floats:
    """0…1, 1 excluded, exactly the same on every machine."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def bell(bits: Bits) -> Floats:
    """Mean 0, deviation 1, at most ±3.5: four uniform quarters of the bits, summed. Close to normal, and exact."""
    quarter = np.uint64(0xFFFF)
    total = sum((bits >> np.uint64(shift)) & quarter for shift in (0, 16, 32, 48))
    return (np.asarray(total, dtype=np.float64) / 65535.0 - 2.0) * np.sqrt(3.0)
