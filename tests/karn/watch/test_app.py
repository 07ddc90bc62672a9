"""The terminal view and its keys, driven through Textual's pilot."""

import asyncio
import os
import shutil
import subprocess
import sys
import time

import pytest

pytest.importorskip("textual", reason="the terminal view needs the extra tui")

from textual.widgets import DataTable, RichLog

from esper.karn.watch.app import MOST_PAUSE_S, MOST_SHARE, DetailPage, HelpPage, WatchApp, pause_s
from esper.leyline.errors import EsperError
from esper.nissa.journal_writer import JsonlSink
from esper.nissa.record import Record
from esper.nissa.run import RunDirectory
from esper.nissa.run_list import list_runs
from tests.support.live_run import lines_of, run_events, started, write_run
from tests.support.untrusted_runs import run_with_control_characters

SIZES = [(80, 24), (120, 40), (200, 60)]


def shown(app):
    """Return the rows of the screen as text."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


def watch(run, drive, size=(80, 24), **options):
    """Run the app on `run`, drive it, and return what `drive` returns."""

    async def session():
        app = WatchApp(run, poll_s=60.0, **options)  # tests trigger each read themselves
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await app.read()
            await settle(pilot)
            return await drive(app, pilot)

    return asyncio.run(session())


async def settle(pilot):
    """Wait until the screen no longer changes."""
    rows, unchanged = None, 0
    for _ in range(200):
        await pilot.pause(0.01)
        now = shown(pilot.app)
        unchanged, rows = (unchanged + 1 if now == rows else 0), now
        if unchanged == 3:
            return
    raise AssertionError("the screen keeps changing")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "done", run_events(), status="finished")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    events = run_events(envs=128, slots=25, steps=3, rounds=1, ends=False)
    return write_run(tmp_path_factory.mktemp("runs") / "large", events, apart=0.001)


def test_costly_redraws_are_rarer():
    assert pause_s(0.001, 1.0) == 0.0
    assert 0.045 / (1.0 + pause_s(0.045, 1.0)) == pytest.approx(MOST_SHARE)
    assert pause_s(10.0, 1.0) == MOST_PAUSE_S


@pytest.mark.parametrize("size", SIZES)
def test_cells_of_slots_are_not_cut_to_the_width_of_their_titles(finished, size):
    async def drive(app, pilot):
        return shown(app)

    texts = "\n".join(watch(finished, drive, size))
    assert "fossilized" in texts
    assert "━ 1.00" in texts


@pytest.mark.parametrize("size", SIZES)
def test_one_screen_shows_run_environments_slots_and_events(finished, size):
    async def drive(app, pilot):
        return shown(app)

    rows = watch(finished, drive, size)
    text = "\n".join(rows)

    assert len(rows) == size[1]
    assert rows[0].startswith(" FINISHED   digits by tamiyo")
    assert rows[2] == "ALL CLEAR"
    for word in ("ENV", "digits/3", "SLOT", "r0c2", "run finished", "PPO round 1", "OPS", "BEST"):
        assert word in text, word
    assert "Quit" in rows[-1]


@pytest.mark.parametrize("size", SIZES)
def test_run_of_128_environments_and_25_slots_scrolls(large, size):
    async def drive(app, pilot):
        first, envs = shown(app), app.screen.query_one("#envs", DataTable)
        await pilot.press("G")
        await settle(pilot)
        return first, shown(app), envs.cursor_row, envs.scroll_offset.y

    first, last, chosen, at = watch(large, drive, size)

    assert any("digits/0 " in row for row in first)
    assert any("digits/127" in row and "3/3" in row for row in last)
    assert chosen == 127
    assert at > 0


@pytest.mark.parametrize("key", ["", "enter", "e"], ids=["main page", "environment page", "events page"])
def test_no_character_of_a_run_acts_on_the_terminal(tmp_path, monkeypatch, key):
    async def drive(app, pilot):
        if key:
            await pilot.press(key)
            await settle(pilot)
        return shown(app)

    monkeypatch.chdir(tmp_path)
    rows = watch(run_with_control_characters("run"), drive, (200, 60))

    assert any("\\x1b]0;owned" in row for row in rows)
    assert not [c for row in rows for c in row if not c.isprintable()]


def test_nothing_is_drawn_without_changes(finished):
    async def drive(app, pilot):
        drawn = []
        app._draw_envs = lambda: drawn.append("envs")
        await app.read()
        await app.read()
        return drawn

    assert watch(finished, drive) == []


def test_only_changed_cells_are_updated(tmp_path):
    events = list(run_events(envs=3, slots=1, steps=4, rounds=1, ends=False))
    run = write_run(tmp_path / "r", events[:12])
    file = run / "events" / "rank0-00000.jsonl"

    async def drive(app, pilot):
        await app.read()
        changed = set()
        table = app.screen.query_one("#envs", DataTable)
        update = table.update_cell
        table.update_cell = lambda row, column, cell, **options: (
            changed.add(row),
            update(row, column, cell, **options),
        )
        app._draw_envs()
        assert not changed
        file.write_bytes(b"".join(lines_of(events[:13])))
        await app.read()
        return changed, events[12].env

    changed, env = watch(run, drive)
    assert changed <= {str(env)}


@pytest.mark.parametrize("size", SIZES)
def test_app_waits_for_a_run_in_an_empty_directory(tmp_path, size):
    async def drive(app, pilot):
        before = shown(app)
        write_run(tmp_path / "later", run_events(ends=False))
        await app.read()
        await settle(pilot)
        return before, shown(app)

    before, after = watch(tmp_path, drive, size)

    assert before[0].startswith(" WAITING")
    assert any("waiting for a run to begin" in row for row in before)
    assert after[0].startswith(" LIVE")
    assert any("digits/0" in row for row in after)


def test_run_without_environments_says_so(tmp_path):
    async def drive(app, pilot):
        return shown(app)

    rows = watch(write_run(tmp_path / "r", [started(envs=0, slots=0)]), drive)

    assert any("no environment has begun yet" in row for row in rows)


def test_appended_events_appear_at_the_next_refresh(tmp_path):
    events = list(run_events(envs=1, slots=1, steps=4, rounds=1, ends=False))
    run = write_run(tmp_path / "r", [])
    file = run / "events" / "rank0-00000.jsonl"
    lines = lines_of(events)

    async def drive(app, pilot):
        positions = []
        for count in (3, 6, len(lines)):
            file.write_bytes(b"".join(lines[:count]) + b'{"seq":')  # the last line is still being written
            await app.read()
            await settle(pilot)
            positions.append(app.watched.state.position)
        return positions, shown(app)

    positions, rows = watch(run, drive)

    assert positions == [3, 6, len(lines)]
    assert any("episode ended" in row for row in rows)


def test_j_and_k_select_the_environment_whose_slots_are_shown(finished):
    async def drive(app, pilot):
        chosen = []
        for key in ("j", "j", "k", "down", "end", "j", "home", "k"):
            await pilot.press(key)
            await pilot.pause()
            chosen.append(app.selected)
        return chosen

    assert watch(finished, drive) == [1, 2, 1, 2, 3, 3, 0, 0]


def test_enter_opens_the_environment_and_escape_returns(finished):
    async def drive(app, pilot):
        await pilot.press("j", "enter")
        await settle(pilot)
        inside, rows = app.screen, shown(app)
        await pilot.press("escape")
        await settle(pilot)
        return inside, rows, app.screen

    inside, rows, outside = watch(finished, drive, (100, 40))

    assert isinstance(inside, DetailPage)
    assert rows[0].startswith(" digits/1,")
    text = "\n".join(rows)
    assert "holding → fossilized" in text
    assert "also legal: WAIT" in text
    assert not isinstance(outside, DetailPage)


def test_event_list_follows_the_newest_unless_scrolled(tmp_path):
    events = list(run_events(ends=False))
    lines = lines_of(events)
    run = write_run(tmp_path / "r", events[:200])
    file = run / "events" / "rank0-00000.jsonl"

    async def drive(app, pilot):
        log = app.screen.query_one("#events", RichLog)
        await pilot.press("e")
        await settle(pilot)
        at_end = log.scroll_offset.y == log.max_scroll_y > 0
        file.write_bytes(b"".join(lines[:300]))
        await app.read()
        await settle(pilot)
        followed = log.scroll_offset.y == log.max_scroll_y
        await pilot.press("k", "k")
        await settle(pilot)
        at = log.scroll_offset.y
        file.write_bytes(b"".join(lines))
        await app.read()
        await settle(pilot)
        return at_end, followed, at == log.scroll_offset.y

    assert watch(run, drive) == (True, True, True)


def test_filter_accepts_names_numbers_and_states(finished):
    async def drive(app, pilot):
        matches = {}
        for query in ("its/2", "3", "ended", "rising", "nothing"):
            await pilot.press("slash", *query)
            await settle(pilot)
            matches[query] = [e.env for e in app.matching()]
            await pilot.press("enter")
            await settle(pilot)
            matches["screen", query] = "\n".join(shown(app))
            await pilot.press("escape")
            await settle(pilot)
        return matches, [e.env for e in app.matching()]

    matches, after = watch(finished, drive)

    assert matches["its/2"] == [2]
    assert matches["3"] == [3]
    assert matches["ended"] == [0, 1, 2, 3]
    assert matches["rising"] == matches["nothing"] == []
    assert "no environment matches “nothing”" in matches["screen", "nothing"]
    assert after == [0, 1, 2, 3]


def test_help_explains_keys_and_terms(finished):
    async def drive(app, pilot):
        await pilot.press("question_mark")
        await settle(pilot)
        return app.screen, shown(app)

    page, rows = watch(finished, drive, (100, 70))

    assert isinstance(page, HelpPage)
    for word in ("Enter", "Stages", "fossilised", "CONTRIB", "SHAPLEY"):
        assert any(word in row for row in rows), word


def test_r_reloads_the_run(finished):
    async def drive(app, pilot):
        before = app.watched.state
        await pilot.press("r")
        await settle(pilot)
        return before, app.watched.state

    before, after = watch(finished, drive)

    assert before is not after
    assert after.position == before.position


def test_q_quits(finished):
    async def drive(app, pilot):
        await pilot.press("q")
        await settle(pilot)
        return app._exit

    assert watch(finished, drive)


def test_resizing_the_terminal_updates_the_layout(finished):
    async def drive(app, pilot):
        await pilot.resize_terminal(200, 60)
        await settle(pilot)
        wide = shown(app)
        await pilot.resize_terminal(80, 24)
        await settle(pilot)
        return wide, shown(app)

    wide, narrow = watch(finished, drive)

    assert any("VAL LOSS" in row for row in wide)
    assert not any("VAL LOSS" in row for row in narrow)
    assert "Quit" in narrow[-1]


# the command


def command(*args, **options):
    code = "import sys; from pathlib import Path; from esper.commands.live_views import run_watch; "
    code += "run_watch(Path(sys.argv[1]), '--once' in sys.argv)"
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, **options)


def test_without_a_terminal_one_plain_frame_is_printed(finished):
    done = command(finished)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" FINISHED ")
    assert "\x1b" not in done.stdout
    assert "digits/3" in done.stdout
    assert command(finished, "--once").stdout == done.stdout


def test_plain_frame_needs_neither_textual_nor_unicode(finished):
    code = "import sys; sys.modules['textual'] = None; from pathlib import Path; "
    code += f"from esper.commands.live_views import run_watch; run_watch(Path({str(finished)!r}), True)"
    env = {"PYTHONIOENCODING": "ascii", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env)

    assert done.returncode == 0, done.stderr
    assert b"FINISHED" in done.stdout


def test_missing_textual_names_the_extra(finished, monkeypatch):
    from esper.commands import live_views

    monkeypatch.setattr(sys, "stdout", type("Tty", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(sys, "stdin", type("Tty", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(EsperError, match=r"esper-lite\[tui\]"):
        live_views.run_watch(finished, once=False)


def test_once_on_a_run_that_has_not_started_says_so(tmp_path):
    assert "waiting for a run to begin" in command(tmp_path).stdout


def test_copy_of_a_running_run_is_shown_as_killed(tmp_path):
    with RunDirectory.create(tmp_path, "digits", name="it", manifest={}) as run:
        sink = JsonlSink(run.events_dir)
        sink.write([Record(0, time.time(), 0, started())])
        assert command(run.path, "--once").stdout.startswith(" LIVE ")
        shutil.copytree(run.path, tmp_path / "copy")
        sink.close()
    message = command(tmp_path / "copy", "--once").stdout
    assert message.startswith(" KILLED ")
    assert {row.path.name: row.status for row in list_runs(tmp_path)} == {"it": "finished", "copy": "killed"}


def test_damaged_manifest_and_directory_in_the_journal_break_no_frame(tmp_path):
    run = write_run(tmp_path / "run", run_events(envs=1, slots=1, steps=3, rounds=1))
    (run / "manifest.json").write_text("{")
    (run / "events" / "rank0-00007.jsonl").mkdir()
    done = command(run, "--once")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" FINISHED ")
    assert "manifest" in done.stdout


def test_ctrl_c_exits_without_traceback(monkeypatch, capsys):
    from esper import cli
    from esper.commands import live_views

    def stop(run, once):
        raise KeyboardInterrupt

    monkeypatch.setattr(live_views, "run_watch", stop)
    monkeypatch.setattr(sys, "argv", ["esper", "watch", "x"])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 130
    assert capsys.readouterr().err == "esper: interrupted\n"
