"""Checkpoints: directories that appear atomically, in formats that cannot execute code.

  <root>/<name>/*.safetensors, *.json   the content
  <root>/<name>/index.json              written last: size and sha256 of every file, and a checksum of itself
  <root>/.draft-*                       being written or removed; the next writer removes those of dead processes
  <root>/.lock                          held by the process that writes

A directory is renamed to its final name once everything in it is on disk. Readers take no lock. A damaged checkpoint is
reported by a warning, and the one before it is used.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from esper.leyline.atomic_io import locked, open_regular, sync_directory, write_durably
from esper.leyline.checksums import METADATA, seal_json, unseal_json
from esper.leyline.errors import CheckpointError, ConfigError, unknown_name
from esper.tolaria.packing import must_be_plain

INDEX = "index.json"
LOCK = ".lock"
DRAFT = ".draft-"
FORMAT = "esper-checkpoint-1"
MOST_INDEX_BYTES = 1 << 20
"""Largest size of an index, which has some 150 bytes per file."""
WAIT_S = 60.0  # how long to wait for another writer, such as one with a large checkpoint on a slow disk
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")


@dataclass(frozen=True, slots=True)
class Written:
    """Path and size of a written checkpoint, and the time that writing took."""

    path: Path
    size_bytes: int
    write_ms: float


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: _Count
    sha256: str


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of index.json. `number` is the order of writing."""

    format: str
    number: _Count
    name: str
    kind: str
    score: float | None
    files: dict[str, _File]


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    index: _Index


