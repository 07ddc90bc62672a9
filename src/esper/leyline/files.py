"""Files that survive their writer: replaced at once, durable when we say so, locked by the living only."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file at once: whoever reads it, and whatever happens, it is the old one or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_durably(draft, content)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk. Its name is not yet: that is `sync_directory`'s."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o644)
    try:
        left = memoryview(content)
        while left:  # the system may take a part
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)  # the system does not say which file was too much
        raise
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the system knows how."""
    if os.name != "nt":
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def lock_file(fd: int, *, shared: bool = False) -> bool:
    """Take the lock of an open file, if nobody has it; closing the file frees it, and so does any death."""
    try:
        import fcntl
    except ImportError:
        import msvcrt

        os.lseek(fd, 1 << 30, os.SEEK_SET)  # far behind the content: there, locked bytes cannot be read
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, *, wait_s: float) -> Iterator[bool]:
    """Within: nobody else is within. True, or False where the file system knows no locks.

    Raises TimeoutError if somebody else stays in for `wait_s`. The lock is let go of explicitly: a child that was
    forked within has the file open too, and closing ours would free nothing.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield _waited(fd, path, time.monotonic() + wait_s)
    finally:
        with contextlib.suppress(OSError):
            _unlock(fd)
        os.close(fd)


def _waited(fd: int, path: Path, until: float) -> bool:
    try:
        while not lock_file(fd):
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock", str(path))
            time.sleep(0.005)
    except TimeoutError:
        raise
    except OSError:
        return False
    return True


def _unlock(fd: int) -> None:
    try:
        import fcntl
    except ImportError:
        import msvcrt

        os.lseek(fd, 1 << 30, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]
        return
    fcntl.flock(fd, fcntl.LOCK_UN)
