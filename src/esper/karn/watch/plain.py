"""One frame as plain text, for pipes, logs and files."""

from __future__ import annotations

from esper.karn.watch import tables, views
from esper.karn.watch.event_text import event_line
from esper.karn.watch.lines import Line, plain
from esper.karn.watch.model import WatchModel

ENVS, EVENTS, BEST = 40, 15, 5
"""Maximum number of rows of each list."""


def frame(model: WatchModel, name: str, now: float, width: int) -> str:
    """Return the lines of the screen without colour, one below the other."""
    lines: list[Line] = [*views.header(model, name, now, width), views.anomaly(model, now, width), ()]
    envs = list(model.envs.values())
    if not envs:
        return "\n".join(plain(line) for line in lines).rstrip()
    table = tables.env_table(model, width)
    lines += [table.head(), *(table.line(e) for e in envs[:ENVS])]
    if len(envs) > ENVS:
        lines.append(((f"… and {len(envs) - ENVS} more", "dim"),))
    lines.append(((tables.env_summary(model, len(envs), ""), "dim"),))
    most = max(envs, key=lambda e: e.growing + e.fossils)
    if most.slots:
        slots = tables.slot_table(model, most, width)
        lines += [(), ((f"slots of {most.name}", "plain"),), slots.head(), *(slots.line(s) for s in most.slots)]
    lines += [(), *filter(None, (views.ppo_line(model, width), views.mix_line(model, width)))]
    if model.best:
        best = tables.best_table(model, width)
        lines += [(), best.head(), *(best.line(d) for d in model.best[:BEST])]
    if model.happenings:
        lines += [(), (("events, newest last", "plain"),)]
        lines += [event_line(model, e, width) for e in list(model.happenings)[-EVENTS:]]
    return "\n".join(plain(line) for line in lines).rstrip()
