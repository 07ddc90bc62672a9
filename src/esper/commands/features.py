"""`esper features`: list the columns of the policy's observation."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from esper.tamiyo.policy.feature_table import BASE, FEATURES, PER_SLOT


def run_features() -> None:
    """Print the table of features."""
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
