"""Test that a slot whose output the model does not use is rejected, and that the error names the used item."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.kasmina.forking import ForkError
from esper.kasmina.graft import graft
from esper.kasmina.harden import harden
from esper.kasmina.probing import unread_modules
from esper.kasmina.slot import Select
from esper.leyline.actions import Operator
from esper.leyline.errors import GraftError
from esper.leyline.stages import SeedStage
from esper.tolaria.coalitions import evaluate


class LastState(nn.Module):
    """LSTM of which only h_n is used."""

    def __init__(self, layers: int = 1, *, batch_first: bool = True) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=layers, batch_first=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, (h_n, _) = self.lstm(x)
        return self.head(h_n[-1])


class Ignored(nn.Module):
    """Model that calls a layer and does not use its output."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.ignored, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.ignored(x)
        return self.head(self.used(x))


class ZeroBranch(nn.Module):
    """Residual branch with zero last weights: used, but without effect on the output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.norm(self.inner(x)))


class FrozenTrunk(nn.Module):
    """Trunk under no_grad: its output is used, but receives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.trunk(x)
        return self.head(h)


class NumpyInside(nn.Module):
    """Model that converts to numpy inside, which fails on tensors that require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.from_numpy(self.trunk(x).numpy() * 2))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("batch_first", [True, False])
def test_lstm_with_unused_output_is_rejected_with_a_select_hint(layers, batch_first):
    probe = torch.randn(3, 3, 4)
    with pytest.raises(GraftError, match=r"does not depend on item 0 of .*'lstm'.*use select=\{'lstm': \(1, 0\)\}"):
        graft(LastState(layers, batch_first=batch_first), "lstm", probe=probe)


def test_selected_item_grows_evaluates_and_hardens():
    torch.manual_seed(0)
    model, x = LastState(3), torch.randn(5, 7, 4)
    body = graft(model, "lstm", probe=x, select={"lstm": (1, 0)})
    before = body(x)
    slot = body.plant("lstm", "lora", Operator.ADD)
    with torch.no_grad():
        for p in slot.parameters():
            p.add_(torch.randn_like(p))
    body.set_slot(slot, SeedStage.HOLDING, 1.0)
    grown = body(x)
    assert not torch.allclose(grown, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = evaluate(body, [(x, torch.zeros(5))], lambda out, _: out[:, 0])
    assert torch.allclose(result.row((True,)), grown[:, 0], atol=1e-6)
    assert torch.allclose(result.row((False,)), before[:, 0], atol=1e-6)
    assert torch.allclose(harden(body).eval()(x), body.eval()(x), atol=1e-5)


@pytest.mark.parametrize("layers", [1, 3])
def test_recurrent_state_has_vector_layout_and_forks_on_axis_1(layers):
    """The first dimension of h_n is layers, so a seed that mixes along axis 1 would mix samples."""
    body = graft(LastState(layers), "lstm", probe=torch.randn(3, 5, 4), select={"lstm": (1, 0)})
    spec = body.slots["lstm"].spec
    assert (spec.layout, spec.batch_axis, spec.shape) == ("vector", 1, (layers, spec.dim))
    assert body.forking.points == {"lstm": (False, "lstm")}


def test_slot_that_cannot_fork_names_the_batch_axis_and_a_remedy():
    """Inputs are [T, B, D]: the probe counts samples on axis 0, so no fork point is found."""
    body = graft(LastState(batch_first=False), "lstm", probe=torch.randn(5, 7, 4), select={"lstm": (1, 0)})
    assert body.forking.points == {"lstm": None}
    with pytest.raises(ForkError, match="slot 'lstm' cannot fork: its features have the batch on axis 1"):
        body.forking.plan([(False,), (True,)], ["lstm"], (True,))


class Functional(nn.Module):
    """Conv1d and a functional activation, then dropout. Square features: C = L = 8."""

    def __init__(self, *, transposes: bool) -> None:
        super().__init__()
        self.transposes = transposes
        self.conv, self.dropout, self.head = nn.Conv1d(8, 8, 3, padding=1), nn.Dropout(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.conv(x))
        h = self.dropout(h.transpose(1, 2) if self.transposes else h)
        return self.head(h.mean(1 if self.transposes else 2))


def ending(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


CHANNELS_FIRST = {
    "activation after Conv1d": (ending(nn.Conv1d(8, 4, 3), nn.ReLU(), width=24), "1"),
    "dropout after pool": (ending(nn.Conv1d(8, 4, 3), nn.MaxPool1d(2), nn.Dropout(), width=12), "2"),
    "square block": (ending(nn.Sequential(nn.Conv1d(8, 8, 1), nn.ReLU()), width=64), "0"),
    "functional": (Functional(transposes=False), "dropout"),
}


@pytest.mark.parametrize("case", CHANNELS_FIRST)
def test_channels_before_length_are_detected(case):
    model, at = CHANNELS_FIRST[case]
    spec = graft(model, at, probe=torch.randn(3, 8, 8)).slots[at].spec
    assert spec.layout == "signal" or spec.swapped == (1, 2)
    assert spec.dim == spec.shape[0]


def test_transposed_convolution_output_is_a_sequence():
    body = graft(Functional(transposes=True), "dropout", probe=torch.randn(3, 8, 8))
    assert body.slots["dropout"].spec.layout == "sequence"


@pytest.mark.parametrize("key", [(1, 5), (1, "x"), (1,), (0, 0)])
def test_select_path_without_tensor_is_rejected(key):
    with pytest.raises(GraftError, match="lstm"):
        graft(LastState(), "lstm", probe=torch.randn(3, 5, 4), select={"lstm": key})


def test_module_with_unused_output_is_rejected():
    model = Ignored()
    with pytest.raises(GraftError, match=r"what module 'ignored' returns.*Graft after a module whose output is used"):
        graft(model, ["used", "ignored"], probe=torch.randn(3, 4))
    assert not any(m._forward_hooks for m in model.modules())
    assert model.training


@pytest.mark.parametrize(("build", "at"), [(ZeroBranch, "inner"), (FrozenTrunk, "trunk"), (NumpyInside, "trunk")])
def test_used_slot_without_gradient_or_effect_is_accepted(build, at):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(graft(build(), at, probe=torch.randn(3, 4)).slots) == [at]


def test_auto_selects_only_used_modules():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lost, self.second = nn.Tanh(), nn.Tanh(), nn.Tanh()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            self.lost(h)
            return self.head(self.second(h))

    assert list(graft(Net(), probe=torch.randn(3, 4)).slots) == ["first", "second"]


def test_probing_keeps_gradients_and_rng_state():
    model, probe = FrozenTrunk(), torch.randn(3, 4)
    state = torch.get_rng_state()
    assert unread_modules(model, probe, {"trunk": Select(), "head": Select()}) == {}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


# -- errors of the user's model are not handled as fork errors


class RaisesOnLargeInput(nn.Module):
    """Model that raises on inputs above 100, and on batches larger than `at_once` if set."""

    def __init__(self, *, at_once: int | None = None) -> None:
        super().__init__()
        self.first, self.head, self.at_once = nn.Linear(4, 4), nn.Linear(4, 3), at_once

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if x.abs().max() > 100:
            raise ValueError("the input is out of range")
        if self.at_once is not None and len(h) > self.at_once:
            raise ValueError("too many samples at once")
        return self.head(h)


def two_configurations(model: nn.Module) -> esper.Body:
    body = graft(model, "first", probe=torch.randn(3, 4))
    body.set_slot(body.plant("first", "lora"), SeedStage.HOLDING, 1.0)
    return body


def test_model_error_is_raised_and_forking_stays_enabled():
    body = two_configurations(RaisesOnLargeInput())
    assert body.forking.points["first"] is not None
    with pytest.raises(ValueError, match="out of range"):
        evaluate(body, [(torch.full((5, 4), 1000.0), torch.zeros(5))], lambda out, _: out[:, 0])
    assert body.forking.failure == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(body, [(torch.randn(5, 4), torch.zeros(5))], lambda out, _: out[:, 0])


def test_seed_error_is_raised():
    body = two_configurations(RaisesOnLargeInput())
    body.slots["first"].seed = nn.Linear(7, 7)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        evaluate(body, [(torch.randn(5, 4), torch.zeros(5))], lambda out, _: out[:, 0])
    assert body.forking.failure == ""


def test_fork_error_falls_back_to_one_by_one_evaluation():
    body = two_configurations(RaisesOnLargeInput(at_once=6))
    with pytest.warns(UserWarning, match="one by one.*too many samples at once"):
        result = evaluate(body, [(torch.randn(5, 4), torch.zeros(5))], lambda out, _: out[:, 0])
    assert result.scores.shape == (2, 5)


def test_model_failing_on_noise_is_grafted_with_a_warning():
    class Roots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Softplus()

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if (h < 0).any():
                raise ValueError("negative")
            return h.sqrt()

    with pytest.warns(UserWarning, match="fails when noise changes the features at slot 'first'.*negative"):
        assert graft(Roots(), "first", probe=torch.randn(3, 4)).forking.points == {"first": None}
