"""Grow a small network on embedded data with Lightning. Needs: pip install 'esper-lite[lightning]'."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.lightning import GrowthCallback


class Digits(L.LightningModule):
    def __init__(self, probe):
        super().__init__()
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)
        )
        self.body = esper.graft(model, at=["2", "4"], probe=probe)  # slots after the two ReLUs

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.body(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_acc", (self.body(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.body.parameters(), lr=3e-3)
        self.grower = esper.Grower(self.body, optimizer, controller="schedule")  # before the scheduler
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)]


L.seed_everything(0)
data = esper.load_data("digits")
train = DataLoader(TensorDataset(data.train.x, data.train.y), 64, shuffle=True)
val = DataLoader(TensorDataset(data.val.x, data.val.y), 100)
module = Digits(probe=data.train.x[:8])
L.Trainer(max_epochs=8, accelerator="cpu", gradient_clip_val=1.0, callbacks=[GrowthCallback()]).fit(module, train, val)
print(module.grower)  # every slot: stage, blueprint, what the seed contributes ± standard error
