"""Test faults injected into one environment: it is restored to its snapshot and the others are unaffected."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint, blueprint_index, unregister
from esper.leyline import events
from esper.leyline.actions import Head, Op
from esper.leyline.errors import TrainingError
from esper.leyline.events import Event
from esper.leyline.lifecycle import Rules
from esper.leyline.slot_table import Floats, Ints, SlotTable
from esper.leyline.stages import SeedStage, Thresholds
from esper.simic.attribution import CounterfactualHelper
from esper.simic.env import GrowthVectorEnv, HostBackend
from esper.simic.rewards import RewardConfig, utility
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.tamiyo.controllers import wait_everywhere
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.engine import Engine, HostNetwork, train_batch_loss
from esper.tolaria.engine_config import EngineConfig, GovernorConfig
from esper.tolaria.tasks import Task, get_task
from tests.support.random_tables import LIVELY, random_legal_actions

Stage = SeedStage
FAULTY, OTHERS = 1, (0, 2)
BY_HAND = Rules(
    birth="isolated",
    thresholds=Thresholds(blend_dwell=1, blend_health=None),
    auto_train=False, auto_blend=False, auto_hold=False, min_prune_age=0,
)  # fmt: skip
STAGES = (
    Stage.DORMANT,
    Stage.GERMINATED,
    Stage.TRAINING,
    Stage.BLENDING,
    Stage.HOLDING,
    Stage.FOSSILIZED,
    Stage.EMBARGOED,
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:an error in environment", "ignore:configurations of this model", "ignore:overflow encountered"
)


@lru_cache
def digits() -> Task:
    return replace(get_task("digits"), batch=16, batches_per_epoch=3, val_size=60, epochs=12)


@lru_cache
def images() -> Task:
    """Return a task with a small convolutional host with BatchNorm."""
    noise = torch.Generator().manual_seed(0)
    y = torch.randint(3, (120,), generator=noise)
    x = torch.randn(120, 1, 8, 8, generator=noise)
    x[torch.arange(120), 0, :, 2 * y] += 1.0
    return Task.from_tensors(
        "columns", x, y, host_kwargs={"base": 4, "blocks": 2}, slots=("r0c0", "r0c1"), batch=16, batches_per_epoch=3
    )


@lru_cache
def words() -> Task:
    """Return a task with a small transformer with dropout, trained with AdamW."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randint(7, (60, 9), generator=noise)
    host = {"vocab": 7, "block_size": 8, "dim": 8, "heads": 2, "layers": 3, "dropout": 0.3}
    return Task.from_tensors(
        "words", x[:, :-1], x[:, 1:], host_kwargs=host, optimiser="adamw", lr=0.01, seed_lr=0.01, batch=8,
        batches_per_epoch=2,
    )  # fmt: skip


TASKS = {"digits": digits, "images": images, "words": words}


# -- helpers: reach a stage, compare environments


def op_towards(target: SeedStage, stage: SeedStage) -> Op:
    """Return the operation that moves a seed from `stage` towards `target`, or WAIT."""
    if stage == target or (target == Stage.DORMANT and stage == Stage.DORMANT):
        return Op.WAIT
    if stage == Stage.DORMANT:
        return Op.GERMINATE
    if target == Stage.EMBARGOED and stage >= Stage.TRAINING:
        return Op.PRUNE
    return Op.FOSSILIZE if stage == Stage.HOLDING else Op.ADVANCE


def decide(engine: Engine, target: SeedStage) -> Ints:
    actions = wait_everywhere(engine.table.num_envs)
    actions[FAULTY, Head.OP] = op_towards(target, SeedStage(int(engine.table.stage[FAULTY, 0])))
    actions[FAULTY, Head.BLUEPRINT] = int(np.nonzero(engine.table.takes[0])[0][0])
    actions[FAULTY, Head.ALPHA_TARGET] = 2  # full alpha
    return actions


def copied_tensors(network: HostNetwork) -> dict[int, list[Tensor]]:
    """Return copies of each parameter's weights, optimiser state and average."""
    averages = network.average.by_tensor()
    tensors = {}
    for p in network.body.parameters():
        state = [v for _, v in sorted(network.optimizer.state.get(p, {}).items()) if isinstance(v, Tensor)]
        tensors[id(p)] = [t.detach().clone() for t in (p, averages[p], *state)]
    return tensors


class RecordedRun:
    """Three environments, one of which grows by explicit actions. Its state is recorded after every step."""

    def __init__(self, task: Task, target: SeedStage, steps: int = 0, **config: Any) -> None:
        torch.manual_seed(5)
        self.engine = Engine(task, [4, 5, 6], rules=BY_HAND, config=EngineConfig(**config))
        self.target = target
        self.history: list[dict[str, Any]] = []
        self.record_state()
        while not self.reached_target and len(self.history) < 40:
            self.step()
        assert self.reached_target
        for _ in range(steps):
            self.step()

    @property
    def reached_target(self) -> bool:
        return bool(self.engine.table.stage[FAULTY, 0] == self.target) and len(self.history) > 2

    def step(self) -> None:
        self.engine.step(decide(self.engine, self.target))
        self.record_state()

    def record_state(self) -> None:
        network, table = self.engine.networks[FAULTY], self.engine.table
        self.history.append(
            {
                "params": copied_tensors(network),
                "buffers": {id(b): b.clone() for b in network.body.buffers()},
                "updates": network.average.updates,
                "lr": [g["lr"] for g in network.optimizer.param_groups],
                "losses": self.engine.governor.losses[FAULTY].copy(),
                "table": table.rows([FAULTY]),
            }
        )


