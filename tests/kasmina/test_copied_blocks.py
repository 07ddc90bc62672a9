"""Test seeds that start as copies of blocks: what they copy, their laws, saving and export."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.kasmina.blueprints import unregister
from esper.kasmina.copied_blocks import CopiedBlock, last_projections
from esper.kasmina.hosts.resnet import ResidualCNNHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.leyline.errors import BlueprintError, UnknownNameError
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
    assert last_projections(copy.deepcopy(model.blocks[0]), h) == ["attention.proj", "mlp.2"]
    layer = trained(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True))
    assert last_projections(copy.deepcopy(layer), h) == ["self_attn.out_proj", "linear2"]


@pytest.mark.parametrize("block", [PostNorm(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())], ids=["post-norm", "plain"])
def test_other_blocks_are_refused_with_the_reason(block):
    body = esper.graft(vectors(block), at=["1"], probe=torch.randn(6, 3))
    assert esper.repeatable_blocks(body) == []
    with pytest.raises(BlueprintError, match=r"'1' cannot be copied.*can be copied: none"):
        esper.register_copy(body, "1")


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
