"""Test that stacked training equals the loop over environments and that rows are independent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import seeded
from esper.kasmina.slot import Slot
from esper.leyline.actions import Head, Op, Operator
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Rules, legal
from esper.leyline.slot_table import Ints, SlotTable
from esper.leyline.stages import SeedStage, Thresholds
from esper.tolaria.batched_modules import WideSeed
from esper.tolaria.batched_training import BatchedTrainer, can_be_batched, faster_strategy, obstacle_to_batching
from esper.tolaria.engine import Engine, HostNetwork
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.tasks import Task

QUICK = Rules(birth="isolated", thresholds=Thresholds(blend_dwell=1, blend_health=None), min_prune_age=0)
HOSTS = {
    "mlp": {"width": 8, "layers": 3},
    "pixels": {"base": 2, "blocks": 3, "kernel": 1},
    "shapes": {"base": 4, "blocks": 2, "kernel": 3},
}
ODD = {"dots": {"base": 1, "blocks": 2, "kernel": 1}, "vectors": {"width": 37, "layers": 2}}
"""Sizes at which kernels round one row differently from several rows."""


@pytest.fixture
def double() -> Iterator[None]:
    """Use float64, where rounding is far below the effect of an error."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@lru_cache
def task(host: str, dtype: torch.dtype = torch.float32) -> Task:
    noise = torch.Generator().manual_seed(0)
    y = torch.randint(4, (240,), generator=noise)
    shape = (12,) if host in ("mlp", "vectors") else (2, 8, 8)
    x = torch.randn(240, *shape, generator=noise, dtype=torch.float32)
    x.flatten(1)[torch.arange(240), 2 * y] += 2.0
    settings = {
        "batch": 20 if host == "vectors" else 16,
        "batches_per_epoch": 4,
        "lr": 0.05,
        "seed_lr": 0.03,
        "weight_decay": 1e-3,
        "val_size": 20,
    }
    return Task.from_tensors(host, x.to(dtype), y, host_kwargs=(HOSTS | ODD)[host], **settings)


def make_networks(task: Task, worlds: int = 3, **config: object) -> list[HostNetwork]:
    data = task.load_data()
    return [HostNetwork(task, data, world, EngineConfig(**config)) for world in range(worlds)]


def engine(task: Task, worlds: int, *, stacked: bool, **config: object) -> Engine:
    strategy = "stacked" if stacked else "loop"
    return Engine(task, list(range(worlds)), rules=QUICK, config=EngineConfig(strategy=strategy, **config))


def random_legal_or_wait(table: SlotTable, rng: np.random.Generator, envs: list[int] | None = None) -> Ints:
    """Return a random legal action per environment in `envs`; others wait. Draws do not depend on legality."""
    may = legal(table, QUICK)  # [E, O, S]
    actions = np.zeros((len(may), len(Head)), dtype=np.int64)
    for e, ops in enumerate(may):
        draws = rng.integers(1 << 20, size=4)
        may_end = draws[3] % 8 == 0  # so that some seeds reach late stages
        able = [(o, s) for o, s in zip(*np.nonzero(ops), strict=True) if o != Op.WAIT and (may_end or o != Op.PRUNE)]
        if not able or (envs is not None and e not in envs):
            continue
        op, slot = able[draws[0] % len(able)]
        takes = np.nonzero(table.takes[slot])[0]
        actions[e, Head.OP], actions[e, Head.SLOT] = op, slot
        actions[e, Head.BLUEPRINT] = takes[draws[1] % len(takes)] if op == Op.GERMINATE else 0
        actions[e, Head.STYLE] = draws[2] % 3
    return actions


def state(network: HostNetwork) -> list[Tensor]:
    momenta = [
        network.optimizer.state[p]["momentum_buffer"] for p in network.body.parameters() if p in network.optimizer.state
    ]
    tensors = [*network.body.parameters(), *network.body.buffers(), *network.average.average, *momenta]
    return [t.detach().clone() for t in tensors]


