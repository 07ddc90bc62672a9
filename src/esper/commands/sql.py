"""`esper sql RUN… "select …"`: run a query and print the result as a table, JSON or CSV."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from esper.commands import natural_width
from esper.karn import sql_process
from esper.karn.sql import Answer
from esper.karn.views import PLACE_NOTES, catalogue
from esper.leyline.errors import ConfigError
from esper.leyline.events import spelled
from esper.leyline.text import cut, printable
from esper.nissa.run_list import manifest_of

SHOWN_ROWS = 200
"""Default number of rows of a table on the screen. JSON and CSV contain all rows."""
# limits of a table; JSON and CSV have no limits
LONGEST_NAME = 100
"""Most characters of a column name."""
LONGEST_CELL = 500
"""Most characters of a cell."""
MOST_ITEMS = 100
"""Most values of a list."""
NUMBERS = ("INT", "DOUBLE", "FLOAT", "DECIMAL")
NOTHING = "–"


def run_sql(
    runs: list[Path],
    query: str | None,
    *,
    as_json: bool = False,
    as_csv: bool = False,
    limit: int | None = None,
    timeout_s: float | None = 60.0,
) -> None:
    """Print the result; without a query, the schema. A limit of 0 is no limit, None is the default."""
    if as_json and as_csv:
        raise ConfigError("--json and --csv exclude each other: choose one output format")
    if limit is not None and limit < 0:
        raise ConfigError(f"--limit must be ≥ 0 (0: no limit), got {limit}")
    console = Console()
    if query is None:
        for run in runs:
            manifest_of(run)  # raises for a misspelt run
        show_catalogue(console)
        return
    rows = (None if as_json or as_csv else SHOWN_ROWS) if limit is None else limit or None
    answer = sql_process.ask(runs, query, limit=rows, timeout_s=timeout_s, on_trouble=_warn)
    show(answer, as_json, as_csv, console)


def _warn(trouble: str) -> None:
    print(f"esper: {printable(trouble)}", file=sys.stderr)


def show(answer: Answer, as_json: bool, as_csv: bool, console: Console) -> None:
    """Print a result in the requested form."""
    if as_json:
        names = distinct(answer.columns)
        print(json.dumps([dict(zip(names, map(spelled, row), strict=True)) for row in answer.rows], indent=1))
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([printable(name, None) for name in answer.columns])
        writer.writerows([csv_cell(value) for value in row] for row in answer.rows)
    else:
        show_answer(answer, console)
        return
    if answer.more:
        print(f"esper: {answer.more} more rows; use --limit 0 for all", file=sys.stderr)


def distinct(columns: list[str]) -> list[str]:
    """Make column names unique, as JSON needs: a, a becomes a, a_1."""
    out: list[str] = []
    for name in columns:
        other, count = name, 0
        while other in out or (count and other in columns):
            count += 1
            other = f"{name}_{count}"
        out.append(other)
    return out


def split_arguments(arguments: list[str]) -> tuple[list[Path], str | None]:
    """Split `RUN… [QUERY]`: the last argument is the query, unless it is a directory."""
    last = arguments[-1] if arguments else ""
    reads_as_query = len(last.split()) > 1 or last.strip().lower() in ("describe", "show")  # a path is rarely two words
    if reads_as_query and not _is_directory(last):
        return [Path(a) for a in arguments[:-1]], last
    return [Path(a) for a in arguments], None


def _is_directory(text: str) -> bool:
    try:
        return Path(text).is_dir()
    except (OSError, ValueError):  # a query can be longer than any name of a file
        return False


def show_answer(answer: Answer, console: Console) -> None:
    """Print a table; on a terminal only the columns that fit, and a line on what is left out."""
    count = len(answer.columns)
    table = as_table(answer, count)
    if console.is_terminal:
        while count > 1 and natural_width(table, console) > console.width:
            count -= 1
            table = as_table(answer, count)
    else:
        console.width = max(console.width, natural_width(table, console))
    console.print(table)
    if count < len(answer.columns):
        omitted = printable(", ".join(answer.columns[count:]))
        console.print(Text(f"{len(answer.columns) - count} columns do not fit: {omitted}. Select fewer columns"))
    if answer.more:
        console.print(Text(f"{answer.more:,} more rows; use --limit 0 for all"))


def as_table(answer: Answer, count: int) -> Table:
    """Return the first `count` columns as a table."""
    table = Table()
    for name, kind in list(zip(answer.columns, answer.types, strict=True))[:count]:
        is_number = any(word in kind for word in NUMBERS) and not kind.endswith("]") and "(VARCHAR" not in kind
        table.add_column(Text(printable(name, LONGEST_NAME)), justify="right" if is_number else "left", no_wrap=True)
    for row in answer.rows:
        table.add_row(*(Text(cell(value)) for value in row[:count]))
    return table


def cell(value: Any) -> str:
    """Format a value: – for null, floats with six digits, control characters escaped."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}" if 1e6 <= abs(value) < 1e15 else f"{value:.6g}"
    if isinstance(value, list):
        return cut("[" + ", ".join([*map(cell, value[:MOST_ITEMS]), *_more_items(value)]) + "]", LONGEST_CELL)
    if isinstance(value, dict):
        pairs = [f"{cell(k)}: {cell(v)}" for k, v in islice(value.items(), MOST_ITEMS)]
        return cut("{" + ", ".join([*pairs, *_more_items(value)]) + "}", LONGEST_CELL)
    text = value if isinstance(value, str) else str(value)
    return printable(text.strip("\n"), LONGEST_CELL, keep="\n")


def _more_items(values: list[Any] | dict[Any, Any]) -> list[str]:
    return [f"… {len(values) - MOST_ITEMS:,} more"] if len(values) > MOST_ITEMS else []


def csv_cell(value: Any) -> Any:
    """Convert a value to CSV: null is empty, nested values are JSON. Line ends and tabs are not escaped."""
    value = spelled(value)
    if isinstance(value, str):
        return printable(value, None, keep="\n\t")
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def show_catalogue(console: Console) -> None:
    """Print every view and table with its columns and their meaning."""
    shared = "; ".join(explained(PLACE_NOTES.items()))
    console.print(Text(f"Every table has {shared}. Every view has run. Null: not measured. NaN: measured as NaN.\n"))
    for view in catalogue():
        own = {name: note for name, note in view.columns.items() if view.sql or name not in PLACE_NOTES}
        console.print(Text.assemble((view.name, "bold"), "  ", view.meaning))
        console.print(Padding(Text("; ".join(explained(own.items()))), (0, 0, 0, 4)))
    console.print(Text('\nExample: esper sql RUN "select blueprint, count(*) from lifecycle group by all"'))


def explained(columns: Iterable[tuple[str, str]]) -> Iterable[str]:
    """Yield column names with their notes."""
    for name, note in columns:
        yield f"{name} ({note.rstrip('.')})" if note and name != "run" else name
