"""A fixed recorded training run, for measuring the cost of recording."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from time import process_time, thread_time

import torch

from esper.leyline.events import Level
from esper.leyline.lifecycle import Rules
from esper.nissa.recorder import record
from esper.simic.attribution import CounterfactualHelper
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.tamiyo.controllers import Schedule
from esper.tolaria.engine import Engine
from esper.tolaria.rollout import rollout
from esper.tolaria.tasks import get_task


def train_recorded(quick: bool = False) -> Callable[[Level], float]:
    """Return a function that trains environments of `rescue` with the schedule, recorded at a level.

    The function returns the share of CPU time that telemetry uses: the emitter in the training thread, and the hub's
    threads.
    """
    torch.set_num_threads(1)
    task = get_task("rescue")
    envs, steps = (1, 2) if quick else (4, 16)
    data = task.load_data()
    rules = Rules(birth="isolated")  # as in the stored measurements

    def train(level: Level) -> float:
        whole, main = process_time(), thread_time()
        with tempfile.TemporaryDirectory() as place, redirect_stdout(StringIO()):
            engine = Engine(task, range(envs), rules=rules, data=data)
            helper = CounterfactualHelper()
            controller = Schedule()
            with record("bench", out=Path(place) / "run", level=level) as run:
                emit = TelemetryEmitter(
                    run.hub,
                    slots=task.slots,
                    worlds=engine.worlds,
                    host_params=engine.networks[0].host_size,
                    level=level,
                )
                for step in rollout(engine, controller, steps):
                    worth = helper.process_batch(engine)
                    with engine.phases("telemetry"):
                        emit.step(engine.table, step.actions, step.result, step.allowed)
                        emit.governed(engine.alarms)
                        emit.worth(engine.table, worth)
                        emit.phases(engine.phases)
            whole, main = process_time() - whole, thread_time() - main
            return (engine.phases.totals()["telemetry"].cpu_ms / 1e3 + whole - main) / whole

    return train
