"""Tasks: a host, its data, its training settings and its slots. One table; a new task is one row.

Legend: B samples of a minibatch, T tokens, V classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina.hosts import HOSTS, Host
from esper.leyline.errors import ConfigError, DataError, unknown_name
from esper.leyline.rng import derive_seed
from esper.tolaria.data import (
    Dataset,
    Split,
    crop_and_flip,
    from_tensors,
    load_data,
    minibatch_indices,
    window_starts,
)

IGNORED = -100  # target of tokens that are excluded from losses and scores, as in torch and Hugging Face
CROP_PAD = 4  # largest shift of an augmented image, in pixels
TRAINING_FIELDS = ("lr", "momentum", "weight_decay", "seed_lr", "warmup_epochs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an environment trains: together with a world, this determines its training.

    Raises:
        ConfigError: A setting is invalid.

    Example:
        >>> task = esper.Task.from_tensors("mine", torch.randn(100, 6), torch.arange(100) % 3)
        >>> task.host, task.slots
        ('mlp', ('r0c0', 'r0c1', 'r0c2'))
    """

    name: str
    """The command line refers to the task by this name."""
    question: str
    """Growing a host on this task answers this question."""
    host: str
    """The host has this type: a name in `HOSTS`, such as "cnn"."""
    host_kwargs: Mapping[str, Any]
    """The constructor of the host gets these arguments."""
    dataset: str
    """`esper.load_data` loads the data set of this name; it is not loaded if `data` is given."""
    slots: tuple[str, ...]
    """These sites of the host have a slot; at least one, without repetition."""
    batch: int = 64
    """A minibatch has this many samples, at least 1."""
    batches_per_epoch: int = 20
    """An epoch, and so a step, has this many minibatches, at least 1, for any number of environments."""
    epochs: int = 40
    """An episode lasts this many epochs by default, at least 1."""
    val_size: int = 2_000
    """Validation uses at most this many samples, at least 1, the same for every environment."""
    optimiser: Literal["sgd", "adamw"] = "sgd"
    """Host and seeds are trained with SGD ("sgd") or AdamW ("adamw")."""
    lr: float = 0.1
    """The host is trained with this learning rate, ≥ 0."""
    momentum: float = 0.9
    """SGD uses this momentum, ≥ 0; AdamW uses torch's default betas."""
    weight_decay: float = 0.0
    """Host and seeds are trained with this weight decay, ≥ 0."""
    seed_lr: float = 0.1
    """Seeds are trained with this learning rate, ≥ 0."""
    lr_schedule: Literal["constant", "wsd"] = "constant"
    """Both learning rates are constant, or warm up, stay and decay to 0 over the last epochs ("wsd")."""
    warmup_epochs: float = 1.0
    """With "wsd", the learning rates rise linearly for this many epochs at the start, ≥ 0."""
    decay_share: float = 0.2
    """With "wsd", the learning rates decay linearly over this last share of the epochs, from 0 to 1."""
    clip: float = 1.0
    """The gradients of the host, and of each growing seed, are clipped to this norm, above 0; inf does not clip."""
    augment: bool = False
    """Training images are randomly shifted and mirrored if this is true."""
    shrink: int = 1
    """Images are reduced by averaging squares of this many pixels a side, ≥ 1."""
    samples: int = 0
    """Hosts are trained on this many samples of the training split, ≥ 0, drawn by `data_seed`; 0 uses all."""
    label_noise: float = 0.0
    """This share of the training samples, from 0 to 1, has random labels, drawn by `data_seed`."""
    data_seed: int = 0
    """Training samples and noisy labels are drawn with this random seed, any integer."""
    blueprints: tuple[str, ...] = ()
    """Only these blueprints may be planted; an empty list allows all that fit a slot."""
    data: Dataset | None = field(default=None, compare=False, repr=False)
    """The task uses this data; None loads `dataset`."""

    def __post_init__(self) -> None:
        if self.host not in HOSTS:
            raise unknown_name("host", self.host, HOSTS)
        if not self.slots or len(set(self.slots)) != len(self.slots):
            raise ConfigError(f"task {self.name!r} needs slots without repetition, got {self.slots}")
        if min(self.batch, self.batches_per_epoch, self.epochs, self.val_size, self.shrink) < 1:
            raise ConfigError(f"task {self.name!r}: batch, batches_per_epoch, epochs, val_size, shrink must be ≥ 1")
        if self.optimiser not in ("sgd", "adamw"):
            raise ConfigError(f"task {self.name!r}: optimiser must be 'sgd' or 'adamw', got {self.optimiser!r}")
        if not self.clip > 0.0:
            raise ConfigError(f"task {self.name!r}: clip must be above 0, got {self.clip}; inf does not clip")
        if self.lr_schedule not in ("constant", "wsd"):
            raise ConfigError(f"task {self.name!r}: lr_schedule must be 'constant' or 'wsd', got {self.lr_schedule!r}")
        if not 0.0 <= self.decay_share <= 1.0:
            raise ConfigError(f"task {self.name!r}: decay_share must lie in [0, 1], got {self.decay_share}")
        if self.samples < 0 or not 0.0 <= self.label_noise <= 1.0:
            raise ConfigError(
                f"task {self.name!r}: samples must be ≥ 0 and label_noise lie in [0, 1], got {self.samples} and "
                f"{self.label_noise}"
            )
        for name in TRAINING_FIELDS:
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"task {self.name!r}: {name} must be finite and ≥ 0, got {getattr(self, name)}")

    def build_host(self, world: int) -> Host:
        """Build the host of a world. The state of the caller's random generator is restored."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(world, "host"))
            host = HOSTS[self.host](**self.host_kwargs)
        for slot in self.slots:
            if slot not in host.sites():
                raise unknown_name(f"slot of task {self.name!r}", slot, host.sites())
        return host

    def widened(self, params: int) -> Task:
        """Return this task with the narrowest host of at least `params` parameters."""
        return self._enlarged(params, HOSTS[self.host].wider)

    def deepened(self, params: int) -> Task:
        """Return this task with the shallowest host of at least `params` parameters, at the same resolutions."""
        return self._enlarged(params, HOSTS[self.host].deeper)

    def _enlarged(self, params: int, enlarge: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Task:
        task = self
        while task.host_params < params:
            task = replace(task, host_kwargs=enlarge(task.host_kwargs))
        return task

    @property
    def host_params(self) -> int:
        """Number of parameters of the host without seeds."""
        return sum(p.numel() for p in self._meta_host().parameters())

    def _meta_host(self) -> Host:
        """Return the host on the meta device: its sizes and sites, without memory or random numbers."""
        with torch.device("meta"):
            return HOSTS[self.host](**self.host_kwargs)

    def lr_factor(self, step: int) -> float:
        """Return the factor of both learning rates in epoch `step`, counted from 0: the value at its middle."""
        if self.lr_schedule == "constant":
            return 1.0
        return self.warmup_factor(step) * decay_factor(step, self.epochs, self.decay_share)

    def warmup_factor(self, step: int) -> float:
        """Return the factor of the warm-up in epoch `step`; 1 for a constant learning rate."""
        if self.lr_schedule == "constant":
            return 1.0
        return min(1.0, (step + 0.5) / self.warmup_epochs) if self.warmup_epochs else 1.0

    def load_data(self, root: str | Path | None = None) -> Dataset:
        """Return the data with at most `val_size` validation samples; raise DataError if it does not fit the host."""
        data = self.data or load_data(self.dataset, root)
        if self.samples:
            data = data.few(self.samples, derive_seed(self.data_seed, "samples"))
        if self.label_noise:
            data = data.noisy(self.label_noise, derive_seed(self.data_seed, "labels"))
        if self.shrink > 1:
            data = data.shrunk(self.shrink)
        host = self._meta_host()
        if data.kind == "text" and data.train.x.dim() == 1 and host.window:
            data = data.windowed(host.window)
        self._check_fit(host, data)
        if self.val_size >= len(data.val):
            return data
        return replace(data, val=Split(data.val.x[: self.val_size], data.val.y[: self.val_size]))

    def order(self, data: Dataset, world: int, step: int) -> Tensor:
        """Return the indices of the training samples of step `step` in `world`: int64 `[batches_per_epoch, batch]`."""
        draw = window_starts if data.kind == "text" else minibatch_indices
        return draw(world, step, size=len(data.train), batch=self.batch, batches_per_step=self.batches_per_epoch)

    def minibatches(self, data: Dataset, world: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the minibatches of one step, augmented if `augment` is set. They depend on (world, step) only."""
        generator = torch.Generator().manual_seed(derive_seed(world, "augment", step))
        for index in self.order(data, world, step).to(data.train.y.device):
            x, y = data.train.take(index)
            if self.augment:
                x = crop_and_flip(x, pad=CROP_PAD, black=data.black, generator=generator)
            yield x, y

    def _check_fit(self, host: Host, data: Dataset) -> None:
        """Raise DataError if the host cannot take the data, before the first batch does."""
        if not host.fits_classes(data.classes):
            raise DataError(
                f"data set {data.name!r} has {data.classes} classes, the host of task {self.name!r} has {host.classes}"
            )
        shape = tuple(data.train.x.shape[1:])
        needs = host.needs(data.kind, shape)
        if needs:
            raise DataError(f"the host of task {self.name!r} needs {needs}; {data.name!r} has samples of {shape}")
        if self.augment and len(data.black) != shape[0]:
            raise DataError(f"task {self.name!r} augments images, but {data.name!r} has no black value. Set `black`")

    @classmethod
    def from_tensors(
        cls,
        name: str,
        x: Tensor,
        y: Tensor,
        *,
        host: str | None = None,
        host_kwargs: Mapping[str, Any] | None = None,
        val: tuple[Tensor, Tensor] | None = None,
        test: tuple[Tensor, Tensor] | None = None,
        held_out: float = 0.15,
        classes: int | None = None,
        black: tuple[float, ...] = (),
        slots: tuple[str, ...] | None = None,
        **settings: Any,
    ) -> Task:
        """Return a task on your own tensors.

        Args:
            name: Name of the task.
            x: Images `[N, C, H, W]`, vectors `[N, D]` or token windows `[N, T]`.
            y: Class numbers `[N]`; for tokens, the next tokens `[N, T]`.
            host: Name of the host; the default is a small one for the kind of data.
            host_kwargs: Sizes of the host that differ from the small one's.
            val: Validation inputs and targets; None is a class-balanced share of `x`.
            test: Test inputs and targets; None is a class-balanced share of `x`.
            held_out: That share.
            classes: Number of classes; None counts those of `y`.
            black: Value of a black pixel by channel, needed by `augment`.
            slots: Slots to use; None is those of row 0.
            **settings: Other fields of `Task`.

        Returns:
            The task.

        Raises:
            UnknownNameError: There is no such host or slot.
            DataError: The tensors do not fit each other or the host.

        Example:
            >>> images, labels = torch.randn(200, 3, 16, 16), torch.arange(200) % 5
            >>> esper.Task.from_tensors("mine", images, labels, host="resnet", epochs=10).epochs
            10
        """
        data = from_tensors(name, x, y, val=val, test=test, held_out=held_out, classes=classes, black=black)
        host = host or next(each for each, kind in HOSTS.items() if kind.data_kind == data.kind)
        if host not in HOSTS:
            raise unknown_name("host", host, HOSTS)
        kwargs = HOSTS[host].small(tuple(x.shape[1:]), data.classes) | dict(host_kwargs or {})
        with torch.device("meta"):
            sites = HOSTS[host](**kwargs).sites()
        task = cls(
            **{
                "name": name,
                "question": f"{len(x)} samples given as tensors",
                "host": host,
                "host_kwargs": kwargs,
                "dataset": name,
                "slots": slots or tuple(slot for slot in sites if slot.startswith("r0")),
                "batch": min(64, len(data.train)),
                "data": data,
                **settings,
            }
        )
        with torch.device("meta"):  # allocates nothing
            meta_host = task.build_host(0)  # raises for a slot that does not exist
        task._check_fit(meta_host, data)
        return task


