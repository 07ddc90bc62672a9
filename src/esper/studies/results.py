"""Results of a study on disk: one JSON line per finished job, and the file that `--save` writes.

Files of several machines can be concatenated: the last line of a job counts. A line that cannot be read, such as an
incomplete one after a power cut, is ignored: its job runs again. A copy of the results at `studies/NAME.jsonl` keeps
the finished jobs of an unfinished study in the repository.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from esper.leyline.atomic_io import locked, open_own, read_regular
from esper.leyline.errors import ConfigError
from esper.studies.contract import Point, Study

SAVED = Path("studies")
"""Directory of saved and unfinished studies, in the repository root."""
TUNING = SAVED / "tuning"
"""Directory of the results on tuning worlds that chose the settings of studies."""
RESULTS = "results.jsonl"
LARGEST_FILE = 1 << 30
"""Size limit of a results file in bytes."""
Line = TypeVar("Line", bound=msgspec.Struct)


class Job(NamedTuple):
    """One arm, by name, to train on one task in one world."""

    task: str
    arm: str
    world: int


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """A finished job."""

    task: str
    arm: str
    world: int
    settings_hash: str
    versions: dict[str, str]  # of code and libraries, and the processor
    seconds: float
    points: tuple[Point, ...]


class SavedStudy(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `studies/NAME.json` and `studies/tuning/NAME.json`."""

    command: str
    study: Study
    versions: list[dict[str, str]]  # the different ones of the results
    summary: Any  # the tables, for people; `esper study --docs` computes them from `records`
    records: list[JobResult]


def read_saved(path: Path) -> SavedStudy:
    """Return a saved study. Raise ConfigError if the file is something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedStudy)
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{path} is not a saved study: {error}") from error


def append_result(directory: Path, result: Any) -> None:
    """Append one line to the results file durably. Several processes may append to one file."""
    with locked(directory / f"{RESULTS}.lock", wait_s=60.0):
        fd = open_own(directory / RESULTS, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            separator = b"" if file.read(1) in (b"", b"\n") else b"\n"  # after an incomplete line
            file.write(separator + msgspec.json.encode(result) + b"\n")
            os.fsync(fd)


def read_results(directory: Path, name: str = RESULTS) -> list[JobResult]:
    """Return all results of a file in order; none if there is no file."""
    return read_lines(directory / name, JobResult)


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """Return the lines of a file that are of this kind, in order; none if there is no file."""
    lines = []
    for line in read_regular(path, LARGEST_FILE).splitlines() if path.exists() else ():
        with contextlib.suppress(msgspec.DecodeError):
            lines.append(msgspec.json.decode(line, type=kind))
    return lines


def study_results(study: Study, directory: Path, *, with_saved: bool) -> list[JobResult]:
    """Return all results of a study in order: those kept in the repository, then those of its results file.

    `with_saved` includes those of the saved study, which a repetition of the study must not use.
    """
    paths = [folder / f"{study.name}.json" for folder in (SAVED, TUNING)] if with_saved else []
    saved = [record for path in paths if path.exists() for record in read_saved(path).records]
    return [*saved, *read_results(SAVED, unfinished(study).name), *read_results(directory)]


def unfinished(study: Study) -> Path:
    """Return the path at which the repository keeps finished jobs of an unfinished study."""
    return SAVED / f"{study.name}.jsonl"


def current_results(study: Study, results: Iterable[JobResult], jobs: Iterable[Job]) -> dict[Job, JobResult]:
    """Return the last record of each of these jobs that was made with the present settings of its arm."""
    latest = {(r.task, r.arm, r.world, r.settings_hash): r for r in results}
    by_job = {job: latest.get((*job, study.settings_hash(study.arm(job.arm)))) for job in jobs}
    return {job: record for job, record in by_job.items() if record is not None}


def points_of(results: Iterable[JobResult]) -> dict[tuple[str, str, int], tuple[Point, ...]]:
    """Return the points of results by task, arm and world."""
    return {(result.task, result.arm, result.world): result.points for result in results}
