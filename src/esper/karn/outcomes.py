"""Results of a run per world, read from its journal, from its held-out comparison, or from an evaluation.

An *arm* is what is compared: usually one run. Runs that differ in their worlds only form one arm, because each run of
`esper grow` has one world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from esper.karn import held_out
from esper.karn.held_out import HeldOut, Row
from esper.karn.lenient_manifest import Data, fact, manifest_of
from esper.leyline.atomic_io import read_regular
from esper.leyline.errors import DataError
from esper.leyline.events import Decision, Episode, RunStarted, Step
from esper.leyline.text import LONGEST_SETTING, flat_settings, printable
from esper.nissa.journal_rows import replay
from esper.nissa.run import MANIFEST

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
    settings = flat_settings({"controller": fact(manifest, "controller"), **tree(manifest.get("config"))})
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
    """Return (environment, world) → (number, outcome) of the last finished episode there, and the start of the run."""
    episodes: dict[tuple[int, int], tuple[int, Outcome]] = {}
    macs: dict[tuple[int, int], int | None] = {}  # by environment and episode; only episodes that have not ended
    decisions: dict[tuple[int, int], dict[int, Decision]] = {}
    started: RunStarted | None = None
    for row in replay(path, (RunStarted, Step, Decision, Episode)):
        match row:
            case RunStarted() as event:
                started = started or event
            case Step() as event:
                macs[event.env, event.episode] = event.train_macs
            case Decision() as event if event.happened and event.op != "WAIT":
                decisions.setdefault((event.env, event.episode), {})[event.step] = event
            case Episode() as event:
                key = event.env, event.episode
                has_steps = key in macs  # decisions are recorded at the same level as steps
                outcome = Outcome(
                    quality=event.quality, test_quality=event.test_quality, utility=event.utility, params=event.params,
                    train_macs=macs.pop(key, None), structure=event.structure,
                    decisions=decisions.pop(key, {}) if has_steps else None,
                )  # fmt: skip
                episodes[event.env, event.world] = event.episode, outcome
    return episodes, started


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
