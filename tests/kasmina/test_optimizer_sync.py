"""Test the optimiser sync: parameters, names and state move between groups as seeds grow."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn, optim
from torch.optim import lr_scheduler as sched

from esper.kasmina.blueprints import blueprint_index
from esper.kasmina.body import Body
from esper.kasmina.graft import graft
from esper.kasmina.optimizer_sync import SEED_GROUP, OptimizerSync, clip_separately
from esper.leyline.actions import Head, Op
from esper.leyline.errors import BlueprintError, GraftError, OptimizerError
from esper.leyline.lifecycle import Effect, EffectKind, Rules, apply, tick
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage, Thresholds
from esper.tamiyo.controllers import wait_everywhere
from esper.tolaria.host_costs import takes_of
from tests.support.random_tables import random_legal_actions

FREE = Rules(
    birth="isolated",
    thresholds=Thresholds(blend_dwell=0, blend_health=None, fossil_contribution=None),
    auto_train=False,
    auto_blend=False,
    auto_hold=False,
    min_prune_age=0,
    one_at_a_time=False,
)
"""Rules without waiting times or gate thresholds."""

OPTIMISERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.02),
    "sgd loop momentum": lambda p: optim.SGD(p, lr=0.02, momentum=0.9, foreach=False),
    "sgd foreach nesterov": lambda p: optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, foreach=True),
    "sgd dampening": lambda p: optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.5),
    "sgd fused": lambda p: optim.SGD(p, lr=0.02, fused=True),
    "sgd fused momentum": lambda p: optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01, fused=True),
    "sgd fused dampening": lambda p: optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.5, fused=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adamw foreach amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adamw fused amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "adamw tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.001, momentum=0.5, centered=True),
}


def make_body() -> Body:
    """Return a body of two convolutions with a norm between and two linear layers, with three slots."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("stem", nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()))
    model.add_module("middle", nn.Conv2d(4, 4, 3, padding=1))
    model.add_module("flat", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8, bias=False)))
    model.add_module("head", nn.Linear(8, 3))
    return graft(model, at=["stem", "middle", "flat"], probe=torch.randn(3, 1, 5, 5))


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(8, 1, 5, 5, generator=noise), torch.randint(3, (8,), generator=noise)


def loss_of(body: nn.Module, seed: int) -> torch.Tensor:
    x, y = batch(seed)
    return nn.functional.cross_entropy(body(x), y)


