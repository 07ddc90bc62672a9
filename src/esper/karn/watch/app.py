"""The app: reads new entries once a second, redraws what changed, and handles keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Key
from textual.screen import Screen

from esper.karn.watch import alarm_rules, layout, tables, views
from esper.karn.watch.detail import detail_lines
from esper.karn.watch.event_text import EventLines
from esper.karn.watch.guide import help_lines
from esper.karn.watch.lines import Line, Table, fit, joined
from esper.karn.watch.source import Source
from esper.karn.watch.states import EnvState, SlotState
from esper.karn.watch.widgets import Lines

POLL_S = 1.0
"""Seconds between two reads of the journal."""
KEYS = [
    ("q", "quit"), ("?", "help"), ("j/k", "move"), ("Enter", "detail"), ("e", "events"), ("/", "filter"),
    ("r", "re-read"),
]  # fmt: skip
FAR = 1_000_000
"""More lines than any list has."""
SLICE = 5_000
"""Entries folded at a time, so that keys respond while a long journal is read."""


def keys_line(pairs: list[tuple[str, str]], width: int) -> Line:
    """Return the line of keys."""
    return joined([[(key, "strong"), (f" {word}", "dim")] for key, word in pairs], width, gap="  ")


def movement(action: str, by: int = 1, forwards: str = "j,down", back: str = "k,up") -> list[BindingType]:
    """Return the keys of an action by a number of lines or pages; with j and k, also those to both ends."""
    keys = [(forwards, by), (back, -by)] + ([("g,home", -FAR), ("G,end", FAR)] if forwards == "j,down" else [])
    return [Binding(key, f"{action}({distance})", show=False) for key, distance in keys]


class Page(Screen[None]):
    """A screen that draws itself from the app's model."""

    AUTO_FOCUS = ""

    def draw(self, *, is_new: bool) -> None:
        """Draw the page. `is_new`: the model changed; otherwise only time has passed."""

    @property
    def watch_app(self) -> WatchApp:
        """The app of this page."""
        assert isinstance(self.app, WatchApp)
        return self.app

    def _draw_soon(self) -> None:
        self.call_after_refresh(self.draw, is_new=True)

    on_mount = on_resize = on_screen_resume = _draw_soon


