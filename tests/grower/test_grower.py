"""Growth inside a user's own training loop: by hand, by a controller, and without harm to the host."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import esper
from esper.grower import Grower
from esper.grower.qualities import accuracy, log_probability, split_batch
from esper.kasmina.blueprints import unregister
from esper.kasmina.optimizer_sync import GradientMeter
from esper.leyline.actions import Head, Op
from esper.leyline.errors import BlueprintError, ConfigError, LifecycleError, OptimizerError, UnknownNameError
from esper.leyline.events import Lifecycle
from esper.leyline.stages import SeedStage, Thresholds
from esper.nissa.journal_reader import read
from esper.nissa.run import read_manifest
from esper.tamiyo.controllers import wait_everywhere
from tests.support.grower import EASY, EventList, batch, make_body
from tests.support.rules import ISOLATED

BY_HAND = esper.Rules(
    birth="isolated",
    thresholds=Thresholds(blend_dwell=2),
    auto_train=False,
    auto_blend=False,
    auto_hold=False,
    min_prune_age=0,
)


def make_grower(rules: esper.Rules = EASY, lr: float = 0.05, **options: Any) -> Grower:
    body = make_body()
    settings = {"controller": "none", **options}
    return Grower(body, optim.SGD(body.parameters(), lr=lr, momentum=0.9), rules=rules, **settings)


def train(grower: Grower, epoch: int = 0, batches: int = 4) -> None:
    """Run one epoch of a user's training loop."""
    body, optimizer = grower.body.train(), grower.optimizer
    for i in range(batches):
        x, y = batch(1000 * epoch + i)
        optimizer.zero_grad()
        F.cross_entropy(body(x), y).backward()
        if body.incubation == "shadow":
            grower.shadow(lambda x=x, y=y: F.cross_entropy(body(x), y))
        grower.clip_grad_norm_(1.0)
        optimizer.step()


VAL = [batch(99_991, 40), batch(99_992, 24)]


def bring_to_stage(grower: Grower, slot: str, stage: SeedStage, blueprint: str = "conv_light", **how: Any) -> None:
    """Take a seed to a stage by hand, under EASY rules."""
    grower.germinate(slot, blueprint, **how)
    while grower.slots[slot].stage < min(stage, SeedStage.HOLDING):
        if grower.table.moving[0, grower.network.slot_names.index(slot)]:
            grower.step()
        else:
            grower.advance(slot)
    if stage == SeedStage.FOSSILIZED:
        grower.fossilize(slot)


# -- a complete lifecycle by hand


@pytest.mark.parametrize("incubation", ["straight_through", "shadow"])
def test_seed_completes_its_lifecycle_by_hand(incubation):
    grower = make_grower(BY_HAND, incubation=incubation, gradient_telemetry_stride=1)
    effects: list[str] = []
    grower.on_change(lambda effect, slot: effects.append(f"{effect.kind.name} {slot.name}"))

    def epoch() -> SeedStage:
        train(grower, int(grower.table.step[0]))
        grower.step(VAL)
        return grower.slots["second"].stage

    epoch()
    grower.germinate("second", "conv_light", tempo="fast", style="linear_add")
    assert epoch() == SeedStage.GERMINATED
    grower.advance("second")
    assert epoch() == epoch() == SeedStage.TRAINING
    assert math.isfinite(grower.slots["second"].prospect)
    assert grower.table.grad_health[0, 1] == 1.0
    grower.advance("second")
    assert grower.slots["second"].alpha == 0.0
    alphas = []
    while grower.slots["second"].waits_for:
        assert epoch() == SeedStage.BLENDING
        alphas.append(grower.slots["second"].alpha)
    assert alphas == pytest.approx([1 / 3, 2 / 3, 1.0])
    grower.advance("second")
    grower.set_alpha_target("second", 0.5, speed="instant")
    assert (grower.slots["second"].stage, grower.slots["second"].alpha) == (SeedStage.BLENDING, 0.5)
    grower.set_alpha_target("second", 1.0, speed="fast", curve="cosine", style="gated_gate")
    for _ in range(3):
        epoch()
    grower.advance("second")
    assert epoch() == epoch() == SeedStage.HOLDING
    view = grower.slots["second"]
    assert math.isfinite(view.contribution)
    assert view.contribution_se >= 0
    grower.fossilize("second")
    assert epoch() == SeedStage.FOSSILIZED
    assert effects == ["BUILD second", "SET_OPERATOR second", "COMMIT second"]
    assert "second" in repr(grower)
    assert "FOSSILIZED" in repr(grower)


