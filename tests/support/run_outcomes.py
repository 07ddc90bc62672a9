"""Outcomes of runs: what must not depend on interruptions or on the number of processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline.events import KINDS
from esper.nissa.journal_reader import Damage, read
from esper.simic.training.checkpointer import CHECKPOINTS, STATE
from esper.tolaria.checkpoint import Checkpoints
from esper.tolaria.packing import unpacked
from tests.support.journal_checks import missing_seqs

OF_THE_PROCESS = {"run_started", "run_finished", "checkpoint", "health"}
"""Kinds that describe processes, not the run."""
SMALL_NUMBERS = ("return_scale", "updates", "bad_in_a_row", "update_events", "env_steps")
OF_THE_CLOCK = {"wall_ms"}
TINY = [
    "--sim", "--envs", "6", "--epochs", "20", "--set", "worlds=16", "--set", "network.width=16",
    "--set", "ppo.minibatches=3", "--set", "ppo.entropy_final=0.01",
    "--set", "checkpoint_share=1.0", "--no-compare",
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: everything learnt, and all events in order, per environment."""

    learnt: str
    happened: str


def outcome_of(run: Path) -> Outcome:
    saved = Checkpoints(run / CHECKPOINTS).newest()
    assert saved is not None
    digest = hashlib.sha256(saved.name.encode())
    for name, tensor in sorted(saved.tensors(STATE).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    document = unpacked(saved.document(STATE), saved.tensors(STATE))
    numbers = {
        k: v
        for k, v in document.items()
        if k in ("return_scale", "updates", "bad_in_a_row", "update_events", "env_steps")
    }
    digest.update(repr(without_times(numbers)).encode())
    happened = hashlib.sha256(repr(events(run)).encode())
    return Outcome(digest.hexdigest(), happened.hexdigest())


def events(run: Path) -> list[tuple[int, str, Any]]:
    """Return the must-keep events of a run without clocks: those of the run first, then environment by environment."""
    events_seen = [
        (int(e.data.get("env", -1)), e.kind, without_times(e.data))
        for e in read(run)
        if e.kind not in OF_THE_PROCESS and KINDS[e.kind].KEEP
    ]
    return sorted(events_seen, key=lambda row: row[0])  # stable: in the order in which they happened


def without_times(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: without_times(value) for key, value in tree.items() if key not in OF_THE_CLOCK}
    return [without_times(value) for value in tree] if isinstance(tree, list) else tree


def is_whole(run: Path) -> bool:
    """Return whether every number of the journal occurs once; only gauges may have been replaced by newer ones."""
    damage = Damage()
    entries = list(read(run, damage))
    return not (damage.lines or damage.torn or damage.duplicates or missing_seqs(entries))


def esper(*args: str | Path, **kwargs: Any) -> subprocess.Popen[bytes]:
    """Start a real process in its own session, so that its whole process group can be killed."""
    command = [sys.executable, "-m", "esper", *map(str, args)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    return subprocess.Popen(command, **options | {"preexec_fn": restore_signal_handling} | kwargs)


def restore_signal_handling(ignored: tuple[int, ...] = ()) -> None:
    """Restore default signal handling, which the parent of these tests may have disabled, except for `ignored`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


def finished(process: subprocess.Popen[bytes], code: int = 0, timeout: float = 300) -> str:
    output = process.communicate(timeout=timeout)[0].decode()
    assert process.returncode == code, f"exit code {process.returncode}\n{output}"
    return output


def run_with_kills(
    run: Path, args: list[str], kills: int, seed: int, round_s: float = 1.0, say: Any = lambda text: None
) -> int:
    """Start a run, kill it with SIGKILL at random moments and resume it `kills` times; return the kills.

    Each session lasts zero, one or two rounds and a part of one more.
    """
    rng, done = random.Random(seed), 0
    while True:
        begun = newest(run) != ""
        process = esper("train", *(["--resume", run, "--no-compare"] if begun else ["--out", run, *args]))
        if done == kills:
            finished(process)
            return done
        wait_for_first_write(run, process, begun)
        goal = rounds_done(run) + rng.choice((0, 1, 2))
        while process.poll() is None and rounds_done(run) < goal:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, round_s))
        if process.poll() is not None:
            finished(process)
            return done
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        done += 1
        say(f"kill {done}: {newest(run) or 'before its first checkpoint'}")
        if not newest(run):  # no checkpoint yet: start again
            subprocess.run(["rm", "-rf", str(run)], check=True)


def rounds_done(run: Path) -> int:
    return int(newest(run).removeprefix("round-") or 0)


def newest(run: Path) -> str:
    saved = Checkpoints(run / CHECKPOINTS).newest() if (run / CHECKPOINTS).is_dir() else None
    return "" if saved is None else saved.name


def seconds_per_round(run: Path) -> float:
    """Return the seconds per round of an uninterrupted run, by its checkpoints."""
    events_seen = [e.time_s for e in read(run) if e.kind == "checkpoint"]
    return (events_seen[-1] - events_seen[0]) / (len(events_seen) - 1)


def wait_for_first_write(run: Path, process: subprocess.Popen[bytes], begun: bool) -> None:
    """Wait until the process writes into the run: a kill before that only tests Python's startup."""

    def seen() -> int:
        total = 0
        for file in (run / "events").glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # resuming removes and replaces some
                total += file.stat().st_mtime_ns
        return total

    before = seen() if begun else 0
    while process.poll() is None and seen() == before:
        time.sleep(0.01)
