"""The app: reads new events once a second, or less often if redraws are costly, and handles keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Input, Markdown, RichLog, Sparkline, Static

from esper.karn.document import Json, clean, mean_series, move
from esper.karn.episode_state import EpisodeState
from esper.karn.watch import cells
from esper.karn.watch.watched_run import WatchedRun

POLL_S = 1.0
"""Seconds between two reads of the journal."""
MOST_SHARE = 0.012
"""Maximum share of a core that the view uses. It reads less often if a redraw costs more."""
MOST_PAUSE_S = 7.0
"""Maximum seconds between two reads beyond POLL_S."""
WIDE = 150
"""Minimum width at which events are shown beside the tables."""
MOST_EVENTS = 1000
MOST_LIVES = 12
"""Maximum number of seeds whose lives are shown beside the events."""
HELP = """
| key | |
|---|---|
| j k ↓ ↑, g G | move among environments, or scroll; first, last |
| Enter | everything about the selected environment |
| e | events on the full screen, and back |
| / | filter environments by name, number or state; Esc clears |
| r | read the run again from its beginning |
| Esc, q | back; q on the first page quits (the run goes on) |

**LIVE** events arrive as usual. **SLOW, STALE** no event for longer than usual in this run. **KILLED** it has no
end event, and no process owns it.

Stages: **G** germinated, **T** training (no effect on the host), **B** blending, **H** holding, **F** fossilised
(a permanent part of the host), **x** cooldown after a prune, **·** empty.

**QUAL** quality on the validation split, in percent if it is a fraction; **COMMIT** with every live seed off.
**CONTRIB** quality with the seed minus without it, in points, ± its standard error (of a fossil: what would be lost
now); coloured where it exceeds two standard errors. **PROSPECT** what a training seed would add at alpha 1. **SHAPLEY**
its share of the gain of all seeds. **HEALTH** of its gradients: 1 is healthy. **AGE** steps in this stage.
**LAST OP** the last decision that was not to wait; -3: three steps ago. **STATE** rising; flat: no new best for 10
steps; worse: below its best; broken: not finite; ended. – not measured.
"""


def pause_s(cpu_s: float, waited_s: float) -> float:
    """Return the further seconds to wait after a redraw that took this CPU time, so that the view stays cheap."""
    return min(MOST_PAUSE_S, max(0.0, cpu_s / MOST_SHARE - waited_s))


def movement(target: str) -> list[BindingType]:
    """Return the keys that move in a list or scroll it."""
    ways = {"j,down": "down", "k,up": "up", "g,home": "top", "G,end": "bottom"}
    ways |= {"pagedown": "page_down", "pageup": "page_up"}
    return [Binding(keys, f"{target}('{way}')", show=False) for keys, way in ways.items()]


class EnvTable(DataTable[Text]):
    """The table of environments: the keys of the app move its cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "app.detail", "Detail"), *movement("app.move")]


def scroll(widget: Widget, way: str) -> None:
    """Scroll a widget, with a direction of `movement`."""
    getattr(widget, {"top": "scroll_home", "bottom": "scroll_end"}.get(way, f"scroll_{way}"))(animate=False)


