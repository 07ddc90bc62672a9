"""Write the tables and charts of saved studies into docs/studies/, so that no figure there is typed by hand.

    python scripts/study_tables.py            # update docs/studies/NAME.md and NAME-TASK.svg from studies/NAME.json
    python scripts/study_tables.py --check    # exit with code 1 and name the files that are not up to date

In NAME.md the text between the two markers is replaced; the text around it is kept. A section "What it shows" above the
first marker must say the result in words. stability.md gets a table of the studies that were repeated under other
rounding: studies/repeated/NAME.ROUNDING.jsonl holds their results. policy.md gets tables of policies:
studies/policies/FAMILY/*.json are results of `esper eval` in the same worlds of a family, one per policy, which is the
first row; studies/plans/FAMILY.json are results of `esper plans`. simulator_fit.md gets tables of
studies/simulator_fit/TASK.json, which `scripts/fit_simulator.py` writes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from esper.commands.frontier_chart import frontier_chart, line_chart
from esper.leyline.paired import compare, paired
from esper.simic.evaluation.plan_search import PLAN_GROUPS, read_plan_table
from esper.studies.rendering import as_markdown
from esper.studies.results import JobResult, SavedStudy, points_of, read_results
from esper.studies.statistics import summarize
from esper.tolaria.families import FAMILIES

BEGIN, END = "<!-- study tables: begin -->", "<!-- study tables: end -->"
VERDICT = "## What it shows"
FEW_WORLDS = 4
"""Fewer worlds than these have no interval."""


def pages(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield every generated file below `root` with the content it must have."""
    docs = root / "docs" / "studies"
    for path in sorted((root / "studies").glob("*.json")):
        saved = msgspec.json.decode(path.read_bytes(), type=SavedStudy)
        study = saved.study
        summary = summarize(study, points_of(saved.records), study.metric)
        yield from ((docs / f"{study.name}-{task}.svg", frontier_chart(summary, task)) for task in study.task)
        charts = "\n".join(f"![{task} against training compute]({study.name}-{task}.svg)" for task in study.task)
        tables = f"{BEGIN}\n{charts}\n\n{as_markdown(summary)}\n\nCommand: `{saved.command}`\n{END}"
        page = docs / f"{study.name}.md"
        title = study.name.replace("_", " ").capitalize()
        new = f"# {title}\n\n{study.question}\n\n{VERDICT}\n\n{BEGIN}{END}\n"
        text = page.read_text() if page.exists() else new
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            sys.exit(f"{page} must contain each marker once: {BEGIN} and {END}")
        yield page, text[: text.index(BEGIN)] + tables + text[text.index(END) + len(END) :]


