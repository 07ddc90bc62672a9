"""Fit the settings of simulated worlds to recorded episodes of real hosts, and show the gap that remains.

    python scripts/fit_simulator.py triage --out triage.toml     # record 16 worlds, fit, print the table of the gap
    python scripts/fit_simulator.py triage --save                # also write studies/simulator_fit/triage.{json,toml}
    python scripts/fit_simulator.py triage --save --recorded     # fit the episodes in that JSON file again
    esper study triage --docs                                    # write its table into docs/studies/simulator_fit.md
    esper train --preset sim --config triage.toml                # train a policy on the fitted simulator

Training worlds are recorded, from 0 on. The task determines horizon (longest episode), slots (most), val_samples and
blueprints; `esper.simic.evaluation.simulator_fit` estimates the other settings. The table compares real worlds with two
sets of simulated ones: as shipped, which have the task's settings and otherwise the defaults, and fitted.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import ConfigError, EsperError
from esper.leyline.slot_table import Floats
from esper.simic.env import HostBackend
from esper.simic.evaluation.simulator_fit import (
    HANDFUL,
    LEAST_EPOCHS,
    LEAST_WORLDS,
    NOTABLE,
    Recording,
    correlation,
    epoch_noise,
    final,
    final_gain,
    fit,
    fit_curve,
    gain_matrix,
    loss_gap,
    play_episodes,
    simulate,
)
from esper.simic.family_backend import FamilyBackend
from esper.simic.simulated_worlds import MAP_BLUEPRINTS, SimConfig
from esper.simic.training.config import HELD_OUT_FROM, load_config
from esper.simic.training.vectorized import make_backend

FOLDER = Path("studies") / "simulator_fit"
SIMULATED_WORLDS = 256
"""Number of worlds in which the simulator is recorded for the table."""


def record_task(task: str, worlds: int, on_world: Callable[[str], None]) -> tuple[SimConfig, list[Recording]]:
    """Return recordings of the first training worlds of a task or family, and the settings that it determines."""
    if not LEAST_WORLDS <= worlds <= HELD_OUT_FROM:
        raise ConfigError(f"a fit needs {LEAST_WORLDS} to {HELD_OUT_FROM} training worlds, got {worlds}")
    config = load_config(more={"task": task, "simulated": False})
    backend = make_backend(config, [0])
    assert isinstance(backend, (HostBackend, FamilyBackend))
    takes = backend.table.takes[backend.table.enabled.any(axis=0)].any(axis=0)
    allowed = [name for name in MAP_BLUEPRINTS if takes[BLUEPRINTS.index(name)]]
    if not allowed:
        raise ConfigError(
            f"no slot of {task!r} takes a blueprint of simulated slots, which are for feature maps: "
            f"{', '.join(MAP_BLUEPRINTS)}"
        )
    family = config.family()
    shortest = backend.horizon if family is None else min(family.epochs)
    if shortest < LEAST_EPOCHS:
        raise ConfigError(f"a fit needs episodes of at least {LEAST_EPOCHS} epochs, {task!r} has some of {shortest}")
    others = [name for name, taken in zip(BLUEPRINTS, takes, strict=False) if taken and name not in allowed]
    if others:
        print(f"not simulated, so left out: {', '.join(others)}")
    recorded = allowed if len(allowed) <= len(HANDFUL) else [name for name in HANDFUL if name in allowed]
    recordings = []
    samples = 0
    for world in range(worlds):
        if isinstance(backend, FamilyBackend):
            host = backend.host(world)
        else:
            host = backend
            host.reset([world])
        samples = len(host.engine.data.val)
        recordings += play_episodes(host, recorded)
        on_world(f"world {world + 1} of {worlds}: {len(recordings[-1].seeds)} seeds, {gains_text(recordings[-1])}")
    base = SimConfig(
        horizon=backend.horizon,
        slots=len(backend.slots),
        val_samples=samples,
        blueprints=() if len(allowed) == len(MAP_BLUEPRINTS) else tuple(allowed),
    )
    return base, recordings


def gains_text(recording: Recording) -> str:
    """Return the lowest and the highest final gain of a world's seeds."""
    values = [final_gain(recording, seed) for seed in recording.seeds]
    return f"gains {min(values):+.3f} to {max(values):+.3f}"


