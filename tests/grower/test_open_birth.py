"""Test open births in a user's own loop: the output at birth, the optimiser, saving and export."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import esper
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers import Schedule
from tests.support.grower import batch, make_body

OPEN = esper.Rules(birth="open")


def make_grower(rules: esper.Rules = OPEN) -> esper.Grower:
    body = make_body()
    return esper.Grower(body, torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9), rules=rules, controller=None)


def train(grower: esper.Grower, first: int, last: int) -> None:
    for i in range(first, last):
        x, y = batch(i)
        grower.optimizer.zero_grad()
        torch.manual_seed(i)
        F.cross_entropy(grower.body(x), y).backward()
        grower.optimizer.step()


def output(grower: esper.Grower) -> torch.Tensor:
    with torch.no_grad():
        return grower.body.eval()(batch(99)[0])


@pytest.mark.parametrize("ramp", [0, 4])
def test_birth_changes_no_output_and_no_optimiser_state(ramp):
    grower = make_grower(esper.Rules(birth="open", open_ramp=ramp))
    train(grower, 0, 3)
    host = list(grower.body.model.parameters())
    before = output(grower)
    momenta = [grower.optimizer.state[p]["momentum_buffer"].clone() for p in host]
    grower.germinate("first", "conv_light")
    assert torch.equal(output(grower), before)
    assert all(torch.equal(grower.optimizer.state[p]["momentum_buffer"], m) for p, m in zip(host, momenta, strict=True))


def test_seed_learns_from_the_first_batch_and_the_host_adapts_to_it():
    grower = make_grower()
    grower.body.train()
    grower.germinate("first", "conv_light")
    slot = grower.body.slots["first"]
    assert slot.stage in (SeedStage.BLENDING, SeedStage.HOLDING)
    weights = [p.detach().clone() for p in slot.parameters()]
    train(grower, 0, 2)
    assert any(not torch.equal(p, w) for p, w in zip(slot.parameters(), weights, strict=True))
    with_seed = output(grower)
    grower.body.set_slot(slot, slot.stage, 0.0)
    assert not torch.equal(output(grower), with_seed)


def test_shadow_pass_does_nothing_with_open_birth():
    def weights(shadow: bool) -> list[torch.Tensor]:
        body = make_body()
        optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
        grower = esper.Grower(body, optimizer, incubation="shadow", controller="none")
        grower.germinate("first", "conv_light")
        for i in range(3):
            x, y = batch(i)
            optimizer.zero_grad()
            torch.manual_seed(i)
            F.cross_entropy(body(x), y).backward()
            if shadow:
                grower.shadow(lambda x=x, y=y: F.cross_entropy(body(x), y))
            optimizer.step()
            grower.step([batch(50)])  # does not warn that shadow passes are missing
        return [p.detach().clone() for p in body.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(True), weights(False), strict=True))


def test_saved_run_resumes_bit_for_bit_after_an_open_birth(tmp_path):
    one = make_grower(esper.Rules(birth="open", open_ramp=3))
    one.germinate("first", "conv_light")
    for epoch in range(2):
        train(one, 4 * epoch, 4 * epoch + 4)
        one.step([batch(50)])
    one.save(tmp_path)
    other = make_grower(esper.Rules(birth="open", open_ramp=3))
    other.load(tmp_path)
    for grower in (one, other):
        train(grower, 8, 12)
        grower.step([batch(50)])
    assert torch.equal(output(one), output(other))


def test_hardened_model_equals_the_body():
    grower = make_grower()
    grower.germinate("first", "conv_light")
    for epoch in range(2):  # the first step makes it HOLDING, the second measures it there
        train(grower, 4 * epoch, 4 * epoch + 4)
        grower.step([batch(50)])
    grower.fossilize("first")
    plain = esper.harden(grower.body)
    assert torch.allclose(plain.eval()(batch(99)[0]), output(grower), atol=1e-6)


def test_model_hardened_at_any_time_of_a_ramp_equals_the_body():
    grower = make_grower(esper.Rules(birth="open", open_ramp=4))
    slot = grower.body.slots["first"]
    grower.germinate("first", "conv_light")
    alphas = []
    for epoch in range(6):
        train(grower, 4 * epoch, 4 * epoch + 4)
        grower.step([batch(50)])
        alphas.append(slot.amplitude)
        assert torch.allclose(esper.harden(grower.body).eval()(batch(99)[0]), output(grower), atol=1e-6)
    assert 0 < alphas[0] < alphas[1] < alphas[-1] == 1
    grower.fossilize("first")
    with_seed = output(grower)
    assert torch.allclose(esper.harden(grower.body).eval()(batch(99)[0]), with_seed, atol=1e-6)
    grower.body.set_slot(slot, slot.stage, 0.0)
    assert not torch.allclose(output(grower), with_seed, atol=1e-3)


def test_hardened_model_of_a_plan_equals_the_body_and_has_its_seeds_only():
    body = make_body()
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
    plan = {"second": "conv_light"}
    grower = esper.Grower(body, optimizer, controller=plan)
    for epoch in range(5):
        train(grower, 4 * epoch, 4 * epoch + 4)
        grower.step([batch(50)])
    seeds = {slot.name: slot for slot in body.slots.values() if slot.seed is not None}
    assert {name: slot.blueprint for name, slot in seeds.items()} == plan
    assert seeds["second"].stage == SeedStage.FOSSILIZED
    plain = esper.harden(body)
    assert torch.allclose(plain.eval()(batch(99)[0]), output(grower), atol=1e-6)
    kept = [*body.model.parameters(), *seeds["second"].seed.parameters()]
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in kept)
    body.set_slot(seeds["second"], SeedStage.FOSSILIZED, 0.0)
    assert not torch.allclose(output(grower), plain(batch(99)[0]), atol=1e-3)


@pytest.mark.parametrize("controller", [None, "schedule"])
def test_planting_later_than_the_mixing_time_before_the_horizon_warns(controller):
    def planted_after(epochs: int, **settings: int) -> None:
        body = make_body()
        chosen = controller and Schedule(start=epochs - 1)  # `step` decides at the end of an epoch
        optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
        grower = esper.Grower(body, optimizer, rules=OPEN, controller=chosen, **settings)
        for epoch in range(epochs):
            train(grower, 3 * epoch, 3 * epoch + 3)
            grower.step()
        if controller is None:
            grower.germinate("first", "conv_light")
        assert grower.slots["first"].blueprint

    planted_after(2, horizon=6, mixing_steps=12)  # 4 epochs of 3 batches are left
    planted_after(2)  # without a horizon the end is not known
    with pytest.warns(UserWarning, match="'first': planted at most 9 optimiser steps before the end") as record:
        planted_after(3, horizon=6, mixing_steps=12)
    assert record[0].filename == __file__


def test_planting_before_the_first_epoch_does_not_warn():
    body = make_body()
    grower = esper.Grower(
        body, torch.optim.SGD(body.parameters(), lr=0.1), rules=OPEN, horizon=1, mixing_steps=12, controller="none"
    )
    grower.germinate("first", "conv_light")
