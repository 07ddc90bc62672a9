"""The sections of a report: each function takes a run's summary and returns HTML, "" if there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from esper.karn.charts import Chart, Series, Value, legend, render, spoken, whole_ticks, x_labels
from esper.karn.summary import UNMEASURED, EpisodeLife, Interval, RunSummary, SlotLife
from esper.leyline.stages import COOLING, GROWING, SeedStage
from esper.leyline.text import escape

MOST_LINES = 8
"""Maximum number of environments drawn as separate lines. Above it, their mean and range are drawn."""
MOST_VIEWS = 12
"""Maximum number of episodes shown in detail."""
MOST_ROWS = 250
"""Maximum number of rows of a table. The journal has all of them."""
QUALIFIERS = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
LIVE = (*GROWING, SeedStage.FOSSILIZED)
STAGE_TEXT = {
    "germinated": "germinated: attached, nothing learnt yet",
    "training": "training: learns, the host cannot feel it",
    "blending": "blending: joins the host step by step",
    "holding": "holding: full strength, waiting for the verdict",
    "fossilized": "fossilised: part of the host for good",
    "cooling": "removed: the slot rests",
}


# -- HTML elements


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


# -- selection of what is shown of a large run

_Answer = TypeVar("_Answer")
_answers: WeakKeyDictionary[RunSummary, dict[Any, Any]] = WeakKeyDictionary()


def asked_often(question: Callable[[RunSummary], _Answer]) -> Callable[[RunSummary], _Answer]:
    """Cache the result until the run has new entries."""

    @wraps(question)
    def answer(run: RunSummary) -> _Answer:
        known = _answers.setdefault(run, {})
        state = sum(run.kinds.values())
        if known.get(question, (None,))[0] != state:
            known[question] = (state, question(run))
        kept: _Answer = known[question][1]
        return kept

    return answer


@asked_often
def views(run: RunSummary) -> list[EpisodeLife]:
    """Return the episodes shown in detail: all, or the best one and the latest of the first environments."""
    episodes = run.episodes
    if len(episodes) <= MOST_VIEWS:
        return episodes
    latest = [env.latest for _, env in sorted(run.envs.items()) if env.latest is not None]
    ranked = [e for e in episodes if (q := e.quality) is not None and math.isfinite(q)]
    best = max(ranked, key=lambda e: e.quality or -math.inf, default=None)
    chosen = ([best] if best is not None else []) + [e for e in latest if e is not best]
    return chosen[:MOST_VIEWS]


def label(run: RunSummary, episode: EpisodeLife) -> str:
    """Return the name of an episode, with its number if an environment has several."""
    several = any(len(env.episodes) > 1 for env in run.envs.values())
    return f"{episode.name}, {episode_word(run)} {episode.episode}" if several else episode.name


def episode_word(run: RunSummary) -> str:
    """Return what an episode's number counts: rounds in training, else episodes."""
    return "round" if run.updates else "episode"


@asked_often
def units(run: RunSummary) -> tuple[str, str]:
    """Return the units of quality and worth: percent and points for fractions, else plain numbers."""
    seen = [q for e in run.episodes for q in (e.quality, e.quality_best) if q is not None and math.isfinite(q)]
    seen += [q for e in views(run) for q in e.steps.column("quality") if q is not None and math.isfinite(q)]
    return ("percent", "points") if all(0 <= q <= 1 for q in seen) else ("number", "number")


# -- results