class Checkpoints:
    """The checkpoints below one root. Kept are the last `keep` and the one with the best score."""

    def __init__(self, root: Path, *, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be ≥ 1, got {keep}")
        self.root = Path(root)
        self.keep = keep
        self._damaged: set[Path] = set()  # found damaged when opened; they do not count towards `keep`

    def write(
        self,
        name: str,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]] = {},
        documents: Mapping[str, Any] = {},
        kind: str = "run",
        score: float | None = None,
    ) -> Written:
        """Write a checkpoint, wait until it is on disk, then remove those that are no longer kept.

        A name may be used again: both stay, and the later one is the newer. A score that is not finite counts as None.
        On failure raise CheckpointError; earlier checkpoints are unchanged and no draft is left.
        """
        started = time.perf_counter()
        contents = _contents(name, tensors, documents)
        try:
            if not self.root.is_dir():
                self.root.mkdir(parents=True, exist_ok=True)
                sync_directory(self.root.parent)
            with locked(self.root / LOCK, wait_s=WAIT_S) as alone:
                if alone:
                    for draft in _directories(self.root, drafts=True):  # of dead processes: a living one has the lock
                        shutil.rmtree(draft, ignore_errors=True)
                existing = self._listed()
                self._check_kind(kind, existing)
                number = 1 + max((index.number for _, index in existing), default=0)
                score = score if score is not None and math.isfinite(score) else None
                path, size = self._write(_Index(FORMAT, number, name, kind, score, {}), contents)
                self._damaged.discard(path)  # a damaged one of the same name may have been removed meanwhile
                self._remove_old()
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoint {name!r} in {self.root}: {error.strerror or error}. "
                f"Earlier ones are unchanged. {_WAY_OUT.get(error.errno or 0, _OTHERWISE)}"
            ) from error
        return Written(path, size, 1e3 * (time.perf_counter() - started))

    def newest(self) -> Saved | None:
        """Return the last complete checkpoint, or None. Damaged ones are skipped with a warning."""
        warned: set[Path] = set()
        while True:
            for path, index in sorted(self._listed(warned), key=lambda entry: -entry[1].number):
                try:
                    return Saved(path, index)
                except CheckpointError as error:
                    if not os.path.lexists(path):
                        break  # a writer removed it meanwhile: list the directory again
                    self._damaged.add(path)
                    _warn_once(warned, path, error)
            else:
                return None

    def names(self) -> list[str]:
        """Return the names in the order of writing. Only the indexes are read."""
        return [index.name for _, index in self._listed()]

    def _listed(self, warned: set[Path] | None = None) -> list[_Entry]:
        """Return checkpoints with a valid index, in the order of writing. Given `warned`, warn about the others."""
        while True:
            entries: list[_Entry] = []
            was_removed = False
            for path in _directories(self.root):
                try:
                    entries.append((path, _read_index(path / INDEX)))
                except CheckpointError as error:
                    if not os.path.lexists(path):
                        was_removed = True
                    elif warned is not None:
                        _warn_once(warned, path, error)
            if entries or not was_removed:  # otherwise newer ones replaced all of them: list the directory again
                return sorted(entries, key=lambda entry: entry[1].number)

    def _check_kind(self, kind: str, existing: list[_Entry]) -> None:
        """Raise if there are checkpoints of another kind: they belong to another program and must not be removed."""
        others = [index for _, index in existing if index.kind != kind]
        if others:
            raise CheckpointError(
                f"{self.root} contains checkpoints of kind {others[-1].kind!r} ({others[-1].name}). "
                f"Write those of kind {kind!r} to another directory"
            )

    def _write(self, index: _Index, contents: Mapping[str, Callable[[], bytes]]) -> tuple[Path, int]:
        draft = self.root / f"{DRAFT}{os.getpid()}-{secrets.token_hex(4)}"
        os.mkdir(draft)
        try:
            size = 0
            for name, encode in contents.items():  # encode one file at a time, to hold only one in memory
                content = encode()
                write_durably(draft / name, content)
                index.files[name] = _File(len(content), hashlib.sha256(content).hexdigest())
                size += len(content)
            encoded = _encoded_index(index)
            write_durably(draft / INDEX, encoded)
            sync_directory(draft)
            path = _free(self.root, index.name)
            os.rename(draft, path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        sync_directory(self.root)
        return path, size + len(encoded)

    def _remove_old(self) -> None:
        """Remove all but the last `keep` and the best of the checkpoints that look complete."""
        entries = self._listed()
        complete = [entry for entry in entries if entry[0] not in self._damaged and _looks_complete(*entry)]
        last = complete[-self.keep :]
        scored = [entry for entry in complete if entry[1].score is not None]
        best = max(scored, key=lambda entry: (entry[1].score, entry[1].number), default=None)
        for path, index in entries:
            named_by_us = re.fullmatch(rf"{re.escape(index.name)}(~\d+)?", path.name)  # others are copies by hand
            if last and index.number < last[0][1].number and (path, index) != best and named_by_us:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint. It is renamed first, so that readers never find a part of it."""
        draft = self.root / f"{DRAFT}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            os.rename(path, draft)
        except OSError as error:
            warnings.warn(f"cannot remove the old checkpoint {path}: {error.strerror or error}", stacklevel=4)
        shutil.rmtree(draft, ignore_errors=True)


_Entry = tuple[Path, _Index]


class Saved:
    """One complete checkpoint. Every file is verified when the checkpoint is opened, and again when it is read."""

    def __init__(self, path: Path, index: _Index) -> None:
        self.path = path
        self.name = index.name
        self.kind = index.kind
        self.score = index.score
        self._files = index.files
        for name, expected in self._files.items():
            with _opened(path / name, expected.size) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != expected.sha256:
                raise _damage(path / name, "its content has changed")

    def document(self, key: str) -> Any:
        """Return a JSON document."""
        content = self.file(f"{key}.json")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _damage(self.path / f"{key}.json", f"it is not a JSON document ({error})") from error

    def tensors(self, key: str) -> dict[str, Tensor]:
        """Return a group of tensors, on the CPU."""
        content = self.file(f"{key}.safetensors")
        try:
            return load(content)
        except (SafetensorError, ValueError, RuntimeError, KeyError, OverflowError) as error:
            raise _damage(self.path / f"{key}.safetensors", f"it contains no tensors ({error})") from error

    def file(self, name: str) -> bytes:
        """Return the content of a file; raise CheckpointError if it is damaged."""
        expected = self._files.get(name)
        if expected is None:
            raise unknown_name(f"file of checkpoint {self.name!r}", name, self._files)
        with _opened(self.path / name, expected.size) as file:
            content = file.read(expected.size + 1)
        if hashlib.sha256(content).hexdigest() != expected.sha256:
            raise _damage(self.path / name, "its content has changed")
        return content


_OTHERWISE = "Check the disk. Saving is retried at the next checkpoint"
_WAY_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space. Saving is retried at the next checkpoint"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Make it writable, or choose another directory"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "Choose a directory, or a path that does not exist"),
    errno.ETIMEDOUT: "Give every run its own directory, or end the other process",
}


def _contents(
    name: str, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, Any]
) -> dict[str, Callable[[], bytes]]:
    """Return file name → function that encodes it. Raise for content that cannot be saved, before writing anything."""
    contents: dict[str, Callable[[], bytes]] = {}
    for key, document in documents.items():
        contents[f"{key}.json"] = functools.partial(bytes, _encoded_document(key, document))
    for key, group in tensors.items():
        for each, tensor in group.items():
            must_be_plain(tensor, f"{key}[{each!r}]")
        if METADATA in group:
            raise CheckpointError(f"a tensor of {key!r} cannot be named {METADATA!r}: the format reserves that name")
        contents[f"{key}.safetensors"] = functools.partial(_encoded_tensors, key, group)
    for each in (name, *contents):
        if not _NAME.fullmatch(each) or each == INDEX:
            raise CheckpointError(
                f"{each!r} is not a valid name in a checkpoint: use at most 128 letters, digits, '_', '.', '+' and "
                f"'-', begin with a letter, a digit or '_', and do not use {INDEX!r}"
            )
    return contents


def _encoded_document(key: str, document: Any) -> bytes:
    """Return the document as JSON; raise if decoding it would not give an equal one."""
    try:
        encoded = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
        same = json.loads(encoded) == document
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the document {key!r} is not plain JSON ({error}). Use packed() first") from error
    if not same:
        raise CheckpointError(
            f"the document {key!r} would be loaded with other types: JSON has no tuples and only strings as keys. "
            "Use packed() first"
        )
    return encoded


def _encoded_tensors(key: str, group: Mapping[str, Tensor]) -> bytes:
    try:
        return save({name: _copied(tensor) for name, tensor in group.items()})
    except (SafetensorError, RuntimeError, ValueError, TypeError, KeyError) as error:  # also out of memory
        raise CheckpointError(f"cannot encode the tensors {key!r}: {error}") from error


def _copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU: safetensors refuses tensors that share memory."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _encoded_index(index: _Index) -> bytes:
    body = msgspec.json.format(msgspec.json.encode(index), indent=1)
    encoded = seal_json(b'{"index":%s}\n' % body)
    if len(encoded) > MOST_INDEX_BYTES:
        raise CheckpointError(
            f"checkpoint {index.name!r} has {len(index.files)} files, too many for its index. Combine some"
        )
    return encoded


def _read_index(path: Path) -> _Index:
    with _opened(path) as file:
        content = file.read(MOST_INDEX_BYTES + 1)
    if len(content) > MOST_INDEX_BYTES:
        raise _damage(path, "it is too large for an index")
    try:
        index = msgspec.json.decode(unseal_json(content), type=_Sealed).index
    except (ValueError, RecursionError) as error:
        raise _damage(path, f"it is not an index of this version ({error})") from error
    if index.format != FORMAT or not all(map(_NAME.fullmatch, (index.name, *index.files))):
        raise _damage(path, "it is not an index of this version")
    return index


@contextlib.contextmanager
def _opened(path: Path, size: int | None = None) -> Iterator[BufferedReader]:
    """Open a regular file of this size. A file that cannot be read counts as damaged, too."""
    try:
        with open_regular(path) as file:
            length = os.fstat(file.fileno()).st_size
            if size is not None and length != size:
                raise _damage(path, f"it has {length} bytes of {size}")
            yield file
    except FileNotFoundError as error:
        if not path.parent.exists():
            raise CheckpointError(f"{path.parent} was removed by a writer. Look for the newest again") from error
        raise _damage(path, "it is missing") from error
    except OSError as error:
        raise _damage(path, f"it cannot be read ({error.strerror or error})") from error


def _damage(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path.parent.name!r} is damaged: {path}: {what}")


def _warn_once(warned: set[Path], path: Path, error: CheckpointError) -> None:
    if path not in warned:
        warned.add(path)
        warnings.warn(f"{error}. It is skipped; the newest complete one is used, if there is one", stacklevel=4)


def _looks_complete(path: Path, index: _Index) -> bool:
    """Return whether all files exist in their size. They are not hashed: that would be too slow for every write."""
    try:
        return all(os.lstat(path / name).st_size == expected.size for name, expected in index.files.items())
    except OSError:
        return False


def _directories(root: Path, *, drafts: bool = False) -> list[Path]:
    try:
        with os.scandir(root) as listing:
            names = sorted(each.name for each in listing if each.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot list checkpoints in {root}: {error.strerror or error}") from error
    return [root / name for name in names if (name.startswith(DRAFT) if drafts else not name.startswith("."))]


def _free(root: Path, name: str) -> Path:
    """Return an unused path: the name itself, or with `~` (not allowed in names) and a number appended."""
    path, count = root / name, 1
    while os.path.lexists(path):
        count += 1
        path = root / f"{name}~{count}"
    return path
