"""Twins: what each world would have come to without growth. Trained once, kept for as long as nothing changes bits.

The file's name is a hash of everything that could change a curve: the task, the data, the engine, torch, threads,
processor. A curve that is found is the curve that would be computed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from esper.leyline.slot_table import Floats
from esper.tamiyo.controllers import Wait
from esper.tolaria.data import Dataset
from esper.tolaria.engine import Engine, EngineConfig
from esper.tolaria.tasks import Task


class Twins:
    """Quality per step of worlds without growth, in memory and, given a directory, in a file there."""

    def __init__(self, task: Task, data: Dataset, config: EngineConfig, directory: Path | None = None) -> None:
        self.task, self.data, self.config = task, data, config
        self.file = None if directory is None else directory / f"{self.key()}.json"
        self.known: dict[int, list[float]] = {}
        self.on_trained: Callable[[int], None] = lambda worlds: None
        """Told how many worlds were trained, before they are: for a line of progress."""
        if self.file is not None and self.file.exists():
            self.known = {int(w): curve for w, curve in json.loads(self.file.read_text())["curves"].items()}

    def key(self) -> str:
        """A name for everything that changes bits."""
        settings = {f.name: getattr(self.task, f.name) for f in dataclasses.fields(self.task) if f.name != "data"}
        machine = [torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()]
        told = [settings, self.data.sha256, len(self.data.val), self.config, machine]
        return hashlib.sha256(msgspec.json.encode(told, order="deterministic")).hexdigest()[:16]

    def curves(self, worlds: Sequence[int]) -> Floats:
        """[E, T] quality after every step."""
        missing = sorted(set(worlds) - self.known.keys())
        if missing:
            self.on_trained(len(missing))
            self._train(missing)
        return np.array([self.known[w] for w in worlds])

    def _train(self, worlds: list[int]) -> None:
        for world in worlds:  # one at a time: only one host is alive
            engine, curve = Engine(self.task, [world], config=self.config, data=self.data), []
            for _ in range(self.task.epochs):
                engine.step(Wait().act(engine.table, np.zeros(0, dtype=bool)))
                curve.append(float(engine.table.quality[0]))
            self.known[world] = curve
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            draft = self.file.with_suffix(f".{os.getpid()}.tmp")
            draft.write_text(json.dumps({"task": self.task.name, "curves": self.known}))
            draft.replace(self.file)
