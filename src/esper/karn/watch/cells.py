"""The contents of the screen as rich texts: header, problems, rows of environments and slots; a frame as plain text.

– is a value that was not measured. Names from a run are printable texts and never markup.
"""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.karn.episode_state import EpisodeState, SlotHistory
from esper.karn.formatting import compact, duration, event_text, is_finite, number_text, sparkline
from esper.karn.problems import problems
from esper.karn.run_state import RunState
from esper.karn.watch.watched_run import TONES, WatchedRun
from esper.leyline.stages import COOLING, SeedStage
from esper.leyline.text import printable

STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "note": "cyan", "dim": "dim", "": ""}
LETTERS = "·GTBHFxxx"
STAGE_STYLES = ("dim", "cyan", "cyan", "yellow", "magenta", "green", "red", "red", "red")
NONE = "–"
FLAT_STEPS = 10
"""Steps without a new best after which an environment is called flat."""


class Column(NamedTuple):
    """A column of a table: title, least width of the screen at which it is shown, and its cell."""

    title: str
    least: int
    cell: Callable[[RunState, EpisodeState], Text]


def plain(text: str, style: str = "", most: int = 200) -> Text:
    """Return a text from a run, without control characters and markup."""
    return Text(printable(text, most), STYLES.get(style, style), no_wrap=True, overflow="ellipsis")


