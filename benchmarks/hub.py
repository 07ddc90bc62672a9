"""Cost of telemetry for the training thread and for a whole run, and events lost if sinks are slow, raise or hang."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import add_output_options, make_parser, print_json
from benchmarks.recorded_run import train_recorded
from esper.leyline.events import Level, Step
from esper.nissa.hub import NissaHub
from esper.nissa.journal_reader import read
from esper.nissa.journal_writer import JsonlSink
from esper.nissa.record import Record

BURST, QUICK_BURST = 50_000, 1_000
HANG_S, QUICK_HANG_S = 5.0, 1.0
"""Seconds after which the hub retires the hanging sink; 5.0 is the hub's default."""
SLOW_S = 0.0002
PACED = "emit a step, 100 every 5 ms"
Train = Callable[[Level], float]
"""Runs a fixed training with a hub at this level; returns the share of CPU time that telemetry uses."""


def main() -> None:
    parser = make_parser(__doc__, repeats=15)
    add_output_options(parser)
    options = parser.parse_args()
    repeats = options.repeats
    quick = options.quick
    results: dict[str, Any] = {
        "emit": emit_costs(2_000 if quick else 20_000, 3 if quick else repeats),
        "burst": burst(QUICK_BURST, QUICK_HANG_S) if quick else burst(BURST, HANG_S),
        "whole run": whole_run(train_recorded(quick), repeats),
    }
    if options.json:
        print_json(results)
    else:
        print_tables(results)


def print_tables(results: dict[str, Any]) -> None:
    console = Console()
    table = Table("call", "median µs", "p99 µs", "max ms", title="emit at the caller, journal on disk")
    for name, row in results["emit"].items():
        table.add_row(name, f"{row['median_us']:.2f}", f"{row['p99_us']:.2f}", f"{row['max_ms']:.2f}")
    console.print(table)
    table = Table("what", "value", title="A burst beside a slow, a raising and a hanging sink")
    for name, value in results["burst"].items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    console.print(table)
    whole = results["whole run"]
    table = Table("what", "value", title="A whole run, telemetry normal against off")
    table.add_row("off, median CPU s", f"{whole['off_s']:.3f}")
    table.add_row("normal, median CPU s", f"{whole['normal_s']:.3f}")
    table.add_row("slowdown, noise of the machine included", f"{whole['slowdown']:+.2%}")
    table.add_row("telemetry's own CPU time, of the whole", f"{whole['share']:.2%}")
    console.print(table)


def emit_costs(count: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return the time per call of emitting an existing event, a newly built one, and one that no sink wants.

    Without pauses the journal's thread rarely runs beside the caller; with pauses it writes all the time.
    """
    ready = [a_step(i) for i in range(count)]
    calls: dict[str, tuple[Level, Callable[[NissaHub, int], None]]] = {
        "emit a step": (Level.NORMAL, lambda hub, i: hub.emit(ready[i])),
        PACED: (Level.NORMAL, lambda hub, i: hub.emit(ready[i])),
        "ask, build a step, emit": (Level.NORMAL, lambda hub, i: hub.emit(a_step(i)) if hub.wants(Step) else None),
        "ask, nobody wants it": (Level.MINIMAL, lambda hub, i: hub.emit(a_step(i)) if hub.wants(Step) else None),
    }
    spent: dict[str, list[int]] = {name: [] for name in calls}
    clock = time.perf_counter_ns
    for _ in range(repeats):
        for name, (level, call) in calls.items():
            with tempfile.TemporaryDirectory() as folder, NissaHub([JsonlSink(Path(folder))], level=level) as hub:
                times = spent[name]
                for i in range(count):
                    if name == PACED and i % 100 == 0:
                        time.sleep(0.005)
                    start = clock()
                    call(hub, i)
                    times.append(clock() - start)
                hub.flush()
    return {name: _spread(times) for name, times in spent.items()}


def _spread(times: list[int]) -> dict[str, float]:
    times.sort()
    return {
        "median_us": times[len(times) // 2] / 1e3,
        "p99_us": times[int(len(times) * 0.99)] / 1e3,
        "max_ms": times[-1] / 1e6,
    }


def a_step(i: int) -> Step:
    return Step(
        env=i % 16,
        episode=0,
        step=i,
        world=1,
        op="wait",
        quality=0.5123,
        committed_quality=0.4987,
        val_loss=1.234,
        train_loss=1.1,
        reward=0.01,
        params=123_456,
        stages=(0, 2, 3),
        alphas=(0.0, 0.0, 0.5),
        blueprints=("", "conv_light", "norm"),
    )


class _Slow:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, records: Sequence[Record]) -> None:
        time.sleep(SLOW_S * len(records))
        self.steps += [record.event.step for record in records if isinstance(record.event, Step)]

    def close(self) -> None: ...


class _Raising:
    def write(self, _records: Sequence[Record]) -> None:
        raise OSError("out of order")

    def close(self) -> None: ...


class _Hanging:
    def __init__(self) -> None:
        self.released = threading.Event()

    def write(self, _records: Sequence[Record]) -> None:
        self.released.wait()

    def close(self) -> None: ...


def burst(count: int, hang_s: float) -> dict[str, Any]:
    """Emit events as fast as one thread can; return what each sink received and the caller's time."""
    events = [a_step(i) for i in range(count)]
    everything = list(range(count))
    slow, hanging = _Slow(), _Hanging()
    with tempfile.TemporaryDirectory() as folder:
        hub = NissaHub([_Raising(), hanging, JsonlSink(Path(folder) / "events"), slow], hang_s=hang_s)
        start = time.perf_counter()
        for event in events:
            hub.emit(event)
        emitted = time.perf_counter()
        on_disk = hub.flush(60.0)
        flushed = time.perf_counter()
        hub.close(120.0)
        closed = time.perf_counter()
        journal = [entry.data["step"] for entry in read(Path(folder)) if entry.kind == "step"]
    hanging.released.set()
    health = hub.health()
    return {
        "events": count,
        "caller s": emitted - start,
        "caller waited s": health["wait_s"],
        "on disk s": flushed - start if on_disk else None,
        "all done s": closed - start,
        "lost by the journal": count - len(journal),
        "lost by the slow sink": count - len(slow.steps),
        "in order": journal == everything[: len(journal)] and slow.steps == everything[: len(slow.steps)],
        "retired": ", ".join(name.strip("_") for name, sink in health["sinks"].items() if sink["retired"]),
    }


def whole_run(train: Train, repeats: int) -> dict[str, float]:
    """Return medians of alternating runs of the same training with telemetry off and normal.

    Times are CPU seconds of the process, the hub's threads included. The training thread's share is smaller.
    """
    spent: dict[Level, list[float]] = {Level.OFF: [], Level.NORMAL: []}
    shares: dict[Level, list[float]] = {Level.OFF: [], Level.NORMAL: []}
    train(Level.NORMAL)  # warm up
    for i in range(repeats):
        for level in sorted(spent, reverse=bool(i % 2)):
            start = time.process_time()
            shares[level].append(train(level))
            spent[level].append(time.process_time() - start)
    off, normal = statistics.median(spent[Level.OFF]), statistics.median(spent[Level.NORMAL])
    share = statistics.median(shares[Level.NORMAL])
    return {"off_s": off, "normal_s": normal, "slowdown": normal / off - 1, "share": share}


if __name__ == "__main__":
    main()
