"""`esper study --docs`: write the tables and charts of saved studies into docs/studies/.

No figure there is typed by hand. In each page the text between the two markers is replaced; the text around it is kept.
A section "What it shows" above the first marker must say the result of a study in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from esper.commands.frontier_chart import frontier_chart, line_chart
from esper.leyline.atomic_io import make_real_directory, write_atomically
from esper.leyline.errors import ConfigError, unknown_name
from esper.studies.contract import Study
from esper.studies.policy_tables import RETURNS, gains_of_plans, policy_tables, read_evaluations, read_returns
from esper.studies.rendering import as_markdown, folded_tables, markdown_table
from esper.studies.repetitions import REPEATED, repetition_tables
from esper.studies.results import SAVED, TUNING, points_of, read_saved
from esper.studies.simulated_policies import (
    SAVED_POLICIES,
    CurvePoint,
    SettingsStudy,
    current_trainings,
    learning_curves,
    ranking,
    ranking_title,
    seed_rows,
)
from esper.studies.statistics import summarize
from esper.studies.table import SETTINGS_STUDIES, STUDIES

EARLIER = "Command, in an earlier version"
BEGIN, END = "<!-- study tables: begin -->", "<!-- study tables: end -->"
VERDICT = "## What it shows"
DOCS = Path("docs/studies")
"""Directory of the generated files, in the repository root."""


class Generated(NamedTuple):
    """A generated file."""

    path: Path
    text: str  # the content it must have
    studies: frozenset[str]  # names of the studies whose results it shows


def run_docs(name: str | None, *, check: bool) -> None:
    """Write the generated files of a study, or of all. With `check`, only name the outdated ones and exit with 1."""
    if not SAVED.is_dir():
        raise ConfigError(
            f"there is no directory {SAVED}/ here. Use --docs in the root of the repository, which contains it"
        )
    files = list(generated_files())
    if name is not None:
        files = [file for file in files if name in file.studies] or no_files(name, files)
    outdated = [file for file in files if not file.path.exists() or current_text(file.path) != file.text]
    for file in outdated:
        print(f"{'not up to date' if check else 'wrote'}: {file.path}")
        if not check:
            make_real_directory(file.path.parent)
            write_atomically(file.path, file.text.encode())
    if check and outdated:
        raise SystemExit(1)
    if not outdated:
        print("The documentation is up to date.")


def no_files(name: str, files: Iterable[Generated]) -> list[Generated]:
    """Raise the error for a study without generated files, whose name may be unknown."""
    if name in STUDIES or name in SETTINGS_STUDIES:
        raise ConfigError(f"study {name!r} is not saved. Run: esper study {name} --save")
    raise unknown_name("study", name, {*STUDIES, *SETTINGS_STUDIES}.union(*(file.studies for file in files)))


def generated_files() -> Iterator[Generated]:
    """Yield every generated file."""
    yield from growth_files()
    yield from repetition_files()
    yield from settings_files()
    yield from policy_files()
    yield from simulator_files()


def arms_of(study: Study) -> dict[str, str]:
    """Return what the points of each arm depend on."""
    return {arm.name: study.settings_hash(arm) for arm in study.arms}


def growth_files() -> Iterator[Generated]:
    """Yield the page and the charts of each saved study of growth."""
    for path in sorted(SAVED.glob("*.json")):
        saved = read_saved(path)
        study = saved.study
        summary = summarize(study, points_of(saved.records), study.metric)
        charts = []
        for task in study.task:
            chart = DOCS / f"{study.name}-{task}.svg"
            yield Generated(chart, frontier_chart(summary, task), frozenset([study.name]))
            charts.append(f"![{task} against training compute]({chart.name})")
        command = "Command" if study.name in STUDIES and arms_of(STUDIES[study.name]) == arms_of(study) else EARLIER
        parts = ["\n".join(charts), as_markdown(summary), f"{command}: `{saved.command}`", *tuning_parts(study.name)]
        yield page(study.name, "\n\n".join(parts), [study.name], study.question)


def tuning_parts(name: str) -> Iterator[str]:
    """Yield the tables on tuning worlds that chose the settings of a study, if they are saved."""
    path = TUNING / f"{name}.json"
    if path.exists():
        saved = read_saved(path)
        first, count = saved.study.tuning_worlds
        yield "## Tuning"
        last = first + count - 1
        yield (
            f"`{saved.study.arms[0].name}` and arms that differ from it in the one setting that their name states. "
            f"Validation quality in the tuning worlds {first} to {last}, which the results above do not use; "
            "the intervals are not corrected for the number of arms."
        )
        yield from folded_tables(summarize(saved.study, points_of(saved.records), "val_quality"))
        yield f"Command: `{saved.command}`"


def repetition_files() -> Iterator[Generated]:
    """Yield the page on stability, with the studies that were repeated under other rounding."""
    paths = sorted(REPEATED.glob("*.jsonl"))
    if paths:
        yield page("stability", repetition_tables(paths), [path.name.partition(".")[0] for path in paths])


def settings_files() -> Iterator[Generated]:
    """Yield the page and the learning curves of each study of settings that has saved results."""
    for study in SETTINGS_STUDIES.values():
        if study.saved.exists():
            finished = current_trainings(study)
            jobs = len(study.jobs())
            missing = "" if len(finished) == jobs else f"\n\n**Unfinished: {len(finished)} of {jobs} trainings.**"
            parts = [f"{ranking_title(study)}:", markdown_table(ranking(study, finished)) + missing]
            by_seed = seed_rows(study, finished)
            if by_seed:
                parts += ["Every training seed:", markdown_table(by_seed)]
            curves = learning_curves(study, finished)
            if curves:
                chart = DOCS / f"{study.name}.svg"
                yield Generated(chart, learning_chart(study, curves), frozenset([study.name]))
                parts.append(f"![mean U of the training episodes]({chart.name})")
            parts.append(f"Command: `esper study {study.name} --save`")
            yield page(study.name, "\n\n".join(parts), [study.name], study.question)


def learning_chart(study: SettingsStudy, curves: Mapping[str, list[CurvePoint]]) -> str:
    """Return the learning curves of a study of settings as SVG."""
    marks = {float(share): f"{share} %" for share in range(20, 101, 20)}
    note = "training episodes played; lines are means of the training seeds, bands their lowest and highest"
    return line_chart(f"{study.name}: mean U of the training episodes", curves, marks, "number", note)


def policy_files() -> Iterator[Generated]:
    """Yield the page on policies in families, with a learning curve of each study that has one."""
    plans = sorted((SAVED / "plans").glob("*.json"))
    parts = [gains_of_plans(plans)] if plans else []
    names = [path.stem for path in plans]
    for directory in sorted(path for path in SAVED_POLICIES.glob("*") if path.is_dir()):
        names.append(directory.name)
        parts += policy_tables(directory.name, read_evaluations(directory))
        if (directory / RETURNS).exists():
            chart = DOCS / f"policy-{directory.name}.svg"
            yield Generated(chart, returns_chart(directory), frozenset([directory.name]))
            parts.append(f"![mean return by round]({chart.name})")
    if parts:
        yield page("policy", spaced(parts), names)


def returns_chart(directory: Path) -> str:
    """Return the learning curve of a study of policies as SVG."""
    points = read_returns(directory / RETURNS)
    marks = {float(number): str(number) for number in range(4, len(points) + 1, 4)}
    note = "round of 32 episodes; the line is the mean of the training seeds, the band their lowest and highest"
    return line_chart(f"{directory.name}: mean return", {"policies": points}, marks, "number", note)


def simulator_files() -> Iterator[Generated]:
    """Yield the page on fitted simulators, with real, unfitted and fitted worlds of each task."""
    paths = sorted((SAVED / "simulator_fit").glob("*.json"))
    parts = []
    for path in paths:
        try:
            parts += fit_parts(msgspec.json.decode(path.read_bytes()))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path} is not a result of scripts/fit_simulator.py: {error!r}") from error
    if parts:
        yield page("simulator_fit", spaced(parts), [path.stem for path in paths])


def fit_parts(fit: Any) -> list[str]:
    """Return heading, table and command of one fitted simulator."""
    heading = f"### `{fit['task']}`: {len(fit['recordings'])} real, {fit['simulated_worlds']} simulated worlds"
    rows = [("mean ± standard error over worlds", "real", "simulator as shipped", "fitted")]
    for name, figures in fit["gap"].items():
        cells = [f"{figure['mean']:.3f} ± {figure['se']:.3f}".replace("-", "−") for figure in figures]
        rows.append((name, *cells))
    return [heading, markdown_table(rows), f"Command: `{fit['command']} --save`"]


def current_text(path: Path) -> str:
    """Return the text of a generated file. Raise ConfigError if it is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}. Restore it, or remove it to write a new one") from error


def spaced(parts: Iterable[str]) -> str:
    """Return parts of a page with an empty line before, between and after them."""
    return "\n" + "\n\n".join(parts) + "\n"


def page(name: str, tables: str, studies: Iterable[str], question: str = "") -> Generated:
    """Return a page of docs/studies/ with these tables between its markers. A new page begins with the question."""
    path = DOCS / f"{name}.md"
    new = f"# {name.replace('_', ' ').capitalize()}\n\n{question}\n\n{VERDICT}\n\n{BEGIN}{END}\n"
    text = current_text(path) if path.exists() else new
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"{path} must contain each marker once, in this order: {BEGIN} and {END}")
    content = text[: text.index(BEGIN)] + f"{BEGIN}\n{tables}\n{END}" + text[text.index(END) + len(END) :]
    return Generated(path, content, frozenset(studies))
