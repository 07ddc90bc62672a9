"""Growth under DDP and FSDP2 in two real processes: the same weights as one process with the joint batches."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import esper
from esper.leyline.errors import ConfigError
from esper.leyline.stages import Thresholds
from tests.support import ROOT
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

    def __init__(
        self, rank: int, size: int, how: str, parts: int = 1, rules: esper.Rules | None = None, lr: float = 0.0
    ) -> None:
        self.rank, self.size, self.how, self.parts = rank, size, how, parts
        self.body = make_body()
        self.model = wrapped(self.body, how)
        params = self.body.parameters()
        self.optimizer = torch.optim.SGD(params, lr) if lr else torch.optim.Adam(params, lr=0.01)
        self.grower = esper.Grower(
            self.body, self.optimizer, rules=rules or esper.Rules(thresholds=Thresholds(fossil_contribution=None)),
            controller="schedule" if rules is None else "none", incubation="shadow" if rules else "straight_through",
            process_group=None if size > 1 else False,
        )  # fmt: skip

    def backward(self, number: int, between: Callable[[], None] = lambda: None) -> None:
        """Compute the gradients of a batch, in several parts if they are accumulated."""
        for part in range(self.parts):
            x, y = share(batch(number), self.rank * self.parts + part, self.parts * self.size)
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
def test_ranks_resume_bit_for_bit_and_one_process_hardens_the_model(how: str, resumed: tuple[Any, Path]):
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


# -- ranks that differ


def error_of(call: Callable[[], Any]) -> str:
    """Return what the call raises, as "Type: message"; "" if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing_quality(rank: int) -> list[str]:
    """Rank 1's quality fails once; both ranks can then repeat the step."""
    loop = Loop(rank, 2, "ddp")
    data = [share(batch(9000), rank, 2)]
    right = loop.grower.quality
    if rank == 1:
        loop.grower.quality = lambda output, target: output.sum()
    first = error_of(lambda: loop.grower.step(data))
    loop.grower.quality = right
    return [first, error_of(lambda: loop.grower.step(data))]


def failing_controller(rank: int) -> list[str]:
    loop = Loop(rank, 2, "ddp")
    loop.grower.controller.act = lambda table, legal: [0]
    return [error_of(loop.grower.step)]


def different_operations(rank: int) -> list[str]:
    loop = Loop(rank, 2, "ddp")
    return [error_of(lambda: loop.grower.germinate(["first", "second"][rank], "lora"))]


def different_calls(rank: int) -> list[str]:
    loop = Loop(rank, 2, "ddp")
    return [error_of(loop.grower.step if rank else lambda: loop.grower.germinate("first", "lora"))]


def different_rng_seeds(rank: int) -> list[str]:
    body = make_body()
    DDP(body)
    grower = esper.Grower(body, torch.optim.Adam(body.parameters()), rng_seed=rank, controller="none")
    return [error_of(lambda: grower.germinate("first", "lora"))]


def not_wrapped(rank: int) -> list[str]:
    loop = Loop(rank, 2, "alone")
    return [error_of(lambda: loop.epoch(0))]


def clipped_globally(rank: int) -> list[str]:
    loop = Loop(rank, 2, "ddp")
    loop.grower.germinate("first", "lora")
    for number in range(3):
        loop.optimizer.zero_grad()
        loop.backward(number)
        nn.utils.clip_grad_norm_(loop.body.parameters(), 0.01)
        loop.optimizer.step()
    return [error_of(loop.grower.step)]


def loss_is_nan(rank: int) -> list[str]:
    """A NaN on one rank reaches all, as under DDP without growth; the ranks stay in step."""
    loop = Loop(rank, 2, "ddp")
    loop.grower.germinate("first", "lora")
    loop.backward(0)
    (loop.model(batch(1)[0]).sum() * (float("nan") if rank else 1.0)).backward()
    loop.optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in loop.body.parameters()])
    return [error_of(loop.grower.step), str(bool(weights.isnan().all()))]


def uneven_batches(rank: int) -> list[str]:
    """The last batch and the validation set have other sizes on rank 1; rank 0 alone gives batches the second time."""
    loop = Loop(rank, 2, "ddp")
    loop.grower.germinate("first", "lora")
    F.cross_entropy(loop.model(batch(rank, 5 - 2 * rank)[0]), batch(rank, 5 - 2 * rank)[1]).backward()
    loop.optimizer.step()
    first = loop.grower.step([batch(rank, 6 - 2 * rank)])
    x, y = batch(0, 6)
    x2, y2 = batch(1, 4)
    joint = (loop.body.eval()(torch.cat([x, x2])).argmax(1) == torch.cat([y, y2])).float().mean()
    second = loop.grower.step([batch(3)] if rank == 0 else None)
    same_data = loop.grower.step([batch(3)])
    return [f"{first.quality - float(joint):.6f}", f"{second.quality - same_data.quality:.6f}"]


