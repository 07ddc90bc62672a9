"""Test that shadow-pass gradients have the memory layout of their parameters."""

from __future__ import annotations

import pytest
import torch

from esper.kasmina.blueprints import blueprints_for
from esper.leyline.actions import Operator
from esper.leyline.stages import SeedStage
from esper.tolaria.engine import train_batch_loss
from esper.tolaria.host_building import build_body, build_optimizer
from esper.tolaria.tasks import get_task

PLACES = [
    (task, slot, blueprint)
    for task in ("rescue", "quick")
    for slot in get_task(task).slots
    for blueprint in blueprints_for("map")
]


@pytest.mark.parametrize(("name", "slot", "blueprint"), PLACES)
def test_fused_and_plain_optimiser_steps_agree_after_a_shadow_pass(name: str, slot: str, blueprint: str) -> None:
    task = get_task(name)
    data = task.load_data()
    x, y = next(iter(task.minibatches(data, 0, 0)))
    after = []
    for fused in (True, False):
        body = build_body(task, data, 0)
        body.set_slot(body.plant(slot, blueprint, Operator.ADD, rng_seed=1), SeedStage.TRAINING, 0.0)
        noise = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in body.slot(slot).parameters():
                p.add_(torch.randn(p.shape, generator=noise), alpha=0.1)
        optimizer = build_optimizer(task, list(body.parameters()))
        for group in optimizer.param_groups:
            group["fused"] = fused
        body.train()
        body.shadow_backward(lambda body=body: train_batch_loss(body, x, y)[0])
        for p in body.slot(slot).parameters():
            assert p.grad is not None
            assert p.grad.stride() == p.stride()
        optimizer.step()
        after.append([p.detach().clone() for p in body.slot(slot).parameters()])
    for fused_p, plain_p in zip(*after, strict=True):
        torch.testing.assert_close(fused_p, plain_p, rtol=1e-5, atol=1e-6)
