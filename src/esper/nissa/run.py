"""The run directory: the files of one run, owned by one process at a time.

  manifest.json   configuration and outcome: written first, finalised last
  run.lock        locked while a process owns the run; the system releases it if that process dies
  events/         the journal (`journal_writer.py`, `journal_reader.py`)
  checkpoints/    files to resume the run from

Nothing is overwritten: a new run gets a new directory.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import sys
import time
import weakref
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import msgspec

from esper import __version__
from esper.leyline.atomic_io import (
    Draft,
    lock_file,
    must_be_real_directory,
    open_own,
    open_regular,
    read_regular,
    sync_directory,
    write_atomically,
)
from esper.leyline.checksums import seal_json, unseal_json
from esper.leyline.errors import ConfigError, RunError
from esper.leyline.events import SCHEMA, spelled, unspelled
from esper.nissa.journal_reader import EVENTS, segments, tail
from esper.nissa.missed_events import JOURNAL

MANIFEST = "manifest.json"
LOCK = "run.lock"
CHECKPOINTS = "checkpoints"
ENDINGS = ("finished", "failed", "interrupted")
VERSIONS_OF = ("torch", "numpy", "msgspec", "safetensors")
MOST_MANIFEST_BYTES = 16 << 20
"""Upper bound for the size of a manifest, which is normally a few kB. Longer files are refused."""
END_BYTES = 32 << 10
"""Disk space reserved for what the end of a run adds to its manifest: status, error, event counts per rank."""
MOST_SECONDS = 1e11
"""Upper bound for a duration, about 3,000 years. Longer durations are ignored."""
TRIES = 30  # attempts to lock, 0.01 s apart
SIGNALLED = {129: "SIGHUP", 130: "SIGINT", 143: "SIGTERM"}
"""Exit codes of processes that a signal stopped."""


class RunDirectory:
    """A run owned by this process, from `create` or `resume` to `finish`.

    As a context manager it ends the run by how the block is left: finished, interrupted, or failed with the error.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], lock: Lock) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = lock
        self._final: Draft | None = None  # space for the last manifest, reserved while the disk is not full

    @classmethod
    def create(cls, root: Path, task: str, *, name: str | None = None, manifest: dict[str, Any]) -> Self:
        """Create a run below `root`, owned by this process. The default name consists of the time and the task."""
        _encoded(manifest)  # fail before a directory exists
        path = _new_directory(Path(root), task) if name is None else _named_directory(Path(root) / name)
        lock = Lock(path)
        self = None
        try:
            _must_be_empty(path)  # two processes may choose one name: the second to get the lock sees the first
            self = cls(path, {}, lock)
            ours = {"schema": SCHEMA, "run_id": path.absolute().name, "task": task, "status": "running"}
            ours |= {"started": _now(), "pid": os.getpid()}
            self.manifest = ours | manifest | ours  # `ours` sets the order of the keys, and overrides
            self.events_dir.mkdir()
            self._begin()
            sync_directory(path.parent)
        except BaseException:
            if self is not None:  # a run that cannot begin leaves no directory behind
                with contextlib.suppress(OSError):
                    if self._final is not None:
                        self._final.discard()
                    (path / MANIFEST).unlink(missing_ok=True)
                    self.events_dir.rmdir()
                    (path / LOCK).unlink()
                    path.rmdir()
            lock.release()
            raise
        return self

    @classmethod
    def resume(cls, path: Path, changes: dict[str, Any] | None = None, lock: Lock | None = None) -> Self:
        """Take ownership of an earlier run. Its manifest keeps the outcome of its previous sessions.

        changes  fields of the manifest to replace
        lock     the lock of the directory, if this process already holds it
        """
        path = Path(path)
        _read(path)  # do not lock what is not a run
        must_have_real_parts(path)
        lock = lock or Lock(path)
        try:
            before = _read(path)
            status = "killed" if before["status"] == "running" else before["status"]
            session = {"started": before.get("resumed", before.get("started")), "status": status}
            session |= {key: before.pop(key) for key in ("finished", "error", JOURNAL) if key in before}
            session["seconds"] = _session_s(path, session)
            now = {"status": "running", "pid": os.getpid(), "resumed": _now()}
            self = cls(
                path, before | (changes or {}) | now | {"sessions": [*before.get("sessions", []), session]}, lock
            )
            self._begin()
        except BaseException:
            lock.release()
            raise
        return self

    @property
    def events_dir(self) -> Path:
        """The directory of the journal."""
        return self.path / EVENTS

    def must_exist(self) -> None:
        """Raise RunError if the directory was moved, removed or replaced since this process took it."""
        if self._lock.is_held and not self._lock.is_at(self.path):
            raise RunError(
                f"{self.path} was moved or removed during the run, so its results cannot be saved. "
                "If you moved it, resume the run at the new path"
            )

    def finish(self, status: str, error: str | None = None, **extra: Any) -> None:
        """Write the outcome of the run and release its lock. Has no effect once the run has ended."""
        if status not in ENDINGS:
            raise ConfigError(f"a run ends as one of {', '.join(ENDINGS)}; not as {status!r}")
        if not self._lock.is_held:
            return
        self.manifest |= {"status": status, "finished": _now()} | ({"error": error} if error else {}) | extra
        try:
            self._write_last()
        finally:
            self._lock.release()

    def fail(self, error: BaseException) -> None:
        """End a run that could not be started or resumed. The event counts of its last session stay valid."""
        last = self.manifest.get("sessions", [{}])[-1]
        self.finish(*ending(error), **{key: last[key] for key in (JOURNAL,) if key in last})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.finish(*ending(error))
        except OSError as trouble:
            if error is None:
                raise
            error.add_note(f"and the manifest of {self.path} could not be finalised: {trouble}")

    def _begin(self) -> None:
        """Write the manifest and reserve space for its last version."""
        write_manifest(self.path, self.manifest)
        self._final = Draft(self.path / MANIFEST, reserve_bytes=len(_encoded(self.manifest)) + END_BYTES)

    def _write_last(self) -> None:
        """Write the manifest into the space reserved for it. The disk may be full."""
        assert self._final is not None
        try:
            self._final.write(_encoded(self.manifest))
            self._final.replace()
            sync_directory(self.path)
        except OSError:
            self._final.discard()
            write_manifest(self.path, self.manifest)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a run. "running" without a process that owns the run is returned as "killed"."""
    manifest = _read(path)
    if manifest["status"] == "running" and not is_owned(path):
        manifest = _read(path)  # it may have ended since
        if manifest["status"] == "running":
            manifest["status"] = "killed"
    return manifest


def _read(path: Path) -> dict[str, Any]:
    file = Path(path) / MANIFEST
    try:
        manifest = unspelled(msgspec.json.decode(unseal_json(read_regular(file, MOST_MANIFEST_BYTES))))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{path} is not a run: it has no {MANIFEST}. `esper runs` lists what there is") from None
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{file} is damaged ({error}). The run's journal in {EVENTS}/ may be whole") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("status"), str):
        raise RunError(f"{file} is no manifest of a run: it is JSON without a status")
    return manifest


def must_have_real_parts(path: Path) -> None:
    """Raise RunError if a part of the run is a link or a special file: files elsewhere could be changed."""
    with os.scandir(path) as listing:
        links = sorted(each.name for each in listing if each.is_symlink() and each.is_dir())
    if links:
        raise RunError(
            f"{path} holds a symbolic link to a directory elsewhere, {links[0]!r}, and nothing outside a run is "
            "changed. Replace it by a real directory"
        )
    name = ""
    try:
        for name in (EVENTS, CHECKPOINTS):
            if os.path.lexists(path / name):
                must_be_real_directory(path / name)
        for _, segment in chain.from_iterable(segments(path / EVENTS).values()):
            name = f"{EVENTS}/{segment.name}"
            open_regular(segment).close()
    except OSError as error:
        raise RunError(f"{path} is damaged: {name}: {error.strerror}. Restore it from a copy") from error


def manifest_base() -> dict[str, Any]:
    """Return the manifest's fields on machine and software. Imports none of the packages it names."""
    program = Path(sys.argv[0])
    name = (program.parent.name if program.name == "__main__.py" else program.name) or "python"  # as a user calls it
    versions: dict[str, str | None] = {"esper": __version__, "python": platform.python_version()}
    versions |= {package: _version(package) for package in VERSIONS_OF}
    return {
        "command": " ".join([name, *sys.argv[1:]]),
        "versions": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest of a run atomically. It contains a checksum of itself."""
    write_atomically(path / MANIFEST, _encoded(manifest))


def _encoded(manifest: dict[str, Any]) -> bytes:
    body = msgspec.json.format(msgspec.json.encode(spelled(msgspec.to_builtins(manifest))), indent=2) + b"\n"
    return seal_json(body)


def is_owned(path: Path) -> bool:
    """Return whether a process owns the run. A copied run is not owned."""
    try:
        file = open_regular(Path(path) / LOCK)
    except OSError:
        return False
    with file:
        try:
            return not lock_file(file.fileno(), shared=True)
        except OSError:  # the file system has no locks: trust the manifest
            return True


class Lock:
    """Ownership of a run directory until `release` or process exit. Raise RunError if another process has it."""

    HELD: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self, directory: Path) -> None:
        self._fd = -1
        try:
            self._fd = open_own(directory / LOCK, os.O_RDWR | os.O_CREAT)
            self._take(directory)
        except OSError as error:
            self.release()
            raise RunError(
                f"cannot lock {directory / LOCK}: {error.strerror or error}. "
                "Choose a directory on a file system that supports locks"
            ) from error
        except RunError:
            self.release()
            raise
        Lock.HELD.add(self)

    def _take(self, directory: Path) -> None:
        for _ in range(TRIES):  # a reader may hold the lock for a moment
            if lock_file(self._fd):
                break
            time.sleep(0.01)
        else:
            os.lseek(self._fd, 0, os.SEEK_SET)
            owner = os.read(self._fd, 32).decode("ascii", "replace").strip() or "unknown"
            raise RunError(f"{directory} is owned by a running process (pid {owner}). Wait for it, or stop it first")
        os.lseek(self._fd, 0, os.SEEK_SET)
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    @property
    def is_held(self) -> bool:
        """Whether the lock is held."""
        return self._fd >= 0

    def is_at(self, directory: Path) -> bool:
        """Return whether the locked file is still the lock of this directory. True if the disk cannot be read."""
        try:
            there = os.stat(directory / LOCK)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return os.path.samestat(there, os.fstat(self._fd))

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _forget_locks() -> None:
    """Release all locks in a forked child, which must not keep a dead parent's run locked."""
    for lock in Lock.HELD:
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def ending(error: BaseException | None) -> tuple[str, str | None]:
    """Return the status and the error text of a run that was left with this error."""
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return "finished", None
        if error.code in SIGNALLED:
            return "interrupted", SIGNALLED[int(error.code)]
        return "failed", f"SystemExit: {error.code}"
    if error is None or isinstance(error, KeyboardInterrupt):
        return ("finished", None) if error is None else ("interrupted", None)
    return "failed", f"{type(error).__name__}: {error}"


def _new_directory(root: Path, task: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9._]+', '-', task).strip('-.') or 'run'}"
    while True:
        path = root / f"{stem}-{secrets.token_hex(2)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


def _named_directory(path: Path) -> Path:
    if path.exists():
        _must_be_empty(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _must_be_empty(path: Path) -> None:
    if not path.is_dir() or any(each.name != LOCK for each in path.iterdir()):
        raise ConfigError(
            f"{path} exists and is not empty; nothing is overwritten. Choose another name, or resume that run"
        )


def plausible(value: Any, most: float) -> float | None:
    """Return the value if it is a number between ± `most`, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and -most <= value <= most else None


def seconds_between(started: Any, finished: Any) -> float | None:
    """Return the seconds between two times of a manifest, None if one is missing or invalid."""
    begun, ended = epoch_s(started), epoch_s(finished)
    return None if begun is None or ended is None else ended - begun


def epoch_s(text: Any) -> float | None:
    """Return a time of a manifest in seconds since 1970, None if it is missing or invalid."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _session_s(path: Path, session: dict[str, Any]) -> float:
    """Return the seconds a session lasted: until its recorded end or, if it was killed, its last event."""
    seconds = seconds_between(session.get("started"), session.get("finished"))
    if seconds is None:
        last, begun = tail(path), epoch_s(session.get("started"))
        seconds = last[-1].time_s - begun if last and begun is not None else 0.0
    return max(0.0, plausible(seconds, MOST_SECONDS) or 0.0)


def earlier_seconds(manifest: dict[str, Any]) -> float:
    """Return the total seconds of the earlier sessions of a run."""
    sessions = manifest.get("sessions")
    rows = [row for row in sessions if isinstance(row, dict)] if isinstance(sessions, list) else []
    return float(sum(plausible(row.get("seconds"), MOST_SECONDS) or 0.0 for row in rows))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
