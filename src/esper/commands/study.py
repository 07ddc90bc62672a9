"""`esper study`: list the studies, or run one, print its tables and verdicts, and save it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from esper.commands.frontier_chart import frontier_chart
from esper.leyline.atomic_io import make_real_directory, write_atomically
from esper.leyline.errors import ConfigError
from esper.nissa.run import manifest_base
from esper.nissa.signals import terminable
from esper.studies.contract import Study, check_worlds
from esper.studies.rendering import as_text, text_table
from esper.studies.results import (
    RESULTS,
    SAVED,
    TUNING,
    Job,
    JobResult,
    SavedStudy,
    current_results,
    points_of,
    study_results,
    unfinished,
)
from esper.studies.runner import run_jobs, run_missing, shard_lock
from esper.studies.simulated_policies import (
    SettingsStudy,
    Training,
    current_trainings,
    ranking,
    ranking_title,
    seed_rows,
    train_arm,
)
from esper.studies.statistics import summarize
from esper.studies.table import SETTINGS_STUDIES, STUDIES, get_study

report = partial(print, flush=True)


def list_studies(out: Path) -> None:
    """Print name, state and question of every study."""
    for study in STUDIES.values():
        jobs = jobs_of(study, [], study.worlds)
        with_saved = not (out / study.name / RESULTS).exists()
        try:
            finished = current_results(study, study_results(study, out / study.name, with_saved=with_saved), jobs)
        except ConfigError as error:
            print(f"{study.name}: {error}")
            continue
        print_state(study, len(finished), len(jobs), SAVED / f"{study.name}.json")
    for each in SETTINGS_STUDIES.values():
        with_saved = not (out / each.name / RESULTS).exists()
        finished_trainings = current_trainings(each, out / each.name, with_saved=with_saved)
        print_state(each, len(finished_trainings), len(each.jobs()), each.saved)


def print_state(study: Study | SettingsStudy, finished: int, jobs: int, path: Path) -> None:
    """Print name, state and question of a study that is saved at `path`."""
    saved = ", saved" if path.exists() else ""
    print(f"{study.name}: {finished} of {jobs} jobs finished{saved}\n    {study.question}")


def run_study(
    name: str, *, arms: list[str], worlds: str | None, tuning: bool, shard: str, workers: int, out: Path, show: bool,
    save: bool, extend: bool,
) -> None:  # fmt: skip
    """Run the missing jobs of a study, then print its tables, draw its charts and save it as requested.

    `extend` counts the jobs of the saved study as finished; so does `show` if there are no other results.
    """
    study = get_study(name)
    index, shards = parse_shard(shard)
    if save and (arms or show or worlds):
        raise ConfigError("--save writes a whole study: leave out --arm, --worlds and --show")
    directory = out / study.name
    saved = study.saved if isinstance(study, SettingsStudy) else saved_path(study, tuning=tuning)
    if extend and not saved.exists():
        raise ConfigError(f"study {name!r} is not saved: there is no {saved} to extend. Leave out --extend")
    with_saved = extend or (show and not (directory / RESULTS).exists())
    if isinstance(study, SettingsStudy):
        if tuning or worlds:
            raise ConfigError(f"study {name!r} has fixed worlds and none for tuning: leave out --tuning and --worlds")
        run_settings_study(
            study, study.jobs(arms), (index, shards), directory, workers, show=show, save=save, with_saved=with_saved
        )
        return
    study = study.for_tuning() if tuning else study
    first, count = parse_worlds(study, worlds, tuning=tuning)
    jobs = jobs_of(study, arms, (first, count))
    if not show:
        ours = [job for job in jobs if (job.world - first) % shards == index - 1]
        with running_shard(directory, (index, shards)):
            run_jobs(study, ours, directory, workers, report, extend=extend)
    results = current_results(study, study_results(study, directory, with_saved=with_saved), jobs)
    print_results(study, results, directory, tuning=tuning)
    check_complete(study, len(jobs), len(results), save=save)
    if save:
        save_study(study, results, tuning=tuning)


def run_settings_study(
    study: SettingsStudy, jobs: list[Training], shard: tuple[int, int], directory: Path, workers: int, *, show: bool,
    save: bool, with_saved: bool,
) -> None:  # fmt: skip
    """Run the missing ones of these trainings, then print the ranking and save it as requested."""
    if not show:
        ours = jobs[shard[0] - 1 :: shard[1]]
        with running_shard(directory, shard):
            trainings = current_trainings(study, directory, with_saved=with_saved)
            before = {job: one for job, one in trainings.items() if job in ours}
            run_missing(partial(train_arm, study), ours, before, directory, workers, report)
    trainings = current_trainings(study, directory, with_saved=with_saved)
    finished = {job: one for job, one in trainings.items() if job in jobs}
    print(f"{ranking_title(study)}\n{text_table(ranking(study, finished))}")
    by_seed = seed_rows(study, finished)
    if by_seed:
        print(f"Every training seed\n{text_table(by_seed)}")
    check_complete(study, len(jobs), len(finished), save=save)
    if save:
        lines = [msgspec.json.encode(one) + b"\n" for one in finished.values()]
        write_saved(study.name, study.saved, b"".join(lines))


@contextmanager
def running_shard(directory: Path, shard: tuple[int, int]) -> Iterator[None]:
    """Hold the lock of a shard. After Ctrl-C, print that finished jobs are kept."""
    try:
        with terminable(), shard_lock(directory, shard):
            yield
    except KeyboardInterrupt:
        print("Interrupted. Finished jobs are kept: run the same command again to continue.")
        raise


def check_complete(study: Study | SettingsStudy, jobs: int, finished: int, *, save: bool) -> None:
    """Print how many jobs are missing. Raise ConfigError if the study is to be saved without them."""
    missing = jobs - finished
    if missing:
        print(f"Incomplete: {missing} of {jobs} jobs are missing.")
        if save:
            raise ConfigError(
                f"study {study.name!r} cannot be saved: {missing} jobs are missing. Run the other shards first"
            )


def jobs_of(study: Study, arms: list[str], worlds: tuple[int, int]) -> list[Job]:
    """Return the jobs of these arms, or of all, world by world, so that paired worlds are complete early."""
    names = [study.arm(name).name for name in arms or [arm.name for arm in study.arms]]
    first, count = worlds
    return [Job(task, arm, world) for world in range(first, first + count) for task in study.task for arm in names]


def parse_worlds(study: Study, text: str | None, *, tuning: bool) -> tuple[int, int]:
    """Return (first, count) of FIRST:COUNT, or of the study. Raise ConfigError for worlds of the other purpose."""
    if text is None:
        return study.tuning_worlds if tuning else study.worlds
    match = re.fullmatch(r"(\d{1,9}):(\d{1,6})", text)
    if match is None:
        raise ConfigError(f"--worlds must be FIRST:COUNT, such as 100:16, got {text!r}")
    worlds = int(match[1]), int(match[2])
    check_worlds(worlds, tuning=tuning)
    return worlds


def parse_shard(text: str) -> tuple[int, int]:
    """Return (i, n) of I/N. Raise ConfigError unless 1 ≤ I ≤ N."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--shard must be I/N with 1 ≤ I ≤ N, such as 1/4, got {text!r}")
    return int(match[1]), int(match[2])


