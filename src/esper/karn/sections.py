"""The sections of a report: each function takes a run's summary and returns HTML, "" if there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from esper.karn.charts import Chart, Series, Value, legend, render, spoken
from esper.karn.html import cell, chip, folded, plus_minus, section, table
from esper.karn.summary import EpisodeLife, RunSummary
from esper.leyline.stages import SeedStage
from esper.leyline.text import escape

MOST_LINES = 8
"""Maximum number of environments drawn as separate lines. Above it, their mean and range are drawn."""
MOST_VIEWS = 12
"""Maximum number of episodes shown in detail."""
MOST_ROWS = 250
"""Maximum number of rows of a table. The journal has all of them."""
QUALIFIERS = ("style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
COUNTED = (SeedStage.GERMINATED, SeedStage.FOSSILIZED, SeedStage.PRUNED)


# -- selection of what is shown of a large run


def views(run: RunSummary) -> list[EpisodeLife]:
    """Return the episodes shown in detail: all, or the best one and the latest of the first environments."""
    episodes = run.episodes
    if len(episodes) <= MOST_VIEWS:
        return episodes
    ranked = [e for e in episodes if (q := e.quality) is not None and math.isfinite(q)]
    best = max(ranked, key=lambda e: e.quality or -math.inf, default=None)
    chosen = ([best] if best is not None else []) + [e for e in run.latest if e is not best]
    return chosen[:MOST_VIEWS]


def label(run: RunSummary, episode: EpisodeLife) -> str:
    """Return the name of an episode, with its number if an environment has several."""
    several = any(len(env.episodes) > 1 for env in run.envs.values())
    return f"{episode.name}, {episode_word(run)} {episode.episode}" if several else episode.name


def episode_word(run: RunSummary) -> str:
    """Return what an episode's number counts: rounds in training, else episodes."""
    return "round" if run.updates else "episode"


def units(run: RunSummary) -> tuple[str, str]:
    """Return the units of quality and worth: percent and points for fractions, else plain numbers."""
    return ("percent", "points") if run.is_percent else ("number", "number")


def in_points(unit: str) -> str:
    """Return the unit for a title: ", in points", or "" for plain numbers."""
    return ", in points" if unit == "points" else ""


# -- results


def results(run: RunSummary) -> str:
    """Return the table of results, one row per environment."""
    unit, points = units(run)
    latest = run.latest
    if not latest:
        return section("Results", "", '<p class="none">No step has been recorded yet.</p>')
    columns: dict[str, list[str]] = {}

    def put(head: str, text: str) -> None:
        columns.setdefault(head, []).append(text)

    bare = next((e for e in latest if any(other.grew_from(e) for other in latest)), None)
    measured = {k for e in latest for k, v in (e.result or {}).items() if v is not None}
    for e in latest:
        final, twin = e.quality, e.recorded("twin_quality")
        put("environment", escape(label(run, e)))
        put("quality", f"<b>{cell(final, unit)}</b>")
        put("best", cell(e.quality_best, unit))
        if "test_quality" in measured:
            put("test", cell(e.recorded("test_quality"), unit))
        if "twin_quality" in measured:
            put("over twin", cell(final - twin if final is not None and twin is not None else None, points))
        elif bare is not None and (base := bare.quality) is not None:
            gain = final - base if final is not None and e is not bare else None
            put("over no growth", "" if e is bare else cell(gain, points))
        host = e.recorded("host_params") or run.about("host_params")
        times = f' <span class="soft">{e.params / host:.2f}× host</span>' if e.params is not None and host else ""
        put("parameters", cell(e.params, "count") + times)
        put("seeds", " / ".join(str(e.count(stage)) for stage in COUNTED))
        grown = ", ".join(f"{escape(str(b))} in {escape(str(s))}" for s, b in (e.recorded("structure") or {}).items())
        put("alive at the end", grown or '<span class="soft">nothing</span>' if e.result else cell(None))
        put("epochs", str(e.length))
        put("time", cell(e.wall_s, "seconds"))
    right = [i for i, head in enumerate(columns) if head not in ("environment", "alive at the end")]
    rows = zip(*columns.values(), strict=True)
    says = "Quality is measured on the validation split, test on data that had no part in any decision"
    against = next((head for head in ("over twin", "over no growth") if head in columns), None)
    says += f"; {against}: against the same world without growth{in_points(points)}." if against else "."
    says += " Seeds: germinated / committed / pruned."
    if len(run.episodes) > len(latest):
        says += f" Shown is the latest episode of each environment, of {len(run.episodes)} in all."
    return section("Results", says, table(list(columns), rows, right=right, caption="Results"))


# -- curves


def mean_and_range(
    points: Iterable[tuple[float, Value]],
) -> tuple[list[tuple[float, Value]], list[tuple[float, Value, Value]]]:
    """Return (x, mean) and (x, minimum, maximum) of the finite values at each x; None without finite values."""
    values: dict[float, list[float]] = {}
    for x, y in points:
        values.setdefault(x, []).extend([y] if y is not None and math.isfinite(y) else [])
    ordered = sorted(values.items())
    means: list[tuple[float, Value]] = [(x, sum(ys) / len(ys) if ys else None) for x, ys in ordered]
    return means, [(x, min(ys), max(ys)) for x, ys in ordered if ys]


def over_steps(episodes: Sequence[EpisodeLife], name: str) -> tuple[list[tuple[float, Value]], list[Any]]:
    """Return mean and range of a column per step over episodes."""
    columns = [zip(e.steps.column("step"), e.steps.column(name), strict=True) for e in episodes]
    return mean_and_range((x, y) for column in columns for x, y in column if x is not None)


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
    latest = [e for e in run.latest if len(e.steps)]
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
        points, spread = mean_and_range((float(e.episode), pick(e)) for e in ended)
        return Series(name, points, colour, () if dash else spread, dash=dash)

    def seeds(stage: SeedStage, name: str, colour: int) -> Series:
        return per_round(lambda e: e.count(stage), name, colour)

    charts = [
        Chart(f"Quality at the end of each {word}", [per_round(lambda e: e.quality, "grown", 0),
              per_round(lambda e: e.recorded("twin_quality"), "same worlds without growth", 7, "dash")],
              "Mean over environments; the band spans the worst and the best.", unit, word, height=240,
              legend=True),
        Chart("Parameters at the end", [per_round(lambda e: e.params, "parameters", 2)], unit="count",
              x_name=word, height=170),
        Chart(f"Seeds per {word}", [seeds(SeedStage.GERMINATED, "germinated", 5),
              seeds(SeedStage.FOSSILIZED, "committed", 2), seeds(SeedStage.PRUNED, "pruned", 7)],
              "Mean over environments.", x_name=word, height=170, zero=True, legend=True),
    ]  # fmt: skip
    first, *rest = [render(c) for c in charts]
    return section(
        f"{word.capitalize()} by {word}", "", f'<div class="grid2"><div class="wide">{first}</div>{"".join(rest)}</div>'
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