class Figure(msgspec.Struct, frozen=True):
    """A mean over worlds, its standard error and the standard deviation between worlds; a correlation has no such."""

    mean: float
    se: float
    sd: float | None


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What a fit was made from, its result and the gap: by statistic a figure of each of `COLUMNS`."""

    task: str
    command: str
    simulated_worlds: int
    settings: SimConfig
    gap: dict[str, list[Figure]]
    recordings: list[Recording]


COLUMNS = ("real", "as shipped", "fitted")


def statistics(recordings: Sequence[Recording]) -> dict[str, Figure]:
    """Return the statistics by which real and simulated worlds are compared."""
    gains = gain_matrix(recordings)
    count = np.isfinite(gains).sum(axis=(1, 2))
    ses = [[se for seed in each.seeds for se in seed.contribution_se if se] for each in recordings]
    by_world = {
        "final quality without growth": [final(each.quality) for each in recordings],
        "time constant, epochs": [fit_curve(each.quality)[1] for each in recordings],
        "noise from epoch to epoch": [epoch_noise(each.quality) for each in recordings],
        "1 − training loss / validation loss": [loss_gap(each) for each in recordings],
        "mean gain of a seed": np.nanmean(gains, axis=(1, 2)),
        "gain of the best single seed": np.nanmax(gains, axis=(1, 2)),
        "share of seeds that gain more than 0.01": (gains > NOTABLE).sum(axis=(1, 2)) / count,
        "share of seeds that harm more than 0.01": (gains < -NOTABLE).sum(axis=(1, 2)) / count,
        "standard error of a contribution": [float(np.mean(values)) for values in ses if values],
    }
    for cost, name in (("params", "parameters"), ("macs", "multiply-adds")):
        by_world[f"{name} of a seed, relative to the host's"] = [
            float(np.mean([getattr(seed, cost) for seed in each.seeds])) for each in recordings
        ]
    figures = {}
    for name, values in by_world.items():
        sd = float(np.std(values, ddof=1))
        figures[name] = Figure(float(np.mean(values)), sd / math.sqrt(len(values)), sd)
    world = np.nanmean(gains, axis=(1, 2))
    quality = np.array([final(each.quality) for each in recordings])
    log_pace = np.log([fit_curve(each.quality)[1] for each in recordings])
    pairs = [np.array(list(contributions(each))).reshape(-1, 2) for each in recordings]
    figures["correlation: contribution at half-time, final gain"] = _bootstrapped(pairs)
    for name, other in (("final quality without growth", quality), ("logarithm of the time constant", log_pace)):
        pairs = [np.array([pair]) for pair in zip(world, other, strict=True)]
        figures[f"correlation: mean gain of a world, {name}"] = _bootstrapped(pairs)
    return figures


def contributions(recording: Recording) -> Iterator[tuple[float, float]]:
    """Yield the contribution of each seed in the middle of its episode, and its final gain."""
    for seed in recording.seeds:
        middle = seed.contribution[len(seed.contribution) // 2 - 1]
        if middle is not None:
            yield middle, final_gain(recording, seed)


def _bootstrapped(pairs: Sequence[Floats]) -> Figure:
    """Return the correlation of pairs of values, in groups by world, with its bootstrap standard error over worlds."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(pairs), (400, len(pairs)))
    repeats = [correlation(*np.concatenate([pairs[i] for i in some]).T) for some in picks]
    return Figure(correlation(*np.concatenate(pairs).T), float(np.std(repeats)), None)


def as_toml(result: Fit) -> str:
    """Return the settings as a file for `esper train --config`, those at their defaults left out."""
    lines = [f"# Simulated worlds fitted to recorded episodes: {result.command}", "simulated = true", "", "[sim]"]
    for name, value in msgspec.structs.asdict(result.settings).items():
        if value != getattr(SimConfig(), name):
            lines.append(f"{name} = {msgspec.json.encode(value).decode()}")
    return "\n".join(lines) + "\n"


def compared(task: str, base: SimConfig, recordings: list[Recording]) -> Fit:
    """Return the fit of recordings and its gap: statistics of real, unfitted and fitted simulated worlds."""
    settings = fit(recordings, base)
    worlds = range(SIMULATED_WORLDS)
    sets = [recordings, *(simulate(config, worlds, recordings) for config in (base, settings))]
    each = [statistics(some) for some in sets]
    return Fit(
        task=task,
        command=f"python scripts/fit_simulator.py {task} --worlds {len(recordings)}",
        simulated_worlds=SIMULATED_WORLDS,
        settings=settings,
        gap={name: [figures[name] for figures in each] for name in each[0]},
        recordings=recordings,
    )


def shown(result: Fit) -> str:
    """Return the gap as a table of text."""
    lines = [f"{'mean ± standard error over worlds':66}" + "".join(f"{name:>20}" for name in COLUMNS)]
    for name, figures in result.gap.items():
        lines.append(f"{name:66}" + "".join(f"{f'{f.mean:.4f} ± {f.se:.4f}':>20}" for f in figures))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, fit, print the gap and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="name of a task or family, or path of a family file")
    parser.add_argument("--worlds", type=int, default=16, help="number of training worlds to record, from 0 on")
    parser.add_argument("--out", type=Path, help="the config file to write")
    parser.add_argument("--save", action="store_true", help=f"write NAME.json and NAME.toml into {FOLDER}")
    parser.add_argument("--recorded", action="store_true", help="fit the episodes saved there; record nothing")
    options = parser.parse_args(arguments)
    saved = FOLDER / f"{Path(options.task).stem}.json"
    torch.set_num_threads(1)
    try:
        if options.out is not None and not options.out.parent.is_dir():
            raise ConfigError(f"there is no directory {options.out.parent}. Create it, or choose another --out")
        if options.recorded:
            base, recordings = read(saved)
        else:
            base, recordings = record_task(options.task, options.worlds, partial(print, flush=True))
        result = compared(options.task, base, recordings)
    except (EsperError, OSError, msgspec.MsgspecError) as error:
        sys.exit(f"error: {error}")
    print(shown(result))
    text = as_toml(result)
    if options.save:
        FOLDER.mkdir(parents=True, exist_ok=True)
        saved.write_bytes(msgspec.json.encode(result) + b"\n")
    for path in [saved.with_suffix(".toml")] * options.save + [options.out] * (options.out is not None):
        path.write_text(text)
        print(f"wrote {path}: esper train --preset sim --config {path}")


def read(path: Path) -> tuple[SimConfig, list[Recording]]:
    """Return the settings of the task and the recordings of a saved fit."""
    if not path.exists():
        raise ConfigError(f"there is no file {path}; record episodes first, without --recorded")
    result = msgspec.json.decode(path.read_bytes(), type=Fit)
    of_task = {name: getattr(result.settings, name) for name in ("horizon", "slots", "val_samples", "blueprints")}
    return SimConfig(**of_task), result.recordings


if __name__ == "__main__":
    main()
