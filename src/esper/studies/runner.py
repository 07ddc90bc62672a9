"""Run the jobs of a study in worker processes and append each finished job to the results file.

Each worker process has one PyTorch thread. A job that raises does not stop the others. Only the parent writes, and a
job is written when it has finished: ending the command at any time loses only the jobs under way.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import math
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import mean
from typing import NamedTuple, Protocol, TypeVar

import torch

from esper import __version__
from esper.leyline.atomic_io import locked, make_real_directory
from esper.leyline.errors import RunError, TrainingError
from esper.studies.contract import Point, Study, Trainer
from esper.studies.results import Job, JobResult, append_result, current_results, study_results
from esper.studies.trainers import trainer_of
from esper.tolaria.reproducibility import fingerprint


class Timed(Protocol):
    """Result of a job."""

    @property
    def seconds(self) -> float:
        """Seconds of training."""


AnyJob = TypeVar("AnyJob", bound=NamedTuple)
"""Strings that name a kind of job, then the number of its world or training seed."""
Result = TypeVar("Result", bound=Timed)


@contextlib.contextmanager
def shard_lock(directory: Path, shard: tuple[int, int]) -> Iterator[None]:
    """Hold the lock of shard (i, n). Raise RunError if another process holds it."""
    make_real_directory(directory)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(directory / f"shard-{shard[0]}-of-{shard[1]}.lock", wait_s=0.0))
        except TimeoutError as error:
            raise RunError(
                f"another process runs shard {shard[0]}/{shard[1]} in {directory}. Wait for it, or use another --shard"
            ) from error
        yield


@contextlib.contextmanager
def worker_pool(size: int) -> Iterator[ProcessPoolExecutor]:
    """Start worker processes. They are killed if the context ends by an exception."""
    others = active_children()
    pool = ProcessPoolExecutor(size, mp_context=get_context("spawn"), initializer=_prepare_worker)
    try:
        yield pool
    except BaseException as error:
        for process in set(active_children()) - set(others):
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise RunError(
                "a worker process was ended from outside, perhaps for lack of memory. Run the same command again, "
                "perhaps with fewer workers"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends its workers
    torch.set_num_threads(1)


def run_jobs(
    study: Study, jobs: Sequence[Job], directory: Path, workers: int, report: Callable[[str], None], *,
    extend: bool = False,
) -> None:  # fmt: skip
    """Run every job that has no result yet. Raise RunError at the end if some have failed.

    `extend` counts the jobs of the saved study as finished.
    """
    trainers = {job.arm: trainer_of(study.arm(job.arm)) for job in jobs}
    finished = current_results(study, study_results(study, directory, with_saved=extend), jobs)
    versions_by_arm = {arm: versions(trainer) for arm, trainer in trainers.items()}
    run_missing(partial(run_job, study, trainers, versions_by_arm), jobs, finished, directory, workers, report)


def run_missing(
    train: Callable[[AnyJob], Result], jobs: Sequence[AnyJob], finished: dict[AnyJob, Result], directory: Path,
    workers: int, report: Callable[[str], None],
) -> None:  # fmt: skip
    """Train the jobs that are not in `finished` in worker processes; append each result to the results file.

    `train` must be picklable. Raise RunError at the end if some jobs have failed.
    """
    report(f"{len(jobs)} jobs, {len(finished)} of them finished before")
    failures: list[str] = []
    with worker_pool(workers) as pool:
        futures = {pool.submit(attempt, train, job): job for job in jobs if job not in finished}
        for future in as_completed(futures):
            job = futures[future]
            result = future.result()
            title = " ".join([*job[:-1], job._fields[-1], str(job[-1])])  # such as "rescue from_start world 100"
            if isinstance(result, str):
                failures.append(f"{title}: {result}")
                report(f"failed: {failures[-1]}")
                continue
            append_result(directory, result)
            finished[job] = result
            seconds = {job: each.seconds for job, each in finished.items()}
            remaining_s = seconds_left(seconds, [job for future, job in futures.items() if not future.done()]) / workers
            report(
                f"[{len(finished)}/{len(jobs)}] {title}: {result.seconds:.0f} s, about {remaining_s / 60:.0f} min left"
            )
    if failures:
        raise RunError(
            f"{len(failures)} of {len(jobs)} jobs failed, first {failures[0]}. "
            "Run the same command again to retry them; finished jobs are kept"
        )


def seconds_left(finished: Mapping[AnyJob, float], remaining: Sequence[AnyJob]) -> float:
    """Return the expected seconds of the remaining jobs, given those of finished ones.

    It is the mean of the jobs that differ in the last field only, the world or training seed, else of all.
    """
    total = 0.0
    for job in remaining:
        same = [seconds for other, seconds in finished.items() if other[:-1] == job[:-1]]
        total += mean(same or finished.values())
    return total


def attempt(train: Callable[[AnyJob], Result], job: AnyJob) -> Result | str:
    """Train one job in a worker process. Return its result, or the message of its error."""
    try:
        return train(job)
    except Exception as error:  # whatever a trainer raises ends its own job only
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect()  # networks and their data are in reference cycles, which outlive many jobs otherwise


def run_job(
    study: Study, trainers: Mapping[str, Trainer], versions_by_arm: Mapping[str, dict[str, str]], job: Job
) -> JobResult:
    """Train one job. `trainers` and `versions_by_arm` have the trainer of each arm and its versions."""
    arm = study.arm(job.arm)
    start = time.monotonic()
    points = trainers[job.arm](arm, job.task, job.world, study.budgets)
    check_points(points, study.budgets)
    seconds = time.monotonic() - start
    return JobResult(
        **job._asdict(), settings_hash=study.settings_hash(arm), versions=versions_by_arm[job.arm], seconds=seconds,
        points=tuple(points),
    )  # fmt: skip


def check_points(points: Sequence[Point], budgets: Sequence[float]) -> None:
    """Raise TrainingError unless the points are finite and at ascending budgets of the study."""
    at = [point.budget for point in points]
    if not at or at != sorted(set(at) & set(budgets)):
        raise TrainingError(f"the trainer returned points at the budgets {at}, expected budgets among {list(budgets)}")
    for point in points:
        if not all(map(math.isfinite, (point.val_quality, point.test_quality, point.test_loss, point.seconds))):
            raise TrainingError(f"the trainer returned a point that is not finite: {point}")


def versions(trainer: Trainer) -> dict[str, str]:
    """Return what determines the bits of a result: versions of code and libraries, and the processor."""
    source = Path(inspect.getfile(trainer)).read_bytes()
    own = {"esper": __version__, "trainer": hashlib.sha256(source).hexdigest()[:16]}
    return own | {name: value for name, value in fingerprint(1, "cpu", data_hash="").items() if name != "data"}
