"""Data: named sets resident in memory, their order as a function of (world, step), augmentation.

`load(name)` gives a `Dataset` with three disjoint splits. Embedded sets lie in `files/` with their licences;
others are read from a user's files by `readers.py`, checksummed, and cached by `cache.py`. Never random data
in place of a missing file. Imports leyline only. Read `catalogue.py` first, then `dataset.py`.
"""

from __future__ import annotations

from esper.tolaria.data.augment import crop_and_flip
from esper.tolaria.data.catalogue import SOURCES, load
from esper.tolaria.data.dataset import Dataset, Split, from_tensors
from esper.tolaria.data.order import minibatch_indices, window_starts

__all__ = [
    "SOURCES",
    "Dataset",
    "Split",
    "crop_and_flip",
    "from_tensors",
    "load",
    "minibatch_indices",
    "window_starts",
]