def test_printed_grower_has_a_line_per_slot_with_known_values():
    grower = make_grower()
    assert repr(grower).split()[:4] == ["first", "DORMANT", "second", "DORMANT"]
    bring_to_stage(grower, "second", SeedStage.TRAINING)
    train(grower)
    grower.step(VAL)
    text = repr(grower).partition("second")[2]
    for word in ("TRAINING", "conv_light", "alpha 0.00", "336 params", "prospect"):
        assert word in text
    bring_to_stage(grower, "first", SeedStage.HOLDING)
    grower.step(VAL)
    assert "contribution" in repr(grower).partition("second")[0]
    assert " ± " in repr(grower)


def test_printed_grower_fits_80_columns():
    rules = esper.Rules(birth="isolated", thresholds=Thresholds(blend_dwell=0), one_at_a_time=False)
    grower = make_grower(rules, gradient_telemetry_stride=1)
    texts = [repr(grower)]
    grower.germinate("first", "conv_light")
    grower.germinate("second", "conv_light")
    for epoch in range(12):
        train(grower, epoch, batches=1)
        grower.step(VAL)
        texts.append(repr(grower))
    texts.append(str(replace(grower.slots["first"], name="model.layers." * 10)))
    assert any("contribution" in text for text in texts)
    assert any("waits:" in text for text in texts)
    assert max(len(line) for text in texts for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("controller", "note"),
    [
        ("none", "No step yet. The controller 'none' never plants: call grower.germinate("),
        ("schedule", "No step yet. The controller Schedule decides at each grower.step()."),
    ],
)
def test_printed_grower_before_the_first_step_names_what_decides(controller, note):
    grower = make_grower(controller=controller)
    assert note in repr(grower)
    grower.step()
    assert "No step yet" not in repr(grower)


# -- a pruned seed leaves no trace


def no_growth(kind: str, epochs: int, between: Callable[[Grower, int], None], incubation: str) -> Any:
    """Return weights, buffers and optimiser state of the host after a run with a callback between the epochs."""
    body = make_body()
    names = [n for n, _ in body.model.named_parameters()]
    optimizer: optim.Optimizer
    if kind == "sgd":
        optimizer = optim.SGD(body.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, fused=True)
    elif kind == "adamw":
        optimizer = optim.AdamW(body.parameters(), lr=0.01, foreach=True, amsgrad=True)
    else:
        optimizer = optim.Adafactor(body.parameters(), lr=0.01)
    grower = Grower(body, optimizer, rules=EASY, incubation=incubation, lr=0.03, controller="none")
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    torch.manual_seed(7)  # dropout
    for epoch in range(epochs):
        between(grower, epoch)
        train(grower, epoch)
        scheduler.step()
    states = {n: optimizer.state[p] for n, p in zip(names, body.model.parameters(), strict=True)}
    return body.model.state_dict(), states


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adafactor"])
@pytest.mark.parametrize("incubation", ["straight_through", "shadow"])
def test_seed_pruned_while_training_leaves_the_host_bit_identical(kind, incubation):
    largest = []

    def grow(grower: Grower, epoch: int) -> None:
        if epoch == 1:
            bring_to_stage(grower, "first", SeedStage.TRAINING, style="GATED_GATE")
            bring_to_stage(grower, "second", SeedStage.TRAINING, "bottleneck")
        if epoch == 4:
            largest.append(max(p.abs().max().item() for p in grower.body.slots["first"].seed[-1].parameters()))
            grower.prune("first")
            grower.prune("second")
        grower.step(VAL)

    grown, grown_states = no_growth(kind, 6, grow, incubation)
    plain, plain_states = no_growth(kind, 6, lambda _grower, _epoch: None, incubation)

    assert largest[0] > 0  # its last projection stays zero
    for name, value in plain.items():
        assert torch.equal(value, grown[name]), name
    for name, state in plain_states.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(grown_states[name][key])), (name, key)


@pytest.mark.parametrize("incubation", ["straight_through", "shadow"])
def test_non_finite_seed_does_not_affect_the_host(incubation):
    def grow(grower: Grower, epoch: int) -> None:
        if epoch == 1:
            bring_to_stage(grower, "first", SeedStage.TRAINING, "conv_heavy")
            with torch.no_grad():
                for p in grower.body.slots["first"].parameters():
                    p.fill_(float("nan"))

    grown, _ = no_growth("sgd", 3, grow, incubation)
    plain, _ = no_growth("sgd", 3, lambda _grower, _epoch: None, incubation)
    assert all(torch.equal(grown[n], plain[n]) for n in plain)


