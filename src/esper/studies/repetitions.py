"""Tables of studies that were repeated under other rounding, against their published results.

`studies/repeated/NAME.ROUNDING.jsonl` is the results file of a repetition; `studies/NAME.json` has the
published results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from esper.leyline.errors import ConfigError
from esper.leyline.paired import Lead, compare, paired
from esper.studies.rendering import Cells, difference, markdown_table, number
from esper.studies.results import SAVED, JobResult, read_results, read_saved

REPEATED = SAVED / "repeated"
FEW_WORLDS = 4
"""Fewer worlds than these have no interval."""
COLUMNS = ("study", "task", "arm", "× full", "rounding", "worlds", "mean", "difference to the published run")


class Repetition(NamedTuple):
    """Results of one arm at one budget under one rounding."""

    metric: str
    cells: Cells
    difference: Lead | None  # to the published results; None for few worlds


def repetition_tables(paths: Sequence[Path]) -> str:
    """Return the tables of these results files as Markdown, qualities before losses."""
    rows = [row for path in paths for row in repetitions(path)]
    parts = []
    for metric, worst in (("test_quality", "lowest world"), ("test_loss", "highest world")):
        body = [row.cells for row in rows if row.metric == metric]
        if body:
            parts.append(markdown_table([(*COLUMNS, worst), *body]))
    intervals = [row.difference.is_sure for row in rows if row.difference is not None]
    parts.append(f"{sum(intervals)} of {len(intervals)} intervals of the difference exclude 0.")
    return "\n\n".join(parts)


def repetitions(path: Path) -> Iterator[Repetition]:
    """Yield the rows of one results file. Raise ConfigError if results were not published for its arms and worlds."""
    if path.name.count(".") != 2:
        raise ConfigError(f"{path} must be named STUDY.ROUNDING.jsonl, such as weak_spot.default.jsonl")
    name, rounding, _ = path.name.split(".")
    original = SAVED / f"{name}.json"
    if not original.exists():
        raise ConfigError(f"{path} repeats a study that is not saved: there is no {original}")
    saved = read_saved(original)
    metric = saved.study.metric
    published = by_arm(saved.records, metric)
    for (task, arm, budget), values in by_arm(read_results(path.parent, path.name), metric).items():
        before = published.get((task, arm, budget), {})
        missing = sorted(values.keys() - before.keys())
        if missing:
            raise ConfigError(f"{original} has no result of {task} {arm} at budget {budget:g} in worlds {missing}")
        lead = paired(values, before) if len(values) >= FEW_WORLDS else None
        worst = max(values.values()) if metric == "test_loss" else min(values.values())
        cells = (
            name, task, arm, f"{budget:g}", rounding, str(len(values)), mean(metric, values),
            by_world(metric, values, before) if lead is None else difference(metric, lead), number(metric, worst),
        )  # fmt: skip
        yield Repetition(metric, cells, lead)


def mean(metric: str, values: Mapping[int, float]) -> str:
    """Format the mean over worlds, with half the width of its interval unless there are few worlds."""
    own = compare(list(values.values()), [0.0] * len(values))
    spread = f" ± {number(metric, (own.high - own.low) / 2)}" if len(values) >= FEW_WORLDS else ""
    return number(metric, own.mean) + spread


def by_world(metric: str, values: Mapping[int, float], published: Mapping[int, float]) -> str:
    """Format the difference to the published result of each world."""
    return "by world: " + ", ".join(number(metric, values[w] - published[w], "+") for w in sorted(values))


def by_arm(results: Iterable[JobResult], metric: str) -> dict[tuple[str, str, float], dict[int, float]]:
    """Return the metric by task, arm and budget, then by world."""
    values: dict[tuple[str, str, float], dict[int, float]] = {}
    for result in results:
        for point in result.points:
            values.setdefault((result.task, result.arm, point.budget), {})[result.world] = getattr(point, metric)
    return dict(sorted(values.items()))