def results(run: RunSummary) -> str:
    """Return the table of results, one row per environment."""
    unit, points = units(run)
    latest = [env.latest for _, env in sorted(run.envs.items()) if env.latest is not None]
    if not latest:
        return section("Results", "", '<p class="none">No step has been recorded yet.</p>')
    columns: dict[str, list[str]] = {}

    def put(head: str, text: str) -> None:
        columns.setdefault(head, []).append(text)

    bare = next((e for e in latest if any(other.grew_from(e) for other in latest)), None)
    measured = {k for e in latest for k, v in (e.result or {}).items() if v is not None}
    for e in latest:
        told = e.result or {}
        final, twin = e.quality, told.get("twin_quality")
        put("environment", escape(label(run, e)))
        put("quality", f"<b>{cell(final, unit)}</b>")
        put("best", cell(e.quality_best, unit))
        if "test_quality" in measured:
            put("test", cell(told.get("test_quality"), unit))
        if "twin_quality" in measured:
            put("over twin", cell(final - twin if final is not None and twin is not None else None, points))
        elif bare is not None and (base := bare.quality) is not None:
            gain = final - base if final is not None and e is not bare else None
            put("over no growth", "" if e is bare else cell(gain, points))
        host = told.get("host_params") or run.about("host_params")
        times = f' <span class="soft">{e.params / host:.2f}× host</span>' if e.params is not None and host else ""
        put("parameters", cell(e.params, "count") + times)
        put("seeds", f"{e.germinated} / {e.fossilized} / {e.pruned}")
        grown = ", ".join(f"{escape(str(b))} in {escape(str(s))}" for s, b in (told.get("structure") or {}).items())
        put("alive at the end", grown or '<span class="soft">nothing</span>' if e.result else cell(None))
        put("epochs", str(e.length))
        put("time", cell(e.wall_s, "seconds"))
    right = [i for i, head in enumerate(columns) if head not in ("environment", "alive at the end")]
    rows = zip(*columns.values(), strict=True)
    says = "Quality is measured on the validation split, test on data that had no part in any decision"
    against = next((head for head in ("over twin", "over no growth") if head in columns), None)
    unit_said = ", in points" if points == "points" else ""
    says += f"; {against}: against the same world without growth{unit_said}." if against else "."
    says += " Seeds: germinated / committed / pruned."
    if len(run.episodes) > len(latest):
        says += f" Shown is the latest episode of each environment, of {len(run.episodes)} in all."
    return section("Results", says, table(list(columns), rows, right=right, caption="Results"))


# -- curves


def over_steps(episodes: Sequence[EpisodeLife], name: str) -> tuple[list[tuple[float, Value]], list[Any]]:
    """Return mean and range of a column per step over episodes. Skip values not measured or not finite."""
    total: dict[float, list[float]] = {}
    for e in episodes:
        rows = e.steps.array()
        column = rows[:, e.steps.fields.index(name)]
        good = (column != UNMEASURED) & np.isfinite(column)
        for x, y in rows[good][:, [0, e.steps.fields.index(name)]].tolist():
            total.setdefault(x, []).append(y)
    steps = sorted(total)
    means: list[tuple[float, Value]] = [(x, sum(total[x]) / len(total[x])) for x in steps]
    return means, [(x, min(total[x]), max(total[x])) for x in steps]


def curve(episode: EpisodeLife, name: str) -> list[tuple[float, Value]]:
    """Return a column over steps, with gaps where steps are missing."""
    xs = [x or 0.0 for x in episode.steps.column("step")]
    points: list[tuple[float, Value]] = []
    for x, y in zip(xs, episode.steps.column(name), strict=True):
        if points and x > points[-1][0] + 1:
            points.append((points[-1][0] + 1, None))  # steps without a record
        points.append((x, y))
    return points


def curves(run: RunSummary) -> str:
    """Return charts of quality, losses and parameters over the latest episode of every environment."""
    unit, _ = units(run)
    latest = [env.latest for _, env in sorted(run.envs.items()) if env.latest is not None and len(env.latest.steps)]
    if not latest:
        return ""
    many, length = len(latest) > MOST_LINES, (0.0, float(max(e.length for e in latest)))
    shown = latest[:MOST_LINES]

    def lines(name: str) -> list[Series]:
        each = [
            Series(e.name, curve(e, name), i + many, key=f"e{e.env}", dash="thin" if many else "",
                   shown=not many, stairs=name == "params")
            for i, e in enumerate(shown)
        ]  # fmt: skip
        if many:
            mean, spread = over_steps(latest, name)
            each.insert(0, Series(f"mean of {len(latest)}", mean, 0, spread, key="mean"))
        return each

    quality = lines("quality")
    if len(latest) <= 4:
        quality += [s for i, e in enumerate(latest) if (s := _committed(e, i)) is not None]
    charts = [
        Chart("Quality after each epoch", quality, "On the validation split; dashed: without the seeds not yet "
              "committed." if len(quality) > len(shown) + many else "On the validation split.", unit,
              x_range=length, height=300),
        Chart("Validation loss", lines("val_loss"), x_range=length),
        Chart("Training loss", lines("train_loss"), x_range=length),
        Chart("Parameters of the network", lines("params"), unit="count", x_range=length, height=170),
    ]  # fmt: skip
    items = [(f"e{e.env}", e.name, i + many, not many) for i, e in enumerate(shown)]
    note = ""
    if many:
        items.insert(0, ("mean", f"mean and range of {len(latest)}", 0, True))
        note = f"the first {len(shown)} of {len(latest)} environments can be switched on"
    first, *rest = [render(c) for c in charts]
    body = legend(items, note) + f'<div class="grid2"><div class="wide">{first}</div>{"".join(rest[:2])}'
    body += f'<div class="wide">{rest[2]}</div></div>'
    says = "The latest episode of every environment." if len(run.episodes) > len(latest) else ""
    return section("How training went", says, body)


