"""Test `harden`: a grown body becomes a plain torch module with equal outputs and no dependency on Esper."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint, blueprints_for, unregister
from esper.kasmina.body import Body
from esper.kasmina.graft import graft
from esper.kasmina.harden import harden
from esper.leyline.actions import Operator
from esper.leyline.errors import HardenError
from esper.leyline.stages import SeedStage
from tests.support import ROOT
from tests.support.models import (
    ZOO,
    PlainCNN,
    SharedNet,
    Transformer,
    call,
    grow,
    grow_everywhere,
    images,
    main_output,
    perturb,
    tokens,
    vectors,
)

NOT_PICKLED = {"cnn_host", "resnet_host", "mlp_host", "transformer_host", "embedding_host"}
"""Cases whose pickle refers to Esper, because their host is a class of Esper."""


def close(a: Any, b: Any) -> bool:
    x, y = main_output(a), main_output(b)
    return bool((x - y).abs().max() <= 1e-5 * y.abs().max().clamp(min=1.0))


def is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith("esper") and "hosts" not in type(module).__module__


def pickled(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


@pytest.mark.parametrize("name", ZOO)
def test_hardened_model_is_equal_and_free_of_esper_classes(name: str):
    case = ZOO[name]
    body, x = case.body(), case.batch(5)
    grow_everywhere(body)
    state = copy.deepcopy(body.state_dict())

    plain = harden(body)

    assert close(call(plain, x), call(body, x))
    assert type(call(plain, x)) is type(call(body, x))
    assert type(plain) is type(body.model)
    assert not any(is_ours(m) for m in plain.modules())
    if name not in NOT_PICKLED:
        assert b"esper" not in pickled(plain)
    assert all(torch.equal(v, state[k]) for k, v in body.state_dict().items())  # the body is unchanged
    assert all(s.seed is not None for s in body.slots.values())


@pytest.mark.parametrize("name", ZOO)
def test_hardened_model_trains_and_supports_train_and_eval(name: str):
    case = ZOO[name]
    body, x = case.body(), case.batch(5)
    grow_everywhere(body)
    plain = harden(body)

    for training in (True, False):
        plain.train(training), body.train(training)
        torch.manual_seed(0)
        expected = main_output(call(body, x))
        torch.manual_seed(0)
        assert close(main_output(call(plain, x)), expected)

    plain.train()
    main_output(call(plain, x)).square().sum().backward()
    used = call_graph_parameters(body, case)
    received = [p.grad is not None and bool(p.grad.abs().sum() > 0) for p in plain.parameters() if p.requires_grad]
    assert sum(received) == len(used)


def call_graph_parameters(body: Body, case: Any) -> list[Tensor]:
    """Return the body's parameters with a non-zero gradient of this loss."""
    body.train()
    body.zero_grad()
    main_output(call(body, case.batch(5))).square().sum().backward()
    return [p for p in body.parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)]


@pytest.mark.parametrize("name", ZOO)
def test_key_map_is_complete_and_exact(name: str):
    case = ZOO[name]
    body = case.body()
    grow_everywhere(body)

    plain, keys = harden(body, key_map=True)

    before, after = body.state_dict(), plain.state_dict()
    assert set(keys) == set(before) - {"esper.structure"}
    assert set(keys.values()) <= set(after)
    assert all(torch.equal(before[old], after[new]) for old, new in keys.items())
    named = {v.data_ptr() for k, v in after.items() if k in keys.values()}
    assert all(v.data_ptr() in named for v in after.values())  # unmapped keys are aliases of mapped ones


HARDEST = [
    (host, blueprint, operator)
    for host, layout in (("cnn_host", "map"), ("mlp_host", "vector"), ("transformer_host", "sequence"))
    for blueprint in blueprints_for(layout)
    for operator in Operator
]


@pytest.mark.parametrize(("host", "blueprint", "operator"), HARDEST)
def test_every_blueprint_and_operator_hardens(host: str, blueprint: str, operator: Operator):
    case = ZOO[host]
    body, slot = case.body(), case.at[1]
    grow(body, slot, blueprint, operator=operator, stage=SeedStage.FOSSILIZED, alpha=0.7)

    plain = harden(body)

    assert close(plain(case.batch(7)), body(case.batch(7)))
    assert not any(is_ours(m) for m in plain.modules())


