"""Decoded arrays, kept on disk so that a set is decoded once. A damaged entry is rebuilt, not believed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from esper.leyline.files import write_atomically
from esper.tolaria.data.dataset import digest
from esper.tolaria.data.readers import READER_VERSION, Arrays


def cached(name: str, root: Path, content: str, decode: Callable[[], Arrays]) -> Arrays:
    """What `decode` gives, from the cache if it holds the same content, reader and place already.

    `content` is the sha256 of the source files: a changed file is another entry, never a stale one.
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
    """`$ESPER_CACHE`, or `esper` in the user's cache folder."""
    return Path(os.environ.get("ESPER_CACHE") or Path.home() / ".cache" / "esper")


def _read(path: Path) -> Arrays | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            promised = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError, ValueError):
        return None
    return arrays if promised == _digest(arrays) else None


def _write(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(arrays, metadata={"sha256": _digest(arrays)}))


def _digest(arrays: Arrays) -> str:
    return digest(
        piece
        for name, array in sorted(arrays.items())
        for piece in (f"{name} {array.dtype} {array.shape}".encode(), array.data)
    )
