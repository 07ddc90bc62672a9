"""Test `graft`: models stay bit-identical, and errors name what cannot be grafted and a fix."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.kasmina.blueprints import blueprints_for
from esper.kasmina.graft import graft
from esper.leyline.actions import Operator
from esper.leyline.errors import BlueprintError, EsperError, GraftError, UnknownNameError
from esper.leyline.stages import SeedStage
from tests.support.models import (
    ZOO,
    DictNet,
    NamedNet,
    PlainCNN,
    ResidualNet,
    SharedNet,
    Transformer,
    TwoInputs,
    call,
    grow,
    images,
    main_output,
    perturb,
    tokens,
    vectors,
)


def leaves(output: Any) -> list[Any]:
    leaves_of_tree = pytree.tree_leaves(output)
    return [y for x in leaves_of_tree for y in (leaves(vars(x)) if hasattr(x, "__dataclass_fields__") else [x])]


def identical(a: Any, b: Any) -> bool:
    """Return whether all tensors in two nested outputs are bit-identical, NaN included."""
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    tensors = [(x, y) for x, y in pairs if isinstance(x, Tensor)]
    return bool(tensors) and all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in tensors)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("training", [False, True])
def test_grafted_model_output_is_bit_identical(name: str, training: bool):
    case = ZOO[name]
    model, x = case.model().train(training), case.batch(5)
    clone = copy.deepcopy(model)
    body = graft(model, list(case.at), probe=case.batch(4), select=case.select)

    torch.manual_seed(3)
    expected = call(clone, x)
    torch.manual_seed(3)
    output = call(body, x)

    assert type(output) is type(expected)
    assert identical(output, expected)
    assert identical(dict(model.named_buffers()), dict(clone.named_buffers())) or not list(model.buffers())


@pytest.mark.parametrize("name", ZOO)
def test_graft_keeps_keys_types_modes_buffers_and_rng_state(name: str):
    case = ZOO[name]
    model = case.model().train()
    next(m for m in model.modules() if not list(m.children())).eval()  # one layer is in eval mode
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    types = [type(m) for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    dice = torch.get_rng_state()

    body = graft(model, list(case.at), probe=case.batch(4), select=case.select)

    assert torch.equal(torch.get_rng_state(), dice)
    assert [m.training for m in model.modules()] == modes
    assert body.training
    assert [type(m) for m in model.modules()] == types
    assert list(body.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in body.state_dict().items())
    added = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) - sum(hooks)
    assert added == len(case.at)  # one hook per slot, and nothing else
    assert all(s.seed is None and s.stage == SeedStage.DORMANT for s in body.slots.values())


@pytest.mark.parametrize("name", ZOO)
def test_states_of_body_and_model_are_interchangeable(name: str):
    case = ZOO[name]
    body, other = case.body(seed=0), case.model(seed=1)

    body.load_state_dict(other.state_dict())
    assert identical(call(body.eval(), case.batch(4)), call(other.eval(), case.batch(4)))

    fresh = case.model(seed=2)
    fresh.load_state_dict(body.state_dict())
    assert identical(call(fresh.eval(), case.batch(4)), call(other.eval(), case.batch(4)))


@pytest.mark.parametrize("name", ZOO)
def test_each_slot_forks_at_the_innermost_exact_point(name: str):
    case = ZOO[name]
    body = case.body()
    for slot, point in body.forking.points.items():
        assert point == case.forks.get(slot, (False, slot)), slot


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("training", [False, True])
def test_uproot_restores_the_output_bit_identically(name: str, training: bool):
    case = ZOO[name]
    body, x = case.body().train(training), case.batch(5)
    state = copy.deepcopy(body.state_dict())

    def answer() -> Tensor:
        body.load_state_dict(state) if not body.structure() else None
        torch.manual_seed(3)
        return call(body, x)

    before = answer()
    for slot in body.slots:
        grow(body, slot, alpha=1.0)
    assert not identical(main_output(call(body, x)), main_output(before))
    for slot in body.slots.values():
        slot.remove_seed()
    assert identical(answer(), before)


def test_body_has_the_attributes_and_call_signature_of_its_model():
    model = TwoInputs()
    body = graft(model, ["image.0"], probe={"image": images(3), "vector": torch.randn(3, 4)})

    output = body(images(2), vector=torch.randn(2, 4))

    assert set(output) == {"logits", "features"}
    assert body.head is model.head
    with pytest.raises(AttributeError, match="nonsense"):
        _ = body.nonsense
    with pytest.raises(TypeError):
        body(images(2), torch.randn(2, 4))  # keyword only, as in the model
    assert inspect.signature(body.model.forward) == inspect.signature(model.forward)


def test_body_has_the_training_mode_of_its_model():
    for training in (True, False):
        body = graft(PlainCNN().train(training), ["features.0"], probe=images(3))
        assert {m.training for m in body.modules()} == {training}


def test_grown_body_pickles_with_its_hooks():
    body = ZOO["cnn"].body()
    grow(body, "features.1")

    again = pickle.loads(pickle.dumps(body))

    assert identical(again(images(4)), body(images(4)))
    again.slots["features.1"].remove_seed()
    assert not identical(again(images(4)), body(images(4)))


# -- slot selection


def test_patterns_match_one_level_and_mappings_set_slot_ids():
    model, probe = Transformer(), tokens(3)
    assert list(graft(copy.deepcopy(model), "blocks.*", probe=probe).slots) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(graft(copy.deepcopy(model), ["blocks.*.mlp", "embed"], probe=probe).slots) == [
        "blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp", "embed",
    ]  # fmt: skip
    body = graft(model, {"early": "blocks.0", "late.one": "blocks.2"}, probe=probe)
    assert {s.name: s.module_name for s in body.slots.values()} == {"early": "blocks.0", "late.one": "blocks.2"}
    grow(body, "late.one")
    assert any(k.startswith("esper.late/one.") for k in body.state_dict())


@pytest.mark.parametrize("name", ["values", "keys", "items"])
def test_module_names_may_equal_dict_methods(name: str):
    model = nn.Sequential()
    model.add_module(name, nn.Linear(8, 8))
    model.add_module("head", nn.Linear(8, 2))
    body = graft(model, name, probe=vectors(3))
    grow(body, name)
    assert f"esper.{name}.seed.1.weight" in body.state_dict() or body.structure()


AUTO = {
    "cnn": ["features.0", "features.1", "features.2"],
    "residual": ["stem", "stage1", "stage2"],
    "mlp_host": ["layers.0", "layers.1", "layers.2"],
    "transformer_host": ["blocks.0", "blocks.1", "blocks.2"],
    "resnet_host": ["blocks.0", "blocks.1", "blocks.3"],
    "tuple_blocks": ["blocks.0", "blocks.1", "blocks.2"],
    "gpt2": ["transformer.h.0", "transformer.h.1", "transformer.h.2"],
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1", "bert.encoder.layer.2"],
    "vit": ["vit.layers.0", "vit.layers.1", "vit.layers.2"],
    "encoder": ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"],
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_selects_the_blocks_and_prints_them(name: str, capsys: pytest.CaptureFixture[str]):
    case = ZOO[name]
    body = graft(case.model(), "auto", probe=case.batch(3))

    assert list(body.slots) == AUTO[name]
    assert capsys.readouterr().out == f"esper: slots proposed after {', '.join(AUTO[name])}\n"


def test_auto_on_sequential_prints_the_selected_modules(capsys: pytest.CaptureFixture[str]):
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)]
    body = graft(nn.Sequential(*layers), probe=images(3))

    assert list(body.slots) == ["1", "3", "4"]
    assert capsys.readouterr().out == "esper: slots proposed after 1, 3, 4\n"


def test_auto_proposes_no_dropout_beside_the_layer_before_it():
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Dropout2d()]
    body = graft(nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3)), "auto", probe=torch.zeros(3, 1, 8, 8))
    assert list(body.slots) == ["1", "4", "6"]


def test_auto_raises_where_no_slot_is_possible():
    with pytest.raises(GraftError, match="no module can have a slot"):
        graft(nn.Linear(8, 2), probe=vectors(3))


def test_slot_follows_dtype_of_its_features():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        body = graft(ResidualNet().to(dtype).eval(), ["stage1", "stage2.0.bn2"], probe=images(3).to(dtype))
        assert body.forking.points == {"stage1": (False, "stage1"), "stage2.0.bn2": (True, "stage2.0")}
        slot = grow(body, "stage1")
        assert {p.dtype for p in slot.parameters()} == {dtype}
        assert body(images(3).to(dtype)).dtype == dtype


def test_cross_sample_arithmetic_is_detected_at_any_scale():
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale, self.first, self.head = scale, nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.first(x) * self.scale)
            return self.head((h - h.mean(0)) / self.scale)

    for scale in (1e-5, 1.0, 1e5):
        model = Scaled(scale)
        model.norm = nn.Identity()
        assert graft(model, ["norm"], probe=vectors(3)).forking.points == {"norm": None}


# -- what cannot be grafted


class Halves(nn.Module):
    """Model that calls one module twice with features of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.wide, self.head = nn.ReLU(), nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.wide(self.relu(x))))


