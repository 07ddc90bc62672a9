"""Test the built-in hosts: sizes, sites, tracing, export, compilation and input checks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.hosts import HOSTS, AnyHost, CNNHost, MLPHost, TransformerHost
from esper.leyline.errors import ConfigError


def tiny(kind: str) -> tuple[AnyHost, Tensor]:
    torch.manual_seed(0)
    if kind == "cnn":
        return CNNHost(in_channels=3, classes=10, base=4, blocks=3, pools=2), torch.randn(3, 3, 16, 16)
    if kind == "mlp":
        return MLPHost(inputs=12, classes=5, width=16, layers=2), torch.randn(3, 12)
    host = TransformerHost(vocab=31, dim=16, heads=2, layers=4, block_size=8, segments=2, dropout=0.1)
    return host, torch.randint(0, 31, (3, 8))


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


@pytest.mark.parametrize("kind", HOSTS)
def test_sites_are_called_in_listed_order(kind):
    host, x = tiny(kind)
    reached: list[str] = []
    for name in host.sites().values():
        host.get_submodule(name).register_forward_hook(lambda *_, name=name: reached.append(name))
    host(x)
    assert reached == list(host.sites().values())


@pytest.mark.parametrize("kind", HOSTS)
def test_every_parameter_gets_a_gradient(kind):
    host, x = tiny(kind)
    host(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in host.parameters())


@pytest.mark.parametrize("kind", HOSTS)
def test_host_is_traceable_by_fx_for_any_batch(kind):
    host, x = tiny(kind)
    host.eval()
    traced = torch.fx.symbolic_trace(host)
    for batch in (x, x[:1], x[:, : x.shape[1]]):
        torch.testing.assert_close(traced(batch), host(batch))


@pytest.mark.parametrize("kind", HOSTS)
def test_host_exports_with_a_dynamic_batch(kind):
    host, x = tiny(kind)
    host.eval()
    program = torch.export.export(host, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    for batch in (x, x[:2], torch.cat([x, x])):
        torch.testing.assert_close(program(batch), host(batch))


@pytest.mark.parametrize("kind", HOSTS)
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