class MainPage(Page):
    """The main screen: state, alarms, environments, slots and events."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *movement("move"), *movement("move", 10, "pagedown", "pageup"), Binding("enter", "detail", show=False),
        Binding("e", "events", show=False), Binding("escape", "clear", show=False),
    ]  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.selected: int | None = None
        self.query_text = ""
        self.is_filtering = False
        self._plan: layout.Plan | None = None
        self._events = EventLines()

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield from (Lines(id=name) for name in ("header", "anomaly"))
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield from (Lines(id=name) for name in ("summary", "envs-head", "envs", "slots-head", "slots"))
                yield from (Lines(id=name) for name in ("best-head", "best"))
            with Vertical(id="right"):
                yield from (Lines(id=name) for name in ("events-head", "events"))
        yield from (Lines(id=name) for name in ("ppo", "mix", "best-line", "keys"))

    # drawing

    def lines(self, name: str) -> Lines:
        """Return the widget of this name."""
        return self.query_one(f"#{name}", Lines)

    def draw(self, *, is_new: bool) -> None:
        """Draw the header, and everything else if the model changed."""
        if not self.is_mounted or self.size.height == 0:
            return
        app, width = self.watch_app, self.size.width
        now = app.clock()
        self.lines("header").show_all(views.header(app.source.model, app.source.name, now, width))
        self.lines("anomaly").show_all([views.anomaly(app.source.model, now, width)])
        if is_new:
            self._arrange()
            self._draw_tables()
            self._draw_rest()

    def _arrange(self) -> None:
        """Set the rows of each part. Styles are set only if they change, since that causes a new layout."""
        model = self.watch_app.source.model
        plan = layout.plan(model, self.size.width, self.size.height, len(self.matching()))
        if plan == self._plan:
            return
        self._plan = plan
        self.set_class(plan.right > 0, "wide")
        self.query_one("#right").styles.width = plan.right or "100%"
        rows = {"envs": plan.envs, "slots": plan.slots, "events": plan.events, "best": plan.best,
                "best-head": int(plan.best > 0), "best-line": plan.best_line, "ppo": plan.ppo, "mix": plan.mix,
                "summary": plan.summary}  # fmt: skip
        for name, height in rows.items():
            widget = self.lines(name)
            widget.styles.height = height
            widget.display = height > 0
        below = {"slots-head": plan.gap, "best-head": plan.gap, "events-head": 0 if plan.right else plan.gap}
        for name, gap in below.items():
            self.lines(name).styles.margin = (gap, 0, 0, 0)
        self.call_after_refresh(self._settle)

    def _settle(self) -> None:
        """Draw again after the heights have changed."""
        self._draw_tables()
        self._draw_rest()

    def matching(self) -> list[EnvState]:
        """Return the environments that match the filter."""
        return [e for e in self.watch_app.source.model.envs.values() if tables.matches(e, self.query_text)]

    def _draw_tables(self) -> None:
        model, plan = self.watch_app.source.model, self._plan
        envs = self.matching()
        chosen = self.chosen(envs)
        width = (self.size.width - plan.right - 2) if plan and plan.right else self.size.width
        shown = self.lines("envs")
        inner = width - (1 if len(envs) > (plan.envs if plan else 1) else 0)
        table = tables.env_table(model, inner)
        self.lines("summary").show_all([((fit(tables.env_summary(model, len(envs), self.query_text), width), "dim"),)])
        self.lines("envs-head").show_all([table.head()])
        if envs:
            at = envs.index(chosen) if chosen else None
            shown.show(len(envs), lambda i: table.line(envs[i]), at)
            if at is not None:
                shown.reveal(at)
        else:
            shown.show_all([((self.watch_app.source.nothing(self.query_text), "dim"),)])
        slots = tables.slot_table(model, chosen, width)
        self.lines("slots-head").show_all([slots.head()])
        self.lines("slots").show_all(self._slot_lines(chosen, slots, plan.slots if plan else 1))
        best = tables.best_table(model, width)
        self.lines("best-head").show_all([best.head()])
        self.lines("best").show(len(model.best), lambda i: best.line(model.best[i]))

    def _slot_lines(self, env: EnvState | None, table: Table[SlotState], rows: int) -> list[Line]:
        if env is None or not env.slots:
            return [((tables.empty_slots(self.watch_app.source.model, env), "dim"),)]
        slots, left = tables.shown_slots(env, rows)
        more: list[Line] = [((f"… {left} more slots: Enter shows them all", "dim"),)] if left else []
        return [*(table.line(s) for s in slots), *more]

    def _draw_rest(self) -> None:
        model, plan, width = self.watch_app.source.model, self._plan, self.size.width
        rows = plan.events if plan else 1
        room = plan.right if plan and plan.right else width
        last = list(model.happenings)[-rows:]
        more = f" ({model.happened}, e shows all)" if model.happened > rows else ""
        self.lines("events-head").show_all([((fit(f"EVENTS{more}", room), "head"),)])
        if last:
            self.lines("events").show(len(last), lambda i: self._events.line(model, last[i], room))
        else:
            self.lines("events").show_all([(("nothing has happened yet", "dim"),)])
        self.lines("ppo").show_all([views.ppo_line(model, width)])
        self.lines("mix").show_all([views.mix_line(model, width)])
        self.lines("best-line").show_all([views.best_line(model, width)])
        self.lines("keys").show_all([self._keys_line(width)])

    def _keys_line(self, width: int) -> Line:
        if not self.is_filtering:
            return keys_line([("Esc", "clear filter"), *KEYS] if self.query_text else KEYS, width)
        hint = "" if self.query_text else "  name, number, or state: rising flat worse broken rolled ended"
        return (("filter: ", "strong"), (self.query_text + "█", "plain"), (hint, "dim"))

    # keys

    def chosen(self, envs: list[EnvState]) -> EnvState | None:
        """Return the selected environment; the first if it is gone or filtered out."""
        return next((e for e in envs if e.index == self.selected), envs[0] if envs else None)

    def action_move(self, by: int) -> None:
        """Move the selection."""
        envs = self.matching()
        if not envs:
            return
        chosen = self.chosen(envs)
        at = envs.index(chosen) if chosen else 0
        self.selected = envs[max(0, min(len(envs) - 1, at + by))].index
        self._draw_tables()

    def action_detail(self) -> None:
        """Open the page of the selected environment."""
        chosen = self.chosen(self.matching())
        if chosen is not None:
            self.app.push_screen(DetailPage(chosen.index))

    def action_events(self) -> None:
        """Open the page of all events."""
        self.app.push_screen(EventsPage())

    def action_clear(self) -> None:
        """Clear the filter."""
        self.is_filtering, self.query_text = False, ""
        self.draw(is_new=True)

    def on_key(self, event: Key) -> None:
        """Handle the keys of the filter: while it is being typed, all keys belong to it.

        The slash is not a binding: bindings run later, when the next key has already been handled elsewhere.
        """
        if event.key == "escape" or not (self.is_filtering or event.key == "slash"):
            return
        event.stop()
        if not self.is_filtering:
            self.is_filtering = True
        elif event.key == "enter":
            self.is_filtering = False
        elif event.key == "backspace":
            self.query_text = self.query_text[:-1]
        elif event.is_printable and event.character:
            self.query_text += event.character
        self.draw(is_new=True)


class ScrollPage(Page):
    """A long list on a full screen."""

    NAME = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        *movement("scroll"), *movement("page", 1, "pagedown,space", "pageup"), Binding("escape,q", "back", show=False),
    ]  # fmt: skip

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Lines(id=self.NAME)
        yield Lines(id="keys")

    @property
    def list(self) -> Lines:
        """The widget of the list."""
        return self.query_one(f"#{self.NAME}", Lines)

    def draw(self, *, is_new: bool) -> None:
        """Draw the list if the model changed."""
        if is_new and self.is_mounted and self.size.height:
            self.fill(max(20, self.size.width - 1))
            pairs = [("Esc", "back"), ("j/k", "scroll"), ("g/G", "first, last")]
            self.query_one("#keys", Lines).show_all([keys_line(pairs, self.size.width)])

    def fill(self, width: int) -> None:
        """Show the list."""

    def action_scroll(self, by: int) -> None:
        """Scroll by lines."""
        shown = self.list
        shown.scroll_to(y=max(0, min(shown.max_scroll_y, shown.scroll_offset.y + by)), animate=False)

    def action_page(self, by: int) -> None:
        """Scroll by pages."""
        self.action_scroll(by * max(1, self.list.size.height - 1))

    def action_back(self) -> None:
        """Return to the previous page."""
        self.app.pop_screen()


class EventsPage(ScrollPage):
    """All kept events, newest last. Follows new events unless scrolled up."""

    NAME = "events-all"

    def __init__(self) -> None:
        super().__init__()
        self._events = EventLines()

    def fill(self, width: int) -> None:
        """Show the events."""
        model, shown = self.watch_app.source.model, self.list
        follows = shown.is_at_end
        entries = list(model.happenings)
        if entries:
            shown.show(len(entries), lambda i: self._events.line(model, entries[i], width))
        else:
            shown.show_all([(("nothing has happened yet", "dim"),)])
        if follows:
            shown.scroll_end(animate=False)


class DetailPage(ScrollPage):
    """The page of one environment."""

    NAME = "detail"

    def __init__(self, env: int) -> None:
        super().__init__()
        self.env = env

    def fill(self, width: int) -> None:
        """Show the environment."""
        model = self.watch_app.source.model
        env = model.envs.get(self.env)
        if env is None:
            self.list.show_all([(("this environment no longer exists: the run restarted", "dim"),)])
            return
        makers = detail_lines(model, env, width)
        self.list.show(len(makers), lambda i: makers[i]())


class HelpPage(ScrollPage):
    """The help page."""

    NAME = "help"

    def fill(self, width: int) -> None:
        """Show the help."""
        self.list.show_all(help_lines(width))


class WatchApp(App[None]):
    """The app that shows one run."""

    CSS_PATH = Path(__file__).with_name("style.tcss")
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", show=False, priority=False),
        Binding("question_mark", "help", show=False),
        Binding("r", "reread", show=False),
    ]

    def __init__(self, run: Path, *, clock: Callable[[], float] = time.time, poll_s: float = POLL_S) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.clock = clock
        self.source = Source(run, clock)
        self._poll_s = poll_s
        self._drawn: tuple[int, int] | None = None

    def get_default_screen(self) -> MainPage:
        """Return the main page."""
        return MainPage()

    def on_mount(self) -> None:
        """Start reading the run."""
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(self._poll_s)

    async def read(self) -> None:
        """Read and fold new entries. Redraw if they, or the passing of a second, changed anything."""
        entries = await asyncio.to_thread(self.source.poll)
        for start in range(0, len(entries), SLICE):
            self.source.feed(entries[start : start + SLICE])
            await asyncio.sleep(0)
        self.source.caught_up()
        self.redraw()

    def redraw(self) -> None:
        """Draw the page if something has changed."""
        model = self.source.model
        over = alarm_rules.is_over(alarm_rules.state(model, self.clock())[0])
        drawn = (self.source.version, 0 if over else int(self.clock()))
        if drawn != self._drawn and isinstance(self.screen, Page):
            is_new = self._drawn is None or drawn[0] != self._drawn[0]
            self._drawn = drawn
            self.screen.draw(is_new=is_new)

    def action_help(self) -> None:
        """Open the help page."""
        if not isinstance(self.screen, HelpPage):
            self.push_screen(HelpPage())

    async def action_reread(self) -> None:
        """Read the run again from the beginning."""
        self.source.restart()
        await self.read()
