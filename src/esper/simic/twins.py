"""Twins: what each world would have come to without growth. Trained once, kept for as long as nothing changes bits.

    twins = Twins(task, data, EngineConfig(), run_directory / "twins")
    twins.curves([0, 1, 2])          # [3, T] quality after every step; trains what neither memory nor disk knows

Curves lie in a directory whose name is a hash of everything that could change them: task, data, engine, our own code,
torch and its settings, threads, processor. A curve that is found is the curve that would be computed. One file per
world, so processes that share a directory never lose each other's work; each has a checksum, and one that does not
hold is trained again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import esper
from esper.leyline.checksums import open_json, seal_json
from esper.leyline.files import must_be_real_directory, read_regular, write_atomically
from esper.leyline.slot_table import Floats
from esper.tamiyo.controllers import Wait
from esper.tolaria.data import Dataset
from esper.tolaria.engine import Engine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.rollout import rollout
from esper.tolaria.tasks import Task

MOST_BYTES = 1 << 20
"""A curve has some 20 bytes per epoch; a longer file is none."""
_NO_BITS = ("data", "question")  # fields of a task: the first is told by its hash, the second changes nothing


class Twins:
    """Quality per step of worlds without growth, in memory and, given a directory, in files there."""

    def __init__(self, task: Task, data: Dataset, config: EngineConfig, directory: Path | None = None) -> None:
        self.task, self.data, self.config = task, data, config
        self.directory = None if directory is None else directory / self.key()
        self.known: dict[int, list[float]] = {}
        self.on_progress: Callable[[int, int], None] = lambda done, of: None
        """Told how many of the worlds that must be trained now are trained: (0, n) … (n, n)."""

    def key(self) -> str:
        """A name for everything that changes bits."""
        told = msgspec.json.encode(ingredients(self.task, self.data, self.config), order="deterministic")
        return hashlib.sha256(told).hexdigest()[:16]

    def curves(self, worlds: Sequence[int]) -> Floats:
        """[E, T] quality after every step."""
        for world in set(worlds) - self.known.keys():
            curve = self._read(world)
            if curve is not None:
                self.known[world] = curve
        missing = sorted(set(worlds) - self.known.keys())
        for done, world in enumerate(missing):
            self.on_progress(done, len(missing))
            self.known[world] = trained(self.task, self.data, self.config, world)
            self._write(world)
        if missing:
            self.on_progress(len(missing), len(missing))
        return np.array([self.known[w] for w in worlds])

    def _file(self, world: int) -> Path | None:
        return None if self.directory is None else self.directory / f"{world}.json"

    def _read(self, world: int) -> list[float] | None:
        """A world's curve, if there is a file that says it and has not been damaged."""
        file = self._file(world)
        if file is None or not file.exists():
            return None
        try:
            document = open_json(read_regular(file, MOST_BYTES))
            curve = [float(q) for q in document["quality"]]
            if document["world"] == world and len(curve) == self.task.epochs:
                return curve
            why = "it is of another world or length"
        except (OSError, ValueError, TypeError, KeyError) as error:
            why = f"{type(error).__name__}: {error}"
        warnings.warn(f"the twin of world {world} in {file} is damaged ({why}); it is trained again", stacklevel=3)
        return None

    def _write(self, world: int) -> None:
        """Whole or not at all. Where it cannot be kept, it is kept in memory."""
        file = self._file(world)
        if file is None:
            return
        curve = self.known[world]
        content = seal_json(json.dumps({"world": world, "quality": curve}).encode())
        try:
            for directory in (file.parent.parent, file.parent):  # not the run directory: if that is gone, it stays gone
                directory.mkdir(exist_ok=True)
            must_be_real_directory(file.parent)
            write_atomically(file, content)
        except OSError as error:
            warnings.warn(f"cannot keep the twin of world {world} in {file}: {error.strerror}", stacklevel=3)


def trained(task: Task, data: Dataset, config: EngineConfig, world: int) -> list[float]:
    """Quality after every epoch of a world in which nothing grows: an epoch costs its training and one validation."""
    engine = Engine(task, [world], config=config, data=data)
    return [float(engine.table.quality[0]) for _ in rollout(engine, Wait(), task.epochs)]


def ingredients(task: Task, data: Dataset, config: EngineConfig) -> dict[str, Any]:
    """Everything that could change a curve."""
    return {
        "task": {f.name: getattr(task, f.name) for f in dataclasses.fields(task) if f.name not in _NO_BITS},
        "data": [data.sha256, *(list(part.shape) for part in (data.train.x, data.val.x))],
        "engine": msgspec.structs.replace(config, strategy="loop"),  # a twin is trained by itself
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


@lru_cache(maxsize=8)
def code_hash(*packages: str) -> str:
    """Of the source of some of our packages; unless named, of those that train hosts.

    So that a curve of yesterday's code is not taken for today's.
    """
    digest = hashlib.sha256()
    home = Path(esper.__path__[0])
    for package in packages or ("kasmina", "tolaria"):
        for file in sorted((home / package).rglob("*.py")):
            digest.update(f"{file.relative_to(home).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=8)
def processor(device: str) -> list[str]:
    """What computes: kernels, and so the last bits, are chosen by it."""
    if device.startswith("cuda"):
        cudnn = torch.backends.cudnn
        return [
            torch.cuda.get_device_name(device),
            str(torch.version.cuda),
            str(cudnn.version()),
            str(cudnn.allow_tf32),
        ]
    try:
        named = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        named = None
    model = named[1] if named else platform.processor()
    return [platform.machine(), model, torch.backends.cpu.get_cpu_capability()]
