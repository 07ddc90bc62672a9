"""Grow a model under DDP: torchrun --standalone --nproc-per-node 2 examples/grow_with_ddp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import esper

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = esper.load_data("fashion")
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip

body = esper.graft(model, at=["1", "4"], probe=data.train.x[:8])
ddp = DistributedDataParallel(body)  # once: seeds are not wrapped
optimizer = torch.optim.AdamW(body.parameters(), lr=3e-3)
grower = esper.Grower(body, optimizer, controller="schedule")  # on every rank

for epoch in range(12):
    for batch in torch.randperm(len(data.train.x))[:640].split(64):
        x, y = data.train.take(batch[rank::size])  # this rank's samples
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    report = grower.step([(data.val.x[rank:500:size], data.val.y[rank:500:size])])
    if rank == 0:
        print(f"epoch {epoch:2}  accuracy {report.quality:.3f}  {', '.join(report.effects)}")
grower.save("runs/ddp")  # all ranks; resume with grower.load("runs/ddp")
if rank == 0:
    plain = esper.harden(body)  # a plain module, as without DDP
    print(f"test accuracy {(plain.eval()(data.test.x).argmax(1) == data.test.y).float().mean():.3f}")
dist.destroy_process_group()
