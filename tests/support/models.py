"""Small models to graft: common forms of forward passes, a few thousand parameters each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.blueprints import blueprints_for
from esper.kasmina.body import Body
from esper.kasmina.graft import graft
from esper.kasmina.hosts import CNNHost, MLPHost, ResidualCNNHost, TransformerHost
from esper.kasmina.slot import Slot
from esper.leyline.actions import Operator
from esper.leyline.stages import SeedStage

DIM, CLASSES, TOKENS, VOCAB = 8, 5, 6, 11


def conv_block(dim_in: int, dim_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(dim_in, dim_out, 3, padding=1), nn.BatchNorm2d(dim_out), nn.ReLU())


class PlainCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(conv_block(3, DIM), conv_block(DIM, DIM), conv_block(DIM, DIM))
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(x).mean((2, 3))))


class ResidualBlock(nn.Module):
    """In-place additions and activations, as in torchvision."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim)
        self.conv2, self.bn2 = nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class ResidualNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_block(3, DIM)
        self.stage1 = nn.Sequential(ResidualBlock(DIM), ResidualBlock(DIM))
        self.stage2 = nn.Sequential(ResidualBlock(DIM), ResidualBlock(DIM))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage2(self.stage1(self.stem(x))).mean((2, 3)))


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.mlp = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        attended, weights = self.attention(y, y, y, key_padding_mask=mask)
        return x + self.mlp(attended), weights


class Transformer(nn.Module):
    """Blocks that return (features, attention weights); an optional padding mask [B, T] bypasses all slots."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(3))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x, mask=mask)
        return self.head(x.mean(1))


class CausalMaskTransformer(nn.Module):
    """A mask [T, T] without a batch dimension is an input of the model and of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.1, batch_first=True, norm_first=True) for _ in "ab"
        )
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class TwoInputs(nn.Module):
    """An image and a vector, joined late; the vector's path runs after the image's slots."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(conv_block(3, DIM), conv_block(DIM, DIM))
        self.vector = nn.Sequential(nn.Linear(4, DIM), nn.ReLU())
        self.head = nn.Linear(2 * DIM, CLASSES)

    def forward(self, image: Tensor, *, vector: Tensor) -> dict[str, Tensor]:
        pooled = self.image(image).mean((2, 3))
        joined = torch.cat([pooled, self.vector(vector)], 1)
        return {"logits": self.head(joined), "features": pooled}


class Parts(NamedTuple):
    features: Tensor
    scale: Tensor


class NamedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Parts:
        return Parts(F.gelu(self.linear(x)), x.abs().mean(1, keepdim=True))


class NamedNet(nn.Module):
    """Blocks and model return a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NamedBlock() for _ in range(3))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Parts:
        for block in self.blocks:
            parts = block(x)
            x = parts.features + parts.scale
        return Parts(self.head(x), parts.scale)


class DictBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x, "features": F.gelu(self.linear(x))}


class DictNet(nn.Module):
    """Blocks return a dict of two floating tensors: the position of the features must be specified."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DictBlock() for _ in range(3))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)["features"]
        return self.head(x)


class ListBlock(DictBlock):
    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        return [F.gelu(self.linear(x)), x]


class ListNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ListBlock() for _ in range(3))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = sum(block(x))  # type: ignore[assignment]
        return self.head(x)


class SharedNet(nn.Module):
    """One module called three times in a row, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.shared = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.alias = self.shared
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.alias(self.shared(self.shared(self.first(x)))))


class Siamese(nn.Module):
    """One network, with a BatchNorm, for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(conv_block(3, DIM), conv_block(DIM, DIM))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.tower(a) - self.tower(b)).mean((2, 3)))


class SequenceFirst(nn.Module):
    """[T, B, D] in, [B, classes] out: the first dimension of the features is time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, DIM)
        self.rnn = nn.GRU(DIM, DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.rnn(self.embed(x))[0])[-1])


class BatchMixer(nn.Module):
    """Each sample depends on the mean of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x - x.mean(0)
        return self.head(x)


class LateMixer(BatchMixer):
    """Mixes samples only in batches larger than any probe."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.shape[0] > 8:
                x = x - x.mean(0)
        return self.head(x)


class TokenNorm(nn.Module):
    """BatchNorm over all tokens of all samples: its first dimension is B · T."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(DIM) for _ in range(3))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = layer(x)
            x = F.gelu(norm(y.flatten(0, 1)).unflatten(0, y.shape[:2]))
        return self.head(x.mean(1))


class TransposedTokenNorm(TokenNorm):
    """The same, tokens first: rows of a forked pass are not contiguous at the norm."""

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = layer(x).transpose(0, 1)
            x = F.gelu(norm(y.flatten(0, 1)).unflatten(0, y.shape[:2])).transpose(0, 1)
        return self.head(x.mean(1))


class NormAct(nn.BatchNorm2d):
    """A BatchNorm with its activation inside, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class NormActCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else DIM, DIM, 3, padding=1), NormAct(DIM)) for i in range(3)
        )
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class BatchStatistics(nn.Module):
    """BatchNorm without running statistics mixes samples even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM, track_running_stats=i == 0)) for i in range(3)
        )
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class EarlyExits(nn.Module):
    """A head after every stage: outputs that branch off before the last slot."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(DIM, CLASSES) for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        out = [self.heads[0](x)]
        for stage, head in zip(self.stages, list(self.heads)[1:], strict=True):
            x = stage(x)
            out.append(head(x))
        return out


