"""One loop for every controller and every backend: decide, train an epoch, measure.

    for step in rollout(backend, controller, steps=40):
        ...                               # step.actions, step.allowed, step.result

Training, growing, evaluation, baselines and benchmarks all run this generator, so a step is the same everywhere.

`PhaseTimers` records wall and CPU time per phase of the loop. It is always on and costs two clock reads per change of
phase. Entering a phase within another pauses the outer one, so the parts add up to the total. The phases of a run:
apply, train, validate, coalitions, norms, worth, features, policy, gather, update, telemetry, checkpoint, baselines.
The validation pass of an epoch is `validate` if it evaluates only the current network, and `coalitions` if it also
evaluates other configurations in the same pass. `norms` is the part of it that re-estimates the statistics of norms
behind slots. `worth` computes contributions from the scores. `baselines` trains no-growth baselines, once per world.

Legend: E environments, O operations, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns
from typing import Generic, NamedTuple, Protocol, TypeVar

from esper.leyline.slot_table import Bools, Ints, SlotTable

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Steppable(Protocol[Result_co]):
    """E environments that take one action each and train for an epoch: an engine, a backend or a Gymnasium env."""

    @property
    def table(self) -> SlotTable:
        """The state of every slot of every environment."""
        ...

    @property
    def legal(self) -> Bools:
        """[E, O, S] the operations that are legal now."""
        ...

    def step(self, actions: Ints, /) -> Result_co:
        """Apply one action row per environment [E, 8], train an epoch and measure it."""
        ...


class ActionSource(Protocol):
    """Chooses one action row per environment; every controller does."""

    def act(self, table: SlotTable, legal: Bools, /) -> Ints:
        """Return one action row per environment, [E, 8]."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutStep(Generic[Result]):
    """One step of all environments."""

    number: int
    """Counted from 0 within this rollout."""
    allowed: Bools  # [E, O, S] what was legal when the controller decided
    actions: Ints  # [E, 8]
    result: Result
    """What `step` of the environments returned."""


def rollout(
    envs: Steppable[Result],
    controller: ActionSource,
    steps: int,
    *,
    before_step: Callable[[], None] = lambda: None,
    phases: PhaseTimers | None = None,
) -> Iterator[RolloutStep[Result]]:
    """Let `controller` act for `steps` steps; yield each step after its epoch has been trained and measured.

    before_step  called before each decision; it may raise to stop the rollout
    phases       clocks of the caller's loop: time spent deciding counts as "policy"
    """
    phases = phases or PhaseTimers()
    for number in range(steps):
        before_step()
        allowed = envs.legal
        with phases("policy"):
            actions = controller.act(envs.table, allowed)
        yield RolloutStep(number, allowed, actions, envs.step(actions))


class Total(NamedTuple):
    """Total time of one phase in milliseconds, and how often it was entered."""

    wall_ms: float
    cpu_ms: float
    calls: int


class _Phase(AbstractContextManager[None]):
    """Clock of one phase. Reused, so that entering a phase allocates nothing."""

    __slots__ = ("calls", "cpu", "owner", "wall")

    def __init__(self, owner: PhaseTimers) -> None:
        self.owner = owner
        self.wall = 0
        self.cpu = 0
        self.calls = 0

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
