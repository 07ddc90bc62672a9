"""Test the count of training multiply-adds against torch's own counter on real training epochs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.blueprints import blueprint, blueprints_for, unregister
from esper.kasmina.blueprints.builtin import transformer_block
from esper.kasmina.blueprints.registry import MacCounter
from esper.kasmina.copied_blocks import register_copy
from esper.leyline.actions import Operator
from esper.leyline.lifecycle import Rules
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers import Schedule, Wait
from esper.tolaria.engine import ComputeMeter, Engine, pass_macs, score
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.network_state import engine_state, load_engine
from esper.tolaria.rollout import rollout
from esper.tolaria.tasks import Task, get_task
from tests.support.rules import ISOLATED

TASKS = {
    name: replace(get_task(name), batches_per_epoch=3, batch=4, val_size=16) for name in ("quick", "digits", "moby")
}
TASKS["resnet"] = replace(
    Task.from_tensors("mine", torch.randn(64, 3, 16, 16), torch.arange(64) % 10, host="resnet"),
    batches_per_epoch=3,
    batch=4,
)
CASES = [
    (name, blueprint)
    for name, layout in (("quick", "map"), ("resnet", "map"), ("digits", "vector"), ("moby", "sequence"))
    for blueprint in ("", *blueprints_for(layout))
]


def planted(task: Task, blueprint: str, operator: Operator = Operator.ADD, **config: object) -> Engine:
    engine = Engine(task, [0], config=EngineConfig(**config))
    if blueprint:
        engine.plant_fossils(0, {task.slots[0]: (blueprint, operator)})
    return engine


@pytest.mark.parametrize(("name", "blueprint"), CASES)
def test_epoch_count_equals_torchs_counter_on_a_real_epoch(name, blueprint):
    network = planted(TASKS[name], blueprint).networks[0]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network.train_epoch(0)
    assert 2 * ComputeMeter().epoch_macs(network) == counter.get_total_flops() > 0


def transformer_layer(_task: Task) -> str:
    blueprint("layer", layouts="sequence")(transformer_block)
    return "layer"


def copied_layer(task: Task) -> str:
    return register_copy(Engine(task, [0]).networks[0].body, "blocks.0", name="layer")


@pytest.mark.parametrize("register", [transformer_layer, copied_layer])
def test_epoch_count_equals_torchs_counter_for_registered_layers(register):
    try:
        name = register(TASKS["moby"])
        network = planted(TASKS["moby"], name).networks[0]
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            network.train_epoch(0)
        assert 2 * ComputeMeter().epoch_macs(network) == counter.get_total_flops()
        bare = planted(TASKS["moby"], "").networks[0]
        assert ComputeMeter().epoch_macs(network) > ComputeMeter().epoch_macs(bare)
    finally:
        unregister("layer")


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
@pytest.mark.parametrize("shadow_every", [1, 2])
def test_epoch_count_includes_passes_of_isolated_seeds(incubation, shadow_every):
    config = EngineConfig(incubation=incubation, shadow_every=shadow_every)
    engine = Engine(TASKS["quick"], [0], rules=ISOLATED, config=config)
    for _ in rollout(engine, Schedule(["conv_light"], start=0), 2):
        pass
    network = engine.networks[0]
    assert SeedStage.TRAINING in engine.table.stage
    with sdpa_kernel(SDPBackend.MATH), MacCounter() as counter:
        network.train_epoch(2)
    assert 2 * ComputeMeter().epoch_macs(network) == counter.flops
    assert (pass_macs(network).shadow > 0) == (incubation == "shadow")


@pytest.mark.parametrize("seeds", [0, 1, 2])
@pytest.mark.parametrize(("name", "blueprint"), [("quick", "conv_light"), ("digits", "mlp"), ("moby", "lora")])
def test_measuring_count_equals_torchs_counter_on_a_real_validation(name, blueprint, seeds):
    rules = Rules(birth="open", open_ramp=20, one_at_a_time=False, max_seeds=3)
    engine = Engine(TASKS[name], [0], rules=rules)
    for _ in rollout(engine, Schedule([blueprint], start=0, slots=seeds), 3):
        pass
    network, data = engine.networks[0], engine.data
    assert len(network.body.players()) == seeds
    network.body.forking.proven.update(network.body.forking.points.values())  # a check of new forks is not counted
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network.validate(data.val, engine.calibration)
    counted = ComputeMeter().measuring_macs(network, score, len(data.val), len(engine.calibration))
    assert 2 * counted == counter.get_total_flops() > 0


def test_measuring_is_counted_apart_from_training():
    engine = Engine(TASKS["digits"], [0])
    for _ in rollout(engine, Wait(), 2):
        pass
    once = engine.compute.measuring_macs(engine.networks[0], score, len(engine.data.val), len(engine.calibration))
    assert engine.table.measure_macs[0] == 2 * once
    assert engine.table.train_macs[0] == 2 * engine.compute.epoch_macs(engine.networks[0])


def test_counting_leaves_the_network_and_the_generator_unchanged():
    network = planted(TASKS["quick"], "conv_heavy").networks[0]
    before = {k: v.clone() for k, v in network.body.state_dict().items()}
    torch.manual_seed(3)
    pass_macs(network)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert all(torch.equal(before[k], v) for k, v in network.body.state_dict().items())
    assert all(p.grad is None for p in network.body.parameters())


def test_engine_adds_the_cost_of_each_epoch_and_counts_each_structure_once(monkeypatch):
    from esper.tolaria import engine as engine_module

    counted = []

    def counting(network, *, bare):
        counted.append(1)
        return pass_macs(network, bare=bare)

    monkeypatch.setattr(engine_module, "pass_macs", counting)
    engine = Engine(TASKS["quick"], [0, 1], rules=Rules(birth="open"))
    spent = [engine.table.train_macs.copy()]
    for _ in rollout(engine, Schedule(["conv_light"], start=2), 5):
        spent.append(engine.table.train_macs.copy())
    costs = np.diff(spent, axis=0)
    assert (engine.table.host_train_macs == 5 * costs[0]).all()  # as if nothing had grown
    assert (costs[0] == costs[1]).all()
    assert (costs[2] > costs[1]).all()
    assert (costs[:, 0] == costs[:, 1]).all()
    assert len(counted) < 2 * 5  # environments of equal structure share the count


def test_spent_compute_survives_a_resume_and_a_rollback():
    engine = Engine(TASKS["digits"], [0])
    for _ in rollout(engine, Wait(), 3):
        pass
    fresh = Engine(TASKS["digits"], [0])
    load_engine(fresh, engine_state(engine))
    assert fresh.table.train_macs[0] == engine.table.train_macs[0] > 0
    spent = int(engine.table.train_macs[0])
    engine.governor.roll_back(0, engine.table)
    assert engine.table.train_macs[0] == engine.table.host_train_macs[0] == spent
    assert fresh.table.measure_macs[0] == engine.table.measure_macs[0] > 0


def test_stacked_strategy_counts_like_the_loop():
    spent = []
    for strategy in ("loop", "stacked"):
        engine = Engine(TASKS["digits"], [0, 1], config=EngineConfig(strategy=strategy))
        for _ in rollout(engine, Schedule(["mlp"], start=0), 3):
            pass
        spent.append(engine.table.train_macs.tolist())
    assert spent[0] == spent[1]
