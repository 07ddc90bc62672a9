"""The section of the report on seeds: their stages, alpha, worth and Shapley values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from esper.karn.charts import Chart, Series, Value, legend, render, spoken, whole_ticks, x_labels
from esper.karn.html import STAGE_TEXT, plus_minus, section
from esper.karn.sections import MOST_LINES, MOST_VIEWS, in_points, label, units, views
from esper.karn.summary import EpisodeLife, Interval, RunSummary, SlotLife
from esper.leyline.stages import COOLING, GROWING, SeedStage
from esper.leyline.text import escape

LIVE = (*GROWING, SeedStage.FOSSILIZED)


def lives(run: RunSummary, most: int = MOST_VIEWS) -> str:
    """Return the seed lifecycles: stage bars of several episodes, and one panel per episode."""
    chosen = [e for e in views(run)[:most] if any(s.was_used() for s in e.slots.values())]
    if not chosen:
        return ""
    marks = "".join(f'<span title="{escape(t)}"><i class="{k}"></i>{k}</span>' for k, t in STAGE_TEXT.items())
    body = f'<div class="legend stages">{marks.replace(">cooling<", ">removed, resting<")}</div>'
    total = len(run.episodes)
    says = "Each bar is a stage of a seed's life in its slot, named by its blueprint."
    if len(chosen) > 1:
        length = max(e.length for e in chosen)
        body += '<div class="lanes small">' + "".join(
            f'<div class="lane name"><b>{escape(label(run, e))}</b></div>' + lanes(e, length)
            for e in chosen[:MOST_LINES]
        )
        body += axis(length) + "</div>"
        if len(chosen) < total:
            says += f" {len(chosen)} of {total} episodes have details here: those that grew something, the best first."
    options = "".join(f"<option>{escape(label(run, e))}</option>" for e in chosen)
    if len(chosen) > 1:
        body += f'<label class="pick">Details of <select data-panels>{options}</select></label>'
    return section("The lives of seeds, and what they were worth", says, body + "".join(panel(run, e) for e in chosen))


def panel(run: RunSummary, e: EpisodeLife) -> str:
    """Return the panel of one episode: stages, alpha, worth and Shapley values."""
    _, unit = units(run)
    used = [s for s in e.slots.values() if s.was_used()]
    colour = {name: i for i, name in enumerate(run.slots)}
    span = (0.0, float(max(1, e.length)))
    alpha = [Series(s.name, alpha_points(s), colour[s.name], stairs=True) for s in used]
    worth = [line for s in used for line in worth_lines(s, colour[s.name])]
    charts = [
        Chart("Alpha: how much of each seed reaches the host", alpha, x_range=span, zero=True, height=130,
              marks=[(1.0, "full strength")]),
        Chart("Worth: quality with the seed minus quality without it" + in_points(unit),
              worth, "Band: ± 1 standard error. Dotted: what a seed still in training would add. Dashed: of a "
              "committed seed, what the network would lose without it now.", unit, x_range=span, zero=True, height=230),
    ]  # fmt: skip
    items = [(s.name, s.name, colour[s.name], True) for s in used]
    return (
        f'<div class="panel scope"><div class="lanes"><h4>{escape(label(run, e))}</h4>{lanes(e, e.length)}'
        f"{axis(e.length)}</div>{legend(items)}{''.join(render(c) for c in charts)}{worth_bars(e, colour, unit)}</div>"
    )


def lanes(e: EpisodeLife, length: int) -> str:
    """Return one row of stage bars per used slot."""
    rows = []
    for slot in e.slots.values():
        if slot.was_used():
            bars = "".join(_bar(slot.name, i, max(1, length)) for i in joined(slot.intervals, COOLING))
            rows.append(f'<div class="lane"><b title="{escape(slot.name)}">{escape(slot.name)}</b>'
                        f'<div class="track">{bars}</div></div>')  # fmt: skip
    return "".join(rows)


def joined(intervals: Sequence[Interval], stages: Iterable[SeedStage]) -> list[Interval]:
    """Join consecutive intervals whose stages are among `stages`."""
    out: list[Interval] = []
    for i in intervals:
        if out and {i.stage, out[-1].stage} <= set(stages) and i.start == out[-1].end + 1:
            out[-1] = Interval(out[-1].stage, out[-1].blueprint, out[-1].start, i.end)
        else:
            out.append(i)
    return out


def _bar(slot: str, i: Interval, length: int) -> str:
    kind = "cooling" if i.stage in COOLING else i.stage.name.lower()
    width = 100 * (i.end - i.start + 1) / length
    text = i.blueprint if width > 4 and kind != "cooling" else ""
    when = f"epoch {i.start}" if i.start == i.end else f"epochs {i.start} to {i.end}"
    tip = f"{i.blueprint or 'seed'} in {slot}\n{kind.replace('cooling', 'removed, slot resting')}, {when}"
    return (
        f'<div class="bar {kind}" style="left:{100 * (i.start - 1) / length:.2f}%;width:{width:.2f}%" role="img" '
        f'aria-label="{escape(tip)}" data-tip="{escape(tip)}">{escape(text)}</div>'
    )


def axis(length: int) -> str:
    """Return the epoch axis below stage bars."""
    span = float(max(1, length))
    return f'<div class="xs" aria-hidden="true">{x_labels(whole_ticks(0.0, span), 0.0, span)}<em>epoch</em></div>'


def alpha_points(slot: SlotLife) -> list[tuple[float, Value]]:
    """Return alpha while the slot has a live seed. Epoch n lasts from n − 1 to n, as in the bars."""
    points: list[tuple[float, Value]] = []
    for start, end in ((i.start, i.end) for i in joined(slot.intervals, LIVE) if i.stage in LIVE):
        at_start = [a for step, a in slot.alpha if step <= start]
        if not at_start:
            continue
        points.append((start - 1.0, at_start[-1]))
        points += [(step - 1.0, a) for step, a in slot.alpha if start < step <= end]
        points += [(float(end), points[-1][1]), (float(end), None)]
    return points


def worth_lines(slot: SlotLife, colour: int) -> list[Series]:
    """Return the curves of contribution, of a committed seed's dependence, and of the prospect while in training."""
    t = slot.worth
    kinds = (
        (slot.name, "contribution", False, ""),
        (f"{slot.name}, committed: dependence", "contribution", True, "dash"),
        (f"{slot.name}, in training: prospect", "prospect", False, "dot"),
    )
    lines = []
    rows = list(zip(*(t.column(name) for name in ("step", "seed", "committed")), strict=True))
    for name, field, committed, dash in kinds:
        points: list[tuple[float, Value]] = []
        errors: list[tuple[float, Value, Value]] = []
        for (x, seed, done), y, se, before in zip(
            rows, t.column(field), t.column(f"{field}_se"), [None, *rows][: len(rows)], strict=True
        ):
            if y is None or bool(done) != committed or (before is not None and before[1] != seed):
                points.append((x or 0.0, None))
                errors.append((x or 0.0, None, None))
            if y is not None and bool(done) == committed:
                points.append((x or 0.0, y))
                is_finite = se is not None and math.isfinite(se) and math.isfinite(y)
                errors.append((x or 0.0, y - se, y + se) if is_finite and se is not None else (x or 0.0, None, None))
        if any(y is not None for _, y in points):
            lines.append(Series(name, points, colour, errors, key=slot.name, dash=dash))
    return lines