def repetitions(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the page on stability with a table of each arm, budget and rounding, against the published results."""
    rows = [
        "| study | task | arm | × full | rounding | worlds | mean | difference to the published run | lowest world |"
    ]
    rows.append("|" + "---|" * 9)
    intervals: list[bool] = []  # whether each of them excludes 0
    for path in sorted((root / "studies" / "repeated").glob("*.jsonl")):
        name, rounding, _ = path.name.split(".")
        saved = msgspec.json.decode((root / "studies" / f"{name}.json").read_bytes(), type=SavedStudy)
        if saved.study.metric == "test_loss":
            sys.exit(f"{path} is of a study of losses: this table has accuracies in percent")
        published = _by_arm(saved.records, saved.study.metric)
        for key, values in _by_arm(read_results(path.parent, path.name), saved.study.metric).items():
            task, arm, budget = key
            mean = compare(list(values.values()), [0.0] * len(values))
            spread = "" if len(values) < FEW_WORLDS else f" ± {50 * (mean.high - mean.low):.1f}"
            rows.append(
                f"| {name} | {task} | {arm} | {budget:g} | {rounding} | {len(values)} | {100 * mean.mean:.1f}{spread} "
                f"| {_change(values, published[key])} | {100 * min(values.values()):.1f} |".replace("-", "−")
            )
            if len(values) >= FEW_WORLDS:
                lead = paired(values, published[key])
                intervals.append(lead.low > 0 or lead.high < 0)
    page = root / "docs" / "studies" / "stability.md"
    if len(rows) > 2:
        rows.append(f"\n{sum(intervals)} of {len(intervals)} intervals of the difference exclude 0.")
        text = page.read_text()
        yield page, text[: text.index(BEGIN)] + "\n".join([BEGIN, *rows, END]) + text[text.index(END) + len(END) :]


def _change(values: Mapping[int, float], published: Mapping[int, float]) -> str:
    """Return the difference to the published results in points, with its interval or, for few worlds, of each world."""
    if len(values) < FEW_WORLDS:
        return "by world: " + ", ".join(f"{100 * (values[w] - published[w]):+.1f}" for w in sorted(values))
    lead = paired(values, published)
    return f"{100 * lead.mean:+.1f} [{100 * lead.low:+.1f}, {100 * lead.high:+.1f}]"


def policies(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the page on policies in families: tables of every policy's leads over every other controller."""
    tables = []
    for directory in sorted(p for p in (root / "studies" / "policies").glob("*") if p.is_dir()):
        parts = [msgspec.json.decode(path.read_bytes()) for path in sorted(directory.glob("*.json"))]
        if any((part["task"], part["worlds"]) != (parts[0]["task"], parts[0]["worlds"]) for part in parts):
            sys.exit(f"the results in {directory} must be of one task and the same worlds")
        task, worlds = parts[0]["task"], len(parts[0]["worlds"])
        tables.append(f"### `{directory.name}`: {worlds} held-out worlds of `{task}`")
        tables.append(_leads("U", "utility", "utility", 1, 3, parts))
        tables.append(_leads("test accuracy at equal compute, %", "test", "equal_test", 100, 1, parts))
        curve = directory / "returns.csv"
        if curve.exists():
            lines = [[float(x) for x in line.split(",")] for line in curve.read_text().splitlines()[1:]]
            points = [(number, sum(values) / len(values), min(values), max(values)) for number, *values in lines]
            chart = root / "docs" / "studies" / f"policy-{directory.name}.svg"
            marks = {float(number): str(number) for number in range(4, len(points) + 1, 4)}
            note = "round of 32 episodes; the line is the mean of the training seeds, the band their lowest and highest"
            yield chart, line_chart(f"{directory.name}: mean return", {"policies": points}, marks, "number", note)
            tables.append(f"![mean return by round]({chart.name})")
    page = root / "docs" / "studies" / "policy.md"
    if tables:
        text = page.read_text()
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            sys.exit(f"{page} must contain each marker once: {BEGIN} and {END}")
        generated = "\n\n".join([BEGIN, *rooms(root), *tables, END])
        yield page, text[: text.index(BEGIN)] + generated + text[text.index(END) + len(END) :]


def rooms(root: Path) -> Iterator[str]:
    """Yield a table of what fixed plans gain in each family, by what is known of a world, from studies/plans/."""
    paths = sorted((root / "studies" / "plans").glob("*.json"))
    if not paths:
        return
    rows = [f"| family | worlds | episodes | {' | '.join(PLAN_GROUPS)} | best in each world |"]
    rows.append("|" + "---|" * (len(PLAN_GROUPS) + 4))
    for path in paths:
        table = read_plan_table(path)
        values = " | ".join(f"{value:+.4f}" for value in table.gain_by_group(FAMILIES[table.task]).values())
        best = np.max(table.utility, axis=0).mean()
        rows.append(f"| `{table.task}` | {len(table.worlds)} | {table.episodes} | {values} | {best:+.4f} |")
    yield "\n".join(rows).replace(" -", " −")


def simulator_fits(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the page on fitted simulators with a table of real, unfitted and fitted worlds for each task."""
    tables = []
    for path in sorted((root / "studies" / "simulator_fit").glob("*.json")):
        fit = msgspec.json.decode(path.read_bytes())
        tables.append(f"### `{fit['task']}`: {len(fit['recordings'])} real, {fit['simulated_worlds']} simulated worlds")
        rows = ["| mean ± standard error over worlds | real | simulator as shipped | fitted |", "|---|---|---|---|"]
        for name, figures in fit["gap"].items():
            cells = [f"{figure['mean']:.3f} ± {figure['se']:.3f}" for figure in figures]
            rows.append(f"| {name} | {' | '.join(cells)} |".replace("| -", "| −"))
        tables += ["\n".join(rows), f"Command: `{fit['command']} --save`"]
    page = root / "docs" / "studies" / "simulator_fit.md"
    if tables:
        text = page.read_text()
        generated = "\n\n".join([BEGIN, *tables, END])
        yield page, text[: text.index(BEGIN)] + generated + text[text.index(END) + len(END) :]


def _leads(title: str, own: str, other: str, unit: int, digits: int, parts: list[dict[str, Any]]) -> str:
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


def _by_arm(results: Iterable[JobResult], metric: str) -> dict[tuple[str, str, float], dict[int, float]]:
    """Return the metric by task, arm and budget, then by world."""
    values: dict[tuple[str, str, float], dict[int, float]] = {}
    for result in results:
        for point in result.points:
            values.setdefault((result.task, result.arm, point.budget), {})[result.world] = getattr(point, metric)
    return dict(sorted(values.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is not up to date")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository root")
    options = parser.parse_args()
    generated = [*pages(options.root), *repetitions(options.root), *policies(options.root)]
    generated += simulator_fits(options.root)
    outdated = [(path, text) for path, text in generated if not path.exists() or path.read_text() != text]
    for path, text in outdated:
        print(f"{'not up to date' if options.check else 'wrote'}: {path}")
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    sys.exit(1 if options.check and outdated else 0)


if __name__ == "__main__":
    main()