def test_seed_being_pruned_is_frozen_and_passes_gradients_to_the_host():
    grower = make_grower()
    bring_to_stage(grower, "first", SeedStage.HOLDING)
    train(grower)
    grower.prune("first", speed="fast")
    params = list(grower.body.slots["first"].parameters())
    before = [p.detach().clone() for p in params]
    alphas = []
    while grower.slots["first"].stage == SeedStage.BLENDING:
        assert not any(p.requires_grad for p in params)
        train(grower)
        assert all(p.grad is None for p in params)
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
        assert all(p.grad.abs().sum() > 0 for p in grower.body.model[0].parameters())
        grower.step()
        alphas.append(grower.slots["first"].alpha)
    assert alphas == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert grower.slots["first"].stage == SeedStage.PRUNED
    assert not list(grower.body.slots["first"].parameters())


def test_partly_lowered_seed_trains_again_once_its_alpha_is_constant():
    grower = make_grower()
    bring_to_stage(grower, "first", SeedStage.HOLDING)
    grower.set_alpha_target("first", 0.5, speed="fast")
    frozen = []
    for _ in range(4):
        frozen.append(not any(p.requires_grad for p in grower.body.slots["first"].parameters()))
        grower.step()
    assert frozen == [True, True, True, False]


def test_gate_is_in_the_optimiser_from_germination_and_trains_while_blending():
    grower = make_grower()
    grower.germinate("first", "conv_light", style="GATED_GATE")
    gate = grower.body.slots["first"].gate
    optimized = {p for group in grower.optimizer.param_groups for p in group["params"]}
    assert set(gate.parameters()) <= optimized
    grower.advance("first")
    train(grower)
    grower.advance("first")
    grower.step()
    before = [p.detach().clone() for p in gate.parameters()]
    train(grower)
    assert grower.slots["first"].stage == SeedStage.BLENDING
    assert all(not torch.equal(p, b) for p, b in zip(gate.parameters(), before, strict=True))


# -- refusals with reason and remedy


def cooling(grower: Grower) -> None:
    grower.germinate("first", "norm")
    grower.prune("first")


ONE = EASY.__class__(**{f: getattr(EASY, f) for f in EASY.__struct_fields__} | {"one_at_a_time": True})
CASES: dict[str, tuple[Any, Callable[[Grower], None], Callable[[Grower], None], str]] = {
    "germinate, occupied": (
        EASY,
        lambda g: g.germinate("first", "norm"),
        lambda g: g.germinate("first", "norm"),
        "cannot germinate 'first', which is GERMINATED: this stage does not allow it. Slots that do: second",
    ),
    "germinate, unfit": (
        EASY,
        lambda _g: None,
        lambda g: g.germinate("first", "lora"),
        "which is DORMANT: 'lora' does not fit there. It takes: conv_light, attention, norm",
    ),
    "germinate, noop": (EASY, lambda _g: None, lambda g: g.germinate("first", "noop"), "'noop' does not fit there"),
    "germinate, cooling": (
        EASY,
        cooling,
        lambda g: g.germinate("first", "norm"),
        "which is PRUNED: cooling down after a prune: 'first' for 7 more epochs",
    ),
    "germinate, another cools": (
        ONE,
        cooling,
        lambda g: g.germinate("second", "norm"),
        "which is DORMANT: cooling down after a prune: 'first' for 7 more epochs",
    ),
    "germinate, another learns": (
        ONE,
        lambda g: g.germinate("first", "norm"),
        lambda g: g.germinate("second", "norm"),
        "'first' is still GERMINATED, and one seed learns at a time. Wait until it blends",
    ),
    "germinate, full": (
        EASY.__class__(max_seeds=1, one_at_a_time=False),
        lambda g: g.germinate("first", "norm"),
        lambda g: g.germinate("second", "norm"),
        "there are 1 seeds, the most that rules.max_seeds allows. Prune one, or raise it",
    ),
    "advance, nothing": (EASY, lambda _g: None, lambda g: g.advance("first"), "DORMANT: this stage does not allow it"),
    "advance, too young": (
        BY_HAND,
        lambda g: (g.germinate("first", "norm"), g.advance("first")),
        lambda g: g.advance("first"),
        "TRAINING: it has been TRAINING for 0 of 2 epochs (thresholds.blend_dwell); gradient health was not measured. "
        "Way out: call grower.step()",
    ),
    "advance, not at full": (
        EASY,
        lambda g: bring_to_stage(g, "first", SeedStage.BLENDING),
        lambda g: g.advance("first"),
        "BLENDING: alpha is 0.00 and moving to 1.00; the gate requires that it rests at 1. "
        "Way out: wait until its ramp ends",
    ),
    "advance, by itself": (
        ISOLATED,
        lambda g: g.germinate("first", "norm"),
        lambda g: g.advance("first"),
        "GERMINATED: it advances by itself at the next step",
    ),
    "advance, holding": (
        EASY,
        lambda g: bring_to_stage(g, "first", SeedStage.HOLDING),
        lambda g: g.advance("first"),
        "HOLDING: this stage does not allow it",
    ),
    "fossilize, unmeasured": (
        EASY.__class__(birth="isolated", thresholds=Thresholds(blend_dwell=0, blend_health=None), auto_train=False,
                       auto_blend=False, auto_hold=False),
        lambda g: bring_to_stage(g, "first", SeedStage.HOLDING),
        lambda g: g.fossilize("first"),
        "its contribution was not measured in HOLDING. Way out: measure it with grower.step(val_batches)",
    ),
    "fossilize, too early": (
        BY_HAND,
        lambda g: (g.germinate("first", "norm"), g.advance("first")),
        lambda g: g.fossilize("first"),
        "TRAINING: only a HOLDING seed that was measured can be committed",
    ),
    "retarget, moving": (
        EASY,
        lambda g: bring_to_stage(g, "first", SeedStage.BLENDING),
        lambda g: g.set_alpha_target("first", 0.5),
        "cannot set alpha target 'first', which is BLENDING: its alpha is moving; wait until it rests",
    ),
    "retarget, empty": (
        EASY,
        lambda g: bring_to_stage(g, "second", SeedStage.HOLDING),
        lambda g: g.set_alpha_target("first", 0.5),
        "DORMANT: this stage does not allow it. Slots that do: second",
    ),
    "prune, too young": (
        esper.Rules(),
        lambda g: g.germinate("first", "norm"),
        lambda g: g.prune("first"),
        "BLENDING: it is 0 epochs old, rules.min_prune_age is 5",
    ),
    "prune, moving": (
        EASY,
        lambda g: bring_to_stage(g, "first", SeedStage.BLENDING),
        lambda g: g.prune("first"),
        "BLENDING: its alpha is moving; wait until it rests",
    ),
    "prune, fossil": (
        EASY,
        lambda g: bring_to_stage(g, "first", SeedStage.FOSSILIZED),
        lambda g: g.prune("first"),
        "FOSSILIZED: this stage does not allow it. Slots that do: none",
    ),
    "prune, empty": (EASY, lambda _g: None, lambda g: g.prune("first"), "DORMANT: this stage does not allow it"),
}  # fmt: skip


