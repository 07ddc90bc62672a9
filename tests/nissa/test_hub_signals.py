"""Process exit: however a process ends, emitted events are on disk and the exit code is correct."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from esper.nissa.hub import TICK_S
from esper.nissa.journal import holes, read
from tests.support.run_outcomes import heed_signals

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from esper.leyline.events import Governor, RunFinished
from esper.nissa.hub import NissaHub
from esper.nissa.sinks.jsonl import JsonlSink

class Slow:
    def write(self, records): time.sleep(0.002 * len(records))
    def close(self): pass

def keep(step):
    return Governor(env=0, episode=0, step=step, alarm="", action="")

journal = JsonlSink(Path(sys.argv[1]) / "events")
"""


def start(tmp_path, script):
    code = PRELUDE + textwrap.dedent(script)
    command = [sys.executable, "-c", code, str(tmp_path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals)


def said(process, word="ready"):
    assert process.stdout.readline().strip() == word, process.stderr.read()


def steps(tmp_path):
    entries = list(read(tmp_path))
    assert not holes(entries)
    return [entry.data["step"] for entry in entries if entry.kind == "governor"]


def last(tmp_path):
    return list(read(tmp_path))[-1]


def test_normal_exit_closes_an_open_hub(tmp_path):
    process = start(
        tmp_path,
        """
        hub = NissaHub([journal, Slow()])
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
    said(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    assert steps(tmp_path) == list(range(5_000))
    assert last(tmp_path).kind == "health"


TERMINATED = {
    "default": ("", -signal.SIGTERM),
    "a handler that exits": ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7),
    "another hub": ("NissaHub([Slow()]).close_on_signals()", -signal.SIGTERM),
}


@pytest.mark.parametrize(("before", "code"), TERMINATED.values(), ids=TERMINATED.keys())
def test_sigterm_loses_nothing_and_calls_the_previous_handler(tmp_path, before, code):
    script = f"""
    {before}
    hub = NissaHub([journal])
    hub.close_on_signals(before=lambda number: hub.emit(RunFinished(status=str(number), wall_s=1.0, env_steps=1)))
    for step in range(5_000):
        hub.emit(keep(step))
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
    """
    process = start(tmp_path, script)
    said(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == code
    assert steps(tmp_path) == list(range(5_000))
    kinds = [entry.kind for entry in read(tmp_path)]
    assert kinds[-2:] == ["run_finished", "health"]


@pytest.mark.parametrize(("capacity", "timeout"), [(65_536, 0.5), (8, 300.0)])
def test_sigterm_during_emit_does_not_deadlock(tmp_path, capacity, timeout):
    """The handler interrupts `emit`, possibly blocked at a full queue: it must not wait for the interrupted caller."""
    script = f"""
    hub = NissaHub([journal, Slow()], capacity={capacity})
    hub.close_on_signals(timeout={timeout})
    print("ready", flush=True)
    step = 0
    while step < 10_000_000:
        hub.emit(keep(step))
        step += 1
        if {capacity} > 100 and step % 100 == 0:
            time.sleep(0.001)
    """
    process = start(tmp_path, script)
    said(process)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    found = steps(tmp_path)
    assert found == list(range(len(found)))
    assert found
    assert last(tmp_path).kind == "health"


def test_ignored_signals_stay_ignored_and_close_restores_the_handler(tmp_path):
    script = """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hub = NissaHub([journal])
    hub.close_on_signals()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGHUP)
    hub.emit(keep(0))
    hub.close()
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
    said(process)
    end = time.monotonic() + 60
    while len(steps(tmp_path)) < 40:
        assert time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert steps(tmp_path) == list(range(40))