def train_step(body: Body, optimizer: optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(body, seed).backward()
    optimizer.step()


def decay_groups(body: nn.Module) -> list[dict[str, Any]]:
    params = list(body.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]


class DrivenBody:
    """Body, optimiser and slot table, driven by single operations."""

    def __init__(self, make: Callable[[Any], optim.Optimizer], params: Callable[[Body], Any] | None = None) -> None:
        self.body = make_body()
        self.body.incubation = "straight_through"
        self.optimizer = make(params(self.body) if params else self.body.parameters())
        self.optimizer_sync = OptimizerSync(self.body, self.optimizer)
        self.table = SlotTable.empty(1, 3, takes=takes_of(self.body))

    def act(self, actions: Any) -> list[Effect]:
        outcome = apply(self.table, actions, FREE)
        assert outcome.happened.all()
        self.optimizer_sync.carry_out(outcome.effects, self.table)
        return outcome.effects

    def do(self, op: Op, slot: str, blueprint: str = "norm", style: int = 0, target: int = 2, speed: int = 0) -> None:
        actions = wait_everywhere(1)
        heads = [Head.OP, Head.SLOT, Head.BLUEPRINT, Head.STYLE, Head.ALPHA_TARGET, Head.ALPHA_SPEED]
        number = self.optimizer_sync.names.index(slot)
        actions[0, heads] = op, number, blueprint_index(blueprint), style, target, speed
        self.act(actions)

    def grow_to(self, stage: SeedStage, slot: str, blueprint: str, style: int = 0, train: bool = True) -> None:
        """Germinate and advance until the seed reaches the stage, with a training step in each stage."""
        self.do(Op.GERMINATE, slot, blueprint, style)
        s = self.optimizer_sync.names.index(slot)
        while self.table.stage[0, s] < min(stage, SeedStage.HOLDING):
            if train:
                train_step(self.body, self.optimizer, int(self.table.stage[0, s]))
            if self.table.moving[0, s]:
                self.tick()
            else:
                self.do(Op.ADVANCE, slot)
        if stage == SeedStage.FOSSILIZED:
            self.do(Op.FOSSILIZE, slot)

    def tick(self) -> None:
        self.optimizer_sync.carry_out(tick(self.table, FREE), self.table)

    def states(self) -> dict[nn.Parameter, dict[str, Any]]:
        return {p: copy.deepcopy(s) for p, s in self.optimizer.state.items()}

    def group_of(self, p: nn.Parameter) -> int:
        groups = [i for i, g in enumerate(self.optimizer.param_groups) for q in g["params"] if q is p]
        assert len(groups) == 1
        return groups[0]

    def check(self) -> None:
        """Assert that groups, names and state match the body's parameters."""
        optimized = [p for g in self.optimizer.param_groups for p in g["params"]]
        assert len(optimized) == len(set(optimized))
        assert set(optimized) == set(self.body.parameters())
        assert set(self.optimizer.state) <= set(optimized)
        seeds = {p for s in self.body.slots.values() if s.stage != SeedStage.FOSSILIZED for p in s.parameters()}
        assert set(self.optimizer_sync.group["params"]) == seeds
        assert sum(SEED_GROUP in g for g in self.optimizer.param_groups) == 1
        if "param_names" in self.optimizer.param_groups[0]:
            names = [n for g in self.optimizer.param_groups for n in g["param_names"]]
            assert len(set(names)) == len(names) == len(optimized)
            true = {p: n for n, p in named(self.body)}
            assert names == [true[p] for p in optimized]


def named(body: Body) -> list[tuple[str, nn.Parameter]]:
    """Return every parameter with its name: model.<name>, or esper.<slot>.<name> in a slot."""
    own = [(f"model.{n}", p) for n, p in body.model.named_parameters()]
    return own + [(f"esper.{s.name}.{n}", p) for s in body.slots.values() for n, p in s.named_parameters()]


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    equal = (torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)
    return a.keys() == b.keys() and all(equal)


# -- parameter groups and state


@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS.keys())
def test_other_parameters_keep_their_state_over_a_lifecycle(make):
    driven = DrivenBody(make)
    for seed in range(2):
        train_step(driven.body, driven.optimizer, seed)
    changes: list[Callable[[], None]] = [
        lambda: driven.grow_to(SeedStage.TRAINING, "stem", "conv_light", train=False),
        lambda: driven.grow_to(SeedStage.HOLDING, "middle", "conv_small", train=False),
        lambda: driven.do(Op.SET_ALPHA_TARGET, "middle", style=3),
        lambda: driven.do(Op.FOSSILIZE, "middle"),
        lambda: driven.do(Op.PRUNE, "stem"),
    ]
    for i, change in enumerate(changes):
        before = driven.states()
        change()
        driven.check()
        for p, state in driven.optimizer.state.items():
            if p in before:
                assert same_state(state, before[p])
        weights = [p.detach().clone() for p in driven.body.parameters()]
        train_step(driven.body, driven.optimizer, 10 + i)
        assert all(torch.isfinite(p).all() for p in driven.body.parameters())
        assert any(not torch.equal(p, w) for p, w in zip(driven.body.parameters(), weights, strict=True))


