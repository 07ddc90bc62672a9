"""Data sets: three disjoint splits held in memory, the order in which a world reads them, and augmentation.

The order is a function of (world, step): there is no state to save and no dependence on other environments. Only raw
Philox bits are drawn: numpy guarantees that stream across versions, unlike `permutation` and `integers`.

Legend: N samples, B images of a minibatch, C channels, H × W pixels, T tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from esper.leyline.errors import ConfigError, DataError
from esper.leyline.rng import derive_seed

Kind = Literal["image", "text", "vector"]


TEXTS_AT_A_TIME = 64  # fewer than images, because a text is as many rows of every layer as it has tokens


@dataclass(frozen=True, slots=True)
class Split:
    """Samples `x [N, …]` and their targets `y [N]` (text: `[N, T]`)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def portions(self) -> list[tuple[Tensor, Tensor]]:
        """Return all samples in portions that fit a pass with all coalitions: texts in several, other data in one."""
        most = TEXTS_AT_A_TIME if self.y.dim() > 1 else len(self.x)
        return list(zip(self.x.split(most), self.y.split(most), strict=True))

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return samples and targets at `index`; images are `channels_last`, as they are stored.

        `index_select` on the contiguous [N, H, W, C] storage is 3× faster than `x[index]`.
        """
        if self.x.dim() == 4:
            x = self.x.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
        else:
            x = self.x.index_select(0, index)
        return x, self.y.index_select(0, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A named data set. Validation and test splits are never trained on; the test split is not used for any choice.

    Images are stored as normalised float32 in `channels_last`, not as bytes: a minibatch of 64 is then one
    copy (11 µs at 1×14×14, 97 µs at 3×32×32), while bytes need a copy, a cast and a scaling (31 and 266 µs).
    """

    name: str
    kind: Kind
    train: Split
    val: Split
    test: Split
    classes: int
    licence: str
    sha256: str
    """The checksum of the content that the data was read from: runs with equal checksums use the same data."""
    black: tuple[float, ...] = ()
    """The value of a black pixel after normalisation, per channel; augmentation pads with it."""
    vocabulary: str = ""
    """The characters of a text, in the order of their token numbers."""

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {len(split):,}" for name, split in self.splits.items())
        shape = list(self.train.x.shape[1:])
        return f"Dataset {self.name!r}: {sizes} samples of shape {shape}, {self.classes} classes; {self.licence}"

    @property
    def chance_loss(self) -> float:
        """The cross-entropy of guessing uniformly, ln(classes)."""
        return math.log(self.classes)

    @property
    def splits(self) -> dict[str, Split]:
        """The three splits by name."""
        return {"train": self.train, "val": self.val, "test": self.test}

    def windowed(self, block: int) -> Dataset:
        """Return a text (`x`, `y [N]`) cut into samples of `block` tokens; the target of each token is the next one.

        Training windows start at every character and are views of one array. Validation and test windows do not
        overlap, so each character is scored once; a remainder shorter than a window is dropped, not padded.
        """
        for name, split in self.splits.items():
            if len(split) < block:
                raise DataError(
                    f"the {name} split of {self.name!r} has {len(split)} characters, fewer than one window "
                    f"of {block}. Use a longer text or a smaller block_size"
                )
        train, val, test = (
            Split(split.x.unfold(0, block, step), split.y.unfold(0, block, step))
            for split, step in ((self.train, 1), (self.val, block), (self.test, block))
        )
        return replace(self, train=train, val=val, test=test)

    def shrunk(self, factor: int) -> Dataset:
        """Return images reduced by averaging squares of `factor` × `factor` pixels; a remainder is cut off."""
        if self.kind != "image":
            raise DataError(f"{self.name!r} is {self.kind} data; only images can be reduced. Set shrink=1")
        if min(self.train.x.shape[2:]) < factor:
            raise DataError(
                f"{self.name!r} has images of {tuple(self.train.x.shape[2:])}, smaller than shrink={factor}"
            )
        train, val, test = (Split(F.avg_pool2d(s.x, factor), s.y) for s in self.splits.values())
        return replace(self, train=train, val=val, test=test)

    def few(self, count: int, rng_seed: int) -> Dataset:
        """Return the data with `count` random training samples. Raise ConfigError if there are fewer."""
        if count > len(self.train):
            raise ConfigError(f"{self.name!r} has {len(self.train)} training samples, fewer than samples={count}")
        drawn = torch.from_numpy(np.random.default_rng(rng_seed).permutation(len(self.train))[:count])
        return replace(self, train=Split(*self.train.take(drawn.to(self.train.y.device))))

    def noisy(self, share: float, rng_seed: int) -> Dataset:
        """Return the data with random labels on `share` of the training samples. Other splits are unchanged."""
        if self.train.y.dim() != 1:
            raise DataError(f"{self.name!r} is text; label noise needs one class number per sample")
        rng = np.random.default_rng(rng_seed)
        changed = rng.permutation(len(self.train))[: round(share * len(self.train))]
        y = self.train.y.clone()
        y[torch.from_numpy(changed)] = torch.from_numpy(rng.integers(self.classes, size=len(changed)))
        return replace(self, train=Split(self.train.x, y))

    def to(self, device: torch.device | str) -> Dataset:
        """Return the data on another device; raise ConfigError if the device cannot be used."""
        must_be_usable(device)
        train, val, test = (Split(s.x.to(device), s.y.to(device)) for s in self.splits.values())
        if train.x.is_meta:
            raise ConfigError("device 'meta' holds no data: nothing can be trained on it. Set engine.device=cpu")
        return replace(self, train=train, val=val, test=test)


