"""Growth under DDP and FSDP2 in two real processes: the same weights as one process with the joint batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import esper
from esper.leyline.stages import Thresholds
from tests.support.ranks import run_ranks

EPOCHS, BATCHES, SIZE = 6, 3, 16
ISOLATED = esper.Rules(
    birth="isolated", thresholds=Thresholds(blend_dwell=0, blend_health=None, fossil_contribution=None),
    one_at_a_time=False, min_prune_age=0,
)  # fmt: skip


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh()),
        nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()),
        nn.Linear(16, 3),
    )


def make_body() -> esper.Body:
    return esper.graft(make_model(), at={"first": "0", "second": "1"}, probe=torch.randn(3, 8))


def batch(number: int, size: int = SIZE) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(number)
    x = torch.randn(size, 8, generator=rng)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()


def share(data: tuple[Tensor, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the samples of this rank."""
    return data[0][rank::size], data[1][rank::size]


def wrapped(body: esper.Body, how: str) -> nn.Module:
    """Return the model to call: the body itself, or wrapped for several processes."""
    if how == "fsdp":
        for block in list(body.model)[:2]:
            fully_shard(block)
        fully_shard(body.model)
    if how in ("alone", "fsdp"):
        return body
    options = {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
    return DDP(body, **options.get(how, {}))


class Loop:
    """A user's training loop over two slots, each planted, blended and committed by hand."""

    def __init__(self, rank: int, size: int, how: str, parts: int = 1, rules: esper.Rules | None = None) -> None:
        self.rank, self.size, self.how, self.parts = rank, size, how, parts
        self.body = make_body()
        self.model = wrapped(self.body, how)
        self.optimizer = torch.optim.Adam(self.body.parameters(), lr=0.01)
        self.grower = esper.Grower(
            self.body, self.optimizer, rules=rules or esper.Rules(thresholds=Thresholds(fossil_contribution=None)),
            controller="schedule" if rules is None else "none", incubation="shadow" if rules else "straight_through",
        )  # fmt: skip

    def backward(self, number: int, between: Callable[[], None] = lambda: None) -> None:
        """Compute the gradients of a batch, in several parts if they are accumulated."""
        for part in range(self.parts):
            x, y = share(batch(number), part * self.size + self.rank, self.parts * self.size)
            is_last = part == self.parts - 1
            with contextlib.nullcontext() if is_last or self.how != "ddp" else self.model.no_sync():
                (F.cross_entropy(self.model(x), y) / self.parts).backward()
            if self.body.incubation == "shadow":
                self.grower.shadow(lambda x=x, y=y: F.cross_entropy(self.body(x), y) / self.parts)
            if not is_last:
                between()

    def epoch(self, number: int) -> tuple[Any, ...]:
        for i in range(BATCHES):
            self.optimizer.zero_grad()
            self.backward(100 * number + i)
            self.grower.clip_grad_norm_(0.5)
            self.optimizer.step()
        report = self.grower.step([share(batch(9000 + b, 32), self.rank, self.size) for b in range(2)])
        return round(report.quality, 6), report.op.name, report.slot, list(report.effects)

    def state(self) -> dict[str, Tensor]:
        return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in self.body.state_dict().items()}


def run(rank: int, size: int, how: str, parts: int = 1, rules: esper.Rules | None = None) -> dict[str, Any]:
    loop = Loop(rank, size, how, parts, rules)
    if rules is not None:
        loop.grower.germinate("first", "mlp" if "mlp" in loop.body.valid_blueprints()["first"] else "lora")
    reports = [loop.epoch(number) for number in range(EPOCHS)]
    return {"state": loop.state(), "reports": reports}


# -- saving and resuming


def epochs_from(loop: Loop, first: int) -> dict[str, Tensor]:
    """Train the rest of the epochs; the last batch of the epoch before is done, but not its growth step."""
    for number in range(first, EPOCHS):
        loop.epoch(number)
    return loop.state()


def save_and_resume(rank: int, how: str, directory: str) -> dict[str, Any]:
    loop = Loop(rank, 2, how)
    for number in range(3):
        loop.epoch(number)
    torch.manual_seed(77 + rank)
    path = loop.grower.save(directory, extra={"epoch": 3})
    numbers = torch.rand(3)
    straight = epochs_from(loop, 3)
    again = Loop(rank, 2, how)
    torch.distributed.barrier()
    extra = again.grower.load(directory)
    return {
        "straight": straight, "rng": torch.equal(numbers, torch.rand(3)), "extra": extra,
        "path": str(path), "state": epochs_from(again, 3),
    }  # fmt: skip


def resume_cases(rank: int, directory: str) -> dict[str, Any]:
    return {how: save_and_resume(rank, how, f"{directory}/{how}") for how in ("ddp", "fsdp")}


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_ranks_resume_bit_for_bit_and_one_process_takes_the_model_home(how: str, resumed: tuple[Any, Path]):
    results, directory = resumed
    assert isinstance(results[0], dict), results
    for result in (r[how] for r in results):
        same_weights(result["straight"], result["state"], 0)
        assert result["rng"]
        assert result["extra"] == {"epoch": 3}
        assert result["path"] == results[0][how]["path"]
    alone = Loop(0, 1, "alone")
    with pytest.warns(UserWarning, match="ranks was 2, is 1"):
        alone.grower.load(directory / how)
    same_weights(epochs_from(alone, 3), results[0][how]["straight"], 2e-5)
    x = batch(5)[0]
    torch.testing.assert_close(esper.harden(alone.body).eval()(x), alone.body.eval()(x))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    directory = tmp_path_factory.mktemp("resumed")
    return run_ranks(resume_cases, str(directory)), directory


CASES: dict[str, tuple[Any, ...]] = {
    "ddp": ("ddp",),
    "accumulation": ("ddp", 2),
    "find_unused_parameters": ("unused",),
    "static_graph": ("static",),
    "shadow passes": ("ddp", 1, ISOLATED),
    "fsdp": ("fsdp",),
    "fsdp with shadow passes": ("fsdp", 1, ISOLATED),
}


def run_cases(rank: int) -> dict[str, Any]:
    return {name: run(rank, 2, *case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(run_cases)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_the_same_weights_as_one_process(case: str, ranks: list[Any]):
    assert isinstance(ranks[0], dict), ranks
    alone = run(0, 1, "alone", *CASES[case][1:])
    first, second = (results[case] for results in ranks)
    same_weights(first["state"], second["state"], 0)
    same_weights(alone["state"], first["state"], 2e-5)
    assert first["reports"] == second["reports"]
    assert alone["reports"] == first["reports"]
    assert any(name.startswith("esper.") for name in alone["state"])


def same_weights(a: dict[str, Tensor], b: dict[str, Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
