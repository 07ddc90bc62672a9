"""Events: what a run says of itself. About a dozen kinds, each a few typed fields about one happening.

Conventions: units stand in names (`_s`, `_ms`, `_pct`; qualities are fractions, 0…1, or the task's own unit), None
means *not measured*, and a number that was measured and is not finite stays what it is: on disk it is the word
"NaN", "Infinity" or "-Infinity".

A kind says three things of itself:
  KEEP    must-keep (never dropped) or a gauge (under pressure the newest value per key wins)
  KEY     of a gauge: the fields that tell one gauge from another
  LEVEL   the least telemetry level that records it
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
"""Raised when the meaning of a field changes; readers of an older schema still read what they know."""
Number = float | None
"""A measurement: None where nothing was measured."""


class Level(IntEnum):
    """How much is recorded. What is *measured* does not depend on it: logging never changes learning."""

    OFF = 0
    MINIMAL = 1  # lifecycle events, episodes, updates, failures
    NORMAL = 2  # also every step of every environment, with decisions and worth
    DEBUG = 3  # also details for debugging, such as decisions to wait


def level(name: str) -> Level:
    """A level by its name, in any case."""
    if name.upper() not in Level.__members__:
        raise unknown_name("telemetry level", name, [each.name.lower() for each in Level])
    return Level[name.upper()]


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag=_tag):
    """The root of all kinds. None holds another, so none is ever part of a cycle."""

    KEEP: ClassVar[bool] = True
    KEY: ClassVar[tuple[str, ...]] = ()
    LEVEL: ClassVar[Level] = Level.MINIMAL


class RunStarted(Event, frozen=True, kw_only=True):
    """First of a run. The manifest has the rest: config, versions, hashes of the data."""

    schema: int = SCHEMA
    run_id: str = ""
    """"" where only the manifest knows; so for the task."""
    command: str
    task: str = ""
    controller: str
    seed: int
    env_names: tuple[str, ...]
    """One per environment: what it is, for people."""
    slots: tuple[str, ...]
    steps: int
    """Per episode."""
    rounds: int = 1
    host_params: int
    device: str = "cpu"
    threads: int = 1
    telemetry: str = "normal"


class RunFinished(Event, frozen=True, kw_only=True):
    """Last of a run that ended by itself; a run without it was killed, or is still running."""

    status: str
    """finished, failed or interrupted."""
    error: str | None = None
    wall_s: float
    """Seconds that the run worked, all sessions of a resumed one together."""
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
    """Of the host with everything that is alive, on the validation split."""
    committed_quality: Number
    """With every live seed off: host and fossils."""
    val_loss: Number
    train_loss: Number
    reward: Number = None
    utility: Number = None
    value: Number = None
    """What the critic expected before the step."""
    params: int
    """Of host and seeds, those in training too."""
    train_macs: int | None = None
    """Multiply-adds spent on training in this episode so far, forward and backward; null where they are not counted."""
    measure_macs: int | None = None
    """Multiply-adds spent on measuring in this episode so far: validation and coalitions; null where not counted."""
    stages: tuple[int, ...]
    """`SeedStage` of every slot, in the order of the run's slots."""
    alphas: tuple[float, ...]
    blueprints: tuple[str, ...]
    """Name of the blueprint in every slot, "" where it is empty."""


class Decision(Event, frozen=True, kw_only=True):
    """What a controller chose. Decisions to wait are recorded at level `debug`."""

    LEVEL: ClassVar[Level] = Level.NORMAL

    env: int
    episode: int
    step: int
    op: str
    slot: str
    """"" where the op reads no slot; so for the heads below."""
    blueprint: str = ""
    style: str = ""
    tempo: str = ""
    alpha_target: str = ""
    alpha_speed: str = ""
    alpha_curve: str = ""
    happened: bool
    """False where the action was not legal, so nothing changed."""
    legal_ops: tuple[str, ...]
    log_prob: Number = None
    entropy: Number = None
    """Of the op's distribution, over the largest possible: 1 is undecided."""
    value: Number = None


class Lifecycle(Event, frozen=True, kw_only=True):
    """A seed moved from one stage to another."""

    env: int
    episode: int
    step: int
    slot: str
    seed: int
    """Which seed of its environment, counted from 0."""
    blueprint: str
    was: str
    now: str
    cause: str
    """controller, rules (auto-advance, ramps, cooldown) or governor."""
    params: int
    alpha: float
    dwell_epochs: int
    """Epochs it spent in the stage it left."""
    contribution: Number = None
    contribution_se: Number = None


