"""The named data sets: three are part of the package, the others are read from the user's files.

Decoded arrays are cached on disk, so that a data set is decoded once. Damaged entries are rebuilt.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save

from esper.leyline.atomic_io import write_atomically
from esper.leyline.checksums import check_tensors, seal_tensors
from esper.leyline.errors import DataError, unknown_name
from esper.tolaria.data.dataset import Dataset, Split, balanced_order, checked, digest, stored_images
from esper.tolaria.data.readers import (
    READER_VERSION,
    Arrays,
    find_files,
    find_speeches,
    read_cifar10,
    read_fashion_mnist,
    read_speeches,
    read_text,
)


def cached(name: str, root: Path, content: str, decode: Callable[[], Arrays]) -> Arrays:
    """Return what `decode` returns, from the cache if it has an entry for the same content, reader and folder.

    `content` is the sha256 of the source files, so a changed file never matches an old entry.
    """
    key = digest(f"{part}\n".encode() for part in (READER_VERSION, name, root.resolve(), content))
    path = cache_folder() / f"{name}-{key[:32]}.safetensors"
    arrays = _read(path)
    if arrays is None:
        arrays = {key: np.ascontiguousarray(array) for key, array in decode().items()}
        try:
            _write(path, arrays)
        except OSError as error:
            warnings.warn(f"cannot cache {name!r} in {path.parent}: {error.strerror}", stacklevel=2)
    return arrays


def cache_folder() -> Path:
    """Return `$ESPER_CACHE`, or `~/.cache/esper` if it is not set."""
    return Path(os.environ.get("ESPER_CACHE") or Path.home() / ".cache" / "esper")


def _read(path: Path) -> Arrays | None:
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()
        check_tensors(content)
        return load(content)
    except (SafetensorError, OSError, ValueError):
        return None


def _write(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, seal_tensors(save(arrays)))


FOLDER = Path(__file__).parent / "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Metadata of a named data set."""

    licence: str
    sha256: str = ""
    """The checksum of the embedded file; empty for sets read from the user's files."""
    classes: int = 10
    mean: tuple[float, ...] = ()
    """The mean of the training pixels per channel, with white as 1; empty for text."""
    std: tuple[float, ...] = ()
    """The standard deviation of the training pixels per channel, with white as 1; empty for text."""
    white: int = 255
    """The stored value of a white pixel."""


