"""Studies of training settings: policies trained on the simulator, compared in the same simulated worlds.

A change of an arm's settings invalidates its finished trainings. Policies play by sampling, without the uniform share
of exploration. Differences are paired by world, each world's U being the mean over training seeds; their bootstrap 95 %
intervals are over worlds. A reference is a controller that is played without training.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.paired import compare
from esper.leyline.slot_table import Floats
from esper.simic.evaluation.comparison import play
from esper.simic.simulator import Simulator
from esper.simic.training.config import TrainConfig, load_config
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.studies.rendering import Cells
from esper.studies.results import RESULTS, read_lines
from esper.studies.simulated_references import CONTROLLERS, reference_utility
from esper.tamiyo.controllers.learned import Learned
from esper.tamiyo.network import TamiyoNetwork

CurvePoint: TypeAlias = tuple[float, float, float, float]
ROUNDS_SHOWN = 34
"""Largest number of points of a learning curve."""
SAVED_POLICIES = Path("studies/policies")
"""Directory of the results of policies, in the repository root."""


class Training(NamedTuple):
    """One arm, by name, to train with one training seed; or a reference, whose seed is 0."""

    arm: str
    seed: int


class SettingsStudy(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table of studies of settings. Printed differences are to the first reference, or the first arm."""

    name: str
    question: str  # what a user asks
    arms: dict[str, tuple[str, ...]]  # settings in addition to those of the preset `sim`, as for `esper train --set`
    seeds: tuple[int, ...]  # training seeds
    worlds: tuple[int, int]  # first world and number of worlds in which the policies play
    references: tuple[str, ...] = ()  # controllers that play without training, of `CONTROLLERS`
    first_worlds: int = 0  # each training seed is also shown in this many of the first worlds; 0: seeds have no table

    def __post_init__(self) -> None:
        for name in self.references:
            if name not in CONTROLLERS:
                raise unknown_name(f"reference of study {self.name!r}", name, CONTROLLERS)
        if not 0 <= self.first_worlds <= (self.worlds[1] if self.references else 0):
            raise ConfigError(
                f"study {self.name!r}: first_worlds must lie between 0 and {self.worlds[1]}, and be 0 without "
                f"references, got {self.first_worlds}"
            )
        if len(set(self.names)) != len(self.names):
            raise ConfigError(f"study {self.name!r}: references and arms must have different names, got {self.names}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of references and arms. Differences are to the first one."""
        return (*self.references, *self.arms)

    @property
    def saved(self) -> Path:
        """Path of the results in the repository."""
        return SAVED_POLICIES / f"{self.name}.jsonl"

    def jobs(self, arms: Sequence[str] = ()) -> list[Training]:
        """Return the trainings of these arms, or of all, seed by seed, so that a ranking is complete early."""
        for name in arms:
            if name not in self.names:
                raise unknown_name(f"arm of study {self.name!r}", name, self.names)
        chosen = arms or self.names
        references = [Training(name, 0) for name in chosen if name in self.references]
        return [*references, *(Training(arm, seed) for seed in self.seeds for arm in chosen if arm in self.arms)]

    def settings(self, name: str) -> tuple[str, ...]:
        """Return the settings of an arm; a reference has those of the preset."""
        return self.arms.get(name, ())


class TrainedArm(msgspec.Struct, frozen=True, kw_only=True):
    """A finished training, or what a reference reached."""

    arm: str
    settings: tuple[str, ...]
    seed: int
    seconds: float
    first_world: int
    utility: list[float]  # [W] in each world
    curve: list[float]  # [rounds] mean U of the training episodes; empty for a reference


def train_arm(study: SettingsStudy, job: Training) -> TrainedArm:
    """Train one policy and play it, or play a reference."""
    settings = study.settings(job.arm)
    config = load_config(preset="sim", sets=[*settings, f"seed={job.seed}"])
    first, count = study.worlds
    worlds = range(first, first + count)
    curve: list[float] = []
    start = time.monotonic()
    if job.arm in study.references:
        utility = reference_utility(job.arm, config, worlds)
    else:
        result = train_ppo_vectorized(config)
        curve = [round(float(r.utility.mean()), 6) for r in result.rounds]
        result.network.config = msgspec.structs.replace(result.network.config, epsilon=0.0)
        utility = played_utility(result.network, config, worlds)
    return TrainedArm(
        arm=job.arm, settings=settings, seed=job.seed, seconds=round(time.monotonic() - start, 1), first_world=first,
        utility=utility.round(6).tolist(), curve=curve,
    )  # fmt: skip


def played_utility(
    network: TamiyoNetwork, config: TrainConfig, worlds: Iterable[int], *, sample: bool = True
) -> Floats:
    """Return U of a policy in these simulated worlds."""
    numbers = list(worlds)
    controller = Learned(network, fixed=config.fixed_heads(), sample=sample)
    return play(Simulator(config.sim, numbers, config.rules), controller, numbers, config.reward).utility


def current_trainings(
    study: SettingsStudy, directory: Path | None = None, *, with_saved: bool = True
) -> dict[Training, TrainedArm]:
    """Return the last result of each training with the present settings.

    They are in the repository, unless without `with_saved`, and in the results file in `directory` if there is one.
    """
    trainings: dict[Training, TrainedArm] = {}
    for path in [*([study.saved] if with_saved else []), *([directory / RESULTS] if directory else [])]:
        for one in read_lines(path, TrainedArm):
            has_present_settings = study.settings(one.arm) == one.settings
            if has_present_settings and study.worlds == (one.first_world, len(one.utility)):
                trainings[Training(one.arm, one.seed)] = one
    return {job: trainings[job] for job in study.jobs() if job in trainings}


def ranking(study: SettingsStudy, finished: Mapping[Training, TrainedArm]) -> list[Cells]:
    """Return a table of the arms that have results, header first, the highest U first."""
    by_arm = {arm: [one for job, one in finished.items() if job.arm == arm] for arm in study.names}
    means = {arm: np.mean([one.utility for one in some], axis=0) for arm, some in by_arm.items() if some}
    reference = study.names[0]
    rows: list[Cells] = []
    for arm, utility in sorted(means.items(), key=lambda item: -item[1].mean()):
        seeds = ", ".join(f"{np.mean(one.utility):+.4f}" for one in by_arm[arm]) if arm in study.arms else "–"
        against = "–"
        if arm != reference and reference in means:
            against = lead(utility, means[reference])
        rows.append((arm, *with_minus(mean_and_half_width(utility), seeds, against)))
    return [("arm", "U", "of each training seed", f"against {reference}"), *rows]


def seed_rows(study: SettingsStudy, finished: Mapping[Training, TrainedArm]) -> list[Cells]:
    """Return a table of every training seed, header first: U and its lead over the reference, in the first worlds too.

    It has no rows if the study shows no first worlds or its reference has not been played.
    """
    reference = next((one.utility for job, one in finished.items() if job.arm == study.names[0]), None)
    if not study.first_worlds or reference is None:
        return []
    parts = (study.worlds[1], study.first_worlds)
    titles = (f"{what} in {part} worlds" for part in parts for what in ("U", f"against {study.names[0]}"))
    rows: list[Cells] = [("arm", "training seed", *titles)]
    for job, one in finished.items():
        if job.arm in study.arms:
            own, other = np.array(one.utility), np.array(reference)
            figures = [text for n in parts for text in (mean_and_half_width(own[:n]), lead(own[:n], other[:n]))]
            rows.append((job.arm, str(job.seed), *with_minus(*figures)))
    return rows


def mean_and_half_width(utility: Floats) -> str:
    """Return the mean over worlds and half the width of its 95 % interval."""
    own = compare(utility, 0 * utility)
    return f"{own.mean:+.4f} ± {(own.high - own.low) / 2:.4f}"


def lead(utility: Floats, other: Floats) -> str:
    """Return the mean paired difference with its 95 % interval."""
    difference = compare(utility, other)
    return f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"


def with_minus(*figures: str) -> Iterable[str]:
    """Return figures with minus signs in place of hyphens."""
    return (figure.replace("-", "−") for figure in figures)


def learning_curves(study: SettingsStudy, finished: Mapping[Training, TrainedArm]) -> dict[str, list[CurvePoint]]:
    """Return the learning curve of each arm: (episodes played in percent of all, mean, lowest, highest training seed).

    Arms may have different numbers of rounds. Each point is the mean of up to `ROUNDS_SHOWN` equal parts of the rounds.
    """
    curves: dict[str, list[CurvePoint]] = {}
    for arm in study.arms:
        seeds = [one.curve for job, one in finished.items() if job.arm == arm and one.curve]
        if seeds:
            parts = min(ROUNDS_SHOWN, *map(len, seeds))
            by_seed = [[part.mean() for part in np.array_split(np.array(curve), parts)] for curve in seeds]
            means = np.array(by_seed).T  # [parts, seeds]
            curves[arm] = [
                (100 * (i + 1) / len(means), float(m.mean()), float(m.min()), float(m.max()))
                for i, m in enumerate(means)
            ]
    return curves


def ranking_title(study: SettingsStudy) -> str:
    """Return the title of the ranking."""
    first, count = study.worlds
    seeds = ", ".join(map(str, study.seeds))
    return f"U in worlds {first} to {first + count - 1}, training seeds {seeds}, 95 % intervals"
