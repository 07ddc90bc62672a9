"""Test blending operators, gates, and the isolation of the host from a seed in training."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from esper.kasmina.blueprints.registry import SPATIAL, Layout
from esper.kasmina.slot import MOST_PULL, BlendGate, FeelNothing, PullToZero, blend, detached, straight_through
from esper.leyline.actions import Operator

SHAPE = {
    Layout.MAP: (4, 8, 6, 5),
    Layout.SEQUENCE: (4, 7, 8),
    Layout.VECTOR: (4, 8),
    Layout.BIDIRECTIONAL: (4, 7, 8),
    Layout.SIGNAL: (4, 8, 7),
    Layout.VOLUME: (4, 8, 3, 2, 5),
}
GATE_SHAPE = {
    Layout.MAP: (4, 1, 1, 1),
    Layout.SEQUENCE: (4, 7, 1),
    Layout.VECTOR: (4, 1),
    Layout.BIDIRECTIONAL: (4, 7, 1),
    Layout.SIGNAL: (4, 1, 1),
    Layout.VOLUME: (4, 1, 1, 1, 1),
}
AXIS = {layout: 1 if layout in SPATIAL else -1 for layout in Layout}
every_layout = pytest.mark.parametrize("layout", Layout)
every_operator = pytest.mark.parametrize("operator", Operator, ids=lambda o: o.name)


def features(layout: Layout, seed: int = 0) -> Tensor:
    h = torch.randn(SHAPE[layout], generator=torch.Generator().manual_seed(seed))
    return h.to(memory_format=torch.channels_last) if h.ndim == 4 else h


# Operators


def test_operators_match_their_formulas():
    h, delta = torch.tensor([[2.0, -4.0]]), torch.tensor([[0.5, 1.0]])
    half = torch.tensor(0.5)
    valve = 1 + 0.5 * math.tanh(0.5), 1 + 0.5 * math.tanh(1.0)

    assert blend(h, delta, half, Operator.ADD).tolist() == [[2.25, -3.5]]
    assert blend(h, delta, half * torch.tensor([[0.5]]), Operator.GATE).tolist() == [[2.125, -3.75]]
    expected = torch.tensor([[2 * valve[0], -4 * valve[1]]])
    torch.testing.assert_close(blend(h, delta, half, Operator.MULTIPLY), expected)


@every_layout
@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("delta_dtype", [None, torch.float32], ids=["same", "autocast"])
def test_blend_keeps_dtype_and_memory_format_of_the_host(layout, operator, dtype, delta_dtype):
    h, gate = features(layout).to(dtype), BlendGate(8, layout)
    delta = torch.randn(h.shape).to(delta_dtype or dtype)
    weight = torch.tensor(0.5) * (gate(h.float()) if operator == Operator.GATE else 1.0)
    out = blend(h, delta, weight, operator)
    assert out.dtype == dtype
    assert out.stride() == h.stride()


@every_operator
def test_host_keeps_its_direct_gradient_at_full_alpha(operator):
    h, delta = features(Layout.MAP).requires_grad_(), features(Layout.MAP, 1)
    upstream = torch.randn(h.shape)

    blend(h, delta, torch.tensor(1.0), operator).backward(upstream)

    factor = 1 + delta.tanh() if operator == Operator.MULTIPLY else 1.0
    torch.testing.assert_close(h.grad, upstream * factor)


@settings(deadline=None)
@given(
    h=st.floats(-1e3, 1e3, width=32),
    delta=st.floats(width=32, allow_nan=False),
    alpha=st.floats(0, 1, width=32),
)
def test_multiply_keeps_the_sign_and_at_most_doubles(h, delta, alpha):
    y = blend(torch.tensor([h]), torch.tensor([delta]), torch.tensor(alpha), Operator.MULTIPLY).item()
    assert abs(y) <= 2 * abs(h) * (1 + 1e-6)
    assert y * h >= 0


@every_layout
@every_operator
def test_blend_is_traceable_by_fx(layout, operator):
    class Blend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = BlendGate(8, layout)
            self.register_buffer("alpha", torch.tensor(0.7), persistent=False)

        def forward(self, h: Tensor, delta: Tensor) -> Tensor:
            weight = self.alpha * self.gate(h) if operator == Operator.GATE else self.alpha
            return blend(h, delta, weight, operator)

    module, h, delta = Blend(), features(layout), features(layout, 1)
    assert torch.equal(fx.symbolic_trace(module)(h, delta), module(h, delta))


# BlendGate


@every_layout
def test_gate_starts_mostly_open_and_broadcasts(layout):
    torch.manual_seed(0)
    gate = BlendGate(8, layout)(features(layout))
    assert gate.shape == GATE_SHAPE[layout]
    assert ((gate > 0.8) & (gate < 0.95)).all()


@every_layout
def test_gate_depends_on_its_own_sample_only(layout):
    gate = BlendGate(8, layout)
    h, other = features(layout), features(layout)
    other[1:] += 3
    torch.testing.assert_close(gate(h)[0], gate(other)[0])
    assert not torch.allclose(gate(h)[1:], gate(other)[1:])


def test_sequence_gate_depends_on_its_own_token_only():
    gate = BlendGate(8, Layout.SEQUENCE)
    h, other = features(Layout.SEQUENCE), features(Layout.SEQUENCE)
    other[:, -1] += 3
    assert torch.equal(gate(h)[:, :-1], gate(other)[:, :-1])
    assert not torch.equal(gate(h)[:, -1], gate(other)[:, -1])


# Isolation


def test_straight_through_trains_the_seed_and_not_the_host():
    host, seed = torch.randn(4, 8, requires_grad=True), nn.Linear(8, 8)

    out = straight_through(host, seed(detached(host)), -1)
    out.sum().backward()

    assert torch.equal(out, host)
    assert torch.equal(host.grad, torch.ones_like(host))  # as without a seed
    assert seed.weight.grad.abs().sum() > 0


@settings(deadline=None, max_examples=50)
@given(
    bad=st.sampled_from([math.inf, -math.inf, math.nan, 3e38]),
    where=st.integers(0, 4 * 8 * 6 * 5 - 1),
    layout=st.sampled_from(Layout),
    join=st.sampled_from([FeelNothing.apply, lambda h, delta: straight_through(h, delta, -1)]),
)
def test_inf_and_nan_in_delta_do_not_reach_the_host(bad, where, layout, join):
    first, last = nn.Linear(SHAPE[layout][-1], SHAPE[layout][-1]), torch.randn(SHAPE[layout])
    x = features(layout)

    def host_gradient(with_seed: bool) -> tuple[Tensor, Tensor]:
        h = first(x)
        delta = detached(h) * 1.0
        delta.data.view(-1)[where % delta.numel()] = bad
        out = join(h, delta) if with_seed else h
        return out, torch.autograd.grad((out * last).sum(), first.weight)[0]

    for alone, beside in zip(host_gradient(False), host_gradient(True), strict=True):
        assert torch.equal(alone, beside)


@pytest.mark.parametrize("join", [FeelNothing.apply, lambda h, delta: straight_through(h, delta, -1)])
def test_in_place_operations_after_the_slot_work(join):
    first, seed = nn.Linear(8, 8), nn.Linear(8, 8)
    h = first(torch.randn(4, 8))
    torch.relu_(join(h, seed(detached(h)))).sum().backward()
    assert torch.equal(first.bias.grad, (h > 0).float().sum(0))


# PullToZero: the gradient term that bounds Δ in straight-through training


def pulled_gradient(delta: Tensor, h: Tensor, upstream: Tensor, axis: int = -1) -> Tensor:
    delta = delta.clone().requires_grad_()
    return torch.autograd.grad(PullToZero.apply(delta, h, axis), delta, upstream)[0]


def rms(t: Tensor, layout: Layout = Layout.SEQUENCE) -> Tensor:
    return t.double().square().mean(AXIS[layout], keepdim=True).sqrt()


def test_pull_equals_gradient_where_delta_rms_equals_feature_rms():
    h, grad = torch.tensor([[2.0, -2.0]]), torch.tensor([[3.0, -3.0]])
    for delta, expected in (([1.0, 1.0], [4.5, -1.5]), ([2.0, 2.0], [6.0, 0.0]), ([0.0, 0.0], [3.0, -3.0])):
        assert pulled_gradient(torch.tensor([delta]), h, grad).tolist() == [expected]


@every_layout
def test_straight_through_delta_stays_bounded(layout):
    h, say = features(layout), features(layout, 1)
    reach = rms(h, layout)

    def trained_delta(start: float, lesson) -> Tensor:
        delta = (start * features(layout, 2)).requires_grad_()
        for step in range(400):
            straight_through(h, delta, AXIS[layout]).backward(lesson(step))
            delta = (delta - 0.05 * delta.grad).detach().requires_grad_()
        return delta.detach()

    def constant(_step: int) -> Tensor:
        return say

    def alternating(step: int) -> Tensor:
        return say if step % 2 else -say

    for start in (0.0, 5.0):
        agreed = trained_delta(start, constant)
        torch.testing.assert_close(rms(agreed, layout), reach, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(agreed, -say * (reach / rms(say, layout)).float(), rtol=1e-2, atol=2e-2)
        assert (rms(trained_delta(start, alternating), layout) < 0.1 * reach).all()


@settings(deadline=None, max_examples=50)
@given(layout=st.sampled_from(Layout), size=st.floats(1.01, 1e6), seed=st.integers(0, 99))
def test_delta_larger_than_features_never_grows(layout, size, seed):
    h, upstream = features(layout, seed), features(layout, seed + 100)
    for delta in (features(layout, seed + 200), -upstream):  # the second points radially outwards
        delta = delta * (size * rms(h, layout) / rms(delta, layout)).float()
        outwards = (pulled_gradient(delta, h, upstream, AXIS[layout]) * delta).sum(AXIS[layout])
        assert (outwards > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("h", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("delta", [0.0, 1e-30, 1.0, 1e15])
def test_gradient_with_pull_is_finite_and_bounded(dtype, h, delta):
    delta = torch.full((2, 8), min(delta, torch.finfo(dtype).max), dtype=dtype)
    grad = pulled_gradient(delta, torch.full((2, 8), h, dtype=dtype), torch.ones(2, 8, dtype=dtype))
    assert grad.dtype == dtype
    assert ((grad >= 1) & (grad <= 1 + MOST_PULL)).all()


@every_layout
def test_gradient_with_pull_scales_with_the_loss(layout):
    h, delta, upstream = (features(layout, i) for i in range(3))
    plain = pulled_gradient(delta, h, upstream, AXIS[layout])
    assert torch.equal(pulled_gradient(delta, h, 1024 * upstream, AXIS[layout]), 1024 * plain)  # required by GradScaler


def test_straight_through_compiles_to_one_graph_and_is_exact():
    torch.compiler.reset()
    host, seed = nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def loss(x: Tensor) -> Tensor:
        h = host(x)
        return straight_through(h, seed(detached(h)), -1).square().sum()

    loss(x).backward()
    eager = [p.grad.clone() for p in (*host.parameters(), *seed.parameters())]
    host.zero_grad()
    seed.zero_grad()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(x).backward()
    for before, parameter in zip(eager, (*host.parameters(), *seed.parameters()), strict=True):
        torch.testing.assert_close(parameter.grad, before)
    host.zero_grad()
    host(x).square().sum().backward()
    assert torch.equal(host.weight.grad, eager[0])


CRASH = """
import torch
from torch import nn
from esper.kasmina.slot import detached
first, seed = nn.Conv2d(8, 8, 1), nn.Sequential(nn.GroupNorm(1, 8), nn.Conv2d(8, 8, 3, padding=1))
x = torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last)
for frozen in (False, True):
    first.requires_grad_(not frozen)
    h = first(x)
    seed(detached(h)).square().sum().backward()
    assert h.grad is None and first.weight.grad is None
    assert seed[0].weight.grad.isfinite().all()
"""


def test_detached_features_in_channels_last_do_not_crash_group_norm():
    """Run in a subprocess, because the failure is a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
