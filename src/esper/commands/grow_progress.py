"""Shows the training of one host of `esper grow`: a live display in a terminal, else a line every few epochs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from esper.commands.growing import HostResult
from esper.karn.formatting import sparkline
from esper.kasmina.blueprints import blueprint_name
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import COOLING, SeedStage
from esper.tolaria.engine import Engine

PLAIN_EVERY = 5
"""Maximum number of epochs between two lines of output if it is not a terminal."""
PLAIN_SILENCE_S = 15.0
"""Seconds after which the next epoch is printed, too."""
REFRESH_PER_SECOND = 4
CURVE_WIDTH = 60
"""Most columns of a curve."""
COLUMN_GAPS = 6
"""Columns of spaces between the columns of a table and at its edges, at most."""
RECENT_EPOCHS = 5
"""Number of last epochs from which the time left is estimated: growth makes epochs longer."""


class EpochTimer:
    """Estimates how long the remaining epochs of one host take."""

    def __init__(self, epochs_left: int) -> None:
        self.epochs_left = epochs_left
        self._ends = deque([time.monotonic()], maxlen=1 + RECENT_EPOCHS)

    def epoch_ended(self) -> None:
        """Note the time. Call it after every epoch."""
        self._ends.append(time.monotonic())
        self.epochs_left -= 1

    def time_left(self) -> str:
        """Return the estimated time left, counted down since the last epoch; empty before the first and at the end."""
        if len(self._ends) == 1 or not self.epochs_left:
            return ""
        epoch_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        seconds = self.epochs_left * epoch_s - (time.monotonic() - self._ends[-1])
        return f"  {timedelta(seconds=max(0, round(seconds)))} left"


@contextmanager
def progress(console: Console, name: str, engine: Engine, results: Sequence[HostResult]) -> Iterator[Any]:
    """Show the progress of the last of these hosts: a live display in a terminal, else a line every few epochs."""
    result = results[-1]
    timer = EpochTimer(engine.task.epochs - len(result.history))
    if not console.is_terminal:
        printed_s = time.monotonic()

        def line() -> None:
            nonlocal printed_s
            timer.epoch_ended()
            epoch = result.history[-1]["epoch"]
            now = time.monotonic()
            if epoch % PLAIN_EVERY == 0 or epoch == engine.task.epochs or now - printed_s >= PLAIN_SILENCE_S:
                print(f"{name}: {headline(engine, result)}{timer.time_left()}  {slots_line(engine)}", flush=True)
                printed_s = now

        yield line
        return
    numbers = f"epoch {len(result.history) + 1} of {engine.task.epochs} is training"
    slots = live_table(engine)

    def draw() -> None:
        nonlocal numbers, slots
        timer.epoch_ended()
        numbers = headline(engine, result)
        slots = live_table(engine)

    def display() -> Group:
        title = Text(f"{name}\n{numbers}{timer.time_left()}")
        return Group(title, slots, accuracy_curves(results, engine.task.epochs, console.width))

    with Live(get_renderable=display, console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True):
        yield draw


def accuracy_curves(results: Sequence[HostResult], epochs: int, console_width: int) -> Group:
    """Return the validation accuracy of every host by epoch, all on one scale, in a table of at most this width.

    Below the first one, the host that grows, marks show where seeds joined.
    """
    accuracies = {r.name: [epoch["val_accuracy"] for epoch in r.history] for r in results}
    finite = [a for some in accuracies.values() for a in some if np.isfinite(a)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    others = max(len(r.name) for r in results) + len("100.0%") + COLUMN_GAPS
    width = max(1, min(epochs, CURVE_WIDTH, console_width - others))
    title = Text(
        f"Validation accuracy, epochs 1 to {epochs}, from {low:.0%} to {high:.0%}  (▲ a seed joined)", "italic"
    )
    table = Table("", "", "last", box=None)
    for column in table.columns:
        column.no_wrap = True
    for r in results:
        values = [a if np.isfinite(a) else None for a in accuracies[r.name]]
        shown = max(1, len(values) * width // epochs) if values else 0
        last = f"{values[-1]:.1%}" if values and values[-1] is not None else ""
        table.add_row(r.name, Text(sparkline(values, shown, low, high), "cyan"), last)
        marks = "".join(growth_marks(r, epochs, width))
        if r is results[0] and not marks.isspace():
            table.add_row("", Text(marks, "yellow"), "")
    return Group(title, table)


def growth_marks(result: HostResult, epochs: int, width: int) -> list[str]:
    """Return one character for each column of a curve: ▲ where a seed joined the host, else a space."""
    marks = [" "] * width
    empty = {SeedStage.DORMANT.name, *(stage.name for stage in COOLING)}
    before = [True] * len(result.history[0]["stage"]) if result.history else []
    for i, epoch in enumerate(result.history):
        is_empty = [stage in empty for stage in epoch["stage"]]
        if any(was and not now for was, now in zip(before, is_empty, strict=True)):
            marks[i * width // epochs] = "▲"
        before = is_empty
    return marks


def headline(engine: Engine, result: HostResult) -> str:
    """Return the numbers of the last epoch in one line."""
    last = result.history[-1]
    return (
        f"epoch {last['epoch']:>3}/{engine.task.epochs}  train loss {last['train_loss']:.3f}  "
        f"val loss {last['val_loss']:.3f}  val accuracy {last['val_accuracy']:.1%}  {last['params']:,} params"
    )


def slots_line(engine: Engine) -> str:
    """Return the stages of the used slots in one line."""
    t = engine.table
    alive = [s for s in range(t.num_slots) if t.stage[0, s] != SeedStage.DORMANT]
    return "  ".join(
        f"{engine.task.slots[s]}:{SeedStage(int(t.stage[0, s])).name.lower()}"
        + (f"({blueprint_name(int(t.blueprint[0, s]))} α{t.alpha[0, s]:.2f})" if t.blueprint[0, s] >= 0 else "")
        for s in alive
    )


def evidence_text(table: SlotTable, s: int) -> str:
    """Return the contribution as last measured; for a fossil, before it was committed."""
    if np.isfinite(table.contribution[0, s]):
        return points(float(table.contribution[0, s]), float(table.contribution_se[0, s]))
    if np.isfinite(table.prospect[0, s]):
        return f"({100 * table.prospect[0, s]:+.1f} expected)"
    return ""


def live_table(engine: Engine) -> Table:
    """Return the live table of the slots."""
    t = engine.table
    table = Table("slot", "stage", "blueprint", "alpha", "contribution ± se", box=None)
    for s, name in enumerate(engine.task.slots):
        stage = SeedStage(int(t.stage[0, s]))
        bar = "█" * round(10 * float(t.alpha[0, s]))
        blueprint = blueprint_name(int(t.blueprint[0, s])) if t.blueprint[0, s] >= 0 else ""
        table.add_row(name, stage.name.lower(), blueprint, f"{t.alpha[0, s]:.2f} {bar:<10}", evidence_text(t, s))
    return table


def points(value: float, se: float) -> str:
    """Format a difference of accuracies with its standard error, in points; "" if not measured."""
    return f"{100 * value:+.1f} ± {100 * se:.1f}" if np.isfinite(value) else ""