def test_seeds_without_effect_are_removed():
    case = ZOO["cnn"]
    body = case.body()
    grow(body, "features.0", stage=SeedStage.GERMINATED)
    grow(body, "features.1", stage=SeedStage.TRAINING)
    size = sum(p.numel() for p in body.model.parameters())

    plain, keys = harden(body, key_map=True)

    assert sum(p.numel() for p in plain.parameters()) == size
    assert keys == {k: k for k in body.model.state_dict()}
    assert torch.equal(plain(images(3)), body(images(3)))
    assert not any(m._forward_hooks for m in plain.modules())


def test_nested_grown_modules_harden():
    body = graft(PlainCNN().eval(), ["features", "features.1", "features.1.1"], probe=images(3))
    grow_everywhere(body)

    plain, keys = harden(body, key_map=True)

    assert close(plain(images(5)), body(images(5)))
    assert keys["features.1.1.weight"] == "features.host.1.host.1.host.weight"
    assert all(torch.equal(body.state_dict()[a], plain.state_dict()[b]) for a, b in keys.items())


def test_key_map_contains_both_names_of_a_shared_module():
    body = graft(SharedNet(), ["shared"], probe=vectors(3))
    grow(body, "shared")

    plain, keys = harden(body, key_map=True)

    assert keys["shared.0.weight"] == "shared.host.0.weight"
    assert keys["alias.0.weight"] == "alias.host.0.weight"
    assert plain.alias is plain.shared


def test_directly_accessed_parameter_keeps_its_name():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.embed(x), self.embed.weight)

    body = graft(Tied(), ["embed"], probe=tokens(3))
    grow(body, "embed", "lora")

    plain, keys = harden(body, key_map=True)

    assert close(plain(tokens(4)), body(tokens(4)))
    assert keys["embed.weight"] == "embed.weight"


def test_user_hooks_attributes_and_frozen_parameters_are_kept():
    model = PlainCNN().eval()
    model.features[1].kind = "stage"
    for p in model.features[0].parameters():
        p.requires_grad_(False)
    calls: list[str] = []
    model.features[1].register_forward_hook(lambda *_: calls.append("mine"))
    body = graft(model, ["features.0", "features.1"], probe=images(3))
    grow_everywhere(body)
    slot = body.slots["features.1"]
    next(slot.parameters()).requires_grad_(False)

    plain, keys = harden(body, key_map=True)

    calls.clear()
    plain(images(3))
    assert calls == ["mine"]
    assert plain.features[1].kind == "stage"
    frozen = {n for n, p in body.named_parameters() if not p.requires_grad}
    expected = {keys[n.removeprefix("model.")] for n in frozen}
    assert {n for n, p in plain.named_parameters() if not p.requires_grad} == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_harden_works_in_any_floating_dtype(dtype: torch.dtype):
    body = graft(PlainCNN().to(dtype).eval(), "features.*", probe=images(3).to(dtype))
    grow_everywhere(body)

    plain = harden(body)

    assert plain(images(3).to(dtype)).dtype == dtype


def test_untraceable_seed_error_names_slot_and_fix():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            nn.init.zeros_(self.linear.weight), nn.init.zeros_(self.linear.bias)

        def forward(self, h: Tensor) -> Tensor:
            return self.linear(h) if h.sum() > 0 else self.linear(-h)

    blueprint("branches", layouts="vector")(lambda _: Branches())
    try:
        body = ZOO["mlp_host"].body()
        grow(body, "layers.0", "branches")
        with pytest.raises(HardenError, match=r"'branches' in slot 'layers.0' cannot be traced.*without branches"):
            harden(body)
    finally:
        unregister("branches")