@pytest.mark.parametrize(("rules", "before", "act", "text"), CASES.values(), ids=CASES.keys())
def test_illegal_operation_is_refused_with_the_reason(rules, before, act, text):
    grower = make_grower(rules)
    before(grower)
    table = grower.table.clone()
    with pytest.raises(LifecycleError) as error:
        act(grower)
    assert text in str(error.value)
    assert not grower.table.diff(table)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda g: g.germinate("frist", "norm"), "no slot named 'frist'. Did you mean 'first'?"),
        (lambda g: g.advance("frist"), "no slot named 'frist'. Did you mean 'first'?"),
        (lambda g: g.germinate("first", "conv_lite"), "no blueprint for slot 'first' named 'conv_lite'. Did you"),
        (lambda g: g.germinate("first", "norm", style="SIGMOID"), "no style named 'SIGMOID'. Did you mean 'SIGMOID_AD"),
        (lambda g: g.germinate("first", "norm", tempo="QUICK"), "no tempo named 'QUICK'"),
        (lambda g: g.set_alpha_target("first", 1, speed="MEDUIM"), "no alpha speed named 'MEDUIM'. Did you mean 'MEDI"),
        (lambda g: g.set_alpha_target("first", 1, curve="COSIN"), "no alpha curve named 'COSIN'. Did you mean 'COSINE"),
        (lambda g: g.set_alpha_target("third", 1), "no slot named 'third'"),
        (lambda g: g.prune("first", speed="FASTER"), "no alpha speed named 'FASTER'. Did you mean 'FAST'?"),
        (lambda _g: make_grower(quality="accurracy"), "no quality named 'accurracy'. Did you mean 'accuracy'?"),
        (lambda _g: make_grower(controller="scheduled"), "no controller named 'scheduled'. Did you mean 'schedule'?"),
    ],
)
def test_wrong_name_suggests_the_nearest(act, text):
    with pytest.raises(UnknownNameError) as error:
        act(make_grower())
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda g: g.germinate("first", "norm", alpha_target=0.6), "an alpha target is one of 0.5, 0.7, 1.0, got 0.6"),
        (lambda _g: make_grower(incubation="shade"), "incubation must be 'straight_through' or 'shadow', got 'shade'"),
        (lambda g: g.shadow(lambda: torch.zeros(())), "grower.shadow needs Grower(..., incubation='shadow')"),
        (lambda g: g.step([]), "Give at least one batch; an iterator that was read before is empty"),
        (
            lambda g: g.step([torch.zeros(3)]),
            "a validation batch is (inputs, target) or a mapping with 'labels', got T",
        ),
        (lambda g: g.step([(1, 2, 3)]), "got tuple of 3"),
        (lambda g: g.step([{"x": 1}]), "needs a key 'labels', it has ['x']"),
    ],
)
def test_invalid_setting_is_refused(act, text):
    with pytest.raises(ConfigError) as error:
        act(make_grower())
    assert text in str(error.value)


