"""Events: the kinds of records that a run writes to its journal, each with a few typed fields.

Conventions: names end in their unit (`_s`, `_ms`, `_pct`); qualities are fractions, 0…1, or in the task's own unit.
None means *not measured*. A measured number that is not finite is written to disk as the string "NaN", "Infinity" or
"-Infinity".

Each kind declares three constants:
  KEEP    True: events of this kind are never dropped. False: it is a gauge, and a newer value may replace an unwritten
          one with the same key
  KEY     the fields that identify a gauge
  LEVEL   the lowest telemetry level at which it is recorded
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, ClassVar, Protocol

import msgspec

from esper.leyline.errors import unknown_name

SCHEMA = 2
"""Version of the schema, increased when the meaning of a field changes. Readers ignore fields they do not know."""
Number = float | None
"""A measurement; None if nothing was measured."""


class Level(IntEnum):
    """How much is recorded. It does not affect what is measured, so it does not affect training."""

    OFF = 0
    MINIMAL = 1  # lifecycle events, episodes, updates, failures
    NORMAL = 2  # also every step of every environment, with decisions and worth
    DEBUG = 3  # also details for debugging, such as decisions to wait


def level(name: str) -> Level:
    """Return the level of this name; case does not matter."""
    if name.upper() not in Level.__members__:
        raise unknown_name("telemetry level", name, [each.name.lower() for each in Level])
    return Level[name.upper()]


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag=_tag):
    """Base class of all events. No event contains another, so they need no garbage collection."""

    KEEP: ClassVar[bool] = True
    KEY: ClassVar[tuple[str, ...]] = ()
    LEVEL: ClassVar[Level] = Level.MINIMAL


class RunStarted(Event, frozen=True, kw_only=True):
    """First event of a run. The manifest contains the settings, versions and data hashes."""

    schema: int = SCHEMA
    run_id: str = ""
    """Empty if only the manifest has it; the same holds for `task`."""
    command: str
    task: str = ""
    controller: str
    seed: int
    env_names: tuple[str, ...]
    """A descriptive name for each environment."""
    slots: tuple[str, ...]
    steps: int | None = None
    """Steps of an episode; null in a user's own loop that did not state its horizon."""
    rounds: int = 1
    host_params: int
    device: str = "cpu"
    threads: int = 1
    telemetry: str = "normal"


class RunFinished(Event, frozen=True, kw_only=True):
    """Last event of a run that ended normally or with an error. A run without it was killed or is still running."""

    status: str
    """finished, failed or interrupted."""
    error: str | None = None
    wall_s: float
    """Seconds of running time, summed over all sessions of a resumed run."""
    env_steps: int


class Step(Event, frozen=True, kw_only=True):
    """One decision of one environment and the epoch that followed."""

    LEVEL: ClassVar[Level] = Level.NORMAL

    env: int
    episode: int
    """Counted from 1 in every environment; in `esper train` it is the round."""
    step: int
    """Epochs trained in this episode, this one included."""
    world: int
    op: str
    quality: Number
    """Quality on the validation split, with all live seeds on."""
    committed_quality: Number
    """Quality with every live seed off: host and fossils only."""
    val_loss: Number
    train_loss: Number
    reward: Number = None
    utility: Number = None
    value: Number = None
    """The critic's estimate of the return before the step."""
    params: int
    """Parameters of host and seeds, TRAINING seeds included."""
    train_macs: int | None = None
    """Multiply-adds spent on training in this episode so far, forward and backward; null where they are not counted."""
    measure_macs: int | None = None
    """Multiply-adds spent on measuring in this episode so far: validation and coalitions; null where not counted."""
    stages: tuple[int, ...]
    """`SeedStage` of every slot, in the order of the run's slots."""
    alphas: tuple[float, ...]
    blueprints: tuple[str, ...]
    """Name of the blueprint in every slot; "" for an empty slot."""


class Decision(Event, frozen=True, kw_only=True):
    """The action that a controller chose. Decisions to wait are recorded at level `debug`."""

    LEVEL: ClassVar[Level] = Level.NORMAL

    env: int
    episode: int
    step: int
    op: str
    slot: str
    """Empty if the op has no slot; the same holds for the heads below."""
    blueprint: str = ""
    style: str = ""
    tempo: str = ""
    alpha_target: str = ""
    alpha_speed: str = ""
    alpha_curve: str = ""
    happened: bool
    """False if the action was illegal, so that nothing changed."""
    legal_ops: tuple[str, ...]
    log_prob: Number = None
    entropy: Number = None
    """Entropy of the op's distribution divided by its maximum, 0…1."""
    value: Number = None


class Lifecycle(Event, frozen=True, kw_only=True):
    """A seed moved from one stage to another."""

    env: int
    episode: int
    step: int
    slot: str
    seed: int
    """Number of the seed in its environment, counted from 0."""
    blueprint: str
    was: str
    now: str
    cause: str
    """controller, rules (auto-advance, ramps, cooldown) or governor."""
    params: int
    alpha: float
    dwell_epochs: int
    """Epochs spent in the previous stage."""
    contribution: Number = None
    """Contribution that was known when the move was decided; null for a new seed."""
    contribution_se: Number = None


class SeedWorth(Event, frozen=True, kw_only=True, tag="worth"):
    """The worth of one seed by counterfactual evaluation, in the unit of quality."""

    LEVEL: ClassVar[Level] = Level.NORMAL

    env: int
    episode: int
    step: int
    slot: str
    seed: int
    """Number of the seed in its environment, counted from 0."""
    blueprint: str
    committed: bool = False
    """True for a fossil: its contribution is its *dependence*, which exceeds what the fossil gained."""
    contribution: Number = None
    contribution_se: Number = None
    solo: Number = None
    solo_se: Number = None
    shapley: Number = None
    shapley_se: Number = None
    interaction: Number = None
    prospect: Number = None
    """Gain in quality from switching a TRAINING seed on at alpha = 1."""
    prospect_se: Number = None