def decay_factor(step: int, epochs: int, share: float) -> float:
    """Return the factor of a linear decay to 0 over the last `share` of `epochs`, at the middle of epoch `step`.

    After the last epoch the factor stays at that of the last one.
    """
    length = share * epochs
    epochs_left = max(epochs - step - 0.5, 0.5)
    return min(1.0, epochs_left / length) if length else 1.0


def get_task(name: str) -> Task:
    """Return the task with this name; raise if there is none."""
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return TASKS[name]


def per_sample_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, `[B]`; for text, the mean over its tokens (−mean log-probability)."""
    loss = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none", ignore_index=IGNORED)
    return loss if target.dim() == 1 else _mean_over(loss.view_as(target), target)


def _mean_over(values: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the tokens of each sample, without those whose target is `IGNORED`."""
    counts = target != IGNORED
    return (values * counts).sum(1) / counts.sum(1)


def per_sample_correct(output: Tensor, target: Tensor) -> Tensor:
    """Return the accuracy of each sample, `[B]` float: 0 or 1; for text, the share of correct tokens."""
    top, answer = output.max(-1)
    right = torch.where(top.isfinite(), (answer == target).float(), torch.nan)  # NaN if the output is not finite
    return right if target.dim() == 1 else _mean_over(right, target)


def _grid(rows: tuple[int, ...], columns: int) -> tuple[str, ...]:
    return tuple(f"r{row}c{column}" for column in range(columns) for row in rows)


