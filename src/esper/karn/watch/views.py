"""The lines above and below the tables: state, alarms, chosen ops, PPO updates, best episodes."""

from __future__ import annotations

import math

from rich.cells import cell_len

from esper.karn.watch import alarm_rules
from esper.karn.watch.event_text import over_twin
from esper.karn.watch.formatting import (
    NONE,
    bar,
    duration,
    op_tone,
    op_word,
    points,
    quality,
    short,
)
from esper.karn.watch.lines import Line, Piece, joined, whole_words
from esper.karn.watch.model import WatchModel
from esper.karn.watch.states import Number, number, numbers, text, whole
from esper.leyline.actions import Op


def header(model: WatchModel, name: str, now: float, width: int) -> list[Line]:
    """Return two lines: what runs and its state; its progress and speed."""
    word, tone = alarm_rules.state(model, now)
    done = model.done
    task, controller = text(model.run.get("task")), text(model.run.get("controller"))
    what = [*([(task, "strong")] if task else []), *([(" by ", "dim"), (controller, "strong")] if controller else [])]
    shape = f"{len(model.envs)} env{'s' * (len(model.envs) != 1)} × {len(model.slot_names)} slots" if model.envs else ""
    size = max(8, min(40, width - 72))
    progress = [] if done is None else [(bar(done, size), "bar"), (f" {share(done)}", "plain")]
    first = [[(f" {word} ", f"badge-{tone}")], what, progress, [(shape, "dim")] if shape else [], [(name, "dim")]]
    return [joined(filter(None, first), width), joined(_progress(model, now, width < 100), width, gap="  ")]


def _progress(model: WatchModel, now: float, is_narrow: bool) -> list[list[Piece]]:
    pace = alarm_rules.pace(model, now)
    over = alarm_rules.is_over(alarm_rules.state(model, now)[0])
    parts: list[list[Piece]] = []
    if model.envs:
        of = f"/{model.steps}" if model.steps else ""
        parts.append([("step ", "dim"), (f"{model.step}{of}", "plain")])
        if model.rounds > 1:
            parts.append([("round ", "dim"), (f"{model.round}/{model.rounds}", "plain")])
    parts.append([("ran " if is_narrow else "elapsed ", "dim"), (duration(pace.elapsed_s), "plain")])
    if not over and pace.eta_s is not None:
        parts.append([("left ", "dim"), (duration(pace.eta_s), "plain")])
    mean = " in the mean" if pace.is_mean and not is_narrow else ""
    if pace.steps_per_s is not None:
        parts.append([(rate(pace.steps_per_s), "plain"), (" steps/s" if is_narrow else " env-steps/s", "dim")])
    if pace.events_per_s is not None:
        parts.append([(rate(pace.events_per_s), "plain"), (" ev/s" if is_narrow else f" events/s{mean}", "dim")])
    return parts


def rate(value: Number) -> str:
    """Format a rate."""
    return NONE if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else short(value)


def anomaly(model: WatchModel, now: float, width: int) -> Line:
    """Return the alarms, worst first; else notes on past or harmless events; else ALL CLEAR."""
    alarms = alarm_rules.alarms(model, now)
    wrong = [a for a in alarms if a.tone != "note"]
    notes = [a for a in alarms if a.tone == "note"]
    if model.events == 0 and not wrong:
        return (("no events yet", "dim"),)
    shown = wrong or notes
    line: list[Piece] = [] if wrong else [("NOTES", "note")] if notes else [("ALL CLEAR", "good")]
    used = sum(cell_len(content) for content, _ in line)
    for i, alarm in enumerate(shown):
        left = f"  +{len(shown) - i - 1} more" if i + 1 < len(shown) else ""
        gap = "   " if line else ""
        room = width - used - len(gap) - len(left)
        if room < 30 and i and cell_len(alarm.text) > room:
            line.append((f"  +{len(shown) - i} more", "dim"))
            break
        content = whole_words(alarm.text, room)
        line += [(gap, "plain"), (content, "dim" if alarm.tone == "note" else alarm.tone)]
        used += len(gap) + cell_len(content)
    return tuple(line)


def ppo_line(model: WatchModel, width: int) -> Line:
    """Return the last PPO update, most important numbers first."""
    u = model.update
    if u is None:
        return ()
    flat = alarm_rules.collapsed(model)

    def part(name: str, value: Number, limit: float = math.inf) -> list[Piece]:
        odd = value is not None and not value <= limit
        return [(f"{name} ", "dim"), (short(value), "warn" if odd else "plain")]

    entropy: list[Piece] = [("entropy", "dim")]
    for head, value in sorted(numbers(u.get("entropy")).items(), key=lambda kv: kv[0] != "op"):
        entropy += [(f" {head} ", "dim"), (short(value, 2), "warn" if head in flat else "plain")]
    spread = number(u.get("return_sd"))
    around: list[Piece] = [] if spread is None else [(f" ± {short(spread, 4)} sd", "dim")]
    parts: list[list[Piece]] = [
        [(f"PPO round {whole(u.get('round'))}", "strong")],
        [("return ", "dim"), (short(number(u.get("return_mean")), 4), "plain"), *around],
        part("KL", number(u.get("kl")), alarm_rules.KL_LIMIT),
        part("clip", number(u.get("clip_fraction")), alarm_rules.CLIP_LIMIT),
        entropy if width >= 110 else entropy[:3],
        part("NRMSE", number(u.get("value_nrmse")), 1.0),
        part("grad", number(u.get("grad_norm"))),
        part("ratio max", number(u.get("ratio_max"))),
        part("EV", number(u.get("explained_variance"))),
        part("lr", number(u.get("lr"))),
        [("epochs ", "dim"), (str(whole(u.get("epochs"))), "plain")],
        [(f"{rate(number(u.get('wall_ms')))} ms", "dim")],
    ]
    return joined(parts, width, gap="  ")


def mix_line(model: WatchModel, width: int) -> Line:
    """Return the shares of the ops chosen where there was a choice."""
    total = sum(model.ops.values())
    if not total:
        return ()
    order = [op.name for op in Op if model.ops[op.name]] + sorted(o for o in model.ops if o not in Op.__members__)
    parts: list[list[Piece]] = [[(f"{op_word(o)} ", op_tone(o)), (share(model.ops[o] / total), "plain")] for o in order]
    of = f"of {total} free steps"
    ends = [[(of + f", {model.forced} forced", "dim")]] if model.forced else []
    for end in [*ends, [(of, "dim")], [(f"of {total}", "dim")]]:
        line = joined([[("OPS", "strong")], *parts, end], width, gap="  ")
        if line[-1] == end[-1]:
            break
    return line


def share(part: float) -> str:
    """Format a share in whole percent. Only exactly 0 is 0 %, and only exactly 1 is 100 %."""
    exact = 100 * part
    return "<1%" if 0 < exact < 1 else ">99%" if 99 < exact < 100 else f"{exact:.0f}%"


def best_line(model: WatchModel, width: int) -> Line:
    """Return the best episodes in one line."""
    if not model.best:
        return ()
    parts: list[list[Piece]] = [[("BEST", "strong")]]
    for d in model.best[:6]:
        gain = over_twin(d)
        more = f" ({points(gain, None, model.is_percent)})" if gain is not None else ""
        parts.append([(quality(number(d.get("quality")), model.is_percent), "good"), (more, "plain"),
                      (f" {text(d.get('name'))} #{whole(d.get('episode'))}", "dim")])  # fmt: skip
    return joined([*parts, [(f"of {model.episodes} episodes", "dim")]], width, gap="  ")
