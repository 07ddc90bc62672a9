"""Controllers: whoever chooses actions. All share one interface and read nothing but the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.slot_table import Bools, Ints, SlotTable
from esper.tamiyo.controllers.heuristic import Heuristic, HeuristicConfig
from esper.tamiyo.controllers.random import Random
from esper.tamiyo.controllers.schedule import Schedule, Wait, wait_everywhere

__all__ = [
    "CONTROLLERS",
    "Controller",
    "ExplainsWaiting",
    "Heuristic",
    "HeuristicConfig",
    "Random",
    "Remembers",
    "Schedule",
    "Wait",
    "find_controller",
    "make_controller",
    "wait_everywhere",
]


class Controller(Protocol):
    """Chooses one action row per environment."""

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """From the table and what is legal [E, O, S] to actions [E, 8]."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """What a controller that keeps something from act to act has besides: a checkpoint asks for it."""

    def state_dict(self) -> dict[str, Any]:
        """Dicts, lists, tuples, numbers, strings, None, tensors and arrays."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go on where `state_dict` stood, or raise with nothing changed."""
        ...


@runtime_checkable
class ExplainsWaiting(Protocol):
    """What a controller has that can say why it plants nothing."""

    def why_waiting(self, table: SlotTable) -> str:
        """Name the condition of environment 0 that is not met, with its value and its threshold; empty if none."""
        ...


CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "none": Wait,
    "schedule": Schedule,
    "heuristic": Heuristic,
    "random": Random,
}


def find_controller(controller: str | Controller | None) -> Controller:
    """A controller by its name, or the caller's own; None is the controller "none"."""
    if controller is None:
        return Wait()
    if isinstance(controller, str):
        return make_controller(controller)
    if isinstance(controller, type) or not callable(getattr(controller, "act", None)):
        found = f"the class {controller.__name__}" if isinstance(controller, type) else repr(controller)
        raise ConfigError(
            f"controller must be a name ({', '.join([*CONTROLLERS, 'tamiyo'])}), None, or an object with "
            f"act(table, legal) → actions; got {found}"
        )
    return controller


def make_controller(name: str) -> Controller:
    """A controller by its name; `tamiyo` is the policy that comes with the package, a path is another's."""
    if name in CONTROLLERS:
        return CONTROLLERS[name]()
    from esper.tamiyo.controllers.learned import SHIPPED, Learned  # torch is needed for nothing else here

    if name == "tamiyo":
        return Learned.load(SHIPPED)
    if not Path(name).exists():
        raise unknown_name("controller", name, [*CONTROLLERS, "tamiyo"])
    return Learned.load(Path(name))