def fingerprint(engine: Engine, env: int) -> tuple[Any, ...]:
    """Return the bytes of an environment's table row, weights, buffers, optimiser state and average."""
    network = engine.networks[env]
    tensors = [*network.body.state_dict().values(), *network.average.average]
    tensors += [v for p in network.body.parameters() for v in network.optimizer.state[p].values()]
    row = {name: column.tobytes() for name, column in engine.table.rows([env]).arrays().items()}
    return row, [t.detach().numpy().tobytes() for t in tensors], network.average.updates


@lru_cache
def fingerprints_without_fault(task: str, target: SeedStage, steps: int) -> list[Any]:
    recorded = RecordedRun(TASKS[task](), target, steps)
    assert not recorded.engine.table.rollbacks.any()
    return [fingerprint(recorded.engine, env) for env in OTHERS]


def assert_restored(recorded: RecordedRun, step: int) -> None:
    """Assert that the faulty environment has its state after `step`, without live seeds."""
    engine, then = recorded.engine, recorded.history[step]
    network, table = engine.networks[FAULTY], engine.table
    now = copied_tensors(network)
    fossils = [name for name, slot in network.body.slots.items() if slot.stage == Stage.FOSSILIZED]
    assert {name for name, slot in network.body.slots.items() if slot.seed is not None} == set(fossils)
    for p in network.body.parameters():
        assert [t.numpy().tobytes() for t in now[id(p)]] == [t.numpy().tobytes() for t in then["params"][id(p)]]
    for b in network.body.model.buffers():
        assert torch.equal(b, then["buffers"][id(b)])
    assert network.average.updates == then["updates"]
    assert [g["lr"] for g in network.optimizer.param_groups] == then["lr"]
    assert {p for g in network.optimizer.param_groups for p in g["params"]} == set(network.body.parameters())
    assert set(network.optimizer.state) <= set(network.body.parameters())
    assert all(p.requires_grad for p in network.body.parameters())
    np.testing.assert_array_equal(engine.governor.losses[FAULTY], then["losses"])
    assert table.step[FAULTY] == table.step[0]  # the step counter is not restored
    assert set(np.unique(table.stage[FAULTY])) <= {
        Stage.DORMANT,
        Stage.FOSSILIZED,
        Stage.PRUNED,
        Stage.EMBARGOED,
        Stage.RESETTING,
    }
    measured = network.validate(engine.data.val, engine.calibration)
    assert table.quality[FAULTY] == pytest.approx(measured.scores[0, :, 0].mean().item(), abs=1e-6)
    assert table.val_loss[FAULTY] == pytest.approx(-measured.scores[0, :, 1].mean().item(), rel=1e-5)


# -- faults


