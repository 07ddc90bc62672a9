"""`esper compare`: paired differences of runs over the same worlds, and what they decided differently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from esper.karn.comparison import Comparison, Measure, Pair, compare_runs
from esper.leyline.text import printable

TITLES = {"episodes": "last finished episode in each world", "held_out": "held-out worlds"}
METRICS = {
    "quality": "quality",
    "test_quality": "test quality",
    "utility": "utility U",
    "params": "parameters",
    "train_macs": "training multiply-adds",
}
MOST_WORLDS = 12
"""Maximum number of first differences that are printed per pair; --json has all."""


def run_compare(paths: list[Path], as_json: bool, console: Console | None = None) -> None:
    """Compare runs and print tables or JSON."""
    comparison = compare_runs(paths)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(comparison), indent=1).decode())
        return
    (console or Console()).print(comparison_tables(comparison))


def comparison_tables(comparison: Comparison) -> Group:
    """Return a comparison as tables with their explanation."""
    parts: list[RenderableType] = [_arms(comparison)]
    for pair in comparison.pairs:
        parts += ["", *_pair(pair)]
    notes = [
        "difference: second − first, mean over the same worlds, in brackets its bootstrap 95 % interval",
        "worlds +/=/−: number of worlds in which the second is higher, equal and lower",
        "bold: the interval excludes 0",
        *comparison.notes,
    ]
    return Group(*parts, "", Text("\n".join(notes), "dim"))


def _arms(comparison: Comparison) -> Table:
    table = Table("", "task", "settings that differ", box=None, pad_edge=False)
    for arm in comparison.arms:
        settings = ", ".join(f"{name}={value}" for name, value in arm.settings.items())
        table.add_row(Text(arm.name), Text(printable(arm.task or "–", 100)), Text(settings or "–"))
    return table


def _pair(pair: Pair) -> Iterator[RenderableType]:
    count = f"{len(pair.worlds)} worlds" if len(pair.worlds) > 1 else f"1 world ({pair.worlds[0]}), so no intervals"
    yield Text(f"{pair.other} against {pair.first}: {TITLES[pair.scope]}, {count}", "bold")
    table = _columns("", "first", "second", "difference [95 %]", "worlds +/=/−")
    for measure in pair.measures:
        table.add_row(*_measure(measure))
    yield table
    if pair.structures:
        yield from _counted("seeds in the final networks", pair.structures)
    if pair.choices is None:
        if pair.scope == "episodes":
            yield Text("decisions: not recorded. Train with --telemetry normal", "dim")
        return
    yield from _counted("operations", pair.choices.operations)
    yield from _counted("germinated", pair.choices.blueprints)
    differences = pair.choices.first_differences
    if not differences:
        yield Text("decisions: the same in every world")
        return
    yield Text(f"first different decision ({len(differences)} of {len(pair.worlds)} worlds differ):")
    steps = Table("world", "step", "first", "second", box=None, pad_edge=False)
    for each in differences[:MOST_WORLDS]:
        steps.add_row(str(each.world), str(each.step), Text(each.first), Text(each.other))
    yield steps
    if len(differences) > MOST_WORLDS:
        yield Text(f"and {len(differences) - MOST_WORLDS} more worlds; --json lists all", "dim")


def _measure(measure: Measure) -> tuple[str | Text, ...]:
    lead = measure.lead
    name, form, signed, factor = _format(measure)
    values = [form.format(factor * value) for value in (measure.first, measure.other)]
    mean, low, high = (signed.format(factor * value) for value in (lead.mean, lead.low, lead.high))
    interval = f" [{low}, {high}]" if measure.worlds > 1 else ""
    difference = Text(mean + interval, "bold" if lead.is_sure else "")
    return name, *values, difference, f"{lead.wins} / {lead.ties} / {lead.losses}"


def _format(measure: Measure) -> tuple[str, str, str, float]:
    """Return name, format of values, format of differences, and the factor of both."""
    name = METRICS[measure.metric]
    if measure.metric in ("quality", "test_quality") and all(0 <= v <= 1 for v in (measure.first, measure.other)):
        return f"{name}, %", "{:.1f}", "{:+.1f}", 100.0
    if measure.metric == "train_macs":
        return f"{name}, 10⁹", "{:,.3f}", "{:+,.3f}", 1e-9
    if measure.metric == "params":
        return name, "{:,.0f}", "{:+,.0f}", 1.0
    return name, "{:.4f}", "{:+.4f}", 1.0


def _counted(title: str, counts: dict[str, tuple[int, int]]) -> Iterator[RenderableType]:
    if counts:
        table = _columns(title, "first", "second")
        for name, (first, other) in counts.items():
            table.add_row(Text(name), str(first), str(other))
        yield table


def _columns(*names: str) -> Table:
    """Return a table with right-aligned numbers after its first column."""
    table = Table(names[0], box=None, pad_edge=False)
    for name in names[1:]:
        table.add_column(name, justify="right")
    return table
