"""Checks and conversions of what a user gives: settings, options of an action, a controller's actions, a closure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from esper.kasmina.blueprints import blueprint_index
from esper.kasmina.body import Body
from esper.kasmina.lifecycle import Rules
from esper.leyline.actions import ALPHA_TARGETS, HEAD_OPTIONS, NUM_HEADS, Head
from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.slot_table import Ints
from esper.tamiyo.controllers import Controller, Schedule, find_controller

SHIFTS_LABELS = ("ForCausalLM", "LMHeadModel")
"""Class name endings of transformers models that take their inputs as labels and shift them internally."""


def check_settings(model: nn.Module, rules: Any, incubation: Any, quality: Any) -> None:
    """Raise ConfigError for settings of a grower that are not valid for this model."""
    if rules is not None and not isinstance(rules, Rules):
        raise ConfigError(f"rules must be esper.Rules(…), got {rules!r}")
    if incubation not in ("straight_through", "shadow"):
        raise ConfigError(f"incubation must be 'straight_through' or 'shadow', got {incubation!r}")
    if quality in ("accuracy", "log_probability") and type(model).__name__.endswith(SHIFTS_LABELS):
        raise ConfigError(
            f"{type(model).__name__} takes its inputs as labels and shifts them: quality={quality!r} would "
            f"compare each token with itself. Use quality='next_token_{quality}', or your own function."
        )


def as_controller(body: Body, controller: str | Controller | Mapping[str, str] | None) -> Controller:
    """Return the controller of a name or a plan {slot: blueprint}, or the given object.

    Raise UnknownNameError for a slot that the body does not have, or a blueprint that does not fit its slot.
    """
    if not isinstance(controller, Mapping):
        return find_controller(controller)
    fitting = body.valid_blueprints()
    plan = {}
    for slot, name in controller.items():
        if slot not in fitting:
            raise unknown_name("slot", slot, fitting)
        if name not in fitting[slot]:
            raise unknown_name(f"blueprint for slot {slot!r}", name, fitting[slot])
        plan[list(fitting).index(slot)] = blueprint_index(name)
    return Schedule(plan=plan)


def checked_actions(actions: Any, controller: object) -> Ints:
    """Return a controller's action row [1, 8]; raise ConfigError for any other shape or type."""
    actions = np.asarray(actions)
    if actions.shape != (1, NUM_HEADS) or not np.issubdtype(actions.dtype, np.integer):
        raise ConfigError(
            f"a controller's act returns integers [1, {NUM_HEADS}], one per head; {type(controller).__name__} "
            f"returned {actions.dtype} {list(actions.shape)}. Start from wait_everywhere(1) of "
            "esper.tamiyo.controllers"
        )
    return actions


def option(head: Head, name: str) -> int:
    """Return the index of a head's option by its name; the name is not case-sensitive."""
    names = HEAD_OPTIONS[head] or ()
    if not isinstance(name, str):
        raise ConfigError(f"{head.name.lower().replace('_', ' ')} is one of {', '.join(names)}, got {name!r}")
    if name.upper() not in names:
        raise unknown_name(head.name.lower().replace("_", " "), name, names)
    return names.index(name.upper())


def alpha_target_index(value: float) -> int:
    """Return the index of an alpha target by its value."""
    near = np.nonzero(np.abs(ALPHA_TARGETS - value) < 1e-6)[0]
    if not len(near):
        raise ConfigError(f"an alpha target is one of {', '.join(f'{t:.1f}' for t in ALPHA_TARGETS)}, got {value}")
    return int(near[0])


def after_closure(args: Any, kwargs: dict[str, Any], action: Callable[[], None]) -> tuple[Any, Any] | None:
    """Call `action` before an optimiser step with these arguments; if a closure computes the gradients, after it.

    Return the arguments of the step, with the closure replaced; None if they do not change.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        action()
        return None

    def closure_then_action() -> Any:
        loss = closure()
        action()
        return loss

    return args[:1], {**kwargs, "closure": closure_then_action}
