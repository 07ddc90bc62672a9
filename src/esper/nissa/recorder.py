"""Recording of a run: its directory, a hub that writes its journal, and a manifest that says how it ended.

with esper.record("my-model") as run:
    grower = esper.Grower(body, optimizer, telemetry=run.hub)
    …
# runs/20261115-230455-my-model-3f2a: `esper watch`, `esper report` and `esper sql` read it, during the run and later
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esper.leyline.errors import RunError
from esper.leyline.events import Event, Level, RunFinished, Step
from esper.leyline.events import level as level_by_name
from esper.leyline.text import printable
from esper.nissa.hub import NissaHub
from esper.nissa.journal_reader import EVENTS, segments
from esper.nissa.journal_writer import JsonlSink, rewind
from esper.nissa.missed_events import JOURNAL, missing_events
from esper.nissa.record import Record
from esper.nissa.run import Lock, RunDirectory, earlier_seconds, ending, manifest_base
from esper.nissa.signals import stoppable, terminable
from esper.nissa.sinks import TENSORBOARD, Sink, must_be_available, tracker_sinks

END_S = 10.0
"""Seconds that the end of a run waits for a full or slow disk."""
RUNS = Path("runs")
"""The default parent of run directories."""


@dataclass(slots=True)
class Run:
    """A run that is being recorded."""

    directory: RunDirectory
    hub: NissaHub
    env_steps: int = 0
    """Steps of all environments; if the caller does not set it, the number of recorded steps."""
    emitted: dict[int, int] = field(default_factory=dict)
    """Rank → number of events that it emitted in the whole run; rank 0 is set when the run ends."""
    has_gaps: bool = False
    """Whether events of earlier sessions are missing in the journal."""
    losses: list[str] = field(default_factory=list)
    """Descriptions of what could not be written; set when the run ends."""

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    def emit(self, event: Event) -> None:
        """Emit an event."""
        self.hub.emit(event)


@contextmanager
def record(
    task: str,
    *,
    out: Path | str | None = None,
    root: Path | str = RUNS,
    level: Level | str = Level.NORMAL,
    manifest: dict[str, Any] | None = None,
    sinks: Sequence[Sink] = (),
    tensorboard: bool = False,
    track: Sequence[str] = (),
) -> Iterator[Run]:
    """Record a run in a run directory, as a context. Existing runs are not overwritten.

    Args:
        task: Name of the task, for the manifest and the name of the directory.
        out: Run directory; None is a new one below `root`.
        root: Directory of runs.
        level: Which events are recorded: off, minimal, normal or debug. It does not affect training.
        manifest: Further entries of the manifest, such as config, random seed and hashes of data.
        sinks: Further receivers of events, besides the journal.
        tensorboard: Whether to write scalars for TensorBoard into the run directory.
        track: Trackers of the run: tensorboard, wandb, mlflow, trackio.

    Yields:
        The run. Its `hub` is the `telemetry` of a grower.

    Raises:
        RunError: The directory cannot be made, or holds a run.
        ConfigError: A tracker is not installed.

    Example:
        >>> with esper.record("mine", out="runs/mine") as run:
        ...     sgd = torch.optim.SGD(body.parameters(), lr=0.1)
        ...     grower = esper.Grower(body, sgd, telemetry=run.hub)
        ...     report = grower.step([(x, y)])
    """
    track = [*track, *([TENSORBOARD] if tensorboard else [])]
    must_be_available(track)
    level = level_by_name(level) if isinstance(level, str) else level
    where, name = (Path(root), None) if out is None else (Path(out).parent, Path(out).name)
    fields = manifest_base() | {"telemetry": level.name.lower()} | (manifest or {})
    try:
        directory = RunDirectory.create(where, task, name=name, manifest=fields)
    except (OSError, UnicodeError) as e:
        raise RunError(f"cannot make a run directory in {where}: {e}. Choose another directory") from e
    with _recorded(directory, 0, level, sinks, track) as run:
        yield run


@contextmanager
def record_on(
    path: Path | str,
    next_seq: Sequence[int],
    *,
    level: Level | str = Level.NORMAL,
    manifest: dict[str, Any] | None = None,
    sinks: Sequence[Sink] = (),
    track: Sequence[str] = (),
    lock: Lock | None = None,
) -> Iterator[Run]:
    """Resume the recording of a run that ended early, at event `next_seq[rank]` of each rank.

    Later events are removed from the journal first, because they will be emitted again. `next_seq` comes from a
    checkpoint. Take the `lock` of the directory before choosing one, or another process may resume the run meanwhile.
    """
    level = level_by_name(level) if isinstance(level, str) else level
    must_be_available(track)
    directory = RunDirectory.resume(Path(path), manifest or {}, lock)
    try:
        for rank in {*range(len(next_seq)), *segments(directory.events_dir)}:
            rewind(directory.path, rank, next_seq[rank] if rank < len(next_seq) else 0)
        missing = missing_events(directory.path, dict(enumerate(next_seq)))
        if missing:
            count = sum(len(gap) for gaps in missing.values() for gap in gaps)
            warnings.warn(
                f"{count} of the {sum(next_seq)} events before this point are not in the journal of {path}, which was "
                "damaged. The run continues; views of it lack these events",
                stacklevel=3,
            )
    except BaseException as e:
        directory.fail(e)
        raise
    with _recorded(directory, next_seq[0], level, sinks, track) as run:
        run.has_gaps = bool(missing)
        yield run


@contextmanager
def record_beside(path: Path | str, rank: int, first_seq: int, level: Level | str = Level.NORMAL) -> Iterator[NissaHub]:
    """Yield a hub that writes the journal of one further rank of a run that another process owns."""
    level = level_by_name(level) if isinstance(level, str) else level
    sink = JsonlSink(Path(path) / EVENTS, rank=rank)
    with terminable(), NissaHub([sink], level=level, rank=rank, first_seq=first_seq) as hub:
        yield hub


@contextmanager
def _recorded(
    directory: RunDirectory, first_seq: int, level: Level, sinks: Sequence[Sink], track: Sequence[str]
) -> Iterator[Run]:
    started = time.monotonic()
    status = "finished"
    error = None
    counter = _Counter()
    try:
        more = tracker_sinks(track, directory.path, directory.manifest)
        hub = NissaHub([JsonlSink(directory.events_dir), counter, *more, *sinks], level=level, first_seq=first_seq)
    except BaseException as e:
        directory.fail(e)
        raise
    run = Run(directory, hub)
    try:
        with terminable():
            yield run
    except BaseException as e:
        status, error = ending(e)
        raise
    finally:
        with stoppable("closing the run; a second signal exits immediately") as stop:
            was_stopped = status == "interrupted"
            stop.signal_number = int(was_stopped)
            hub.stop_waiting(END_S)
            wall_s = earlier_seconds(directory.manifest) + time.monotonic() - started
            hub.flush(END_S)
            run.env_steps = run.env_steps or counter.steps
            hub.emit(RunFinished(status=status, error=error, wall_s=wall_s, env_steps=run.env_steps))
            hub.close(END_S)
            _finish(run, status, error)
        if error is None and not was_stopped:
            stop()


def _finish(run: Run, status: str, error: str | None) -> None:
    """Write to the manifest how the run ended and how many events each rank emitted. Print what is lost."""
    run.emitted[0] = run.hub.next_seq
    recorded: dict[str, dict[str, Any]] = {str(rank): {"events": run.emitted[rank]} for rank in sorted(run.emitted)}
    try:
        missing = missing_events(run.path, run.emitted) if run.hub.has_lost or run.has_gaps else {}
        for rank, gaps in missing.items():
            lost = {"events": sum(map(len, gaps)), "first_seq": gaps[0][0], "last_seq": gaps[-1][-1]}
            recorded[str(rank)]["lost"] = lost
            if rank == 0 and run.hub.has_lost:
                run.losses.append(
                    f"{lost['events']} of {run.emitted[0]} events could not be written, "
                    f"the first is number {lost['first_seq']}"
                )
        run.directory.finish(status, error, env_steps=run.env_steps, **{JOURNAL: recorded})
    except OSError as e:  # a full disk or a removed directory; it must not hide the error that ended the run
        run.losses.append(f"the manifest could not be written ({e}), so the run will read as killed")
    for text in run.losses:
        message = printable(f"the record of this run is incomplete: {text}. Check the disk of {run.path}")
        print(f"esper: {message}", file=sys.stderr)


class _Counter:
    """A sink that counts steps. It has `flush`, so that flushing the hub waits for it."""

    def __init__(self) -> None:
        self.steps = 0

    def write(self, records: Sequence[Record]) -> None:
        self.steps += sum(type(record.event) is Step for record in records)

    def flush(self) -> None: ...
    def close(self) -> None: ...