@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS.keys())
@pytest.mark.parametrize("seed", range(2))
def test_optimiser_and_body_stay_consistent_under_random_operations(make, seed):
    driven = DrivenBody(make, lambda body: body.named_parameters() if seed else decay_groups(body))
    rng = np.random.default_rng(seed)
    kinds = set()
    for i in range(25):
        before = driven.states()
        kinds |= {e.kind for e in driven.act(random_legal_actions(driven.table, FREE, rng))}
        if rng.random() < 0.5:
            driven.tick()
        driven.check()
        alive = set(driven.body.parameters())
        for p, state in before.items():
            assert (p in alive) == (p in driven.optimizer.state)
            assert p not in alive or same_state(state, driven.optimizer.state[p])
        train_step(driven.body, driven.optimizer, i)
    assert {EffectKind.BUILD, EffectKind.DROP} <= kinds


@pytest.mark.parametrize("groups", [lambda b: b.named_parameters(), decay_groups], ids=["named", "decay groups"])
@pytest.mark.parametrize("load_first", [True, False], ids=["optimiser built after loading", "before"])
def test_grown_optimiser_loads_before_or_after_the_body(groups, load_first):
    driven = DrivenBody(OPTIMISERS["adamw fused"], groups)
    driven.grow_to(SeedStage.FOSSILIZED, "flat", "mlp_small")  # fossils in a different order than slots
    driven.grow_to(SeedStage.FOSSILIZED, "middle", "conv_light")
    driven.grow_to(SeedStage.BLENDING, "stem", "conv_light", style=3)
    train_step(driven.body, driven.optimizer, 5)
    saved = copy.deepcopy(driven.body.state_dict()), copy.deepcopy(driven.optimizer.state_dict())

    body = make_body()
    if load_first:
        body.load_state_dict(saved[0])
        optimizer = OPTIMISERS["adamw fused"](groups(body))
        optimizer_sync = OptimizerSync(body, optimizer)
    else:
        optimizer = OPTIMISERS["adamw fused"](groups(body))
        optimizer_sync = OptimizerSync(body, optimizer)
        body.load_state_dict(saved[0])
        optimizer_sync.reload()
    optimizer.load_state_dict(saved[1])

    for (name, p), (name2, q) in zip(named(driven.body), named(body), strict=True):
        assert name == name2
        assert torch.equal(p, q)
        assert same_state(driven.optimizer.state[p], optimizer.state[q])
    # Growth continues after loading, which replaces the group dicts.
    other = SlotTable.empty(1, 3)
    other.restore(driven.table)
    for one in (driven.optimizer_sync, optimizer_sync):
        one.carry_out([Effect(EffectKind.COMMIT, 0, 0)], other)
    for one in (driven.body, body):
        train_step(one, driven.optimizer if one is driven.body else optimizer, 6)
    for p, q in zip(driven.body.parameters(), body.parameters(), strict=True):
        assert torch.equal(p, q)
    optimized = [p for g in optimizer.param_groups for p in g["params"]]
    assert len(optimized) == len(set(optimized))
    assert set(optimized) == set(body.parameters())
    assert optimizer.param_groups[-1]["params"] == []


def test_loading_a_plain_state_removes_seed_parameters():
    driven = DrivenBody(OPTIMISERS["adam"])
    plain = copy.deepcopy(driven.body.state_dict())
    driven.grow_to(SeedStage.FOSSILIZED, "middle", "conv_light")
    driven.grow_to(SeedStage.TRAINING, "stem", "norm")

    with pytest.warns(UserWarning, match="no seed in stem, middle: the seeds there are removed"):
        driven.body.load_state_dict(plain)
    driven.optimizer_sync.reload()

    driven.check()
    assert len(driven.optimizer_sync.group["params"]) == 0


def test_parameters_of_other_models_stay_in_the_optimiser():
    other = nn.Linear(2, 2)
    driven = DrivenBody(OPTIMISERS["adam"], lambda body: [*body.parameters(), *other.parameters()])
    driven.grow_to(SeedStage.FOSSILIZED, "middle", "conv_light")
    driven.optimizer_sync.reload()
    optimized = {p for g in driven.optimizer.param_groups for p in g["params"]}
    assert optimized == {*driven.body.parameters(), *other.parameters()}


