"""Where the time goes: wall and CPU time per phase of the loop. Always on: two clocks read per change of phase.

    phases = Phases()
    with phases("train"):
        …
    phases.totals()["train"].wall_ms

A phase entered within another pauses the outer one, so that the parts add up to the whole.

The phases of a run: apply, train, validate, coalitions, norms, worth, features, policy, gather, update, telemetry,
checkpoint, twins. An epoch's validation pass is `validate` if it asks for the network as it stands, and `coalitions` if
it asks for other configurations too, which are evaluated in the same pass; `norms` is the part of it that re-estimates
the statistics of norms behind slots; `worth` turns the scores into numbers. `twins` trains worlds without growth, once
each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter_ns, thread_time_ns
from typing import NamedTuple


class Total(NamedTuple):
    wall_ms: float
    cpu_ms: float
    calls: int


class _Phase(AbstractContextManager[None]):
    """One phase's clock; reused, so that entering a phase makes no object."""

    __slots__ = ("calls", "cpu", "owner", "wall")

    def __init__(self, owner: Phases) -> None:
        self.owner, self.wall, self.cpu, self.calls = owner, 0, 0, 0

    def __enter__(self) -> None:
        self.owner._charge()
        self.owner._stack.append(self)
        self.calls += 1

    def __exit__(self, *_: object) -> None:
        self.owner._charge()
        self.owner._stack.pop()


class Phases:
    """The clocks of one loop, which runs in one thread."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._stack: list[_Phase] = []
        self._wall, self._cpu = perf_counter_ns(), thread_time_ns()

    def __call__(self, name: str) -> _Phase:
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(self)
        return phase

    def _charge(self) -> None:
        """What has passed since the last change belongs to the innermost phase."""
        wall, cpu = perf_counter_ns(), thread_time_ns()
        if self._stack:
            top = self._stack[-1]
            top.wall += wall - self._wall
            top.cpu += cpu - self._cpu
        self._wall, self._cpu = wall, cpu

    def totals(self) -> dict[str, Total]:
        """Since the beginning, phases that are still open included."""
        self._charge()
        return {name: Total(p.wall / 1e6, p.cpu / 1e6, p.calls) for name, p in self._phases.items()}
