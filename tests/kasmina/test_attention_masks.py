"""Attention seeds use the mask of the layer they follow: padding does not change what a model computes."""

import copy
import warnings

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    T5Config,
    T5EncoderModel,
)

import esper
from esper.kasmina.attention_masks import MaskArgument
from esper.kasmina.blueprints.registry import Layout
from esper.leyline.stages import SeedStage
from esper.tolaria.coalitions import evaluate

SIZES = {"vocab_size": 30, "max_position_embeddings": 16}


def bert(attention="sdpa"):
    config = BertConfig(
        **SIZES, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    return BertForSequenceClassification._from_config(config, attn_implementation=attention)


def distilbert():
    config = DistilBertConfig(**SIZES, dim=16, n_layers=2, n_heads=2, hidden_dim=16, num_labels=3)
    return DistilBertForSequenceClassification(config)


def t5():
    return T5EncoderModel(T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2))


class Encoder(nn.Module):
    """torch's own layers, with the batch or the time first."""

    def __init__(self, batch_first):
        super().__init__()
        self.batch_first, self.embed = batch_first, nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None):
        h = self.embed(input_ids)
        h = h if self.batch_first else h.transpose(0, 1)
        excluded = None if attention_mask is None else attention_mask == 0
        h = self.encoder(h, src_key_padding_mask=excluded)
        return self.head(h[:, 0] if self.batch_first else h[0])