def test_second_grower_on_the_optimiser_is_refused():
    grower = make_grower()
    with pytest.raises(OptimizerError, match="one optimiser serves one grower"):
        Grower(grower.body, grower.optimizer, controller="none")


@pytest.mark.parametrize(
    "call", [lambda g: g.step(), lambda g: g.germinate("second", "conv_light"), lambda g: g.load("nowhere")]
)
def test_grower_that_was_replaced_by_a_later_one_is_refused(call):
    """Its table does not know what the later one has changed."""
    grower = make_grower()
    later = Grower(grower.body, torch.optim.SGD(grower.body.parameters(), lr=0.1), controller="none")
    with pytest.raises(ConfigError, match="another grower was built on this body"):
        call(grower)
    later.step()


# -- measuring


def test_without_validation_batches_nothing_is_measured():
    grower = make_grower()
    bring_to_stage(grower, "first", SeedStage.HOLDING)
    report = grower.step()
    assert math.isnan(report.quality)
    assert math.isnan(report.committed)
    assert (report.op, report.slot, report.effects) == (Op.WAIT, "", ())
    assert np.isnan(grower.table.contribution).all()
    assert np.isnan(grower.table.quality).all()


def test_quality_is_of_the_body_in_eval_mode_and_committed_of_the_host():
    grower = make_grower()
    train(grower, batches=20)
    bring_to_stage(grower, "second", SeedStage.HOLDING)
    train(grower, 1, batches=20)
    report = grower.step(VAL)
    body = grower.body.eval()
    right = torch.cat([accuracy(body(x), y) for x, y in VAL])
    assert report.quality == pytest.approx(right.mean().item())
    assert grower.table.quality[0] == pytest.approx(report.quality)
    assert grower.slots["second"].contribution == pytest.approx(report.quality - report.committed, abs=1e-6)
    grower.body.train()
    grower.step(VAL)
    assert all(m.training for m in grower.body.modules())  # modes are restored