@dataclass
class Answer:
    logits: Tensor
    note: str = ""


class DataclassNet(nn.Module):
    """Returns an object of a type that is no pytree node."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh())
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.head(self.layers(x)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=3, n_head=2, use_cache=False)
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=16, num_labels=CLASSES)  # fmt: skip
    return BertForSequenceClassification(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
                       image_size=8, patch_size=4, num_labels=CLASSES)  # fmt: skip
    return ViTForImageClassification(config)


# -- batches of n samples


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def images(n: int) -> Tensor:
    return noise(n, 3, 8, 8)


def images_last(n: int) -> Tensor:
    return images(n).to(memory_format=torch.channels_last)


def vectors(n: int) -> Tensor:
    return noise(n, DIM)


def sequences(n: int) -> Tensor:
    return noise(n, TOKENS, DIM)


def tokens(n: int) -> Tensor:
    return integers(VOCAB, n, TOKENS)


def padding(n: int) -> Tensor:
    """Return a mask that is True where a token is padding, with a different length per sample."""
    return torch.arange(TOKENS)[None] >= integers(TOKENS - 2, n, 1) + 2


def causal() -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(TOKENS)


@dataclass(frozen=True, eq=False)
class Case:
    """One model of the zoo: how to build it, its inputs, its slots, and whether its batch can fork."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    at: tuple[str, ...]
    forks: dict[str, tuple[bool, str] | None] = field(default_factory=dict)
    """Fork points other than the slot itself, by slot: (at input, module name), or None."""
    select: dict[str, int | str] = field(default_factory=dict)

    def model(self, seed: int = 0) -> nn.Module:
        """Return the model in eval mode, with fitted BatchNorm statistics and no parameter at its initial value."""
        return copy.deepcopy(_built(self, seed))

    def body(self, seed: int = 0) -> Body:
        return copy.deepcopy(_grafted(self, seed))