def test_fossil_joins_the_group_of_the_preceding_module():
    def layerwise(body: Body) -> list[dict[str, Any]]:
        model = body.model
        return [{"params": list(m.parameters()), "lr": 0.1 * i} for i, m in enumerate(model.children(), 1)]

    driven = DrivenBody(OPTIMISERS["sgd"], layerwise)
    driven.grow_to(SeedStage.HOLDING, "middle", "conv_light")
    slot = driven.body.slots["middle"]
    assert {driven.group_of(p) for p in slot.parameters()} == {4}
    driven.do(Op.FOSSILIZE, "middle")
    assert {driven.group_of(p) for p in slot.parameters()} == {1}


def test_fossils_join_decay_and_no_decay_groups_by_ndim():
    driven = DrivenBody(OPTIMISERS["adamw fused"], decay_groups)
    for slot, blueprint in (("stem", "conv_light"), ("flat", "mlp_small")):
        driven.grow_to(SeedStage.FOSSILIZED, slot, blueprint, style=3)
        params = list(driven.body.slots[slot].parameters())
        assert {p.ndim > 1 for p in params} == {True, False}
        for p in params:
            assert driven.optimizer.param_groups[driven.group_of(p)]["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)


def test_fossil_of_a_frozen_module_joins_the_nearest_group():
    driven = DrivenBody(OPTIMISERS["sgd"], lambda body: [{"params": list(body.model.head.parameters())}])
    driven.grow_to(SeedStage.FOSSILIZED, "stem", "conv_light")
    assert {driven.group_of(p) for p in driven.body.slots["stem"].parameters()} == {0}


def test_fossil_joins_a_group_added_later():
    driven = DrivenBody(OPTIMISERS["sgd"], lambda body: list(body.model.head.parameters()))
    driven.optimizer.add_param_group({"params": list(driven.body.model.middle.parameters()), "lr": 0.5})
    driven.grow_to(SeedStage.FOSSILIZED, "middle", "conv_light")
    assert {driven.group_of(p) for p in driven.body.slots["middle"].parameters()} == {2}


@pytest.mark.parametrize("name", ["sgd fused momentum", "sgd fused dampening", "adamw fused", "sgd dampening"])
def test_seed_may_be_fossilised_before_the_first_step(name):
    driven = DrivenBody(OPTIMISERS[name])
    clone = DrivenBody(OPTIMISERS[name])
    driven.grow_to(SeedStage.FOSSILIZED, "middle", "conv_light", train=False)
    driven.check()
    train_step(driven.body, driven.optimizer, 0)
    train_step(clone.body, clone.optimizer, 0)
    if "dampening" not in name:  # Δ = 0 at birth: the host's first step is unchanged
        for p, q in zip(driven.body.model.parameters(), clone.body.model.parameters(), strict=True):
            assert torch.equal(p, q)


def test_seed_group_options_and_defaults():
    body = make_body()
    optimizer = optim.AdamW(decay_groups(body), lr=0.3, weight_decay=0.2)
    group = OptimizerSync(body, optimizer, betas=(0.5, 0.6)).group
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.3, 0.0, (0.5, 0.6))

    body = make_body()
    with pytest.raises(OptimizerError, match=r"SGD has no option 'beta'; it has lr, momentum"):
        OptimizerSync(body, optim.SGD(body.parameters(), lr=0.1), beta=1)


def test_tensor_learning_rate_is_not_shared_with_the_host():
    body = make_body()
    optimizer = optim.SGD(body.parameters(), lr=torch.tensor(0.1))
    OptimizerSync(body, optimizer).group["lr"].fill_(7.0)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.1)


