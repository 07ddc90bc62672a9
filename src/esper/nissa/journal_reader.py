"""Journal reader: the events of a run, running or ended, tolerant of damaged files.

Unreadable lines are skipped and counted, never raised. Unknown kinds and fields are returned unchanged.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from esper.leyline.atomic_io import must_be_real_directory, open_regular
from esper.leyline.errors import RunError
from esper.leyline.events import KINDS, Event, unspelled
from esper.nissa.record import is_whole

EVENTS = "events"
CHUNK_BYTES = 1 << 17  # fits the cache: larger chunks are slower to read
TAIL_BYTES = 1 << 16
MOST_LINE_BYTES = 32 << 20
"""Maximum length of a line. A longer one is skipped as damage and never in memory as a whole."""
MOST_RANKS = 1024
MOST_SEQ = 1 << 53
MOST_TIME_S = 1e11
"""Entries with a larger seq or time, in seconds, are damaged. A run has at most MOST_RANKS ranks."""
_SEGMENT = re.compile(r"rank(\d{1,6})-(\d{1,12})\.jsonl")
_decode = msgspec.json.Decoder().decode
_new = tuple.__new__


class Entry(NamedTuple):
    """One line of the journal: its position in the run, its kind, and the fields of that kind."""

    seq: int
    time_s: float
    rank: int
    kind: str
    data: dict[str, Any]
    replaced: int = 0
    """Number of seqs right before this one that are not lost: their gauges were replaced by newer ones."""


class Extent(NamedTuple):
    """How far the journal of one rank goes, and how many seqs below that are missing."""

    next_seq: int
    missing: int


@dataclass(slots=True)
class Damage:
    """Counts of what a reader skipped or did not find."""

    lines: int = 0
    """Complete lines that are not valid entries, and segments that are not regular files."""
    torn: int = 0
    """Segments that end within a line."""
    duplicates: int = 0
    """Lines whose seq was read before: the run was resumed, or a batch was written again."""
    seqs: dict[int, _SeqSet] = field(default_factory=dict, compare=False, repr=False)

    def gaps(self, rank: int) -> list[range]:
        """Return the missing seqs of a rank below the last that was read."""
        return [range(*gap) for gap in self.seqs[rank].gaps] if rank in self.seqs else []

    def extents(self) -> dict[int, Extent]:
        """Return rank → how far it was read."""
        return {rank: Extent(seqs.next, sum(map(len, self.gaps(rank)))) for rank, seqs in self.seqs.items()}


class Positioned(Protocol):
    """What a line is decoded to: an `Entry`, or another type with its position in the run."""

    @property
    def seq(self) -> int: ...  # noqa: D102
    @property
    def time_s(self) -> float: ...  # noqa: D102
    @property
    def replaced(self) -> int: ...  # noqa: D102


Line = TypeVar("Line", bound=Positioned)
Decode = Callable[[list[bytes], int], list[Line]]
"""Decodes lines of a rank, without the damaged ones. `decoded_entries` is the general one."""


def read(run_dir: Path, damage: Damage | None = None) -> Iterator[Entry]:
    """Yield every entry of a run: per rank ordered by seq, ranks merged by time. `damage` is counted up."""
    damage = Damage() if damage is None else damage
    folder = Path(run_dir) / EVENTS
    by_rank = segments(folder)
    ranks = [_Rank(rank, damage, decoded_entries) for rank in by_rank]
    yield from _merged(ranks, by_rank)
    damage.torn += sum(rank.is_torn for rank in ranks)


class Follower(Generic[Line]):
    """Incremental reader of a run, also while it is being written."""

    def __init__(self, run_dir: Path, decode: Decode[Line]) -> None:
        self.damage = Damage()
        self._folder = Path(run_dir) / EVENTS
        self._decode = decode
        self._ranks: dict[int, _Rank[Line]] = {}
        self._unread: Iterator[Line] | None = None  # entries that the last poll did not return

    def poll(self, most: int | None = None) -> list[Line]:
        """Return new entries merged by time, at most `most`; later polls return the rest.

        If nothing is new, it costs one directory listing and one stat of the last segment of every rank.
        """
        if self._unread is None:
            by_rank = segments(self._folder)
            for rank in by_rank:
                self._ranks.setdefault(rank, _Rank(rank, self.damage, self._decode))
            self._unread = _merged(list(self._ranks.values()), by_rank)
        entries = list(islice(self._unread, most))
        if most is None or len(entries) < most:
            self._unread = None
        return entries

    def is_replaced(self) -> bool:
        """Return whether the segment read last was removed, replaced or cut off, and no newer one follows it.

        A run that is resumed rewrites segments too, but begins a new one before: what was read remains valid.
        """
        by_rank = segments(self._folder)
        return any(rank.is_replaced(by_rank.get(rank.rank, [])) for rank in self._ranks.values())

    @property
    def torn(self) -> int:
        """Number of segments whose last line is incomplete: it is being written, or was cut off."""
        return sum(rank.is_torn for rank in self._ranks.values())


def head(run_dir: Path) -> list[Entry]:
    """Return a few entries from the beginning, ordered by time, without reading the rest."""
    by_rank = segments(Path(run_dir) / EVENTS)
    return sorted((entry for rank in by_rank for entry in _some(rank, by_rank[rank], 0)), key=_time)


def tail(run_dir: Path) -> list[Entry]:
    """Return a few entries from the end, ordered by time, without reading the rest."""
    by_rank = segments(Path(run_dir) / EVENTS)
    return sorted((entry for rank in by_rank for entry in _some(rank, by_rank[rank][::-1], TAIL_BYTES)), key=_time)


def _some(rank: int, numbered: list[tuple[int, Path]], from_end: int) -> list[Entry]:
    """Return entries of the first segment that has any, from its beginning or from `from_end` bytes before its end."""
    for _, path in numbered:
        if not is_regular(path):
            continue
        with open_regular(path) as file:
            if from_end:
                file.seek(max(0, file.seek(0, os.SEEK_END) - from_end))
            lines = file.read(TAIL_BYTES).split(b"\n")
        if entries := decoded_entries(lines, rank):
            return entries
    return []


def each_line(path: Path) -> Iterator[bytes]:
    """Yield the non-empty lines of a segment without line ends. Lines that are too long are cut."""
    with open_regular(path) as file:
        while line := file.readline(MOST_LINE_BYTES + 1):
            rest = line
            while len(rest) > MOST_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MOST_LINE_BYTES + 1)
            if line := line.rstrip(b"\n"):
                yield line


def segment_name(rank: int, number: int) -> str:
    """Return the file name of a segment."""
    return f"rank{rank}-{number:05d}.jsonl"


def segments(events_dir: Path) -> dict[int, list[tuple[int, Path]]]:
    """Return rank → its segments in order, as (number, path). Empty if the directory does not exist.

    A path may be a link or a special file, see `is_regular`. Raise RunError if the directory is a link, or has segments
    of more than MOST_RANKS ranks.
    """
    by_rank: dict[int, list[tuple[int, Path]]] = {}
    try:
        must_be_real_directory(events_dir)
        with os.scandir(events_dir) as listing:
            matches = [match for each in listing if (match := _SEGMENT.fullmatch(each.name))]
    except FileNotFoundError:
        return by_rank
    except NotADirectoryError as error:
        if not os.path.islink(events_dir):
            return by_rank
        raise RunError(f"{events_dir} cannot be read as a journal: {error.strerror}") from error
    for match in matches:
        by_rank.setdefault(int(match[1]), []).append((int(match[2]), events_dir / match[0]))
    if len(by_rank) > MOST_RANKS:
        raise RunError(f"{events_dir} has segments of {len(by_rank):,} ranks; a run has at most {MOST_RANKS:,}")
    return {rank: sorted(by_rank[rank]) for rank in sorted(by_rank)}


def is_regular(segment: Path) -> bool:
    """Return whether a segment is a regular file or was removed meanwhile. Links and special files are not read."""
    try:
        return stat.S_ISREG(os.lstat(segment).st_mode)
    except FileNotFoundError:
        return True


class _SeqSet:
    """The set of seqs that were read, stored as a watermark and the gaps below it to bound memory."""

    def __init__(self) -> None:
        self.next = 0
        self.gaps: list[tuple[int, int]] = []

    def add(self, seq: int, replaced: int = 0) -> bool:
        """Add a seq and return whether it is new. The `replaced` seqs before it are not a gap."""
        if seq >= self.next:
            if seq - replaced > self.next:
                self.gaps.append((self.next, seq - replaced))
            self.next = seq + 1
            return True
        at = bisect_right(self.gaps, seq, key=lambda gap: gap[0]) - 1
        if at < 0 or seq >= self.gaps[at][1]:
            return False
        start, stop = self.gaps[at]
        self.gaps[at : at + 1] = [gap for gap in ((start, seq), (seq + 1, stop)) if gap[0] < gap[1]]
        return True


class _Rank(Generic[Line]):
    """Reader of the segments of one rank."""

    def __init__(self, rank: int, damage: Damage, decode: Decode[Line]) -> None:
        self.rank = rank
        self.damage = damage
        self.decode = decode
        self.seqs = damage.seqs.setdefault(rank, _SeqSet())
        self.number = -1  # number of the current segment
        self.offset = 0  # position in it: everything before is read
        self.rest = 0  # bytes after `offset` that are not a complete line yet
        self.inode = 0  # of the current segment, 0 before it was read
        self.is_readable = True  # whether the current segment is a regular file
        self.is_skipping = False  # whether `offset` is inside a line that is too long
        self._leaper: Line | None = None  # the last entry, if its seq jumps ahead

    def advance(self, numbered: list[tuple[int, Path]]) -> Iterator[Line]:
        """Yield the entries added since the last call, from the segments listed in `numbered`."""
        return chain.from_iterable(self._once(self._batches(numbered)))

    def is_replaced(self, numbered: list[tuple[int, Path]]) -> bool:
        """Return whether the current segment is not the file that was read, and there is no newer one."""
        if not self.inode or any(number > self.number for number, _ in numbered):
            return False
        path = next((path for number, path in numbered if number == self.number), None)
        try:
            now = None if path is None else os.lstat(path)
        except FileNotFoundError:
            now = None
        return now is None or now.st_ino != self.inode or now.st_size < self.offset

    @property
    def is_torn(self) -> bool:
        """Whether what was read ends within a line."""
        return self.rest > 0 or self.is_skipping

    def _batches(self, numbered: list[tuple[int, Path]]) -> Iterator[list[Line]]:
        """Yield the valid entries of these segments, duplicates included, as one list per chunk of a file."""
        for number, path in numbered:
            if number < self.number:
                continue
            if number > self.number:  # the previous segment is complete: its torn line stays torn
                self.damage.torn += self.is_torn
                self.number = number
                self.offset = 0
                self.rest = 0
                self.inode = 0
                self.is_skipping = False
                self.is_readable = is_regular(path)
                self.damage.lines += not self.is_readable
            if self.is_readable:
                yield from self._segment(path)

    def _segment(self, path: Path) -> Iterator[list[Line]]:
        """Yield the entries after `offset`. No file stays open between calls: there may be a thousand ranks."""
        with contextlib.suppress(FileNotFoundError):
            now = os.lstat(path)
            self.inode = self.inode or now.st_ino
            if now.st_size <= self.offset + self.rest:
                return
        pieces: list[bytes] = []  # parts of a line whose end has not been read
        size = 0  # total length of the parts
        while chunk := _chunk(path, self.offset + size):
            first, *lines = chunk.split(b"\n")
            pieces.append(first)
            if lines:
                rest = lines.pop()
                self.offset += size + len(chunk) - len(rest)
                yield self._decoded([b"".join(pieces), *lines])
                pieces, size = [rest], len(rest)
            else:
                size += len(chunk)
            if size > MOST_LINE_BYTES:
                self.is_skipping = True
                self.offset = self.offset + size
                pieces = []
                size = 0
        line = b"".join(pieces)
        if line and not self.is_skipping and (entries := self.decode([line], self.rank)):
            self.offset += size  # only its line end is missing
            size = 0
            yield entries
        self.rest = size

    def _decoded(self, lines: list[bytes]) -> list[Line]:
        """Return the valid entries of complete lines, and count the others."""
        if self.is_skipping:  # the first one is the end of a line that is too long
            self.is_skipping = False
            self.damage.lines += 1
            lines = lines[1:]
        entries = self.decode(lines, self.rank)
        if len(entries) < len(lines):
            self.damage.lines += sum(map(bool, lines)) - len(entries)
        return entries

    def _once(self, batches: Iterable[list[Line]]) -> Iterator[Iterable[Line]]:
        """Yield the first entry of each seq, as one iterable per batch.

        If a line's seq jumps ahead and the next line continues below it, that seq is damaged. The line is dropped
        before it can displace the line that really has this seq.
        """
        for batch in batches:
            start, stop = self.seqs.next, self.seqs.next + len(batch)
            if self._leaper is None and [entry.seq for entry in batch] == list(range(start, stop)):
                self.seqs.next = stop  # the usual case: nothing is missing or repeated
                yield batch
            else:
                yield self._sorted_out(batch)
        if self._leaper is not None:
            self.seqs.add(self._leaper.seq, self._leaper.replaced)
            yield [self._leaper]
            self._leaper = None

    def _sorted_out(self, batch: list[Line]) -> Iterator[Line]:
        seqs, damage = self.seqs, self.damage
        for entry in batch:
            seq = entry.seq
            if leaper := self._leaper:
                if seq > leaper.seq:
                    seqs.add(leaper.seq, leaper.replaced)
                    yield leaper
                elif seq == leaper.seq:
                    damage.duplicates += 1
                else:
                    damage.lines += 1
                self._leaper = None
            if seq == seqs.next:
                seqs.next = seq + 1
                yield entry
            elif seq > seqs.next:
                self._leaper = entry
            elif seqs.add(seq):
                yield entry
            else:
                damage.duplicates += 1


def _chunk(path: Path, at: int) -> bytes:
    try:
        with open_regular(path) as file:
            file.seek(at)
            return file.read(CHUNK_BYTES)
    except FileNotFoundError:  # removed while reading
        return b""


def _time(entry: Positioned) -> float:
    return entry.time_s


def _merged(ranks: list[_Rank[Line]], by_rank: dict[int, list[tuple[int, Path]]]) -> Iterator[Line]:
    streams = [rank.advance(by_rank.get(rank.rank, [])) for rank in ranks]
    return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=_time)


def decoded_entries(lines: list[bytes], rank: int) -> list[Entry]:
    """Decode lines as entries of this rank, without the damaged ones."""
    return [entry for line in lines if (entry := decoded_entry(line, rank))]


def decoded_entry(line: bytes, rank: int) -> Entry | None:
    """Decode a line as an entry of this rank. Return None if it is invalid or its checksum does not match."""
    if not is_whole(line):
        return None
    try:
        data = _decode(line)
        seq = data.pop("seq")
        time_s = data.pop("time_s")
        stated = data.pop("rank")
        kind = data.pop("kind")
        del data["crc"]
        replaced = data.pop("replaced", 0)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return None
    if type(time_s) is int:
        time_s = float(time_s)
    if type(seq) is not int or not 0 <= seq < MOST_SEQ or stated != rank or type(kind) is not str:
        return None
    if type(time_s) is not float or not -MOST_TIME_S < time_s < MOST_TIME_S:
        return None
    if type(replaced) is not int or not 0 <= replaced <= seq:
        return None
    if b'NaN"' in line or b'Infinity"' in line:
        texts = _TEXTS.get(kind, ())
        data = {name: value if name in texts else unspelled(value) for name, value in data.items()}
    return _new(Entry, (seq, time_s, rank, kind, data, replaced))


def _texts(kind: type[Event]) -> set[str]:
    types = {field.name: str(field.type) for field in msgspec.structs.fields(kind)}
    return {name for name, of in types.items() if "str" in of and "float" not in of}


_TEXTS = {tag: _texts(kind) for tag, kind in KINDS.items()}
"""Text fields per kind, so that a text "NaN" is not converted to a number."""
