"""A LightningModule that grows."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn

import esper
from tests.support.controllers import Planter
from tests.support.grower import make_body


class Module(L.LightningModule):
    """A user's module. `options` are those of the grower."""

    def __init__(self, schedule=True, **options):
        super().__init__()
        self.body, self.schedule = make_body(), schedule
        self.options = {"controller": Planter(), "rules": esper.Rules(one_at_a_time=False), **options}

    def loss(self, data):
        return nn.functional.cross_entropy(self.body(data[0]), data[1])

    def training_step(self, data, _index):
        return self.loss(data)

    def validation_step(self, data, _index):
        self.log("val_loss", self.loss(data))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.body.parameters(), lr=1e-2)
        self.grower = esper.Grower(self.body, optimizer, **self.options)
        if not self.schedule:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)]
