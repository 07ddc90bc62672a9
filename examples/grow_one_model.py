"""Grow a small PyTorch model on embedded data in your own training loop, and convert it to a plain module."""

import torch
from torch import nn

import esper

torch.manual_seed(0)
data = esper.load_data("fashion")  # 14×14 images of clothes, embedded in the package
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip

body = esper.graft(model, at=["1", "4"], probe=data.train.x[:8])  # slots after the two ReLUs
val_batches = [(data.val.x[:500], data.val.y[:500])]
optimizer = torch.optim.AdamW(body.parameters(), lr=3e-3)
grower = esper.Grower(body, optimizer, controller="schedule")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

for epoch in range(30):
    for batch in torch.randperm(len(data.train.x))[:640].split(64):
        x, y = data.train.take(batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(body(x), y).backward()
        optimizer.step()
    scheduler.step()
    report = grower.step(val_batches)  # once per epoch: measure, decide, change
    print(f"epoch {epoch:2}  accuracy {report.quality:.3f}  {', '.join(report.effects)}")

print(grower)  # every slot: stage, blueprint, contribution when it was last measured
print(grower.worth(val_batches))  # what the network would lose without each seed
plain = esper.harden(body)  # a plain module: no Esper inside
print(f"test accuracy {(plain.eval()(data.test.x).argmax(1) == data.test.y).float().mean():.3f}")
