"""Tables and verdicts of a study as text for a console of 80 columns and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from esper.leyline.paired import Difference
from esper.studies.contract import Claim
from esper.studies.mixing import Mixing
from esper.studies.statistics import Row, Summary, Verdict

METRICS = {"test_quality": "test quality", "val_quality": "val quality", "test_loss": "test loss"}
HOW_TO_READ_VERDICTS = """\
A column is an amount of training compute, as a multiple of one full training. A cell has the outcome, the difference
with its 95 % interval, and in how many worlds the difference has the claimed sign."""
Cells = tuple[str, ...]


def tables(summary: Summary) -> Iterator[tuple[str, list[Cells]]]:
    """Yield each table as a title and its rows of cells, header first."""
    header = ("arm", METRICS[summary.metric], "difference", "× full", "params")
    for (task, budget), group in groupby(summary.rows, key=lambda row: (row.task, row.budget)):
        rows = list(group)
        counts = sorted({row.worlds for row in rows})
        worlds = f"{counts[0]} worlds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} worlds"
        title = "best so far, mean over budgets" if budget is None else f"{budget:g} × one full training"
        yield f"{task}, {title}, {worlds}, 95 % intervals", [header, *(_cells(summary.metric, row) for row in rows)]
    for task, times in groupby(summary.mixing, key=lambda mixing: mixing.task):
        cells = [(each.arm, each.against, _mixing(each)) for each in times]
        yield f"{task}, mixing time after the first seed", [("arm", "against", "epochs"), *cells]


def _mixing(mixing: Mixing) -> str:
    return f"> {mixing.observed:.0f}" if mixing.epochs is None else f"{mixing.epochs:.0f}"


def _cells(metric: str, row: Row) -> Cells:
    value = f"{number(metric, row.value.mean)} ± {number(metric, (row.value.high - row.value.low) / 2)}"
    compute = "–" if row.full_trainings is None else f"{row.full_trainings:.2f}"
    return (
        row.arm,
        value,
        "–" if row.lead is None else difference(metric, row.lead),
        compute,
        f"{row.params / 1000:,.1f}k",
    )


def number(metric: str, value: float, sign: str = "") -> str:
    """Format a quality in percent, or a loss."""
    text = f"{value:{sign}.3f}" if metric == "test_loss" else f"{100 * value:{sign}.1f}"
    return text.replace("-", "−")


def difference(metric: str, lead: Difference) -> str:
    """Format a difference with its interval, in points or of a loss."""
    mean, low, high = (number(metric, value, "+") for value in (lead.mean, lead.low, lead.high))
    return f"{mean} [{low}, {high}]"


def claim_text(claim: Claim) -> str:
    """Return what is claimed; if the arms have different budgets, with both."""
    sides = [claim.arm, claim.against]
    if claim.against_budget is not None:
        sides = [f"{claim.arm} × {claim.budget:g}", f"{claim.against} × {claim.against_budget:g}"]
    return f" {claim.direction} than ".join(sides)


def verdict_cells(metric: str, verdict: Verdict) -> Cells:
    """Return the claim, where it is tested, its outcome, and the figures or the reason behind it."""
    claim = verdict.claim
    lead = verdict.lead
    place = claim.at if claim.budget is None else f"{claim.at}, {claim.budget:g} × one full training"
    if claim.against_budget is not None:
        place = "different compute, in multiples of one full training"
    figures = verdict.reason
    if lead is not None and not figures:
        worlds = f"higher in {lead.wins}, equal in {lead.ties}, lower in {lead.losses} worlds"
        figures = f"{difference(metric, lead)}, {worlds}"
    return claim_text(claim), f"{verdict.task}, {place}", verdict.outcome, figures


def as_text(summary: Summary) -> str:
    """Return all tables and verdicts, at most 80 columns wide."""
    lines = []
    for title, rows in tables(summary):
        lines += [title, text_table(rows), ""]
    for verdict in summary.verdicts:
        claim, place, outcome, figures = verdict_cells(summary.metric, verdict)
        lines += [f"{outcome}: {claim}", f"    {place}", f"    {figures}"]
    return "\n".join(lines)


def as_markdown(summary: Summary) -> str:
    """Return the verdicts, one table per task, and below them all other tables, folded, as Markdown."""
    parts = []
    if summary.verdicts:
        parts.append(f"## Verdicts\n\n{HOW_TO_READ_VERDICTS}")
    for task, verdicts in groupby(summary.verdicts, key=lambda verdict: verdict.task):
        shown = [markdown_table(table) for table in _verdict_tables(summary.metric, list(verdicts))]
        parts += [f"**{task}**", *shown]
    return "\n\n".join([*parts, "## Tables", *folded_tables(summary)])


def folded_tables(summary: Summary) -> Iterator[str]:
    """Yield all tables, folded by task, as paragraphs of Markdown."""
    by_task: dict[str, list[tuple[str, list[Cells]]]] = {}
    for title, rows in tables(summary):
        by_task.setdefault(title.partition(",")[0], []).append((title, rows))
    for task, group in by_task.items():
        yield f"<details><summary>{task}: {METRICS[summary.metric]}, compute and parameters of every arm</summary>"
        yield from (f"{title}:\n\n{markdown_table(rows)}" for title, rows in group)
        yield "</details>"


def _verdict_tables(metric: str, verdicts: list[Verdict]) -> Iterator[list[Cells]]:
    """Yield a table of the claims at the same budget, and one of those at different budgets, if a task has such."""
    same = [verdict for verdict in verdicts if verdict.claim.against_budget is None]
    different = [verdict for verdict in verdicts if verdict.claim.against_budget is not None]
    if same:
        yield _verdict_table(metric, same)
    if different:
        cells = [(claim_text(verdict.claim), _verdict_cell(metric, verdict)) for verdict in different]
        yield [("claim at different compute", "outcome"), *cells]


def _verdict_table(metric: str, verdicts: list[Verdict]) -> list[Cells]:
    """Return one row per pair of arms and one column per budget (or mean over budgets) of one task's claims."""
    rows: dict[str, dict[tuple[str, float], str]] = {}
    for verdict in verdicts:
        claim = verdict.claim
        row = rows.setdefault(claim_text(claim), {})
        row[claim.at, claim.budget or 0.0] = _verdict_cell(metric, verdict)
    columns = sorted({column for row in rows.values() for column in row})
    header = ("claim", *(_column_name(at, budget) for at, budget in columns))
    return [header, *((claim, *(row.get(column, "") for column in columns)) for claim, row in rows.items())]


def _column_name(at: str, budget: float) -> str:
    if at == "frontier area":
        return "mean over budgets"
    return f"× {budget:g}" if at == "equal compute" else f"× {budget:g}, {at}"


def _verdict_cell(metric: str, verdict: Verdict) -> str:
    lead = verdict.lead
    if lead is None or verdict.reason:
        return f"{verdict.outcome}: {verdict.reason}"
    claimed = lead.wins if verdict.claim.direction == "higher" else lead.losses
    worlds = lead.wins + lead.ties + lead.losses
    return f"**{verdict.outcome}** {difference(metric, lead)}, {claimed} of {worlds}"


def text_table(rows: Sequence[Cells]) -> str:
    """Return rows of cells, header first, as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        numbers = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([f"{name:<{widths[0]}}", *numbers]))
    return "\n".join(lines)


def markdown_table(rows: Sequence[Cells]) -> str:
    """Return rows of cells, header first, as Markdown."""
    header, *body = ("| " + " | ".join(cells) + " |" for cells in rows)
    return "\n".join((header, "|---" * len(rows[0]) + "|", *body))