def growth_between_parts(rank: int) -> list[str]:
    """A seed is planted between two parts of an accumulated batch."""
    loop = Loop(rank, 2, "ddp", parts=2, lr=1.0)
    loop.backward(0, lambda: loop.grower.germinate("first", "lora"))
    loop.optimizer.step()
    alone = Loop(0, 1, "alone", parts=2, lr=1.0)
    alone.backward(0, lambda: alone.grower.germinate("first", "lora"))
    alone.optimizer.step()
    same_weights(alone.state(), loop.state(), 1e-5)
    return [error_of(loop.grower.step)]


def step_with_closure(rank: int) -> list[str]:
    """Lightning and others compute gradients in a closure that they give to the optimiser's step."""
    loop = Loop(rank, 2, "ddp")
    loop.grower.germinate("first", "lora")

    def closure() -> float:
        loop.optimizer.zero_grad()
        loop.backward(0)
        return 1.5

    losses = [loop.optimizer.step(closure), loop.optimizer.step(closure=closure)]
    return [error_of(loop.grower.step), str(losses)]


def overflow_on_one_rank(rank: int) -> list[str]:
    """Only the seed's gradient overflows, and only on rank 1: both ranks skip the step."""
    loop = Loop(rank, 2, "ddp")
    loop.grower.germinate("first", "lora")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop.backward(0)
    if rank:
        next(p for p in loop.body.slots["first"].parameters() if p.grad is not None).grad.fill_(float("inf"))
    scaler.scale(torch.ones(()))
    loop.grower.sync_gradients()
    scaler.step(loop.optimizer)
    scaler.update()
    return [str(scaler.get_scale()), error_of(loop.grower.step)]


def r2_of_all_ranks(rank: int) -> list[str]:
    loop = Loop(rank, 2, "ddp")
    loop.grower.quality = "r2"
    x = batch(0, 10)[0]
    y = torch.arange(30.0).view(10, 3) * x[:, :3]
    quality = loop.grower.step([(x[:7], y[:7]) if rank else (x[7:], y[7:])]).quality
    prediction = loop.body.eval()(x).detach()
    expected = 1 - float((prediction - y).square().mean() / y.var(0, correction=0).mean())
    return [f"{quality - expected:.4f}"]


def uneven_shards(rank: int) -> list[str]:
    """With FSDP2 ranks that evaluate different batches would wait for each other."""
    loop = Loop(rank, 2, "fsdp")
    sizes = error_of(lambda: loop.grower.step([batch(0, 6 + rank)]))
    counts = error_of(lambda: loop.grower.step([batch(i) for i in range(1 + rank)]))
    none = error_of(lambda: loop.grower.step([batch(0)] if rank else None))
    return [sizes, counts, none, error_of(lambda: loop.grower.step([batch(rank)]))]


def mixed_precision(rank: int) -> list[str]:
    """FSDP2 computes in bfloat16 from weights in float32; seeds do the same."""
    body = make_body()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in list(body.model)[:2]:
        fully_shard(block, mp_policy=policy)
    fully_shard(body.model, mp_policy=policy)
    optimizer = torch.optim.Adam(body.parameters(), lr=0.01)
    grower = esper.Grower(body, optimizer, rules=esper.Rules(one_at_a_time=False), controller="none")
    grower.germinate("first", "lora")
    grower.germinate("second", "lora", style="GATED_GATE")
    for number in range(2):
        x, y = share(batch(number), rank, 2)
        F.cross_entropy(body(x).float(), y).backward()
        optimizer.step()
    seeds = [p for slot in body.slots.values() for p in slot.parameters()]
    grads = all(p.grad is not None and p.grad.isfinite().all() for p in seeds)
    return [error_of(lambda: grower.step([share(batch(9), rank, 2)])), str({p.dtype for p in seeds}), str(bool(grads))]