def print_results(study: Study, results: dict[Job, JobResult], directory: Path, *, tuning: bool) -> None:
    """Print tables and verdicts and write one chart per task. Tuning shows validation quality and no verdicts."""
    summary = summarize(study, points_of(results.values()), metric_of(study, tuning=tuning))
    print(as_text(summary))
    if len(different_versions(results.values())) > 1:
        print("Note: the results were made with different versions of code or libraries, or on different processors.")
    for task in sorted({row.task for row in summary.rows if row.full_trainings is not None}):
        make_real_directory(directory)
        path = directory / f"{task}{'-tuning' if tuning else ''}.svg"
        write_atomically(path, frontier_chart(summary, task).encode())
        print(f"Chart: {path}")


def different_versions(results: Iterable[JobResult]) -> list[dict[str, str]]:
    """Return the different versions with which results were made."""
    distinct = {tuple(sorted(result.versions.items())): result.versions for result in results}
    return list(distinct.values())


def metric_of(study: Study, *, tuning: bool) -> str:
    """Return the metric that tables show: no test results of tuning worlds."""
    return "val_quality" if tuning else study.metric


def saved_path(study: Study, *, tuning: bool) -> Path:
    """Return where the repository keeps the results of a study."""
    return (TUNING if tuning else SAVED) / f"{study.name}.json"


def save_study(study: Study, results: dict[Job, JobResult], *, tuning: bool) -> None:
    """Write every point, the command, the versions and the tables."""
    saved = SavedStudy(
        command=manifest_base()["command"], study=study, versions=different_versions(results.values()),
        summary=summarize(study, points_of(results.values()), metric_of(study, tuning=tuning)),
        records=list(results.values()),
    )  # fmt: skip
    content = msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n"
    write_saved(study.name, saved_path(study, tuning=tuning), content)
    if not tuning:
        unfinished(study).unlink(missing_ok=True)


def write_saved(name: str, path: Path, content: bytes) -> None:
    """Write the results of a study into the repository."""
    make_real_directory(path.parent)
    write_atomically(path, content)
    print(f"Saved: {path}. Update the documentation with: esper study {name} --docs")
