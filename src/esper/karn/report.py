"""The report: one self-contained HTML file about one run or several side by side.

All values from a run pass through `escape` or `data_script`, so names cannot inject HTML or scripts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from esper.karn import sections
from esper.karn.charts import Chart, Series, Value, legend, render, spoken
from esper.karn.held_out import held_out
from esper.karn.html import cell, section, table
from esper.karn.lifecycles import lives
from esper.karn.losses import missed_by_sinks
from esper.karn.sql import run_names
from esper.karn.summary import EpisodeLife, RunSummary
from esper.leyline.atomic_io import write_atomically
from esper.leyline.text import cut, escape, printable

PILL = {"finished": "good", "running": "", "failed": "bad", "killed": "bad", "interrupted": "warn"}
GROWN = "grown"
"""The environment of `esper grow` that is not a baseline."""
DEEPEST = 20
"""Maximum depth of nested values that are shown."""
VIEWS_COMPARED = 4
"""Episodes shown in detail per run if there are several runs."""


def write(runs: Sequence[RunSummary], out: Path) -> Path:
    """Write the report atomically and return its path."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page(runs).encode("utf-8", errors="backslashreplace"))
    return out


def page(runs: Sequence[RunSummary]) -> str:
    """Return the HTML of the report."""
    template = files("esper.karn").joinpath("template.html").read_text(encoding="utf-8")
    before, rest = template.split("<!--title-->")
    between, after = rest.split("<!--body-->")
    if len({run.path.resolve() for run in runs}) == len(runs):
        for run, name in zip(runs, run_names([run.path for run in runs]), strict=True):
            run.name = name
    if len(runs) == 1:
        title, body = title_of(runs[0]), header(runs[0]) + run_body(runs[0])
    else:
        title = f"{len(runs)} runs compared"
        body = comparison(runs) + "".join(
            f'<details class="run" id="run{i}"><summary>{escape(title_of(run))}</summary>{header(run, "h2")}'
            f"{run_body(run, VIEWS_COMPARED)}</details>"
            for i, run in enumerate(runs)
        )
    return before + escape(title) + between + body + footer(runs) + after


def run_body(run: RunSummary, most: int = sections.MOST_VIEWS) -> str:
    """Return the sections of one run."""
    return "".join((
        health(run), sections.results(run), held_out(run), sections.curves(run), sections.rounds(run),
        lives(run, most), sections.updates(run), sections.phase_times(run), sections.records(run),
    ))  # fmt: skip


def title_of(run: RunSummary) -> str:
    """Return the directory name: a copied run keeps its run id and would be ambiguous."""
    return printable(run.name or run.path.resolve().name)


# -- header


def header(run: RunSummary, tag: str = "h1") -> str:
    """Return the header of a run: status, facts, command, configuration and versions."""
    config = run.manifest.get("config")
    facts: dict[str, Any] = {name: run.about(name) for name in ("task", "controller", "seed")}
    if facts["controller"] is None and isinstance(config, dict):
        facts |= {
            k: config.get(k) for k in ("controller", "seed") if facts[k] is None and not isinstance(config.get(k), dict)
        }
    first_name = run.manifest.get("run_id")
    facts["run id"] = first_name if first_name != run.path.resolve().name else None
    facts["started"] = when(run.manifest.get("started"))
    facts["took" if run.status != "running" else "so far"] = (
        None if run.wall_s is None else spoken(run.wall_s, "seconds")
    )
    facts["environments"] = len(run.envs) or None
    facts["rounds"] = run.about("rounds") if (run.about("rounds") or 1) > 1 else None
    facts["epochs"] = run.about("steps")
    host = run.about("host_params")
    facts["host"] = None if host is None else f"{spoken(host, 'count')} parameters"
    device, threads = run.about("device"), run.about("threads")
    facts["on"] = None if device is None else f"{device}, {threads} thread{'s' if threads != 1 else ''}"
    rows = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(cut(str(v)))}</dd></div>" for k, v in facts.items() if v is not None
    )
    command = run.manifest.get("command") or run.started.get("command")  # the manifest's command includes its options
    command_line = (
        f'<p class="soft" style="margin-top:6px"><code>{escape(cut(str(command)))}</code></p>' if command else ""
    )
    rest = {k: v for k, v in run.manifest.items() if k not in ("run_id", "status", "task", "command", "config")}
    folds = "".join(
        f"<details><summary>{name}</summary>{tree(value)}</details>"
        for name, value in (("Configuration", config), ("Versions and everything else", rest))
        if value
    )
    return (
        f'<header><p class="brand">Esper run</p><div class="top"><{tag}>{escape(title_of(run))}</{tag}>'
        f'<span class="pill {PILL.get(run.status, "")}">{escape(run.status)}</span></div>{command_line}'
        f'<dl class="facts">{rows}</dl>{folds}</header>'
    )


