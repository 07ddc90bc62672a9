"""Wall and CPU time per phase of the loop. Always on; costs two clock reads per change of phase.

    phases = PhaseTimers()
    with phases("train"):
        …
    phases.totals()["train"].wall_ms

Entering a phase within another pauses the outer one, so the parts add up to the total.

The phases of a run: apply, train, validate, coalitions, norms, worth, features, policy, gather, update, telemetry,
checkpoint, twins. The validation pass of an epoch is `validate` if it evaluates only the current network, and
`coalitions` if it also evaluates other configurations in the same pass. `norms` is the part of it that re-estimates the
statistics of norms behind slots. `worth` computes contributions from the scores. `twins` trains no-growth baselines,
once per world.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter_ns, thread_time_ns
from typing import NamedTuple


class Total(NamedTuple):
    """Total time of one phase in milliseconds, and how often it was entered."""

    wall_ms: float
    cpu_ms: float
    calls: int


class _Phase(AbstractContextManager[None]):
    """Clock of one phase. Reused, so that entering a phase allocates nothing."""

    __slots__ = ("calls", "cpu", "owner", "wall")

    def __init__(self, owner: PhaseTimers) -> None:
        self.owner, self.wall, self.cpu, self.calls = owner, 0, 0, 0

    def __enter__(self) -> None:
        self.owner._charge()
        self.owner._stack.append(self)
        self.calls += 1

    def __exit__(self, *_: object) -> None:
        self.owner._charge()
        self.owner._stack.pop()


class PhaseTimers:
    """Clocks of one loop, which must run in one thread."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._stack: list[_Phase] = []
        self._wall, self._cpu = perf_counter_ns(), thread_time_ns()

    def __call__(self, name: str) -> _Phase:
        """Return the context manager of the phase `name`."""
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(self)
        return phase

    def _charge(self) -> None:
        """Add the time since the last change to the innermost phase."""
        wall, cpu = perf_counter_ns(), thread_time_ns()
        if self._stack:
            top = self._stack[-1]
            top.wall += wall - self._wall
            top.cpu += cpu - self._cpu
        self._wall, self._cpu = wall, cpu

    def totals(self) -> dict[str, Total]:
        """Return the totals since construction, open phases included."""
        self._charge()
        return {name: Total(p.wall / 1e6, p.cpu / 1e6, p.calls) for name, p in self._phases.items()}
