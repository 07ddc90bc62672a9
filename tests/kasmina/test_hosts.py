"""Test the built-in hosts: sizes, sites, tracing, export, compilation and input checks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprints_for
from esper.kasmina.graft import graft
from esper.kasmina.hosts import HOSTS, CNNHost, Host, MLPHost, ResidualCNNHost, TransformerHost
from esper.leyline.actions import Operator
from esper.leyline.errors import ConfigError
from esper.leyline.stages import SeedStage
from esper.tolaria.host_costs import host_macs_and_order
from tests.support.models import perturb

KINDS = [*HOSTS, "embedding"]
TOKENS = torch.randint(0, 31, (3, 8), generator=torch.Generator().manual_seed(0))


def tiny(kind: str) -> tuple[Host, Tensor]:
    torch.manual_seed(0)
    if kind == "cnn":
        return CNNHost(in_channels=3, classes=10, base=4, blocks=3, pools=2), torch.randn(3, 3, 16, 16)
    if kind == "mlp":
        return MLPHost(inputs=12, classes=5, width=16, layers=2), torch.randn(3, 12)
    if kind == "resnet":
        return ResidualCNNHost(in_channels=3, classes=10, base=4, stages=3, blocks=2), torch.randn(3, 3, 9, 9)
    if kind == "embedding":
        return TransformerHost(vocab=31, dim=16, heads=2, layers=0, block_size=8, segments=None), TOKENS
    host = TransformerHost(vocab=31, dim=16, heads=2, layers=4, block_size=8, segments=2, dropout=0.1)
    return host, TOKENS


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


CNN_SIZES = [
    ({"base": 8, "blocks": 3}, 6_418),
    ({"base": 8, "blocks": 5}, 99_922),
    ({"base": 1, "blocks": 3, "kernel": 1}, 77),
    ({"base": 2, "blocks": 3, "kernel": 1, "pools": 0}, 164),
    ({"base": 16, "blocks": 3}, 24_346),
    ({"base": 2, "blocks": 5, "kernel": 1}, 1_140),
]


@pytest.mark.parametrize(("kwargs", "expected"), CNN_SIZES)
def test_cnn_host_has_the_reference_size(kwargs, expected):
    assert size(CNNHost(in_channels=3, classes=10, **kwargs)) == expected


def test_transformer_host_has_the_reference_size():
    with torch.device("meta"):
        host = TransformerHost(vocab=50_257, dim=384, heads=6, layers=6, block_size=256)
    assert size(host) == 30_044_544


def test_cnn_sites_are_in_execution_order_and_skip_missing_pools():
    host = CNNHost(in_channels=1, classes=10, base=4, blocks=3, pools=1)
    assert list(host.sites().items()) == [
        ("r0c0", "blocks.0"),
        ("r1c0", "pools.0"),
        ("r0c1", "blocks.1"),
        ("r0c2", "blocks.2"),
    ]


def test_transformer_sites_are_the_last_blocks_of_segments():
    with torch.device("meta"):
        host = TransformerHost(vocab=9, dim=8, heads=2, layers=6, block_size=4, segments=3)
    assert host.sites() == {"r0c0": "blocks.1", "r0c1": "blocks.3", "r0c2": "blocks.5"}


def test_transformer_without_segments_has_a_slot_after_every_block():
    sizes = {"vocab": 9, "dim": 8, "heads": 2, "block_size": 4, "segments": None}
    with torch.device("meta"):
        assert TransformerHost(layers=2, **sizes).sites() == {"r0c0": "blocks.0", "r0c1": "blocks.1"}
        assert TransformerHost(layers=0, **sizes).sites() == {"r0c0": "dropout"}


def test_extra_slots_follow_the_last_layer_and_change_nothing():
    sizes = {"vocab": 9, "dim": 8, "heads": 2, "block_size": 4, "segments": None}
    hosts = []
    for extra in (0, 2):
        torch.manual_seed(0)
        hosts.append(TransformerHost(layers=1, extra_slots=extra, **sizes))
    plain, extended = hosts
    assert extended.sites() == {"r0c0": "blocks.0", "r0c1": "extra.0", "r0c2": "extra.1"}
    assert TransformerHost(layers=0, extra_slots=1, **sizes).sites() == {"r0c0": "dropout", "r0c1": "extra.0"}
    tokens = torch.randint(0, 9, (2, 4))
    assert torch.equal(plain(tokens), extended(tokens))
    assert plain.state_dict().keys() == extended.state_dict().keys()


def test_segments_do_not_change_names_or_initial_weights():
    weights = []
    for segments in (3, 1, None):
        torch.manual_seed(1)
        weights.append(TransformerHost(vocab=9, dim=8, heads=2, layers=3, block_size=4, segments=segments).state_dict())
    for other in weights[1:]:
        assert list(other) == list(weights[0])
        assert all(torch.equal(other[name], weights[0][name]) for name in other)


def test_resnet_stages_double_the_channels_and_halve_the_pixels():
    host = ResidualCNNHost(in_channels=1, classes=10, base=4, stages=3, blocks=2)
    assert list(host.sites().items()) == [(f"r0c{i}", f"blocks.{i}") for i in range(6)]
    shapes: list[tuple[int, ...]] = []
    for block in host.blocks:
        block.register_forward_hook(lambda _m, _i, out: shapes.append(tuple(out.shape[1:])))
    assert host(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert shapes == [(4, 28, 28)] * 2 + [(8, 14, 14)] * 2 + [(16, 7, 7)] * 2


def test_resnet_block_without_a_branch_is_the_identity():
    block = ResidualCNNHost(in_channels=1, classes=10, base=4, stages=1).blocks[0]
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("pixels", [8, 9])
def test_resnet_projection_equals_a_convolution_with_a_stride(pixels):
    host = ResidualCNNHost(in_channels=3, classes=10, base=4, stages=2).double()
    block = host.blocks[1]
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(5, 4, pixels, pixels, dtype=torch.float64)
    expected = F.conv2d(F.relu(block.norm1(x)), block.project.weight, stride=2)
    torch.testing.assert_close(block(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("base", [2, 4])
def test_small_resnet_trains_in_channels_last(base):
    """A convolution with stride 2 as the projection corrupts the memory of this process within 200 steps."""
    code = f"""if True:
        import torch; torch.set_num_threads(1)
        from esper.kasmina.hosts import ResidualCNNHost
        host = ResidualCNNHost(in_channels=3, classes=10, base={base}, stages=2, blocks=2)
        host = host.to(memory_format=torch.channels_last)
        x = torch.randn(64, 3, 16, 16).contiguous(memory_format=torch.channels_last)
        for _ in range(200):
            host(x).square().sum().backward()
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_germination_at_every_slot_keeps_the_output_bit_identical(kind):
    host, x = tiny(kind)
    host.eval()
    expected = host(x)
    body = graft(host, host.sites(), probe=x)
    assert list(body.slots) == list(host.sites())
    for i, (name, slot) in enumerate(body.slots.items()):
        choices = blueprints_for(slot.spec.layout)
        body.plant(name, choices[i % len(choices)], Operator.ADD, rng_seed=i)
        body.set_slot(slot, SeedStage.HOLDING, 1.0)
        assert torch.equal(body(x), expected), name
    for slot in body.slots.values():
        before = body(x)
        perturb(slot)
        assert not torch.equal(body(x), before), slot.name  # the seed is in the forward pass


