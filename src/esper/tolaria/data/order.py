"""Data order as a function of (world, step): there is no state to save and no dependence on other environments.

Only raw Philox bits are drawn: numpy guarantees that stream across versions, unlike `permutation` and `integers`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import ConfigError, DataError
from esper.leyline.rng import derive_seed


def minibatch_indices(world: int, step: int, *, size: int, batch: int, batches_per_step: int) -> Tensor:
    """Return the sample indices of step `step` in world `world`: int64 `[batches_per_step, batch]`.

    Steps read consecutive parts of an endless sequence of passes. Each pass is a new shuffle of all `size` samples, so
    it contains every sample exactly once, for any batch size.
    """
    _check(step, size, batch, batches_per_step)
    count = batch * batches_per_step
    place, stop = step * count, (step + 1) * count
    parts = []
    while place < stop:
        number, offset = divmod(place, size)
        parts.append(_shuffle(world, number, size)[offset : offset + stop - place])
        place += len(parts[-1])
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).view(batches_per_step, batch)


def window_starts(world: int, step: int, *, size: int, batch: int, batches_per_step: int) -> Tensor:
    """Return the starts of a step's random text windows: int64 `[batches_per_step, batch]`, drawn with replacement.

    Windows overlap, so drawing without replacement would have no use; shuffling a million starts per world would cost
    more than the step.
    """
    _check(step, size, batch, batches_per_step)
    raw = np.random.Philox(key=derive_seed(world, "windows", step)).random_raw(batch * batches_per_step)
    return torch.from_numpy((raw % np.uint64(size)).astype(np.int64)).view(batches_per_step, batch)


@lru_cache(maxsize=128)  # two passes for each world of a training pool; 0.2 MB each at 50 000 samples
def _shuffle(world: int, number: int, size: int) -> NDArray[np.int32]:
    raw = np.random.Philox(key=derive_seed(world, "order", number)).random_raw(size)
    order = np.argsort(raw, kind="stable").astype(np.int32)
    order.setflags(write=False)  # shared by all callers through the cache
    return order


def _check(step: int, size: int, batch: int, batches_per_step: int) -> None:
    if size < 1:
        raise DataError("cannot order an empty training set")
    if step < 0 or batch < 1 or batches_per_step < 1:
        raise ConfigError(
            f"a step needs at least one batch of one sample and counts from 0, got {step=}, {batch=}, "
            f"{batches_per_step=}"
        )
