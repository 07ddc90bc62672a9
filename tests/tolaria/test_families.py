"""Task families: draws, hosts with an impairment, reduced and noisy data, families of the user's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.blueprints import blueprint_name
from esper.kasmina.hosts import CNNHost, MLPHost
from esper.leyline.errors import ConfigError, EsperError, GraftError, UnknownNameError
from esper.tolaria.engine import Engine
from esper.tolaria.families import FAMILIES, Family, get_family, read_family, world_task
from esper.tolaria.host_building import build_body

VARIED = ("width", "blocks", "impairment", "impaired", "slots", "samples", "label_noise", "epochs", "batch")


def test_draws_depend_on_family_and_world_only_and_use_every_option() -> None:
    family = FAMILIES["mend"]
    draws = [family.draw(world) for world in range(256)]
    assert draws == [family.draw(world) for world in range(256)]
    assert draws != [FAMILIES["mend_digits"].draw(world) for world in range(256)]
    for name in VARIED:
        options = getattr(family, {"width": "widths", "impairment": "impairments"}.get(name, name), None)
        values = {getattr(draw, name) for draw in draws}
        assert values == set(options) if options else len(values) > 3, name
    pairs = {(d.width, d.impairment) for d in draws}
    assert len(pairs) == 4 * 4  # drawn independently


@pytest.mark.parametrize("name", FAMILIES)
def test_hosts_of_a_family_have_three_to_ten_slots_in_one_order(name: str) -> None:
    family = FAMILIES[name]
    most = family.longest()
    counts = {len(family.task(world).slots) for world in range(128)}
    assert counts <= set(range(3, 11))
    assert max(counts) == len(most)
    for world in range(16):
        slots = family.task(world).slots
        assert slots == most[: len(slots)]


@pytest.mark.parametrize("name", ["mend", "mend_digits", "mend_mlp", "mend_resnet"])
def test_hosts_of_a_family_can_be_grafted_and_trained_on(name: str) -> None:
    for world in range(6):
        task = FAMILIES[name].task(world)
        data = task.load_data()
        body = build_body(task, data, world)
        assert tuple(body.slots) == task.slots
        assert body(data.train.x[:4]).shape == (4, 10)


@pytest.mark.parametrize("impairment", ["kernel", "width", "missing"])
@pytest.mark.parametrize("impaired", [0, 1, 2])
def test_impaired_cnn_lacks_exactly_what_is_named(impairment: str, impaired: int) -> None:
    sizes = {"in_channels": 1, "classes": 10, "base": 8, "blocks": 3, "pools": 2}
    whole, host = CNNHost(**sizes), CNNHost(**sizes, impaired=impaired, impairment=impairment)
    for i, block in enumerate(host.blocks):
        if i != impaired:
            assert block[0].kernel_size == (3, 3)
            assert block[0].out_channels == whole.blocks[i][0].out_channels
        elif impairment == "kernel":
            assert block[0].kernel_size == (1, 1)
        elif impairment == "width":
            assert block[0].out_channels == whole.blocks[i][0].out_channels // 4
        else:
            assert isinstance(block, torch.nn.Identity)
    x = torch.randn(4, 1, 14, 14)
    body = esper.graft(host, host.sites(), probe=x).eval()
    host.eval()
    assert tuple(body.slots) == ("r0c0", "r1c0", "r0c1", "r1c1", "r0c2")
    torch.testing.assert_close(esper.harden(body)(x), body(x))


@pytest.mark.parametrize("impaired", [0, 1, 2])
def test_kernels_of_the_impaired_and_all_later_blocks_see_single_pixels(impaired: int) -> None:
    host = CNNHost(in_channels=1, classes=10, base=4, blocks=3, impaired=impaired, impairment="kernels")
    assert [block[0].kernel_size[0] for block in host.blocks] == [3] * impaired + [1] * (3 - impaired)


@pytest.mark.parametrize("impaired", [0, 1, 2])
def test_impaired_and_all_later_blocks_have_no_norms(impaired: int) -> None:
    host = CNNHost(in_channels=1, classes=10, base=4, blocks=3, impaired=impaired, impairment="norms")
    kinds = [[type(part) for part in block] for block in host.blocks]
    normed, plain = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU], [nn.Conv2d, nn.ReLU]
    assert kinds == [normed] * impaired + [plain] * (3 - impaired)
    assert [block[0].bias is None for block in host.blocks] == [True] * impaired + [False] * (3 - impaired)
    assert all(block[0].kernel_size == (3, 3) for block in host.blocks)


def test_impaired_mlp_has_a_narrow_or_missing_layer() -> None:
    sizes = {"inputs": 12, "classes": 3, "width": 8, "layers": 3}
    assert MLPHost(**sizes, impaired=1, impairment="width").layers[1][0].out_features == 2
    missing = MLPHost(**sizes, impaired=0, impairment="missing")
    assert isinstance(missing.layers[0], torch.nn.Identity)
    assert missing(torch.randn(5, 12)).shape == (5, 3)
    with pytest.raises(ConfigError, match="no kernels"):
        MLPHost(**sizes, impairment="kernels")
    with pytest.raises(ConfigError, match="no norms"):
        MLPHost(**sizes, impairment="norms")
    with pytest.raises(ConfigError, match="0 to 2"):
        MLPHost(**sizes, impaired=3, impairment="width")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"widths": (4, 0)}, r"widths must be ≥ 1, got \(4, 0\)"),
        ({"blocks": (0,)}, "blocks must be ≥ 1"),
        ({"slots": (3, 0)}, "slots must be ≥ 1"),
        ({"epochs": (40,) * 50 + (0,)}, "epochs must be ≥ 1"),
        ({"batch": (64,) * 50 + (0,)}, "batch must be ≥ 1"),
        ({"samples": (0,) * 50 + (-1,)}, "samples must be ≥ 0"),
        ({"label_noise": (0.0,) * 50 + (1.5,)}, "label_noise must lie in 0…1"),
        ({"label_noise": (float("nan"),)}, "label_noise must lie in 0…1"),
        ({"shrink": 0}, "shrink must be ≥ 1, got 0"),
    ],
)
def test_family_rejects_options_out_of_range_that_world_0_does_not_draw(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Family(name="small", **settings)


def test_samples_and_noisy_labels_change_the_training_split_only() -> None:
    task = world_task("digits", 0)
    whole = task.load_data()
    reduced = replace(task, samples=200, label_noise=0.5, data_seed=3)
    data = reduced.load_data()
    assert len(data.train) == 200
    assert torch.equal(data.val.y, whole.val.y)
    assert torch.equal(data.test.y, whole.test.y)
    clean = replace(reduced, label_noise=0.0).load_data()
    assert torch.equal(clean.train.x, data.train.x)
    wrong = (clean.train.y != data.train.y).float().mean().item()
    assert 0.35 < wrong <= 0.5  # a tenth of the random labels is right
    other = replace(reduced, data_seed=4).load_data()
    assert not torch.equal(other.train.x, data.train.x)
    with pytest.raises(ConfigError, match="fewer than samples=9999"):
        replace(task, samples=9999).load_data()


def test_family_file_defines_a_family(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('datasets = ["digits"]\nwidths = [2, 4]\nblocks = [2, 3]\nepochs = [5, 8]\n')
    family = get_family(str(file))
    assert family == Family(name="mine", datasets=("digits",), widths=(2, 4), blocks=(2, 3), epochs=(5, 8))
    assert family.task(3).name == "mine"
    assert world_task(str(file), 3, epochs=2).epochs == 2
    assert family.fingerprint() != family.lasting(7).fingerprint()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("widths = []", "widths needs at least one option"),
        ('datasets = ["fashions"]', "fashion"),
        ('impairments = ["kernal"]', "kernel"),
        ("colour = 3", "colour"),
        ("widths = 3", "does not define a family"),
        ("blocks = [0]", "≥ 1"),
        ('host = "mlp"\nimpairments = ["none", "none", "kernel"]', "no kernels"),
        ('datasets = ["digits", "cifar10"]\nblocks = [5]', "must begin the longer"),
    ],
)
def test_invalid_family_files_are_refused_with_the_reason(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(EsperError, match=message):
        read_family(file)


def test_missing_family_file_and_unknown_task_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no family file"):
        world_task(str(tmp_path / "none.toml"), 0)
    with pytest.raises(EsperError, match="mend_mlp"):
        world_task("mend_mpl", 0)


def test_only_the_blueprints_of_a_family_are_offered_and_planted() -> None:
    family = Family(name="few", datasets=("digits",), widths=(2,), blocks=(2,), blueprints=("norm", "conv_light"))
    task = family.task(0)
    engine = Engine(replace(task, batch=4, batches_per_epoch=1, val_size=8), [0])
    takes = engine.table.takes
    assert {blueprint_name(b) for b in takes.any(axis=0).nonzero()[0]} == {"norm", "conv_light"}
    assert takes.any(axis=1).all()  # every slot takes one of them
    assert set(engine.networks[0].body.costs()[task.slots[0]]) == {"norm", "conv_light"}


def test_family_with_an_unknown_blueprint_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="no blueprint of family 'mine' named 'conv_hevy'"):
        Family(name="mine", datasets=("digits",), blueprints=("conv_hevy",))


def test_hosts_whose_slots_take_none_of_the_blueprints_are_refused() -> None:
    task = Family(name="mine", datasets=("digits",), blueprints=("flex_attention",)).task(0)
    with pytest.raises(GraftError, match=r"slot 'r0c0' takes none of the blueprints flex_attention\. It takes: .*norm"):
        build_body(task, task.load_data(), 0)
