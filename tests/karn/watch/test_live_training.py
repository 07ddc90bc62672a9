"""`esper watch` in a pseudo-terminal while `esper train` writes the run."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

pytest.importorskip("textual", reason="the terminal view needs the extra tui")

pytestmark = pytest.mark.slow
ESPER = str(Path(sys.executable).parent / "esper")
ESCAPE = re.compile(rb"\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])")
ROUND = re.compile(rb"round +(\d+)/100000\b")
PATIENCE_S = 240.0
TRAIN = [
    "train",
    "--sim",
    "--rounds",
    "100000",
    "--envs",
    "2",
    "--epochs",
    "12",
    "--set",
    "ppo.minibatches=1",
    "--no-compare",
]


class Terminal:
    """A process in a pseudo-terminal of 80 × 24 characters."""

    def __init__(self, *command: str) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        environment |= {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.output = b""

    def read(self) -> bool:
        """Read what was written. Return False once the process has closed the terminal."""
        if select.select([self.master], [], [], 0.1)[0]:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # Linux reports the closed terminal as an error
                return False
            self.output += data
            return bool(data)
        return True

    @property
    def rounds(self) -> list[int]:
        """The rounds shown so far, in order."""
        return [int(number) for number in ROUND.findall(ESCAPE.sub(b"", self.output))]

    def wait(self, holds) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert self.read(), ESCAPE.sub(b"", self.output).decode(errors="replace")
            assert time.monotonic() < end, ESCAPE.sub(b"", self.output).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_watch_shows_rounds_of_a_running_training_and_quits_by_q(tmp_path):
    run = tmp_path / "run"
    train = subprocess.Popen([ESPER, *TRAIN, "--out", str(run)], stdout=subprocess.DEVNULL)
    terminal = None
    try:
        end = time.monotonic() + PATIENCE_S
        while not (run / "manifest.json").exists():
            assert train.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        terminal = Terminal(ESPER, "watch", str(run))
        terminal.wait(lambda: len(terminal.rounds) > 0)
        first = terminal.rounds[-1]
        terminal.wait(lambda: terminal.rounds[-1] > first)
        assert terminal.rounds == sorted(terminal.rounds)

        os.write(terminal.master, b"q")
        end = time.monotonic() + PATIENCE_S
        while terminal.read():
            assert time.monotonic() < end
        assert terminal.process.wait(PATIENCE_S) == 0
        assert b"\x1b[?1049l" in terminal.output  # the normal screen is restored
        assert train.poll() is None  # the run is not affected
    finally:
        if terminal is not None:
            terminal.close()
        train.terminate()
        train.wait(PATIENCE_S)