@pytest.mark.parametrize("kind", KINDS)
def test_multiply_adds_of_a_host_match_its_layers(kind):
    host, x = tiny(kind)
    expected = 0
    if isinstance(host, TransformerHost):
        tokens, dim = x.shape[1], 16
        expected = len(host.blocks) * 2 * tokens * tokens * dim  # scores and their mean over values
        expected += tokens * dim * 31  # the head is a product with the embedding

    def count(module: nn.Module, _inputs: object, out: Tensor) -> None:
        nonlocal expected
        weights = module.weight.numel()
        if isinstance(module, nn.Conv2d):
            expected += weights * out.shape[2] * out.shape[3]
        elif isinstance(module, nn.Linear):
            expected += weights * out[0].numel() // out.shape[-1]

    body = graft(host, host.sites(), probe=x)
    handles = [m.register_forward_hook(count) for m in host.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    host(x)
    for handle in handles:
        handle.remove()
    assert host_macs_and_order(body)[0] == expected


@pytest.mark.parametrize("kind", HOSTS)
def test_small_host_fits_its_data_and_grows_in_width_and_depth(kind):
    shape = {"vector": (7,), "text": (6,), "image": (3, 8, 8)}[HOSTS[kind].data_kind]
    kwargs = HOSTS[kind].small(shape, 5)
    host = HOSTS[kind](**kwargs)
    assert host.needs(HOSTS[kind].data_kind, shape) is None
    assert host.fits_classes(5)
    assert not host.fits_classes(6)
    for larger in (HOSTS[kind].wider, HOSTS[kind].deeper):
        grown = HOSTS[kind](**larger(kwargs))
        assert size(grown) > size(host)
        assert grown.needs(HOSTS[kind].data_kind, shape) is None
    assert set(HOSTS[kind](**HOSTS[kind].deeper(kwargs)).sites()) >= set(host.sites())


@pytest.mark.parametrize("kind", KINDS)
def test_sites_are_called_in_listed_order(kind):
    host, x = tiny(kind)
    reached: list[str] = []
    for name in host.sites().values():
        host.get_submodule(name).register_forward_hook(lambda *_, name=name: reached.append(name))
    host(x)
    assert reached == list(host.sites().values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind):
    host, x = tiny(kind)
    host(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in host.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_host_is_traceable_by_fx_for_any_batch(kind):
    host, x = tiny(kind)
    host.eval()
    traced = torch.fx.symbolic_trace(host)
    for batch in (x, x[:1], x[:, : x.shape[1]]):
        torch.testing.assert_close(traced(batch), host(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_host_exports_with_a_dynamic_batch(kind):
    host, x = tiny(kind)
    host.eval()
    program = torch.export.export(host, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    for batch in (x, x[:2], torch.cat([x, x])):
        torch.testing.assert_close(program(batch), host(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_host_compiles_without_a_graph_break(kind):
    host, x = tiny(kind)
    host.eval()
    compiled = torch.compile(host, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), host(x))


def test_cnn_host_keeps_the_memory_format():
    host, x = tiny("cnn")
    host.eval()
    expected = host(x)
    host.to(memory_format=torch.channels_last)
    formats: list[bool] = []
    host.blocks[0].register_forward_hook(
        lambda _m, _i, out: formats.append(out.is_contiguous(memory_format=torch.channels_last))
    )
    out = host(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(out, expected)
    assert formats == [True]


def test_transformer_host_is_causal():
    host, tokens = tiny("transformer")
    host.eval()
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 31
    before, after = host(tokens), host(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_transformer_prefix_output_equals_full_output():
    host, tokens = tiny("transformer")
    host.eval()
    torch.testing.assert_close(host(tokens[:, :5]), host(tokens)[:, :5])


NONSENSE = [
    (CNNHost, {"in_channels": 3, "classes": 10, "base": 0, "blocks": 3}, "base=0"),
    (CNNHost, {"in_channels": 3, "classes": 10, "base": 8, "blocks": 3, "pools": 4}, "pools"),
    (CNNHost, {"in_channels": 3, "classes": 10, "base": 8, "blocks": 3, "kernel": 2}, "odd"),
    (ResidualCNNHost, {"in_channels": 3, "classes": 10, "base": 8, "stages": 0}, "stages=0"),
    (ResidualCNNHost, {"in_channels": 3, "classes": 10, "base": 8, "stages": 2, "blocks": 0}, "blocks=0"),
    (TransformerHost, {"vocab": 9, "dim": 8, "heads": 2, "layers": 0, "block_size": 4}, "segments=None"),
    (
        TransformerHost,
        {"vocab": 9, "dim": 8, "heads": 2, "layers": 3, "block_size": 4, "extra_slots": -1},
        "extra_slots",
    ),
    (TransformerHost, {"vocab": 9, "dim": 8, "heads": 2, "layers": -1, "block_size": 4, "segments": None}, "layers=-1"),
    (MLPHost, {"inputs": 4, "classes": 2, "width": 8, "layers": 0}, "layers=0"),
    (TransformerHost, {"vocab": 9, "dim": 8, "heads": 3, "layers": 3, "block_size": 4}, "multiple of heads"),
    (
        TransformerHost,
        {"vocab": 9, "dim": 8, "heads": 2, "layers": 4, "block_size": 4},
        "multiple of segments",
    ),
    (
        TransformerHost,
        {"vocab": 9, "dim": 8, "heads": 2, "layers": 3, "block_size": 4, "dropout": 1.0},
        "dropout",
    ),
]


@pytest.mark.parametrize(("host", "kwargs", "word"), NONSENSE)
def test_invalid_arguments_raise_config_error(host, kwargs, word):
    with pytest.raises(ConfigError, match=word):
        host(**kwargs)
