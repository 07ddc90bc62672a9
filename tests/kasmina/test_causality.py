"""Grafting finds out whether a model looks ahead, and offers only seeds that fit: the future never leaks."""

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.kasmina.blueprints import blueprints_for
from esper.leyline.actions import Operator
from esper.leyline.errors import GraftError
from esper.leyline.stages import SeedStage
from tests.support.grower import EASY
from tests.support.models import bert, gpt2, vit

IDS = torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(0))
X = torch.randn(4, 11, 6, generator=torch.Generator().manual_seed(1))  # [B, T, D]


class Tagger(nn.Module):
    """One recurrent layer and a prediction per position."""

    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.rnn = kind(6, 8, **options)
        self.head = nn.Linear(8 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Causal1d(nn.Module):
    """A temporal convolutional network: padded on the left only."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv1d(6, 8, 3), nn.Conv1d(8, 8, 3), nn.Conv1d(8, 3, 1)

    def forward(self, x):
        h = torch.relu(self.first(nn.functional.pad(x, (2, 0))))
        return self.head(torch.relu(self.second(nn.functional.pad(h, (2, 0)))))


class LastOnly(nn.Module):
    """A causal language model that returns the prediction of the last position only, as some do at inference."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 9)

    def forward(self, ids):
        return self.head(self.layer(self.embed(ids))[0][:, [-1]])


class EncoderDecoder(nn.Module):
    """The encoder looks ahead, the decoder does not, though each of its positions sees the whole input."""

    def __init__(self):
        super().__init__()
        self.encode = nn.GRU(6, 8, batch_first=True, bidirectional=True)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)
        self.decode, self.head = nn.GRU(6, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, source, target):
        memory = self.encode(source)[0]
        h = self.decode(target)[0]
        return self.head(h + self.cross(h, memory, memory)[0])


def encoder(batch_first):
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def conv1d():
    return nn.Sequential(
        nn.Conv1d(6, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def conv3d():
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 3)
    )


CASES = {
    "gpt2": (gpt2, "transformer.h.1", {"input_ids": IDS}, "sequence", None),
    "gpt2 with labels and mask": (
        gpt2, "transformer.h.2",
        {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}, "sequence", None,
    ),
    "bert, embeddings": (bert, "bert.embeddings", {"input_ids": IDS}, "bidirectional", None),
    "bert, last layer": (bert, "bert.encoder.layer.2", {"input_ids": IDS}, "bidirectional", None),
    "vit, last layer": (vit, "vit.layers.2", {"pixel_values": torch.randn(4, 3, 8, 8)}, "bidirectional", None),
    "lstm": (lambda: Tagger(batch_first=True), "rnn", X, "sequence", None),
    "gru": (lambda: Tagger(nn.GRU, batch_first=True), "rnn", X, "sequence", None),
    "lstm, both ways": (lambda: Tagger(batch_first=True, bidirectional=True), "rnn", X, "bidirectional", None),
    "lstm, time first": (lambda: Inside(Tagger()), "inner.rnn", X, "sequence", (0, 1)),
    "encoder": (lambda: encoder(True), "layers.1", X, "bidirectional", None),
    "encoder, time first": (lambda: Inside(encoder(False)), "inner.layers.0", X, "bidirectional", (0, 1)),
    "conv1d": (conv1d, "1", X.transpose(1, 2), "signal", None),
    "causal conv1d": (Causal1d, "second", X.transpose(1, 2), "sequence", (1, 2)),
    "conv3d": (conv3d, "1", torch.randn(4, 2, 3, 4, 5), "volume", None),
    "last position only": (LastOnly, "layer", IDS, "sequence", None),
    "encoder of two": (EncoderDecoder, "encode", (X, X[:, :7]), "bidirectional", None),
    "decoder of two": (EncoderDecoder, "decode", (X, X[:, :7]), "sequence", None),
    "decoder of two, same length": (EncoderDecoder, "decode", (X, X), "sequence", None),
}  # fmt: skip


