"""The report: one self-contained HTML file about one run or several side by side.

It is the page of `esper dash` with style, scripts and the data of the runs inside. Nothing is loaded from elsewhere,
and its content security policy allows no other script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from esper.karn.comparison import compare_runs
from esper.karn.document import Json, clean, detail, document, series_rows
from esper.karn.run_state import RunState
from esper.karn.sql import run_names
from esper.leyline.atomic_io import write_atomically
from esper.leyline.errors import EsperError
from esper.leyline.events import spelled
from esper.leyline.text import printable

MOST_ENVS = 24
"""Maximum number of environments with their own curves. The mean of all is always there."""
MOST_DETAILS = 12
"""Maximum number of environments with the lives of their seeds, those that grew something first."""
MOST_EXPLAINED = 4
"""Maximum number of them whose decisions are explained."""
MOST_POINTS = 8192
"""Maximum number of points of all curves together. Above it, curves keep minimum and maximum of groups of epochs."""
MOST_DIFFERENCES = 50
"""Maximum number of worlds whose first different decision is listed; `esper compare --json` has all."""
WEB = files("esper.karn").joinpath("web")
POLICY = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; {}">'
STYLE_LINK = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
SCRIPT_LINK = re.compile(r'<script src="([^"]+)"></script>')
"""`index.html` owns the list of styles and scripts and their order. The server and the report read it there."""


Explains = Callable[[Path, int | None], Json | None]
"""Returns the explained operations of an environment, or (None) the importance of features, of a run directory."""


def no_explanations(_path: Path, _env: int | None) -> Json | None:
    """Explain nothing: the report has no panel of decisions."""
    return None


def write(runs: Sequence[RunState], out: Path, explains: Explains = no_explanations) -> Path:
    """Write the report atomically and return its path."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page(runs, explains).encode("utf-8", errors="backslashreplace"))
    return out


def page(runs: Sequence[RunState], explains: Explains = no_explanations) -> str:
    """Return the HTML of the report."""
    if len({run.path.resolve() for run in runs}) == len(runs):
        for run, name in zip(runs, run_names([run.path for run in runs]), strict=True):
            run.name = printable(name)
    data: Json = {"runs": [run_data(run, MOST_DETAILS // len(runs) or 1, explains) for run in runs]}
    if len(runs) > 1:
        data["comparison"] = compared([run.path for run in runs])
    content = script_json(data)
    html = web_file("index.html")
    styles = [web_file(name) for name in STYLE_LINK.findall(html)]
    scripts = [web_file(name) for name in SCRIPT_LINK.findall(html)]
    policy = POLICY.format(f"style-src {hashes(styles)}; script-src {hashes(scripts)}")
    html = html.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}')
    html = STYLE_LINK.sub(lambda link: f"<style>{web_file(link[1])}</style>", html)
    html = SCRIPT_LINK.sub(lambda link: f"<script>{web_file(link[1])}</script>", html)
    before, tag, after = html.partition("<script>")
    return f'{before}<script type="application/json" id="data">{content}</script>\n{tag}{after}'


def compared(paths: Sequence[Path]) -> Json:
    """Return the paired comparison of runs as data, or a note why there is none. First differences are bounded."""
    try:
        comparison: Json = msgspec.to_builtins(compare_runs(paths))
    except EsperError as error:
        comparison = {"arms": [], "pairs": [], "notes": [str(error)]}
    for pair in comparison["pairs"]:
        if pair["choices"] is not None:
            differences = pair["choices"]["first_differences"]
            pair["choices"]["differing_worlds"] = len(differences)
            del differences[MOST_DIFFERENCES:]
    return dict(clean(spelled(comparison)))


def run_data(run: RunState, most_details: int, explains: Explains = no_explanations) -> Json:
    """Return the document of a run with its bounded number of curves and of seed lives."""
    content = document(run)
    shown = [int(index) for index in content["series"]][:MOST_ENVS]
    points = max(64, MOST_POINTS // max(1, len(shown)))
    content["series"] = {
        index: series_rows(e.steps, most=points) | {"episode": e.number}
        for index in shown
        if (e := run.envs[index].latest) is not None
    }
    grown = sorted(run.latest, key=lambda e: (not e.seeds, run.best is not e))[:most_details]
    details = {str(e.env): detail(run, e.env) for e in grown}
    if run.best is not None and run.best is not run.envs[run.best.env].latest:
        details["best"] = detail(run, None)
    envs = list(dict.fromkeys(e.env for e in [run.best, *grown] if e is not None))[:MOST_EXPLAINED]
    explained: Json = {str(env): clean(explains(run.path, env)) for env in envs}
    explained["features"] = clean(explains(run.path, None))
    return {"document": content, "details": details, "explained": explained}


def web_file(name: str) -> str:
    """Return a file of the page."""
    return WEB.joinpath(name).read_text(encoding="utf-8")


def hashes(texts: Sequence[str]) -> str:
    """Return the sources of a content security policy that allow exactly these inline texts."""
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def script_json(data: Any) -> str:
    """Return JSON for a script element. `<` is always escaped, so no name can close the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