class Page(Screen[None]):
    """A full screen above the main one, with one widget that scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "app.pop_screen", "Back"), *movement("move")]

    def __init__(self, content: Widget) -> None:
        super().__init__()
        self.content = content

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        with VerticalScroll():
            yield self.content
        yield Footer()

    def action_move(self, way: str) -> None:
        """Scroll."""
        scroll(self.query_one(VerticalScroll), way)


class HelpPage(Page):
    """Keys and words."""

    def __init__(self) -> None:
        super().__init__(Markdown(HELP))


class DetailPage(Page):
    """Everything about one environment: its slots, and the life of each seed with the reason of each move."""

    def __init__(self, watched: WatchedRun, env: int) -> None:
        self.watched = watched
        self.env = env
        super().__init__(Static(detail_text(watched, env), id="detail"))

    def draw(self) -> None:
        """Show the newest state."""
        self.query_one("#detail", Static).update(detail_text(self.watched, self.env))


def detail_text(watched: WatchedRun, env: int) -> Group:
    """Return the slots of an environment, the lives of its seeds, and its events."""
    run = watched.state
    e = run.envs[env].latest
    if e is None:
        return Group(Text("this environment has not begun", "dim"))
    return Group(
        cells.plain(f" {e.name}, episode {e.number}, step {e.length}", "bold"),
        cells.slot_table(run, e),
        "",
        seed_lives(watched, e),
        "",
        Text("EVENTS", "bold"),
        *(cells.event_line(run, row) for _, row in run.events if getattr(row, "env", None) == env),
    )


def seed_lives(watched: WatchedRun, e: EpisodeState, most: int | None = None) -> Table:
    """Return every move between stages of the newest `most` seeds of an episode, with its reason."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for life in list(e.seeds.values())[-most if most else None :]:
        about = f"seed {life.seed}, {life.params} parameters"
        table.add_row("", cells.plain(f"{life.blueprint} in {life.slot}", "bold"), "", Text(about, "dim"))
        for each, reason in life.moves:
            change = clean(move(each, reason))
            moved = Text(f"{change['was'].lower()} → {change['now'].lower()}")
            value = cells.worth(each.contribution, each.contribution_se, watched.state.is_percent)
            table.add_row(f"{each.step:>5}", moved, value, Text(reason_text(change), "dim"))
    return table


def reason_text(move: Json) -> str:
    """Return why a seed moved: the controller's decision with its alternatives, or what else caused it."""
    decision = move.get("decision")
    if decision is None:
        return str(move["cause"])
    others = [op for op in decision["legal"] if op != decision["op"]]
    return f"{decision['op']} {decision['how']}".strip() + f"; also legal: {', '.join(others)}" * bool(others)


def fill(table: DataTable[Text], titles: Sequence[str], rows: Mapping[str, Sequence[Text]]) -> None:
    """Show rows by their keys. If rows and columns are the same as before, update only the cells that changed."""
    if [key.value for key in table.columns] != list(titles):
        table.clear(columns=True)
        for title in titles:
            table.add_column(title, key=title)
    if [key.value for key in table.rows] != list(rows):
        table.clear()
        for key, row in rows.items():
            table.add_row(*row, key=key)
        return
    for key, row in rows.items():
        for column, cell, shown in zip(table.columns.values(), row, table.get_row(key), strict=True):
            if (cell, cell.style) != (shown, shown.style):
                table.update_cell(key, column.key, cell, update_width=cell.cell_len > column.content_width)