def test_on_change_is_called_after_each_change():
    driven = DrivenBody(OPTIMISERS["sgd"])
    effects: list[tuple[str, str, str, int]] = []

    def record_effect(effect: Effect, slot: Any) -> None:
        driven.check()
        effects.append((effect.kind.name, slot.name, slot.stage.name, len(list(slot.parameters()))))

    driven.optimizer_sync.on_change.append(record_effect)
    driven.grow_to(SeedStage.HOLDING, "middle", "conv_light")
    driven.do(Op.SET_ALPHA_TARGET, "middle", style=3)
    driven.do(Op.FOSSILIZE, "middle")
    driven.do(Op.GERMINATE, "stem", "norm")
    driven.do(Op.PRUNE, "stem")
    assert effects == [
        ("BUILD", "middle", "GERMINATED", 3),
        ("SET_OPERATOR", "middle", "HOLDING", 7),
        ("COMMIT", "middle", "FOSSILIZED", 7),
        ("BUILD", "stem", "GERMINATED", 3),
        ("DROP", "stem", "PRUNED", 0),
    ]


def test_table_counts_parameters_of_frozen_seeds():
    driven = DrivenBody(OPTIMISERS["sgd"])
    driven.grow_to(SeedStage.HOLDING, "middle", "conv_light")
    count = sum(p.numel() for p in driven.body.slots["middle"].parameters())
    assert driven.table.params[0].tolist() == [0, count, 0]
    driven.do(Op.PRUNE, "middle", speed=1)
    assert not any(p.requires_grad for p in driven.body.slots["middle"].parameters())
    assert driven.table.params[0].tolist() == [0, count, 0]


def test_seed_weights_are_reproducible_and_depend_on_the_serial():
    def weights(first: bool) -> torch.Tensor:
        driven = DrivenBody(OPTIMISERS["sgd"])
        if not first:
            driven.do(Op.GERMINATE, "stem", "conv_heavy")
        torch.rand(3)  # the global generator has no influence
        driven.do(Op.GERMINATE, "middle", "conv_heavy")
        return next(p for p in driven.body.slots["middle"].parameters() if p.ndim == 4).detach().clone()

    assert torch.equal(weights(True), weights(True))
    assert not torch.equal(weights(True), weights(False))


def test_incompatible_blueprint_raises_and_changes_nothing():
    driven = DrivenBody(OPTIMISERS["sgd"])
    driven.table.takes[:] = True
    with pytest.raises(BlueprintError, match="'lora'"):
        driven.do(Op.GERMINATE, "middle", "lora")
    assert driven.body.slots["middle"].seed is None
    assert driven.optimizer_sync.group["params"] == []


# -- schedulers