class Gradient(Event, frozen=True, kw_only=True):
    """Gradient statistics of one seed relative to the host."""

    KEEP: ClassVar[bool] = False
    KEY: ClassVar[tuple[str, ...]] = ("env", "slot")
    LEVEL: ClassVar[Level] = Level.NORMAL

    env: int
    episode: int
    step: int
    slot: str
    norm: Number
    ratio: Number
    health: Number


class Update(Event, frozen=True, kw_only=True):
    """One PPO update."""

    round: int
    """The round whose rollout it used, counted from 1."""
    epochs: int
    """Passes over the rollout; fewer than configured if the target KL was exceeded."""
    minibatches: int
    policy_loss: Number
    value_loss: Number
    entropy_loss: Number
    kl: Number
    clip_fraction: Number
    ratio_min: Number
    ratio_max: Number
    explained_variance: Number
    value_nrmse: Number
    grad_norm: Number
    lr: float
    skipped: int = 0
    """Minibatches skipped because their loss or gradient was not finite."""
    entropy: dict[str, Number] = {}
    """Normalised entropy per head, 0…1, over the steps at which the head affected the action."""
    learnable: dict[str, Number] = {}
    """Per head, the share of steps at which it affected the action and had more than one legal option."""
    return_mean: Number = None
    """Mean return of the round's episodes. A return is the undiscounted sum of one episode's rewards."""
    return_sd: Number = None
    """Standard deviation of the return over the round's episodes; null where there is one episode."""
    wall_ms: Number = None


class Episode(Event, frozen=True, kw_only=True):
    """Summary of one finished episode of one environment."""

    env: int
    episode: int
    world: int
    name: str
    steps: int
    quality: Number
    quality_best: Number
    test_quality: Number = None
    test_loss: Number = None
    baseline_quality: Number = None
    """Quality of the same world trained without growth."""
    utility: Number = None
    episode_return: Number = None
    """The undiscounted sum of the episode's rewards."""
    params: int
    """Parameters of the final network as it is exported, without TRAINING seeds."""
    host_params: int
    multiply_adds: Number = None
    germinated: int
    fossilized: int
    pruned: int
    rollbacks: int = 0
    structure: dict[str, str]
    """Slot → blueprint of every seed that is part of the network at the end."""
    wall_s: Number = None


class GovernorAlarm(Event, frozen=True, kw_only=True, tag="governor"):
    """One alarm of the governor and the action it took."""

    env: int
    episode: int
    step: int
    alarm: str
    action: str
    value: Number = None
    """The number that caused the alarm."""
    limit: Number = None
    restored_step: int | None = None


class Checkpoint(Event, frozen=True, kw_only=True):
    """A checkpoint was written, or the run was resumed from it."""

    path: str
    """Relative to the run directory."""
    reason: str
    round: int | None = None
    """Number of rounds completed when it was written."""
    size_bytes: int
    write_ms: Number = None
    """null if the run was resumed from this checkpoint and did not write it."""


class PhaseProfile(Event, frozen=True, kw_only=True):
    """Time spent in one phase since the run began. Values are totals, so a dropped event loses no information."""

    KEEP: ClassVar[bool] = False
    KEY: ClassVar[tuple[str, ...]] = ("phase",)
    LEVEL: ClassVar[Level] = Level.MINIMAL

    phase: str
    wall_ms: float
    cpu_ms: float
    calls: int


class Health(Event, frozen=True, kw_only=True):
    """State of the telemetry itself: a failed sink, the counters at the end, or the alarm of a detector."""

    source: str
    severity: str
    """info, warning or error."""
    text: str
    counters: dict[str, Number] = {}


KINDS: dict[str, type[Event]] = {str(k.__struct_config__.tag): k for k in Event.__subclasses__()}
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Strings that stand for non-finite numbers in files, because JSON has no literals for them."""


def encode(event: Event) -> bytes:
    """Return the event as one JSON object, without a newline."""
    if _all_finite(msgspec.structs.astuple(event)):
        return msgspec.json.encode(event)
    return msgspec.json.encode(spelled(msgspec.to_builtins(event)))


def _all_finite(values: Iterable[Any]) -> bool:
    for v in values:
        kind = type(v)
        if kind is float:
            if not -math.inf < v < math.inf:
                return False
        elif (kind in (tuple, list) and not _all_finite(v)) or (kind is dict and not _all_finite(v.values())):
            return False
    return True


def spelled(value: Any) -> Any:
    """Return a value with its non-finite numbers replaced by the strings of `WORDS`."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {k: spelled(v) for k, v in value.items()}
    return [spelled(v) for v in value] if isinstance(value, (list, tuple)) else value


def unspelled(value: Any) -> Any:
    """Return a value with the strings of `WORDS` replaced by numbers. Inverse of `spelled`."""
    if isinstance(value, str):
        return WORDS.get(value, value)
    if isinstance(value, dict):
        return {k: unspelled(v) for k, v in value.items()}
    return [unspelled(v) for v in value] if isinstance(value, list) else value


class EventReceiver(Protocol):
    """A receiver of events: the hub, or a list in a test. The training loop depends on nothing else of telemetry."""

    def wants(self, kind: type[Event]) -> bool:
        """Return whether events of this kind are read by anyone."""
        ...

    def emit(self, event: Event) -> None:
        """Receive one event."""
        ...


class NullReceiver:
    """A receiver that ignores every event."""

    def wants(self, _kind: type[Event]) -> bool:
        """Return False: no event is read."""
        return False

    def emit(self, event: Event) -> None:
        """Ignore the event."""