class Inside(nn.Module):
    """A time-major model behind a batch-first interface."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("case", CASES)
def test_layout_of_a_model_is_found(case):
    make, at, probe, layout, swapped = CASES[case]
    torch.manual_seed(0)
    spec = esper.graft(make(), at, probe=probe).slots[at].spec
    assert (spec.layout, spec.swapped) == (layout, swapped)


def outputs(body, x):
    result = body(**x) if isinstance(x, dict) else body(*x) if isinstance(x, tuple) else body(x)
    return result.logits if hasattr(result, "logits") else result


PER_POSITION = {
    "gpt2": 1, "lstm": 1, "gru": 1, "lstm, time first": 1, "causal conv1d": 2, "decoder of two, same length": 1,
}  # fmt: skip


@pytest.mark.parametrize("operator", [Operator.ADD, Operator.GATE])
@pytest.mark.parametrize("case", PER_POSITION)
def test_no_offered_seed_leaks_the_future_into_a_causal_model(case, operator):
    """With every offered seed at full strength, a change of the last input changes only the last output."""
    make, at, probe, *_ = CASES[case]
    axis = PER_POSITION[case]
    torch.manual_seed(0)
    body = esper.graft(make(), at, probe=probe).eval()
    slot = body.slots[at]
    for name in body.valid_blueprints()[at]:
        body.plant(at, name, operator, rng_seed=1)
        for p in slot.parameters():
            nn.init.normal_(p, std=0.3)
        body.set_slot(slot, SeedStage.HOLDING, 1.0)
        before = outputs(body, probe)
        after = outputs(body, changed_last(probe, axis))
        length = before.shape[axis] - 1
        torch.testing.assert_close(after.narrow(axis, 0, length), before.narrow(axis, 0, length))
        assert not torch.allclose(after.select(axis, -1), before.select(axis, -1))
        slot.remove_seed()


def changed_last(probe, axis):
    """Return the probe with another last position; of two inputs, the decoder's."""
    if isinstance(probe, dict):
        ids = probe["input_ids"].clone()
        ids[:, -1] = (ids[:, -1] + 1) % 9
        return {**probe, "input_ids": ids}
    first, x = (probe[:1], probe[1]) if isinstance(probe, tuple) else ((), probe)
    x = x.clone()
    x.select(axis, -1).add_(1.0)
    return (*first, x) if first else x


@pytest.mark.parametrize("case", CASES)
def test_every_offered_seed_learns_forks_and_hardens(case):
    make, at, probe, layout, _ = CASES[case]
    torch.manual_seed(0)
    body = esper.graft(make(), at, probe=probe)
    assert body.valid_blueprints()[at] == blueprints_for(layout)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    grower = esper.Grower(body, optimizer, quality=lambda output, _: score(output), controller="none")
    name = "attention" if layout in ("sequence", "bidirectional") else "conv_light"
    grower.germinate(at, name, style="GATED_GATE")
    for _ in range(2):
        optimizer.zero_grad()
        outputs(body, probe).square().mean().backward()
        optimizer.step()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in body.slots[at].parameters())
    x = {k: v for k, v in probe.items() if k != "labels"} if isinstance(probe, dict) else probe
    grower.step([(x, torch.zeros(4))])
    plain = esper.harden(body).eval()
    torch.testing.assert_close(outputs(plain, x), outputs(body.eval(), x), rtol=1e-4, atol=1e-5)


def score(output) -> Tensor:
    result = output.logits if hasattr(output, "logits") else output
    return result.flatten(1).mean(1)


@pytest.mark.parametrize("incubation", ["straight_through", "shadow"])
@pytest.mark.parametrize("case", ["conv1d", "conv3d", "causal conv1d", "lstm, time first", "bert, last layer"])
def test_an_isolated_seed_does_not_affect_models_of_other_layouts(case, incubation):
    make, at, probe, layout, _ = CASES[case]
    torch.manual_seed(0)
    body = esper.graft(make(), at, probe=probe).eval()
    before = outputs(body, probe)
    grower = esper.Grower(
        body, torch.optim.SGD(body.parameters(), lr=0.1), rules=EASY, incubation=incubation, controller="none"
    )
    grower.germinate(at, "norm" if layout != "volume" else "conv_heavy")
    grower.advance(at)
    body.train()
    loss = outputs(body, probe).square().mean()
    loss.backward()
    if incubation == "shadow":
        grower.shadow(lambda: outputs(body, probe).square().mean())
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in body.slots[at].parameters())
    assert torch.equal(outputs(body.eval(), probe), before)


def test_a_layout_without_blueprint_is_refused_at_graft():
    model = nn.Sequential(nn.Unflatten(1, (2, 3, 1, 1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(GraftError, match=r"for which there is no blueprint\. Slots take \[B, C, H, W\]"):
        esper.graft(model, at=["1"], probe=torch.randn(4, 12))
