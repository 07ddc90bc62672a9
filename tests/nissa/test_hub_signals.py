"""Process exit: however a process ends, emitted events are on disk and the exit code is correct."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from esper.nissa.hub import TICK_S
from esper.nissa.journal_reader import read
from tests.support.journal_checks import missing_seqs
from tests.support.run_outcomes import restore_signal_handling

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from esper.leyline.events import GovernorAlarm
from esper.nissa.hub import NissaHub
from esper.nissa.journal_writer import JsonlSink
from esper.nissa.signals import terminable

class SlowSink:
    def write(self, records): time.sleep(0.002 * len(records))
    def close(self): pass

def keep(step):
    return GovernorAlarm(env=0, episode=0, step=step, alarm="", action="")

journal = JsonlSink(Path(sys.argv[1]) / "events")
"""


started: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def close_pipes():
    yield
    while started:
        with started.pop():
            pass


def start(tmp_path, script):
    code = PRELUDE + textwrap.dedent(script)
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=restore_signal_handling))
    return started[-1]


def wait_for_word(process, word="ready"):
    assert process.stdout.readline().strip() == word, process.stderr.read()


def steps(tmp_path):
    entries = list(read(tmp_path))
    assert not missing_seqs(entries)
    return [entry.data["step"] for entry in entries if entry.kind == "governor"]


def last(tmp_path):
    return list(read(tmp_path))[-1]


def test_normal_exit_closes_an_open_hub(tmp_path):
    process = start(
        tmp_path,
        """
        hub = NissaHub([journal, SlowSink()])
        for step in range(200):
            hub.emit(keep(step))
        """,
    )
    assert process.wait(60) == 0
    assert steps(tmp_path) == list(range(200))
    assert last(tmp_path).kind == "health"


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("raise ValueError('mine')", 1)])
def test_exit_by_error_keeps_its_code(tmp_path, end, code):
    process = start(tmp_path, f"with NissaHub([journal]) as hub:\n    hub.emit(keep(0))\n    {end}\n")
    assert process.wait(60) == code
    assert steps(tmp_path) == [0]
    assert last(tmp_path).kind == "health"


@pytest.mark.parametrize("opening", ["with NissaHub([journal]) as hub:", "hub = NissaHub([journal])\nif True:"])
def test_ctrl_c_loses_nothing(tmp_path, opening):
    body = """
    for step in range(5_000):
        hub.emit(keep(step))
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
    """
    process = start(tmp_path, opening + body)
    wait_for_word(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    assert steps(tmp_path) == list(range(5_000))
    assert last(tmp_path).kind == "health"


def test_sigterm_loses_nothing(tmp_path):
    script = """
    with terminable(), NissaHub([journal]) as hub:
        for step in range(5_000):
            hub.emit(keep(step))
        print("ready", flush=True)
        while True:
            time.sleep(0.1)
    """
    process = start(tmp_path, script)
    wait_for_word(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert steps(tmp_path) == list(range(5_000))
    assert last(tmp_path).kind == "health"


@pytest.mark.parametrize("capacity", [65_536, 8])
def test_closing_the_hub_in_a_signal_handler_does_not_deadlock(tmp_path, capacity):
    """The handler interrupts `emit`, possibly blocked at a full queue: it must not wait for the interrupted caller."""
    script = f"""
    hub = NissaHub([journal, SlowSink()], capacity={capacity})

    def close(number, frame):
        hub.close(0.5)
        sys.exit(7)

    signal.signal(signal.SIGTERM, close)
    print("ready", flush=True)
    step = 0
    while step < 10_000_000:
        hub.emit(keep(step))
        step += 1
        if {capacity} > 100 and step % 100 == 0:
            time.sleep(0.001)
    """
    process = start(tmp_path, script)
    wait_for_word(process)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 7
    written = steps(tmp_path)
    assert written == list(range(len(written)))
    assert written
    assert last(tmp_path).kind == "health"


def test_ignored_signals_stay_ignored_and_handlers_are_restored(tmp_path):
    script = """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with terminable(), NissaHub([journal]) as hub:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGHUP)
        hub.emit(keep(0))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    """
    assert start(tmp_path, script).wait(60) == 0
    assert steps(tmp_path) == [0]


def test_sigkill_loses_nothing_older_than_one_tick(tmp_path):
    """Events reach the file without flush or close: the sinks check for new ones every `TICK_S`."""
    assert TICK_S <= 0.2
    script = """
    hub = NissaHub([journal])
    for step in range(40):
        hub.emit(keep(step))
    print("ready", flush=True)
    time.sleep(600)
    """
    process = start(tmp_path, script)
    wait_for_word(process)
    end = time.monotonic() + 60
    while len(steps(tmp_path)) < 40:
        assert time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert steps(tmp_path) == list(range(40))
