"""The run that is watched: found, followed and folded, with its state and pace by the reader's clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from esper.karn.live_run import LiveRun
from esper.karn.run_state import RunState
from esper.leyline.errors import EsperError
from esper.nissa.run_list import find_run

LIVE_S, SLOW_S = 5.0, 15.0
"""Seconds without events up to which a run is LIVE, or SLOW. Runs with longer regular gaps have larger limits."""
RATE_WINDOW_S = 30.0
"""Seconds over which rates are averaged, at least."""
ENDED = ("finished", "failed", "interrupted", "killed")
TONES = {"FINISHED": "good", "FAILED": "bad", "INTERRUPTED": "warn", "KILLED": "bad", "LIVE": "good", "SLOW": "warn",
         "STALE": "bad", "WAITING": "note"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pace:
    """Times and rates of the header; None if unknown."""

    elapsed_s: float | None = None
    steps_per_s: float | None = None
    eta_s: float | None = None


class WatchedRun:
    """One run and its state. A run that does not exist yet is waited for."""

    def __init__(self, location: Path, clock: Callable[[], float]) -> None:
        self._location = location
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque(maxlen=600)  # (reader's clock, env-steps) at every arrival
        self._gaps: deque[float] = deque(maxlen=32)  # seconds between arrivals
        self._has_read = False
        self.trouble = ""
        """Why the run cannot be read any more: it was removed or replaced."""
        self._find()

    def _find(self) -> None:
        path = find_run(self._location)
        self._run = None if path is None else LiveRun(path)

    @property
    def state(self) -> RunState:
        """The state of the run; an empty one before the run exists."""
        return self._run.state if self._run is not None else RunState(self._location)

    @property
    def name(self) -> str:
        """The name of the run directory, "" if there is none yet."""
        return self._run.state.name if self._run is not None else ""

    def read(self) -> bool:
        """Fold new events, and return whether anything changed."""
        if self._run is None:
            self._find()
        if self._run is None:
            return False
        before = (self._run.state.position, self._run.state.status, self._run.state.losses)
        try:
            self._run.refresh(is_forced=True)
            self.trouble = ""
        except (EsperError, OSError) as error:
            self.trouble = f"the run cannot be read any more: {error}"
        state = self._run.state
        if state.position != before[0]:
            now = self._clock()
            if self._has_read and self._marks:
                self._gaps.append(now - self._marks[-1][0])
            self._marks.append((now if self._has_read else min(now, state.last_s), state.env_steps))
        is_first, self._has_read = not self._has_read, True
        return is_first or (state.position, state.status, state.losses) != before

    def restart(self) -> None:
        """Read everything again from the beginning. A directory of runs may have a newer run by now.

        If there is no run any more, the last state stays.
        """
        try:
            self._find()
        except EsperError:
            return
        self._has_read = False
        self._marks.clear()
        self._gaps.clear()

    def silence_s(self) -> float:
        """Return the seconds since the last event arrived."""
        return max(0.0, self._clock() - self._marks[-1][0]) if self._marks else 0.0

    def word(self) -> str:
        """Return the state of the run in one word, a key of TONES.

        A run without an owner is killed, unless events are arriving: a lock may not be visible on another machine.
        """
        state = self.state
        usual = max(self._gaps, default=0.0)
        status = state.finished.status if state.finished is not None else state.status
        if state.position == 0 and status not in ENDED:
            return "WAITING"
        if status in ENDED and not (status == "killed" and len(self._marks) > 1 and self.silence_s() < LIVE_S):
            return status.upper()
        silence = self.silence_s()
        return "LIVE" if silence <= max(LIVE_S, 2 * usual) else "SLOW" if silence <= max(SLOW_S, 4 * usual) else "STALE"

    def is_over(self) -> bool:
        """Return whether the run has ended."""
        return self.word().lower() in ENDED

    def done(self) -> float | None:
        """Return the completed share of all env-steps, if the run recorded their number."""
        state = self.state
        total = (state.about("steps") or 0) * (state.about("rounds") or 1) * len(state.envs)
        return min(1.0, state.env_steps / total) if total else None

    def pace(self) -> Pace:
        """Return elapsed time, env-steps per second and the time left."""
        state = self.state
        done = self.done()
        if state.wall_s is None:
            return Pace()
        elapsed = state.wall_s + (0.0 if self.is_over() else self.silence_s())
        rate = state.env_steps / elapsed if elapsed > 0 else None
        recent = [mark for mark in self._marks if mark[0] >= self._clock() - RATE_WINDOW_S]
        if len(recent) > 1 and not self.is_over():
            rate = (recent[-1][1] - recent[0][1]) / max(1e-9, self._clock() - recent[0][0])
        has_eta = done and rate and not self.is_over()
        return Pace(elapsed, rate, state.env_steps * (1 - done) / done / rate if has_eta and done and rate else None)

    def nothing(self) -> str:
        """Return why there is no environment to show."""
        if self._run is None:
            return f"waiting for a run to begin in {self._location}"
        if self.state.losses:
            return f"the journal is incomplete: {'; '.join(self.state.losses)}"
        if self.state.position == 0:
            return "the run ended before its first event" if self.is_over() else "waiting for the first event"
        return "no environment has begun yet"
