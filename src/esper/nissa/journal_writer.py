"""Journal writer: one JSON line per event, in append-only segments.

A kill or a power cut tears at most one line: the torn line stays, the next process starts a new segment, and the
reader skips what it cannot read. After a failed write (a full disk), the caller passes the same records again: the
incomplete line is completed, and nothing is written twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from esper.leyline.atomic_io import (
    create_empty,
    make_real_directory,
    open_own,
    open_regular,
    read_regular,
    remove_abandoned_drafts,
    sync_directory,
    write_atomically,
)
from esper.leyline.errors import ConfigError, RunError
from esper.nissa.journal_reader import EVENTS, MOST_LINE_BYTES, decoded_entry, segment_name, segments
from esper.nissa.record import Record, line

SEGMENT_BYTES = 32 << 20
"""Maximum size of a segment in bytes: small enough to copy alone, large enough that a day's run has few."""
MOST_REWIND_BYTES = 256 << 20
"""Maximum size of a segment that is rewound. The writer starts a new segment long before."""
Line = tuple[int, bytes]  # seq, text
APPEND = os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0)


class JsonlSink:
    """Append the records of one rank. `write` passes lines to the system at once; `flush` syncs them to disk.

    A new segment starts before a line that would exceed `segment_bytes`, ≥ 1.
    """

    def __init__(self, events_dir: Path, *, rank: int = 0, segment_bytes: int = SEGMENT_BYTES) -> None:
        if segment_bytes < 1:
            raise ConfigError(f"a journal's segment needs at least 1 byte, got segment_bytes={segment_bytes}")
        self._dir = Path(events_dir)
        self._rank = rank
        self._limit = segment_bytes
        make_real_directory(self._dir)
        self._fd = -1
        self._size = 0
        self._rest = b""  # rest of the line within which the last write failed
        self._begun = -1  # the last seq of which a failed write has written anything
        existing = segments(self._dir).get(rank, [])
        self._number = existing[-1][0] if existing else -1
        if existing and _ends_whole(existing[-1][1]):
            self._fd = open_own(existing[-1][1], APPEND)
            self._size = os.fstat(self._fd).st_size
        else:
            self._rotate()

    def write(self, records: Sequence[Record]) -> None:
        """Append all records. Raise before anything is written if one cannot be encoded.

        After an OSError, call it again with the same records.
        """
        lines = [(record.seq, line(record)) for record in records if record.seq > self._begun]
        while self._rest:
            done = os.write(self._fd, self._rest)
            self._rest = self._rest[done:]
            self._size += done
        for piece in self._pieces(lines):
            self._append(piece)
        self._begun = -1

    def flush(self) -> None:
        """Sync the current segment to disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Sync and close the current segment. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _pieces(self, lines: list[Line]) -> Iterator[list[Line]]:
        """Yield the lines in groups that fit into a segment, and open a new segment between groups."""
        piece: list[Line] = []
        size = self._size
        for each in lines:
            if size and size + len(each[1]) > self._limit:
                if piece:
                    yield piece
                self._rotate()
                piece, size = [], 0
            piece.append(each)
            size += len(each[1])
        if piece:
            yield piece

    def _append(self, piece: list[Line]) -> None:
        data = b"".join(text for _, text in piece)
        done = 0
        try:
            while done < len(data):  # the system may write only a part
                done += os.write(self._fd, data[done:] if done else data)
        except BaseException:
            self._remember(piece, done)
            raise
        finally:
            self._size += done
        self._begun = piece[-1][0]  # a later piece of these records may fail

    def _remember(self, piece: list[Line], done: int) -> None:
        """Store the progress of a failed write: the last seq it wrote anything of, and the rest of its line."""
        for seq, text in piece:
            if done <= 0:
                return
            self._begun = seq
            self._rest = text[done:]
            done -= len(text)

    def _rotate(self) -> None:
        """Continue in a new segment. If it cannot be created, the sink does not change."""
        if self._fd >= 0:
            os.fsync(self._fd)
        path = self._dir / segment_name(self._rank, self._number + 1)
        fd = os.open(path, APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            sync_directory(self._dir)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        old, self._fd = self._fd, fd
        self._number, self._size = self._number + 1, 0
        if old >= 0:
            os.close(old)


def rewind(run_dir: Path, rank: int, seq: int) -> int:
    """Remove this rank's entries from `seq` on and return their number. The caller must own the run.

    A resumed run writes them again. Torn ends and unreadable lines after the last remaining entry are removed too; a
    damaged line before it stays, as the cause of a gap. The run continues in a new segment, so readers that follow it
    are not disturbed: no segment that was read grows again. Each segment is replaced atomically or removed, and the
    result depends on the entries alone, so the call can be repeated after a kill.
    """
    folder = Path(run_dir) / EVENTS
    existing = segments(folder).get(rank, [])
    removed = 0
    is_end = True
    is_ready = False
    try:
        remove_abandoned_drafts(folder, f"rank{rank}-")
        for number, path in reversed(existing):
            content = read_regular(path, MOST_REWIND_BYTES)
            if not content and number == existing[-1][0]:
                is_ready = True
                continue
            remaining, count = _before(content, rank, seq, is_end)
            removed, is_end = removed + count, is_end and not remaining
            if remaining and remaining == content:
                continue
            if not is_ready:
                create_empty(folder / segment_name(rank, existing[-1][0] + 1))
                sync_directory(folder)
                is_ready = True
            if remaining:
                write_atomically(path, remaining)
            else:
                path.unlink()
                sync_directory(folder)
    except OSError as error:
        raise RunError(
            f"cannot rewind the journal in {folder}: {error.strerror or error}. "
            "No earlier event is lost. Make the directory writable, then resume again"
        ) from error
    return removed


def _before(content: bytes, rank: int, seq: int, is_end: bool) -> tuple[bytes, int]:
    """Return what remains of a segment and the number of removed entries. The journal's end must be an entry."""
    lines = content.split(b"\n")
    entries = [decoded_entry(line, rank) for line in lines]
    stays = [entry.seq < seq if entry else i < len(lines) - 1 for i, entry in enumerate(entries)]
    if is_end:
        last = max((i for i, entry in enumerate(entries) if entry and stays[i]), default=-1)
        stays[last + 1 :] = [False] * (len(lines) - last - 1)
    removed = sum(entry is not None and entry.seq >= seq for entry in entries)
    return b"".join(line + b"\n" for line, stay in zip(lines, stays, strict=True) if stay), removed


def _ends_whole(path: Path) -> bool:
    """Return whether a segment is empty or ends with a complete line of at most MOST_LINE_BYTES."""
    with open_regular(path) as file:
        end = file.seek(0, os.SEEK_END)
        tail, step = b"", 1 << 16
        while len(tail) < min(end, MOST_LINE_BYTES) and tail.count(b"\n") < 2:
            file.seek(max(0, end - step))
            tail, step = file.read(step), 2 * step
    if not tail:
        return True
    if not tail.endswith(b"\n"):
        return False
    try:
        msgspec.json.decode(tail[:-1].rsplit(b"\n", 1)[-1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
