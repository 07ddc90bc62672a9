"""Tables of policies in families as Markdown: their differences to other controllers, and the gains of fixed plans.

`studies/policies/NAME/*.json` are results of `esper eval` in the same worlds, one file per policy, which is its first
row. `studies/policies/NAME/returns.csv` has the mean return of each round. `studies/plans/*.json` are results of
`esper plans`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.paired import compare
from esper.simic.evaluation.plan_search import PLAN_GROUPS, read_plan_table
from esper.studies.rendering import Cells, markdown_table
from esper.tolaria.families import FAMILIES

RETURNS = "returns.csv"
"""Name of the file with the mean return of each round, one column per training seed."""


def read_evaluations(directory: Path) -> list[dict[str, Any]]:
    """Return the results of `esper eval` in a directory.

    Raise ConfigError unless there are some, of one task, the same worlds and the same controllers beside the policies.
    """
    parts: dict[Path, dict[str, Any]] = {}
    contents = []
    for path in sorted(directory.glob("*.json")):
        try:
            part = parts[path] = msgspec.json.decode(path.read_bytes())
            contents.append((part["task"], part["worlds"], [row["name"] for row in part["rows"]][1:]))
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a result of `esper eval`: {error}") from error
        if contents[-1] != contents[0]:
            raise ConfigError(f"{path} must have the same task, worlds and controllers as {next(iter(parts))}")
    if not parts:
        raise ConfigError(f"{directory} has no results of `esper eval`: copy their JSON files into it")
    return list(parts.values())


def policy_tables(name: str, parts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the heading of a study and its tables: utility, then test accuracy at equal compute if it was measured."""
    tables = [f"### `{name}`: {len(parts[0]['worlds'])} held-out worlds of `{parts[0]['task']}`"]
    tables.append(_leads("U", "utility", "utility", 1, 3, parts))
    if all(row.get("equal_test") for part in parts for row in part["rows"][1:]):
        tables.append(_leads("test accuracy at equal compute, %", "test", "equal_test", 100, 1, parts))
    return tables


def _leads(title: str, own: str, other: str, unit: int, digits: int, parts: Sequence[dict[str, Any]]) -> str:
    """Return a table of policies, the first rows of `parts`, and of their leads over the other rows.

    `own` is the key of a policy's result, `other` that of the other controllers.
    """
    policies = [part["rows"][0] for part in parts]
    names = [policy["name"].removeprefix("learned (").rstrip(")") for policy in policies]
    columns = [*names, *(["their mean"] if len(names) > 1 else [])]
    table = [f"| | {title} | {' | '.join(f'lead of {name}' for name in columns)} |", "|" + "---|" * (2 + len(columns))]
    for name, policy in zip(names, policies, strict=True):
        table.append(f"| policy {name} | {unit * policy[own]['mean']:.{digits}f} |{' |' * len(columns)}")
    for row in parts[0]["rows"][1:]:
        same = [next(r for r in part["rows"] if r["name"] == row["name"]) for part in parts]
        ours, theirs = [p[own]["worlds"] for p in policies], [r[other]["worlds"] for r in same]
        leads = [compare(a, b) for a, b in zip(ours, theirs, strict=True)]
        leads += [compare(np.mean(ours, axis=0), np.mean(theirs, axis=0))] if len(names) > 1 else []
        means = sorted(unit * r[other]["mean"] for r in same)
        shown = list(dict.fromkeys(f"{mean:.{digits}f}" for mean in (means[0], means[-1])))
        cells = [
            f"{unit * d.mean:+.{digits}f} [{unit * d.low:+.{digits}f}, {unit * d.high:+.{digits}f}]" for d in leads
        ]
        table.append(f"| {row['name']} | {' to '.join(shown)} | {' | '.join(cells)} |")
    return "\n".join(table).replace(" -", " −").replace("[-", "[−")


def gains_of_plans(paths: Sequence[Path]) -> str:
    """Return a table of what fixed plans gain in each family, by what is known of a world."""
    rows: list[Cells] = [("family", "worlds", "episodes", *PLAN_GROUPS, "best in each world")]
    for path in paths:
        table = read_plan_table(path)
        if table.task not in FAMILIES:
            raise unknown_name(f"family of {path}", table.task, FAMILIES)
        gains = [*table.gain_by_group(FAMILIES[table.task]).values(), np.max(table.utility, axis=0).mean()]
        figures = [f"{gain:+.4f}".replace("-", "−") for gain in gains]
        rows.append((f"`{table.task}`", str(len(table.worlds)), str(table.episodes), *figures))
    return markdown_table(rows)


def read_returns(path: Path) -> list[tuple[float, float, float, float]]:
    """Return the number, mean, lowest and highest return of each round over the training seeds."""
    lines = [[float(x) for x in line.split(",")] for line in path.read_text().splitlines()[1:]]
    return [(number, sum(values) / len(values), min(values), max(values)) for number, *values in lines]