def must_be_usable(device: torch.device | str) -> None:
    """Raise ConfigError if this machine does not have the device."""
    try:
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {str(device)!r} cannot be used here: {reason}. Set engine.device=cpu") from error


def checked(data: Dataset) -> Dataset:
    """Return `data`; raise DataError if its shapes, types, class numbers or values are not valid."""
    for name, split in data.splits.items():
        where = f"the {name} split of {data.name!r}"
        if len(split.x) == 0:
            raise DataError(f"{where} is empty")
        if len(split.x) != len(split.y):
            raise DataError(f"{where} has {len(split.x)} samples but {len(split.y)} targets")
        if split.x.shape[1:] != data.train.x.shape[1:]:
            shape = tuple(split.x.shape[1:])
            expected = tuple(data.train.x.shape[1:])
            raise DataError(f"{where} has samples of shape {shape}, the train split of shape {expected}")
        if split.y.dtype != torch.int64:
            raise DataError(f"{where} has targets of type {split.y.dtype}; class numbers must be int64")
        for what, numbers in {"targets": split.y, "tokens": split.x}.items():
            if numbers.is_floating_point():
                continue
            low, high = int(numbers.min()), int(numbers.max())
            if low < 0 or high >= data.classes:
                raise DataError(
                    f"{where} has {what} from {low} to {high}, but {data.classes} classes allow only "
                    f"0 to {data.classes - 1}. Renumber them or give the right number of classes"
                )
        # the sum is far cheaper than isfinite over all values, and is not finite if any value is not
        if split.x.is_floating_point() and not bool(split.x.sum().isfinite()):
            bad = int((~split.x.isfinite()).sum())
            if bad:
                raise DataError(f"{where} holds {bad} NaN or infinite values. Remove or replace them first")
    return data


def stored_images(images: NDArray[np.uint8], mean: Iterable[float], std: Iterable[float], white: int) -> Tensor:
    """Return bytes `[N, C, H, W]` as normalised float32 in `channels_last`; `mean` and `std` have white as 1."""
    offset, scale = torch.tensor(tuple(mean)), torch.tensor(tuple(std))
    x = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 2, 3, 1))).float()
    return x.div_(white).sub_(offset).div_(scale).permute(0, 3, 1, 2)


def balanced_order(labels: NDArray[np.integer], name: str) -> NDArray[np.int64]:
    """Return a shuffle, seeded by `name`, in which classes alternate: every prefix is as balanced as possible."""
    shuffled = np.argsort(np.random.Philox(key=derive_seed(name, "balanced")).random_raw(len(labels)), kind="stable")
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    grouped = labels[by_class]
    turn = np.arange(len(labels)) - np.searchsorted(grouped, grouped)  # position within its class
    return by_class[np.argsort(turn, kind="stable")]


def digest(chunks: Iterable[bytes | memoryview]) -> str:
    """Return the sha256 of the concatenated chunks."""
    total = hashlib.sha256()
    for chunk in chunks:
        total.update(chunk)
    return total.hexdigest()


