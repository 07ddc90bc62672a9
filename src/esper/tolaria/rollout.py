"""One loop for every controller and every backend: decide, train an epoch, measure.

    for step in rollout(backend, controller, steps=40):
        ...                               # step.actions, step.allowed, step.result

Training, growing, evaluation, baselines and benchmarks all run this generator, so a step is the same everywhere.

Legend: E environments, O operations, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from esper.leyline.profiler import PhaseTimers
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


class Decides(Protocol):
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
    controller: Decides,
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