def when(stamp: Any) -> str | None:
    """Format a time stamp: 2025-11-15T22:16:40.123+00:00 → 2025-11-15 22:16 UTC."""
    if not isinstance(stamp, str):
        return None
    utc = stamp.endswith(("Z", "+00:00"))
    return stamp[:16].replace("T", " ") + (" UTC" if utc else "") if stamp[10:11] == "T" else stamp


def tree(value: Any, depth: int = 0) -> str:
    """Return a nested value as a foldable HTML list."""
    if not isinstance(value, dict):
        return f"<code>{escape(plain(value))}</code>"
    if depth == DEEPEST:
        return "<code>…</code>"
    rows = "".join(
        f"<li><details><summary>{escape(cut(str(k)))}</summary>{tree(v, depth + 1)}</details></li>"
        if isinstance(v, dict) and v
        else f"<li>{escape(cut(str(k)))}: <code>{escape(plain(v))}</code></li>"
        for k, v in value.items()
    )
    return f'<ul class="tree">{rows}</ul>'


def plain(value: Any) -> str:
    """Return a value as text, cut to the maximum length."""
    if isinstance(value, str):
        return cut(value)
    try:
        return "none" if value is None else str(value).lower() if isinstance(value, bool) else cut(str(value))
    except RecursionError:
        return "…"


# -- problems


def troubles(run: RunSummary) -> list[tuple[str, str]]:
    """Return the problems of a run as (severity, text), errors first."""
    problems: list[tuple[str, str]] = []
    error = run.manifest.get("error") or (run.finished or {}).get("error")
    if run.status == "failed":
        problems.append(("error", f"The run failed: {error or 'no reason recorded'}"))
    elif run.status == "killed":
        problems.append(
            ("error", "The run was killed: it neither goes on nor ended by itself. What it wrote is shown.")
        )
    elif run.status == "interrupted":
        problems.append(("warning", "The run was interrupted before its end."))
    if run.manifest_damage:
        problems.append(("warning", f"{run.manifest_damage}. What is shown comes from the journal."))
    problems += [(str(h.get("severity")), f"{h.get('source')}: {words(h)}") for h in run.health
              if h.get("severity") in ("warning", "error")]  # fmt: skip
    problems += [("error", f"The journal is incomplete: {text}.") for text in run.losses]
    if run.damage.lines or run.unreadable:
        problems.append(("warning", f"{run.damage.lines + run.unreadable} lines of the journal could not be read."))
    if run.damage.torn and run.status not in ("running", "killed"):
        problems.append(("warning", "The journal ends within a line."))
    problems += [("error", text) for text in not_finite(run)]
    undone = [g for g in run.governor if g.get("action") == "rolled back"]
    for g in undone[:20]:
        limit = f", limit {spoken(g['limit'])}" if g.get("limit") is not None else ""
        back = f", back to epoch {g['restored_step']}" if g.get("restored_step") is not None else ""
        name = run.envs[g["env"]].name if g.get("env") in run.envs else f"env {g.get('env')}"
        problems.append(("warning", f"Governor, {name}, epoch {g.get('step')}: {g.get('alarm')} "
                                 f"({spoken(g.get('value'))}{limit}) → {g.get('action')}{back}"))  # fmt: skip
    if len(undone) > 20:
        problems.append(("warning", f"Governor: {len(undone) - 20} more rollbacks"))
    watched = Counter(str(g.get("alarm")) for g in run.governor if g.get("action") != "rolled back")
    if watched:
        each = ", ".join(f"{alarm} {count} times" if count > 1 else alarm for alarm, count in watched.most_common(5))
        problems.append(("warning", f"Governor: {sum(watched.values())} alarms that needed no rollback ({each})"))
    return sorted(((severity, printable(text)) for severity, text in problems), key=lambda each: each[0] != "error")


def not_finite(run: RunSummary) -> list[str]:
    """Return one text if the last measured quality or loss of some environment is not a finite number."""
    broken = []
    for env in run.envs.values():
        last = [] if env.latest is None else [env.latest.steps.last(name) for name in ("quality", "val_loss")]
        if any(isinstance(value, float) and not isfinite(value) for value in last):
            broken.append(env.name)
    more = f" and in {len(broken) - 1} more" if len(broken) > 1 else ""
    return [f"Quality or loss is not finite in {broken[0]}{more}."] if broken else []


def words(health: Mapping[str, Any]) -> str:
    """Return the text of a `health` event. For the hub's last one, list the events that each sink missed."""
    missed = missed_by_sinks(health.get("counters"))
    if not missed or "emitted" not in (health.get("counters") or {}):
        return str(health.get("text"))
    each = "; ".join(f"sink {name} missed {count:,.0f}" for name, count in missed.items())
    return f"of {health['counters']['emitted']:,.0f} events {each}"


