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

from esper.leyline.atomic_io import make_real_directory, open_own, open_regular, sync_directory
from esper.leyline.errors import ConfigError
from esper.nissa.journal import MOST_LINE_BYTES, segment_name, segments
from esper.nissa.record import Record, line

SEGMENT_BYTES = 32 << 20
"""Maximum size of a segment in bytes: small enough to copy alone, large enough that a day's run has few."""
Line = tuple[int, bytes]  # seq, text
APPEND = os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0)


class JsonlSink:
    """Append the records of one rank. `write` passes lines to the system at once; `flush` syncs them to disk.

    A new segment starts before a line that would exceed `segment_bytes`, ≥ 1.
    """

    def __init__(self, events_dir: Path, *, rank: int = 0, segment_bytes: int = SEGMENT_BYTES) -> None:
        if segment_bytes < 1:
            raise ConfigError(f"a journal's segment needs at least 1 byte, got segment_bytes={segment_bytes}")
        self._dir, self._rank, self._limit = Path(events_dir), rank, segment_bytes
        make_real_directory(self._dir)
        self._fd = -1
        self._size = 0
        self._rest = b""  # rest of the line within which the last write failed
        self._begun = -1  # the last seq of which a failed write has written anything
        found = segments(self._dir).get(rank, [])
        self._number = found[-1][0] if found else -1
        if found and _ends_whole(found[-1][1]):
            self._fd = open_own(found[-1][1], APPEND)
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
            self._begun, self._rest = seq, text[done:]
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
