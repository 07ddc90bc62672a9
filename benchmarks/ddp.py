"""Overhead of a grower without live seeds under DDP: python -m benchmarks.ddp

Two processes train the same small convolutional network by DDP over gloo, once plainly and once grafted with a grower.
Epochs of both loops alternate. An epoch is a number of optimiser steps and one validation pass, which is
`grower.step` in the second loop: measuring, deciding, comparing the ranks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import esper
from benchmarks.measure import make_parser, median_ratio

STEPS = 20
BATCH = 64
RANKS = 2


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Train for one epoch."""
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def plain_loop(x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return an epoch of the loop without growth."""
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def run() -> None:
        epoch(ddp, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            (model(x).argmax(1) == y).float().mean()

    return run


def growing_loop(x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return an epoch of the loop with a grower that plants nothing."""
    body = esper.graft(make_model(), at=["0", "1", "2"], probe=x[:4])
    ddp = DistributedDataParallel(body)
    optimizer = torch.optim.AdamW(body.parameters())
    grower = esper.Grower(body, optimizer, controller="none")

    def run() -> None:
        epoch(ddp, optimizer, x, y)
        grower.step([(x, y)])

    return run


def measure(rank: int, place: str, repeats: int) -> None:
    """Time both loops in turn; rank 0 prints the ratio."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=RANKS)
    rng = torch.Generator().manual_seed(rank)
    x, y = torch.randn(BATCH, 3, 32, 32, generator=rng), torch.randint(10, (BATCH,), generator=rng)
    ratio = median_ratio(growing_loop(x, y), plain_loop(x, y), repeats)
    if rank == 0:
        print(f"DDP epoch with a grower, no live seeds / DDP epoch without growth: {ratio:.3f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Measure in two processes."""
    options = make_parser(__doc__, repeats=15).parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as place:
        spawn(measure, args=(place, options.repeats), nprocs=RANKS)


if __name__ == "__main__":
    main()