def worth_bars(e: EpisodeLife, colour: dict[str, int], unit: str) -> str:
    """Return each seed's last measured Shapley value, with its standard error, as bars."""
    measured: list[tuple[SlotLife, int, float, float, Value]] = []
    for slot in e.slots.values():
        t = slot.worth
        last: dict[int, tuple[float, float, Value]] = {}
        for x, seed, y, se in zip(
            t.column("step"), t.column("seed"), t.column("shapley"), t.column("shapley_se"), strict=True
        ):
            if y is not None and x is not None:
                last[int(seed or 0)] = (x, y, se)
        measured += [(slot, seed, *row) for seed, row in last.items()]
    if not measured:
        return ""
    spans = [(y - (se or 0.0), y + (se or 0.0)) for *_, y, se in measured if math.isfinite(y)]
    low = min([0.0, *(a for a, _ in spans if math.isfinite(a))])
    high = max([0.0, *(b for _, b in spans if math.isfinite(b))])
    width = (high - low) or 1.0

    def at(y: float) -> float:
        return 100 * (y - low) / width

    rows = []
    for slot, seed, x, y, se in measured:
        when = "at the end" if x >= e.length else f"epoch {x:.0f}"
        beam = f'<s style="left:{at(0):.2f}%"></s>'
        if math.isfinite(y):
            beam += f'<i style="left:{at(min(y, 0)):.2f}%;width:{abs(at(y) - at(0)):.2f}%"></i>'
            if se is not None and math.isfinite(se):
                beam += f'<u style="left:{at(y - se):.2f}%;width:{at(y + se) - at(y - se):.2f}%"></u>'
        name = f"{escape(slot.name)} <small>{escape(slot.blueprints.get(seed, ''))}, {when}</small>"
        rows.append(f'<div class="name">{name}</div><div class="beam c{colour[slot.name] % 8}">{beam}</div>'
                    f'<div class="num">{escape(spoken(y, unit))}{plus_minus(se, unit)}</div>')  # fmt: skip
    return (
        f'<figure class="chart"><figcaption><h3>Shapley value of each seed{in_points(unit)}</h3><p class="says">'
        "Its share of what all seeds contribute together, averaged over all orders of adding them, as last measured; "
        f'± 1 standard error.</p></figcaption><div class="bars">{"".join(rows)}</div></figure>'
    )
