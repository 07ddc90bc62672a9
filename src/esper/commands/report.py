"""`esper report`: one run, or several side by side, as one HTML file and a short summary in the terminal."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from esper.commands import plainly
from esper.commands.explained_run import explain_run
from esper.karn import report
from esper.karn.document import COUNTED
from esper.karn.episode_state import EpisodeState
from esper.karn.formatting import number_text
from esper.karn.problems import problems
from esper.karn.run_state import RunState
from esper.leyline.errors import ConfigError
from esper.leyline.events import spelled
from esper.leyline.text import printable
from esper.nissa.run_list import find_run

MOST_LINES = 20
"""Maximum number of environments listed in the terminal."""
TOP_PHASES = 3


def run_report(runs: list[Path], out: Path | None, as_json: bool, open_browser: bool) -> None:
    """Write the report (into the run, or `./report.html` for several) and print a summary. No run: the newest one."""
    runs = runs or [newest_run()]
    out = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if out.is_dir():
        out = out / "report.html"
    summaries = [RunState.of(path) for path in runs]
    try:
        report.write(summaries, out, explain_run)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}. Use --out to choose another path") from error
    if as_json:
        print(json.dumps(spelled({"report": str(out), "runs": [facts(s) for s in summaries]}), indent=1))
    else:
        console = Console()
        for summary in summaries:
            console.print(digest(summary))
        plainly(console, f"report: {out}")
    if open_browser:
        webbrowser.open(out.absolute().as_uri())


def newest_run() -> Path:
    """Return the newest run in runs/. Raise if there is none."""
    run = find_run(Path("latest"))
    if run is None:
        raise ConfigError("there is no run in runs/. Start one, for instance: esper grow --task rescue")
    return run


# -- terminal output


def digest(run: RunState) -> Group:
    """Return the results per environment, the longest phases, and any problems."""
    parts: list[Any] = [f"[b]{escape(run.name)}[/b]  {headline(run)}"]
    latest = run.latest
    if latest:
        unit = "percent" if run.is_percent else "number"
        table = Table("", box=None, pad_edge=False)
        for head in ("quality", "best", "params", "seeds", "fossils", "pruned", "time"):
            table.add_column(head, justify="right")
        for e in latest[:MOST_LINES]:
            name = escape(printable(label(run, e), 100))
            table.add_row(name, shown(e.quality, unit), shown(e.best, unit),
                          shown(e.params, "count"), *(str(e.count(stage)) for stage in COUNTED),
                          shown(e.wall_s, "seconds"))  # fmt: skip
        parts.append(table)
        if len(latest) > MOST_LINES:
            parts.append(f"[dim]and {len(latest) - MOST_LINES} more environments[/dim]")
    if phases := run.phases:
        whole = sum(p.wall_ms for p in phases) or 1.0
        top = ", ".join(
            f"{escape(printable(p.phase, 50))} {100 * p.wall_ms / whole:.0f} %" for p in phases[:TOP_PHASES]
        )
        parts.append(f"time: {top}")
    issues = problems(run)
    colour = {"error": "red", "warning": "yellow"}
    parts += [f"[{colour.get(kind, 'yellow')}]{escape(kind)}[/]: {escape(text)}" for kind, text in issues]
    parts.append("" if issues else f"[dim]no problems: {sum(run.kinds.values())} events, none lost[/dim]")
    return Group(*parts)


def label(run: RunState, episode: EpisodeState) -> str:
    """Return the name of an episode, with its number if an environment has several."""
    if run.episodes == len(run.latest):
        return episode.name
    return f"{episode.name}, {'round' if run.newest_update is not None else 'episode'} {episode.number}"


def headline(run: RunState) -> str:
    """Return status, task, controller, seed and duration of a run."""
    facts = [run.status, run.about("task"), run.about("controller")]
    facts += [f"seed {run.about('seed')}"] if run.about("seed") is not None else []
    facts += [number_text(run.wall_s, "seconds")] if run.wall_s is not None else []
    return escape(", ".join(printable(str(f), 200) for f in facts if f))


def shown(value: float | None, unit: str) -> str:
    """Format a value, or "not measured"."""
    return "[dim]not measured[/dim]" if value is None else number_text(value, unit)


# -- JSON output


def facts(run: RunState) -> dict[str, Any]:
    """Return the summary as data."""
    return {
        "run": run.name,
        "run_id": run.manifest.get("run_id"),
        "path": str(run.path),
        "status": run.status,
        **{name: run.about(name) for name in ("task", "controller", "seed")},
        "wall_s": run.wall_s,
        "events": run.kinds,
        "environments": [
            {
                "env": e.env,
                "name": e.name,
                "episode": e.number,
                "steps": e.length,
                "quality": e.quality,
                "quality_best": e.best,
                "params": e.params,
                **{stage.name.lower(): e.count(stage) for stage in COUNTED},
                "wall_s": e.wall_s,
            }
            for e in run.latest
        ],
        "phases": {p.phase: {"wall_ms": p.wall_ms, "cpu_ms": p.cpu_ms, "calls": p.calls} for p in run.phases},
        "health": [{"severity": severity, "text": text} for severity, text in problems(run)],
    }