def _committed(e: EpisodeLife, colour: int) -> Series | None:
    both = zip(curve(e, "committed_quality"), curve(e, "quality"), strict=True)
    points = [(x, c if c != q else None) for (x, c), (_, q) in both]
    if all(y is None for _, y in points):
        return None
    return Series(f"{e.name}, without live seeds", points, colour, key=f"e{e.env}", dash="dash")


def rounds(run: RunSummary) -> str:
    """Return charts of the results per episode, "" if there is only one."""
    ended = [e for e in run.episodes if e.result is not None]
    if len({e.episode for e in ended}) < 2:
        return ""
    unit, word = units(run)[0], episode_word(run)

    def per_round(pick: Callable[[EpisodeLife], Value], name: str, colour: int, dash: str = "") -> Series:
        found: dict[int, list[float]] = {}
        for e in ended:
            value = pick(e)
            if value is not None and math.isfinite(value):
                found.setdefault(e.episode, []).append(value)
        order = sorted({e.episode for e in ended})
        points = [(float(r), sum(found[r]) / len(found[r]) if r in found else None) for r in order]
        spread = [(float(r), min(found[r]), max(found[r])) for r in order if r in found]
        return Series(name, points, colour, () if dash else spread, dash=dash)

    def told(key: str) -> Callable[[EpisodeLife], Value]:
        return lambda e: (e.result or {}).get(key)

    charts = [
        Chart(f"Quality at the end of each {word}", [per_round(lambda e: e.quality, "grown", 0),
              per_round(told("twin_quality"), "same worlds without growth", 7, "dash")],
              "Mean over environments; the band spans the worst and the best.", unit, word, height=240,
              legend=True),
        Chart("Parameters at the end", [per_round(lambda e: e.params, "parameters", 2)], unit="count",
              x_name=word, height=170),
        Chart(f"Seeds per {word}", [per_round(lambda e: e.germinated, "germinated", 5),
              per_round(lambda e: e.fossilized, "committed", 2), per_round(lambda e: e.pruned, "pruned", 7)],
              "Mean over environments.", x_name=word, height=170, zero=True, legend=True),
    ]  # fmt: skip
    first, *rest = [render(c) for c in charts]
    return section(
        f"{word.capitalize()} by {word}", "", f'<div class="grid2"><div class="wide">{first}</div>{"".join(rest)}</div>'
    )


