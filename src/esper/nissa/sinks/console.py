"""The console sink: one line per event that a user needs to see."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from esper.leyline.events import (
    Checkpoint,
    Episode,
    Event,
    Governor,
    Health,
    Lifecycle,
    RunFinished,
    RunStarted,
    Update,
)
from esper.leyline.text import printable
from esper.nissa.record import Record

if TYPE_CHECKING:
    from rich.console import Console


class ConsoleSink:
    """Write to standard error, so that a command's output can be piped. No colours if it is not a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = Console(stderr=True) if console is None else console

    def write(self, records: Sequence[Record]) -> None:
        """Print the records that have a line."""
        for record in records:
            if line := event_line(record.event):
                text, style = line
                clock = time.strftime("%H:%M:%S", time.localtime(record.time_s))
                self._print(f"{clock}  {text}", style)

    def _print(self, text: str, style: str) -> None:
        console = self._console
        text = printable(" ".join(text.split()))
        text = text.encode(console.encoding, "replace").decode(console.encoding)
        if console.is_terminal:
            console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            console.file.write(text + "\n")
            console.file.flush()

    def close(self) -> None:
        """Do nothing: the sink does not own the stream."""


def event_line(event: Event) -> tuple[str, str] | None:
    """Return the line for an event and its colour, None if the event is not shown."""
    format_event = _FORMATTERS.get(type(event))
    return format_event(event) if format_event else None


def _started(event: RunStarted) -> tuple[str, str]:
    envs = len(event.env_names)
    shape = f"{event.rounds} rounds of {envs} x {event.steps} steps" if event.rounds > 1 else f"{event.steps} steps"
    return f"run {event.run_id}: {event.task}, {event.controller}, seed {event.seed}, {shape}", "bold"


def _finished(event: RunFinished) -> tuple[str, str]:
    why = f": {event.error}" if event.error else ""
    style = "bold green" if event.status == "finished" else "bold red"
    return f"run {event.status} after {event.wall_s:.1f} s, {event.env_steps} steps{why}", style


def _lifecycle(event: Lifecycle) -> tuple[str, str] | None:
    verb, style = _MOVES.get(event.now.upper(), ("", ""))
    if not verb:
        return None
    worth = f", contribution {event.contribution:+.4f}" if event.contribution is not None else ""
    by = "" if event.cause == "controller" else f" (by {event.cause})"
    return f"{_place(event)}  {verb} {event.blueprint} in {event.slot}{worth}{by}", style


def _governor(event: Governor) -> tuple[str, str]:
    numbers = "" if event.value is None else f" ({_number(event.value)}, limit {_number(event.limit)})"
    return f"{_place(event)}  governor: {event.alarm}{numbers}, {event.action}", "yellow"


def _episode(event: Episode) -> tuple[str, str]:
    twin = "" if event.twin_quality is None else f", without growth {_number(event.twin_quality)}"
    seeds = f"{event.germinated} germinated, {event.fossilized} kept, {event.pruned} pruned"
    size = f"{event.params} parameters (host {event.host_params})"
    where = f"env {event.env} episode {event.episode} done"
    return f"{where}: quality {_number(event.quality)}{twin}, {size}, {seeds}", "cyan"


def _update(event: Update) -> tuple[str, str]:
    losses = f"policy {_number(event.policy_loss)} value {_number(event.value_loss)}"
    skipped = f", {event.skipped} minibatches skipped" if event.skipped else ""
    gain = "" if event.return_mean is None else f", mean return {_number(event.return_mean)}"
    return f"round {event.round} update: {losses} kl {_number(event.kl)}{gain}{skipped}", "blue"


def _checkpoint(event: Checkpoint) -> tuple[str, str]:
    return f"checkpoint {event.path} ({event.reason}, {event.size_bytes / 2**20:.1f} MiB)", "dim"


def _health(event: Health) -> tuple[str, str] | None:
    if event.severity == "info":
        return None
    return f"{event.severity}: {event.source}: {event.text}", "red" if event.severity == "error" else "yellow"


def _place(event: Any) -> str:
    return f"env {event.env} episode {event.episode} step {event.step}"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"


_MOVES = {
    "GERMINATED": ("germinate", "green"),
    "FOSSILIZED": ("fossilize", "bold green"),
    "PRUNED": ("prune", "magenta"),
}
_FORMATTERS: dict[type[Event], Callable[[Any], tuple[str, str] | None]] = {
    RunStarted: _started,
    RunFinished: _finished,
    Lifecycle: _lifecycle,
    Governor: _governor,
    Episode: _episode,
    Update: _update,
    Checkpoint: _checkpoint,
    Health: _health,
}
