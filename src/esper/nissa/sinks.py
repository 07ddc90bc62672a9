"""Sinks: the destinations of records. Any object with the two methods of `Sink` is one.

Experiment trackers get scalars, by one mapping for all of them (`Scalars`): TensorBoard in files that are written
without torch or TensorFlow, Weights & Biases, MLflow and Trackio by the classes of `accelerate.tracking`. A tracker
runs in one thread of its own from its start to its end: MLflow keeps its run per thread.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from esper.leyline.errors import EsperError, unknown_name
from esper.leyline.events import Episode, Event, Gradient, Number, RunStarted, SeedWorth, Step, Update
from esper.leyline.text import flat_settings, not_installed
from esper.nissa.record import Record


class Sink(Protocol):
    """Receives the records of one run in order, always from the same dedicated thread.

    A sink that also has `flush()` is durable: the hub's flush calls it and waits for it.
    """

    def write(self, records: Sequence[Record]) -> None:
        """Write the records in order. On an error the same records are given again."""
        ...

    def close(self) -> None:
        """Release what the sink holds. Called once, after the last record."""
        ...


STEP_FIELDS = ("quality", "committed_quality", "val_loss", "train_loss", "reward", "utility", "value", "params",
               "train_macs")  # fmt: skip
WORTH_FIELDS = ("contribution", "solo", "shapley", "interaction", "prospect")
EPISODE_FIELDS = (
    "quality",
    "test_quality",
    "baseline_quality",
    "utility",
    "episode_return",
    "params",
    "fossilized",
    "pruned",
)
HEAD_FIELDS = ("entropy", "learnable")  # fields of an update with one value per head


class Scalars:
    """Convert events to scalars: a step, and values by tag."""

    def __init__(self) -> None:
        self._slots: tuple[str, ...] = ()
        self._progress: dict[
            int, tuple[int, int, int]
        ] = {}  # env → episode, its furthest step, steps of earlier episodes
        self._updates = self._episodes = 0

    def of(self, event: Event) -> tuple[int, dict[str, Number]]:
        """Return the step of an event and its values by tag; no values for events without scalars."""
        match event:
            case RunStarted():
                self._slots = event.slots
            case Step():
                values = {name: getattr(event, name) for name in STEP_FIELDS}
                seeds = zip(event.alphas, event.blueprints, strict=False)
                values |= {f"alpha/{self._slot(i)}": alpha for i, (alpha, blueprint) in enumerate(seeds) if blueprint}
                return self._of_env(event, values)
            case SeedWorth():
                return self._of_env(event, {f"{name}/{event.slot}": getattr(event, name) for name in WORTH_FIELDS})
            case Gradient():
                gauges = ("norm", "ratio", "health")
                return self._of_env(event, {f"gradient_{name}/{event.slot}": getattr(event, name) for name in gauges})
            case Update():
                self._updates += 1
                values = {name: getattr(event, name) for name in Update.__struct_fields__ if name not in HEAD_FIELDS}
                for name in HEAD_FIELDS:
                    values |= {f"{name}/{head}": value for head, value in getattr(event, name).items()}
                return self._updates, {f"update/{name}": value for name, value in values.items()}
            case Episode():
                self._episodes += 1
                return self._episodes, {f"episode/{name}": getattr(event, name) for name in EPISODE_FIELDS}
        return 0, {}

    def _of_env(self, event: Step | SeedWorth | Gradient, values: dict[str, Number]) -> tuple[int, dict[str, Number]]:
        step = self._axis(event.env, event.episode, event.step)
        return step, {f"env{event.env}/{name}": value for name, value in values.items()}

    def _slot(self, index: int) -> str:
        return self._slots[index] if index < len(self._slots) else str(index)

    def _axis(self, env: int, episode: int, step: int) -> int:
        """Return the environment's steps over all its episodes. Late events of earlier episodes do not reduce it."""
        now, furthest, before = self._progress.get(env, (episode, 0, 0))
        if episode > now:
            now = episode
            before += furthest
            furthest = 0
        furthest = max(furthest, step) if episode == now else furthest
        self._progress[env] = now, furthest, before
        return before + furthest