class WatchApp(App[None]):
    """The app that shows one run."""

    CSS_PATH = Path(__file__).with_name("style.tcss")
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = "#envs"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit"), Binding("question_mark", "help", "Help", key_display="?"),
        Binding("enter", "detail", "Detail"), Binding("e", "events", "Events"), Binding("r", "reread", "Re-read"),
        Binding("slash", "filter", "Filter", key_display="/"), Binding("escape", "clear", "Clear filter", show=False),
        *movement("move"),
    ]  # fmt: skip

    def __init__(self, run: Path, *, clock: Callable[[], float] = time.time, poll_s: float = POLL_S) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.watched = WatchedRun(run, clock)
        self.query_text = ""
        self._poll_s = poll_s
        self._reading = asyncio.Lock()
        self._lives: tuple[int, int, int] | None = None  # environment, episode and number of moves of the shown lives
        self._listed = 0  # position of the newest event in the list

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Static(id="header")
        yield Static(id="alarms")
        yield Sparkline(id="trend")
        with Horizontal(id="body"):
            with Vertical(id="tables"):
                yield EnvTable(id="envs", cursor_type="row")
                yield Static(id="nothing")
                yield DataTable[Text](id="slots", cursor_type="none")
                yield Static(id="lives")
            yield RichLog(id="events", max_lines=MOST_EVENTS, wrap=False)
        yield Static(id="ppo")
        yield Static(id="ops")
        yield Input(id="filter", placeholder="name, number, or state: rising flat worse broken ended")
        yield Footer()

    # -- reading

    def on_mount(self) -> None:
        """Start reading the run."""
        self.query_one("#trend").border_title = "mean quality"
        self.query_one("#filter").display = False
        for widget in self.query("#filter, #events, #slots"):
            widget.can_focus = False
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        while True:
            before = time.process_time()
            await self.read()
            await asyncio.sleep(self._poll_s)  # the screen is drawn meanwhile
            await asyncio.sleep(pause_s(time.process_time() - before, self._poll_s))

    async def read(self) -> None:
        """Read and fold new events. Redraw what they changed."""
        async with self._reading:
            is_new = await asyncio.to_thread(self.watched.read)
        self.draw(is_new=is_new)

    def draw(self, *, is_new: bool) -> None:
        """Draw the header, and everything else if the run changed."""
        if not is_new and self.watched.is_over():
            return
        main = self.screen_stack[0]
        main.query_one("#header", Static).update(cells.header(self.watched, self.size.width), layout=False)
        main.query_one("#alarms", Static).update(cells.problem_lines(self.watched), layout=False)
        if is_new:
            self._draw_envs()
            self._draw_rest()
            if isinstance(self.screen, DetailPage):
                self.screen.draw()

    def on_resize(self) -> None:
        """Arrange the screen again, once its new size is known."""
        self.call_after_refresh(self._arrange)

    def _arrange(self) -> None:
        """Choose the layout and the columns that fit."""
        self.screen_stack[0].set_class(self.size.width >= WIDE, "wide")
        self.screen_stack[0].set_class(self.size.height >= 34, "tall")
        self._draw_envs()
        self._draw_trend()

    def matching(self) -> list[EpisodeState]:
        """Return the newest episodes of the environments that match the filter."""
        return [e for e in self.watched.state.latest if cells.matches(e, self.query_text)]

    def _draw_envs(self) -> None:
        run = self.watched.state
        table = self.screen_stack[0].query_one("#envs", DataTable)
        width = self.size.width * 3 // 5 if self.size.width >= WIDE else self.size.width
        columns = [column for column in cells.ENV_COLUMNS if width >= column.least]
        chosen = self.selected
        rows = {str(e.env): [column.cell(run, e) for column in columns] for e in self.matching()}
        fill(table, [column.title for column in columns], rows)
        if self.selected != chosen and str(chosen) in rows:
            table.move_cursor(row=list(rows).index(str(chosen)))
        nothing = self.screen_stack[0].query_one("#nothing", Static)
        table.display = bool(rows)
        nothing.display = not rows
        if not rows:
            filtered = f"no environment matches “{self.query_text}”: Esc clears the filter"
            nothing.update(cells.plain(filtered if self.query_text else self.watched.nothing(), "dim", 300))
        self._draw_slots()

    @property
    def selected(self) -> int | None:
        """The number of the selected environment."""
        table = self.screen_stack[0].query_one("#envs", DataTable)
        rows = list(table.rows)
        return int(rows[table.cursor_row].value or 0) if 0 <= table.cursor_row < len(rows) else None

    def _draw_slots(self) -> None:
        run = self.watched.state
        table = self.screen_stack[0].query_one("#slots", DataTable)
        e = run.envs[self.selected].latest if self.selected in run.envs else None
        most = len(cells.SLOT_TITLES) if self.size.width >= 100 else 6
        table.display = e is not None and bool(e.slots)
        if e is None:
            return
        used = sorted(e.slots.values(), key=lambda slot: not slot.was_used())[: max(3, self.size.height // 4)]
        fill(table, cells.SLOT_TITLES[:most], {slot.name: cells.slot_cells(run, e, slot)[:most] for slot in used})
        if self.screen_stack[0].has_class("wide"):
            version = e.env, e.number, sum(len(life.moves) for life in e.seeds.values())
            if version != self._lives:
                self._lives = version
                self.screen_stack[0].query_one("#lives", Static).update(seed_lives(self.watched, e, MOST_LIVES))

    def _draw_rest(self) -> None:
        run = self.watched.state
        main = self.screen_stack[0]
        log = main.query_one("#events", RichLog)
        if run.position < self._listed:  # the journal was replaced
            log.clear()
            self._listed = 0
        for position, row in run.events:
            if position > self._listed:
                log.write(cells.event_line(run, row), shrink=False)
        self._listed = run.position
        main.query_one("#ppo", Static).update(cells.ppo_line(run), layout=False)
        main.query_one("#ppo").display = run.newest_update is not None
        main.query_one("#ops", Static).update(cells.ops_line(run), layout=False)
        self._draw_trend()
        if log.auto_scroll:
            log.scroll_end(animate=False, immediate=True)  # before it is painted, so that it is painted once
            self.call_after_refresh(log.scroll_end, animate=False)  # it may be shorter by a line that appeared

    def _draw_trend(self) -> None:
        """Show the mean quality over environments, if the terminal is tall enough."""
        main = self.screen_stack[0]
        mean = (mean_series(self.watched.state) or {}) if main.has_class("tall") else {}
        values = [v for v in mean.get("quality", {}).get("mean", []) if v is not None]
        main.query_one("#trend", Sparkline).data = values
        main.query_one("#trend").display = len(values) > 1

    # -- keys

    def on_data_table_row_highlighted(self) -> None:
        """Show the slots of the selected environment."""
        self._draw_slots()

    def on_data_table_row_selected(self) -> None:
        """Open the selected environment."""
        self.action_detail()

    def action_move(self, way: str) -> None:
        """Move among environments, or scroll the events if they fill the screen."""
        main = self.screen_stack[0]
        if main.has_class("events-only"):
            log = main.query_one("#events", RichLog)
            scroll(log, way)
            log.auto_scroll = log.scroll_offset.y >= log.max_scroll_y
            return
        table = main.query_one("#envs", DataTable)
        last = table.row_count - 1
        moves = {"down": 1, "up": -1, "page_down": 10, "page_up": -10, "top": -last, "bottom": last}
        table.move_cursor(row=max(0, min(last, table.cursor_row + moves[way])))

    def action_detail(self) -> None:
        """Open the page of the selected environment."""
        if self.selected is not None and len(self.screen_stack) == 1:
            self.push_screen(DetailPage(self.watched, self.selected))

    def action_events(self) -> None:
        """Show the events on the full screen, or the tables again."""
        self.screen_stack[0].toggle_class("events-only")

    def action_filter(self) -> None:
        """Ask for a filter."""
        field = self.query_one("#filter", Input)
        field.display = field.can_focus = True
        self.screen.set_focus(field)  # at once: `focus` waits until other messages, such as the next key, are handled

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter the environments while the filter is being typed."""
        self.query_text = event.value
        self._draw_envs()

    def on_input_submitted(self) -> None:
        """Keep the filter and return to the environments."""
        field = self.query_one("#filter", Input)
        field.display = field.can_focus = False
        self.query_one("#envs").focus()

    def action_clear(self) -> None:
        """Clear the filter."""
        field = self.query_one("#filter", Input)
        field.value = self.query_text = ""
        self.on_input_submitted()
        self._draw_envs()

    def action_help(self) -> None:
        """Open the help page."""
        if not isinstance(self.screen, HelpPage):
            self.push_screen(HelpPage())

    async def action_reread(self) -> None:
        """Read the run again from the beginning."""
        self.watched.restart()
        self._listed = 0
        self.query_one("#events", RichLog).clear()
        await self.read()