def _cnn(
    name: str, question: str, dataset: str, slots: tuple[str, ...], *, host: dict[str, int], **settings: Any
) -> Task:
    channels = {"in_channels": 1 if dataset.startswith("fashion") else 3, "classes": 10}
    return Task(
        name=name,
        question=question,
        host="cnn",
        host_kwargs=channels | host,
        dataset=dataset,
        slots=slots,
        **settings,
    )


def _resnet(name: str, question: str, dataset: str, channels: int, base: int) -> Task:
    """Return a task whose host is so narrow that depth helps.

    Validation accuracy of world 0 without seeds, and with `conv_heavy` in every slot from step 0: `resnet_fashion`
    79.9 and 81.8 after 40 epochs (with base 4 85.4 and 85.5), `resnet_cifar` 54.2 and 60.4 after 30.
    """
    sizes = {"in_channels": channels, "classes": 10, "base": base, "stages": 3, "blocks": 1}
    return Task(
        name=name, question=question, host="resnet", host_kwargs=sizes, dataset=dataset, slots=_ROW3, seed_lr=SEED_LR
    )


def _characters(name: str, question: str, dataset: str, slots: tuple[str, ...], **host: int | None) -> Task:
    """Return a language model of characters with width 64 and windows of 64 characters."""
    sizes = {"vocab": 81, "dim": 64, "heads": 4, "layers": 3, "block_size": 64} | host
    return Task(
        name=name, question=question, host="transformer", host_kwargs=sizes, dataset=dataset, slots=slots,
        batch=32, val_size=256, optimiser="adamw", lr=1e-3, seed_lr=1e-3, weight_decay=0.01,
    )  # fmt: skip


