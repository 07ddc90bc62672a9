"""Comparison of runs: paired differences over the same worlds, and what the runs decided differently.

    compare_runs([Path("runs/a"), Path("runs/b")])     # the first is the reference: differences are other − first

`esper compare`, the live page and the MCP server show its result. Results of a run per world are read from its journal,
from its held-out comparison, or from an evaluation. An *arm* is what is compared: usually one run. Runs that differ in
their worlds only form one arm, because each run of `esper grow` has one world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from esper.karn import held_out
from esper.karn.formatting import decision_options
from esper.karn.held_out import HeldOut, Row
from esper.karn.sql import run_names
from esper.leyline.atomic_io import read_regular
from esper.leyline.errors import ConfigError, DataError
from esper.leyline.events import Decision, Episode, RunFinished, RunStarted, Step
from esper.leyline.paired import Lead, paired
from esper.leyline.stages import SeedStage
from esper.leyline.text import LONGEST_SETTING, flat_settings, printable
from esper.nissa.journal_rows import replay
from esper.nissa.run import MANIFEST
from esper.nissa.run_list import Data, fact, manifest_of

EVALUATION = "eval.json"
"""File that `esper eval --out` writes, into a directory that is no run."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one arm reached in one world. None: not recorded."""

    quality: float | None = None
    test_quality: float | None = None
    utility: float | None = None
    params: float | None = None
    train_macs: float | None = None
    """Multiply-adds spent on training, forward and backward."""
    structure: Mapping[str, str] = {}
    """Slot → blueprint in the network at the end."""
    decisions: Mapping[int, Decision] | None = None
    """Step → what the controller decided, without decisions to wait; None if decisions are not recorded."""


Outcomes = dict[int, Outcome]
"""World → outcome."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison."""

    name: str
    paths: list[str]
    task: str | None
    settings: dict[str, str]
    """Settings by dotted name, without the random seed."""
    episodes: Outcomes
    """Of the last finished episode in each world, from the journal."""
    held_out: Outcomes
    """Of the trained policy in worlds that had no part in training."""


def arms_of(path: Path, name: str, *, alone: bool) -> list[Arm]:
    """Return the arms in a directory: one, or if it is compared with no other, all that it holds."""
    if (path / EVALUATION).exists() and not (path / MANIFEST).exists():
        return evaluated(path, name, alone=alone)
    manifest, _ = manifest_of(path)
    episodes, started = finished_episodes(path)
    controller = fact(manifest, "controller") or (started.controller if started is not None else None)
    settings = flat_settings({"controller": controller, **tree(manifest.get("config"))})
    settings.pop("seed", None)
    task = (started.task if started is not None else "") or fact(manifest, "task")
    arm = Arm(name=name, paths=[str(path)], task=task, settings=settings, episodes={}, held_out={})
    comparison, damage = held_out.read(path)
    if damage is not None:
        raise DataError(f"{damage}. Remove the file to compare without it")
    rows = [] if comparison is None else [(row.name, outcomes_of(comparison, row)) for row in comparison.rows]
    hosts = list(dict.fromkeys(env for env, _ in episodes))
    is_grow = started is not None and started.command == "grow"
    if alone and is_grow and started is not None:
        names = dict(enumerate(started.env_names))
        return [
            replaced(arm, names.get(env, f"env {env}"), episodes=latest(episodes, [env]), settings={}) for env in hosts
        ]
    if alone and rows:
        return [replaced(arm, row_name, held_out=outcomes, settings={}) for row_name, outcomes in rows]
    first_host = hosts[:1] if is_grow else hosts  # the others of `esper grow` are hosts that it is compared with
    return [replaced(arm, name, episodes=latest(episodes, first_host), held_out=rows[0][1] if rows else {})]


def replaced(arm: Arm, name: str, **changes: Any) -> Arm:
    """Return an arm with another name and other fields."""
    return msgspec.structs.replace(arm, name=printable(name, LONGEST_SETTING), **changes)


# -- journals