class Worth(Event, frozen=True, kw_only=True):
    """What one seed was worth, by counterfactual evaluation, in the unit of quality."""

    LEVEL: ClassVar[Level] = Level.NORMAL

    env: int
    episode: int
    step: int
    slot: str
    seed: int
    """Which seed of its environment, counted from 0."""
    blueprint: str
    committed: bool = False
    """Of a fossil, contribution is *dependence*: what the network would lose now, more than it brought."""
    contribution: Number = None
    contribution_se: Number = None
    solo: Number = None
    solo_se: Number = None
    shapley: Number = None
    shapley_se: Number = None
    interaction: Number = None
    prospect: Number = None
    """Of a TRAINING seed: what it would add at alpha = 1."""
    prospect_se: Number = None


class Gradient(Event, frozen=True, kw_only=True):
    """How one seed's gradients stand against the host's."""

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
    """The round that it learnt from, counted from 1."""
    epochs: int
    """Passes over the rollout before the target KL stopped it."""
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
    """Minibatches skipped for want of finite numbers."""
    entropy: dict[str, Number] = {}
    """Per head: over steps where it mattered, 1 is undecided."""
    learnable: dict[str, Number] = {}
    """Per head: share of steps on which it had a choice that mattered."""
    return_mean: Number = None
    """Mean return of the round's episodes. A return is the undiscounted sum of one episode's rewards."""
    return_sd: Number = None
    """Standard deviation of the return over the round's episodes; null where there is one episode."""
    wall_ms: Number = None


class Episode(Event, frozen=True, kw_only=True):
    """One environment's whole training life."""

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
    """Of the same world without growth."""
    utility: Number = None
    episode_return: Number = None
    """The undiscounted sum of its rewards."""
    params: int
    """Of the network at the end, as an export holds it: a seed still in training is no part of it."""
    host_params: int
    multiply_adds: Number = None
    germinated: int
    fossilized: int
    pruned: int
    rollbacks: int = 0
    structure: dict[str, str]
    """Slot → blueprint of every seed that is part of the network at the end."""
    wall_s: Number = None


class Governor(Event, frozen=True, kw_only=True):
    """The governor saw trouble, and what it did about it."""

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
    """Something was written that a run can go on from."""

    path: str
    """Relative to the run directory."""
    reason: str
    round: int | None = None
    """Rounds completed before it was written: the number of the last one; 0 before the first."""
    size_bytes: int
    write_ms: Number = None
    """Null where a run went on from it and did not write it."""


class PhaseProfile(Event, frozen=True, kw_only=True):
    """Where the time went: totals since the run began, so that a lost one costs nothing."""

    KEEP: ClassVar[bool] = False
    KEY: ClassVar[tuple[str, ...]] = ("phase",)
    LEVEL: ClassVar[Level] = Level.MINIMAL

    phase: str
    wall_ms: float
    cpu_ms: float
    calls: int


class Health(Event, frozen=True, kw_only=True):
    """Something about the run's own machinery: a sink that failed, counters at the end, a detector's alarm."""

    source: str
    severity: str
    """info, warning or error."""
    text: str
    counters: dict[str, Number] = {}


KINDS: dict[str, type[Event]] = {str(k.__struct_config__.tag): k for k in Event.__subclasses__()}
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How numbers that are not finite stand in a file: JSON has no such literals."""


def encode(event: Event) -> bytes:
    """One JSON object, without a line end."""
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
    """Numbers that are not finite as the words that a file has for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {k: spelled(v) for k, v in value.items()}
    return [spelled(v) for v in value] if isinstance(value, (list, tuple)) else value


def unspelled(value: Any) -> Any:
    """The numbers that a file spells as words, as numbers again."""
    if isinstance(value, str):
        return WORDS.get(value, value)
    if isinstance(value, dict):
        return {k: unspelled(v) for k, v in value.items()}
    return [unspelled(v) for v in value] if isinstance(value, list) else value


class Emits(Protocol):
    """A receiver of events: the hub, or a list in a test. The training loop knows no more of telemetry."""

    def wants(self, kind: type[Event]) -> bool:
        """Return whether events of this kind are read by anyone."""
        ...

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...


class Silence:
    """A receiver that ignores every event."""

    def wants(self, _kind: type[Event]) -> bool:
        """Return False: no event is read."""
        return False

    def emit(self, event: Event) -> None:
        """Ignore the event."""
