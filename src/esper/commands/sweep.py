"""`esper sweep`: run `esper grow` for every setting of a plan in every world, on one machine or on many.

    DIR/ARM/WORLD/            the run of one setting in one world
    DIR/leases/ARM-WORLD      exists while a process works on that run; touched every `TOUCH_S`
    DIR/logs/ARM-WORLD        output of that run
    DIR/sweep.svg, sweep.json the chart and the comparison, once all runs have finished

A job is a run that has not finished. The process that creates its lease runs or resumes it. A lease is taken over if
its owner is dead or has not touched it for `STALE_S`. A signal is passed on to the runs, which write a checkpoint.
Start the same command again, on this or another machine, to continue.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from esper.commands.charts import dots
from esper.commands.compare import comparison_tables
from esper.commands.growing import GrowSettings
from esper.commands.study import parse_shard
from esper.karn.comparison import arms_of, compare_runs
from esper.leyline.atomic_io import lock_file, locked, make_real_directory, open_own, read_regular, write_atomically
from esper.leyline.errors import ConfigError, RunError
from esper.nissa.run import CHECKPOINTS, read_manifest, seconds_between
from esper.nissa.signals import deferred_signals, terminable
from esper.studies.contract import NAME
from esper.studies.results import Job
from esper.studies.runner import seconds_left
from esper.tolaria.checkpoint import Checkpoints

TOUCH_S = 20.0
STALE_S = 300.0
"""Seconds after which an untouched lease of another machine counts as abandoned, more than clocks differ."""
GRACE_S = 120.0
"""Seconds that runs have to write a checkpoint after a signal, before they are killed."""
LARGEST_PLAN = 1 << 20


class SweepPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a plan file."""

    worlds: tuple[int, int]
    """The runs use this first world (`esper grow --seed`), ≥ 0, and this number of worlds, ≥ 1."""
    settings: dict[str, dict[str, Any]]
    """Each arm has these options of `esper grow`; there are two or more arms. The first arm is the reference of the
    comparison."""
    common: dict[str, Any] = {}
    """All arms share these options of `esper grow`."""

    def __post_init__(self) -> None:
        first, count = self.worlds
        complete = [self.of(arm, first) for arm in self.settings]
        for is_valid, message in (
            (
                len(self.settings) > 1,
                "settings needs two or more arms, such as [settings.none] and [settings.schedule]",
            ),
            (all(map(NAME.fullmatch, self.settings)), "names of arms are a letter, then at most 19 of a-z, 0-9 and _"),
            (
                first >= 0 and count >= 1,
                f"worlds are [first, count] with first ≥ 0 and count ≥ 1, got {[first, count]}",
            ),
            (all(c not in complete[:i] for i, c in enumerate(complete)), "two arms have the same settings"),
            (len({c.task for c in complete}) == 1, "all arms must have the same task: set it in [common]"),
        ):
            if not is_valid:
                raise ConfigError(message)

    def of(self, arm: str, world: int) -> GrowSettings:
        """Return the settings of `esper grow` for an arm in a world. Raise ConfigError for an unknown option."""
        options = {"task": "fashion", "controller": "schedule", "compare": False} | self.common | self.settings[arm]
        if "seed" in options:
            raise ConfigError("a plan has worlds instead of the option seed. Remove seed")
        try:
            return msgspec.convert(options | {"seed": world}, GrowSettings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"settings.{arm}: {error}") from error

    def jobs(self) -> list[Job]:
        """Return the jobs world by world, so that paired worlds are complete early."""
        first, count = self.worlds
        task = self.of(next(iter(self.settings)), first).task
        return [Job(task, arm, world) for world in range(first, first + count) for arm in self.settings]


def read_plan(path: Path) -> SweepPlan:
    """Return the plan in a TOML file. Raise ConfigError if it is not valid."""
    try:
        return msgspec.convert(tomllib.loads(read_regular(path, LARGEST_PLAN, follow=True).decode()), SweepPlan)
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"the plan {path} cannot be used: {error}") from error