def change_second_batch(network: HostNetwork, act: Callable[[Tensor], Tensor]) -> None:
    """Apply `act` to the inputs of the second batch from now, once."""
    seen = []

    def forward(body: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(1)
        if len(seen) == 2:
            if x.is_floating_point():
                x = act(x.clone())
            else:  # tokens are integers: change the loss instead
                loss, correct = train_batch_loss(body, x, y)
                return loss * act(torch.ones(3, 3)).sum(), correct
        return train_batch_loss(body, x, y)

    network.forward = forward


def overwrite_inputs(value: float) -> Callable[[HostNetwork], None]:
    def act(x: Tensor) -> Tensor:
        x[0] = value
        return x

    return lambda network: change_second_batch(network, act)


def fail(error: Exception) -> Callable[[HostNetwork], None]:
    def act(_x: Tensor) -> Tensor:
        raise error

    return lambda network: change_second_batch(network, act)


def raise_learning_rate(network: HostNetwork) -> None:
    for group in network.optimizer.param_groups:
        group["lr"] = 1e30


def fail_validation(error: Exception) -> Callable[[HostNetwork], None]:
    def inject(network: HostNetwork) -> None:
        validate, errors = network.validate, [error]

        def validated(*args: Any) -> Coalitions:
            if errors:
                raise errors.pop()
            return validate(*args)

        network.validate = validated  # type: ignore[method-assign]

    return inject


def overwrite_validation_scores(value: float) -> Callable[[HostNetwork], None]:
    def inject(network: HostNetwork) -> None:
        validate, values = network.validate, [value]

        def validated(*args: Any) -> Coalitions:
            result = validate(*args)
            if values:
                result.scores[:, 0] = values.pop()
            return result

        network.validate = validated  # type: ignore[method-assign]

    return inject


FAULTS: dict[str, tuple[Callable[[HostNetwork], None], str]] = {
    "nan": (overwrite_inputs(math.nan), "nonfinite_loss"),
    "inf": (overwrite_inputs(math.inf), "nonfinite_loss"),
    "learning rate": (raise_learning_rate, "nonfinite_loss"),
    "error": (fail(ValueError("a bad batch")), "exception"),
    "out of memory": (fail(torch.OutOfMemoryError("out of memory")), "exception"),
    "no memory": (fail(MemoryError("out of memory")), "exception"),
    "error in validation": (fail_validation(RuntimeError("a bad split")), "exception"),
    "out of memory in validation": (fail_validation(torch.OutOfMemoryError("out of memory")), "exception"),
    "no memory in validation": (fail_validation(MemoryError("out of memory")), "exception"),
    "nan in validation": (overwrite_validation_scores(math.nan), "nonfinite_loss"),
    "inf in validation": (overwrite_validation_scores(-math.inf), "nonfinite_loss"),
}


def run_with_fault(task: str, target: SeedStage, fault: str) -> RecordedRun:
    """Run until the seed reaches `target`, inject the fault, and step once."""
    recorded = RecordedRun(TASKS[task](), target)
    inject, alarm = FAULTS[fault]
    inject(recorded.engine.networks[FAULTY])
    recorded.step()
    assert [(a.env, a.alarm, a.action) for a in recorded.engine.alarms] == [(FAULTY, alarm, "rolled back")]
    assert recorded.engine.table.rollbacks.tolist() == [0, 1, 0]
    return recorded


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("target", STAGES, ids=lambda s: s.name)
def test_fault_is_rolled_back_without_affecting_other_environments(target: SeedStage, fault: str) -> None:
    recorded = run_with_fault("digits", target, fault)
    (alarm,) = recorded.engine.alarms
    assert_restored(recorded, alarm.restored_step)
    for _ in range(2):
        recorded.step()
        assert recorded.engine.alarms == []  # one rollback is enough
    assert [fingerprint(recorded.engine, env) for env in OTHERS] == fingerprints_without_fault("digits", target, 3)
    assert np.isfinite(recorded.engine.table.quality).all()


@pytest.mark.parametrize("fault", ["nan", "out of memory", "no memory in validation"])
@pytest.mark.parametrize("target", [Stage.TRAINING, Stage.HOLDING, Stage.FOSSILIZED], ids=lambda s: s.name)
@pytest.mark.parametrize("task", ["images", "words"])
def test_fault_is_rolled_back_with_batch_norm_dropout_and_adamw(task: str, target: SeedStage, fault: str) -> None:
    recorded = run_with_fault(task, target, fault)
    (alarm,) = recorded.engine.alarms
    assert_restored(recorded, alarm.restored_step)
    recorded.step()
    assert recorded.engine.alarms == []
    assert [fingerprint(recorded.engine, env) for env in OTHERS] == fingerprints_without_fault(task, target, 2)


@pytest.fixture
def build_errors() -> Iterator[list[Exception]]:
    """Register a valid blueprint that raises the exceptions in the list when it is built."""
    armed: list[Exception] = []

    @blueprint("raises_if_armed", layouts=("vector", "map"))
    def make(dim: int) -> nn.Module:
        if armed:
            raise armed.pop()
        last = nn.Linear(dim, dim)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        return last

    yield armed
    unregister("raises_if_armed")


@pytest.mark.parametrize("error", [ValueError("no"), torch.OutOfMemoryError("no"), MemoryError("no")], ids=repr)
@pytest.mark.parametrize(
    "other", [Stage.DORMANT, Stage.TRAINING, Stage.BLENDING, Stage.FOSSILIZED], ids=lambda s: s.name
)
def test_failed_germination_is_rolled_back(build_errors: list[Exception], error: Exception, other: SeedStage) -> None:
    side_by_side = msgspec.structs.replace(BY_HAND, one_at_a_time=False)

    def run(armed: bool) -> RecordedRun:
        recorded = RecordedRun(digits(), other)
        recorded.engine.rules = side_by_side
        actions = wait_everywhere(3)
        actions[FAULTY, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = Op.GERMINATE, 2, blueprint_index("raises_if_armed")
        build_errors[:] = [error] if armed else []
        if armed:
            assert recorded.engine.step(actions).happened.all()
        else:
            recorded.engine.step(wait_everywhere(3))
        return recorded

    faulty, sound = run(True), run(False)
    (alarm,) = faulty.engine.alarms
    assert (alarm.env, alarm.alarm, alarm.action) == (FAULTY, "exception", "rolled back")
    assert_restored(faulty, alarm.restored_step)
    assert faulty.engine.table.stage[FAULTY, 2] == Stage.PRUNED
    assert faulty.engine.table.cooldown[FAULTY, 2] == 7
    for env in OTHERS:
        assert fingerprint(faulty.engine, env) == fingerprint(sound.engine, env)
    faulty.engine.step(wait_everywhere(3))
    assert faulty.engine.alarms == []


def test_failed_optimiser_sync_leaves_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed is in its slot, but adding it to the optimiser fails."""
    recorded = RecordedRun(digits(), Stage.DORMANT)
    optimizer_sync = recorded.engine.networks[FAULTY].optimizer_sync
    monkeypatch.setattr(optimizer_sync, "_settle", lambda *_, **__: (_ for _ in ()).throw(MemoryError("full")))
    recorded.target = Stage.GERMINATED
    recorded.step()
    monkeypatch.undo()
    (alarm,) = recorded.engine.alarms
    assert_restored(recorded, alarm.restored_step)
    recorded.target = Stage.TRAINING
    for _ in range(12):
        recorded.step()
    assert recorded.engine.table.stage[FAULTY, 0] == Stage.TRAINING  # the failed operation can be retried


# -- rollback


def fill_with_nan(network: HostNetwork) -> None:
    with torch.no_grad():
        for p in network.body.parameters():
            p.fill_(math.nan)


def test_fossil_newer_than_the_snapshot_is_removed() -> None:
    recorded = RecordedRun(digits(), Stage.HOLDING)
    engine = recorded.engine
    engine.governor._sound[FAULTY] = False  # an anomaly, so the commit takes no snapshot
    recorded.target = Stage.FOSSILIZED
    recorded.step()
    assert engine.table.stage[FAULTY, 0] == Stage.FOSSILIZED
    assert engine.governor._rows.stage[FAULTY, 0] != Stage.FOSSILIZED
    fill_with_nan(engine.networks[FAULTY])
    recorded.step()
    (alarm,) = engine.alarms
    assert alarm.action == "rolled back"
    assert_restored(recorded, alarm.restored_step)
    table = engine.table
    assert (table.stage[FAULTY, 0], table.cooldown[FAULTY, 0], table.params[FAULTY, 0]) == (Stage.PRUNED, 7, 0)
    for _ in range(10):
        engine.step(wait_everywhere(3))
        assert engine.alarms == []
    assert engine.table.rollbacks[FAULTY] == 1


def test_fossil_of_the_snapshot_is_restored_with_its_host() -> None:
    recorded = RecordedRun(digits(), Stage.FOSSILIZED)
    fossil = list(recorded.engine.networks[FAULTY].body.slots["r0c0"].parameters())
    committed = len(recorded.history) - 1
    fill_with_nan(recorded.engine.networks[FAULTY])
    recorded.step()
    (alarm,) = recorded.engine.alarms
    assert alarm.restored_step == committed - 1  # the snapshot taken at the commit
    assert_restored(recorded, alarm.restored_step)
    assert list(recorded.engine.networks[FAULTY].body.slots["r0c0"].parameters()) == fossil
    assert recorded.engine.table.stage[FAULTY, 0] == Stage.FOSSILIZED
    assert recorded.engine.table.serial[FAULTY, 0] == 0
    assert all(torch.isfinite(p).all() for p in fossil)


def test_first_snapshot_contains_planted_fossils() -> None:
    engine = Engine(digits(), [0])
    engine.plant_fossils(0, {"r0c1": ("lora", 0)})  # type: ignore[dict-item]
    network = engine.networks[0]
    weights = copied_tensors(network)
    overwrite_inputs(math.nan)(network)
    engine.step(wait_everywhere(1))
    assert engine.table.stage[0].tolist() == [Stage.DORMANT, Stage.FOSSILIZED, Stage.DORMANT]
    for p in network.body.parameters():
        assert torch.equal(copied_tensors(network)[id(p)][0], weights[id(p)][0])


def test_lost_optimiser_state_is_restored() -> None:
    recorded = RecordedRun(digits(), Stage.FOSSILIZED, 5)
    recorded.engine.networks[FAULTY].optimizer.state.clear()
    overwrite_inputs(math.nan)(recorded.engine.networks[FAULTY])
    recorded.step()
    assert_restored(recorded, recorded.engine.alarms[0].restored_step)


def test_rollback_starts_the_usual_cooldown() -> None:
    recorded = run_with_fault("digits", Stage.BLENDING, "nan")
    table, labels = recorded.engine.table, []
    for _ in range(8):
        labels.append(Stage(int(table.stage[FAULTY, 0])))
        recorded.engine.step(wait_everywhere(3))
    assert labels == [Stage.PRUNED, *[Stage.EMBARGOED] * 5, Stage.RESETTING, Stage.DORMANT]


def test_rollback_keeps_a_running_cooldown() -> None:
    recorded = RecordedRun(digits(), Stage.EMBARGOED)
    ticks_left = int(recorded.engine.table.cooldown[FAULTY, 0])
    overwrite_inputs(math.nan)(recorded.engine.networks[FAULTY])
    recorded.step()
    assert recorded.engine.alarms[0].action == "rolled back"
    assert recorded.engine.table.cooldown[FAULTY, 0] == ticks_left - 1


def test_rollback_restores_the_table_except_step_and_serials() -> None:
    recorded = RecordedRun(digits(), Stage.TRAINING, 6)
    before = recorded.engine.table.rows([FAULTY])
    overwrite_inputs(math.nan)(recorded.engine.networks[FAULTY])
    recorded.engine.step(decide(recorded.engine, Stage.TRAINING))
    (alarm,) = recorded.engine.alarms
    now, then = recorded.engine.table.rows([FAULTY]), recorded.history[alarm.restored_step]["table"]
    assert alarm.restored_step < before.step[0]
    assert now.step[0] == before.step[0] + 1
    assert now.next_serial[0] == before.next_serial[0] == 1
    assert now.rollbacks[0] == 1
    np.testing.assert_array_equal(now.loss_history[0, :-1], then.loss_history[0, 1:])
    assert now.loss_history[0, -1] == now.val_loss[0] == pytest.approx(float(then.val_loss[0]), rel=1e-6)
    assert now.train_loss[0] == then.train_loss[0]
    assert now.quality_best_env[0] == then.quality_best_env[0]


def test_failed_validation_after_rollback_keeps_snapshot_values() -> None:
    recorded = RecordedRun(digits(), Stage.TRAINING, 4)
    network = recorded.engine.networks[FAULTY]
    network.validate = lambda *_: (_ for _ in ()).throw(RuntimeError("never"))  # type: ignore[method-assign]
    recorded.step()
    (alarm,) = recorded.engine.alarms
    then = recorded.history[alarm.restored_step]["table"]
    assert recorded.engine.table.quality[FAULTY] == then.quality[0]
    assert recorded.engine.table.val_loss[FAULTY] == then.val_loss[0]
    worth = CounterfactualHelper().process_batch(recorded.engine)
    assert worth[FAULTY].slots == ()
    assert math.isnan(worth[FAULTY].quality)


def test_non_finite_weights_are_detected_without_effect_on_the_loss() -> None:
    """The weight is the embedding of a position that no text reaches."""
    task = replace(words(), host_kwargs={**words().host_kwargs, "block_size": 9})
    engine = Engine(task, [0])
    engine.step(wait_everywhere(1))
    with torch.no_grad():
        engine.networks[0].body.model.positions.weight[8, 0] = math.nan
    engine.step(wait_everywhere(1))
    assert [(a.alarm, a.action) for a in engine.alarms] == [("nonfinite_weights", "rolled back")]
    assert all(torch.isfinite(p).all() for p in engine.networks[0].body.parameters())
    engine.step(wait_everywhere(1))
    assert engine.alarms == []


@pytest.mark.parametrize("task", TASKS)
def test_vital_covers_host_and_blended_seeds_only(task: str) -> None:
    for target in (Stage.TRAINING, Stage.BLENDING, Stage.FOSSILIZED):
        network = RecordedRun(TASKS[task](), target).engine.networks[FAULTY]
        averages = network.average.by_tensor()
        seed = [averages[p] for p in network.body.slots["r0c0"].parameters()]
        is_active = [averages[p] for p in network.body.model.parameters()] + (seed if target != Stage.TRAINING else [])
        statistics = [b for name, b in network.body.model.named_buffers() if "running" in name]
        is_active += [t for b in statistics for t in (b, averages[b])]
        params = [
            *network.body.model.parameters(),
            *(network.body.slots["r0c0"].parameters() if target != Stage.TRAINING else []),
        ]
        is_active += [p.detach() for p in params]
        is_active += [v for p in params for v in network.optimizer.state[p].values() if isinstance(v, Tensor)]
        assert math.isfinite(network.vital)
        for tensor in is_active:
            first = (0,) * tensor.dim()
            old = tensor[first].item()
            for bad_value in (math.nan, math.inf):
                tensor[first] = bad_value
                assert not math.isfinite(network.vital)
            tensor[first] = old
        if target == Stage.TRAINING:
            for tensor in seed:
                tensor.fill_(math.nan)
        assert math.isfinite(network.vital)


# -- errors in snapshots


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, times: int) -> None:
    """Make a method raise on its first `times` calls."""
    works, errors = getattr(owner, name), [MemoryError("full")] * times

    def method(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return works(*args, **kwargs)

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("part", ["drop", "average", "restore"])
def test_error_in_a_rollback_stays_in_its_environment_and_is_retried(
    part: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RecordedRun(digits(), Stage.HOLDING)
    engine, network = recorded.engine, recorded.engine.networks[FAULTY]
    fill_with_nan(network)
    owner, name = {
        "drop": (network, "apply_effects"),
        "average": (network.average, "resync"),
        "restore": (engine.governor.snapshots[FAULTY], "restore"),
    }[part]
    monkeypatch.setattr(engine, "_operate", lambda _effects: None)  # no growth: only the rollback fails
    failing(monkeypatch, owner, name, times)
    for _ in range(times):
        recorded.step()
        (alarm,) = engine.alarms
        assert (alarm.env, alarm.action, alarm.restored_step) == (FAULTY, "not restored", None)
        assert np.isfinite(engine.table.quality).all()
        assert engine.table.rollbacks.tolist() == [0, 1, 0]  # one penalty for all attempts
    recorded.step()
    (alarm,) = engine.alarms
    assert (alarm.alarm, alarm.action) == ("exception", "rolled back")
    assert_restored(recorded, alarm.restored_step)
    assert engine.table.rollbacks.tolist() == [0, 1, 0]
    assert [fingerprint(engine, env) for env in OTHERS] == fingerprints_without_fault(
        "digits", Stage.HOLDING, times + 1
    )
    recorded.step()
    assert engine.alarms == []


@pytest.mark.parametrize("times", [1, 3])
def test_error_in_the_first_snapshot_stays_in_its_environment(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(task: Task) -> Engine:
        torch.manual_seed(5)
        return Engine(task, [4, 5, 6], rules=BY_HAND, config=EngineConfig())

    faulty, sound = begun(digits()), begun(digits())
    failing(monkeypatch, faulty.governor.snapshots[FAULTY], "take", times)
    start = copied_tensors(faulty.networks[FAULTY])
    for step in range(times + 2):
        faulty.step(wait_everywhere(3))
        sound.step(wait_everywhere(3))
        result = [(a.env, a.action) for a in faulty.alarms]
        assert result == ([] if step >= times else [(FAULTY, "rolled back" if step == times - 1 else "not restored")])
        if step < times:  # it is not trained
            now = copied_tensors(faulty.networks[FAULTY])
            assert all(torch.equal(a, b) for p in start for a, b in zip(start[p], now[p], strict=True))
    assert [fingerprint(faulty, env) for env in OTHERS] == [fingerprint(sound, env) for env in OTHERS]
    assert np.isfinite(faulty.table.quality).all()


@pytest.mark.parametrize("where", ["weight", "optimiser"])
def test_snapshot_of_non_finite_state_is_rejected(where: str) -> None:
    recorded = RecordedRun(words(), Stage.DORMANT)
    network, snapshot = recorded.engine.networks[FAULTY], recorded.engine.governor.snapshots[FAULTY]
    copies = [c.clone() for c in snapshot.copies]
    weight = next(iter(network.body.model.parameters()))
    tensor = weight if where == "weight" else network.optimizer.state[weight]["exp_avg_sq"]
    with torch.no_grad():
        tensor.view(-1)[0] = math.inf
    with pytest.raises(TrainingError, match=r"no snapshot is taken: .* not finite"):
        snapshot.take()
    assert all(torch.equal(a, b) for a, b in zip(copies, snapshot.copies, strict=True))
    recorded.step()
    assert [(a.env, a.action) for a in recorded.engine.alarms] == [(FAULTY, "rolled back")]
    assert math.isfinite(network.vital)


# -- persistent faults


def test_persistent_fault_is_rolled_back_each_step_without_leaks() -> None:
    recorded = RecordedRun(digits(), Stage.FOSSILIZED, 3)
    engine = recorded.engine
    engine.networks[FAULTY].forward = lambda body, x, y: train_batch_loss(body, x * math.nan, y)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    engine.step(wait_everywhere(3))
    engine.step(wait_everywhere(3))
    weights = copied_tensors(engine.networks[FAULTY])
    tensors_before = tensors()
    for n in range(8):
        engine.step(wait_everywhere(3))
        assert [(a.env, a.alarm, a.action) for a in engine.alarms] == [(FAULTY, "nonfinite_loss", "rolled back")]
        assert engine.table.rollbacks[FAULTY] == n + 3
    assert tensors() <= tensors_before  # tensors of other tests may be freed meanwhile
    assert engine.table.step[FAULTY] == engine.table.step[0]
    assert np.isfinite(engine.table.quality).all()
    for p in engine.networks[FAULTY].body.parameters():
        assert all(
            torch.equal(a, b)
            for a, b in zip(copied_tensors(engine.networks[FAULTY])[id(p)], weights[id(p)], strict=True)
        )
    engine.networks[FAULTY].forward = train_batch_loss
    engine.step(wait_everywhere(3))
    assert engine.alarms == []


def test_collapsed_host_is_restored_after_three_steps() -> None:
    recorded = RecordedRun(images(), Stage.DORMANT, 20)
    engine = recorded.engine
    network, before = engine.networks[FAULTY], engine.table.val_loss[FAULTY]
    assert before < 0.7 < math.log(3)
    network.optimizer.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        averages = network.average.by_tensor()
        for p in network.body.model.head.parameters():
            p.zero_()
            averages[p].zero_()
    actions = []
    for _ in range(3):
        recorded.step()
        actions += [(a.env, a.alarm, a.action) for a in engine.alarms]
    assert actions == [
        (FAULTY, "collapse", "counted"),
        (FAULTY, "collapse", "counted"),
        (FAULTY, "collapse", "rolled back"),
    ]
    assert_restored(recorded, engine.alarms[0].restored_step)
    assert engine.table.val_loss[FAULTY] < 0.75  # measured again


def test_diverging_host_is_restored_with_its_learning_rate() -> None:
    recorded = RecordedRun(digits(), Stage.DORMANT, 9)
    for group in recorded.engine.networks[FAULTY].optimizer.param_groups:
        group["lr"] = 300.0
    alarms = []
    for _ in range(3):
        recorded.step()
        alarms += [(a.alarm, a.action) for a in recorded.engine.alarms]
    assert alarms == [("divergence", "counted")] * 2 + [("divergence", "rolled back")]
    assert_restored(recorded, recorded.engine.alarms[0].restored_step)


def test_errors_in_all_environments_for_three_steps_end_the_run() -> None:
    engine = Engine(digits(), [0, 1])

    def broken(*_: Any) -> Any:
        raise KeyError("a bug")

    for network in engine.networks:
        network.forward = broken
    for _ in range(2):
        engine.step(wait_everywhere(2))
        assert [a.alarm for a in engine.alarms] == ["exception"] * 2
    engine.networks[0].forward = train_batch_loss
    engine.step(wait_everywhere(2))  # one environment works: the counter restarts
    engine.networks[0].forward = broken
    for _ in range(2):
        engine.step(wait_everywhere(2))
    with pytest.raises(
        TrainingError, match=r"every environment failed in 3 steps in a row.*KeyError: 'a bug'"
    ) as result:
        engine.step(wait_everywhere(2))
    assert isinstance(result.value.__cause__, KeyError)


def test_keyboard_interrupt_is_raised() -> None:
    engine = Engine(digits(), [0, 1])

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    engine.networks[1].forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step(wait_everywhere(2))


def test_error_is_reported_once_with_location_and_frees_memory() -> None:
    engine = Engine(digits(), [0, 1])
    references: list[weakref.ref[Tensor]] = []

    def run_out_of_memory(_body: nn.Module, _x: Tensor, _y: Tensor) -> Any:
        memory = torch.zeros(1000)
        references.append(weakref.ref(memory))
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise torch.OutOfMemoryError(f"tried to\nallocate {memory.numel()}") from error

    def restore(env: int, table: SlotTable) -> Any:
        assert references[-1]() is None  # memory is released before the rollback
        return roll_back(env, table)

    roll_back, engine.governor.roll_back = engine.governor.roll_back, restore  # type: ignore[method-assign]
    engine.networks[1].forward = run_out_of_memory
    with warnings.catch_warnings(record=True) as result:
        warnings.simplefilter("always")
        engine.step(wait_everywhere(2))
        first = engine.alarms[0].text
        engine.step(wait_everywhere(2))
        assert engine.alarms[0].text == ""
    assert len(references) == 2
    assert first.startswith("OutOfMemoryError: tried to allocate 1000 (growing_network.py:")
    assert "test_governor_faults.py" in first
    assert "/" not in first
    assert [str(w.message) for w in result] == [f"an error in environment 1, step 1; the others continue: {first}"]


def test_failed_snapshot_keeps_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(digits(), [0, 1])
    for _ in range(4):
        engine.step(wait_everywhere(2))
    monkeypatch.setattr(engine.governor.snapshots[1], "take", lambda: (_ for _ in ()).throw(MemoryError("full")))
    engine.step(wait_everywhere(2))
    assert [(a.env, a.alarm, a.action) for a in engine.alarms] == [(1, "exception", "seen")]
    assert engine.governor._rows.step.tolist() == [5, 0]
    monkeypatch.undo()
    overwrite_inputs(math.nan)(engine.networks[1])
    engine.step(wait_everywhere(2))
    assert engine.alarms[0].restored_step == 0


# -- random numbers are independent between environments


def test_dropout_does_not_depend_on_other_environments() -> None:
    def run(worlds: list[int], noise: bool) -> Engine:
        engine = Engine(words(), worlds)
        for _ in range(3):
            engine.step(wait_everywhere(len(worlds)))
            if noise:
                torch.rand(7)
        return engine

    torch.manual_seed(1)
    together = run([3, 4], noise=True)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    alone = run([4], noise=False)
    assert torch.equal(torch.get_rng_state(), state)  # the global state is kept
    assert fingerprint(together, 1) == fingerprint(alone, 0)
    network = together.networks[0]
    assert not torch.equal(network.train_epoch(9), network.train_epoch(10))


# -- reward


def digits_env(worlds: list[int], epochs: int = 8, **reward: Any) -> GrowthVectorEnv:
    backend = HostBackend(replace(digits(), epochs=epochs), rules=LIVELY)
    return GrowthVectorEnv(backend, worlds, reward=RewardConfig(**reward))


def test_rollback_penalty_is_paid_in_its_step_and_does_not_end() -> None:
    env = digits_env([0, 1])
    env.reset()
    for _ in range(4):
        env.step(wait_everywhere(2))
    before = env.utility
    overwrite_inputs(math.nan)(env.backend.engine.networks[1])  # type: ignore[attr-defined]
    _, paid, ended, cut, info = env.step(wait_everywhere(2))
    assert env.backend.alarms[0].action == "rolled back"
    np.testing.assert_allclose(paid, env.utility - before - [0.0, 0.1], atol=1e-6)
    assert not ended.any()
    assert not cut.any()
    assert info["quality"][1] == env.backend.table.quality[1]
    assert np.isfinite(info["quality"]).all()
    _, paid, *_ = env.step(wait_everywhere(2))
    assert abs(paid).max() < 0.1 + 1e-6
    np.testing.assert_allclose(env.frames[0].rollbacks, [0, 1])


@pytest.mark.parametrize("seed", range(6))
def test_crashing_a_host_never_increases_the_return(seed: int) -> None:
    """A crash pays the utility of the restored host minus the utility before and the penalty.

    So the return of an episode is its final utility minus its initial utility and all penalties, and returning
    to a snapshot of the host without seeds earns only the penalty.
    """
    rng, penalty, epochs = np.random.default_rng(seed), 0.1, 7
    env = digits_env([0, 1, 2], epochs)
    env.reset()
    engine: Engine = env.backend.engine  # type: ignore[attr-defined]
    crashes = rng.random((epochs, 3)) < 0.3
    crashes[-1, 0] = True  # also in the last step
    worth = [env.utility]
    quality: list[Floats] = [env.backend.table.quality.copy()]
    total, grown = np.zeros(3), np.zeros(3, dtype=bool)
    for t in range(epochs):
        for e in np.nonzero(crashes[t])[0]:
            FAULTS[str(rng.choice(["nan", "error", "nan in validation"]))][0](engine.networks[e])
        actions = random_legal_actions(engine.table, LIVELY, rng)
        obs, paid, ended, _, _ = env.step(actions)
        total += paid
        assert np.isfinite(obs).all()
        worth.append(env.utility)
        quality.append(env.backend.table.quality.copy())
        assert ended.all() == (t == epochs - 1)
        hit = {a.env: a for a in engine.alarms if a.action == "rolled back"}
        assert set(hit) == set(np.nonzero(crashes[t])[0].tolist())
        np.testing.assert_allclose(paid, worth[-1] - worth[-2] - penalty * crashes[t], atol=1e-6)
        for e, alarm in hit.items():
            live = (env.backend.table.stage[e] >= 1) & (env.backend.table.stage[e] <= 4)
            assert not live.any()
            if not grown[e] and alarm.restored_step:  # no seed by then: same host, same quality
                then = quality[alarm.restored_step][e]
                assert env.backend.table.quality[e] == pytest.approx(then, abs=1e-6)
        grown |= (env.backend.table.stage >= Stage.BLENDING).any(1)
        np.testing.assert_array_equal(env.utility, utility(env.frames[0], env.config))
    n = crashes.sum(0)
    np.testing.assert_array_equal(env.backend.table.rollbacks, n)
    np.testing.assert_allclose(total, worth[-1] - worth[0] - penalty * n, atol=1e-5)


# -- telemetry


class Listener(list[Event]):
    def wants(self, _kind: type[Event]) -> bool:
        return True

    def emit(self, event: Event) -> None:
        events.encode(event)
        self.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [e for e in self if type(e) is kind]


def result(target: SeedStage, then: SeedStage, fault: str) -> tuple[Listener, Engine]:
    """Return the events of a run with a fault in the step from stage `target` towards `then`."""
    engine, hub = Engine(digits(), [4, 5, 6], rules=BY_HAND), Listener()
    emit = TelemetryEmitter(hub, slots=digits().slots, worlds=[4, 5, 6], host_params=1000, envs=[10, 11, 12])
    for t in range(40):
        reached_target = engine.table.stage[FAULTY, 0] == target and t >= 2
        if reached_target:
            FAULTS[fault][0](engine.networks[FAULTY])
            hub.clear()
        actions = decide(engine, then if reached_target else target)
        emit.step(engine.table, actions, engine.step(actions))
        emit.governed(engine.alarms)
        if reached_target:
            break
    emit.episode(engine.table, ["a", "b", "c"])
    return hub, engine


@pytest.mark.parametrize(
    ("target", "then", "lifecycle"),
    [
        (Stage.TRAINING, Stage.TRAINING, [("TRAINING", "PRUNED", "governor")]),
        (
            Stage.DORMANT,
            Stage.GERMINATED,
            [("DORMANT", "GERMINATED", "controller"), ("GERMINATED", "PRUNED", "governor")],
        ),
        (Stage.TRAINING, Stage.BLENDING, [("TRAINING", "BLENDING", "controller"), ("BLENDING", "PRUNED", "governor")]),
        (
            Stage.HOLDING,
            Stage.FOSSILIZED,
            [("HOLDING", "FOSSILIZED", "controller")],
        ),  # kept: the commit takes a snapshot
        (Stage.DORMANT, Stage.DORMANT, []),
    ],
)
@pytest.mark.parametrize("fault", ["nan", "error"])
def test_rollback_emits_governor_and_lifecycle_events(
    target: SeedStage, then: SeedStage, lifecycle: list[Any], fault: str
) -> None:
    hub, engine = result(target, then, fault)
    assert [(x.was, x.now, x.cause) for x in hub.of(events.Lifecycle)] == lifecycle
    (event,) = hub.of(events.GovernorAlarm)
    (alarm,) = engine.alarms
    assert (event.env, event.episode, event.step) == (11, 1, engine.table.step[FAULTY])
    assert (event.alarm, event.action, event.restored_step) == (FAULTS[fault][1], "rolled back", alarm.restored_step)
    assert (event.value is None) == (fault == "error")
    assert [x.rollbacks for x in hub.of(events.Episode)] == [0, 1, 0]
    health = hub.of(events.Health)
    assert [x.text.startswith("env 11 step") and "a bad batch" in x.text for x in health] == [True] * (fault == "error")


def test_all_transitions_of_one_step_are_emitted() -> None:
    rules = Rules(birth="isolated", thresholds=Thresholds(blend_dwell=1))  # GERMINATED → TRAINING is automatic
    engine, hub = Engine(digits(), [0], rules=rules), Listener()
    emit = TelemetryEmitter(hub, slots=digits().slots, worlds=[0], host_params=1000)
    overwrite_inputs(math.nan)(engine.networks[0])
    actions = wait_everywhere(1)
    actions[0, [Head.OP, Head.BLUEPRINT]] = Op.GERMINATE, int(np.nonzero(engine.table.takes[0])[0][0])
    emit.step(engine.table, actions, engine.step(actions))
    assert [(x.was, x.now, x.cause) for x in hub.of(events.Lifecycle)] == [
        ("DORMANT", "GERMINATED", "controller"),
        ("GERMINATED", "TRAINING", "rules"),
        ("TRAINING", "PRUNED", "governor"),
    ]


def test_governor_settings_are_part_of_the_engine_config() -> None:
    recorded = RecordedRun(digits(), Stage.DORMANT, 9, governor=GovernorConfig(patience=1, snapshot_every=2))
    for group in recorded.engine.networks[FAULTY].optimizer.param_groups:
        group["lr"] = 300.0
    recorded.step()
    assert [(a.alarm, a.action) for a in recorded.engine.alarms] == [("divergence", "rolled back")]
    assert recorded.engine.alarms[0].restored_step % 2 == 0
