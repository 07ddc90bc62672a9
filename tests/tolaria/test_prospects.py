"""Test that a TRAINING seed that adds capacity improves its host at alpha = 1.

CNN blueprints on `rescue`, whose host has 1×1 kernels: accuracy, while the host trains. Not tested, because
their measured gain there is not significant: `conv_small` (1×1 like the host's kernels), `attention`
(rescales channels) and `norm` (one scalar).

Transformer blueprints on a small `moby`: log-probability, with the host frozen. While that host trains, it
learns by itself what a seed could add (prospects of at most 0.001 nats). `flex_attention` is not tested,
because it computes the same as `attention`.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from esper.kasmina.blueprints import blueprint_index
from esper.leyline.actions import NUM_HEADS, Head, Op
from esper.leyline.stages import SeedStage
from esper.tolaria.coalitions import statistics
from esper.tolaria.engine import Engine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.tasks import Task, get_task
from tests.support.rules import ISOLATED

RESCUE = replace(get_task("rescue"), slots=("r0c2",))
MOBY = get_task("moby")
MOBY = replace(MOBY, slots=("r0c1",), batch=16, batches_per_epoch=30, lr=3e-3, seed_lr=3e-3,
               host_kwargs={**MOBY.host_kwargs, "dim": 32, "block_size": 32})  # fmt: skip
ACCURACY, LOG_PROBABILITY = 0, 1
WAIT = np.zeros((1, NUM_HEADS), dtype=np.int64)


def started(task: Task, epochs: int) -> Engine:
    """Return an engine with a host of world 0 trained for `epochs` epochs."""
    engine = Engine(task, [0], rules=ISOLATED)
    for _ in range(epochs):
        engine.step(WAIT)
    return engine


@pytest.fixture(scope="module")
def rescue() -> Engine:
    return started(RESCUE, 1)


@pytest.fixture(scope="module")
def moby() -> Engine:
    engine = started(MOBY, 3)
    host, *_ = engine.networks[0].optimizer.param_groups
    host["lr"] = 0.0
    return engine


def prospect(engine: Engine, blueprint: str, score: int, *, epochs: int, seed_lr: float | None = None, **how):
    """Return a seed's prospect after `epochs` epochs in TRAINING and its paired standard error."""
    engine = copy.deepcopy(engine, {id(engine.data): engine.data})
    (network,) = engine.networks
    network.config = EngineConfig(**how)
    network.body.incubation = network.config.incubation
    if seed_lr is not None:
        network.optimizer.param_groups[-1]["lr"] = seed_lr
    germinate = WAIT.copy()
    germinate[:, Head.OP], germinate[:, Head.BLUEPRINT] = Op.GERMINATE, blueprint_index(blueprint)
    for action in (germinate, *[WAIT] * (epochs - 1)):
        assert engine.step(action).happened.all()
    assert engine.table.stage[0, 0] == SeedStage.TRAINING
    result = network.validate(engine.data.val, engine.calibration)
    _, _, worth, _, _, error = statistics(result, result.scores[..., score]).tolist()
    return worth, error


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
@pytest.mark.parametrize("blueprint", ["conv_light", "conv_heavy", "depthwise", "bottleneck"])
def test_map_seed_at_full_alpha_improves_its_host(rescue, blueprint, incubation):
    worth, error = prospect(rescue, blueprint, ACCURACY, epochs=6, incubation=incubation)
    assert worth > 2 * error > 0


@pytest.mark.parametrize("blueprint", ["mlp", "mlp_small", "lora", "lora_large", "attention"])
def test_sequence_seed_at_full_alpha_improves_its_host(moby, blueprint):
    worth, error = prospect(moby, blueprint, LOG_PROBABILITY, epochs=2)
    assert worth > 2 * error > 0


def test_untrained_seed_has_zero_prospect(rescue, moby):
    assert prospect(rescue, "conv_light", ACCURACY, epochs=2, seed_lr=0.0) == (0.0, 0.0)
    assert prospect(moby, "mlp", LOG_PROBABILITY, epochs=1, seed_lr=0.0) == (0.0, 0.0)
