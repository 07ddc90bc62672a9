"""Data sets held in memory, their order as a function of (world, step), and augmentation.

`load_data(name)` returns a `Dataset` with three disjoint splits. Embedded sets are in `files/` with their licences.
Others are read from the user's files by `readers.py`, checksummed and cached. A missing file is an
error; it is never replaced by random data. Imports leyline only. Read first: `catalogue.py`, then `dataset.py`.
"""

from __future__ import annotations

from esper.tolaria.data.catalogue import SOURCES, load_data
from esper.tolaria.data.dataset import Dataset, Split, crop_and_flip, from_tensors, minibatch_indices, window_starts

__all__ = [
    "SOURCES",
    "Dataset",
    "Split",
    "crop_and_flip",
    "from_tensors",
    "load_data",
    "minibatch_indices",
    "window_starts",
]
