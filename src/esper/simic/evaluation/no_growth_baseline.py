"""No-growth baselines: quality per step of each world without growth. Trained once and cached on disk.

    baselines = NoGrowthBaselines(task, data, EngineConfig(), [run_directory / BASELINES])
    baselines.curves([0, 1, 2])      # [3, T] quality after every step; trains what is neither in memory nor on disk

A run has a directory of its own, and all runs share one in the user's cache. In both, a subdirectory is named by a hash
of everything that can change a curve: task, data, engine, our own code, torch and its settings, threads, processor. A
cached curve is therefore bit-identical to a newly trained one. Every world has its own file, so processes that share a
directory do not overwrite each other's results. Files have checksums; a damaged one is trained again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from esper.leyline.atomic_io import must_be_real_directory, read_regular, write_atomically
from esper.leyline.checksums import open_json, seal_json
from esper.leyline.slot_table import Floats
from esper.tamiyo.controllers import Wait
from esper.tolaria.data import Dataset
from esper.tolaria.data.catalogue import cache_folder
from esper.tolaria.engine import Engine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.reproducibility import code_hash, processor
from esper.tolaria.rollout import rollout
from esper.tolaria.tasks import Task

BASELINES = "baselines"
"""Name of their subdirectory in a run directory."""
MOST_BYTES = 1 << 20
"""Maximum size of a file in bytes. A curve has about 20 bytes per epoch."""
_NO_BITS = ("data", "question")  # fields of a task that are not hashed: data has its own hash, question has no effect


def shared_baselines() -> Path:
    """Return the directory that all runs of the user share, in the cache folder."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"no-growth baselines cannot be shared in {folder}: {error.strerror}", stacklevel=2)
    return folder / BASELINES


class NoGrowthBaselines:
    """Quality per step of worlds without growth, in memory and, if directories are given, on disk."""

    def __init__(self, task: Task, data: Dataset, config: EngineConfig, directories: Sequence[Path] = ()) -> None:
        self.task = task
        self.data = data
        self.config = config
        self.directories: list[Path] = []
        self._damaged: set[Path] = set()  # files to replace
        for directory in directories:
            self.store_in(directory)
        self.cached: dict[int, list[float]] = {}
        self.on_progress: Callable[[int, int], None] = lambda *_: None
        """Called with the numbers of trained worlds and of worlds to train: (0, n) … (n, n)."""

    def store_in(self, directory: Path) -> None:
        """Cache curves in the subdirectory of `directory` that is named by their key, besides other directories."""
        self.directories.append(directory / self.key())

    def key(self) -> str:
        """Return the hash of everything that can change a curve."""
        encoded = msgspec.json.encode(ingredients(self.task, self.data, self.config), order="deterministic")
        return hashlib.sha256(encoded).hexdigest()[:16]

    def curves(self, worlds: Sequence[int]) -> Floats:
        """Return the quality after every step, [E, T]. Curves that are not cached are trained."""
        for world in set(worlds) - self.cached.keys():
            curve = self._read(world)
            if curve is not None:
                self.cached[world] = curve
                self._write(world)
        missing = sorted(set(worlds) - self.cached.keys())
        for done, world in enumerate(missing):
            self.on_progress(done, len(missing))
            self.cached[world] = trained(self.task, self.data, self.config, world)
            self._write(world)
        if missing:
            self.on_progress(len(missing), len(missing))
        return np.array([self.cached[w] for w in worlds])

    def _read(self, world: int) -> list[float] | None:
        """Return a world's curve from the first intact file; None if there is none."""
        for directory in self.directories:
            file = directory / f"{world}.json"
            if file.exists():
                curve = self._read_file(world, file)
                if curve is not None:
                    return curve
        return None

    def _read_file(self, world: int, file: Path) -> list[float] | None:
        try:
            document = open_json(read_regular(file, MOST_BYTES))
            curve = [float(q) for q in document["quality"]]
            if document["world"] == world and len(curve) == self.task.epochs:
                return curve
            reason = "it is of another world or length"
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"the baseline of world {world} in {file} is damaged ({reason}); it is not used", stacklevel=3)
        self._damaged.add(file)
        return None

    def _write(self, world: int) -> None:
        """Write a world's curve where it is missing, atomically. If that fails, warn and keep it in memory only."""
        content = seal_json(json.dumps({"world": world, "quality": self.cached[world]}).encode())
        for file in (directory / f"{world}.json" for directory in self.directories):
            try:
                if file.exists() and file not in self._damaged:
                    continue
                for directory in (file.parent.parent, file.parent):  # do not recreate a removed run directory
                    directory.mkdir(exist_ok=True)
                must_be_real_directory(file.parent)
                write_atomically(file, content)
            except OSError as error:
                warnings.warn(f"cannot write the baseline of world {world} to {file}: {error.strerror}", stacklevel=3)


def trained(task: Task, data: Dataset, config: EngineConfig, world: int) -> list[float]:
    """Train a world without growth and return its quality after every epoch. An epoch is validated once."""
    engine = Engine(task, [world], config=config, data=data)
    return [float(engine.table.quality[0]) for _ in rollout(engine, Wait(), task.epochs)]


def ingredients(task: Task, data: Dataset, config: EngineConfig) -> dict[str, Any]:
    """Return everything that can change a curve."""
    return {
        "task": {f.name: getattr(task, f.name) for f in dataclasses.fields(task) if f.name not in _NO_BITS},
        "data": [data.sha256, *(list(part.shape) for part in (data.train.x, data.val.x))],
        "engine": msgspec.structs.replace(config, strategy="loop"),  # baselines are trained one at a time
        "code": code_hash(),
        "torch": [
            str(torch.__version__),
            torch.get_num_threads(),
            str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.enabled,
            torch.backends.mkldnn.deterministic,
        ],
        "processor": processor(config.device),
    }