def health(run: RunSummary) -> str:
    """Return the section on problems, or a line that there are none."""
    problems = troubles(run)
    if not problems:
        events = spoken(sum(run.kinds.values()), "count")
        return f'<p class="health">No problems: {events} events, none lost; no alarm.</p>'
    return trouble("Problems", problems)


def trouble(title: str, problems: Sequence[tuple[str, str]]) -> str:
    """Return a list of problems as a section."""
    rows = "".join(f'<li><b class="{escape(s)}">{escape(s)}</b> {escape(text)}</li>' for s, text in problems)
    return f'<section class="trouble" role="alert"><h2>{escape(title)}</h2><ul>{rows}</ul></section>'


# -- several runs


def comparison(runs: Sequence[RunSummary]) -> str:
    """Compare runs: mean and range of quality over each run's environments, and results relative to the first."""
    percent = all(sections.units(r)[0] == "percent" for r in runs)
    unit, points = ("percent", "points") if percent else ("number", "number")
    groups = [compared(run) for run in runs]
    first = average([e.quality for e in groups[0][0][1]])
    quality: list[Series] = []
    rows: list[tuple[str, ...]] = []
    for i, (run, group) in enumerate(zip(runs, groups, strict=True)):
        mean, spread = sections.over_steps(group[0][1], "quality")
        quality.append(Series(title_of(run), mean, i, spread if len(group[0][1]) > 1 else (), key=f"run{i}"))
        for name, episodes in group:
            own = not name or name == GROWN
            final = average([e.quality for e in episodes])
            gain = None if final is None or first is None else final - first
            facts = [
                str(run.about(k) if own and run.about(k) is not None else "") for k in ("task", "controller", "seed")
            ]
            pill = f'<span class="pill {PILL.get(run.status, "")}">{escape(run.status)}</span>'
            link = f'<a href="#run{i}">{escape(title_of(run))}</a>'
            rows.append((
                link if own else f'<span class="soft">beside it: {escape(name)}</span>', *map(escape, facts),
                pill if own else "", str(len(episodes)), cell(final, unit),
                "" if not rows else cell(gain, points),
                cell(max((q for e in episodes if (q := e.quality_best) is not None), default=None), unit),
                cell(average([e.recorded("test_quality") for e in episodes]), unit),
                cell(average([e.params for e in episodes]), "count"),
                cell(run.wall_s, "seconds") if own else "",
            ))  # fmt: skip
    heads = ("run", "task", "controller", "seed", "status", "envs", "quality", "vs first", "best", "test",
             "params", "time")  # fmt: skip
    says = "Mean over a run's environments, latest episodes; the band spans the worst and the best."
    chart = Chart("Quality after each epoch", quality, says, unit, height=320)
    chart.x_range = (0.0, max((x for s in quality for x, _ in s.points), default=1.0))
    body = table(heads, rows, right=range(5, 12), caption="Runs")
    body += legend([(f"run{i}", title_of(run), i, True) for i, run in enumerate(runs)]) + render(chart)
    says = "Means over the latest episode of every environment" + ("; differences in points." if percent else ".")
    return (
        f'<header><p class="brand">Esper report</p><h1>{len(runs)} runs compared</h1></header>'
        + section("Side by side", says, body)
        + "".join(trouble(title_of(run), problems) for run in runs if (problems := troubles(run)))
    )


def compared(run: RunSummary) -> list[tuple[str, list[EpisodeLife]]]:
    """Return the run's own episodes, then its baselines, by name. Without baselines: one group with an empty name."""
    latest = run.latest
    if not any(e.name == GROWN for e in latest):
        return [("", latest)]
    names = dict.fromkeys([GROWN, *(e.name for e in latest)])
    return [(name, [e for e in latest if e.name == name]) for name in names]


def average(values: Sequence[Value]) -> Value:
    """Return the mean of the measured values; None if there are none."""
    measured = [v for v in values if v is not None]
    return sum(measured) / len(measured) if measured else None


def footer(runs: Sequence[RunSummary]) -> str:
    """Return the footer: number of events and Esper versions."""
    versions_of_runs = [versions for r in runs if isinstance(versions := r.manifest.get("versions"), dict)]
    made = "".join(
        f", Esper {escape(cut(v))}" for v in sorted({str(each.get("esper") or "") for each in versions_of_runs}) if v
    )
    events = spoken(sum(sum(r.kinds.values()) for r in runs), "count")
    return f"<footer>Made from {events} events{made}. This file needs no network.</footer>"