class Pair(nn.Module):
    """Returns its output in a mapping, takes two named inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.two(torch.relu(self.one(x + shift)))}


@pytest.mark.parametrize("quality", ["accuracy", "log_probability"])
def test_batches_may_be_mappings_with_labels_and_outputs_too(quality):
    torch.manual_seed(0)
    x, shift, y = torch.randn(12, 4), torch.randn(12, 4), torch.randint(3, (12,))
    body = esper.graft(Pair(), at="one", probe={"x": x, "shift": shift})
    grower = Grower(body, optim.SGD(body.parameters(), lr=0.1), quality=quality, rules=EASY, controller="none")
    bring_to_stage(grower, "one", SeedStage.HOLDING, "mlp_small")
    report = grower.step([{"x": x, "shift": shift, "labels": y}])
    score = {"accuracy": accuracy, "log_probability": log_probability}[quality]
    assert report.quality == pytest.approx(score(body(x, shift), y).mean().item(), abs=1e-6)
    assert math.isfinite(grower.slots["one"].contribution)


def test_custom_quality_is_the_one_that_counts():
    grower = make_grower(quality=lambda output, _target: -(output - 1.0).square().mean(1))
    bring_to_stage(grower, "first", SeedStage.HOLDING)
    train(grower)
    report = grower.step(VAL)
    body = grower.body.eval()
    expected = torch.cat([-(body(x) - 1.0).square().mean(1) for x, _ in VAL]).mean().item()
    assert report.quality == pytest.approx(expected, rel=1e-5)
    assert grower.slots["first"].contribution != 0


def test_batch_is_split_into_inputs_and_target():
    assert split_batch(("x", "y")) == ("x", "y")
    assert split_batch({"a": 1, "labels": 2}) == ({"a": 1}, 2)


def test_gradients_are_sampled_by_the_stride_and_read_once_per_step(monkeypatch):
    grower = make_grower(gradient_telemetry_stride=3)
    bring_to_stage(grower, "first", SeedStage.TRAINING)
    sampled: list[int] = []
    take = GradientMeter.take
    monkeypatch.setattr(GradientMeter, "take", lambda *args: (sampled.append(grower._batches), take(*args)))
    train(grower, batches=8)
    assert sampled == [1, 4, 7]
    assert np.isnan(grower.table.grad_norm).all()
    grower.step()
    assert np.isfinite(grower.table.grad_norm[0, 0])
    assert np.isnan(grower.table.grad_norm[0, 1])  # no seed: unmeasured, not zero


def test_seed_trained_on_odd_batches_only_is_still_measured():
    grower = make_grower(incubation="shadow", gradient_telemetry_stride=2)
    bring_to_stage(grower, "first", SeedStage.HOLDING)  # has a gradient on every batch
    bring_to_stage(grower, "second", SeedStage.TRAINING)
    for i in range(4):
        x, y = batch(i)
        grower.optimizer.zero_grad()
        F.cross_entropy(grower.body(x), y).backward()
        if i % 2 == 1:
            grower.shadow(lambda x=x, y=y: F.cross_entropy(grower.body(x), y))
        grower.optimizer.step()
    grower.step()
    assert np.isfinite(grower.table.grad_norm).all()


def test_samples_of_a_pruned_seed_are_not_attributed_to_the_next():
    grower = make_grower(gradient_telemetry_stride=1)
    bring_to_stage(grower, "first", SeedStage.TRAINING)
    train(grower)
    grower.step()
    train(grower)
    grower.prune("first")
    grower.step()
    for _ in range(7):
        grower.step()
    assert grower.slots["first"].stage == SeedStage.DORMANT
    grower.germinate("first", "norm")
    assert np.isnan(grower.table.grad_norm[0, 0])
    assert grower.network.meter.smoothed == grower.network.meter.latest == {}


# -- controllers


def test_schedule_grows_on_its_own():
    grower = make_grower(esper.Rules(), controller="schedule", gradient_telemetry_stride=1)
    message: list[tuple[str, str]] = []
    effects: list[str] = []
    for epoch in range(22):
        train(grower, epoch, batches=2)
        report = grower.step(VAL)
        message += [(report.op.name, report.slot)] if report.op else []
        effects += report.effects
    assert message[0] == ("GERMINATE", "first")
    assert ("FOSSILIZE", "first") in message
    assert ("GERMINATE", "second") in message
    blueprint = grower.slots["first"].blueprint
    assert effects[:2] == [f"build {blueprint} in slot first", f"commit {blueprint} in slot first"]


def test_report_names_the_dropped_blueprint_and_its_slot():
    grower = make_grower(BY_HAND, controller=Pruner())
    grower.germinate("second", "norm")
    effects = [effect for _ in range(3) for effect in grower.step(VAL).effects]
    assert effects == ["drop norm in slot second"]


class Pruner:
    """Prunes the second slot at once, as soon as that is legal."""

    def act(self, _table: esper.SlotTable, legal: Any) -> Any:
        actions = wait_everywhere(1)
        if legal[0, Op.PRUNE, 1]:
            actions[0, [Head.OP, Head.SLOT]] = Op.PRUNE, 1
        return actions


class IllegalController:
    """Requests what is not allowed, then a slot that does not exist."""

    def __init__(self) -> None:
        self.shapes: list[Any] = []

    def act(self, _table: esper.SlotTable, legal: Any) -> Any:
        self.shapes.append(legal.shape)
        actions = wait_everywhere(1)
        actions[0, [Head.OP, Head.SLOT]] = Op.FOSSILIZE, 0 if len(self.shapes) == 1 else 17
        return actions


def test_custom_controller_decides_and_illegal_actions_have_no_effect():
    controller = IllegalController()
    grower = make_grower(controller=controller)
    for _ in range(2):
        report = grower.step()
        assert (report.op, report.slot, report.effects) == (Op.WAIT, "", ())
    assert controller.shapes == [(1, len(Op), 2)] * 2


# -- kinds of training loops


def test_accumulated_gradients_grow_as_whole_batches_do():
    def run(parts: int) -> torch.Tensor:
        grower = make_grower(gradient_telemetry_stride=1)
        grower.body.eval()  # no dropout, no batch statistics: parts and whole agree
        bring_to_stage(grower, "first", SeedStage.HOLDING)
        for i in range(6):
            x, y = batch(i, 16)
            grower.optimizer.zero_grad()
            for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(grower.body(xs), ys) / parts).backward()
            grower.optimizer.step()
        grower.step()
        weights = torch.cat([p.detach().flatten() for p in grower.body.parameters()])
        return torch.cat([weights, torch.tensor([float(grower.table.grad_norm[0, 0])])])

    assert torch.allclose(run(1), run(4), atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_gradient_scaler_leaves_the_run_and_its_statistics_unscaled(fused, unscale):
    def run(scaler: torch.amp.GradScaler) -> tuple[list[torch.Tensor], np.ndarray]:
        body = make_body()
        optimizer = optim.SGD(body.parameters(), lr=0.05, momentum=0.9, fused=fused)
        grower = Grower(
            body, optimizer, rules=EASY, incubation="shadow", gradient_telemetry_stride=1, controller="none"
        )
        bring_to_stage(grower, "first", SeedStage.TRAINING)
        torch.manual_seed(3)
        for i in range(3):
            x, y = batch(i)
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(body(x), y)).backward()
            grower.shadow(lambda x=x, y=y: scaler.scale(F.cross_entropy(body(x), y)))
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        grower.step()
        table = grower.table
        return list(body.parameters()), np.stack([table.grad_norm, table.grad_ratio, table.grad_health])[:, 0, 0]

    scaled, stats = run(torch.amp.GradScaler("cpu", init_scale=1024.0))
    plain, true = run(torch.amp.GradScaler("cpu", enabled=False))
    assert stats == pytest.approx(true, rel=1e-3)
    for p, q in zip(scaled, plain, strict=True):
        assert torch.allclose(p, q, atol=1e-5)


def test_named_parameters_keep_their_names_through_growth():
    body = make_body()
    grower = Grower(body, optim.AdamW(body.named_parameters()), rules=EASY, controller="none")
    bring_to_stage(grower, "first", SeedStage.FOSSILIZED)
    bring_to_stage(grower, "second", SeedStage.TRAINING, "norm")
    host, seeds = (group["param_names"] for group in grower.optimizer.param_groups)
    assert host[-3:] == ["esper.first.seed.0.weight", "esper.first.seed.0.bias", "esper.first.seed.2.weight"]
    assert seeds == ["esper.second.seed.theta", "esper.second.seed.norm.weight", "esper.second.seed.norm.bias"]


def test_seed_options_apply_to_their_own_parameter_group():
    grower = make_grower(lr=0.1)
    assert grower.optimizer.param_groups[-1]["lr"] == 0.1
    body = make_body()
    Grower(body, (optimizer := optim.SGD(body.parameters(), lr=0.1)), lr=0.01, momentum=0.5, controller="none")
    assert [(g["lr"], g["momentum"]) for g in optimizer.param_groups] == [(0.1, 0), (0.01, 0.5)]


def test_host_and_seeds_are_clipped_separately_and_fossils_with_the_host():
    grower = make_grower()
    bring_to_stage(grower, "first", SeedStage.FOSSILIZED)
    bring_to_stage(grower, "second", SeedStage.HOLDING)
    train(grower)
    for p in grower.body.parameters():
        p.grad = torch.full_like(p, 2.0)
    grower.clip_grad_norm_(1.0)
    first, second = (list(grower.body.slots[n].parameters()) for n in ("first", "second"))
    for together in ([*grower.body.model.parameters(), *first], second):
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in together]))
        assert norm.item() == pytest.approx(1.0, rel=1e-4)


# -- bodies that have already grown


@pytest.mark.parametrize("when", ["before", "after"])
def test_grown_body_is_adopted_before_or_after_loading(when):
    old = make_grower()
    bring_to_stage(old, "first", SeedStage.FOSSILIZED, style="GATED_GATE")
    bring_to_stage(old, "second", SeedStage.BLENDING, "bottleneck", style="LINEAR_MULTIPLY")
    train(old)
    old.step()
    state = copy.deepcopy(old.body.state_dict())

    if when == "before":
        body = make_body()
        body.load_state_dict(state)
        grower = Grower(
            body, optim.SGD(body.parameters(), lr=0.05, momentum=0.9), rules=EASY, lr=0.01, controller="none"
        )
    else:
        grower = make_grower()
        bring_to_stage(grower, "second", SeedStage.TRAINING, "norm")  # replaced by the loaded state
        train(grower)
        grower.body.load_state_dict(state)
        body = grower.body

    x = batch(5)[0]
    assert torch.equal(body.eval()(x), old.body.eval()(x))
    for name, view in grower.slots.items():
        was = old.slots[name]
        assert (view.stage, view.blueprint, view.params) == (was.stage, was.blueprint, was.params)
        assert view.alpha == was.alpha
    optimized = [p for group in grower.optimizer.param_groups for p in group["params"]]
    assert len(optimized) == len(set(optimized))
    assert set(optimized) == set(body.parameters())
    assert set(grower.optimizer.param_groups[-1]["params"]) == set(body.slots["second"].parameters())
    assert set(grower.optimizer.state) <= set(optimized)

    for epoch in range(8):  # its ramp continues to 1
        train(grower, epoch)
        grower.step(VAL)
    assert grower.slots["second"].alpha == 1.0
    grower.advance("second")
    grower.fossilize("second")


def test_seed_held_below_full_alpha_stays_there_after_loading():
    old = make_grower()
    bring_to_stage(old, "first", SeedStage.HOLDING)
    old.set_alpha_target("first", 0.7, speed="instant")
    grower = make_grower()
    grower.body.load_state_dict(old.body.state_dict())
    grower.step()
    assert grower.slots["first"].alpha == pytest.approx(0.7)
    grower.set_alpha_target("first", 1.0)  # constant alpha, so it may be advanced


# -- custom blueprints


def test_blueprint_registered_after_construction_can_be_germinated():
    grower = make_grower()

    @esper.blueprint("late", layouts="map")
    def late(dim: int) -> nn.Module:
        layer = nn.Conv2d(dim, dim, 1)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer

    try:
        grower.germinate("first", "late")
        assert grower.slots["first"].blueprint == "late"
    finally:
        unregister("late")


def test_blueprint_violating_a_rule_leaves_table_and_body_unchanged():
    grower = make_grower()

    @esper.blueprint("nonzero_at_birth", layouts="map")
    def nonzero_at_birth(dim: int) -> nn.Module:
        return nn.Conv2d(dim, dim, 1)

    try:
        before = grower.table.clone()
        with pytest.raises(BlueprintError, match="Δ is not zero at birth"):
            grower.germinate("first", "nonzero_at_birth")
        assert not grower.table.diff(before)
        assert grower.slots["first"].stage == SeedStage.DORMANT
        grower.germinate("first", "norm")
    finally:
        unregister("nonzero_at_birth")


def test_costs_of_every_blueprint_are_available_before_building():
    costs = make_grower().body.costs()
    assert costs["first"]["conv_light"].params == 336
    assert costs["first"]["conv_light"].macs > 0


def test_recorded_grower_reports_manual_and_automatic_changes(tmp_path):
    with esper.record("mine", out=tmp_path / "run") as run:
        grower = make_grower(esper.Rules(birth="isolated", thresholds=Thresholds(blend_dwell=1)), telemetry=run.hub)
        grower.step([batch(0)])
        grower.germinate("first", "norm")
        for i in range(12):
            x, y = batch(i)
            F.cross_entropy(grower.body(x), y).backward()
            grower.optimizer.step()
            grower.step([batch(99)] if i % 2 else None)
        grower.worth([batch(99)])
    entries = list(read(tmp_path / "run"))
    lives = [(e.data["was"], e.data["now"], e.data["cause"]) for e in entries if e.kind == "lifecycle"]
    assert lives[:3] == [
        ("DORMANT", "GERMINATED", "controller"),
        ("GERMINATED", "TRAINING", "rules"),
        ("TRAINING", "BLENDING", "rules"),
    ]
    steps = [e.data for e in entries if e.kind == "step"]
    assert len(steps) == 13
    assert all(s["val_loss"] is None for s in steps)  # not measured here: unmeasured, not NaN
    assert steps[1]["quality"] is None
    assert steps[2]["quality"] is not None
    assert any(e.kind == "worth" and e.data["contribution"] is not None for e in entries)
    assert {e.kind for e in entries} >= {"gradient", "decision", "run_finished"}
    assert entries[0].kind == "run_started"
    assert entries[0].data["slots"] == ["first", "second"]
    assert entries[0].data["steps"] is None  # no horizon was given, so no view shows how much is left
    assert read_manifest(tmp_path / "run")["env_steps"] == 13


def test_commit_reports_the_contribution_that_it_was_based_on():
    hub = EventList()
    grower = make_grower(esper.Rules(), controller="schedule", telemetry=hub)
    known = {}
    for i in range(10):
        x, y = batch(i)
        F.cross_entropy(grower.body(x), y).backward()
        grower.optimizer.step()
        grower.step([batch(99)])
        for s, name in enumerate(grower.network.slot_names):  # measured before this decision
            known[name, i + 1] = float(grower.table.contribution[0, s])
    commits = [e for e in hub if isinstance(e, Lifecycle) and e.now == "FOSSILIZED"]
    assert commits
    assert [e.contribution for e in commits] == [known[e.slot, e.step] for e in commits]
    births = [e for e in hub if isinstance(e, Lifecycle) and e.now == "GERMINATED"]
    assert [e.contribution for e in births] == [None] * len(births)


def test_recording_a_grower_does_not_change_training():
    grown = []
    for hub in (None, EventList()):
        grower = make_grower(esper.Rules(), controller="schedule", telemetry=hub)
        for i in range(10):
            x, y = batch(i)
            F.cross_entropy(grower.body(x), y).backward()
            grower.optimizer.step()
            grower.step([batch(99)])
        grown.append(torch.cat([p.detach().flatten() for p in grower.body.parameters()]))
    assert torch.equal(*grown)
    assert len(hub) > 10
