"""Controllers: objects that choose actions. They share one interface and read only the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.slot_table import Bools, Ints, SlotTable
from esper.tamiyo.controllers.heuristic import Heuristic, HeuristicConfig
from esper.tamiyo.controllers.simple import Random, Schedule, Wait, wait_everywhere

__all__ = [
    "CONTROLLERS",
    "Controller",
    "ExplainsWaiting",
    "Heuristic",
    "HeuristicConfig",
    "Random",
    "Schedule",
    "Stateful",
    "Wait",
    "find_controller",
    "make_controller",
    "wait_everywhere",
]


class Controller(Protocol):
    """Chooses one action row per environment."""

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8], given the table and the legal operations [E, O, S]."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Interface of a controller with state between calls of `act`, which checkpoints save."""

    def state_dict(self) -> dict[str, Any]:
        """Return dicts, lists, tuples, numbers, strings, None, tensors and arrays."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Restore a result of `state_dict`, or raise and change nothing."""
        ...


@runtime_checkable
class ExplainsWaiting(Protocol):
    """Interface of a controller that can explain why it plants nothing."""

    def why_waiting(self, table: SlotTable) -> str:
        """Return the unmet condition of environment 0 with its value and threshold; empty if there is none."""
        ...


CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "none": Wait,
    "schedule": Schedule,
    "heuristic": Heuristic,
    "random": Random,
}


def find_controller(controller: str | Controller | None) -> Controller:
    """Return a controller by its name, or the given object. None is the controller "none"."""
    if controller is None:
        return Wait()
    if isinstance(controller, str):
        return make_controller(controller)
    if isinstance(controller, type) or not callable(getattr(controller, "act", None)):
        actual = f"the class {controller.__name__}" if isinstance(controller, type) else repr(controller)
        raise ConfigError(
            f"controller must be a name ({', '.join([*CONTROLLERS, 'tamiyo'])}), None, or an object with "
            f"act(table, legal) → actions; got {actual}"
        )
    return controller


def make_controller(name: str) -> Controller:
    """Return a controller by its name, `tamiyo` being the shipped policy, or that of a policy file or run directory."""
    if name in CONTROLLERS:
        return CONTROLLERS[name]()
    from esper.tamiyo.controllers.learned import SHIPPED, Learned  # imports torch, which other controllers do not need

    if name == "tamiyo":
        return Learned.load(SHIPPED)
    if not Path(name).exists() and Path(name).name != name:
        raise ConfigError(f"there is no run directory or policy file {name}. `esper runs` lists the runs")
    if not Path(name).exists():
        raise unknown_name("controller", name, [*CONTROLLERS, "tamiyo"])
    return Learned.load(Path(name))