DIFFERENCES: dict[Callable[[int], list[str]], tuple[list[str], list[str]]] = {
    failing_quality: (
        [r"RanksDifferError: rank 1 failed in grower.step\(\) of epoch 0: ConfigError: a quality is one score", ""],
        ["ConfigError: a quality is one score per sample", ""],
    ),
    failing_controller: (
        ["ConfigError: a controller's act returns"],
        ["RanksDifferError: rank 0 failed in grower.step.*a controller's act returns"],
    ),
    different_operations: (
        ["rank 0 grower.germinate\\('first', …\\), rank 1 grower.germinate\\('second', …\\). Make the same calls"],
    )
    * 2,
    different_calls: (["rank 0 grower.germinate\\('first', …\\), rank 1 grower.step\\(\\) of epoch 0. Make"],) * 2,
    different_rng_seeds: (["differs between rank 0 and rank 1. Wrap .* the same rng_seed"],) * 2,
    not_wrapped: (["differs between rank 0 and rank 1. Wrap the body in DDP"],) * 2,
    clipped_globally: (["differs between rank 0 and rank 1.* by grower.clip_grad_norm_"],) * 2,
    loss_is_nan: (["", "True"],) * 2,
    uneven_batches: (["-?0.000000", "-?0.000000"],) * 2,
    growth_between_parts: ([""],) * 2,
    step_with_closure: (["", r"\[1.5, 1.5\]"],) * 2,
    overflow_on_one_rank: (["2.0", ""],) * 2,
    r2_of_all_ranks: (["-?0.0000"],) * 2,
    mixed_precision: (["", "{torch.float32}", "True"],) * 2,
    uneven_shards: ([r"of \[6, 7\] samples", r"of \[0, 16\] samples", r"of \[0, 16\] samples", ""],) * 2,
}


def run_differences(rank: int) -> dict[str, list[str]]:
    results = {}
    for case in DIFFERENCES:
        try:
            results[case.__name__] = case(rank)
        except Exception as error:
            results[case.__name__] = [f"{type(error).__name__}: {error}"]
    return results


@pytest.fixture(scope="module")
def differences() -> list[Any]:
    return run_ranks(run_differences)


@pytest.mark.parametrize("case", DIFFERENCES, ids=lambda case: case.__name__)
def test_ranks_that_differ_are_answered_on_all_ranks(case: Callable[[int], list[str]], differences: list[Any]):
    assert isinstance(differences[0], dict), differences
    for expected, result in zip(DIFFERENCES[case], differences, strict=True):
        texts = result[case.__name__]
        assert len(texts) == len(expected)
        for pattern, text in zip(expected, texts, strict=True):
            assert re.search(pattern, text) if pattern else text == "", (pattern, text)


def killed_in_growth(rank: int) -> list[str]:
    loop = Loop(rank, 2, "ddp")
    loop.epoch(0)

    def quality(output: Tensor, target: Tensor) -> Tensor:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return (output.argmax(1) == target).float()

    loop.grower.quality = quality
    return [error_of(lambda: loop.epoch(1))]


def test_rank_killed_in_mid_growth_ends_the_other():
    first, second = run_ranks(killed_in_growth)
    assert second == "exit code -9"
    assert "RankLostError: the connection to another rank was lost during grower.step() of epoch 1" in first[0]


def one_step_more(rank: int) -> list[str]:
    loop = Loop(rank, 2, "ddp")
    loop.epoch(0)
    return [error_of(loop.grower.step)] if rank else []


@pytest.mark.slow
def test_rank_that_makes_more_steps_than_the_others_ends():
    first, second = run_ranks(one_step_more)
    assert first == []
    assert "RankLostError: the connection to another rank was lost during grower.step() of epoch 1" in second[0]


def saved_by_rank_0(rank: int, directory: str) -> list[Any]:
    loop = Loop(rank, 2, "ddp")
    loop.grower.germinate("first", "lora")
    loop.epoch(0)
    if rank == 0:
        loop.grower.save(directory)
    torch.distributed.barrier()
    again = Loop(rank, 2, "ddp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again.grower.load(directory)
    same_weights(loop.state(), again.state(), 0)
    return [str(w.message) for w in caught]


@pytest.mark.slow
def test_checkpoint_saved_by_rank_0_only_loads_on_all_ranks(tmp_path: Path):
    first, second = run_ranks(saved_by_rank_0, str(tmp_path / "saved"))
    assert first == []
    assert len(second) == 1
    assert "has no state of rank 1" in second[0]


def test_grower_built_before_the_process_group_is_refused(monkeypatch: pytest.MonkeyPatch):
    loop = Loop(0, 2, "alone")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    with pytest.raises(ConfigError, match="after the grower was built"):
        loop.grower.step()
    loop.backward(0)
    with pytest.raises(ConfigError, match="process_group=False"):
        loop.optimizer.step()


@pytest.mark.slow
def test_example_with_ddp_is_short_and_runs(tmp_path: Path):
    example = ROOT / "examples" / "grow_with_ddp.py"
    assert len(example.read_text().splitlines()) <= 40
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*torchrun, str(example)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("build") == 2
    assert float(done.stdout.split()[-1]) > 0.4
    assert {"ddp", "ddp-rank1"} <= {path.name for path in (tmp_path / "runs").iterdir()}