class Own(nn.Module):
    """A user's own layers, which take the mask [B, T] as it is."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(16, 16)

        def forward(self, h, attention_mask):
            weights = attention_mask[..., None].to(h)
            return h + torch.relu(self.mix((h * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)))

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(30, 16), self.Layer(), self.Layer()
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask):
        h = self.first(self.embed(input_ids), attention_mask)
        return self.head(self.second(h, attention_mask=attention_mask)[:, 0])


MODELS = {
    "bert": (bert, "bert.encoder.layer.*"),
    "bert, eager": (lambda: bert("eager"), "bert.encoder.layer.*"),
    "distilbert": (distilbert, "distilbert.transformer.layer.*"),
    "t5": (t5, "encoder.block.*"),
    "torch": (lambda: Encoder(True), "encoder.layers.*"),
    "torch, time first": (lambda: Encoder(False), "encoder.layers.*"),
    "own": (Own, ["first", "second"]),
}


def tokens(lengths=(9, 4, 6, 2), width=9):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 30, (len(lengths), width), generator=draw)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def grafted(kind, probe=None):
    torch.manual_seed(0)
    build, at = MODELS[kind]
    return esper.graft(build().eval(), at=at, probe=tokens() if probe is None else probe)


def planted(body):
    """Plant an attention seed with large weights in every slot, at full strength."""
    for number, name in enumerate(body.slots):
        slot = body.plant(name, "attention")
        body.set_slot(slot, SeedStage.HOLDING, 1.0)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(number)
            for p in slot.parameters():
                p.normal_(0.0, 0.7)
    return body.eval()


def result(model, batch):
    with torch.no_grad():
        output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output[0][:, 0] if output[0].ndim == 3 else output[0]


@pytest.mark.parametrize("kind", MODELS)
def test_padding_does_not_change_the_result_of_a_sample(kind):
    body = planted(grafted(kind))
    assert {slot.spec.layout for slot in body.slots.values()} == {Layout.BIDIRECTIONAL}
    batch = tokens()
    together = result(body, batch)
    for i, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        alone = result(body, {name: value[i : i + 1, :length] for name, value in batch.items()})
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-4, rtol=1e-4)
    assert (together - result(body.model, batch)).abs().max() == 0  # the model's hooks are the same
    for slot in body.slots.values():
        slot.mask_argument = None
    assert (together - result(body, batch)).abs().max() > 0.01  # without the mask it does


@pytest.mark.parametrize("kind", MODELS)
def test_forked_configurations_see_the_mask(kind):
    body = planted(grafted(kind))
    for slot in body.slots.values():
        body.set_slot(slot, SeedStage.HOLDING, 0.9)
    batch = tokens()
    scores = evaluate(body, [(batch, torch.zeros(4))], lambda output, _: as_tensor(output).sum(-1))
    assert not body.forking.failure
    for config in scores.configs:
        alone = copy.deepcopy(body)
        for slot, is_on in zip(alone.slots.values(), config, strict=True):
            if not is_on:
                slot.remove_seed()
        torch.testing.assert_close(scores.row(config), result(alone, batch).sum(-1), atol=1e-4, rtol=1e-4)


def test_fork_points_serve_padded_batches_even_if_the_probe_has_no_padding():
    """transformers drops a mask that excludes nothing, so the model on the probe would not show that it needs one."""
    body = planted(grafted("bert", {name: value[:, :2] for name, value in tokens().items()}))
    evaluate(body, [(tokens(), torch.zeros(4))], lambda output, _: output.logits.sum(-1))
    assert not body.forking.failure


def as_tensor(output):
    return output if isinstance(output, torch.Tensor) else output[0][:, 0] if output[0].ndim == 3 else output[0]


@pytest.mark.parametrize("kind", MODELS)
def test_hardened_model_sees_the_mask(kind):
    body = planted(grafted(kind, tokens((9, 9, 5), 9)))
    plain = esper.harden(body)
    batch = tokens((3, 7, 2, 5), 7)
    torch.testing.assert_close(result(plain, batch), result(body, batch), atol=1e-4, rtol=1e-4)


def test_hardened_model_accepts_batches_with_and_without_a_mask():
    body = planted(grafted("bert", {"input_ids": tokens()["input_ids"]}))  # a probe without a mask
    plain = esper.harden(body)
    for batch in (tokens(), {"input_ids": tokens()["input_ids"]}):
        torch.testing.assert_close(result(plain, batch), result(body, batch), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("incubation", ["straight_through", "shadow"])
def test_seeds_learn_with_the_mask(incubation):
    """The gradient of a TRAINING seed is that of the samples without their padding."""

    def gradient(width):
        body = grafted("bert")
        optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
        grower = esper.Grower(body, optimizer, incubation=incubation, rules=esper.Rules(birth="isolated"))
        grower.germinate("bert.encoder.layer.0", "attention")
        grower.step()  # it is TRAINING now
        slot = body.slots["bert.encoder.layer.0"]
        nn.init.normal_(slot.seed.out.weight, generator=torch.Generator().manual_seed(1))
        body.train()
        for module in body.modules():
            module.p = 0.0 if isinstance(module, nn.Dropout) else getattr(module, "p", None)
        batch = {name: value[:, :width] for name, value in tokens((4, 4, 3), 9).items()}
        loss = lambda: nn.functional.cross_entropy(body(**batch).logits, torch.tensor([0, 1, 2]))  # noqa: E731
        loss().backward()
        if incubation == "shadow":
            grower.shadow(loss)
        return slot.seed.qkv.weight.grad

    padded, short = gradient(9), gradient(4)
    assert padded.abs().max() > 1e-6
    torch.testing.assert_close(padded, short, atol=1e-6, rtol=1e-3)


def test_probe_with_padding_at_the_end_of_all_samples_shows_that_the_model_looks_ahead():
    """As from `padding="max_length"`: a change of the last position reaches no other, because it is masked."""
    body = grafted("bert", tokens((3, 5, 4), 9))
    assert {slot.spec.layout for slot in body.slots.values()} == {Layout.BIDIRECTIONAL}
    torch.manual_seed(0)
    batch = tokens((3, 5, 4), 9)
    body = esper.graft(bert(), at="bert.encoder.layer.*", probe=(batch["input_ids"], batch["attention_mask"]))
    assert {slot.spec.layout for slot in body.slots.values()} == {Layout.BIDIRECTIONAL}


def test_graft_warns_where_seeds_cannot_see_the_mask():
    with pytest.warns(UserWarning, match=r"attention seeds in 'bert.encoder.layer.0.output' will attend to padding"):
        esper.graft(bert(), at=["bert.encoder.layer.0.output", "bert.encoder.layer.1"], probe=tokens())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        esper.graft(bert(), at="bert.encoder.layer.*", probe=tokens())


def test_masks_of_every_form():
    keep = torch.tensor([[1, 1, 0], [1, 0, 0]])
    attended = keep.bool()[:, None, None, :]
    own = MaskArgument("attention_mask", 1)
    for mask in (keep, keep.bool(), keep.float(), attended.expand(2, 1, 3, 3), attended.long()):
        fitting = own.for_features(mask, 2, 3)
        assert torch.equal(fitting.expand(2, 1, 3, 3), attended.expand(2, 1, 3, 3))
    assert torch.equal(MaskArgument("key_padding_mask", 1).for_features(~keep.bool(), 2, 3), attended)
    added = torch.zeros(2, 3).masked_fill(keep == 0, float("-inf"))
    assert torch.equal(MaskArgument("key_padding_mask", 1).for_features(added, 2, 3), added[:, None, None, :])
    assert torch.equal(own.for_features(keep, 4, 3), torch.cat([attended, attended]))  # a forked batch
    assert torch.equal(own.for_features(keep, 1, 3), attended[:1])
    assert own.for_features(keep, 3, 3) is None
    assert own.for_features(keep, 2, 7) is None  # a cache: other positions
    assert own.for_features(None, 2, 3) is None
