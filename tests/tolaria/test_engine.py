"""Test the engine: reproducible runs, independent environments, and complete records in the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from esper.kasmina.body import Body
from esper.kasmina.graft import graft
from esper.kasmina.hosts import CNNHost, MLPHost
from esper.kasmina.slot import Mode
from esper.leyline.actions import Head, Op, Operator
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.leyline.lifecycle import EffectKind, Rules, legal
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage, Thresholds
from esper.tamiyo.controllers import Schedule, Wait, wait_everywhere
from esper.tolaria.engine import Engine, score, train_batch_loss
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.growing_network import norm_statistics
from esper.tolaria.host_costs import takes_of
from esper.tolaria.rollout import rollout
from esper.tolaria.tasks import Task, get_task, per_sample_correct, per_sample_loss
from tests.support.rules import ISOLATED

QUICK = Rules(birth="isolated", thresholds=Thresholds(blend_dwell=2), min_prune_age=0)
Growing = Callable[[SlotTable, Any], Any]


@lru_cache
def digits() -> Task:
    return replace(get_task("digits"), batches_per_epoch=4, val_size=100)


@lru_cache
def images() -> Task:
    """Return a task with a small convolutional host with BatchNorm, on images with one bright column."""
    noise = torch.Generator().manual_seed(0)
    y = torch.randint(3, (300,), generator=noise)
    x = torch.randn(300, 1, 8, 8, generator=noise)
    x[torch.arange(300), 0, :, 2 * y] += 1.0
    return Task.from_tensors(
        "columns", x, y, host_kwargs={"base": 4, "blocks": 2}, slots=("r0c0", "r0c1"), batch=16, batches_per_epoch=4
    )


TASKS = {"digits": digits, "images": images}


def run(task: Task, worlds: list[int], epochs: int, act: Growing | None = None, **config: Any) -> Engine:
    engine = Engine(task, worlds, rules=QUICK, config=EngineConfig(**config))
    act = act or Schedule().act
    for _ in range(epochs):
        engine.step(act(engine.table, legal(engine.table, QUICK)))
    return engine


def only_in(env: int) -> Growing:
    """Grow by the schedule in one environment, wait in the others."""

    def act(table: SlotTable, legal: Any) -> Any:
        actions = wait_everywhere(table.num_envs)
        actions[env] = Schedule().act(table, legal)[env]
        return actions

    return act


def assert_same_env(a: Engine, i: int, b: Engine, j: int) -> None:
    """Assert bit-identical table rows, weights, buffers, optimiser states and averages of two environments."""
    assert not a.table.rows([i]).diff(b.table.rows([j]))
    one, two = a.networks[i], b.networks[j]
    first, second = one.body.state_dict(), two.body.state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    for p, q in zip(one.body.parameters(), two.body.parameters(), strict=True):
        for key, value in one.optimizer.state[p].items():
            assert torch.equal(value, two.optimizer.state[q][key])
    for x, y in zip(one.average.average, two.average.average, strict=True):
        assert torch.equal(x, y)


# -- reproducibility


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_same_world_gives_a_bit_identical_run(task):
    one = run(task(), [3], 14)
    torch.rand(5)  # the global generator has no influence
    two = run(task(), [3], 14)
    assert SeedStage.FOSSILIZED in one.table.stage
    assert_same_env(one, 0, two, 0)


def test_different_worlds_give_different_runs():
    one, two = run(digits(), [0], 2), run(digits(), [1], 2)
    assert one.table.diff(two.table)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_environments_are_independent_while_one_grows(task):
    together = run(task(), [0, 5, 2], 8, only_in(1))
    assert together.table.stage[1].any()
    assert not together.table.stage[[0, 2]].any()
    for env, (world, act) in enumerate([(0, Wait().act), (5, Schedule().act), (2, Wait().act)]):
        assert_same_env(together, env, run(task(), [world], 8, act), 0)


@pytest.mark.parametrize("envs", [1, 3])
def test_training_data_do_not_depend_on_the_number_of_environments(envs, monkeypatch):
    batches: list[tuple[int, int, Tensor]] = []
    minibatches = Task.minibatches

    def spy(self: Task, data: Any, world: int, step: int) -> Any:
        for x, y in minibatches(self, data, world, step):
            batches.append((world, step, x))
            yield x, y

    monkeypatch.setattr(Task, "minibatches", spy)
    engine = run(digits(), [7, 8, 9][:envs], 2, Wait().act)
    mine = [(step, x) for world, step, x in batches if world == 7]
    expected = [engine.data.train.take(index)[0] for step in (0, 1) for index in digits().order(engine.data, 7, step)]
    assert [step for step, _ in mine] == [0] * 4 + [1] * 4
    assert all(torch.equal(x, w) for (_, x), w in zip(mine, expected, strict=True))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
@pytest.mark.filterwarnings("ignore:configurations of this model")
def test_nan_training_seed_does_not_affect_host_or_other_environments(task, incubation):
    def live(is_faulty: bool) -> Engine:
        engine = Engine(task(), [0, 1], rules=QUICK, config=EngineConfig(incubation=incubation))
        actions = wait_everywhere(2)
        if is_faulty:
            actions[0, [Head.OP, Head.BLUEPRINT]] = Op.GERMINATE, int(np.nonzero(engine.table.takes[0])[0][0])
        engine.step(actions)
        if is_faulty:
            assert engine.networks[0].body.training_slots
            with torch.no_grad():
                for p in engine.networks[0].body.slots["r0c0"].parameters():
                    p.fill_(float("nan"))
        engine.step(wait_everywhere(2))
        return engine

    faulty, sound = live(True), live(False)
    assert faulty.table.stage[0, 0] == SeedStage.TRAINING
    assert faulty.table.grad_health[0, 0] == 0.0
    assert_same_env(faulty, 1, sound, 1)
    for name, value in sound.networks[0].body.model.state_dict().items():
        assert torch.equal(value, faulty.networks[0].body.model.state_dict()[name]), name
    for column in ("quality", "val_loss", "train_loss", "committed_quality"):
        assert getattr(faulty.table, column)[0] == getattr(sound.table, column)[0], column


# -- one step


ISOLATED_STAGES = ["TRAINING"] * 10 + ["BLENDING"] * 5 + ["HOLDING"] + ["FOSSILIZED"]
ISOLATED_ALPHAS = [0.0] * 11 + [0.024, 0.23, 0.77, 0.976, 1.0, 1.0]


@pytest.mark.parametrize(
    ("rules", "expected_stages", "expected_alphas"),
    [(Rules(), ["HOLDING"] * 2 + ["FOSSILIZED"], [1.0] * 3), (ISOLATED, ISOLATED_STAGES, ISOLATED_ALPHAS)],
    ids=["default", "isolated"],
)
def test_rules_give_the_documented_timeline(rules, expected_stages, expected_alphas):
    engine = Engine(digits(), [0], rules=rules)
    actions = wait_everywhere(1)
    actions[0, [Head.OP, Head.BLUEPRINT]] = Op.GERMINATE, int(np.nonzero(engine.table.takes[0])[0][0])
    stages, alphas = [], []
    for _ in expected_stages:
        engine.step(actions)
        stages.append(SeedStage(int(engine.table.stage[0, 0])).name)
        alphas.append(round(float(engine.table.alpha[0, 0]), 3))
        slot = engine.networks[0].body.slots["r0c0"]
        assert (slot.stage, slot.amplitude) == (engine.table.stage[0, 0], engine.table.alpha[0, 0])
        actions = wait_everywhere(1)
        actions[0, Head.OP] = Op.FOSSILIZE if engine.table.step[0] == len(expected_stages) - 1 else Op.WAIT
    assert stages == expected_stages
    assert alphas == expected_alphas


def test_all_measurements_are_recorded_in_the_table():
    rules = Rules(birth="isolated", thresholds=Thresholds(blend_dwell=5))
    engine = Engine(images(), [0], rules=rules)
    history: dict[str, list[float]] = {}
    seed = ("contribution", "contribution_se", "contribution_prev", "contribution_velocity", "prospect", "prospect_se")
    seed += ("grad_norm", "grad_ratio", "grad_health", "quality_birth", "quality_stage", "quality_best")
    env = ("quality", "val_loss", "train_loss", "quality_best_env", "committed_quality")
    for _ in range(18):
        engine.step(Schedule().act(engine.table, legal(engine.table, rules)))
        for name in seed + env:
            history.setdefault(name, []).append(float(getattr(engine.table, name)[0].flat[0]))
    for name, values in history.items():
        measured = [v for v in values if not np.isnan(v)]
        assert measured, f"{name} was never measured"
        assert np.isfinite(measured).all(), name
        constant = name in ("quality_birth", "grad_health")
        assert constant or len(set(measured)) > 1, f"{name} never moves"
    assert all(0.0 <= v <= 1.0 for v in history["quality"])
    assert engine.table.params[0, 0] == sum(p.numel() for p in engine.networks[0].body.slots["r0c0"].parameters())
    assert np.isfinite(engine.table.quality_history[0]).all()
    assert engine.table.quality_history[0, -1] == engine.table.quality[0]
    assert engine.table.loss_history[0, -1] == engine.table.val_loss[0]


def test_losses_and_qualities_use_averaged_weights_on_validation():
    engine = run(images(), [0], 6)
    network, val = engine.networks[0], engine.data.val
    with network.average.applied(), torch.no_grad():
        scores = score(network.body.eval()(val.x), val.y).double().mean(0)
    assert engine.table.quality[0] == pytest.approx(scores[0].item(), abs=1e-6)
    assert engine.table.val_loss[0] == pytest.approx(-scores[1].item(), rel=1e-4)


def test_test_scores_match_the_current_network():
    for epochs in (2, 6, 14):  # TRAINING, BLENDING, FOSSILIZED
        engine = run(images(), [0], epochs)
        network, test = engine.networks[0], engine.data.test
        network.body.train()
        accuracy, loss = network.test(test)
        assert all(m.training for m in network.body.modules())
        with network.final(), torch.no_grad():
            output = network.body.eval()(test.x)
        assert accuracy == pytest.approx(per_sample_correct(output, test.y).mean().item(), abs=1e-6)
        assert loss == pytest.approx(per_sample_loss(output, test.y).mean().item(), rel=1e-4)


def test_test_scores_do_not_depend_on_the_averaged_statistics_of_norms():
    """These can be far from the averaged weights for epochs after the activations of a layer changed suddenly."""
    engine = run(images(), [0], 6)
    network, test = engine.networks[0], engine.data.test
    statistics = norm_statistics(network.body)
    assert statistics
    expected = network.test(test)
    for live in statistics:
        network.average.by_tensor()[live].mul_(1000.0)
    wrong = [network.average.by_tensor()[live].clone() for live in statistics]
    assert network.test(test) == expected
    assert all(torch.equal(network.average.by_tensor()[t], w) for t, w in zip(statistics, wrong, strict=True))


def test_final_statistics_are_those_of_random_training_samples():
    """The first samples of a data set can be balanced over its classes, which the data is not."""
    x = torch.randn(2000, 1, 8, 8)
    y = (torch.arange(2000) % 3 == 0).long()  # a third of class 1, which is brighter
    task = Task.from_tensors("uneven", x + 3 * y[:, None, None, None], y, host="cnn", host_kwargs={"base": 4})
    engine = Engine(replace(task, batches_per_epoch=4, batch=16), [0])
    for _ in rollout(engine, Wait(), 2):
        pass
    network, train = engine.networks[0], engine.data.train
    assert (train.y[:512].float().mean() - train.y.float().mean()).abs() > 0.1
    with network.final(), torch.no_grad():
        norm = next(m for m in network.body.modules() if isinstance(m, nn.BatchNorm2d))
        inputs = []
        handle = norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        network.body.eval()(train.x)
        handle.remove()
        whole = inputs[0].mean((0, 2, 3))
        first = inputs[0][:512].mean((0, 2, 3))
        assert (norm.running_mean - whole).abs().max() < 0.3 * (first - whole).abs().max()


def test_illegal_action_changes_nothing_and_is_reported():
    engine = Engine(digits(), [0, 1])
    actions = wait_everywhere(2)
    actions[0, Head.OP] = Op.FOSSILIZE
    outcome = engine.step(actions)
    assert outcome.happened.tolist() == [False, True]
    assert outcome.effects == []
    assert engine.table.step.tolist() == [1, 1]


def test_step_reports_effects_of_actions_and_of_tick():
    engine = Engine(digits(), [0], rules=QUICK)
    result: Counter[str] = Counter()
    actions = Schedule(start=0).act(engine.table, legal(engine.table, QUICK))
    for _ in range(10):
        result.update(e.kind.name for e in engine.step(actions).effects)
        actions = wait_everywhere(1)
    assert engine.table.stage[0, 0] == SeedStage.HOLDING
    actions[0, [Head.OP, Head.ALPHA_SPEED]] = Op.PRUNE, 1
    for _ in range(3):
        result.update(e.kind.name for e in engine.step(actions).effects)
        actions = wait_everywhere(1)
    assert result == {"BUILD": 1, "DROP": 1}
    assert engine.networks[0].params == engine.networks[0].host_size


def test_seeds_have_their_own_learning_rate():
    task = replace(digits(), seed_lr=0.007)
    engine = run(task, [0], 3)
    optimizer = engine.networks[0].optimizer
    assert [g["lr"] for g in optimizer.param_groups] == [task.lr, 0.007]
    assert len(optimizer.param_groups[1]["params"]) > 0


def test_host_and_seeds_are_clipped_separately_and_fossils_with_the_host():
    engine = run(digits(), [0], 3)
    network = engine.networks[0]
    host = list(network.body.model.parameters())
    seed = list(network.body.slots["r0c0"].parameters())
    assert network.clip_groups == [host, seed]
    engine = run(digits(), [0], 10)
    assert engine.table.stage[0, 0] == SeedStage.FOSSILIZED
    network = engine.networks[0]
    fossil = list(network.body.slots["r0c0"].parameters())
    assert network.clip_groups[0] == [*network.body.model.parameters(), *fossil]
    assert network.clip_groups[1:] == list(network.growing.values())
    assert list(network.growing) == ["r0c1", "r0c2"]


def test_average_follows_every_structural_change():
    engine = run(digits(), [0], 12)
    for network in engine.networks:
        assert list(network.average.tensors) == list(network.body.parameters())  # an MLP has no norm statistics
        assert network.average.updates == 12 * 4  # and is not restarted
        assert {p for g in network.optimizer.param_groups for p in g["params"]} == set(network.body.parameters())


# -- settings


@pytest.mark.parametrize(("every", "passes"), [(1, 4), (2, 2), (3, 2), (9, 1)])
def test_shadow_every_sets_the_number_of_shadow_passes(every, passes, monkeypatch):
    count: Counter[int] = Counter()
    shadow = Body.shadow_backward

    def spy(self: Body, loss: Any) -> None:
        count[engine.table.step[0]] += self is engine.networks[0].body  # the compute meter uses a copy
        shadow(self, loss)

    monkeypatch.setattr(Body, "shadow_backward", spy)
    engine = Engine(digits(), [0], rules=QUICK, config=EngineConfig(shadow_every=every))
    actions = Schedule(start=0).act(engine.table, legal(engine.table, QUICK))
    for _ in range(4):
        engine.step(actions)
        actions = wait_everywhere(1)
    assert count == {1: passes, 2: passes}  # in TRAINING only


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_training_seed_learns_in_both_incubation_modes(task, incubation):
    engine = run(task(), [0], 3, incubation=incubation)
    slot = engine.networks[0].body.slots["r0c0"]
    assert slot.stage == SeedStage.TRAINING
    assert (slot.mode == Mode.STRAIGHT_THROUGH) == (incubation == "straight_through")
    x, y = engine.data.val.x[:8], engine.data.val.y[:8]
    off = score(engine.networks[0].body.eval()(x), y)
    engine.networks[0].body.set_slot(slot, SeedStage.HOLDING, 1.0)
    assert not torch.equal(off, score(engine.networks[0].body(x), y))
    assert np.isfinite(engine.table.prospect[0, 0])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"shadow_every": 0}, "shadow_every and gradient_telemetry_stride must be ≥ 1, got 0 and 10"),
        ({"gradient_telemetry_stride": 0}, "must be ≥ 1"),
        ({"incubation": "shade"}, "incubation must be 'shadow' or 'straight_through', got 'shade'"),
    ],
)
def test_invalid_engine_config_is_rejected(config, text):
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**config)


def test_language_model_grows_with_adamw():
    task = replace(get_task("moby"), batches_per_epoch=3, batch=4, val_size=8)
    engine = run(task, [0], 5)
    assert engine.table.stage[0, 0] == SeedStage.BLENDING
    assert np.isfinite(engine.table.quality[0])
    assert engine.table.train_loss[0] < np.log(81) + 0.5
    assert engine.table.grad_health[0, 0] > 0
    assert isinstance(engine.networks[0].optimizer, torch.optim.AdamW)
    assert 0 <= engine.networks[0].test(engine.data.val)[0] <= 1


# -- fossils planted before training


def test_fossils_may_be_planted_before_the_first_step():
    for task, blueprint in ((digits(), "mlp_small"), (images(), "conv_light")):
        engine = Engine(task, [0, 1], rules=QUICK)
        x = engine.data.val.x[:8]
        before = [p.body.eval()(x) for p in engine.networks]
        engine.plant_fossils(1, {"r0c0": (blueprint, Operator.ADD), "r0c1": (blueprint, Operator.GATE)})
        assert all(torch.equal(p.body.eval()(x), b) for p, b in zip(engine.networks, before, strict=True))
        assert engine.table.stage[1, :2].tolist() == [SeedStage.FOSSILIZED] * 2
        assert not engine.table.stage[0].any()
        assert (engine.table.params[1, :2] > 0).all()
        assert engine.networks[1].optimizer_sync.group["params"] == []

        fossils = [p for s in ("r0c0", "r0c1") for p in engine.networks[1].body.slots[s].parameters()]
        weights = [p.detach().clone() for p in fossils]
        for _ in range(2):
            engine.step(wait_everywhere(2))
        assert all(not torch.equal(p, w) for p, w in zip(fossils, weights, strict=True))
        assert_same_env(engine, 0, run(task, [0], 2, Wait().act), 0)


def test_unknown_slot_for_a_fossil_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match=r"no slot named 'r0c9'. Did you mean 'r0c"):
        Engine(digits(), [0]).plant_fossils(0, {"r0c9": ("mlp_small", Operator.ADD)})


# -- train_batch_loss and score


def test_train_batch_loss_returns_mean_loss_and_correct_count():
    engine = Engine(digits(), [0])
    body, (x, y) = engine.networks[0].body, engine.data.train.take(torch.arange(20))
    loss, correct = train_batch_loss(body, x, y)
    assert loss.item() == pytest.approx(F.cross_entropy(body(x), y).item())
    assert correct.item() == (body(x).argmax(1) == y).sum().item()
    assert loss.requires_grad
    assert not correct.requires_grad


def in_every_stage(host: nn.Module, x: Tensor, blueprint: str, incubation: Any) -> Body:
    """Return a body with a seed in each stage, some of them gated, and two empty slots."""
    body = graft(host, host.sites(), probe=x)  # type: ignore[arg-type,operator]
    body.incubation = incubation
    stages = [*list(SeedStage)[1:6], SeedStage.EMBARGOED]
    for i, (name, stage) in enumerate(zip(body.slots, stages, strict=False)):
        if stage <= SeedStage.FOSSILIZED:
            body.plant(name, blueprint, Operator(i % 3), rng_seed=i)
            for p in body.slots[name].parameters():
                nn.init.normal_(p, std=0.1)
        alpha = {SeedStage.BLENDING: 0.3, SeedStage.HOLDING: 1.0, SeedStage.FOSSILIZED: 1.0}.get(stage, 0.0)
        body.set_slot(body.slots[name], stage, alpha)
    assert {s.stage for s in body.slots.values()} >= set(stages)
    return body


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_training_and_scoring_compile_to_one_graph_with_seeds(kind, incubation):
    torch.manual_seed(0)
    torch._dynamo.reset()
    if kind == "mlp":
        x = torch.randn(6, 12)
        body = in_every_stage(MLPHost(inputs=12, classes=3, width=8, layers=7), x, "mlp_small", incubation)
    else:
        x = torch.randn(6, 2, 16, 16).to(memory_format=torch.channels_last)
        host = CNNHost(in_channels=2, classes=3, base=2, blocks=4, pools=3).to(memory_format=torch.channels_last)
        body = in_every_stage(host, x, "conv_light", incubation)
    y = torch.randint(3, (6,))

    def gradients(train_batch: Any) -> list[Tensor | None]:
        body.train().zero_grad()
        train_batch(body, x, y)[0].backward()
        return [p.grad for p in body.parameters()]

    plain = gradients(train_batch_loss)
    compiled = gradients(torch.compile(train_batch_loss, fullgraph=True, backend="eager"))
    assert [g is None for g in plain] == [g is None for g in compiled]
    assert all(g is None or torch.allclose(g, c, atol=1e-6) for g, c in zip(plain, compiled, strict=True))

    body.eval()
    compiled_body = torch.compile(body, fullgraph=True, backend="eager")
    assert torch.allclose(score(compiled_body(x), y), score(body(x), y), atol=1e-6)


class Transfers(TorchDispatchMode):
    """Count device-to-host transfers of single numbers: item(), bool(), float()."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_one_device_transfer_per_environment_and_epoch(task, monkeypatch):
    monkeypatch.setattr("esper.tolaria.coalitions._Runner._guard", lambda *_: None)  # runs until forks are verified
    engine = run(task(), [0, 1], 4)
    lists: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: (lists.append(self.numel()), tolist(self))[1])
    for _ in range(6):
        before = len(lists)
        actions = Schedule().act(engine.table, legal(engine.table, QUICK))
        with Transfers() as transfers:
            outcome = engine.step(actions)
        built = sum(e.kind == EffectKind.BUILD for e in outcome.effects)
        assert len(lists) - before == 2
        committed = sum(e.kind == EffectKind.COMMIT for e in outcome.effects)
        snapshots = committed + int((engine.table.step % engine.config.governor.snapshot_every == 0).sum())
        assert transfers.count <= built + snapshots  # a new seed is checked, a snapshot must be finite


def test_takes_of_reads_the_slots():
    takes = takes_of(Engine(images(), [0]).networks[0].body)
    assert takes.shape[0] == 2
    assert not takes[:, 0].any()  # noop cannot be chosen
    assert takes[0].any()


def test_every_table_column_is_written():
    engine = run(images(), [0], 14)
    blank = SlotTable.empty(1, 2, takes=takes_of(engine.networks[0].body))
    changed = engine.table.diff(blank).keys()
    # columns that this run does not change
    elsewhere = {"cooldown", "alpha_from", "last_op", "rollbacks", "enabled", "takes", "interaction"}
    assert {f.name for f in fields(SlotTable)} - elsewhere == changed