def plateau(optimizer: optim.Optimizer) -> sched.ReduceLROnPlateau:
    return sched.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda o: sched.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: sched.MultiStepLR(o, [2, 5, 6]),
    "ExponentialLR": lambda o: sched.ExponentialLR(o, 0.9),
    "LinearLR": lambda o: sched.LinearLR(o, 0.1, total_iters=6),
    "ConstantLR": lambda o: sched.ConstantLR(o, 0.1, total_iters=4),
    "PolynomialLR": lambda o: sched.PolynomialLR(o, 10, power=2.0),
    "LambdaLR": lambda o: sched.LambdaLR(o, lambda t: 1.0 / (1 + t)),
    "MultiplicativeLR": lambda o: sched.MultiplicativeLR(o, lambda _: 0.9),
    "CosineAnnealingLR": lambda o: sched.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "OneCycleLR": lambda o: sched.OneCycleLR(o, max_lr=0.3, total_steps=14),
    "CyclicLR": lambda o: sched.CyclicLR(o, 0.01, 0.2, step_size_up=3, cycle_momentum="momentum" in o.defaults),
    "SequentialLR": lambda o: sched.SequentialLR(
        o, [sched.LinearLR(o, 0.1, total_iters=3), sched.CosineAnnealingLR(o, 8)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: sched.ChainedScheduler([sched.StepLR(o, 4), sched.ExponentialLR(o, 0.95)]),
    "ReduceLROnPlateau": plateau,
}
CYCLED = ("lr", "momentum", "betas")


def trajectory(make: Callable[[Any], optim.Optimizer], schedule: Callable[[Any], Any], grows: bool) -> list[Any]:
    """Return each group's settings over twelve epochs. With `grows`, one seed is fossilised and one pruned."""
    driven = DrivenBody(make, decay_groups)
    if not grows:
        driven.body, driven.optimizer = make_body(), make(decay_groups(make_body()))
    scheduler = schedule(driven.optimizer)
    history = []
    for epoch in range(12):
        if grows and epoch == 2:
            driven.grow_to(SeedStage.HOLDING, "middle", "conv_light", train=False)
        if grows and epoch == 4:
            driven.do(Op.FOSSILIZE, "middle")
            driven.do(Op.GERMINATE, "stem", "norm")
        if grows and epoch == 7:
            driven.do(Op.PRUNE, "stem")
        if grows:
            train_step(driven.body, driven.optimizer, epoch)
        else:
            driven.optimizer.step()
        history.append([tuple(g[k] for k in CYCLED if k in g) for g in driven.optimizer.param_groups])
        scheduler.step(*([1.0] if isinstance(scheduler, sched.ReduceLROnPlateau) else []))
    return history


@pytest.mark.parametrize("make", ["sgd fused momentum", "adamw foreach amsgrad"])
@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_schedulers_are_unaffected_by_growth(make, schedule):
    grown = trajectory(OPTIMISERS[make], schedule, grows=True)
    plain = trajectory(OPTIMISERS[make], schedule, grows=False)
    assert [groups[:2] for groups in grown] == plain
    assert [groups[2] for groups in grown] == [groups[0] for groups in plain]  # same initial rate, same schedule
    assert len({groups[2][0] for groups in grown}) > 1


@pytest.mark.parametrize("name", [n for n in SCHEDULERS if n != "ReduceLROnPlateau"])
def test_scheduler_built_before_the_grower_is_rejected(name):
    body = make_body()
    optimizer = OPTIMISERS["sgd fused momentum"](body.parameters())
    scheduler = SCHEDULERS[name](optimizer)
    with pytest.raises(OptimizerError, match="before the grower"):
        OptimizerSync(body, optimizer)
    assert scheduler is not None
    assert len(optimizer.param_groups) == 1


def test_plateau_scheduler_built_first_includes_the_seed_group():
    body = make_body()
    optimizer = OPTIMISERS["sgd"](body.parameters())
    scheduler = plateau(optimizer)
    OptimizerSync(body, optimizer)
    for _ in range(3):
        scheduler.step(1.0)
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 0.01]


def test_loaded_scheduled_state_can_grow_and_be_scheduled():
    body = make_body()
    old = optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
    scheduler = sched.StepLR(old, 1)
    train_step(body, old, 0)
    scheduler.step()

    new = optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
    new.load_state_dict(old.state_dict())
    OptimizerSync(body, new, lr=0.03)
    sched.StepLR(new, 1, last_epoch=3)
    assert [g["initial_lr"] for g in new.param_groups] == [0.1, 0.03]


# -- unsupported optimisers and bodies


class MyMuon(optim.Muon):
    pass


REFUSALS = {
    "LBFGS": (lambda b: optim.LBFGS(b.parameters()), "LBFGS does not support growth: it keeps one flat history"),
    "Muon": (lambda b: optim.Muon([b.model.head.weight]), "Muon does not support growth: it updates matrices only"),
    "of Muon": (lambda b: MyMuon([b.model.head.weight]), "MyMuon does not support growth: it updates matrices only"),
    "SparseAdam": (lambda b: optim.SparseAdam(list(b.parameters())), "it takes sparse gradients only"),
    "another model": (lambda _: optim.SGD(nn.Linear(2, 2).parameters()), r"Build it from body.parameters\(\) after"),
    "no optimiser": (lambda _: "adam", "got str. Pass an instance, such as torch.optim.AdamW"),
    "class": (lambda _: optim.SGD, r"got the class SGD\. Pass an instance, such as SGD\(body.parameters\(\)"),
}


