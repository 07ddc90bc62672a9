"""Test the laws of seeds for every blueprint × layout × operator, and the blueprint registry."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from esper.kasmina.blueprints import (
    Cost,
    blueprint,
    blueprint_index,
    blueprint_name,
    blueprints_for,
    build,
    check,
    cost,
    unregister,
)
from esper.kasmina.blueprints.builtin import CausalAttention, flex_causal, group_norm, transformer_block
from esper.kasmina.blueprints.registry import FeatureSpec, Layout
from esper.kasmina.slot import BlendGate, blend, detached
from esper.leyline.actions import BLUEPRINTS, Operator
from esper.leyline.errors import BlueprintError, UnknownNameError

MAPS = ("conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy")
SEQUENCES = ("attention", "norm", "lora", "lora_large", "mlp_small", "mlp", "flex_attention")
VECTORS = ("norm", "lora", "lora_large", "mlp_small", "mlp")

SITE = {
    Layout.MAP: FeatureSpec(Layout.MAP, 8, (8, 6, 5)),
    Layout.SEQUENCE: FeatureSpec(Layout.SEQUENCE, 12, (7, 12)),
    Layout.VECTOR: FeatureSpec(Layout.VECTOR, 12, (12,)),
    Layout.BIDIRECTIONAL: FeatureSpec(Layout.BIDIRECTIONAL, 12, (7, 12)),
    Layout.SIGNAL: FeatureSpec(Layout.SIGNAL, 8, (8, 9)),
    Layout.VOLUME: FeatureSpec(Layout.VOLUME, 8, (8, 3, 4, 5)),
}
SEEDS = [(n, Layout.MAP) for n in MAPS] + [(n, Layout.SEQUENCE) for n in SEQUENCES]
SEEDS += [(n, Layout.VECTOR) for n in VECTORS] + [(n, Layout.BIDIRECTIONAL) for n in (*VECTORS, "attention")]
SEEDS += [(n, layout) for n in MAPS for layout in (Layout.SIGNAL, Layout.VOLUME)]
every_seed = pytest.mark.parametrize(("name", "layout"), SEEDS, ids=[f"{n}-{s}" for n, s in SEEDS])
every_operator = pytest.mark.parametrize("operator", Operator, ids=lambda o: o.name)
channels_last = torch.channels_last


def features(site: FeatureSpec, batch: int = 16, seed: int = 0) -> Tensor:
    """Return features as after a ReLU: non-negative, half of them zero. Maps are channels_last, as in the hosts."""
    h = torch.randn(batch, *site.shape, generator=torch.Generator().manual_seed(seed)).relu()
    return h.to(memory_format=channels_last) if h.ndim == 4 else h


def grown(name: str, site: FeatureSpec) -> nn.Module:
    """Return a seed whose weights are all non-zero, as after training."""
    seed = build(name, site, rng_seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    return seed


@pytest.fixture
def mine():
    yield "mine"
    unregister("mine")


# Laws


@every_seed
@every_operator
def test_germination_keeps_features_bit_identical(name, layout, operator):
    site = SITE[layout]
    seed, gate = build(name, site, rng_seed=0), BlendGate(site.dim, layout)
    h = torch.randn(4, *site.shape)

    delta = seed(h)
    check(seed, site, name=name)

    assert delta.count_nonzero() == 0
    for alpha in (0.0, 0.3, 1.0):
        weight = torch.tensor(alpha) * (gate(h) if operator == Operator.GATE else 1.0)
        assert torch.equal(blend(h, delta, weight, operator), h)


@every_seed
@every_operator
def test_all_parameters_change_within_three_steps(name, layout, operator):
    assert_learns(name, SITE[layout], operator, least_part=0.5)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dim", [2, 8, 16])
def test_seed_on_a_one_pixel_map_learns(name, dim):
    assert_learns(name, FeatureSpec(Layout.MAP, dim, (dim, 1, 1)), Operator.ADD, least_part=0.0)


def assert_learns(name: str, site: FeatureSpec, operator: Operator, *, least_part: float) -> None:
    torch.manual_seed(0)
    seed, gate, h = build(name, site, rng_seed=3), BlendGate(site.dim, site.layout), detached(features(site))
    target = torch.randn(h.shape)
    parts = nn.ModuleList([seed, gate] if operator == Operator.GATE else [seed])
    at_birth = {key: p.detach().clone() for key, p in parts.named_parameters()}
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.5)

    for _ in range(3):
        weight = gate(h) if operator == Operator.GATE else torch.tensor(1.0)
        loss = (blend(h, seed(h), weight, operator) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for key, parameter in parts.named_parameters():
        moved = (parameter != at_birth[key]).float().mean().item()
        assert moved > least_part, f"{key}: only {moved:.0%} moved"
        assert parameter.isfinite().all()


@every_seed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_seed_keeps_shape_dtype_and_memory_format(name, layout, dtype):
    site = SITE[layout]
    seed = grown(name, site).to(dtype)
    for h in (torch.randn(3, *site.shape, dtype=dtype), features(site, 3).to(dtype)):
        delta = seed(h)
        assert (delta.shape, delta.dtype) == (h.shape, dtype)
        assert delta.stride() == h.stride()


@every_seed
def test_traced_seed_is_plain_torch_and_equal(name, layout):
    seed, h = grown(name, SITE[layout]), features(SITE[layout])
    traced = fx.symbolic_trace(seed)

    assert torch.equal(traced(h), seed(h))
    parts = [part for part in traced.modules() if part is not traced]
    assert all(type(part).__module__.startswith("torch.") for part in parts)
    assert traced(h[:3]).shape == h[:3].shape  # the batch size is not a constant of the graph


@every_seed
def test_seed_compiles_to_one_graph(name, layout):
    torch.compiler.reset()
    seed, h = grown(name, SITE[layout]), features(SITE[layout])
    torch.testing.assert_close(torch.compile(seed, fullgraph=True, backend="eager")(h), seed(h))


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("cut", [1, 4, 6])
def test_sequence_seeds_and_gates_are_causal(name, cut):
    site = SITE[Layout.SEQUENCE]
    seed, gate = grown(name, site), BlendGate(site.dim, site.layout)
    h, other = features(site, seed=1), features(site, seed=1)
    other[:, cut:] = 7.0

    assert torch.equal(seed(h)[:, :cut], seed(other)[:, :cut])
    assert torch.equal(gate(h)[:, :cut], gate(other)[:, :cut])
    assert not torch.equal(seed(h)[:, cut:], seed(other)[:, cut:])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_plain_attention():
    q, k, v = torch.randn(3, 2, 4, 150, 16).unbind(0)  # longer than one block of 128
    plain = CausalAttention(64).attend(q, k, v)
    with torch.no_grad():
        torch.testing.assert_close(flex_causal(q, k, v), plain)


@every_operator
def test_transformer_block_meets_the_blueprint_contract(mine, operator):
    blueprint(mine, layouts="sequence")(transformer_block)
    test_germination_keeps_features_bit_identical(mine, Layout.SEQUENCE, operator)
    test_all_parameters_change_within_three_steps(mine, Layout.SEQUENCE, operator)
    test_sequence_seeds_and_gates_are_causal(mine, cut=4)
    test_traced_seed_is_plain_torch_and_equal(mine, Layout.SEQUENCE)


def test_transformer_block_equals_attention_and_mlp_with_residuals():
    block = transformer_block(12)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    h = features(SITE[Layout.SEQUENCE])
    x = h + block.attention(block.norm1(h))
    x = x + block.mlp(block.norm2(x))
    torch.testing.assert_close(h + block(h), x)


@pytest.mark.parametrize("layout", Layout)
def test_noop_returns_zero_and_costs_zero(layout):
    noop = build("noop", SITE[layout])
    check(noop, SITE[layout])
    assert torch.equal(noop(features(SITE[layout])), torch.zeros(16, *SITE[layout].shape))
    assert cost("noop", SITE[layout]) == Cost(params=0, macs=0)


def test_attention_of_a_bidirectional_model_sees_later_tokens():
    site = SITE[Layout.BIDIRECTIONAL]
    seed, h, other = grown("attention", site), features(site, seed=1), features(site, seed=1)
    other[:, 4:] = 7.0
    assert not torch.allclose(seed(h)[:, :4], seed(other)[:, :4])


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize(("swapped", "shape", "batch_axis"), [((0, 1), (7, 12), 1), ((1, 2), (12, 7), 0)])
def test_seed_at_swapped_axes_equals_the_seed_of_a_sequence(name, swapped, shape, batch_axis):
    site = FeatureSpec(Layout.SEQUENCE, 12, shape, batch_axis=batch_axis, swapped=swapped)
    h = features(SITE[Layout.SEQUENCE], 5)
    seed, plain = grown(name, site), grown(name, SITE[Layout.SEQUENCE])
    check(build(name, site, rng_seed=0), site)
    assert torch.equal(seed(h.transpose(*swapped)).transpose(*swapped), plain(h))
    assert cost(name, site) == cost(name, SITE[Layout.SEQUENCE])
    traced = fx.symbolic_trace(seed)
    assert torch.equal(traced(h.transpose(*swapped)), seed(h.transpose(*swapped)))


def test_own_blueprint_for_sequences_also_serves_bidirectional_models(mine):
    blueprint(mine, layouts="sequence")(transformer_block)
    assert mine in blueprints_for(Layout.BIDIRECTIONAL)
    check(build(mine, SITE[Layout.BIDIRECTIONAL], rng_seed=0), SITE[Layout.BIDIRECTIONAL])


def test_own_blueprint_for_bidirectional_models_is_not_offered_to_causal_ones(mine):
    blueprint(mine, layouts="bidirectional")(transformer_block)
    assert mine in blueprints_for(Layout.BIDIRECTIONAL)
    assert mine not in blueprints_for(Layout.SEQUENCE)


# Sizes


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("noop", (0, 0, 0, 0)),
        ("norm", (17, 33, 65, 129)),
        ("attention", (40, 144, 544, 2112)),
        ("conv_small", (80, 288, 1088, 4224)),
        ("bottleneck", (720, 864, 1152, 4480)),
        ("depthwise", (152, 432, 1376, 4800)),
        ("conv_light", (592, 2336, 9280, 36992)),
        ("conv_heavy", (1184, 4672, 18560, 73984)),
    ],
)
def test_map_blueprints_have_documented_sizes(name, sizes):
    sites = [FeatureSpec(Layout.MAP, c, (c, 4, 4)) for c in (8, 16, 32, 64)]
    assert tuple(cost(name, site).params for site in sites) == sizes
    assert tuple(sum(p.numel() for p in build(name, site).parameters()) for site in sites) == sizes


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("norm", 769),
        ("lora", 6_144),
        ("lora_large", 24_576),
        ("attention", 591_360),
        ("flex_attention", 591_360),
        ("mlp_small", 590_976),
        ("mlp", 1_181_568),
    ],
)
def test_sequence_blueprints_have_documented_sizes(name, size):
    assert cost(name, FeatureSpec(Layout.SEQUENCE, 384, (16, 384))).params == size


def test_multiply_adds_match_hand_computed_values():
    site = FeatureSpec(Layout.MAP, 8, (8, 6, 5))
    assert cost("conv_light", site).macs == 9 * 8 * 8 * 30
    assert cost("depthwise", site).macs == (9 * 8 + 8 * 8) * 30
    assert cost("lora", FeatureSpec(Layout.VECTOR, 12, (12,))).macs == 2 * 8 * 12
    assert cost("attention", FeatureSpec(Layout.SEQUENCE, 12, (7, 12))).macs == 7 * 4 * 12 * 12 + 2 * 7 * 7 * 12


@given(dim=st.integers(1, 600))
def test_group_norm_groups_divide_channels_and_hold_at_least_16(dim):
    norm = group_norm(dim)
    assert dim % norm.num_groups == 0
    assert norm.num_groups == 1 or dim // norm.num_groups >= 16


@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(MAPS),
    dim=st.integers(2, 40),
    height=st.integers(1, 5),
    width=st.integers(1, 5),
)
def test_map_seeds_pass_check_at_any_width_and_size(name, dim, height, width):
    site = FeatureSpec(Layout.MAP, dim, (dim, height, width))
    seed = build(name, site)
    check(seed, site)
    assert cost(name, site).params == sum(p.numel() for p in seed.parameters())


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("dim", [1, 2, 3, 10])
def test_sequence_seeds_pass_check_at_any_width(name, dim):
    site = FeatureSpec(Layout.SEQUENCE, dim, (5, dim))
    check(build(name, site), site)


# Registry


def test_blueprint_indices_match_leyline(mine):
    assert [blueprint_name(i) for i in range(len(BLUEPRINTS))] == list(BLUEPRINTS)
    assert all(blueprint_index(name) == i for i, name in enumerate(BLUEPRINTS))

    blueprint(mine, layouts=("map",))(lambda _: nn.Identity())
    assert blueprint_index(mine) == len(BLUEPRINTS)
    assert blueprint_name(len(BLUEPRINTS)) == mine


def test_blueprints_for_returns_those_of_the_layout():
    assert set(blueprints_for("map")) == set(MAPS)
    assert set(blueprints_for(Layout.SEQUENCE)) == set(SEQUENCES)
    assert set(blueprints_for(Layout.VECTOR)) == set(VECTORS)
    assert blueprints_for("map") == sorted(MAPS, key=BLUEPRINTS.index)


def test_rng_seed_sets_weights_without_global_rng_state():
    site = SITE[Layout.MAP]
    before = torch.get_rng_state()
    one, same, other = (build("conv_heavy", site, rng_seed=s).state_dict() for s in (1, 1, 2))
    cost("conv_heavy", FeatureSpec(Layout.MAP, 24, (24, 3, 3)))

    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["2.weight"], other["2.weight"])


def test_unknown_name_or_layout_error_suggests_a_fix():
    with pytest.raises(UnknownNameError, match="Did you mean 'conv_light'"):
        build("conv_lite", SITE[Layout.MAP])
    with pytest.raises(BlueprintError, match=r"serves sequence, vector, bidirectional, not map.*take: conv_light"):
        build("lora", SITE[Layout.MAP])
    with pytest.raises(UnknownNameError, match="no layout named 'maps'"):
        blueprint("mine", layouts=("maps",))
    with pytest.raises(UnknownNameError, match="99"):
        blueprint_name(99)


# Custom blueprints


def zero_conv(dim: int) -> nn.Conv2d:
    layer = nn.Conv2d(dim, dim, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def test_custom_blueprint_is_built_and_costed(mine):
    @blueprint(mine, layouts="map")
    def recipe(dim: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1), nn.ReLU(), zero_conv(dim))

    site = SITE[Layout.MAP]
    check(build(mine, site), site, name=mine)
    assert_learns(mine, site, Operator.ADD, least_part=0.5)
    assert blueprints_for("map")[-1] == mine
    assert cost(mine, site) == Cost(params=9 * 64 + 8 + 64 + 8, macs=10 * 64 * 30)
    assert recipe(4)[2].out_channels == 4  # the decorator returns the function unchanged


def test_cost_works_when_the_recipe_reads_tensor_values(mine):
    @blueprint(mine, layouts="map")
    def recipe(dim: int) -> nn.Module:
        return zero_conv(dim) if torch.ones(1).item() else nn.Identity()

    assert cost(mine, SITE[Layout.MAP]) == Cost(params=72, macs=64 * 30)


def test_duplicate_registration_is_rejected_for_all_layouts(mine):
    blueprint(mine, layouts=("map",))(zero_conv)
    with pytest.raises(BlueprintError, match="blueprint 'mine' is already registered for map"):
        blueprint(mine, layouts=("vector", "map"))(zero_conv)
    assert mine not in blueprints_for("vector")
    with pytest.raises(BlueprintError, match="built in"):
        unregister("norm")


class InPlace(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.last = zero_conv(dim)

    def forward(self, h: Tensor) -> Tensor:
        return self.last(h.relu_())


class Pair(InPlace):
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, h


class Widening(InPlace):
    def forward(self, h: Tensor) -> Tensor:
        return self.last(h).double()


class NotANumber(InPlace):
    def forward(self, h: Tensor) -> Tensor:
        return self.last(h) * torch.inf


class Frozen(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return torch.zeros_like(h)


@pytest.mark.parametrize(
    ("seed", "reason"),
    [
        (nn.Conv2d(8, 8, 3), "the shape and dtype of the features"),
        (Widening(8), "torch.float64"),
        (nn.Conv2d(8, 8, 1), "Δ is not zero at birth"),
        (nn.Identity(), "Return the change, not h"),
        (NotANumber(8), "Δ is not zero at birth"),
        (nn.Conv2d(5, 8, 1), "forward fails with RuntimeError"),
        (Pair(8), "returns tuple"),
        (InPlace(8), "writes into its input"),
        (Frozen(), "no trainable parameters"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_check_rejects_invalid_seed_with_the_reason(seed, reason):
    with pytest.raises(BlueprintError, match=reason):
        check(seed, SITE[Layout.MAP])


def test_recipe_must_return_a_module(mine):
    blueprint(mine, layouts="map")(lambda _: torch.relu)
    with pytest.raises(BlueprintError, match=r"must return an nn\.Module"):
        build(mine, SITE[Layout.MAP])


def test_check_does_not_modify_the_seed():
    seed = nn.Sequential(nn.BatchNorm2d(8), nn.Dropout(), zero_conv(8))
    seed[1].eval()
    before = copy.deepcopy(seed.state_dict())
    check(seed, SITE[Layout.MAP])
    assert [part.training for part in seed] == [True, False, True]
    assert all(torch.equal(value, before[key]) for key, value in seed.state_dict().items())