def run_sweep(plan_file: Path, *, shard: str, workers: int, out: Path | None) -> None:
    """Run the missing jobs of a plan that no other process runs; print table and chart once all have finished."""
    plan = read_plan(plan_file)
    index, shards = parse_shard(shard)
    directory = Path("runs") / plan_file.stem if out is None else out
    make_real_directory(directory)
    ours = [job for job in plan.jobs() if (job.world - plan.worlds[0]) % shards == index - 1]
    with terminable(), Sweep(plan, directory, workers) as sweep:
        sweep.run(ours)
    missing = [job for job in plan.jobs() if finished_seconds(run_path(directory, job)) is None]
    if missing:
        print(f"{len(plan.jobs()) - len(missing)} of {len(plan.jobs())} runs of {plan_file} have finished.")
    else:
        conclude(plan, directory)
    if sweep.failures:
        raise RunError(
            f"{len(sweep.failures)} of {len(ours)} runs failed, first {sweep.failures[0]}. Start the same command "
            "again to retry them; finished runs are kept"
        )


def conclude(plan: SweepPlan, directory: Path) -> None:
    """Print the comparison of all runs and write the chart."""
    paths = {arm: [run_path(directory, job) for job in plan.jobs() if job.arm == arm] for arm in plan.settings}
    comparison = compare_runs([path for each in paths.values() for path in each])
    Console().print(comparison_tables(comparison))
    write_atomically(directory / "sweep.json", msgspec.json.format(msgspec.json.encode(comparison), indent=1))
    rows = [(arm, [q for path in each for q in final_quality(path)]) for arm, each in paths.items()]
    write_atomically(directory / "sweep.svg", dots(rows, "Test quality by setting").encode())
    print(f"chart: {directory / 'sweep.svg'}")
    print(f"show it again: esper compare {' '.join(f'{directory / arm}/*' for arm in paths)}")


def final_quality(path: Path) -> list[float]:
    """Return the test quality of a finished run, validation quality if it has none."""
    outcomes = arms_of(path, path.name, alone=False)[0].episodes.values()
    values = (o.test_quality if o.test_quality is not None else o.quality for o in outcomes)
    return [value for value in values if value is not None]


def run_path(directory: Path, job: Job) -> Path:
    """Return the run directory of a job."""
    return directory / job.arm / str(job.world)


def finished_seconds(path: Path) -> float | None:
    """Return the duration of a finished run; None if there is none at `path`, or if it has not finished."""
    try:
        manifest = read_manifest(path)
    except RunError:
        return None
    if manifest["status"] != "finished":
        return None
    return seconds_between(manifest.get("resumed", manifest.get("started")), manifest.get("finished")) or 0.0