def from_tensors(
    name: str,
    x: Tensor,
    y: Tensor,
    *,
    val: tuple[Tensor, Tensor] | None = None,
    test: tuple[Tensor, Tensor] | None = None,
    held_out: float = 0.15,
    classes: int | None = None,
    black: tuple[float, ...] = (),
) -> Dataset:
    """Return a data set of your own tensors; a split that is not given is a class-balanced share `held_out` of `x`."""
    kind = _kind_of(name, x, y)
    if not 0.0 < held_out < 0.5:
        raise ConfigError(f"held_out must lie between 0 and 0.5, got {held_out}")
    share = max(1, int(len(x) * held_out))
    labels = y.cpu().numpy() if y.dim() == 1 else np.zeros(len(y), np.int64)
    rest = torch.from_numpy(balanced_order(labels, name))
    splits: dict[str, Split] = {}
    for part, pair in {"val": val, "test": test}.items():
        if pair is None:
            rows, rest = rest[:share], rest[share:]
            pair = x[rows], y[rows]
        splits[part] = Split(*pair)
    splits["train"] = Split(x[rest], y[rest])
    if kind == "image":
        for part, split in splits.items():
            splits[part] = Split(split.x.detach().contiguous(memory_format=torch.channels_last), split.y)
    if classes is None:
        numbers = [split.y for split in splits.values()] + ([x] if kind == "text" else [])
        classes = 1 + max(int(part.max()) for part in numbers if part.numel())
    pieces = (tensor for split in splits.values() for tensor in (split.x, split.y))
    return checked(
        Dataset(
            name=name,
            kind=kind,
            classes=classes,
            licence="the user's own",
            sha256=digest(piece.detach().cpu().contiguous().numpy().data for piece in pieces),
            black=black,
            train=splits["train"],
            val=splits["val"],
            test=splits["test"],
        )
    )


def _kind_of(name: str, x: Tensor, y: Tensor) -> Kind:
    """Return the kind of data by shape and dtype; raise DataError if there is none."""
    if len(x) == 0 or len(x) != len(y):
        raise DataError(f"{name!r} has {len(x)} samples and {len(y)} targets; both must be equal and not 0")
    if y.dtype == torch.int64 and y.dim() == 1 and x.is_floating_point() and x.dim() in (2, 4):
        return "image" if x.dim() == 4 else "vector"
    if y.dtype == x.dtype == torch.int64 and x.dim() == 2 and y.shape == x.shape:
        return "text"
    raise DataError(
        f"{name!r}: cannot tell what {x.dtype} samples of shape {tuple(x.shape)} with {y.dtype} targets of "
        f"shape {tuple(y.shape)} are. Give float images [N, C, H, W] or vectors [N, D] with int64 class "
        "numbers [N], or int64 tokens [N, T] with the next tokens [N, T]"
    )


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


def crop_and_flip(x: Tensor, *, pad: int, black: Sequence[float], generator: torch.Generator) -> Tensor:
    """Return `x [B, C, H, W]` with each image shifted by up to `pad` pixels and mirrored with probability 1/2.

    The border is filled with `black`, one value per channel. Cropping and mirroring all images is a single gather over
    pixels; the result is `channels_last`. `generator` is a CPU generator, so the shifts are the same on every device.
    """
    batch, channels, height, width = x.shape
    draws = torch.randint(0, 2 * pad + 1, (2, batch), generator=generator)
    mirror = torch.randint(0, 2, (batch, 1), generator=generator)
    high, wide = height + 2 * pad, width + 2 * pad

    column = torch.arange(width)
    rows = torch.arange(height) + draws[0, :, None]  # [B, H], in the padded image
    columns = torch.where(mirror == 1, width - 1 - column, column) + draws[1, :, None]  # [B, W]
    first = torch.arange(batch)[:, None] * high
    index = ((first + rows)[:, :, None] * wide + columns[:, None, :]).flatten().to(x.device)  # [B·H·W]

    # copy whole rows of pixels: a copy with an inner loop over 3 channels is slow
    edge = torch.tensor(black, dtype=x.dtype, device=x.device).repeat(wide)
    padded = edge.expand(batch, high, wide * channels).contiguous()
    inner = slice(pad * channels, (pad + width) * channels)
    padded[:, pad : pad + height, inner] = x.permute(0, 2, 3, 1).reshape(batch, height, width * channels)
    pixels = padded.view(-1, channels).index_select(0, index)
    return pixels.view(batch, height, width, channels).permute(0, 3, 1, 2)
