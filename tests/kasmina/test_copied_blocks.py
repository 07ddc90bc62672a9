"""Test seeds that start as copies of blocks: what they copy, their laws, saving and export."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import esper
from esper.kasmina.blueprints import unregister
from esper.kasmina.copied_blocks import CopiedBlock, last_projections
from esper.kasmina.hosts.resnet import ResidualCNNHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.leyline.errors import BlueprintError, GraftError, UnknownNameError
from esper.leyline.stages import SeedStage

TOKENS = torch.arange(48).view(6, 8) % 11
IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class PostNorm(nn.Module):
    """A residual block with a norm after the sum: no weights make it return its input."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h + self.mlp(h))


class Branching(nn.Module):
    """A residual block that fx cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, h: Tensor) -> Tensor:
        inner = self.first(h)
        return h + self.last(inner.relu() if inner.sum() > -1e9 else inner)


class Block(nn.Module):
    """A residual block with two linear layers, the base of the blocks below."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def change(self, h: Tensor) -> Tensor:
        return self.last(F.gelu(self.first(h)))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.change(h)


class ReluAfterSum(Block):
    def forward(self, h: Tensor) -> Tensor:
        return F.relu(h + self.change(h))


class DropoutAfterSum(Block):
    def forward(self, h: Tensor) -> Tensor:
        return F.dropout(h + self.change(h), training=self.training)


class ReluAfterProjection(Block):
    def forward(self, h: Tensor) -> Tensor:
        return h + F.relu(self.change(h))


class TiedLayers(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.last.weight = self.first.weight


class InPlace(Block):
    def forward(self, h: Tensor) -> Tensor:
        h += self.change(h)
        return h


class WithRequiredMask(Block):
    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        return h + self.change(h)


class WithFlag(Block):
    def forward(self, h: Tensor, negative: bool = True) -> Tensor:
        return h + self.change(-h if negative else h)


class Scaled(Block):
    """A residual block whose scale is zero before training."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(4))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.scale * self.change(h)


class Functional(nn.Module):
    """A residual block without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(0.5 * torch.randn(4, 4)) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        return h + F.gelu(h @ self.first) @ self.last


class WeightNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = weight_norm(self.first), weight_norm(self.last)


class Call(nn.Module):
    """Call a block with further arguments."""

    def __init__(self, block: nn.Module, *args: object) -> None:
        super().__init__()
        self.block, self.args = block, args

    def forward(self, h: Tensor) -> Tensor:
        return self.block(h, *self.args)


def transformer() -> TransformerHost:
    return TransformerHost(vocab=11, dim=8, heads=2, layers=2, block_size=8, segments=None)


def resnet() -> ResidualCNNHost:
    return ResidualCNNHost(in_channels=3, classes=5, base=8, stages=2, blocks=2)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def vectors(block: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), block, nn.Linear(4, 2))


