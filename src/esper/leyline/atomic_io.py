"""Atomic, fsynced file writes, reads of regular files only, and advisory locks.

Run directories may come from untrusted sources. No function here follows a symbolic link in the last component of a
path, unless the caller states by `follow` that the path is the user's own. None blocks on a FIFO or reads a device.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}


# Reading ----------------------------------------------------------------------------------------------------------


def open_regular(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file for reading. Raise OSError for anything else, and for a symbolic link unless `follow`."""
    return os.fdopen(_open(Path(path), os.O_RDONLY, follow), "rb")


def read_regular(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """Return the content of a regular file. Raise OSError for anything else, or if it is longer than `limit` bytes."""
    with open_regular(path, follow=follow) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EINVAL, f"it has more than {limit:,} bytes, which is too much for this kind of file", path)
    return content


def must_be_real_directory(path: Path) -> None:
    """Raise OSError unless `path` itself is a directory, not a symbolic link to one."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        raise OSError(errno.ENOTDIR, f"it is {_kind(mode)}, not a directory", str(path))


def make_real_directory(path: Path) -> None:
    """Create a directory and its missing parents. Raise OSError if `path` is a link or not a directory."""
    if not os.path.lexists(path):
        path.mkdir(parents=True, exist_ok=True)
    must_be_real_directory(path)


def _open(path: Path, flags: int, follow: bool = False) -> int:
    """Open a regular file, or create it if the flags say so. Does not block on a FIFO."""
    if not follow and os.path.islink(path):  # for the message, and for systems without O_NOFOLLOW
        raise OSError(errno.EINVAL, "it is a symbolic link, which is not followed here", str(path))
    fd = os.open(path, flags | _NO_WAIT | _BINARY | (0 if follow else _NO_FOLLOW), 0o644)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a regular file", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_own(path: Path, flags: int) -> int:
    """Open a file to modify it in place. Raise OSError if it is not regular or has a second hard link."""
    fd = _open(path, flags)
    if os.fstat(fd).st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EINVAL, "it is a hard link: another name has the same content", str(path))
    return fd


def _kind(mode: int) -> str:
    """Return the file type of a mode in words."""
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


# Writing ----------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step. After a crash it has either the old or the new content."""
    draft = Draft(path, content)
    try:
        draft.replace()
    except BaseException:
        draft.discard()
        raise
    sync_directory(path.parent)


class Draft:
    """New content for `path`, stored under a random name in the same directory until `replace` or `discard`.

    The writer holds a lock on its draft. An unlocked draft was left by a writer that died; the next writer of the same
    file removes it. `reserve_bytes` of disk space are allocated, so that `write` succeeds later even on a full disk.
    """

    def __init__(self, path: Path, content: bytes = b"", *, reserve_bytes: int = 0) -> None:
        self.path = path
        remove_abandoned_drafts(path.parent, f"{path.name}.")
        self._fd = -1
        while self._fd < 0:
            self.draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
            self._fd = _create(self.draft)
            if not self._is_ours():  # another writer removed it before it was locked
                os.close(self._fd)
                self._fd = -1
        try:
            self.write(content)
            if reserve_bytes:
                _allocate(self._fd, reserve_bytes, self.draft)
        except BaseException:
            self.discard()
            raise

    def write(self, content: bytes) -> None:
        """Replace the content of the draft and fsync it. Uses the reserved space first."""
        os.ftruncate(self._fd, len(content))
        os.lseek(self._fd, 0, os.SEEK_SET)
        _write(self._fd, content, self.draft)

    def replace(self) -> None:
        """Rename the draft to its final name. Call `sync_directory` to make the name durable."""
        if os.name == "nt":  # Windows cannot rename an open file
            self._close()
        os.replace(self.draft, self.path)
        self._close()

    def discard(self) -> None:
        """Remove the draft. Idempotent."""
        self._close()
        with contextlib.suppress(OSError):
            self.draft.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _is_ours(self) -> bool:
        with contextlib.suppress(OSError):  # file system without locks: drafts are never removed there
            if not lock_file(self._fd):
                return False
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self.draft))
        except FileNotFoundError:
            return False


def remove_abandoned_drafts(directory: Path, of: str) -> None:
    """Remove abandoned drafts of files whose name begins with `of`."""
    with contextlib.suppress(OSError), os.scandir(directory) as listing:
        names = [each.name for each in listing if each.name.startswith(f".{of}") and each.name.endswith(".tmp")]
        for name in names:
            _remove_if_abandoned(directory / name)


def _remove_if_abandoned(draft: Path) -> None:
    with contextlib.suppress(OSError):  # not permitted, no lock support, or already removed
        if os.name == "nt":  # Windows cannot remove an open file
            draft.unlink()
            return
        fd = _open(draft, os.O_RDWR)
        try:
            if lock_file(fd):
                draft.unlink()
        finally:
            os.close(fd)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and fsync it. Call `sync_directory` to make its name durable."""
    fd = _create(path)
    try:
        _write(fd, content, path)
    finally:
        os.close(fd)


def create_empty(path: Path) -> None:
    """Create an empty file. Raise FileExistsError if the name exists, even as a dangling link."""
    os.close(_create(path))


def _create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _BINARY, 0o644)


def _write(fd: int, content: bytes, path: Path) -> None:
    rest = memoryview(content)
    try:
        while rest:  # os.write may write only a part
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)  # os.write does not set the file name
        raise


def _allocate(fd: int, size: int, path: Path) -> None:
    """Allocate disk space for an empty file. Writes zeros where the system cannot allocate."""
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            error.filename = str(path)
            raise
        _write(fd, bytes(size), path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. No effect on Windows."""
    if os.name != "nt":
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# Locks ------------------------------------------------------------------------------------------------------------


def lock_file(fd: int, *, shared: bool = False) -> bool:
    """Try to lock an open file without waiting. Return whether it is locked now.

    The lock is released when the file is closed or the process ends.
    """
    try:
        import fcntl
    except ImportError:
        import msvcrt

        os.lseek(fd, 1 << 30, os.SEEK_SET)  # far behind the content: Windows makes locked bytes unreadable
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
    """Hold an exclusive lock on `path`. Yield True, or False if the file system does not support locks.

    Raise TimeoutError if another process holds it for `wait_s` seconds. The lock is released explicitly, because a
    forked child also has the file open and closing ours would not release it.
    """
    fd = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        yield _waited(fd, path, time.monotonic() + wait_s)
    finally:
        with contextlib.suppress(OSError):
            _unlock(fd)
        os.close(fd)


def _waited(fd: int, path: Path, until: float) -> bool:
    """Wait for the lock. Return False if the file system does not support locks."""
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