def finished_episodes(path: Path) -> tuple[dict[tuple[int, int], tuple[int, Outcome]], RunStarted | None]:
    """Return (environment, world) → (number, outcome) of the last finished episode there, and the start of the run.

    A loop of the user's own is one episode, which ends with the run.
    """
    episodes: dict[tuple[int, int], tuple[int, Outcome]] = {}
    last: dict[tuple[int, int], Step] = {}  # by environment and episode; only episodes that have not ended
    decisions: dict[tuple[int, int], dict[int, Decision]] = {}
    started: RunStarted | None = None
    for row in replay(path, (RunStarted, Step, Decision, Episode, RunFinished)):
        match row:
            case RunStarted() as event:
                started = started or event
            case Step() as event:
                last[event.env, event.episode] = event
            case Decision() as event if event.happened and event.op != "WAIT":
                decisions.setdefault((event.env, event.episode), {})[event.step] = event
            case Episode() as event:
                key = event.env, event.episode
                step = last.pop(key, None)  # decisions are recorded at the same level as steps
                outcome = Outcome(
                    quality=event.quality, test_quality=event.test_quality, utility=event.utility, params=event.params,
                    train_macs=None if step is None else step.train_macs, structure=event.structure,
                    decisions=None if step is None else decisions.pop(key, {}),
                )  # fmt: skip
                episodes[event.env, event.world] = event.episode, outcome
            case RunFinished(status="finished") if started is not None and started.command == "loop":
                for key, step in last.items():
                    outcome = Outcome(
                        quality=step.quality, params=step.params, train_macs=step.train_macs,
                        structure=structure_of(step, started.slots), decisions=decisions.get(key, {}),
                    )  # fmt: skip
                    episodes[step.env, step.world] = step.episode, outcome
    return episodes, started


def structure_of(step: Step, slots: Sequence[str]) -> dict[str, str]:
    """Return slot → blueprint of the seeds that have an effect after this step."""
    rows = zip(slots, step.stages, step.blueprints, strict=False)
    return {slot: blueprint for slot, stage, blueprint in rows if SeedStage.BLENDING <= stage <= SeedStage.FOSSILIZED}


def latest(episodes: Mapping[tuple[int, int], tuple[int, Outcome]], envs: Sequence[int]) -> Outcomes:
    """Return the last episode in each world over these environments; of simultaneous ones, that of the first."""
    newest: dict[int, tuple[int, Outcome]] = {}
    for (env, world), (number, outcome) in episodes.items():
        if env in envs and (world not in newest or number > newest[world][0]):
            newest[world] = number, outcome
    return {world: outcome for world, (_, outcome) in sorted(newest.items())}


# -- evaluations


def evaluated(path: Path, name: str, *, alone: bool) -> list[Arm]:
    """Return the controllers of an evaluation: all, or only the first."""
    file = path / EVALUATION
    try:
        comparison = msgspec.json.decode(read_regular(file, held_out.MOST_BYTES), type=HeldOut)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}. Write it again with: esper eval … --out {path}") from error
    rows = comparison.rows if alone else comparison.rows[:1]
    return [
        Arm(
            name=printable(row.name if alone else f"{name}: {row.name}", LONGEST_SETTING), paths=[str(path)],
            task=comparison.task, settings={}, episodes={}, held_out=outcomes_of(comparison, row),
        )
        for row in rows
    ]  # fmt: skip


def outcomes_of(comparison: HeldOut, row: Row) -> Outcomes:
    """Return the outcomes of one controller of a held-out comparison."""
    columns = {"quality": row.quality, "test_quality": row.test, "utility": row.utility, "params": row.params}
    values = {name: figure.worlds for name, figure in columns.items() if figure is not None}
    outcomes: Outcomes = {}
    for i, world in enumerate(comparison.worlds):
        numbers: Data = {name: column[i] for name, column in values.items() if i < len(column)}
        outcomes[world] = Outcome(**numbers, structure=row.structures[i] if i < len(row.structures) else {})
    return outcomes


# -- settings


def tree(value: Any) -> Data:
    """Return a value of a manifest if it is an object, else {}."""
    return value if isinstance(value, dict) else {}


def pooled(arms: Sequence[Arm]) -> list[Arm]:
    """Join arms that have the same task and settings and no world in common."""
    out: list[Arm] = []
    for arm in arms:
        same = [i for i, other in enumerate(out) if arm.settings and _differ_in_worlds_only(arm, other)]
        if not same:
            out.append(arm)
            continue
        other = out[same[0]]
        first_name = other.name.removesuffix(f" ({len(other.paths)} runs)")
        out[same[0]] = replaced(
            other, f"{first_name} ({len(other.paths) + 1} runs)",
            paths=other.paths + arm.paths, episodes=other.episodes | arm.episodes, held_out={},
        )  # fmt: skip
    return out


