"""The law of head-room: a TRAINING seed that adds capacity, switched on, beats the host it grew beside.

Accuracy for the CNN set on `rescue`, whose 1×1 kernels see single pixels; log-probability for the transformer
set on a small `moby`, where a few epochs move accuracy less than its noise. `noop` adds no capacity and `norm`
next to none; `flex_attention` computes what `attention` does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from esper.kasmina.blueprints import blueprint_index
from esper.leyline.actions import NUM_HEADS, Head, Op
from esper.leyline.stages import SeedStage
from esper.tolaria.coalitions import measure, statistics
from esper.tolaria.engine import Engine, EngineConfig
from esper.tolaria.tasks import Task, get_task

RESCUE = replace(get_task("rescue"), slots=("r0c2",))
MOBY = get_task("moby")
MOBY = replace(
    MOBY, slots=("r0c1",), batch=16, host_kwargs={**MOBY.host_kwargs, "dim": 32, "block_size": 32}
)
ACCURACY, LOG_PROBABILITY = 0, 1


def prospect(task: Task, blueprint: str, column: int, *, epochs: int, **how) -> tuple[float, float]:
    """What the seed would add after so many epochs in TRAINING, and its paired standard error."""
    engine = Engine(task, [0], config=EngineConfig(**how))
    wait = np.zeros((1, NUM_HEADS), dtype=np.int64)
    germinate = wait.copy()
    germinate[:, Head.OP], germinate[:, Head.BLUEPRINT] = Op.GERMINATE, blueprint_index(blueprint)
    for action in (wait, germinate, *[wait] * (epochs - 1)):
        assert engine.step(action).happened.all()
    assert engine.table.stage[0, 0] == SeedStage.TRAINING
    result = engine.plots[0].validate(engine.data.val, engine.calibration)
    _, _, worth, _, _, error = statistics(result, result.scores[..., column]).tolist()
    return worth, error
