"""The backend for real hosts: one interface, independent environments, equal to the engine used directly."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from functools import lru_cache
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint_index, cost
from esper.kasmina.graft import graft
from esper.leyline.actions import Head, Op
from esper.leyline.lifecycle import Rules, legal
from esper.leyline.slot_table import SlotTable, live_costs
from esper.leyline.stages import SeedStage, Thresholds
from esper.simic.attribution import CounterfactualHelper
from esper.simic.env import Backend, GrowthVectorEnv, HostBackend, context_of
from esper.simic.simulator import SimConfig, Simulator
from esper.tamiyo.controllers import Random, wait_everywhere
from esper.tolaria.engine import Engine, HostNetwork
from esper.tolaria.host_costs import host_macs_and_order
from esper.tolaria.tasks import Task, get_task
from tests.support.models import ZOO, Case, grow_everywhere

BRISK = Rules(min_prune_age=1)
STEPS = 8


@lru_cache
def digits() -> Task:
    return replace(get_task("digits"), epochs=STEPS, batches_per_epoch=3, val_size=60)


@lru_cache
def images() -> Task:
    """Return a task: a small convolutional host with BatchNorm, on images with a bright column."""
    noise = torch.Generator().manual_seed(0)
    y = torch.randint(3, (200,), generator=noise)
    x = torch.randn(200, 1, 8, 8, generator=noise)
    x[torch.arange(200), 0, :, 2 * y] += 1.0
    return Task.from_tensors(
        "columns", x, y, host_kwargs={"base": 4, "blocks": 2}, slots=("r0c0", "r0c1"), batch=16, batches_per_epoch=3,
        epochs=STEPS,
    )  # fmt: skip


@lru_cache
def text() -> Task:
    small = {"vocab": 81, "dim": 16, "heads": 2, "layers": 3, "block_size": 16}
    return replace(
        get_task("moby"), host_kwargs=small, epochs=STEPS, batch=4, batches_per_epoch=2, val_size=8
    )  # fmt: skip


TASKS = {"digits": digits, "images": images, "text": text}


def weights(network: HostNetwork) -> str:
    """Return a hash of all weights of a host and its seeds."""
    digest = hashlib.sha256()
    for name, value in sorted(network.body.state_dict().items()):
        digest.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def choices(task: Task, envs: int) -> list[np.ndarray]:
    """Return random legal actions, one row per environment and step, as played on a separate backend."""
    backend, chance, actions = HostBackend(task, rules=BRISK), Random(5), []
    backend.reset(range(envs))
    for _ in range(STEPS):
        actions.append(chance.act(backend.table, legal(backend.table, BRISK)))
        backend.step(actions[-1])
    ops = np.stack(actions)[..., Head.OP]
    assert {Op.GERMINATE, Op.PRUNE} <= set(ops.ravel().tolist())
    return actions


def same_rows(one: SlotTable, two: SlotTable) -> None:
    for name, column in one.arrays().items():
        np.testing.assert_array_equal(column, two.arrays()[name], err_msg=name)


@pytest.mark.parametrize("name", TASKS)
def test_backend_equals_the_engine_used_directly(name: str) -> None:
    task = TASKS[name]()
    actions = choices(task, 3)
    backend, helper = HostBackend(task, rules=BRISK), CounterfactualHelper()
    backend.reset([0, 1, 2])
    engine = Engine(task, [0, 1, 2], rules=BRISK)
    for rows in actions:
        result, outcome = backend.step(rows), engine.step(rows)
        helper.process_batch(engine)
        np.testing.assert_array_equal(result.happened, outcome.happened)
        assert result.effects == outcome.effects
        same_rows(backend.table, engine.table)
    assert [weights(p) for p in backend.engine.networks] == [weights(p) for p in engine.networks]
    assert any(slot.seed is not None for network in engine.networks for slot in network.body.slots.values())


@pytest.mark.parametrize("name", TASKS)
def test_environment_alone_equals_itself_among_others(name: str) -> None:
    task = TASKS[name]()
    actions = choices(task, 3)
    several = GrowthVectorEnv(HostBackend(task, rules=BRISK), [0, 1, 2])
    outcomes = [several.reset()] + [several.step(rows) for rows in actions]
    for e in (2, 0):
        alone = GrowthVectorEnv(HostBackend(task, rules=BRISK), [e])
        for among, result in zip(
            outcomes, [alone.reset()] + [alone.step(rows[e : e + 1]) for rows in actions], strict=True
        ):
            for theirs, mine in zip(among[:-1], result[:-1], strict=True):
                np.testing.assert_array_equal(theirs[e : e + 1], mine)
            for key, value in result[-1].items():
                np.testing.assert_array_equal(among[-1][key][e : e + 1], value, err_msg=key)
        assert weights(several.backend.engine.networks[e]) == weights(alone.backend.engine.networks[0])
        same_rows(several.backend.table.rows([e]), alone.backend.table)
        same_worth(several.backend.worth[e], alone.backend.worth[0])


def same_worth(one: Any, two: Any) -> None:
    assert one.slots == two.slots
    np.testing.assert_array_equal(one.contribution, two.contribution)
    np.testing.assert_array_equal(one.shapley, two.shapley)


def test_reset_repeats_the_same_episodes() -> None:
    actions = choices(digits(), 2)
    backend, ends = HostBackend(digits(), rules=BRISK), []
    for _ in range(2):
        backend.reset([0, 1])
        assert backend.worth == []
        assert not backend.table.step.any()
        for rows in actions:
            backend.step(rows)
        ends.append([weights(p) for p in backend.engine.networks])
    assert ends[0] == ends[1]


def test_baselines_are_computed_only_after_the_first_step() -> None:
    backend = HostBackend(digits())
    backend.reset([0, 1])
    assert np.isnan(backend.baseline_quality).all()
    assert backend.baselines.cached == {}
    backend.step(wait_everywhere(2))
    np.testing.assert_array_equal(backend.baseline_quality, backend.table.quality)
    assert backend.baselines.cached.keys() == {0, 1}


def test_sizes_equal_those_counted_by_leyline() -> None:
    task = images()
    env = GrowthVectorEnv(HostBackend(task, rules=BRISK), [0, 1, 2])
    env.reset()
    in_forward = (SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED)
    dearer = 0
    for rows in choices(task, 3):
        env.step(rows)
        table, context = env.backend.table, env.backend.context
        params, macs = live_costs(table, context)
        np.testing.assert_array_equal(np.concatenate([f.params for f in env.frames]), params)
        np.testing.assert_array_equal(np.concatenate([f.macs for f in env.frames]), macs)
        for e, network in enumerate(env.backend.engine.networks):
            assert params[e] == network.params
            added = 0
            for s, slot in enumerate(network.body.slots.values()):
                if table.stage[e, s] in in_forward:
                    assert slot.blueprint is not None
                    added += cost(slot.blueprint, slot.spec).macs
            assert macs[e] == context.host_macs + added
            dearer += added > 0
    assert dearer > 0


# ---- the observation context of a body


def macs_by_hand(model: nn.Module, sample: Tensor) -> int:
    """Return the multiply-adds of convolutions and linear layers: weights times the positions where they are used."""
    total = 0

    def count(module: Any, _args: Any, out: Tensor) -> None:
        nonlocal total
        places = out[0, 0].numel() if isinstance(module, nn.Conv2d) else out[0].numel() // module.out_features
        total += module.weight.numel() * places

    handles = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    with torch.no_grad():
        model(sample)
    for handle in handles:
        handle.remove()
    return total


@pytest.mark.parametrize("name", TASKS)
def test_context_of_builtin_hosts(name: str) -> None:
    task = TASKS[name]()
    backend = HostBackend(task)
    body, context = backend.engine.networks[0].body, backend.context
    # scores and sums of 3 layers, tokens² · width each; and the head, which shares the embedding's weights
    no_layer = 3 * 2 * 16 * 16 * 16 + 16 * 16 * 81 if name == "text" else 0
    assert context.host_macs == macs_by_hand(task.build_host(0), backend.data.train.x[:1]) + no_layer
    assert context.host_params == sum(p.numel() for p in task.build_host(0).parameters())
    assert context.horizon == STEPS
    assert context.chance_loss == log(backend.data.classes)
    assert backend.slots == task.slots == tuple(body.slots)
    np.testing.assert_array_equal(context.slot_depth, np.linspace(0, 1, len(task.slots)))
    for s, (slot, prices) in enumerate(zip(body.slots.values(), body.costs().values(), strict=True)):
        assert context.slot_width[s] == slot.spec.dim
        for blueprint, price in prices.items():
            at = s, blueprint_index(blueprint)
            assert backend.table.takes[at]
            assert (context.slot_params[at], context.slot_macs[at]) == (price.params, price.macs)
        assert not context.slot_params[s][~backend.table.takes[s]].any()


GRAFTS = ("cnn", "residual", "tuple_blocks", "keyword_mask", "two_inputs", "dict_blocks", "shared", "early_exits")


@pytest.mark.parametrize("case", [ZOO[name] for name in GRAFTS], ids=GRAFTS)
def test_context_of_a_grafted_model(case: Case) -> None:
    body = graft(case.model(0), list(case.at), probe=case.batch(4), select=case.select)
    context = context_of(body, 12, Thresholds())
    assert context.host_macs > 100
    assert context.chance_loss is None
    assert sorted(context.slot_depth) == pytest.approx(np.linspace(0, 1, len(case.at)))
    assert (context.slot_params.max(axis=1) > 0).all()


def test_depth_follows_the_forward_pass_for_any_slot_order() -> None:
    case = ZOO["cnn"]
    body = graft(case.model(0), ["features.2", "features.0", "features.1"], probe=case.batch(4))
    np.testing.assert_array_equal(context_of(body, 12, Thresholds()).slot_depth, [1.0, 0.0, 0.5])


def test_computing_the_context_leaves_the_body_unchanged() -> None:
    case = ZOO["cnn"]
    body = graft(case.model(0), list(case.at), probe=case.batch(4))
    body.train()
    body.model.features[0].eval()  # frozen by its owner
    modes = [m.training for m in body.modules()]
    hooks = [len(m._forward_hooks) for m in body.modules()]
    chance, state = torch.get_rng_state(), {k: v.clone() for k, v in body.state_dict().items()}
    host_macs_and_order(body)
    assert [m.training for m in body.modules()] == modes
    assert [len(m._forward_hooks) for m in body.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(v, state[k]) for k, v in body.state_dict().items())


@pytest.mark.parametrize("name", ["cnn", "transformer_host", "two_inputs", "batch_mixer"])
def test_grown_body_has_the_context_of_the_bare_host(name: str) -> None:
    case = ZOO[name]
    body = graft(case.model(0), list(case.at), probe=case.batch(4))
    bare = context_of(body, 12, Thresholds())
    stages = (SeedStage.HOLDING, SeedStage.FOSSILIZED, SeedStage.TRAINING)
    grow_everywhere(body, dict(zip(body.slots, stages, strict=False)))
    grown = context_of(body, 12, Thresholds())
    for f in fields(bare):
        np.testing.assert_array_equal(getattr(grown, f.name), getattr(bare, f.name), err_msg=f.name)
    assert all(slot.fork is None for slot in body.slots.values())


# ---- both backends have one interface


@pytest.mark.parametrize("make", [lambda: HostBackend(digits()), lambda: Simulator(SimConfig(horizon=STEPS), [0])])
def test_every_backend_has_the_same_interface(make: Any) -> None:
    backend: Backend = make()
    backend.reset([3])
    assert backend.worlds == [3]
    assert backend.slots == ("r0c0", "r0c1", "r0c2")
    assert backend.worth == []
    assert backend.context.horizon == STEPS
    assert np.isnan(backend.baseline_quality).all()
    assert backend.step(wait_everywhere(1)).happened.all()
    np.testing.assert_array_equal(backend.table.step, 1)
    assert np.isfinite(backend.baseline_quality).all()
    assert all(worth.slots == () for worth in backend.worth)