@cache
def _built(case: Case, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = case.build()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        if case.batch is images_last:
            model = model.to(memory_format=torch.channels_last)
        model.train()
        for _ in range(8):
            call(model, case.batch(16))
        return model.eval()


@cache
def _grafted(case: Case, seed: int) -> Body:
    return graft(case.model(seed), list(case.at), probe=case.batch(4), select=case.select)


def call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


_FEATURES = ("features.0", "features.1", "features.2")
_BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
_LAYERS = ("layers.0", "layers.1", "layers.2")
_NONE = None
_ROOT = (True, "")

ZOO: dict[str, Case] = {
    "cnn": Case(PlainCNN, images, _FEATURES),
    "cnn_channels_last": Case(PlainCNN, images_last, _FEATURES),
    "residual": Case(
        ResidualNet, images_last, ("stage1.0.bn2", "stage1", "stage2.1.conv1"),
        {"stage1.0.bn2": (True, "stage1.0"), "stage2.1.conv1": (True, "stage2.1")},
    ),
    "cnn_host": Case(
        lambda: CNNHost(in_channels=3, classes=CLASSES, base=4, blocks=3), images_last,
        ("blocks.0", "pools.0", "blocks.2"),
    ),
    "resnet_host": Case(
        lambda: ResidualCNNHost(in_channels=3, classes=CLASSES, base=4, stages=2, blocks=2), images_last,
        ("blocks.0", "blocks.1", "blocks.2"),
    ),
    "mlp_host": Case(lambda: MLPHost(inputs=DIM, classes=CLASSES, width=DIM, layers=3), vectors, _LAYERS),
    "transformer_host": Case(
        lambda: TransformerHost(vocab=VOCAB, dim=DIM, heads=2, layers=3, block_size=TOKENS, dropout=0.1), tokens,
        _BLOCKS,
    ),
    "embedding_host": Case(
        lambda: TransformerHost(vocab=VOCAB, dim=DIM, heads=2, layers=0, block_size=TOKENS, segments=None), tokens,
        ("dropout",),
    ),
    "tuple_blocks": Case(Transformer, tokens, ("blocks.0", "blocks.1.attention", "blocks.2"),
                         {"blocks.1.attention": (True, "blocks.1")}),
    "mask": Case(Transformer, lambda n: (tokens(n), padding(n)), _BLOCKS, {"blocks.0": _ROOT, "blocks.1": _ROOT}),
    "keyword_mask": Case(Transformer, lambda n: {"tokens": tokens(n), "mask": padding(n)}, _BLOCKS,
                         {"blocks.0": _ROOT, "blocks.1": _ROOT}),
    "causal_mask": Case(CausalMaskTransformer, lambda n: (tokens(n), causal()), ("blocks.0", "blocks.1.linear2"),
                        {"blocks.1.linear2": (True, "blocks.1")}),
    "encoder": Case(Encoder, sequences, ("encoder.layers.0", "encoder.layers.1.linear1", "encoder.layers.2"),
                    {"encoder.layers.1.linear1": (True, "encoder.layers.1")}),
    "two_inputs": Case(TwoInputs, lambda n: {"image": images(n), "vector": noise(n, 4)},
                       ("image.0", "image.1", "vector"), {"image.0": _ROOT, "image.1": _ROOT, "vector": _ROOT}),
    "named_tuple": Case(NamedNet, vectors, _BLOCKS, {b: (True, b) for b in _BLOCKS}),
    "dict_blocks": Case(DictNet, vectors, _BLOCKS, select=dict.fromkeys(_BLOCKS, "features")),
    "list_blocks": Case(ListNet, vectors, _BLOCKS, {b: (True, b) for b in _BLOCKS}),
    "shared": Case(SharedNet, vectors, ("first", "shared")),
    "siamese": Case(Siamese, lambda n: (images(n), 1.0 - 2.0 * images(n)), ("tower.0", "tower.1"),
                    {"tower.0": _ROOT, "tower.1": _ROOT}),
    "sequence_first": Case(SequenceFirst, lambda n: noise(TOKENS, n, 4), ("embed", "mix"),
                           {"embed": _NONE, "mix": _NONE}),
    "batch_mixer": Case(BatchMixer, vectors, _LAYERS, dict.fromkeys(_LAYERS, _NONE)),
    "token_norm": Case(TokenNorm, sequences, _LAYERS),
    "transposed_token_norm": Case(TransposedTokenNorm, sequences, _LAYERS),
    "norm_act": Case(NormActCNN, images, _LAYERS),
    "batch_statistics": Case(BatchStatistics, vectors, _LAYERS, {"layers.0": _NONE, "layers.1": _NONE}),
    "early_exits": Case(EarlyExits, vectors, ("stages.0", "stages.1", "stages.2")),
    "dataclass": Case(DataclassNet, vectors, ("layers.0", "layers.2")),
    "gpt2": Case(gpt2, lambda n: {"input_ids": tokens(n)},
                 ("transformer.h.0", "transformer.h.1.mlp", "transformer.h.2"),
                 {"transformer.h.1.mlp": (True, "transformer.h.1")}),
    "bert": Case(bert, lambda n: {"input_ids": tokens(n), "attention_mask": (~padding(n)).long()},
                 ("bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler"),
                 {f"bert.encoder.layer.{i}": (True, "bert.encoder") for i in (0, 1)}),
    "vit": Case(vit, lambda n: {"pixel_values": images(n)}, ("vit.embeddings", "vit.layers.0", "vit.layers.2")),
}  # fmt: skip


# -- growing by hand


def perturb(slot: Slot, scale: float = 0.5, seed: int = 1) -> None:
    """Add noise to every parameter of a new seed, so that it has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in slot.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator).to(p))


def grow(
    body: Body,
    name: str,
    blueprint: str | None = None,
    *,
    operator: Operator = Operator.ADD,
    stage: SeedStage = SeedStage.BLENDING,
    alpha: float = 0.7,
    seed: int = 1,
    scale: float = 0.5,
) -> Slot:
    """Germinate a seed with non-zero output, at any stage."""
    slot = body.slots[name]
    body.plant(name, blueprint or blueprints_for(slot.spec.layout)[0], operator, rng_seed=seed)
    perturb(slot, scale, seed)
    body.set_slot(slot, stage, alpha if stage >= SeedStage.BLENDING else 0.0)
    return slot


def grow_everywhere(body: Body, stages: dict[str, SeedStage] | None = None) -> None:
    """Put seeds into every slot, with different blueprints and operators."""
    for i, (name, slot) in enumerate(body.slots.items()):
        choices = blueprints_for(slot.spec.layout)
        stage = (stages or {}).get(name, SeedStage.BLENDING)
        operator = (Operator.ADD, Operator.GATE, Operator.MULTIPLY)[i % 3]
        grow(body, name, choices[(2 * i + 1) % len(choices)], operator=operator, stage=stage,
             alpha=(0.4, 1.0, 0.7)[i % 3], seed=i + 1)  # fmt: skip


def main_output(output: Any) -> Tensor:
    """Return every sample's output [B, Q] from whatever a model returns."""
    if isinstance(output, (tuple, list)):
        return torch.cat([main_output(o) for o in output], 1) if isinstance(output, list) else main_output(output[0])
    if isinstance(output, Mapping):
        output = output["logits"]
    return getattr(output, "logits", output).flatten(1)
