"""Studies of training settings: policies trained on the simulator, compared in the same simulated worlds.

A change of an arm's settings invalidates its finished trainings. Policies play by sampling, without the uniform share
of exploration. Differences are paired by world, each world's U being the mean over training seeds; their bootstrap 95 %
intervals are over worlds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from esper.leyline.errors import unknown_name
from esper.leyline.paired import compare
from esper.leyline.slot_table import Floats
from esper.simic.evaluation.comparison import play
from esper.simic.simulator import Simulator
from esper.simic.training.config import TrainConfig, load_config
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.studies.rendering import Cells
from esper.studies.results import RESULTS, read_lines
from esper.tamiyo.controllers.learned import Learned
from esper.tamiyo.network import TamiyoNetwork

SAVED_POLICIES = Path("studies/policies")
"""Directory of the results of policies, in the repository root."""


class Training(NamedTuple):
    """One arm, by name, to train with one training seed."""

    arm: str
    seed: int


class SettingsStudy(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table of studies of settings. The first arm is the reference of the printed differences."""

    name: str
    question: str  # what a user asks
    arms: dict[str, tuple[str, ...]]  # settings in addition to those of the preset `sim`, as for `esper train --set`
    seeds: tuple[int, ...]  # training seeds
    worlds: tuple[int, int]  # first world and number of worlds in which the policies play

    @property
    def saved(self) -> Path:
        """Path of the results in the repository."""
        return SAVED_POLICIES / f"{self.name}.jsonl"

    def jobs(self, arms: Sequence[str] = ()) -> list[Training]:
        """Return the trainings of these arms, or of all, seed by seed, so that a ranking is complete early."""
        for name in arms:
            if name not in self.arms:
                raise unknown_name(f"arm of study {self.name!r}", name, self.arms)
        return [Training(arm, seed) for seed in self.seeds for arm in arms or self.arms]


class TrainedArm(msgspec.Struct, frozen=True, kw_only=True):
    """A finished training."""

    arm: str
    settings: tuple[str, ...]
    seed: int
    seconds: float
    first_world: int
    utility: list[float]  # [W] in each world
    curve: list[float]  # [rounds] mean U of the training episodes


def train_arm(study: SettingsStudy, job: Training) -> TrainedArm:
    """Train one policy and play it."""
    settings = study.arms[job.arm]
    config = load_config(preset="sim", sets=[*settings, f"seed={job.seed}"])
    start = time.monotonic()
    result = train_ppo_vectorized(config)
    result.network.config = msgspec.structs.replace(result.network.config, epsilon=0.0)
    first, count = study.worlds
    utility = played_utility(result.network, config, range(first, first + count))
    seconds = round(time.monotonic() - start, 1)
    return TrainedArm(
        arm=job.arm, settings=settings, seed=job.seed, seconds=seconds, first_world=first,
        utility=utility.round(6).tolist(), curve=[round(float(r.utility.mean()), 6) for r in result.rounds],
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
            has_present_settings = study.arms.get(one.arm) == one.settings and one.seed in study.seeds
            if has_present_settings and study.worlds == (one.first_world, len(one.utility)):
                trainings[Training(one.arm, one.seed)] = one
    return {job: trainings[job] for job in study.jobs() if job in trainings}


def ranking(study: SettingsStudy, finished: Mapping[Training, TrainedArm]) -> list[Cells]:
    """Return a table of the arms that have results, header first, the highest U first."""
    by_arm = {arm: [one for job, one in finished.items() if job.arm == arm] for arm in study.arms}
    means = {arm: np.mean([one.utility for one in some], axis=0) for arm, some in by_arm.items() if some}
    reference = next(iter(study.arms))
    rows: list[Cells] = []
    for arm, utility in sorted(means.items(), key=lambda item: -item[1].mean()):
        own = compare(utility, 0 * utility)
        seeds = ", ".join(f"{np.mean(one.utility):+.4f}" for one in by_arm[arm])
        against = "–"
        if arm != reference and reference in means:
            difference = compare(utility, means[reference])
            against = f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
        figures = (f"{own.mean:+.4f} ± {(own.high - own.low) / 2:.4f}", seeds, against)
        rows.append((arm, *(figure.replace("-", "−") for figure in figures)))
    return [("arm", "U", "of each training seed", f"against {reference}"), *rows]


def ranking_title(study: SettingsStudy) -> str:
    """Return the title of the ranking."""
    first, count = study.worlds
    seeds = ", ".join(map(str, study.seeds))
    return f"U in worlds {first} to {first + count - 1}, training seeds {seeds}, 95 % intervals"