SOURCES: dict[str, Source] = {
    "digits": Source(
        licence="CC BY 4.0, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository",
        sha256="ffcfe1dcfd5bd36d6027aae7de0ad22e058f9ab1350ac620eeeaf072a6a96dd7",
        mean=(0.3049,),
        std=(0.3756,),
        white=16,
    ),
    "fashion": Source(
        licence="MIT, Zalando SE; reduced to 14×14",
        sha256="efd9fb9d14fdc057bcb82166f9b5cbf90e239f0378b606fd017d4b5f29e18178",
        mean=(0.2854,),
        std=(0.3299,),
    ),
    "moby": Source(
        licence="public domain; edition of stdlib, CC0 1.0",
        sha256="8186048f2a21e1cc86dd742ef52de695297bc77c4ec67d1f4515f0e8648e6c18",
    ),
    "fashion-mnist": Source(licence="MIT, Zalando SE", mean=(0.2860,), std=(0.3530,)),
    "cifar10": Source(
        licence="A. Krizhevsky; no licence stated, published for research",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "sotu": Source(licence="public domain; collection of stdlib, ODC PDDL 1.0 and CC0 1.0"),
    "text": Source(licence="the user's own"),
}


def load_data(name: str, root: str | Path | None = None) -> Dataset:
    """Return a data set, checked and in memory.

    Args:
        name: `digits`, `fashion` and `moby` are part of the package. `cifar10`, `fashion-mnist` and `sotu` are read
            from files; `text` is any text. A text is one sequence: cut it into samples with `Dataset.windowed`.
        root: Folder of the files, or `$ESPER_DATA`; for `text` the file itself.

    Returns:
        The data set with its splits `train`, `val` and `test`, each with `x` and `y`.

    Raises:
        UnknownNameError: There is no such data set.
        DataError: A file is missing, damaged or of the wrong kind.

    Example:
        >>> data = esper.load_data("digits")
        >>> tuple(data.train.x.shape[1:]), data.classes
        ((1, 8, 8), 10)
    """
    if name not in SOURCES:
        raise unknown_name("dataset", name, SOURCES)
    source = SOURCES[name]
    if source.sha256:
        arrays, content = _read_embedded(name, source)
    else:
        arrays, content = _read_files(name, _root(name, root))
    build = _text if "tokens" in arrays else _images
    return checked(build(name, source, arrays, content))


def _root(name: str, root: str | Path | None) -> Path:
    location = root or (os.environ.get("ESPER_DATA") if name != "text" else None)
    if location:
        return Path(location).expanduser()
    way_out = (
        "Give the text file with --data, in Python as root"
        if name == "text"
        else "Give its folder with --data, in Python as root, or set $ESPER_DATA; docs/tasks.md says where to get it"
    )
    raise DataError(f"dataset {name!r} is read from your own files. {way_out}")


def _read_embedded(name: str, source: Source) -> tuple[Arrays, str]:
    path = FOLDER / f"{name}.npz"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"embedded file {path.name} is missing from the package. Reinstall esper") from error
    sha256 = digest([content])
    if sha256 != source.sha256:
        raise DataError(
            f"embedded file {path.name} is damaged: its sha256 begins {sha256[:12]}, expected "
            f"{source.sha256[:12]}. Reinstall esper, or rebuild it with scripts/make_data.py"
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return dict(file), sha256


def _read_files(name: str, root: Path) -> tuple[Arrays, str]:
    if name == "text":
        if not root.is_file():
            raise DataError(f"no file {str(root)!r}. For 'text', root is the path of a UTF-8 text file")
        files = [root]
    else:
        files = find_speeches(root) if name == "sotu" else find_files(name, root)
    content = digest(piece for path in files for piece in (path.name.encode(), path.read_bytes()))

    def decode() -> Arrays:
        match name:
            case "text":
                return read_text(root)
            case "sotu":
                return read_speeches(files)
            case "cifar10":
                return read_cifar10(files)
            case _:
                return read_fashion_mnist(files)

    return cached(name, root, content, decode), content


def _images(name: str, source: Source, arrays: Arrays, content: str) -> Dataset:
    if "val_x" not in arrays:  # published with two splits: a tenth of the training set becomes the validation set
        arrays = _hold_out(name, arrays)
    train, val, test = (
        Split(
            stored_images(arrays[f"{part}_x"], source.mean, source.std, source.white),
            torch.from_numpy(arrays[f"{part}_y"].astype(np.int64)),
        )
        for part in ("train", "val", "test")
    )
    return Dataset(
        name=name,
        kind="image",
        train=train,
        val=val,
        test=test,
        classes=source.classes,
        licence=source.licence,
        sha256=content,
        black=tuple(-m / s for m, s in zip(source.mean, source.std, strict=True)),
    )


def _hold_out(name: str, arrays: Arrays) -> Arrays:
    order = balanced_order(arrays["train_y"], name)
    val, train = np.split(order, [len(order) // 10])
    held = {f"val_{which}": arrays[f"train_{which}"][val] for which in "xy"}
    train_arrays = {f"train_{which}": arrays[f"train_{which}"][train] for which in "xy"}
    return arrays | held | train_arrays


def _text(name: str, source: Source, arrays: Arrays, content: str) -> Dataset:
    tokens = torch.from_numpy(arrays["tokens"].astype(np.int64))
    vocabulary = "".join(map(chr, arrays["characters"]))
    if len(tokens) < 40:
        raise DataError(f"a text needs at least 40 characters for three splits, {name!r} has {len(tokens)}")
    ends = [0, len(tokens) * 90 // 100, len(tokens) * 95 // 100, len(tokens)]
    train, val, test = (Split(part[:-1], part[1:]) for part in (tokens[a:b] for a, b in pairwise(ends)))
    return Dataset(
        name=name,
        kind="text",
        train=train,
        val=val,
        test=test,
        classes=len(vocabulary),
        licence=source.licence,
        sha256=content,
        vocabulary=vocabulary,
    )
