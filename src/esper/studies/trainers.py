"""Registry of the functions that train the arms of a study, by `Arm.kind`. Worker processes import them by name.

@trainer("static")
def train_static(arm: Arm, task: str, world: int, budgets: Sequence[float]) -> list[Point]: ...
"""

from __future__ import annotations

from collections.abc import Callable

from esper.leyline.errors import ConfigError
from esper.studies.contract import Arm, Trainer

TRAINERS: dict[str, Trainer] = {}


def trainer(kind: str) -> Callable[[Trainer], Trainer]:
    """Register a function as the trainer of arms of this kind."""
    if kind in TRAINERS:
        raise ConfigError(f"arms of kind {kind!r} already have a trainer. Choose another kind")
    return lambda function: TRAINERS.setdefault(kind, function)


def trainer_of(arm: Arm) -> Trainer:
    """Return the trainer of an arm. Raise ConfigError if its kind has none."""
    if arm.kind not in TRAINERS:
        kinds = ", ".join(sorted(TRAINERS)) or "none"
        raise ConfigError(f"arm {arm.name!r} is of kind {arm.kind!r}, which has no trainer. Kinds with one: {kinds}")
    return TRAINERS[arm.kind]