# -- seed lifecycles


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
        Chart("Worth: quality with the seed minus quality without it" + (", in points" if unit == "points" else ""),
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
            bars = "".join(_bar(slot.name, i, max(1, length)) for i in merged(slot.intervals))
            rows.append(f'<div class="lane"><b title="{escape(slot.name)}">{escape(slot.name)}</b>'
                        f'<div class="track">{bars}</div></div>')  # fmt: skip
    return "".join(rows)


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Join the three stages of a cooldown into one interval."""
    out: list[Interval] = []
    for i in intervals:
        if out and i.stage in COOLING and out[-1].stage in COOLING and i.start == out[-1].end + 1:
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
    stretches: list[list[int]] = []
    for i in slot.intervals:
        if i.stage in LIVE:
            if stretches and i.start == stretches[-1][1] + 1:
                stretches[-1][1] = i.end
            else:
                stretches.append([i.start, i.end])
    for start, end in stretches:
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
                known = se is not None and math.isfinite(se) and math.isfinite(y)
                errors.append((x or 0.0, y - se, y + se) if known and se is not None else (x or 0.0, None, None))
        if any(y is not None for _, y in points):
            lines.append(Series(name, points, colour, errors, key=slot.name, dash=dash))
    return lines


def worth_bars(e: EpisodeLife, colour: dict[str, int], unit: str) -> str:
    """Return each seed's last measured Shapley value, with its standard error, as bars."""
    found: list[tuple[SlotLife, int, float, float, Value]] = []
    for slot in e.slots.values():
        t = slot.worth
        last: dict[int, tuple[float, float, Value]] = {}
        for x, seed, y, se in zip(
            t.column("step"), t.column("seed"), t.column("shapley"), t.column("shapley_se"), strict=True
        ):
            if y is not None and x is not None:
                last[int(seed or 0)] = (x, y, se)
        found += [(slot, seed, *row) for seed, row in last.items()]
    if not found:
        return ""
    spans = [(y - (se or 0.0), y + (se or 0.0)) for *_, y, se in found if math.isfinite(y)]
    low = min([0.0, *(a for a, _ in spans if math.isfinite(a))])
    high = max([0.0, *(b for _, b in spans if math.isfinite(b))])
    width = (high - low) or 1.0

    def at(y: float) -> float:
        return 100 * (y - low) / width

    rows = []
    for slot, seed, x, y, se in found:
        when = "at the end" if x >= e.length else f"epoch {x:.0f}"
        beam = f'<s style="left:{at(0):.2f}%"></s>'
        if math.isfinite(y):
            beam += f'<i style="left:{at(min(y, 0)):.2f}%;width:{abs(at(y) - at(0)):.2f}%"></i>'
            if se is not None and math.isfinite(se):
                beam += f'<u style="left:{at(y - se):.2f}%;width:{at(y + se) - at(y - se):.2f}%"></u>'
        name = f"{escape(slot.name)} <small>{escape(slot.blueprints.get(seed, ''))}, {when}</small>"
        rows.append(f'<div class="name">{name}</div><div class="beam c{colour[slot.name] % 8}">{beam}</div>'
                    f'<div class="num">{escape(spoken(y, unit))}{plus_minus(se, unit)}</div>')  # fmt: skip
    what = ", in points" if unit == "points" else ""
    return (
        f'<figure class="chart"><figcaption><h3>Shapley value of each seed{what}</h3><p class="says">Its fair share of '
        f'what all seeds bring together, as last measured; ± 1 standard error.</p></figcaption><div class="bars">'
        f"{''.join(rows)}</div></figure>"
    )


# -- policy training


def updates(run: RunSummary) -> str:
    """Return charts of the PPO updates."""
    if not run.updates:
        return ""

    def line(key: str, name: str, colour: int = 0, spread: str = "") -> Series:
        points = [(float(u["round"]), u.get(key)) for u in run.updates if "round" in u]
        errors = [
            (float(u["round"]), u[key] - u[spread], u[key] + u[spread])
            for u in run.updates
            if spread and u.get(key) is not None and u.get(spread) is not None and math.isfinite(u[key] + u[spread])
        ]
        return Series(name, points, colour, errors)

    heads = list(dict.fromkeys(head for u in run.updates for head in u.get("entropy") or {}))
    entropy = [
        Series(h, [(float(u["round"]), (u.get("entropy") or {}).get(h)) for u in run.updates if "round" in u], i)
        for i, h in enumerate(heads)
    ]
    charts = [
        Chart("Return", [line("return_mean", "mean return", 0, "return_sd")],
              "The sum of an episode's rewards: mean over the round's episodes. Band: ± 1 standard deviation over "
              "episodes."),
        Chart("How far an update moved the policy (KL)", [line("kl", "KL", 1)], zero=True, marks=[(0.03, "too far")]),
        Chart("Share of actions clipped", [line("clip_fraction", "clip fraction", 4)], unit="percent", zero=True),
        Chart("What the critic explains", [line("explained_variance", "explained variance", 2)],
              "1: all variance of returns; 0: no better than their mean.", zero=True),
        Chart("The critic's error", [line("value_nrmse", "value NRMSE", 3)], "Over the spread of returns.", zero=True),
        Chart("Gradient norm", [line("grad_norm", "gradient norm", 6)], zero=True),
    ]  # fmt: skip
    for chart in charts:
        chart.x_name, chart.height = "round", 150
    wide = Chart("How undecided each head is", entropy, "Entropy over the largest possible: 1 is undecided, 0 certain.",
                 x_name="round", zero=True, height=200)  # fmt: skip
    body = legend([(h, h, i, True) for i, h in enumerate(heads)]) + render(wide) if heads else ""
    body = f'<div class="grid3">{"".join(render(c) for c in charts)}</div><div style="margin-top:22px">{body}</div>'
    skipped = sum(u.get("skipped") or 0 for u in run.updates)
    says = f"{len(run.updates)} updates" + (
        f"; {skipped} minibatches skipped for want of finite numbers." if skipped else "."
    )
    return section("Learning to decide", says, body)


# -- time


def phase_times(run: RunSummary) -> str:
    """Return bars and a table of the time per phase."""
    phases = run.phases
    if not phases:
        return ""
    wall = sum(p.wall_ms for p in phases) or 1.0
    cpu = sum(p.cpu_ms for p in phases)
    bars = ""
    for name, pick, whole in (("wall", lambda p: p.wall_ms, wall), ("CPU", lambda p: p.cpu_ms, cpu or 1.0)):
        parts = "".join(
            f'<span class="c{i % 8}" style="width:{100 * pick(p) / whole:.2f}%" role="img" data-tip="{escape(tip)}" '
            f'aria-label="{escape(tip)}">{f"<em>{escape(p.name)}</em>" if pick(p) > 0.08 * whole else ""}</span>'
            for i, p in enumerate(phases)
            if (tip := f"{p.name}\n{spoken(pick(p) / whole, 'percent')} of {name} time, "
                f"{spoken(pick(p) / 1000, 'seconds')}")
        )  # fmt: skip
        bars += (
            f'<div class="soft" style="font-size:12.5px">{name} time, {spoken(whole / 1000, "seconds")} in phases</div>'
        )
        bars += f'<div class="share">{parts}</div>'
    rows = [
        (f'<i class="key c{i % 8}"></i>{escape(p.name)}', cell(p.wall_ms / 1000, "seconds"),
         cell(p.wall_ms / wall, "percent"), cell(p.cpu_ms / 1000, "seconds"), cell(p.calls, "count"),
         cell(p.wall_ms / p.calls / 1000 if p.calls else None, "seconds"))
        for i, p in enumerate(phases)
    ]  # fmt: skip
    heads = ("phase", "wall", "share", "CPU", "calls", "per call")
    return section("Where the time went", "", bars + table(heads, rows, right=range(1, 6), caption="Phases"))


# -- decisions and lifecycle moves


def records(run: RunSummary) -> str:
    """Return foldable tables of decisions and stage changes."""
    unit = units(run)[1]
    shown = views(run)
    decided = [(e, d) for e in shown for d in e.decisions]
    moves = [(e, d) for e in shown for d in e.lifecycle]
    name = {id(e): escape(label(run, e)) for e in shown}
    body = ""
    rows: list[tuple[str, ...]]
    heads: tuple[str, ...]
    if decided:
        rows = [
            (name[id(e)], escape(str(d.get("step"))), escape(str(d.get("op", ""))), escape(str(d.get("slot", ""))),
             escape(str(d.get("blueprint", ""))),
             escape(" ".join(str(d[k]) for k in QUALIFIERS if d.get(k))),
             "yes" if d.get("happened") else "<b>no, not legal</b>", cell(d.get("entropy")), cell(d.get("value")))
            for e, d in decided[:MOST_ROWS]
        ]  # fmt: skip
        heads = ("environment", "epoch", "op", "slot", "blueprint", "how", "happened", "undecided", "expected value")
        body += folded("Decisions", len(rows), sum(len(e.decisions) for e in run.episodes),
                       table(heads, rows, right=(1, 7, 8), caption="Decisions"))  # fmt: skip
    if moves:
        rows = [
            (name[id(e)], escape(str(d.get("step"))), escape(str(d.get("slot", ""))),
             escape(str(d.get("blueprint", ""))),
             f"{chip(str(d.get('was')))} → {chip(str(d.get('now')))}", escape(str(d.get("cause", ""))),
             escape(str(d.get("dwell_epochs", ""))), cell(d.get("params"), "count"), cell(d.get("alpha")),
             cell(d.get("contribution"), unit) + plus_minus(d.get("contribution_se"), unit))
            for e, d in moves[:MOST_ROWS]
        ]  # fmt: skip
        heads = ("environment", "epoch", "slot", "blueprint", "moved", "cause", "epochs before", "parameters", "alpha",
                 "contribution ± standard error")  # fmt: skip
        body += folded("Moves between stages", len(rows), sum(len(e.lifecycle) for e in run.episodes),
                       table(heads, rows, right=(1, 6, 7, 8, 9), caption="Moves between stages"))  # fmt: skip
    return section("What was decided, and what followed", "", body)


def folded(title: str, shown: int, total: int, body: str) -> str:
    """Return a foldable element with the number of rows in its title."""
    count = f"{shown}" if shown == total else f"{shown} of {total}; <code>esper sql</code> reads them all"
    return f"<details><summary>{escape(title)} <small>({count})</small></summary>{body}</details>"
