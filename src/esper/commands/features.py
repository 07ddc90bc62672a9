"""`esper features`: list the columns of the policy's observation, or how much the policy of a run uses each."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.commands import plainly
from esper.leyline.errors import DataError
from esper.tamiyo.policy.feature_table import BASE, FEATURES, PER_SLOT

NOTES = """\
importance: mean Kullback-Leibler divergence, in nats, between the decisions of the policy and those with this column
permuted among the recorded steps (of slots: among enabled slots); it measures what the policy uses
sd, range: over the recorded steps; a constant column cannot be used"""


def run_features(run: Path | None, as_json: bool) -> None:
    """Print the table of features, or the importance of each for the policy of a run."""
    if run is None:
        list_features(as_json)
        return
    from esper.nissa.run_list import find_run
    from esper.tamiyo.decision_record import DecisionRecord
    from esper.tamiyo.explanation import importances

    path = find_run(run)
    if path is None:
        raise DataError(f"there is no run in {run}")
    record = DecisionRecord.load(path)
    ranking = importances(record)
    if as_json:
        print(json.dumps([each.as_row() for each in ranking], indent=1))
        return
    console = Console()
    facts = record.facts
    plainly(
        console,
        f"{int(record.lengths.sum())} decisions in {len(facts.worlds)} environments, episode {facts.episode} of {path}",
    )
    table = Table("feature", "scope", "range", "sd", "importance", box=None, pad_edge=False)
    for each in ranking:
        if each.sd > 0:
            spread = f"{each.low:.3f} … {each.high:.3f}"
            table.add_row(each.feature.name, each.feature.scope, spread, f"{each.sd:.3f}", f"{each.nats:.2g}")
    for column in (2, 3, 4):
        table.columns[column].justify = "right"
    console.print(table)
    constant = [each.feature.name for each in ranking if each.sd == 0]
    if constant:
        console.print(Text(f"constant in these decisions: {', '.join(constant)}", "dim"))
    console.print(Text(NOTES, "dim"))


def list_features(as_json: bool) -> None:
    """Print name, meaning, formula and range of every column."""
    if as_json:
        print(json.dumps([feature._asdict() for feature in FEATURES], indent=1))
        return
    table = Table("name", "scope", "meaning", "formula", "range", box=None, pad_edge=False)
    for f in FEATURES:
        table.add_row(f.name, f.scope, f.meaning, f.formula, f"{f.low:g} … {f.high:g}")
    for column in (0, 1, 4):
        table.columns[column].no_wrap = True  # without line breaks, names can be copied
    console = Console()
    console.print(table)
    console.print(
        f"\n{BASE} columns per environment, then {PER_SLOT} per slot. soft s (x) = x / (|x| + s); "
        "size (r) = log2(1 + r) / 8, at most 1; −1 in a column that is otherwise ≥ 0: never measured.",
        highlight=False,
    )