@pytest.mark.parametrize(("make", "text"), REFUSALS.values(), ids=REFUSALS.keys())
def test_unsupported_optimiser_is_rejected_unchanged(make, text):
    body = make_body()
    optimizer = make(body)
    before = len(getattr(optimizer, "param_groups", []))
    with pytest.raises(OptimizerError, match=text):
        OptimizerSync(body, optimizer)
    assert len(getattr(optimizer, "param_groups", [])) == before


def test_two_growers_on_one_optimiser_are_rejected():
    driven = DrivenBody(OPTIMISERS["sgd"])
    with pytest.raises(OptimizerError, match="one optimiser serves one grower"):
        OptimizerSync(driven.body, driven.optimizer)


def test_wrapped_body_is_rejected_with_a_fix():
    body = make_body()
    optimizer = OPTIMISERS["sgd"](body.parameters())
    for wrapped in (nn.DataParallel(body), torch.compile(body, backend="eager")):
        with pytest.raises(GraftError, match=f"got {type(wrapped).__name__}. Pass the body that it wraps"):
            OptimizerSync(wrapped, optimizer)
    with pytest.raises(GraftError, match=r"got Linear. Graft the model first."):
        OptimizerSync(nn.Linear(2, 2), optimizer)


@pytest.mark.parametrize(
    ("mark", "text"),
    [("full_tensor", "DTensors, but not of fully_shard"), ("_fsdp_flattened", "FSDP1"), ("ds_id", "DeepSpeed")],
)
def test_sharded_parameters_are_rejected_by_name(mark: str, text: str):
    class Marked(nn.Parameter):
        """Stand-in for a parameter of a sharding library, recognised by an attribute."""

    body = make_body()
    body.model.head.weight = Marked(body.model.head.weight.detach())
    setattr(body.model.head.weight, mark, True)
    with pytest.raises(OptimizerError, match=rf"{text}.*fully_shard\(body.model\)"):
        OptimizerSync(body, OPTIMISERS["sgd"](body.parameters()))


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DeepSpeedEngine"])
def test_unsupported_wrapper_is_rejected_by_name(name: str):
    body = make_body()
    wrapper = type(name, (nn.Sequential,), {})(body)
    with pytest.raises(OptimizerError, match=rf"{name} does not support growth.*fully_shard"):
        OptimizerSync(wrapper, OPTIMISERS["sgd"](body.parameters()))
    with pytest.raises(GraftError, match=rf"cannot graft a {name}.*fully_shard"):
        graft(wrapper, at="auto", probe=torch.randn(3, 2))


# -- clipping


def with_gradients(lists: Iterable[Iterable[float | None]]) -> list[list[nn.Parameter]]:
    groups = []
    for values in lists:
        group = []
        for i, v in enumerate(values):
            p = nn.Parameter(torch.zeros(i + 1))
            p.grad = None if v is None else torch.full((i + 1,), v)
            group.append(p)
        groups.append(group)
    return groups


GRADIENTS = st.one_of(st.none(), st.floats(-1e6, 1e6, width=32))


@given(st.lists(st.lists(GRADIENTS, max_size=4), min_size=1, max_size=4), st.sampled_from([0.1, 1.0, 100.0]))
@settings(max_examples=60, deadline=None)
def test_clip_separately_equals_clipping_each_list(lists, max_norm):
    groups, copies = with_gradients(lists), with_gradients(lists)
    norms = clip_separately(groups, max_norm)
    for group, clone, norm in zip(groups, copies, norms, strict=True):
        total = nn.utils.clip_grad_norm_(clone, max_norm)
        assert len(norm) == sum(p.grad is not None for p in group)
        assert torch.equal(torch.linalg.vector_norm(norm), total)
        for p, q in zip(group, clone, strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradient_affects_only_its_list(bad):
    groups = with_gradients([[3.0, 4.0], [1.0, bad], [0.5]])
    clip_separately(groups, 1.0)
    assert torch.isfinite(groups[0][0].grad).all()
    assert torch.linalg.vector_norm(torch.cat([p.grad for p in groups[0]])) == pytest.approx(1.0)
    assert groups[2][0].grad.item() == 0.5