def _stack(name: str, question: str, dataset: str, vocab: int) -> Task:
    """Return a language model of one layer with seven slots, where whole layers can be stacked."""
    sizes = {"vocab": vocab, "dim": 32, "layers": 1, "block_size": 32, "segments": None, "extra_slots": 6}
    task = _characters(name, question, dataset, _grid((0,), 7), **sizes)
    return replace(task, lr=3e-3, seed_lr=3e-3, epochs=50)


def _fashion(name: str, question: str, slots: tuple[str, ...], epochs: int, **host: int) -> Task:
    return _cnn(name, question, "fashion", slots, host=host, epochs=epochs, seed_lr=SEED_LR)


def _cifar(name: str, question: str, slots: tuple[str, ...], **host: int) -> Task:
    """Return a task of the reference: its sizes and optimiser, on all of CIFAR-10."""
    sgd = {"lr": 0.01, "seed_lr": 0.01, "weight_decay": 5e-4}
    return _cnn(name, question, "cifar10", slots, host=host, batch=128, epochs=150, augment=True, **sgd)


SEED_LR = 0.03
"""The seeds' learning rate of the presets. `rescue`, schedule controller, worlds 5–9: test accuracy 74.8 ± 2.1 (sd);
at the host's 0.1 it is 73.7 ± 3.6."""
_ROW2, _ROW3, _ROW5 = (_grid((0,), columns) for columns in (2, 3, 5))
_TWO_BLOCKS = ("r0c0", "r1c0", "r0c1")