def assert_close(one: HostNetwork, other: HostNetwork, tolerance: float) -> None:
    for a, b in zip(state(one), state(other), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def is_same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
@pytest.mark.parametrize("host", HOSTS)
def test_stacked_training_equals_the_loop_under_growth(host: str, incubation: str):
    loop, stack = (
        engine(task(host, torch.float64), 3, stacked=s, incubation=incubation, gradient_telemetry_stride=2)
        for s in (False, True)
    )
    rng, stages = np.random.default_rng(1), set()
    for each in (loop, stack):
        each.plant_fossils(0, {"r0c0": ("norm", Operator.ADD)})
    for step in range(12):
        actions = random_legal_or_wait(loop.table, rng)
        for each in (loop, stack):
            each.step(actions)
            if step == 7:
                each.governor.roll_back(1, each.table)
        assert not loop.alarms + stack.alarms
        np.testing.assert_allclose(stack.table.train_loss, loop.table.train_loss, rtol=1e-9)
        np.testing.assert_allclose(stack.table.grad_norm, loop.table.grad_norm, rtol=1e-5)
        np.testing.assert_allclose(stack.table.grad_health, loop.table.grad_health)
        for one, other in zip(loop.networks, stack.networks, strict=True):
            assert_close(one, other, 1e-8)
            assert one.average.updates == other.average.updates
        stages |= set(loop.table.stage.flatten().tolist())
    assert {SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.FOSSILIZED, SeedStage.PRUNED} <= stages
    assert loop.table.rollbacks.tolist() == [0, 1, 0]


def test_stacked_training_equals_the_loop_in_float32_up_to_rounding():
    one, other = make_networks(task("mlp")), make_networks(task("mlp"))
    stack = BatchedTrainer(other)
    for step in range(5):
        expected = [network.train_epoch(step) for network in one]
        stack.train_epoch([step] * 3)
        torch.testing.assert_close(torch.stack([stack.result(e) for e in range(3)]), torch.stack(expected))
    for a, b in zip(one, other, strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.usefixtures("double")
def test_fossils_are_clipped_with_the_host_and_seeds_separately():
    strict = replace(task("mlp", torch.float64), clip=0.01)
    loop, stack = make_networks(strict), make_networks(strict)
    for networks in (loop, stack):
        for network in networks:
            for name, stage in zip(network.body.slots, (SeedStage.FOSSILIZED, SeedStage.BLENDING), strict=False):
                slot = network.body.plant(name, "mlp_small", rng_seed=network.world)
                network.body.set_slot(slot, stage, 0.7)
                network.optimizer_sync._settle(slot, committed=stage == SeedStage.FOSSILIZED)
            network.average.resync()
            network.regroup()
    together = BatchedTrainer(stack)
    for step in range(3):
        for network in loop:
            network.train_epoch(step)
        together.train_epoch([step] * 3)
    for a, b in zip(loop, stack, strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("host", HOSTS)
def test_growth_in_one_row_keeps_other_rows_bit_identical(host: str):
    quiet, lively = (engine(task(host), 4, stacked=True) for _ in range(2))
    rng, other_rng = np.random.default_rng(2), np.random.default_rng(2)
    for step in range(10):
        quiet.step(random_legal_or_wait(quiet.table, rng, [0, 3]))
        lively.step(random_legal_or_wait(lively.table, other_rng, [0, 1, 3]))
        if step == 6:
            lively.governor.roll_back(1, lively.table)
    assert not is_same(state(quiet.networks[1]), state(lively.networks[1])[: len(state(quiet.networks[1]))])
    for e in (0, 2, 3):
        assert is_same(state(quiet.networks[e]), state(lively.networks[e]))


MAPS = ["conv_small", "conv_light", "conv_heavy", "depthwise", "bottleneck"]
VECTORS = ["lora", "lora_large", "mlp_small", "mlp"]
UNEVEN = [("dots", "conv_small"), ("dots", "depthwise"), ("vectors", "mlp_small")]
"""Seeds run one by one: their matrices are not all 16-byte aligned, so rounding depends on the position."""


def grown(host: str, blueprint: str, rows: list[int], stage: SeedStage) -> list[HostNetwork]:
    """Return four networks, `rows` with a trained seed in the first slot. Even rows multiply, odd rows add."""
    networks = make_networks(task(host), 4)
    for row in rows:
        body = networks[row].body
        slot = body.plant(next(iter(body.slots)), blueprint, operator=Operator(1 - row % 2), rng_seed=row)
        with torch.no_grad(), seeded(row):
            for p in slot.parameters():
                p.add_(0.1 * torch.randn_like(p))
        body.set_slot(slot, stage, 0.7 if stage == SeedStage.BLENDING else 0.0)
        networks[row].optimizer_sync._settle(slot)
        networks[row].average.resync()
        networks[row].regroup()
    return networks


@pytest.mark.parametrize("stage", [SeedStage.TRAINING, SeedStage.BLENDING])
@pytest.mark.parametrize(
    ("host", "blueprint"),
    [
        *((host, b) for host in ("shapes", "pixels", "dots") for b in MAPS),
        *((host, b) for host in ("mlp", "vectors") for b in VECTORS),
    ],
)
def test_equal_seeds_are_stacked_without_changing_results(
    host: str, blueprint: str, stage: SeedStage, monkeypatch: pytest.MonkeyPatch
):
    group_sizes = []

    def counted(self: WideSeed, slots: list[Slot], inputs: list[Tensor]) -> Iterable[Tensor]:
        group_sizes.append(len(slots))
        return together(self, slots, inputs)

    together = WideSeed.__call__
    monkeypatch.setattr(WideSeed, "__call__", counted)
    states = {}
    for rows in ([1], [0, 1], [0, 1, 2, 3]):
        networks = grown(host, blueprint, rows, stage)
        BatchedTrainer(networks).train_epoch([0] * 4)
        assert set(group_sizes) == (set() if (host, blueprint) in UNEVEN else {len(rows)})
        group_sizes.clear()
        states[len(rows)] = [state(networks[row]) for row in rows]
    assert is_same(states[1][0], states[2][1])
    assert is_same(states[1][0], states[4][1])
    assert is_same(states[2][0], states[4][0])  # a seed with the multiply operator
    loop = grown(host, blueprint, [1], stage)[1]
    loop.train_epoch(0)
    for a, b in zip(state(loop), states[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_custom_seeds_are_not_stacked():
    networks = grown("mlp", "mlp_small", [0, 1, 2, 3], SeedStage.BLENDING)
    for network in networks:
        slot = next(iter(network.body.slots.values()))
        assert slot.seed is not None
        assert WideSeed.of(slot, 16) is not None
        assert can_be_batched(network)
        slot.seed = RaisesAtThirdCall(slot.seed)
        assert WideSeed.of(slot, 16) is None
        assert not can_be_batched(network)
    for odd in (nn.Dropout(), nn.BatchNorm1d(8)):
        network = grown("mlp", "mlp_small", [0], SeedStage.BLENDING)[0]
        network.body.slots["r0c0"].seed.append(odd)
        assert not can_be_batched(network)
    network = grown("mlp", "mlp_small", [0], SeedStage.BLENDING)[0]
    network.body.slots["r0c0"].seed[0].register_forward_hook(lambda *_: None)
    assert not can_be_batched(network)


class RaisingBackward(torch.autograd.Function):
    """Function whose backward pass raises."""

    @staticmethod
    def forward(_ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> Tensor:
        raise ArithmeticError("this seed falls backwards")


class RaisingBackwardSeed(nn.Sequential):
    def forward(self, h: Tensor) -> Tensor:
        return RaisingBackward.apply(super().forward(h))


def test_custom_seeds_match_the_loop_and_do_not_affect_other_rows():
    """Cover a seed with dropout, one with buffers, and one that raises in the backward pass."""
    rows = [0, 1, 2, 3]
    networks = {way: grown("mlp", "mlp_small", rows, SeedStage.BLENDING) for way in ("loop", "odd", "plain")}
    for way in ("loop", "odd"):
        for row, part in ((0, nn.Dropout(0.5)), (1, nn.BatchNorm1d(8))):
            networks[way][row].body.slots["r0c0"].seed.append(part)
        slot = networks[way][2].body.slots["r0c0"]
        slot.seed = RaisingBackwardSeed(*slot.seed)
        for network in networks[way][:3]:
            network.optimizer_sync._settle(network.body.slots["r0c0"])
            network.average.resync()
            network.regroup()
    stack = BatchedTrainer(networks["odd"])
    BatchedTrainer(networks["plain"]).train_epoch([0] * 4)
    stack.train_epoch([0] * 4)
    for row in (0, 1):
        assert torch.equal(networks["loop"][row].train_epoch(0), stack.result(row))
        assert is_same(state(networks["loop"][row]), state(networks["odd"][row]))
    with pytest.raises(ArithmeticError, match="falls backwards"):
        stack.result(2)
    assert is_same(state(networks["odd"][3]), state(networks["plain"][3]))


def test_seed_of_another_dtype_fails_only_in_its_row():
    networks = {way: grown("mlp", "mlp_small", [0, 1, 2, 3], SeedStage.BLENDING) for way in ("sound", "odd")}
    stacks = {way: BatchedTrainer(each) for way, each in networks.items()}
    networks["odd"][1].body.slots["r0c0"].seed.double()
    for stack in stacks.values():
        stack.train_epoch([0] * 4)
    with pytest.raises(RuntimeError, match="dtype"):
        stacks["odd"].result(1)
    for row in (0, 2, 3):
        assert is_same(state(networks["sound"][row]), state(networks["odd"][row]))


SHAPES = {"fashion": (14, {"base": 8, "blocks": 2}), "one channel": (8, {"base": 1, "blocks": 2}),
          "one block": (16, {"base": 4, "blocks": 1}), "five": (8, {"base": 5, "blocks": 2})}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_match_the_loop_for_any_host_shape(shape: str):
    size, kwargs = SHAPES[shape]
    noise = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 2, size, size, generator=noise), torch.randint(4, (120,), generator=noise)
    odd = Task.from_tensors(shape, x, y, host_kwargs=kwargs, batch=15, batches_per_epoch=3, lr=0.05, seed_lr=0.05)
    for slot in range(kwargs["blocks"]):
        for blueprint in ("conv_small", "norm", "depthwise"):
            states = {}
            for rows in ([], [2], [1, 2], [0, 1, 2]):
                networks = make_networks(odd)
                for row in rows:
                    place = networks[row].body.plant(list(networks[row].body.slots)[slot], blueprint, rng_seed=row)
                    networks[row].body.set_slot(place, SeedStage.BLENDING, 0.7)
                    networks[row].optimizer_sync._settle(place)
                    networks[row].average.resync()
                    networks[row].regroup()
                if rows == [2]:
                    alone = [HostNetwork(odd, networks[0].data, world, EngineConfig()) for world in range(2)]
                    for network in alone:
                        network.train_epoch(0)
                BatchedTrainer(networks).train_epoch([0] * 3)
                states[len(rows)] = [state(network) for network in networks]
            assert is_same(states[1][2], states[2][2])
            assert is_same(states[1][2], states[3][2])
            assert is_same(states[0][0], states[1][0])
            assert is_same(states[0][0], states[2][0])
            for network, row in zip(alone, states[1], strict=False):
                for a, b in zip(state(network), row, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


class RaisesAtThirdCall(nn.Module):
    def __init__(self, seed: nn.Module) -> None:
        super().__init__()
        self.seed, self.calls = seed, 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("this seed stumbles")
        return self.seed(h)


def test_error_or_nan_stays_in_its_row():
    sound, faulty = make_networks(task("mlp"), 4), make_networks(task("mlp"), 4)
    slot = faulty[1].body.plant("r0c1", "mlp_small")
    faulty[1].body.set_slot(slot, SeedStage.BLENDING, 1.0)
    faulty[1].optimizer_sync._settle(slot)
    faulty[1].average.resync()
    faulty[1].regroup()
    one, other = BatchedTrainer(sound), BatchedTrainer(faulty)
    slot.seed = RaisesAtThirdCall(slot.seed)
    with torch.no_grad():
        faulty[2].body.model.head.bias[0] = torch.nan
    one.train_epoch([0] * 4)
    other.train_epoch([0] * 4)

    with pytest.raises(ArithmeticError, match="stumbles"):
        other.result(1)
    assert other.result(2)[0].isnan()
    for e in (0, 3):
        assert torch.equal(one.result(e), other.result(e))
        assert is_same(state(sound[e]), state(faulty[e]))


def test_training_updates_tensors_in_place():
    networks = make_networks(task("pixels"))
    stack = BatchedTrainer(networks)
    tensors = [
        t
        for network in networks
        for t in (*network.body.parameters(), *network.body.buffers(), *network.average.average)
    ]
    before = [t.detach().clone() for t in tensors]
    stack.train_epoch([0] * 3)
    now = [
        t
        for network in networks
        for t in (*network.body.parameters(), *network.body.buffers(), *network.average.average)
    ]
    assert all(a is b for a, b in zip(tensors, now, strict=True))
    changed = [not torch.equal(a, b) for a, b in zip(before, tensors, strict=True)]
    assert sum(changed) > 0.8 * len(changed)  # alpha does not change


def test_augmented_images_match_the_loop():
    base = task("pixels")
    augmented = replace(base, augment=True, data=replace(base.data, black=(0.0, 0.0)))
    one, other = make_networks(augmented), make_networks(augmented)
    stack = BatchedTrainer(other)
    stack.train_epoch([3] * 3)
    for e, network in enumerate(one):
        torch.testing.assert_close(stack.result(e), network.train_epoch(3))


def test_training_keeps_the_global_rng_state():
    stack = BatchedTrainer(make_networks(task("mlp")))
    before = torch.get_rng_state()
    stack.train_epoch([0] * 3)
    assert torch.equal(before, torch.get_rng_state())


class Mixing(nn.Module):
    """Parameter-free module that mixes channels, and therefore rows of a widened host."""

    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(1, keepdim=True)


def test_unsupported_host_is_rejected():
    mixing, unknown = make_networks(task("pixels")), make_networks(task("pixels"))
    for networks, odd in ((mixing, Mixing()), (unknown, nn.PReLU(2))):
        for network in networks:
            network.body.model.pools[0] = odd
    with pytest.raises(ConfigError, match="stacked outputs differ from those of the single hosts"):
        BatchedTrainer(mixing)
    with pytest.raises(ConfigError, match="PReLU"):
        BatchedTrainer(unknown)


def test_row_mixing_hidden_by_a_zero_head_is_detected():
    networks = make_networks(task("pixels"))
    for network in networks:
        network.body.model.pools[0] = Mixing()
        nn.init.zeros_(network.body.model.head.weight)
    with pytest.raises(ConfigError, match="some outputs depend on the inputs of other hosts"):
        BatchedTrainer(networks)


def test_unsupported_cases_are_reported():
    frozen = make_networks(task("mlp"))
    frozen[2].body.model.head.bias.requires_grad_(False)
    cases = {
        "only one": make_networks(task("mlp"), 1),
        "single samples": make_networks(replace(task("mlp"), batch=1)),
        "AdamW": make_networks(replace(task("mlp"), optimiser="adamw")),
        "frozen": frozen,
    }
    for why, networks in cases.items():
        assert why in obstacle_to_batching(networks)
        assert faster_strategy(networks) == "loop"
        with pytest.raises(ConfigError, match=why):
            BatchedTrainer(networks)


def test_choose_does_not_modify_the_networks():
    networks = make_networks(task("mlp"))
    before, rng = [state(network) for network in networks], torch.get_rng_state()
    assert faster_strategy(networks) in ("loop", "stacked")
    assert all(is_same(a, state(network)) for a, network in zip(before, networks, strict=True))
    assert all(not network.optimizer.state for network in networks)
    assert torch.equal(rng, torch.get_rng_state())


def test_engine_uses_the_configured_strategy_and_loops_for_one_host() -> None:
    for strategy in ("loop", "stacked"):
        assert Engine(task("mlp"), [0, 1], config=EngineConfig(strategy=strategy)).strategy == strategy
    assert Engine(task("mlp"), [0, 1], config=EngineConfig(strategy="auto")).strategy in ("loop", "stacked")
    assert Engine(task("mlp"), [0], config=EngineConfig(strategy="stacked")).strategy == "loop"
    with pytest.raises(ConfigError, match="'loop', 'stacked' or 'auto'"):
        EngineConfig(strategy="fast")
