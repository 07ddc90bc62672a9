"""The comparison with other controllers in held-out worlds that `esper train` writes, and its table in the report.

The file is validated against the types below before anything of it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from esper.karn.formatting import number_text
from esper.leyline.atomic_io import read_regular, write_atomically
from esper.leyline.checksums import seal_json, unseal_json
from esper.leyline.paired import Difference

HELD_OUT = "held_out.json"
MOST_BYTES = 1 << 22
"""Maximum file size. A comparison of 8 controllers in 64 worlds takes 50 kB."""


class Figure(msgspec.Struct, frozen=True):
    """One quantity over the worlds."""

    mean: float
    sd: float
    """Standard deviation over worlds."""
    worlds: list[float] = []
    """Value of each world, in the order of `HeldOut.worlds`."""


class Row(msgspec.Struct, frozen=True):
    """One controller. None: the figure does not exist for this kind of host."""

    name: str
    quality: Figure | None = None
    test: Figure | None = None
    utility: Figure | None = None
    params: Figure | None = None
    macs: Figure | None = None
    equal_test: Figure | None = None
    """Test quality after the training compute that the first controller spent."""
    test_lead: Difference | None = None
    utility_lead: Difference | None = None
    equal_test_lead: Difference | None = None
    structures: list[dict[str, str]] = []
    """Slot → blueprint of the network at the end, per world; empty for simulated hosts."""


class HeldOut(msgspec.Struct, frozen=True):
    """The complete comparison."""

    worlds: list[int]
    rows: list[Row]
    rounds: int | None = None
    """Training rounds of the compared policy."""
    task: str | None = None


def write(run: Path, figures: Mapping[str, Any], rounds: int) -> Path:
    """Write the comparison into the run directory, replacing an earlier one. Return its path."""
    path = run / HELD_OUT
    content = msgspec.json.format(msgspec.json.encode({"rounds": rounds, **figures}), indent=1) + b"\n"
    write_atomically(path, seal_json(content))
    return path


def read(run: Path) -> tuple[HeldOut | None, str | None]:
    """Return the comparison in a run directory and why it cannot be read; None and None if there is no file."""
    path = run / HELD_OUT
    try:
        return msgspec.json.decode(unseal_json(read_regular(path, MOST_BYTES)), type=HeldOut), None
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{path} cannot be read: {error}"


def table(comparison: HeldOut) -> dict[str, Any]:
    """Return the comparison as texts: explanation, column heads and rows. A list with one text is to be emphasised."""
    has_test = any(row.test is not None for row in comparison.rows)
    heads = ["controller", *(["test accuracy", "lead of the first row"] if has_test else []), "utility U",
             "lead of the first row", "parameters", "multiply-adds"]  # fmt: skip
    rows: list[list[Any]] = []
    for i, row in enumerate(comparison.rows):
        cells: list[Any] = [row.name]
        if has_test:
            cells += [_figure(row.test, "percent"), _lead(row.test_lead, "percent") if i else ""]
        cells += [_figure(row.utility, "utility"), _lead(row.utility_lead, "utility") if i else ""]
        rows.append([*cells, *(None if f is None else number_text(f.mean, "count") for f in (row.params, row.macs))])
    worlds = len(comparison.worlds)
    after = "" if comparison.rounds is None else f", after round {comparison.rounds}"
    note = (
        f"{worlds} worlds that had no part in training, the same for all controllers{after}. "
        f"±: standard deviation over the {worlds} worlds. Lead: mean difference world by world, in brackets "
        "its bootstrap 95 % interval over worlds; bold where the interval excludes 0. U: validation quality above the "
        "no-growth baseline, minus rent on parameters and multiply-adds."
    )
    return {"note": note, "heads": heads, "rows": rows}


def _figure(value: Figure | None, unit: str) -> str | None:
    """Format a mean and its standard deviation over worlds, in percent or as a utility."""
    if value is None:
        return None
    if unit == "percent":
        return f"{number_text(value.mean, unit)} ± {100 * value.sd:.1f}"
    return f"{value.mean:+.4f} ± {value.sd:.4f}"


def _lead(value: Difference | None, unit: str) -> str | list[str] | None:
    """Format a difference with its interval, in percentage points or as a utility."""
    if value is None:
        return None
    return [lead_text(value, unit)] if value.is_sure else lead_text(value, unit)


def lead_text(value: Difference, unit: str) -> str:
    """Return a difference and its interval as text, in percentage points or as a utility."""
    numbers = (value.mean, value.low, value.high)
    mean, low, high = (f"{100 * v:+.1f}" if unit == "percent" else f"{v:+.4f}" for v in numbers)
    return f"{mean} [{low}, {high}]"
