"""The journal's writer: one JSON line per event, in segments that are only ever appended to.

Whatever interrupts it (a kill, a full disk, a power cut) tears at most one line: the torn line stays where it is, the
next one starts afresh, and the reader skips what it cannot read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from esper.leyline.errors import ConfigError
from esper.leyline.files import make_real_directory, open_own, open_regular, sync_directory
from esper.nissa.journal import MOST_LINE_BYTES, segment_name, segments
from esper.nissa.record import Record, line

SEGMENT_BYTES = 32 << 20
"""Small enough to load or ship one alone, large enough that a day's run has few."""
APPEND = os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0)


class JsonlSink:
    """Appends the records of one rank. `write` hands lines to the system at once; `flush` means on disk."""

    def __init__(self, events_dir: Path, *, rank: int = 0, segment_bytes: int = SEGMENT_BYTES) -> None:
        if segment_bytes < 1:
            raise ConfigError(f"a journal's segment needs at least 1 byte, got segment_bytes={segment_bytes}")
        self._dir, self._rank, self._limit = Path(events_dir), rank, segment_bytes
        make_real_directory(self._dir)
        self._fd = -1
        self._size = 0
        self._mid_line = False  # the last write stopped within a line
        found = segments(self._dir).get(rank, [])
        self._number = found[-1][0] if found else -1
        if found and _ends_whole(found[-1][1]):
            self._fd = open_own(found[-1][1], APPEND)
            self._size = os.fstat(self._fd).st_size
        else:
            self._rotate()

    def write(self, records: Sequence[Record]) -> None:
        """Append them all. One that cannot be encoded raises before anything is written."""
        for piece in self._pieces([line(record) for record in records]):
            self._append(piece)

    def flush(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _pieces(self, lines: list[bytes]) -> Iterator[bytes]:
        """The lines, joined as far as they fit into a segment; a new segment is opened between two pieces."""
        piece: list[bytes] = []
        size = self._size
        for each in lines:
            if size and size + len(each) > self._limit:
                if piece:
                    yield b"".join(piece)
                self._rotate()
                piece, size = [], 0
            piece.append(each)
            size += len(each)
        if piece:
            yield b"".join(piece)

    def _append(self, data: bytes) -> None:
        if self._mid_line:
            data = b"\n" + data
        done = 0
        try:
            while done < len(data):  # the system may take a part
                done += os.write(self._fd, data[done:] if done else data)
        finally:
            if done:
                self._size += done
                self._mid_line = data[done - 1] != ord("\n")

    def _rotate(self) -> None:
        """On to a new segment. Where that cannot be made, the sink stays as it was."""
        path = self._dir / segment_name(self._rank, self._number + 1)
        fd = os.open(path, APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        old, self._fd = self._fd, fd
        self._number, self._size, self._mid_line = self._number + 1, 0, False
        try:
            sync_directory(self._dir)
            if old >= 0:
                os.fsync(old)
        finally:
            if old >= 0:
                os.close(old)


def _ends_whole(path: Path) -> bool:
    """Whether a segment is empty or its last line is a whole one. A line that is too long is none."""
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
