"""Cost of a live view: CPU time of `esper dash` with open pages, of `esper watch`, and of the process they watch.

A process appends events to a journal at a steady rate, as training does. It is measured alone, then with one view
at a time. Figures are percent of one core. Linux only: CPU times are read from /proc.
"""

from __future__ import annotations

import argparse
import fcntl
import http.client
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.journal_fold import events
from esper.leyline.events import RunStarted
from esper.nissa.recorder import record

WARM_S = 5.0
"""Seconds before a measurement: the program has been loaded and the journal has been read."""


def write(path: Path, per_second: float) -> None:
    """Record a run at a steady rate until killed."""
    stream = events()
    first = next(stream)
    assert isinstance(first, RunStarted)
    with record("live view", out=path) as run:
        run.hub.emit(first)
        begin = time.monotonic()
        for n in count(1):
            run.hub.emit(next(stream))
            time.sleep(max(0.0, begin + n / per_second - time.monotonic()))


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program of this interpreter, and kill it at the end."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def dashboard(runs: Path, pages: int) -> Iterator[int]:
    """Serve the runs to this number of pages that follow the newest one. Yield the process."""
    with started("esper", "dash", str(runs)) as process:
        assert process.stdout is not None
        url = next(
            match for line in process.stdout if (match := re.search(r"127\.0\.0\.1:(\d+)/\?token=([\w-]+)", line))
        )
        for _ in range(pages):
            threading.Thread(target=_follow, args=(int(url[1]), url[2]), daemon=True).start()
        yield process.pid


def _follow(port: int, token: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/api/runs/0/live", headers={"Cookie": f"esper_dash_{port}={token}"})
    answer = connection.getresponse()
    while answer.readline():
        pass


@contextmanager
def terminal(runs: Path, columns: int, lines: int) -> Iterator[int]:
    """Watch the newest run in a terminal of this size. Yield the process."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "esper", "watch", str(runs)], stdin=theirs, stdout=theirs, stderr=theirs
    )
    threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(ours, 1 << 16), b"")], daemon=True).start()
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def share(pids: list[int], seconds: float, repeats: int) -> list[float]:
    """Return the CPU time of processes during this time in percent of one core, median over repeats."""
    time.sleep(WARM_S)
    times = [[cpu_s(pid) for pid in pids]]
    for _ in range(repeats):
        time.sleep(seconds)
        times.append([cpu_s(pid) for pid in pids])
    return [100 * float(np.median(np.diff(each))) / seconds for each in zip(*times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=float, default=50.0, help="Events per second.")
    parser.add_argument("--seconds", type=float, default=30.0, help="Duration of each measurement.")
    parser.add_argument("--repeats", type=int, default=1, help="Measurements of each view.")
    parser.add_argument("--write", type=Path, help="Only record a run into this directory, until killed.")
    options = parser.parse_args()
    if options.write:
        write(options.write, options.events)
        return
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place)
        writing = ("benchmarks.live_view", "--write", str(runs / "run"), "--events", str(options.events))
        with started(*writing) as writer:
            (alone,) = share([writer.pid], options.seconds, options.repeats)
            print(f"recording {options.events:g} events/s: {alone:.1f} % of a core without a view", flush=True)
            for pages in (1, 4):
                with dashboard(runs, pages) as view:
                    costs = share([view, writer.pid], options.seconds, options.repeats)
                print(f"esper dash, open pages {pages}: {costs[0]:.1f} %, recording {costs[1]:.1f} %", flush=True)
            for columns, lines in ((80, 24), (200, 60)):
                with terminal(runs, columns, lines) as view:
                    costs = share([view, writer.pid], options.seconds, options.repeats)
                print(f"esper watch {columns}x{lines}: {costs[0]:.1f} %, recording {costs[1]:.1f} %", flush=True)


if __name__ == "__main__":
    main()
