"""Sinks for experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio.

TensorBoard files are written by `TensorBoardSink`; the other trackers by the classes of `accelerate.tracking`, with the
same scalars. A tracker runs in one thread of its own from its start to its end: MLflow keeps its run per thread.
"""

from __future__ import annotations

import logging
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
from typing import Any

from esper.leyline.errors import EsperError, unknown_name
from esper.leyline.events import Gradient, Step, Worth
from esper.leyline.text import flat_settings
from esper.nissa.record import Record
from esper.nissa.sinks import Sink
from esper.nissa.sinks.scalars import Scalars
from esper.nissa.sinks.tensorboard import TensorBoardSink

TENSORBOARD = "tensorboard"
TRACKERS = (TENSORBOARD, "wandb", "mlflow", "trackio")
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
        extra = TENSORBOARD if name == TENSORBOARD else "trackers"
        needed = [name] if name == TENSORBOARD else ["accelerate", name]
        missing = [package for package in needed if find_spec(package) is None]
        if missing:
            own = "" if name == TENSORBOARD else f" {name}"
            raise EsperError(
                f"the tracker {name} needs {' and '.join(missing)}, which is not installed. "
                f"Install it with: pip install 'esper-lite[{extra}]'{own}"
            )


def tracker_sinks(names: Iterable[str], run: Path, manifest: Mapping[str, Any]) -> list[Sink]:
    """Return started sinks for these trackers. TensorBoard files go to RUN/tensorboard."""
    names = list(dict.fromkeys(names))
    must_be_available(names)
    return [
        TensorBoardSink(run / TENSORBOARD) if name == TENSORBOARD else TrackerSink(name, run, manifest)
        for name in names
    ]  # fmt: skip


class TrackerSink:
    """Send the scalars of a run to one tracker of `accelerate.tracking`.

    run         the run directory; its name becomes the name of the tracker's run
    manifest    its settings become the configuration in the tracker
    most_lag_s  see `MOST_LAG_S`; None sends everything, however long it takes
    """

    def __init__(
        self, name: str, run: Path, manifest: Mapping[str, Any], most_lag_s: float | None = MOST_LAG_S
    ) -> None:
        self.name, self._run, self._most_lag_s = name, run, most_lag_s
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
        if is_late and isinstance(record.event, (Step, Worth, Gradient)):
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