def trained(model: nn.Module) -> nn.Module:
    """Return the model with weights that are all non-zero, as after training."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=draw))
    return model


MODELS = {
    "transformer": (transformer, {"at": ["blocks.0", "blocks.1"], "probe": TOKENS}, "blocks.0", "blocks.1"),
    "resnet": (resnet, {"at": ["blocks.0", "blocks.1"], "probe": IMAGES}, "blocks.1", "blocks.1"),
    "encoder": (encoder, {"at": ["layers.0", "layers.1"], "probe": torch.randn(6, 5, 8)}, "layers.0", "layers.1"),
    "untraceable": (lambda: vectors(Branching()), {"at": ["1"], "probe": torch.randn(6, 3)}, "1", "1"),
    "scaled": (lambda: vectors(Scaled()), {"at": ["1"], "probe": torch.randn(6, 3)}, "1", "1"),
    "functional": (lambda: vectors(Functional()), {"at": ["1"], "probe": torch.randn(6, 3)}, "1", "1"),
    "weight-normed": (lambda: vectors(WeightNormed()), {"at": ["1"], "probe": torch.randn(6, 3)}, "1", "1"),
}


@pytest.fixture(params=MODELS)
def grafted(request):
    """Return a body with a blueprint of a copied block, its input, the block and a slot for the copy."""
    torch.manual_seed(0)
    make, options, block, slot = MODELS[request.param]
    model = trained(make())
    body = esper.graft(model, **options)
    esper.register_copy(body, block, name="copied")
    yield body, options["probe"], block, slot
    unregister("copied")


def loss(body: nn.Module, x: Tensor) -> Tensor:
    out = body(x)
    return (out * torch.linspace(-1, 1, out.numel()).view_as(out)).square().mean() + out.std()


def train(grower: esper.Grower, x: Tensor, steps: int) -> None:
    grower.body.train()
    for _ in range(steps):
        grower.optimizer.zero_grad()
        loss(grower.body, x).backward()
        grower.optimizer.step()


def make_grower(body: esper.Body) -> esper.Grower:
    optimizer = torch.optim.SGD(body.parameters(), lr=0.05, momentum=0.9)
    return esper.Grower(body, optimizer, rules=esper.Rules(birth="open"), controller=None)


def test_seed_has_the_weights_that_the_block_has_when_it_is_planted(grafted):
    body, x, block, slot = grafted
    grower = make_grower(body)
    train(grower, x, 2)
    grower.germinate(slot, "copied")
    seed = body.slots[slot].seed
    assert isinstance(seed, CopiedBlock)
    original = dict(body.model.get_submodule(block).named_parameters())
    copied = dict(seed.block.named_parameters())
    assert copied.keys() == original.keys()
    equal = {name for name, p in copied.items() if torch.equal(p, original[name])}
    zero = {name for name, p in copied.items() if not p.any()}
    assert equal | zero == copied.keys()
    assert equal
    assert zero
    assert all(p is not original[name] for name, p in copied.items())


def test_birth_changes_no_output_and_no_optimiser_state(grafted):
    body, x, _block, slot = grafted
    grower = make_grower(body)
    train(grower, x, 2)
    before = body.eval()(x)
    host = list(body.model.parameters())
    momenta = [grower.optimizer.state[p]["momentum_buffer"].clone() for p in host]
    grower.germinate(slot, "copied")
    assert torch.equal(body.eval()(x), before)
    assert all(torch.equal(grower.optimizer.state[p]["momentum_buffer"], m) for p, m in zip(host, momenta, strict=True))
    assert not any(p in grower.optimizer.state for p in body.slots[slot].parameters())


def test_every_parameter_of_a_copy_moves_within_three_steps(grafted):
    body, x, _block, slot = grafted
    grower = make_grower(body)
    grower.germinate(slot, "copied")
    before = {name: p.detach().clone() for name, p in body.slots[slot].named_parameters()}
    train(grower, x, 3)
    still = [n for n, p in body.slots[slot].named_parameters() if torch.equal(p, before[n])]
    assert still == []


def test_copy_takes_nothing_of_other_seeds(grafted):
    body, x, block, slot = grafted
    grower = make_grower(body)
    grower.germinate(slot, "copied")
    train(grower, x, 2)
    again = copy.deepcopy(body.slots[slot].seed)
    body.slots[slot].remove_seed()
    body.plant(slot, "copied")
    seed = body.slots[slot].seed
    assert not any(module._forward_hooks for module in seed.modules())
    assert [n for n, _ in seed.named_parameters()] == [n for n, _ in again.named_parameters()]
    assert len(list(seed.block.parameters())) == len(list(body.model.get_submodule(block).parameters()))


def test_saved_run_resumes_bit_for_bit(grafted, tmp_path):
    body, x, _block, slot = grafted
    twin = copy.deepcopy(body)
    grower = make_grower(body)
    train(grower, x, 1)
    grower.germinate(slot, "copied")
    train(grower, x, 2)
    grower.save(tmp_path / "state.safetensors")
    train(grower, x, 2)
    resumed = make_grower(twin)
    resumed.load(tmp_path / "state.safetensors")
    train(resumed, x, 2)
    ours, theirs = grower.body.state_dict(), resumed.body.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_hardened_model_equals_the_body_and_has_no_class_of_esper(grafted):
    body, x, _block, slot = grafted
    grower = make_grower(body)
    grower.germinate(slot, "copied")
    train(grower, x, 3)
    plain = esper.harden(body)
    assert torch.allclose(plain.eval()(x), body.eval()(x), atol=1e-6)
    own = {type(m).__module__ for m in plain.modules()} - {type(m).__module__ for m in body.model.modules()}
    assert not any(name.startswith("esper") for name in own)


def test_blocks_of_models_are_found(grafted):
    body, _x, block, _slot = grafted
    assert block in esper.repeatable_blocks(body)


def test_last_projections_are_the_fewest_parts():
    model = trained(transformer())
    h = torch.randn(2, 8, 8)
    ends = ["attention.proj.weight", "attention.proj.bias", "mlp.2.weight", "mlp.2.bias"]
    assert last_projections(copy.deepcopy(model.blocks[0]), h) == ends
    layer = trained(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True))
    ends = ["self_attn.out_proj.weight", "self_attn.out_proj.bias", "linear2.weight", "linear2.bias"]
    assert last_projections(copy.deepcopy(layer), h) == ends


def test_block_that_returns_its_input_before_training_is_found():
    body = esper.graft(vectors(Scaled()), at=["1"], probe=torch.randn(6, 3))
    assert esper.repeatable_blocks(body) == ["1"]


REFUSED = {
    "post-norm": (PostNorm(), "residual sum"),
    "plain": (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "a Sequential holds blocks"),
    "relu after the sum": (ReluAfterSum(), "residual sum"),
    "dropout after the sum": (DropoutAfterSum(), "residual sum"),
    "relu after the projection": (ReluAfterProjection(), "last.weight, last.bias would be zero .* get no gradient"),
    "tied layers": (TiedLayers(), "no gradient"),
    "in-place": (InPlace(), "writes into its input"),
}


@pytest.mark.parametrize(("block", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_blocks_are_refused_with_the_reason(block, reason):
    torch.manual_seed(0)  # with some weights a ReLU passes nothing, which is refused for another reason
    for layer in block.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), block), nn.Linear(4, 2))
    body = esper.graft(model, at=["1"], probe=torch.randn(6, 3))
    assert esper.repeatable_blocks(body) == []
    with pytest.raises(BlueprintError, match=rf"'1.1' cannot be copied: .*{reason}.*can be copied: none"):
        esper.register_copy(body, "1.1")


@pytest.mark.parametrize("call", [Call(WithRequiredMask(), None), Call(WithFlag(), False)], ids=["mask", "flag"])
def test_block_that_gets_another_argument_than_its_default_is_refused(call):
    body = esper.graft(vectors(call), at=["1.block"], probe=torch.randn(6, 3))
    assert "1.block" not in esper.repeatable_blocks(body)
    with pytest.raises(BlueprintError, match="one tensor and no other argument"):
        esper.register_copy(body, "1.block")


def test_wrong_arguments_are_refused_with_what_is_expected():
    body = esper.graft(vectors(Block()), at=["1"], probe=torch.randn(6, 3))
    with pytest.raises(GraftError, match="expected a body"):
        esper.repeatable_blocks(body.model)
    with pytest.raises(GraftError, match="expected a body"):
        esper.register_copy(body.model, "1")
    with pytest.raises(BlueprintError, match="by its name in the model, got a Block"):
        esper.register_copy(body, body.model[1])
    with pytest.raises(BlueprintError, match="built-in"):
        esper.register_copy(body, "1", name="conv_light")


@pytest.fixture
def small():
    """Return a body with a blueprint "copy" of its only block."""
    body = esper.graft(vectors(Block()), at=["1"], probe=torch.randn(6, 3))
    esper.register_copy(body, "1")
    yield body
    unregister("copy")


def test_body_of_another_size_is_not_offered_the_copy(small):
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    other = esper.graft(model, at=["1"], probe=torch.randn(6, 3))
    assert "copy" not in other.valid_blueprints()["1"]
    assert "copy" in small.valid_blueprints()["1"]


def test_copied_body_copies_its_own_block(small):
    twin = copy.deepcopy(small)
    nn.init.constant_(twin.model[1].first.weight, 7.0)
    twin.plant("1", "copy")
    assert (twin.slots["1"].seed.block.first.weight == 7.0).all()


def test_blueprint_does_not_keep_the_body_in_memory():
    body = esper.graft(vectors(Block()), at=["1"], probe=torch.randn(6, 3))
    esper.register_copy(body, "1")
    try:
        reference = weakref.ref(body)
        del body
        gc.collect()
        assert reference() is None
    finally:
        unregister("copy")


def test_registering_the_same_copy_again_changes_nothing_and_another_is_refused(small):
    assert esper.register_copy(small, "1") == "copy"
    other = esper.graft(vectors(Scaled()), at=["1"], probe=torch.randn(6, 3))
    with pytest.raises(BlueprintError, match="already registered"):
        esper.register_copy(other, "1")


def test_body_with_a_list_of_blueprints_takes_the_registered_copy():
    body = esper.graft(vectors(Block()), at=["1"], probe=torch.randn(6, 3), blueprints=["mlp"])
    esper.register_copy(body, "1")
    try:
        assert body.valid_blueprints()["1"] == ["mlp", "copy"]
    finally:
        unregister("copy")


def test_copy_of_a_bfloat16_block_has_its_dtype_and_a_cost():
    model = vectors(Block()).bfloat16()
    body = esper.graft(model, at=["1"], probe=torch.randn(6, 3).bfloat16())
    esper.register_copy(body, "1")
    try:
        body.plant("1", "copy")
        assert {p.dtype for p in body.slots["1"].seed.parameters()} == {torch.bfloat16}
        assert body.costs()["1"]["copy"].params == sum(p.numel() for p in model[1].parameters())
    finally:
        unregister("copy")


def test_copy_of_a_frozen_block_learns():
    model = vectors(Block())
    model[1].requires_grad_(False)
    body = esper.graft(model, at=["1"], probe=torch.randn(6, 3))
    esper.register_copy(body, "1")
    try:
        grower = make_grower(body)
        grower.germinate("1", "copy")
        assert all(p.requires_grad for p in body.slots["1"].seed.parameters())
        assert not any(p.requires_grad for p in model[1].parameters())
    finally:
        unregister("copy")


def test_unknown_module_is_refused_with_the_names_of_blocks():
    body = esper.graft(vectors(Branching()), at=["1"], probe=torch.randn(6, 3))
    with pytest.raises(UnknownNameError, match="1"):
        esper.register_copy(body, "2.block")


def test_slots_of_another_width_do_not_offer_the_copy():
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 4), Branching(), nn.Linear(4, 2))
    body = esper.graft(model, at=["0", "2"], probe=torch.randn(6, 3))
    name = esper.register_copy(body, "2")
    try:
        with pytest.warns(UserWarning, match="copy"):
            valid = body.valid_blueprints()
        assert [slot for slot, names in valid.items() if name in names] == ["2"]
    finally:
        unregister(name)


def test_copied_seed_joins_a_trained_classifier_and_lowers_its_loss():
    torch.manual_seed(0)
    x = torch.randn(128, 3)
    y = (x.square().sum(1) > 2.5).long()
    body = esper.graft(vectors(Branching()), at=["1"], probe=x[:6])
    name = esper.register_copy(body, "1")
    try:
        grower = make_grower(body)

        def fit(steps: int) -> float:
            for _ in range(steps):
                grower.optimizer.zero_grad()
                value = F.cross_entropy(body(x), y)
                value.backward()
                grower.optimizer.step()
            return value.item()

        before = fit(60)
        grower.germinate("1", name)
        assert fit(60) < before
        assert body.slots["1"].stage >= SeedStage.BLENDING
    finally:
        unregister(name)