def test_custom_seed_with_dropout_and_batch_norm_hardens():
    class Custom(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.norm, self.drop, self.conv = nn.BatchNorm2d(dim), nn.Dropout2d(0.5), nn.Conv2d(dim, dim, 1)
            nn.init.zeros_(self.conv.weight), nn.init.zeros_(self.conv.bias)

        def forward(self, h: Tensor) -> Tensor:
            return self.conv(self.drop(self.norm(h)))

    blueprint("custom", layouts="map")(Custom)
    try:
        body = ZOO["cnn"].body()
        grow(body, "features.1", "custom")
        plain = harden(body)
        assert close(plain(images(4)), body(images(4)))
        plain.train(), body.train()
        torch.manual_seed(0)
        expected = body(images(4))
        torch.manual_seed(0)
        assert close(plain(images(4)), expected)
    finally:
        unregister("custom")


# -- export

EXPORTED = ("cnn", "two_inputs", "gpt2")
EXPORTED_SLOWLY = ("residual", "transformer_host", "mask", "named_tuple", "list_blocks", "bert", "vit")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*EXPORTED, *(pytest.param(n, marks=pytest.mark.slow) for n in EXPORTED_SLOWLY)])
def test_hardened_model_exports_with_a_dynamic_batch(name: str):
    case = ZOO[name]
    body = case.body()
    grow_everywhere(body)
    plain = harden(body).eval()
    batch = case.batch(4)
    n = torch.export.Dim("n", min=2, max=64)
    args, kwargs, shapes = (), {}, None
    if isinstance(batch, dict):
        kwargs, shapes = batch, {k: {0: n} for k in batch}
    else:
        args = batch if isinstance(batch, tuple) else (batch,)
        shapes = tuple({0: n} for _ in args)

    program = torch.export.export(plain, args, kwargs, dynamic_shapes=shapes)

    again = case.batch(9)
    assert close(call(program.module(), again), call(body, again))


ALONE = """
import sys
sys.modules["esper"] = None
sys.path.insert(0, {folder!r})
import torch
torch.set_num_threads(1)
model, x, expected = torch.load({file!r}, weights_only=False)
output = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
import models_alone
output = models_alone.main_output(output)
assert (output - expected).abs().max() < 1e-5, (output - expected).abs().max()
model.train()
output = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
models_alone.main_output(output).sum().backward()
grown = [p for n, p in model.named_parameters() if "grown" in n]
assert grown and all(p.grad is not None for p in grown if p.requires_grad)
try:
    import esper
except ImportError:
    print("alone")
"""


LONELY = ("cnn", "residual", "tuple_blocks", "named_tuple", "dict_blocks", "list_blocks", "shared")


@pytest.mark.parametrize("names", [LONELY, pytest.param(("gpt2", "vit"), marks=pytest.mark.slow)])
def test_hardened_models_load_and_train_without_esper_installed(tmp_path: Path, names: tuple[str, ...]):
    """Cover plain models, tuple, named tuple, mapping and list outputs, and Hugging Face models."""
    source = (ROOT / "tests" / "support" / "models.py").read_text()
    ours = [line for line in source.splitlines() if line.startswith("from esper")]
    alone = source[: source.index("# -- batches of n samples")] + source[source.index("def main_output") :]
    for line in ours:
        alone = alone.replace(line, "")
    (tmp_path / "models_alone.py").write_text(alone)
    sys.path.insert(0, str(tmp_path))
    try:
        import models_alone

        scripts = []
        for name in names:
            case = ZOO[name]
            build = getattr(models_alone, case.build.__name__)
            model = build().eval()
            model.load_state_dict(case.model().state_dict())
            body = graft(model, list(case.at), probe=case.batch(3), select=case.select)
            grow_everywhere(body)
            x = case.batch(3)
            file = tmp_path / f"{name}.pt"
            torch.save((harden(body), x, main_output(call(body, x)).detach()), file)
            scripts.append(ALONE.format(folder=str(tmp_path), file=str(file)))
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("models_alone", None)

    done = subprocess.run([sys.executable, "-c", "\n".join(scripts)], capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["alone"] * len(scripts)


def test_mapping_output_keeps_its_class():
    case = ZOO["gpt2"]
    body = graft(case.model(), ["transformer"], probe=case.batch(3))
    grow(body, "transformer", "lora")

    plain = harden(body)

    assert close(call(plain, case.batch(4)), call(body, case.batch(4)))
    assert type(plain.transformer(**case.batch(4))) is type(body.model.transformer(**case.batch(4)))
    again = torch.load(io.BytesIO(pickled(plain)), weights_only=False)
    assert close(call(again, case.batch(4)), call(body, case.batch(4)))


def test_hardened_model_can_be_grafted_again():
    body = graft(Transformer().eval(), ["blocks.0"], probe=tokens(3))
    grow(body, "blocks.0")
    again = graft(harden(body), ["blocks.0", "blocks.1"], probe=tokens(3))
    assert close(again(tokens(4)), body(tokens(4)))

    slot = again.plant("blocks.0", "lora")
    perturb(slot)
    again.set_slot(slot, SeedStage.FOSSILIZED, 1.0)

    assert close(harden(again)(tokens(4)), again(tokens(4)))