_ROWS = (
    # The presets of the design: growth makes a measurable difference within minutes on one core.
    _fashion("quick", "does growth help a small host at all?", _TWO_BLOCKS, 40, base=8, blocks=2),
    _fashion("fashion", "the default task: clothes at 14×14", _TWO_BLOCKS, 40, base=8, blocks=2),
    _fashion("rescue", "can seeds see shapes for a host of single pixels?", _ROW3, 40,
             base=4, blocks=3, kernel=1),
    _fashion("standard", "does growth help a host with time to learn?", _TWO_BLOCKS, 110, base=8, blocks=2),
    _cnn("rescue_cifar", "can seeds see shapes in natural images for a host of single pixels?", "cifar10", _ROW3,
         host={"base": 4, "blocks": 3, "kernel": 1}, seed_lr=SEED_LR),
    _cnn("search_fashion", "which blueprints, and where, for clothes at 14×14? 54,000 training images", "fashion-mnist",
         _ROW3, host={"base": 4, "blocks": 3, "kernel": 1}, seed_lr=SEED_LR, shrink=2),
    _cnn("search_cifar", "which blueprints, and where, for natural images at 16×16?", "cifar10", _ROW3,
         host={"base": 4, "blocks": 3, "kernel": 1}, seed_lr=SEED_LR, shrink=2),
    _cnn("cifar", "does growth help on natural images?", "cifar10", _ROW3, host={"base": 8, "blocks": 3},
         seed_lr=SEED_LR),
    # Small tasks on embedded data: for tests, examples and a language model on a laptop.
    Task(name="digits", question="a host for tests: seconds, not minutes", host="mlp", dataset="digits",
         host_kwargs={"inputs": 64, "classes": 10, "width": 16, "layers": 3}, slots=_ROW3,
         batch=32, batches_per_epoch=10, epochs=20, val_size=300, lr=0.05, seed_lr=0.05),
    _characters("moby", "growth in a language model of characters", "moby", _ROW3),
    # Hosts worth growing: residual networks and language models with a slot after every block.
    _resnet("resnet_fashion", "does added depth help a residual network on 28×28 clothes?", "fashion-mnist", 1, base=2),
    _resnet("resnet_cifar", "does added depth help a residual network on natural images?", "cifar10", 3, base=8),
    _stack("moby_deep", "does added depth help a language model of a novel?", "moby", 81),
    _stack("sotu_deep", "does added depth help a language model of speeches?", "sotu", 90),
    # The ten tasks of the reference, in its sizes.
    _cifar("cifar_baseline", "augment a capable host", _ROW3, base=8, blocks=3),
    _cifar("cifar_scale", "scale to many slots", _ROW5, base=8, blocks=5),
    _cifar("cifar_impaired", "rescue a bottlenecked host", _ROW3, base=1, blocks=3, kernel=1),
    _cifar("cifar_minimal", "seeds do everything", _ROW3, base=2, blocks=3, kernel=1, pools=0),
    _cifar("cifar_multichannel", "surface diversity", _grid((0, 1), 3), base=8, blocks=3),
    _cifar("cifar_postpool", "semantic surfaces", _grid((1,), 3), base=16, blocks=3),
    _cifar("cifar_highres", "spatial surfaces", _ROW3, base=16, blocks=3),
    _cifar("cifar_deep_multichannel", "coordination at scale", _grid((0, 1), 5), base=8, blocks=5),
    _cifar("cifar_deep_impaired", "rescue with ten slots", _grid((0, 1), 5), base=2, blocks=5, kernel=1),
    Task(name="tinystories", question="growth in a language model of your own text", host="transformer",
         host_kwargs={"vocab": 50_257, "dim": 384, "heads": 6, "layers": 6, "block_size": 256, "dropout": 0.1},
         dataset="text", slots=_ROW3, batch=32, epochs=150, val_size=256,
         lr=0.01, seed_lr=0.01, weight_decay=5e-4),
)  # fmt: skip

TASKS: dict[str, Task] = {row.name: row for row in _ROWS}