def _differ_in_worlds_only(arm: Arm, other: Arm) -> bool:
    same = (arm.task, arm.settings) == (other.task, other.settings)
    return same and bool(arm.episodes and other.episodes) and not arm.episodes.keys() & other.episodes.keys()


METRICS = ("quality", "test_quality", "utility", "params", "train_macs")
"""Compared fields of an outcome."""
SCOPES: tuple[Literal["episodes", "held_out"], ...] = ("episodes", "held_out")
WAIT = "WAIT"


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One arm of a comparison: its runs, and the settings in which the arms differ."""

    name: str
    paths: list[str]
    task: str | None
    settings: dict[str, str]


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of two arms over the worlds in which both have it."""

    metric: str
    worlds: int
    first: float
    """Mean of the first arm."""
    other: float
    """Mean of the other arm."""
    lead: Lead
    """Other − first, world by world."""


class FirstDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first decision in a world that is not the same in both arms."""

    world: int
    step: int
    first: str
    other: str


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """What two arms decided in the paired worlds. Counts are [first, other]."""

    operations: dict[str, tuple[int, int]]
    blueprints: dict[str, tuple[int, int]]
    """Germinated seeds by blueprint."""
    first_differences: list[FirstDifference]
    """One per world that differs."""
    same_worlds: int
    """Number of worlds in which all decisions are the same."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """The first arm and another one, in the worlds that both have."""

    first: str
    other: str
    scope: Literal["episodes", "held_out"]
    """episodes: the last finished episode in each world; held_out: the trained policies in held-out worlds."""
    worlds: list[int]
    measures: list[Measure]
    structures: dict[str, tuple[int, int]]
    """Seeds in the final networks by blueprint, [first, other]."""
    choices: Choices | None
    """None if decisions are not recorded."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the first arm with every other."""

    arms: list[Side]
    pairs: list[Pair]
    notes: list[str]
    """Which arms could not be compared, and why."""


def compare_runs(paths: Sequence[Path]) -> Comparison:
    """Compare the first run with every other, over the worlds that both have.

    Several runs of `esper grow` that differ in their world only form one arm. A single directory is compared within
    itself: the hosts of `esper grow`, or the controllers of `esper eval` or of the end of `esper train`.
    """
    if not paths:
        raise ConfigError("no run was given: pass two or more run directories; `esper runs` lists them")
    alone = len(paths) == 1
    arms = pooled([arm for path, name in zip(paths, run_names(paths), strict=True)
                   for arm in arms_of(Path(path), name, alone=alone)])  # fmt: skip
    if len(arms) < 2:
        raise ConfigError(
            f"nothing to compare with {printable(arms[0].name) if arms else paths[0]}: pass a run that has other "
            "settings and the same worlds; `esper runs` lists runs"
        )
    pairs: list[Pair] = []
    notes: list[str] = []
    for other in arms[1:]:
        compared = [pair for scope in SCOPES if (pair := _pair(arms[0], other, scope)) is not None]
        pairs += compared
        notes += [] if compared else [_why_not(arms[0], other)]
    if not pairs:
        raise DataError("nothing pairs. " + " ".join(notes))
    return Comparison(arms=_sides(arms), pairs=pairs, notes=notes)


def _pair(first: Arm, other: Arm, scope: Literal["episodes", "held_out"]) -> Pair | None:
    """Return the comparison of two arms; None if they have no world in common."""
    ours, theirs = getattr(first, scope), getattr(other, scope)
    worlds = sorted(ours.keys() & theirs.keys())
    if not worlds or _tasks_differ(first, other):
        return None
    measures = (_measure(metric, ours, theirs) for metric in METRICS)
    return Pair(
        first=first.name, other=other.name, scope=scope, worlds=worlds,
        measures=[measure for measure in measures if measure is not None],
        structures=_counts(_planted(ours, worlds), _planted(theirs, worlds)),
        choices=_choices({world: (ours[world], theirs[world]) for world in worlds}),
    )  # fmt: skip


def _planted(outcomes: Outcomes, worlds: Sequence[int]) -> list[str]:
    return [printable(name) for world in worlds for name in outcomes[world].structure.values()]