def short(text: str, most: int) -> str:
    """Return a name from a run in at most this number of characters."""
    text = printable(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def number(value: float | None, unit: str = "number") -> Text:
    """Return a number: – if it was not measured, emphasised if it is not finite."""
    if value is None:
        return Text(NONE, "dim", justify="right")
    is_non_finite = not is_finite(value)
    text = number_text(value, unit).removesuffix(" %") if unit != "compact" or is_non_finite else compact(value)
    return Text(text, STYLES["bad"] if is_non_finite else "", justify="right")


def worth(value: float | None, se: float | None, is_percent: bool) -> Text:
    """Return a difference of qualities ± its standard error; coloured where it exceeds two standard errors."""
    unit = "points" if is_percent else "number"
    if value is None:
        return Text(NONE, "dim", justify="right")
    error = "" if se is None else f" ± {number_text(se, unit).lstrip('+')}"
    is_sure = se is not None and abs(value) > 2 * se
    return Text(number_text(value, unit) + error, ("green" if value > 0 else "red") if is_sure else "", justify="right")


# -- environments


def env_state(e: EpisodeState) -> tuple[str, str]:
    """Return the state of an environment in one word, as the filter uses it, and its tone."""
    if not e.is_finite:
        return "broken", "bad"
    if e.result is not None:
        return "ended", "dim"
    qualities = [q for q in e.steps.column("quality") if q is not None]
    if not qualities:
        return "running", ""
    best = max(qualities)
    if qualities[-1] < best - 0.01 * max(1.0, abs(best)):
        return "worse", "warn"
    return ("flat", "") if qualities[::-1].index(best) * e.steps.stride > FLAT_STEPS else ("rising", "good")


def last_op(e: EpisodeState) -> Text:
    """Return the last decision that was not to wait, and how many steps ago it was."""
    if e.decision is None:
        return Text(NONE, "dim")
    ago = e.last_step - e.decision.step
    return plain(f"{e.decision.op.replace('SET_ALPHA_TARGET', 'SET ALPHA')} {e.decision.slot}" + f" -{ago}" * (ago > 0))


def letters(e: EpisodeState) -> Text:
    """Return one letter per slot, or counts if there are many."""
    stages = [held.stage if (held := e.current(slot)) else SeedStage.DORMANT for slot in e.slots.values()]
    if len(stages) > 12:
        counts = {letter: sum(LETTERS[s] == letter for s in stages) for letter in "GTBHFx"}
        return plain(" ".join(f"{n}{letter}" for letter, n in counts.items() if n) or "empty")
    return Text.assemble(*((LETTERS[s], STAGE_STYLES[s]) for s in stages))


def _unit(run: RunState) -> str:
    return "percent" if run.is_percent else "number"


def _step(run: RunState, e: EpisodeState) -> Text:
    steps = run.about("steps")
    return Text(f"{e.length}/{steps}" if steps else str(e.length), justify="right")


ENV_COLUMNS = (
    Column("ENV", 0, lambda _, e: plain(short(e.name, 16), "bold")),
    Column("STEP", 0, _step),
    Column("QUAL", 0, lambda run, e: number(e.quality, _unit(run))),
    Column("BEST", 0, lambda run, e: number(e.best, _unit(run))),
    Column("TREND", 100, lambda _, e: Text(sparkline(e.steps.column("quality"), 10), "cyan")),
    Column("LOSS", 0, lambda _, e: number(e.newest.train_loss if e.newest else None)),
    Column("PARAMS", 90, lambda _, e: number(e.params, "compact")),
    Column("LAST OP", 0, lambda _, e: last_op(e)),
    Column("SLOTS", 0, lambda _, e: letters(e)),
    Column("STATE", 0, lambda _, e: plain(*env_state(e))),
    Column("COMMIT", 130, lambda run, e: number(e.newest.committed_quality if e.newest else None, _unit(run))),
    Column("VAL LOSS", 110, lambda _, e: number(e.newest.val_loss if e.newest else None)),
    Column("MACS", 140, lambda _, e: number(e.newest.train_macs if e.newest else None, "compact")),
)


def matches(e: EpisodeState, query: str) -> bool:
    """Return whether an environment matches a filter by name, number or state."""
    query = query.strip().lower()
    return not query or query in e.name.lower() or query == str(e.env) or env_state(e)[0] == query


# -- slots

SLOT_TITLES = ("SLOT", "STAGE", "BLUEPRINT", "ALPHA", "CONTRIB ± SE", "PROSPECT ± SE", "SHAPLEY ± SE", "HEALTH", "AGE")


def slot_cells(run: RunState, e: EpisodeState, slot: SlotHistory) -> list[Text]:
    """Return the row of a slot, in the order of SLOT_TITLES."""
    held = e.current(slot)
    pc = run.is_percent
    stage = held.stage if held else SeedStage.DORMANT
    is_live = stage not in COOLING and stage != SeedStage.DORMANT
    w = slot.newest_worth if is_live else None
    alpha = slot.alpha[-1][1] if is_live and slot.alpha else None
    bar = Text(NONE, "dim") if alpha is None else Text(f"{'━' * round(8 * min(1, max(0, alpha))):<8} {alpha:4.2f}")
    word = "cooling" if stage in COOLING else "empty" if stage == SeedStage.DORMANT else stage.name.lower()
    return [
        plain(short(slot.name, 24), "bold"), Text(word, STAGE_STYLES[stage]),
        plain(held.blueprint if held and is_live else NONE), bar,
        worth(w.contribution if w else None, w.contribution_se if w else None, pc),
        worth(w.prospect if w else None, w.prospect_se if w else None, pc),
        worth(w.shapley if w else None, w.shapley_se if w else None, pc),
        number(slot.gradient[1] if is_live else None),
        Text(str(e.last_step - held.start + 1) if held else NONE, justify="right"),
    ]  # fmt: skip


def slot_table(run: RunState, e: EpisodeState) -> Table:
    """Return the slots of an environment as a table."""
    table = Table(*SLOT_TITLES, box=None, pad_edge=False, header_style="dim")
    for slot in e.slots.values():
        table.add_row(*slot_cells(run, e, slot))
    return table


# -- lines above and below the tables


def header(watched: WatchedRun, width: int) -> Text:
    """Return two lines: what runs and its state; its progress and speed."""
    run = watched.state
    word = watched.word()
    done = watched.done()
    pace = watched.pace()
    first = Text.assemble((f" {word} ", f"reverse {STYLES[TONES[word]]}"), "  ")
    what = [short(str(value), 60) for value in (run.about("task"), run.about("controller")) if value]
    first.append(" by ".join(what), "bold")
    if done is not None:
        size = max(8, min(30, width - 70))
        first.append(f"  {'━' * round(size * done):<{size}} {100 * done:.0f}%")
    if run.envs:
        first.append(f"  {len(run.envs)} env{'s' * (len(run.envs) != 1)} × {len(run.order)} slots", "dim")
    first.append(f"  {watched.name}", "dim")
    parts = []
    if run.envs:
        newest = max((e.number for e in run.latest), default=0)
        steps = min((e.length for e in run.latest if e.number == newest), default=0)
        parts += [f"step {steps}" + f"/{run.about('steps')}" * bool(run.about("steps"))]
        parts += [f"round {newest}/{run.about('rounds')}"] if run.is_in_rounds else []
    parts += [] if pace.elapsed_s is None else [f"elapsed {duration(pace.elapsed_s)}"]
    parts += [] if pace.eta_s is None else [f"left {duration(pace.eta_s)}"]
    parts += [] if pace.steps_per_s is None else [f"{number_text(pace.steps_per_s, digits=1)} env-steps/s"]
    parts.append(f"{run.position:,} events")
    return Text("\n").join([first, Text("  ".join(parts), "dim")])


def problem_lines(watched: WatchedRun) -> Text:
    """Return the problems of the run, worst first; or ALL CLEAR."""
    messages = [*([("error", watched.trouble)] if watched.trouble else []), *problems(watched.state)]
    if watched.word() in ("SLOW", "STALE"):
        messages.insert(0, ("warning", f"silent for {duration(watched.silence_s())}"))
    if watched.state.position == 0 and not messages:
        return Text("no events yet", "dim")
    if not messages:
        return Text("ALL CLEAR", "green")
    more = f"  +{len(messages) - 1} more" if len(messages) > 1 else ""
    severity, text = messages[0]
    return plain(text + more, "bad" if severity == "error" else "warn", 500)


def ppo_line(run: RunState) -> Text:
    """Return the last PPO update, most important numbers first."""
    u = run.newest_update
    if u is None:
        return Text()
    spread = "" if u.return_sd is None else f" ± {number_text(u.return_sd)} sd"
    entropy = " ".join(f"{head} {value:.2f}" for head, value in u.entropy.items() if value is not None)
    parts = [f"PPO round {u.round}", f"return {number_text(u.return_mean)}{spread}", f"KL {number_text(u.kl)}",
             f"clip {number_text(u.clip_fraction)}", f"NRMSE {number_text(u.value_nrmse)}",
             f"entropy {entropy}"]  # fmt: skip
    return plain("  ".join(parts))


def ops_line(run: RunState) -> Text:
    """Return the shares of the operations."""
    total = sum(run.ops.values())
    parts = [f"{op.replace('SET_ALPHA_TARGET', 'SET ALPHA')} {share(n / total)}" for op, n in run.ops.most_common(8)]
    return plain("  ".join(["OPS", *parts, f"of {total} steps"])) if total else Text()


def share(part: float) -> str:
    """Format a share in whole percent. Only exactly 0 is 0 %, and only exactly 1 is 100 %."""
    exact = 100 * part
    return "<1%" if 0 < exact < 1 else ">99%" if 99 < exact < 100 else f"{exact:.0f}%"


def event_line(run: RunState, row: object) -> Text:
    """Return the line of an event: time, environment, step, text."""
    text, tone = event_text(row, run.is_percent)  # type: ignore[arg-type]
    env = run.envs.get(getattr(row, "env", -1))
    step = getattr(row, "step", "")
    time_s = max(0.0, getattr(row, "time_s", run.first_s) - run.first_s)
    width = max(3, min(14, max((len(each.name) for each in run.envs.values()), default=3)))
    name = short(env.name if env is not None else "run", width)
    return Text.assemble((f"{duration(time_s):>11} ", "dim"), (f"{name:<{width}} ", "bold"), (f"{step!s:>4}  ", "dim"),
                         plain(text, tone, 500))  # fmt: skip


MOST_ENVS, MOST_EVENTS = 40, 15
"""Maximum number of rows of each list."""


def frame(watched: WatchedRun, width: int) -> str:
    """Return the contents of the screen without colour, one below the other."""
    run = watched.state
    parts: list[Any] = [header(watched, width), problem_lines(watched), ""]
    columns = [column for column in ENV_COLUMNS if width >= column.least]
    if latest := run.latest:
        table = Table(*(column.title for column in columns), box=None, pad_edge=False)
        for e in latest[:MOST_ENVS]:
            table.add_row(*(column.cell(run, e) for column in columns))
        parts.append(table)
        if len(latest) > MOST_ENVS:
            parts.append(f"… and {len(latest) - MOST_ENVS} more environments")
        most = max(latest, key=lambda e: sum(slot.was_used() for slot in e.slots.values()))
        if most.slots:
            parts += ["", plain(f"slots of {most.name}"), slot_table(run, most)]
        parts += ["", ppo_line(run), ops_line(run)]
    if run.events:
        parts += ["", "events, newest last"]
        parts += [event_line(run, row) for _, row in list(run.events)[-MOST_EVENTS:]]
    out = StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part, overflow="ellipsis", no_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()
