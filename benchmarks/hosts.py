"""The reference host, and seeds that stay in BLENDING while a benchmark runs."""

from __future__ import annotations

import torch

from esper.kasmina.blueprints import blueprint_index
from esper.kasmina.body import Body
from esper.leyline.actions import Operator
from esper.leyline.lifecycle import Effect, EffectKind
from esper.leyline.stages import SeedStage
from esper.tolaria.engine import Engine
from esper.tolaria.tasks import Task

BLUEPRINTS = ("conv_light", "depthwise", "attention")
"""The three live seeds of a typical grown reference host, by slot."""
ALPHA = 0.7


def reference_task(batch: int, images: int) -> Task:
    """Return the reference CNN's task: base 8, 3 blocks, 3×32×32; 5 training batches and `images` for validation."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(5 * batch + 2 * images, 3, 32, 32, generator=noise)
    y = torch.randint(0, 10, (len(x),), generator=noise)
    held_out = images / len(x)
    return Task.from_tensors(
        "reference", x, y, held_out=held_out + 1e-9, classes=10, host_kwargs={"base": 8, "blocks": 3},
        batch=batch, batches_per_epoch=5, lr=0.01, seed_lr=0.01,
    )  # fmt: skip


def plant(engine: Engine, blueprints: tuple[str, ...]) -> None:
    """Plant these seeds in the first slots of every environment, in BLENDING at a constant alpha."""
    table = engine.table
    effects = []
    for e in range(table.num_envs):
        for s, name in enumerate(blueprints):
            at = e, s
            table.stage[at] = SeedStage.BLENDING
            table.alpha[at] = table.alpha_to[at] = ALPHA
            table.blueprint[at] = blueprint_index(name)
            table.operator[at] = Operator.ADD
            table.serial[at] = table.next_serial[e]
            table.next_serial[e] += 1
            effects.append(Effect(EffectKind.BUILD, *at))
    engine.apply_effects(effects)
    for network in engine.networks:
        perturb(network.body)
        network.average.restart()


def perturb(body: Body) -> None:
    """Add noise to the weights of new seeds, whose output is zero otherwise."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for slot in body.slots.values():
            for p in slot.parameters():
                p.add_(torch.randn(p.shape, generator=noise), alpha=0.05)
