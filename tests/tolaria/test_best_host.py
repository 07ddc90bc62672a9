"""The best host of a run: selected by utility, saved completely, and verified when loaded."""

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
from esper.tamiyo.controllers.schedule import wait_everywhere
from esper.tolaria.best_host import BestHost, GrownHost
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


def kept(engine: Engine, utility=(0.1, 0.3, 0.2)) -> BestHost:
    best = BestHost()
    assert best.offer(engine, utility, 0)
    return best


def world_of(best: BestHost) -> int:
    assert best.host is not None
    return best.host.world


def test_highest_utility_is_kept_until_a_higher_one(engine):
    best = BestHost()
    assert best.document() == {}
    assert best.tensors() == {}
    assert best.offer(engine, np.array([0.1, 0.3, 0.2]), 0)
    assert world_of(best) == 7
    assert not best.offer(engine, [0.3, 0.2, 0.1], 1)  # equal is not better
    assert (world_of(best), best.host.round) == (7, 0)
    assert best.offer(engine, [0.3, 0.2, 0.31], 2)
    assert (world_of(best), best.host.round, best.host.utility) == (9, 2, 0.31)


def test_first_of_equals_is_kept_and_negative_utility_is_accepted(engine):
    assert world_of(kept(engine, [-0.2, -0.1, -0.1])) == 7
    assert world_of(kept(engine, [math.inf, -0.1, math.nan])) == 7


@pytest.mark.parametrize("utility", [[math.nan] * 3, [math.nan, -math.inf, math.inf]])
def test_unmeasured_utility_is_never_kept(engine, utility):
    best = BestHost()
    assert not best.offer(engine, utility, 0)
    assert best.host is None


def test_non_finite_host_is_skipped_for_the_next_best():
    engine = grown_engine()
    with torch.no_grad():
        engine.networks[1].average.average[0].view(-1)[0] = math.nan
    assert world_of(kept(engine, [0.1, 0.3, 0.2])) == 9
    best = kept(engine, [0.25, math.nan, 0.1])
    assert not best.offer(engine, [0.2, 0.9, 0.2], 1)  # the next best is below the kept one
    assert world_of(best) == 4


def test_averaged_weights_are_kept_and_the_engine_is_unchanged():
    engine, other = grown_engine(), grown_engine()
    best = kept(engine)
    plot = engine.networks[1]
    names = [n for n, _ in plot.body.model.named_parameters()]
    averaged = dict(zip(names, plot.average.average, strict=False))
    assert all(torch.equal(best.host.state[n], averaged[n]) for n in names)
    assert any(not torch.equal(best.host.state[n], p) for n, p in plot.body.model.named_parameters())
    before = copy.deepcopy(best.host.state)

    for each in (engine, other):
        each.step(wait_everywhere(len(each.networks)))

    assert all(torch.equal(best.host.state[n], t) for n, t in before.items())  # copies: training does not change them
    for a, b in zip(engine.networks, other.networks, strict=True):
        assert all(torch.equal(v, b.body.state_dict()[k]) for k, v in a.body.state_dict().items())
        assert all(torch.equal(v, w) for v, w in zip(a.average.average, b.average.average, strict=True))
    assert np.array_equal(engine.table.quality, other.table.quality)


def test_test_split_is_not_read():
    engine = grown_engine()
    poisoned = dataclasses.replace(engine.data, test=None)
    engine.data = poisoned
    kept(engine)


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
    plot = engine.networks[0]
    live = plot.body.plant("r0c1", "norm", Operator.MULTIPLY, seed=3)
    nn.init.constant_(live.seed.theta, 0.4)
    plot.body.set_slot(live, SeedStage.BLENDING, 0.625)
    plot.body.set_slot(plot.body.plant("r0c2", "norm", seed=4), SeedStage.TRAINING, 0.0)
    plot.average.resync()
    best = kept(engine, [0.5])

    again = BestHost.restored(json.loads(json.dumps(best.document(), allow_nan=False)), best.tensors())
    body = again.host.body()

    assert again.host.task == dataclasses.replace(task, data=None)
    assert body.structure() == plot.body.structure()
    x = engine.data.val.x
    with plot.average.applied(), torch.no_grad():
        assert torch.equal(body(x), plot.body.eval()(x))


def test_saved_host_replaces_the_previous_one_in_its_own_directory(engine, tmp_path):
    best = kept(engine)
    assert BestHost().save(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()
    best.save(tmp_path / "best_host")
    best.offer(engine, [0.9, 0.0, 0.0], 5)
    best.save(tmp_path / "best_host")

    again = BestHost.load(tmp_path / "best_host")

    assert [p.name for p in (tmp_path / "best_host").iterdir() if not p.name.startswith(".")] == ["round-5"]
    assert again.document() == best.document()
    assert all(torch.equal(t, again.tensors()[n]) for n, t in best.tensors().items())


@pytest.mark.filterwarnings("ignore:checkpoint")
def test_directory_without_a_complete_host_is_refused(engine, tmp_path):
    with pytest.raises(DataError, match="no grown host"):
        BestHost.load(tmp_path)
    path = kept(engine).save(tmp_path)
    file = path / "best_host.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises((DataError, CheckpointError)):
        BestHost.load(tmp_path)


def changed(document, tensors, *, task=(), weights=(), **more):
    document = copy.deepcopy(document) | more
    document["task"] |= dict(task)
    return document, dict(tensors) | dict(weights)


def rebuilt(document, tensors):
    return BestHost.restored(document, tensors).host.body()


def test_modified_host_is_refused_with_a_reason(engine):
    best = kept(engine)
    document, tensors = best.document(), best.tensors()
    first = next(n for n in tensors if n.startswith("state/layers"))
    sizes = document["task"]["host_kwargs"]
    cases = {
        "format": {"format": "other"},
        "invalid literal": {"world": "?"},
        "no host named": {"task": {"host": "resnet"}},
        "surprise": {"task": {"surprise": 1}},
        "larger than": {"task": {"host_kwargs": sizes | {"width": 10**9}}},
        "do not fit": {"task": {"host_kwargs": sizes | {"width": 17}}},
        "NaN": {"weights": {first: torch.full_like(tensors[first], math.nan)}},
        "does not answer": {"weights": {first: tensors[first] + 1e-2}},
        "shape": {"weights": {first: tensors[first][:-1]}},
        "r9c9": {"task": {"slots": ["r9c9"]}},
    }
    for word, change in cases.items():
        with pytest.raises(DataError, match=word):
            rebuilt(*changed(document, tensors, **change))
    without = {n: t for n, t in tensors.items() if n != "probe"}
    with pytest.raises(DataError, match="not a host saved by Esper"):
        BestHost.restored(document, without)


def test_comparison_distinguishes_another_model_from_rounding(engine):
    host = GrownHost.of(engine, 0)
    assert host.compare(host.answers + 1e-7, "this") < 1e-6
    with pytest.raises(DataError, match="differ from those of the measured host"):
        host.compare(host.answers + 1e-3, "this")
    with pytest.raises(DataError, match="inf"):
        host.compare(host.answers[:2], "this")
    with pytest.raises(DataError, match="nan"):
        host.compare(host.answers * math.nan, "this")
