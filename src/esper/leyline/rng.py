"""Random numbers by name: derived seeds, and counter-based numbers for all environments at once.

`derive_seed` gives each random stream a name, so it does not depend on how many others exist. The counter-based
numbers are functions of (world, purpose, step, counter) only. They do not depend on how many environments run, in what
order or in which process, and are bit-identical on every machine: integer arithmetic only, no library generator.

Legend: E environments, n numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from esper.leyline.slot_table import Floats, Ints

Bits = npt.NDArray[np.uint64]


def derive_seed(*names: str | int) -> int:
    """Return the random seed for a tuple of names, such as `(root, world, "order", 3)`.

    Each name is hashed with its type and length, so `(1, 23)`, `(12, 3)` and `("1", 23)` differ. The
    result has 63 bits, so that it fits a signed 64-bit field in every file format and generator in use.

    >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1) != derive_seed(0, "order", 2)
    True
    """
    digest = hashlib.sha256()
    for name in names:
        text = str(name).encode()
        digest.update(b"%s%d:" % (b"s" if isinstance(name, str) else b"i", len(text)))
        digest.update(text)
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def _mix(bits: Bits) -> Bits:
    """Apply the finaliser of splitmix64, a hash of 64-bit integers."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def world_keys(worlds: Sequence[int] | Ints) -> Bits:
    """Return a key for each world [E], from which all its random numbers derive."""
    return _mix(np.asarray([int(w) % 2**64 for w in worlds], dtype=np.uint64) + np.uint64(derive_seed("world")))


def random_bits(keys: Bits, purpose: str, counters: int | Ints, step: Ints | None = None) -> Bits:
    """Return the bits [E, n] of (world, purpose, step, counter). Counters are 0…n−1 or an array [E, n]."""
    address = keys ^ np.uint64(derive_seed(purpose))
    if step is not None:
        address = _mix(address + step.astype(np.uint64))
    counter = np.asarray(np.arange(counters) if isinstance(counters, int) else counters, dtype=np.uint64)
    return _mix(_mix(address)[:, None] + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def uniform(bits: Bits) -> Floats:
    """Return uniform numbers in [0, 1), bit-identical on every machine."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def bell(bits: Bits) -> Floats:
    """Return numbers with mean 0, standard deviation 1 and at most ±3.5, close to normal and bit-identical everywhere.

    Each is the scaled sum of four 16-bit parts of the bits.
    """
    quarter = np.uint64(0xFFFF)
    total = sum((bits >> np.uint64(shift)) & quarter for shift in (0, 16, 32, 48))
    return (np.asarray(total, dtype=np.float64) / 65535.0 - 2.0) * np.sqrt(3.0)
