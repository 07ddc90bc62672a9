"""A disk cache of decoded arrays, so that a data set is decoded once. Damaged entries are rebuilt."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from esper.leyline.atomic_io import write_atomically
from esper.leyline.checksums import check_tensors, seal_tensors
from esper.tolaria.data.dataset import digest
from esper.tolaria.data.readers import READER_VERSION, Arrays


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