def _measure(metric: str, ours: Outcomes, theirs: Outcomes) -> Measure | None:
    first, other = (
        {world: float(value) for world, outcome in side.items() if (value := getattr(outcome, metric)) is not None}
        for side in (ours, theirs)
    )
    lead = paired(other, first)
    if lead is None:
        return None
    worlds = first.keys() & other.keys()
    first_mean, other_mean = (sum(values[w] for w in sorted(worlds)) / len(worlds) for values in (first, other))
    return Measure(metric=metric, worlds=len(worlds), first=first_mean, other=other_mean, lead=lead)


def _choices(outcomes: Mapping[int, tuple[Outcome, Outcome]]) -> Choices | None:
    sides: tuple[list[Decision], list[Decision]] = ([], [])
    differences = []
    for world, pair in outcomes.items():
        first, other = (outcome.decisions for outcome in pair)
        if first is None or other is None:
            return None
        sides[0].extend(first.values())
        sides[1].extend(other.values())
        difference = first_difference(world, first, other)
        differences += [] if difference is None else [difference]
    planted = ((printable(d.blueprint) for d in side if d.blueprint) for side in sides)
    return Choices(
        operations=_counts(*((printable(d.op) for d in side) for side in sides)), blueprints=_counts(*planted),
        first_differences=differences, same_worlds=len(outcomes) - len(differences),
    )  # fmt: skip


def first_difference(
    world: int, first: Mapping[int, Decision], other: Mapping[int, Decision]
) -> FirstDifference | None:
    """Return the first step with different decisions; None if there is none."""
    for step in sorted(first.keys() | other.keys()):
        texts = [describe(side.get(step)) for side in (first, other)]
        if texts[0] != texts[1]:
            return FirstDifference(world=world, step=step, first=texts[0], other=texts[1])
    return None


def describe(decision: Decision | None) -> str:
    """Return a decision as text: operation, slot, and the options that it read."""
    if decision is None:
        return WAIT
    options = decision_options(decision)
    place = f" {decision.slot}" if decision.slot else ""
    return printable(f"{decision.op}{place}" + (f" ({', '.join(options)})" if options else ""))


def _counts(first: Iterable[str], other: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return name → how often it occurs on each side, most frequent first."""
    ours, theirs = Counter(first), Counter(other)
    names = sorted(ours.keys() | theirs.keys(), key=lambda name: (-ours[name] - theirs[name], name))
    return {name: (ours[name], theirs[name]) for name in names}


def _sides(arms: Sequence[Arm]) -> list[Side]:
    recorded = [arm.settings for arm in arms if arm.settings]  # an evaluation has none
    names = {name for settings in recorded for name in settings}
    differing = sorted(name for name in names if len({settings.get(name) for settings in recorded}) > 1)
    return [
        Side(
            name=arm.name, paths=arm.paths, task=arm.task,
            settings={name: arm.settings[name] for name in differing if name in arm.settings},
        )
        for arm in arms
    ]  # fmt: skip


def _tasks_differ(first: Arm, other: Arm) -> bool:
    return None not in (first.task, other.task) and first.task != other.task


def _why_not(first: Arm, other: Arm) -> str:
    """Return why two arms cannot be compared."""
    if _tasks_differ(first, other):
        return printable(
            f"{other.name} is of task {other.task!r}, {first.name} of task {first.task!r}: compare runs of one task."
        )
    for arm in (other, first):
        if not arm.episodes and not arm.held_out:
            return printable(f"{arm.name} has no finished episode: wait for it, or continue it with --resume.")
    return printable(
        f"{other.name} has {_extent(other)}, {first.name} has {_extent(first)}: no world in common. Compare runs of "
        "the same worlds (--seed of `esper grow`, worlds of `esper train`, `esper eval` with the same --worlds)."
    )


def _extent(arm: Arm) -> str:
    """Describe the worlds of an arm."""
    kinds = {"training": sorted(arm.episodes), "held-out": sorted(arm.held_out)}
    parts = [f"{kind} world{'s' * (len(of) > 1)} {_span(of)}" for kind, of in kinds.items() if of]
    return " and ".join(parts)


def _span(worlds: list[int]) -> str:
    is_range = len(worlds) > 2 and worlds[-1] - worlds[0] == len(worlds) - 1
    shown = [str(world) for world in worlds[:8]] + (["…"] if len(worlds) > 8 else [])
    return f"{worlds[0]} to {worlds[-1]}" if is_range else ", ".join(shown)
