"""One run, recorded: a run directory, a hub that writes its journal, and an end that is always told.

with esper.record("my-model") as run:
    grower = esper.Grower(body, optimizer, telemetry=run.hub)
    …
# runs/20261115-230455-my-model-3f2a: `esper watch`, `esper report` and `esper sql` read it, then and later
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from esper.leyline.events import Event, Level, RunFinished
from esper.leyline.events import level as level_by_name
from esper.nissa.hub import NissaHub
from esper.nissa.run import RunDirectory, ending, manifest_base
from esper.nissa.sinks import Sink
from esper.nissa.sinks.jsonl import JsonlSink

RUNS = Path("runs")
"""Where runs go that were not given a place."""


@dataclass(slots=True)
class Run:
    """A run that is being recorded."""

    directory: RunDirectory
    hub: NissaHub
    env_steps: int = 0
    """Steps of all environments so far; whoever runs the loop counts them."""

    @property
    def path(self) -> Path:
        return self.directory.path

    def say(self, event: Event) -> None:
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
) -> Iterator[Run]:
    """Record a run: below `root` under a name of its own, or at `out`. Nothing that exists is overwritten.

    level     off, minimal, normal or debug: what is recorded, never what is learnt
    manifest  what else the manifest shall say: config, seed, hashes of data
    sinks     further places for events, besides the journal
    """
    level = level_by_name(level) if isinstance(level, str) else level
    where, name = (Path(root), None) if out is None else (Path(out).parent, Path(out).name)
    said = manifest_base() | {"telemetry": level.name.lower()} | (manifest or {})
    directory = RunDirectory.create(where, task, name=name, manifest=said)
    started, status, error = time.monotonic(), "finished", None
    hub = NissaHub([JsonlSink(directory.events_dir), *sinks], level=level)
    run = Run(directory, hub)
    try:
        with terminable():
            yield run
    except BaseException as e:
        status, error = ending(e)
        raise
    finally:
        wall_s = time.monotonic() - started
        hub.emit(RunFinished(status=status, error=error, wall_s=wall_s, env_steps=run.env_steps))
        hub.close()
        directory.finish(status, error, env_steps=run.env_steps)


@contextmanager
def terminable() -> Iterator[None]:
    """Within: SIGTERM unwinds the program as Ctrl-C does, so that a run can say how it ended."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