class TensorBoardSink:
    """Write one event file in `directory`, passed to the system with every batch."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event as TbEvent  # type: ignore[import, unused-ignore]
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import, unused-ignore]
            from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import, unused-ignore]
        except ImportError as error:
            raise EsperError(
                f"the TensorBoard sink needs the package tensorboard ({error}). "
                "Install it with: pip install 'esper-lite[tensorboard]'"
            ) from error
        self._event = TbEvent
        self._summary = Summary
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}.esper"  # the reader looks for tfevents
        self._file = path.open("xb")
        self._writer = RecordWriter(self._file)
        self._scalars = Scalars()
        self._write(TbEvent(wall_time=time.time(), file_version="brain.Event:2"))
        self._file.flush()

    def write(self, records: Sequence[Record]) -> None:
        """Write the scalars of these records."""
        for record in records:
            step, scalars = self._scalars.of(record.event)
            values = [
                self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items() if value is not None
            ]
            if values:
                self._write(self._event(wall_time=record.time_s, step=step, summary=self._summary(value=values)))
        self._file.flush()

    def close(self) -> None:
        """Close the event file. Idempotent."""
        if not self._file.closed:
            self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


TENSORBOARD = "tensorboard"
TRACKERS = {
    TENSORBOARD: ("tensorboard",),
    "wandb": ("accelerate", "wandb"),
    "mlflow": ("accelerate", "mlflow"),
    "trackio": ("accelerate", "trackio"),
}
"""Name of a tracker → the packages that it needs."""
PROJECT = "esper"
"""Name of the project or experiment in a tracker."""
MOST_LAG_S = 10.0
"""Age in seconds from which numbers of single environments are not sent to a slow tracker, so that training need not
wait for it. Episodes and updates are always sent."""
WAY_OUT = {
    "wandb": "Log in with `wandb login`, or set WANDB_MODE=offline",
    "mlflow": "Check MLFLOW_TRACKING_URI",
    "trackio": "Check the settings of Trackio",
}
_UNUSUAL = re.compile(r"[^\w\-./ ]", re.ASCII)  # MLflow allows only these characters in names


def must_be_available(names: Iterable[str]) -> None:
    """Raise unless all these trackers are known and their packages are installed."""
    for name in names:
        if name not in TRACKERS:
            raise unknown_name("tracker", name, TRACKERS)
        missing = [package for package in TRACKERS[name] if find_spec(package) is None]
        if missing:
            what = f"'esper-lite[trackers]' {name}" if "accelerate" in TRACKERS[name] else f"'esper-lite[{name}]'"
            raise EsperError(f"the tracker {name} needs {not_installed(missing)} with: pip install {what}")


def tracker_sink(
    name: str, run: Path, manifest: Mapping[str, Any], *, out: Path | None = None, most_lag_s: float | None = MOST_LAG_S
) -> Sink:
    """Return a started sink for this tracker. TensorBoard files go to `out`, by default RUN/tensorboard."""
    if name == TENSORBOARD:
        return TensorBoardSink(out or run / TENSORBOARD)
    return TrackerSink(name, run, manifest, most_lag_s)


def tracker_sinks(names: Iterable[str], run: Path, manifest: Mapping[str, Any]) -> list[Sink]:
    """Return started sinks for these trackers."""
    names = list(dict.fromkeys(names))
    must_be_available(names)
    return [tracker_sink(name, run, manifest) for name in names]


class TrackerSink:
    """Send the scalars of a run to one tracker of `accelerate.tracking`.

    run         the run directory; its name becomes the name of the tracker's run
    manifest    its settings become the configuration in the tracker
    most_lag_s  see `MOST_LAG_S`; None sends everything, however long it takes
    """

    def __init__(
        self, name: str, run: Path, manifest: Mapping[str, Any], most_lag_s: float | None = MOST_LAG_S
    ) -> None:
        self.name = name
        self._run = run
        self._most_lag_s = most_lag_s
        self.unsent = 0
        """Events that were not sent because the tracker was too slow."""
        self._scalars = Scalars()
        self._last_seq: dict[int, int] = {}  # rank → its last event that was converted
        self._waiting: deque[tuple[dict[str, float], int, float]] = deque()  # values, step, time
        self._axes: set[str] = set()
        self._thread = CallThread(f"tracker-{name}")
        facts = {key: manifest.get(key) for key in ("task", "controller", "seed")}
        config = manifest.get("config")
        settings = flat_settings(facts | (config if isinstance(config, dict) else {}))
        try:
            self._tracker = self._thread.call(lambda: _started(name, run, settings))
        except Exception as error:
            self._thread.end()
            raise EsperError(f"the tracker {name} could not be started: {_sentence(error)} {WAY_OUT[name]}") from error

    def write(self, records: Sequence[Record]) -> None:
        """Send the scalars of these records. Records that were sent before are skipped."""
        self._thread.call(lambda: self._write(records))

    def _write(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.seq > self._last_seq.get(record.rank, -1):
                self._last_seq[record.rank] = record.seq
                self._convert(record)
        while self._waiting:
            self._send(*self._waiting[0])
            self._waiting.popleft()  # after it was sent: on an error it is sent again

    def _convert(self, record: Record) -> None:
        """Put the scalars of a record into the queue, unless the tracker is too far behind."""
        step, scalars = self._scalars.of(record.event)
        values = {_UNUSUAL.sub("_", tag): float(value) for tag, value in scalars.items() if value is not None}
        is_late = self._most_lag_s is not None and time.time() - record.time_s > self._most_lag_s
        if is_late and isinstance(record.event, (Step, SeedWorth, Gradient)):
            self.unsent += 1
        elif values:
            self._waiting.append((values, step, record.time_s))

    def _send(self, values: dict[str, float], step: int, time_s: float) -> None:
        if self.name == "mlflow":
            self._tracker.log(values, step=step, timestamp=int(1000 * time_s))
            return
        # W&B and Trackio have one step axis per run. Each namespace gets its own as a further value.
        namespace = next(iter(values)).split("/")[0]
        axis = f"{namespace}/step"
        if self.name == "wandb" and namespace not in self._axes:
            self._axes.add(namespace)
            self._tracker.tracker.define_metric(f"{namespace}/*", step_metric=axis)
        self._tracker.log(values | {axis: step})

    def close(self) -> None:
        """End the tracker's run. Warn if it was too slow for all numbers."""
        self._thread.call(self._tracker.finish)
        self._thread.end()
        if self.unsent:
            warnings.warn(
                f"{self.unsent} events were not sent to {self.name}, which was slower than the run. Send all of them "
                f"with: esper export-log {self._run} --to {self.name}",
                stacklevel=2,
            )


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith(".") else f"{text}."


def _started(name: str, run: Path, settings: dict[str, str]) -> Any:
    """Return a started tracker with its configuration."""
    from accelerate import tracking

    # The logger of accelerate would create a PartialState, which joins process groups and sets torch's threads.
    tracking.logger = logging.getLogger(tracking.__name__)
    run_name = run.absolute().name
    arguments: dict[str, Any] = {
        "wandb": {"run_name": PROJECT, "name": run_name, "dir": str(run)},
        "mlflow": {"experiment_name": PROJECT, "run_name": run_name},
        "trackio": {"run_name": PROJECT, "name": run_name},
    }[name]
    tracker = tracking.LOGGER_TYPE_TO_CLASS[name](**arguments)
    tracker.main_process_only = False  # only rank 0 makes one, and accelerate need not find out
    tracker.start()
    tracker.store_init_configuration({_UNUSUAL.sub("_", key): value for key, value in settings.items()})
    return tracker


class CallThread:
    """A daemon thread that runs one call after another."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the thread and return its result."""
        future: Future[Any] = Future()
        self._calls.put((future, work))
        return future.result()

    def end(self) -> None:
        """End the thread after the calls before this one."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, work = item
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
