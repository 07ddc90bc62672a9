"""The terminal view in a real terminal, on a run that another process keeps writing."""

import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid

import pytest

from tests.support import ROOT

pytest.importorskip("textual", reason="the terminal view needs the extra tui")
if shutil.which("tmux") is None:
    pytest.skip("tmux is not installed: no terminal to test in", allow_module_level=True)

pytestmark = pytest.mark.slow
CODE = "import sys, pathlib, esper.commands.live_views as w; w.run_watch(pathlib.Path(sys.argv[1]), False)"
PATIENCE_S = 120.0


class Terminal:
    """A tmux server of its own: the screen as text, and keys."""

    def __init__(self, run, columns, rows, colour=True):
        self.name = f"esper-{uuid.uuid4().hex[:8]}"
        no_colour = "" if colour else "NO_COLOR=1 "
        command = f"{no_colour}{shlex.quote(sys.executable)} -c {shlex.quote(CODE)} {shlex.quote(str(run))}; sleep 60"
        self._tmux("new-session", "-d", "-x", str(columns), "-y", str(rows), command)

    def _tmux(self, *args):
        # -f /dev/null: ignore the user's tmux configuration
        base = ["tmux", "-L", self.name, "-f", "/dev/null"]
        environment = {k: v for k, v in os.environ.items() if k not in ("TMUX", "NO_COLOR", "COLUMNS", "LINES")} | {
            "LC_ALL": "C.UTF-8"
        }
        return subprocess.run([*base, *args], capture_output=True, text=True, check=True, env=environment).stdout

    def rows(self):
        return self._tmux("capture-pane", "-p").split("\n")

    def raw(self):
        return self._tmux("capture-pane", "-p", "-e")

    def press(self, *keys):
        self._tmux("send-keys", *keys)

    def wait(self, holds):
        """Wait for a screen for which `holds` is true and return its rows."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            rows = self.rows()
            if holds(rows):
                return rows
            time.sleep(0.1)
        pytest.fail("never came:\n" + "\n".join(rows))

    def close(self):
        self._tmux("kill-server")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "live"
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.support.live_run", str(run), "--events-per-s", "40"], cwd=ROOT
    )
    while not (run / "events" / "rank0-00000.jsonl").exists():
        time.sleep(0.05)
    yield run
    writer.kill()
    writer.wait()


@pytest.fixture
def terminal(request):
    opened = []

    def open_terminal(*args, **options):
        opened.append(Terminal(*args, **options))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def has(word):
    return lambda rows: any(word in row for row in rows)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40), (200, 60)])
def test_live_run_fills_the_terminal_and_updates(live, terminal, columns, rows):
    screen = terminal(live, columns, rows)
    first = screen.wait(lambda r: r[0].startswith(" LIVE") and has("digits/0")(r) and has("r0c2")(r) and has("Quit")(r))

    assert "ALL CLEAR" in first[2]
    assert max(len(row) for row in first) <= columns
    elapsed = first[1]
    later = screen.wait(lambda r: r[1] != elapsed and r[0].startswith(" LIVE"))
    assert "Quit" in later[-2] + later[-1]


def test_keys_open_and_close_pages_and_quit(live, terminal):
    screen = terminal(live, 80, 24)
    screen.wait(has("digits/3"))

    screen.press("?")
    screen.wait(has("Stages:"))
    screen.press("q")
    screen.wait(has("SLOTS"))
    screen.press("j", "Enter")
    screen.wait(lambda rows: rows[0].startswith(" digits/1") and has("EVENTS")(rows))
    screen.press("q")
    screen.wait(has("SLOTS"))
    screen.press("e")
    screen.wait(lambda rows: not has("SLOTS")(rows))
    screen.press("e")
    screen.wait(has("SLOTS"))
    screen.press("/")
    screen.wait(has("name, number"))
    screen.press("2")
    screen.wait(lambda rows: has("digits/2")(rows) and not has("digits/1 ")(rows[:8]))
    screen.press("Enter")
    screen.press("q")
    screen.wait(lambda rows: not has("SLOTS")(rows))  # the terminal is restored


def test_no_color_is_respected(live, terminal):
    plain, coloured = terminal(live, 80, 24, colour=False), terminal(live, 80, 24)
    for screen in (plain, coloured):
        screen.wait(has("digits/3"))

    def colours(raw):
        codes = [c for part in raw.split("\x1b[")[1:] for c in part.split("m")[0].split(";")]
        return [c for c in codes if c.isdigit() and (30 <= int(c) <= 38 or 40 <= int(c) <= 48 or 90 <= int(c) <= 107)]

    assert colours(plain.raw()) == []
    assert colours(coloured.raw())