class Sweep:
    """The runs of one `esper sweep` process. On leaving, its runs are stopped and its leases released."""

    def __init__(self, plan: SweepPlan, directory: Path, workers: int) -> None:
        self.plan = plan
        self.directory = directory
        self.workers = workers
        self.failures: list[str] = []
        self._running: dict[Job, tuple[subprocess.Popen[bytes], Lease]] = {}

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _lease in self._running.values():
            process.terminate()  # it writes a checkpoint at the end of its epoch
        end = time.monotonic() + GRACE_S
        for process, lease in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            process.wait()
            lease.release()

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the jobs that are neither finished nor leased, `workers` at a time."""
        total = len(jobs)
        seconds = {job: s for job in jobs if (s := finished_seconds(run_path(self.directory, job))) is not None}
        waiting = [job for job in jobs if job not in seconds]
        print(f"{total} runs, {len(seconds)} of them finished before", flush=True)
        while waiting or self._running:
            while waiting and len(self._running) < self.workers:
                self._start(waiting.pop(0))
            time.sleep(0.1)
            for job in self._ended():
                spent = finished_seconds(run_path(self.directory, job))
                if spent is None:
                    continue
                seconds[job] = spent
                remaining_s = seconds_left(seconds, [*waiting, *self._running]) / self.workers
                title = f"[{len(seconds)}/{total}] {job.arm} world {job.world}"
                print(f"{title}: {spent:.0f} s, about {remaining_s / 60:.0f} min left", flush=True)

    def _start(self, job: Job) -> None:
        """Start or resume a run, unless another process runs it or has finished it."""
        path = run_path(self.directory, job)
        make_real_directory(path.parent)
        lease = Lease.take(self._file("leases", job))
        if lease is None:
            print(f"{job.arm} world {job.world} is run by another process", flush=True)
            return
        if finished_seconds(path) is not None:
            lease.release()
            return
        command = [sys.executable, "-m", "esper", "grow", *self._options(job, path)]
        with (
            self._file("logs", job).open("ab") as log,
            deferred_signals(),
        ):  # a signal in between would lose the process
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )  # it receives signals from `__exit__` only: a second one would end it without a checkpoint
            self._running[job] = process, lease

    def _file(self, kind: str, job: Job) -> Path:
        """Return the path of a job's lease or log."""
        make_real_directory(self.directory / kind)
        return self.directory / kind / f"{job.arm}-{job.world}"

    def _options(self, job: Job, path: Path) -> list[str]:
        """Return the options of `esper grow`: resume the run if it has a checkpoint, else start it."""
        if path.exists() and Checkpoints(path / CHECKPOINTS).newest() is not None:
            return ["--resume", str(path)]
        if path.exists():
            shutil.rmtree(path)  # killed before its first checkpoint
        settings = msgspec.to_builtins(self.plan.of(job.arm, job.world))
        options = ["--compare" if settings.pop("compare") else "--no-compare", "--out", str(path)]
        for name, value in settings.items():
            if value not in (None, ""):
                options += [f"--{name.replace('_', '-')}", str(value)]
        return options

    def _ended(self) -> list[Job]:
        """Return the jobs whose process has ended, and release their leases. Touch the other leases."""
        ended = [job for job, (process, _) in self._running.items() if process.poll() is not None]
        for job in ended:
            process, lease = self._running.pop(job)
            if finished_seconds(run_path(self.directory, job)) is None:
                title = f"{job.arm} world {job.world}"
                self.failures.append(f"{title} (exit code {process.returncode}, see {self._file('logs', job)})")
                print(f"failed: {self.failures[-1]}", flush=True)
            lease.release()
        for _, lease in self._running.values():
            lease.touch()
        return ended


class Lease:
    """An exclusive file that names the process working on a run."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.touched = time.monotonic()

    @classmethod
    def take(cls, path: Path) -> Lease | None:
        """Return the lease, or None if a living process holds it."""
        with locked(path.parent / "leases.lock", wait_s=60.0):
            if path.exists() and not _is_abandoned(path):
                return None
            path.unlink(missing_ok=True)
            fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            with contextlib.suppress(OSError):  # without locks, only the time of the last touch counts
                lock_file(fd)
            os.write(fd, f"{socket.gethostname()} {os.getpid()}\n".encode())
            return cls(path, fd)

    def touch(self) -> None:
        """Show that the owner is alive, every `TOUCH_S`."""
        if time.monotonic() - self.touched > TOUCH_S:
            os.utime(self.fd)
            self.touched = time.monotonic()

    def release(self) -> None:
        """Remove the lease."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)


def _is_abandoned(path: Path) -> bool:
    """Return whether the owner of a lease is dead: its lock on this machine is free, or it is silent for too long."""
    fd = open_own(path, os.O_RDWR)
    try:
        owner = os.read(fd, 300).decode(errors="replace").split()
        try:
            is_free = lock_file(fd)
        except OSError:
            is_free = True
        is_local = bool(owner) and owner[0] == socket.gethostname()
        silent_s = time.time() - os.fstat(fd).st_mtime
        return is_free and (is_local or silent_s > STALE_S)
    finally:
        os.close(fd)
