"""HTML elements of the report. Texts are escaped here; cells and bodies must be HTML already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from esper.karn.charts import Value, spoken
from esper.leyline.stages import COOLING, SeedStage
from esper.leyline.text import escape

STAGE_TEXT = {
    "germinated": "germinated: attached, nothing learnt yet",
    "training": "training: learns, the host cannot feel it",
    "blending": "blending: joins the host step by step",
    "holding": "holding: full strength, waiting for the verdict",
    "fossilized": "fossilised: part of the host for good",
    "cooling": "removed: the slot rests",
}


def section(title: str, says: str, body: str, scope: str = "scope") -> str:
    """Return a section with a title and a note; "" if the body is empty."""
    note = f'<p class="says">{escape(says)}</p>' if says else ""
    return f'<section class="{scope}"><h2>{escape(title)}</h2>{note}{body}</section>' if body else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), caption: str) -> str:
    """Return a table. Cells must be escaped HTML. Columns in `right` are right-aligned."""

    def side(i: int) -> str:
        return ' class="r"' if i in right else ""

    head = "".join(f'<th scope="col"{side(i)}>{escape(h)}</th>' for i, h in enumerate(heads))
    body = "".join("<tr>" + "".join(f"<td{side(i)}>{c}</td>" for i, c in enumerate(row)) + "</tr>" for row in rows)
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def cell(value: Value, unit: str = "number") -> str:
    """Format a number; a dash with an explanation if it was not measured."""
    if value is None:
        return '<span class="soft" title="not measured">–</span>'
    return escape(spoken(value, unit))


def plus_minus(se: Value, unit: str) -> str:
    """Format a standard error; "" if there is none."""
    return "" if se is None else f" ± {escape(spoken(se, unit).lstrip('+'))}"


def chip(stage: str) -> str:
    """Return a stage name as a coloured label."""
    name = stage.lower()
    kind = name if name in STAGE_TEXT else "cooling" if SeedStage.__members__.get(stage.upper()) in COOLING else ""
    return f'<span class="chip {kind}">{escape(name)}</span>' if kind else escape(name)


def folded(title: str, shown: int, total: int, body: str) -> str:
    """Return a foldable element with the number of rows in its title."""
    count = f"{shown}" if shown == total else f"{shown} of {total}; <code>esper sql</code> reads them all"
    return f"<details><summary>{escape(title)} <small>({count})</small></summary>{body}</details>"