class InvalidOutputs(nn.Module):
    """Model with modules whose outputs are not valid for a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.rank, self.deep, self.text = Rank(), nn.Unflatten(1, (2, 2, 1, 1, 2)), Text()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.rank(x) + self.deep(x).flatten(1) + len(self.text(x))


class Rank(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argsort(1)


class Text(nn.Module):
    def forward(self, _x: Tensor) -> str:
        return "text"


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def compiled_in_place() -> nn.Module:
    model = PlainCNN()
    model.compile(backend="eager")
    return model


def compiled_inside() -> nn.Module:
    model = PlainCNN()
    model.features.compile(backend="eager")
    return model


def grafted_before() -> nn.Module:
    model = PlainCNN()
    graft(model, ["features.0"], probe=images(3))
    return model


REFUSED: dict[str, tuple[Any, Any, Any, dict[str, Any], str]] = {
    "unknown name": (PlainCNN, "feature.1", images(3), {}, "no module named 'feature.1'. Did you mean 'features.1'"),
    "unknown pattern": (PlainCNN, "block*", images(3), {}, "no module named 'block"),
    "unknown in a mapping": (PlainCNN, {"a": "haed"}, images(3), {}, "Did you mean 'head'"),
    "nothing named": (PlainCNN, [], images(3), {}, "at='auto'"),
    "not reached": (InvalidOutputs, ["first", "never"], vectors(3), {}, "'never' was not called .* these did: first"),
    "integer output": (InvalidOutputs, "rank", vectors(3), {}, "'rank' returns torch.int64; a seed needs floating"),
    "wrong ndim": (InvalidOutputs, "deep", vectors(3), {}, r"'deep' returns shape \(3, 2, 2, 1, 1, 2\).*no blueprint"),
    "no tensor": (InvalidOutputs, "text", vectors(3), {}, "'text' returns a str"),
    "ambiguous dict": (DictNet, "blocks.0", vectors(3), {}, r"'blocks.0' returns a dict .* select=.*'x', 'features'"),
    "select of nothing": (DictNet, "blocks.0", vectors(3), {"blocks.0": "y"}, "not an item of the output of module"),
    "select on a tensor": (PlainCNN, "head", images(3), {"head": 0}, "'head', but it returns a tensor"),
    "select elsewhere": (DictNet, "head", vectors(3), {"blocks.7": "x"}, "no module with a slot named 'blocks.7'"),
    "two slots": (PlainCNN, {"a": "head", "b": "head"}, images(3), {}, "`at` names module 'head' for two slots"),
    "shapes that change": (Halves, "relu", vectors(3), {}, "'relu' is called 2 times with features of different kinds"),
    "two samples": (PlainCNN, "head", images(2), {}, "2 sample.*at least 3"),
    "no samples": (PlainCNN, "head", 3.0, {}, "no tensor with a batch dimension"),
    "wrong probe": (PlainCNN, "head", vectors(3), {}, "does not run on 3 samples of the probe"),
    "wrong tokens": (Transformer, "blocks.0", tokens(3) + 99, {}, "IndexError"),
    "DDP": (lambda: DistributedDataParallel(PlainCNN()), "head", images(3), {}, "then wrap the body"),
    "compiled": (lambda: torch.compile(PlainCNN()), "head", images(3), {}, "before torch.compile"),
    "compiled in place": (compiled_in_place, "head", images(3), {}, "compiled in place"),
    "compiled inside": (compiled_inside, "head", images(3), {}, r"compiled in place \(features\)"),
    "scripted": (lambda: torch.jit.trace(PlainCNN(), images(3)), "head", images(3), {}, "graft the model it was made"),
    "a body": (lambda: graft(PlainCNN(), "head", probe=images(3)), "head", images(3), {}, "in one call of esper.graft"),
    "grafted before": (grafted_before, "head", images(3), {}, "has slots already .after 'features.0'"),
    "a child named esper": (lambda: nn.Sequential(), "x", images(3), {}, "no module named 'x'"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", REFUSED)
def test_graft_errors_suggest_a_fix_and_leave_the_model_unchanged(what: str):
    build, at, probe, select, message = REFUSED[what]
    model = build()
    hooks = [len(m._forward_hooks) for m in model.modules()]

    with pytest.raises((GraftError, UnknownNameError), match=message):
        graft(model, at, probe=probe, select=select)

    assert [len(m._forward_hooks) for m in model.modules()] == hooks


def test_model_with_a_child_named_esper_is_rejected():
    model = PlainCNN()
    model.esper = nn.Linear(2, 2)
    with pytest.raises(GraftError, match="Rename it"):
        graft(model, "head", probe=images(3))


def test_graft_errors_are_esper_errors():
    assert issubclass(GraftError, EsperError)
    assert issubclass(UnknownNameError, EsperError)


def test_select_sets_the_tuple_item_of_the_features():
    body = graft(NamedNet(), ["blocks.0"], probe=vectors(3), select={"blocks.0": 1})
    assert body.slots["blocks.0"].spec.shape == (1,)  # the scale


# -- germination changes nothing

HOSTS = ("cnn_host", "mlp_host", "transformer_host", "residual")
LIFE = [
    (SeedStage.GERMINATED, 0.0), (SeedStage.TRAINING, 0.0), (SeedStage.BLENDING, 0.3), (SeedStage.HOLDING, 0.7),
    (SeedStage.FOSSILIZED, 1.0),
]  # fmt: skip
BIRTHS = [
    (host, slot, blueprint, operator)
    for host in HOSTS
    for slot in (ZOO[host].at[1],)
    for blueprint in ("noop", *blueprints_for({"mlp_host": "vector", "transformer_host": "sequence"}.get(host, "map")))
    for operator in Operator
    if not (blueprint == "noop" and operator == Operator.GATE)  # a gate requires a seed with parameters
]


@pytest.mark.parametrize(("host", "slot", "blueprint", "operator"), BIRTHS)
def test_germination_keeps_the_output_bit_identical(host: str, slot: str, blueprint: str, operator: Operator):
    case = ZOO[host]
    x = case.batch(4)
    for training in (False, True):
        body = case.body().train(training)
        clone = copy.deepcopy(body)
        dice = torch.get_rng_state()
        body.plant(slot, blueprint, operator, rng_seed=5)
        assert torch.equal(torch.get_rng_state(), dice)
        for stage, alpha in LIFE:
            body.set_slot(body.slots[slot], stage, alpha)
            torch.manual_seed(0)
            output = call(body, x)
            torch.manual_seed(0)
            expected = call(clone, x)
            assert torch.equal(output, expected), (training, alpha, stage)
            assert output.stride() == expected.stride()


def test_equal_rng_seeds_give_equal_seed_weights():
    a, b = ZOO["cnn"].body(), ZOO["cnn"].body()
    torch.randn(7)
    for body in (a, b):
        body.plant("features.0", "conv_heavy", Operator.GATE, rng_seed=9)
    b.slots["features.0"].set_operator(Operator.ADD)
    b.slots["features.0"].set_operator(Operator.GATE)
    pairs = zip(a.slots["features.0"].parameters(), b.slots["features.0"].parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


# -- isolation


class NonFiniteSeed(nn.Module):
    """Seed whose output is inf or NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.weight * float("inf") - h * float("inf")


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
@pytest.mark.parametrize("operator", Operator)
@pytest.mark.parametrize("kind", ["sane", "wild", "dropout"])
@pytest.mark.parametrize("host", ["cnn", "residual", "transformer_host", "gpt2", "token_norm"])
def test_training_seed_does_not_affect_the_host(host: str, kind: str, operator: Operator, incubation: Any):
    """Compare output, gradients, buffers and random state over three batches with a body without seeds."""
    case = ZOO[host]
    body = case.body().train()
    clone = copy.deepcopy(body)
    body.incubation = incubation
    for name in body.slots:
        slot = grow(body, name, operator=operator, stage=SeedStage.TRAINING)
        if kind == "wild":
            slot.seed = NonFiniteSeed()
        if kind == "dropout":
            slot.seed = nn.Sequential(nn.Dropout(0.5), slot.seed)
        body.set_slot(slot, SeedStage.TRAINING, 0.0)

    def loss_of(model: nn.Module) -> Tensor:
        return main_output(call(model, case.batch(4))).square().mean()

    dice = []
    for model in (body, clone):
        torch.manual_seed(0)
        for _ in range(3):
            loss = loss_of(model)
            loss.backward()
            if incubation == "shadow" and model is body:
                body.shadow_backward(lambda: loss_of(body))
        dice.append(torch.get_rng_state())
    assert torch.equal(*dice)
    assert identical(loss_of(body.eval()), loss_of(clone.eval()))
    for (name, p), q in zip(body.model.named_parameters(), clone.model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    assert all(torch.equal(a, b) for a, b in zip(body.model.buffers(), clone.model.buffers(), strict=True))
    for slot in body.slots.values():
        gradients = [p.grad for p in slot.parameters() if p.grad is not None]
        assert gradients, slot.name  # each seed received a gradient
        assert kind == "wild" or sum(g.abs().sum() for g in gradients) > 0


def test_shadow_pass_keeps_host_buffers():
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = (
                nn.Conv2d(3, 4, 3),
                nn.InstanceNorm2d(4, track_running_stats=True),
                nn.Linear(4, 2),
            )
            self.register_buffer("seen", torch.zeros(()))
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return self.head(self.spectral(self.norm(self.first(x)).mean((2, 3))))

    body = graft(Remembers(), ["first"], probe=images(3)).train()
    grow(body, "first", stage=SeedStage.TRAINING)
    body(images(4)).sum().backward()
    before = copy.deepcopy(body.state_dict())

    body.shadow_backward(lambda: body(images(4)).square().sum())

    assert all(torch.equal(v, before[k]) for k, v in body.state_dict().items())
    assert all(p.grad is not None for p in body.slots["first"].parameters())


def test_shadow_gradient_equals_gradient_at_full_alpha():
    body = ZOO["cnn"].body().eval()
    slot = grow(body, "features.0", "conv_light", stage=SeedStage.TRAINING)
    params = list(slot.parameters())

    body.shadow_backward(lambda: body(images(4)).square().sum())

    body.set_slot(slot, SeedStage.BLENDING, 1.0)
    expected = torch.autograd.grad(body(images(4)).square().sum(), params)
    assert all(torch.allclose(p.grad, g) for p, g in zip(params, expected, strict=True))


def test_shadow_pass_works_with_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(PlainCNN):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.features, x, use_reentrant=False).mean((2, 3)))

    plain, saving = PlainCNN(), Checkpointed()
    plain.dropout.p = 0.0
    saving.load_state_dict(plain.state_dict())
    grads = []
    for model in (plain, saving):
        body = graft(model, ["features.1"], probe=images(3)).train()
        slot = grow(body, "features.1", stage=SeedStage.TRAINING)
        body.shadow_backward(lambda body=body: body(images(4)).square().sum())
        grads.append([p.grad for p in slot.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_seed_learns_on_a_frozen_host(incubation: Any):
    """torch 2.13 crashes in GroupNorm's backward on channels_last features without `requires_grad`."""
    body = ZOO["cnn_channels_last"].body().train()
    for p in body.model.parameters():
        p.requires_grad_(False)
    body.incubation = incubation
    x = ZOO["cnn_channels_last"].batch(4)
    slot = grow(body, "features.1", "conv_heavy", stage=SeedStage.TRAINING)

    if incubation == "shadow":
        body.shadow_backward(lambda: body(x).square().sum())
    else:
        body(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in slot.parameters())

    body.zero_grad()
    body.set_slot(slot, SeedStage.FOSSILIZED, 1.0)
    body(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in slot.parameters())


@pytest.mark.parametrize("operator", Operator)
def test_straight_through_gradient_matches_the_operator(operator: Operator):
    """For small Δ the seed's gradient is that of its blended change, evaluated at the unmodified host."""
    body = ZOO["mlp_host"].body().train()
    body.incubation = "straight_through"
    slot = grow(body, "layers.2", "lora", operator=operator, stage=SeedStage.TRAINING, scale=1e-3)
    body.set_slot(slot, SeedStage.TRAINING, 0.0)
    body(vectors(4)).square().sum().backward()

    h = body.model.layers[1](body.model.layers[0](vectors(4)))
    h = body.model.layers[2][1](body.model.layers[2][0](h)).detach().requires_grad_()
    upstream = torch.autograd.grad(body.model.head(h).square().sum(), h)[0]
    body.set_slot(slot, SeedStage.BLENDING, 1.0)
    params = list(slot.parameters())
    expected = torch.autograd.grad(slot.switched_on(h), params, upstream)
    for p, g in zip(params, expected, strict=True):
        assert g.abs().max() > 0
        assert (p.grad - g).abs().max() < 0.02 * g.abs().max()


@pytest.mark.parametrize("operator", Operator)
def test_full_alpha_keeps_gradients_of_layers_before_the_slot(operator: Operator):
    body = ZOO["mlp_host"].body()
    slot = grow(body, "layers.1", operator=operator, stage=SeedStage.FOSSILIZED, alpha=1.0)
    before = body.model.layers[0][0].weight
    features: dict[str, Tensor] = {}
    hook = body.model.layers[1].register_forward_hook(lambda _m, _a, out: features.update(after=out))
    inner = body.model.layers[1][1].register_forward_hook(lambda _m, _a, out: features.update(h=out))
    body(vectors(6)).square().sum().backward()
    hook.remove()
    inner.remove()

    upstream = torch.autograd.grad(
        body.model.head(body.model.layers[2](features["after"])).square().sum(), features["after"]
    )[0]
    h = features["h"].detach().requires_grad_()
    through = torch.autograd.grad(slot.switched_on(h) - h, h, upstream)[0]
    x = body.model.layers[0](vectors(6))
    body.model.layers[0].zero_grad()
    again = body.model.layers[1][1](body.model.layers[1][0](x))
    expected = torch.autograd.grad(again, before, upstream + through)[0]

    body.zero_grad()
    body(vectors(6)).square().sum().backward()
    assert before.grad.abs().sum() > 0
    assert torch.allclose(before.grad, expected, atol=1e-4)


def test_seed_of_a_shared_module_runs_at_each_call():
    model = SharedNet()
    body = graft(model, ["shared"], probe=vectors(3))
    slot = grow(body, "shared", alpha=1.0)
    calls: list[int] = []
    slot.seed.register_forward_hook(lambda *_: calls.append(1))
    body(vectors(4))
    assert len(calls) == 3


def test_perturb_makes_delta_non_zero():
    body = ZOO["mlp_host"].body()
    slot = body.plant("layers.0", "lora")
    assert not slot.seed(vectors(2)).any()
    perturb(slot)
    assert slot.seed(vectors(2)).any()


@pytest.mark.parametrize("blueprints", ["norm", b"norm", 5, [3], None])
def test_blueprints_that_are_no_list_of_names_are_refused(blueprints: Any):
    with pytest.raises(GraftError, match="blueprints must be"):
        graft(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), at=["1"], probe=torch.randn(4, 6), blueprints=blueprints)


def test_allowed_blueprints_hold_for_planting_and_loading():
    def body(names: Any) -> Any:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        return graft(model, at=["1"], probe=torch.randn(4, 6), blueprints=names)

    free, restricted = body(()), body(iter(["norm", "norm"]))
    assert restricted.allowed_blueprints == ("norm",)
    assert restricted.valid_blueprints() == {"1": ["norm"]}
    free.set_slot(free.plant("1", "mlp_small"), SeedStage.HOLDING, 1.0)
    with pytest.raises(BlueprintError, match=r"'mlp_small' is not among .* grafted with: norm\. Use one"):
        restricted.plant("1", "mlp_small")
    with pytest.raises(BlueprintError, match="'mlp_small' is not among"):
        restricted.load_state_dict(free.state_dict())
    assert restricted.slots["1"].seed is None
