"""A grown host is saved completely and verified when it is loaded."""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from esper.leyline.actions import Operator
from esper.leyline.errors import CheckpointError, DataError
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers.simple import wait_everywhere
from esper.tolaria.best_host import GrownHost
from esper.tolaria.engine import Engine
from esper.tolaria.tasks import Task, get_task

SHORT = dataclasses.replace(get_task("digits"), batches_per_epoch=2, val_size=60)


def grown_engine(task: Task = SHORT, worlds: tuple[int, ...] = (4, 7, 9), steps: int = 2) -> Engine:
    """Return hosts with a fossil each, trained until average and weights differ."""
    engine = Engine(task, list(worlds))
    for env in range(len(worlds)):
        blueprint = {"cnn": "conv_light", "mlp": "lora", "transformer": "attention"}[task.host]
        engine.plant_fossils(env, {"r0c0": (blueprint, Operator.GATE)})
    for _ in range(steps):
        engine.step(wait_everywhere(len(engine.networks)))
    return engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return grown_engine()


def test_averaged_weights_are_kept_and_the_engine_is_unchanged():
    engine, other = grown_engine(), grown_engine()
    host = GrownHost.of(engine, 1)
    network = engine.networks[1]
    names = [n for n, _ in network.body.model.named_parameters()]
    averaged = dict(zip(names, network.average.average, strict=False))
    assert all(torch.equal(host.state[n], averaged[n]) for n in names)
    assert any(not torch.equal(host.state[n], p) for n, p in network.body.model.named_parameters())
    before = copy.deepcopy(host.state)

    for each in (engine, other):
        each.step(wait_everywhere(len(each.networks)))

    assert all(torch.equal(host.state[n], t) for n, t in before.items())  # copies: training does not change them
    for a, b in zip(engine.networks, other.networks, strict=True):
        assert all(torch.equal(v, b.body.state_dict()[k]) for k, v in a.body.state_dict().items())
        assert all(torch.equal(v, w) for v, w in zip(a.average.average, b.average.average, strict=True))
    assert np.array_equal(engine.table.quality, other.table.quality)


def test_test_split_is_not_read():
    engine = grown_engine()
    poisoned = dataclasses.replace(engine.data, test=None)
    engine.data = poisoned
    assert GrownHost.of(engine, 0).is_finite


@pytest.mark.parametrize(
    "task",
    [
        SHORT,
        pytest.param(
            dataclasses.replace(get_task("rescue"), batches_per_epoch=2, val_size=60, clip=math.inf), id="cnn"
        ),
        pytest.param(dataclasses.replace(get_task("moby"), batches_per_epoch=1, batch=4, val_size=8), id="transformer"),
    ],
)
def test_body_restored_from_json_and_tensors_gives_the_same_outputs(task):
    engine = grown_engine(task, (4,), steps=1)
    network = engine.networks[0]
    live = network.body.plant("r0c1", "norm", Operator.MULTIPLY, rng_seed=3)
    nn.init.constant_(live.seed.theta, 0.4)
    network.body.set_slot(live, SeedStage.BLENDING, 0.625)
    network.body.set_slot(network.body.plant("r0c2", "norm", rng_seed=4), SeedStage.TRAINING, 0.0)
    network.average.resync()
    host = GrownHost.of(engine, 0, utility=0.5, round=0)

    again = GrownHost.restored(json.loads(json.dumps(host.document(), allow_nan=False)), host.tensors())
    body = again.body()

    assert again.task == dataclasses.replace(task, data=None)
    assert body.structure() == network.body.structure()
    x = engine.data.val.x
    with network.final(), torch.no_grad():
        assert torch.equal(body(x), network.body.eval()(x))


def test_saved_host_replaces_the_previous_one_in_its_own_directory(engine, tmp_path):
    GrownHost.of(engine, 1, utility=0.3, round=0).save(tmp_path / "best_host")
    host = GrownHost.of(engine, 0, utility=0.9, round=5)
    host.save(tmp_path / "best_host")

    again = GrownHost.load(tmp_path / "best_host")

    assert [p.name for p in (tmp_path / "best_host").iterdir() if not p.name.startswith(".")] == ["round-5"]
    assert again.document() == host.document()
    assert all(torch.equal(t, again.tensors()[n]) for n, t in host.tensors().items())


@pytest.mark.filterwarnings("ignore:checkpoint")
def test_directory_without_a_complete_host_is_refused(engine, tmp_path):
    with pytest.raises(DataError, match="no complete grown host"):
        GrownHost.load(tmp_path)
    path = GrownHost.of(engine, 0).save(tmp_path)
    file = path / "best_host.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises((DataError, CheckpointError)):
        GrownHost.load(tmp_path)


def changed(document, tensors, *, task=(), weights=(), **more):
    document = copy.deepcopy(document) | more
    document["task"] |= dict(task)
    return document, dict(tensors) | dict(weights)


def rebuilt(document, tensors):
    return GrownHost.restored(document, tensors).body()


def test_modified_host_is_refused_with_a_reason(engine):
    host = GrownHost.of(engine, 1, utility=0.3, round=0)
    document, tensors = host.document(), host.tensors()
    first = next(n for n in tensors if n.startswith("state/layers"))
    sizes = document["task"]["host_kwargs"]
    cases = {
        "format": {"format": "other"},
        "invalid literal": {"world": "?"},
        "no host named": {"task": {"host": "no_such_host"}},
        "surprise": {"task": {"surprise": 1}},
        "larger than": {"task": {"host_kwargs": sizes | {"width": 10**9}}},
        "do not fit": {"task": {"host_kwargs": sizes | {"width": 17}}},
        "NaN": {"weights": {first: torch.full_like(tensors[first], math.nan)}},
        "differ from": {"weights": {first: tensors[first] + 1e-2}},
        "shape": {"weights": {first: tensors[first][:-1]}},
        "r9c9": {"task": {"slots": ["r9c9"]}},
    }
    for word, change in cases.items():
        with pytest.raises(DataError, match=word):
            rebuilt(*changed(document, tensors, **change))
    without = {n: t for n, t in tensors.items() if n != "probe"}
    with pytest.raises(DataError, match="not a host saved by Esper"):
        GrownHost.restored(document, without)


def test_comparison_distinguishes_another_model_from_rounding(engine):
    host = GrownHost.of(engine, 0)
    assert host.compare(host.answers + 1e-7, "this") < 1e-6
    with pytest.raises(DataError, match="differ from those of the measured host"):
        host.compare(host.answers + 1e-3, "this")
    with pytest.raises(DataError, match="inf"):
        host.compare(host.answers[:2], "this")
    with pytest.raises(DataError, match="nan"):
        host.compare(host.answers * math.nan, "this")
