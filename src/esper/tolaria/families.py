"""Task families: a world draws its host and its data from a declared distribution. One table; a family is one row.

    family = get_family("mend")
    family.draw(7)               # what world 7 has: impairment, widths, samples, label noise, …
    family.task(7)               # its task, as if it were a row of `TASKS`

Every setting that varies is a tuple of options, of which each world draws one, uniformly and independently. An option
listed twice is drawn twice as often. The draws are functions of the family's name, the world and the setting's name.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch

from esper.kasmina.blueprints import registered
from esper.kasmina.hosts import HOSTS
from esper.kasmina.hosts.host import Impairment
from esper.leyline.atomic_io import read_regular
from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.rng import derive_seed
from esper.tolaria.tasks import TASKS, Task

SHAPES = {"digits": (1, 8, 8), "fashion": (1, 14, 14), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
"""Shapes of the images that families can draw; all have ten classes."""
MOST_BYTES = 1 << 20
"""Maximum size of a family file in bytes."""


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """What one world of a family has drawn."""

    dataset: str
    width: int
    blocks: int
    impairment: str
    impaired: int
    """Number of the impaired block, from 0; without an effect if `impairment` is "none"."""
    slots: int
    samples: int
    label_noise: float
    epochs: int
    batch: int

    @property
    def kind(self) -> str:
        """Return the kind of host that a user sees: number of blocks, width and impairment."""
        return f"{self.blocks} blocks, width {self.width}, {self.impairment}"


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A distribution of tasks. Tuples hold the options of which each world draws one.

    Raises:
        ConfigError: A setting is out of its range.

    Example:
        >>> family = esper.Family(name="small", widths=(2, 4), impairments=("none", "kernel"), epochs=(10, 20))
        >>> family.task(0).host, family.task(0).epochs in (10, 20)
        ('cnn', True)
    """

    name: str
    """The command line refers to the family by this name."""
    question: str = "a family of your own"
    """A policy that is trained on this family answers this question."""
    host: Literal["cnn", "mlp", "resnet"] = "cnn"
    """All hosts have this type."""
    datasets: tuple[str, ...] = ("fashion",)
    """A world uses one of these image data sets: digits, fashion, fashion-mnist or cifar10."""
    shrink: int = 1
    """Images are reduced by averaging squares of this many pixels a side, ≥ 1."""
    widths: tuple[int, ...] = (4,)
    """The first block has one of these numbers of channels, or each layer one of these numbers of units, ≥ 1."""
    blocks: tuple[int, ...] = (3,)
    """A host has one of these numbers of blocks, layers or residual stages, ≥ 1."""
    impairments: tuple[str, ...] = ("none",)
    """One block lacks one of these: nothing ("none"), neighbouring pixels ("kernel"), three quarters of its width
    ("width") or all of it ("missing"). With "kernels", it and all later blocks lack neighbouring pixels, with "norms"
    normalisation. Which block is drawn, too. An MLP has only "none", "width" and "missing", a residual network only
    "none"."""
    slots: tuple[int, ...] = ()
    """A host has one of these numbers of slots, ≥ 1, from its first site on, or all its sites if there are fewer. Empty
    uses all sites."""
    samples: tuple[int, ...] = (0,)
    """A host is trained on one of these numbers of samples, ≥ 0, different ones in each world; 0 uses all."""
    label_noise: tuple[float, ...] = (0.0,)
    """One of these shares of the training samples, from 0 to 1, has random labels."""
    epochs: tuple[int, ...] = (40,)
    """An episode lasts one of these numbers of epochs, ≥ 1."""
    batch: tuple[int, ...] = (64,)
    """A minibatch has one of these numbers of samples, ≥ 1."""
    batches_per_epoch: int = 20
    """An epoch has this many minibatches, ≥ 1."""
    val_size: int = 2_000
    """Validation uses at most this many samples, ≥ 1."""
    lr: float = 0.1
    """Hosts are trained with this learning rate, ≥ 0."""
    seed_lr: float = 0.03
    """Seeds are trained with this learning rate, ≥ 0."""
    blueprints: tuple[str, ...] = ()
    """Only these blueprints may be planted; an empty list allows all that fit a slot."""

    def __post_init__(self) -> None:
        for field in _DRAWN:
            if not getattr(self, field):
                raise ConfigError(f"family {self.name!r}: {field} needs at least one option")
        for dataset in self.datasets:
            if dataset not in SHAPES:
                raise unknown_name(f"data set of family {self.name!r}", dataset, SHAPES)
        for impairment in self.impairments:
            if impairment not in get_args(Impairment):
                raise unknown_name(f"impairment of family {self.name!r}", impairment, get_args(Impairment))
        for blueprint in self.blueprints:
            if blueprint not in registered():
                raise unknown_name(f"blueprint of family {self.name!r}", blueprint, registered())
        self._check_ranges()
        self.longest()  # builds the largest host, and so checks the other settings

    def _check_ranges(self) -> None:
        if not self.shrink >= 1:
            raise ConfigError(f"family {self.name!r}: shrink must be ≥ 1, got {self.shrink}")
        for field in ("widths", "blocks", "slots", "epochs", "batch", "samples"):
            least = 0 if field == "samples" else 1
            if any(option < least for option in getattr(self, field)):
                raise ConfigError(f"family {self.name!r}: {field} must be ≥ {least}, got {getattr(self, field)}")
        if not all(0 <= share <= 1 for share in self.label_noise):
            raise ConfigError(f"family {self.name!r}: label_noise must lie in 0…1, got {self.label_noise}")

    def draw(self, world: int) -> Draw:
        """Return what this world has drawn."""

        def one(setting: str, options: tuple[Any, ...]) -> Any:
            return options[derive_seed(self.name, world, setting) % len(options)]

        blocks = one("blocks", self.blocks)
        return Draw(
            dataset=one("datasets", self.datasets), width=one("widths", self.widths), blocks=blocks,
            impairment=one("impairments", self.impairments), impaired=one("impaired", tuple(range(blocks))),
            slots=one("slots", self.slots) if self.slots else 0, samples=one("samples", self.samples),
            label_noise=one("label_noise", self.label_noise), epochs=one("epochs", self.epochs),
            batch=one("batch", self.batch),
        )  # fmt: skip

    def task(self, world: int) -> Task:
        """Return the task of a world.

        Args:
            world: Number of the world.

        Returns:
            The task, with the host, data and length that the world draws.
        """
        return self._task(self.draw(world), world)

    def _task(self, draw: Draw, world: int) -> Task:
        shape = SHAPES[draw.dataset]
        shape = (shape[0], shape[1] // self.shrink, shape[2] // self.shrink)
        kwargs = HOST_KWARGS[self.host](draw, shape)
        with torch.device("meta"):  # allocates nothing
            sites = tuple(HOSTS[self.host](**kwargs).sites())
        return Task(
            name=self.name, question=self.question, host=self.host, host_kwargs=kwargs, dataset=draw.dataset,
            slots=sites[: draw.slots or len(sites)], batch=draw.batch, batches_per_epoch=self.batches_per_epoch,
            epochs=draw.epochs, val_size=self.val_size, lr=self.lr, seed_lr=self.seed_lr, shrink=self.shrink,
            samples=draw.samples, label_noise=draw.label_noise, data_seed=world,
            blueprints=self.blueprints,
        )  # fmt: skip

    def longest(self) -> tuple[str, ...]:
        """Return the slots of the host with the most slots. Those of every other host are its first ones.

        Raise ConfigError if some host has other slots at the same positions, which one policy could not tell apart.
        """
        draw = msgspec.structs.replace(self.draw(0), impaired=0, slots=0)
        first, *others = dict.fromkeys(self.impairments)  # an impairment changes no slot: each is built once as a check
        cases = [*itertools.product(self.datasets, self.blocks, [first])]
        cases += [(self.datasets[0], self.blocks[0], impairment) for impairment in others]
        whole = {
            self._task(msgspec.structs.replace(draw, dataset=d, blocks=b, impairment=i), world=0).slots
            for d, b, i in dict.fromkeys(cases)
        }
        lists = {sites[: count or len(sites)] for sites in whole for count in self.slots or (0,)}
        most = max(lists, key=len)
        for slots in lists:
            if slots != most[: len(slots)]:
                raise ConfigError(
                    f"family {self.name!r} has hosts with the slots {', '.join(slots)} and {', '.join(most)}: the "
                    "shorter list must begin the longer one. Use images of one size, or fewer slots"
                )
        return most

    def lasting(self, epochs: int) -> Family:
        """Return the family with episodes of this many epochs."""
        return msgspec.structs.replace(self, epochs=(epochs,))

    def fingerprint(self) -> str:
        """Return a hash of the definition."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


_DRAWN = ("datasets", "widths", "blocks", "impairments", "samples", "label_noise", "epochs", "batch")


def _cnn_kwargs(draw: Draw, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return a CNN that pools while there are pixels left, and doubles its channels twice."""
    pools = min(draw.blocks, int(math.log2(min(shape[1:]))))
    sizes = {"in_channels": shape[0], "classes": 10, "base": draw.width, "blocks": draw.blocks, "pools": pools}
    return sizes | {"doublings": 2, "impaired": draw.impaired, "impairment": draw.impairment}


def _mlp_kwargs(draw: Draw, shape: tuple[int, int, int]) -> dict[str, Any]:
    sizes = {"inputs": math.prod(shape), "classes": 10, "width": draw.width, "layers": draw.blocks}
    return sizes | {"impaired": draw.impaired, "impairment": draw.impairment}


def _resnet_kwargs(draw: Draw, shape: tuple[int, int, int]) -> dict[str, Any]:
    if draw.impairment != "none":
        raise ConfigError(f"a residual network has no impairment {draw.impairment!r}; use a family of another host")
    return {"in_channels": shape[0], "classes": 10, "base": draw.width, "stages": draw.blocks, "blocks": 1}


HOST_KWARGS: Mapping[str, Callable[[Draw, tuple[int, int, int]], dict[str, Any]]] = {
    "cnn": _cnn_kwargs,
    "mlp": _mlp_kwargs,
    "resnet": _resnet_kwargs,
}
"""Arguments of a host's constructor, by type of host."""

_MEND = Family(
    name="mend",
    question="what does this host lack, and where? clothes at 14×14, one impaired block or none",
    widths=(3, 4, 6, 8),
    blocks=(2, 3, 4, 5, 7),
    impairments=("none", "kernel", "kernel", "width", "missing"),
    slots=(3, 4, 6, 10),
    samples=(1_000, 3_000, 8_000),
    label_noise=(0.0, 0.0, 0.1, 0.3),
    epochs=(12, 16, 24),
    batch=(32, 64),
    batches_per_epoch=16,
    val_size=1_000,
)

_SIGHT = Family(
    name="sight",
    question="how much of this host sees single pixels? clothes at 14×14, from no block to all blocks",
    widths=(4, 6, 8),
    blocks=(2, 3, 4),
    impairments=("none", "kernels", "kernels"),
    slots=(4, 6),
    samples=(3_000, 8_000),
    label_noise=(0.0, 0.0, 0.2),
    epochs=(10, 14),
    batch=(32, 64),
    batches_per_epoch=16,
    val_size=1_000,
)

_HEAL = msgspec.structs.replace(
    _SIGHT,
    name="heal",
    question="does this host lack sight, normalisation or nothing? clothes at 14×14",
    blocks=(3, 4, 5),
    impairments=("none", "kernels", "norms"),
    slots=(),
    epochs=(10, 12),
    batches_per_epoch=12,
    val_size=600,
)

_TRIAGE = msgspec.structs.replace(
    _SIGHT,
    name="triage",
    question="does this host need a seed at all? clothes at 14×14; few hosts see nothing but single pixels",
    blocks=(2, 3),
    slots=(),
    label_noise=(0.0, 0.0, 0.1),
    epochs=(12,),
    batches_per_epoch=12,
    val_size=600,
    blueprints=("conv_heavy",),
)

_MEND_MLP = msgspec.structs.replace(
    _MEND,
    name="mend_mlp",
    question="as mend, with another host: layers instead of convolutions",
    host="mlp",
    widths=(8, 16, 32),
    blocks=(3, 4, 5, 6),
    impairments=("none", "width", "missing"),
    slots=(),
    lr=0.05,
    seed_lr=0.05,
)

_GENERAL = Family(
    name="general",
    question="what does this host need, if anything? clothes at 14×14",
    widths=(4, 6, 8),
    blocks=(2, 3, 4),
    impairments=("none", "kernels", "kernels", "kernel", "width", "missing"),
    slots=(3, 4, 6),
    samples=(3_000, 0),
    label_noise=(0.0, 0.0, 0.2),
    epochs=(12, 20, 40),
    batches_per_epoch=12,
    val_size=600,
)

_ROWS = (
    _MEND,
    _GENERAL,
    _SIGHT,
    _HEAL,
    _TRIAGE,
    # The same with another data set or other hosts, to see whether a policy transfers.
    msgspec.structs.replace(
        _MEND, name="mend_digits", question="as mend, on another data set: digits at 8×8", datasets=("digits",),
        samples=(300, 600, 1_197), val_size=300,
    ),
    msgspec.structs.replace(
        _MEND, name="mend_cifar", question="as mend, on another data set: natural images at 16×16",
        datasets=("cifar10",), shrink=2,
    ),
    msgspec.structs.replace(
        _SIGHT, name="sight_digits", question="as sight, on another data set: digits at 8×8", datasets=("digits",),
        samples=(600, 1_197), val_size=300,
    ),
    msgspec.structs.replace(
        _SIGHT, name="sight_cifar", question="as sight, on another data set: natural images at 16×16",
        datasets=("cifar10",), shrink=2,
    ),
    _MEND_MLP,
    msgspec.structs.replace(
        _MEND_MLP, name="mend_mlp_digits", question="as mend_mlp, on another data set: digits at 8×8",
        datasets=("digits",), samples=(300, 600, 1_197), val_size=300,
    ),
    msgspec.structs.replace(
        _HEAL, name="heal_digits", question="as heal, on another data set: digits at 8×8", datasets=("digits",),
        samples=(600, 1_197), val_size=300,
    ),
    msgspec.structs.replace(
        _TRIAGE, name="triage_digits", question="as triage, on another data set: digits at 8×8", datasets=("digits",),
        samples=(600, 1_197), val_size=300,
    ),
    msgspec.structs.replace(
        _MEND, name="mend_resnet", question="as mend, with another host: residual networks", host="resnet",
        widths=(2, 3, 4), blocks=(3, 4), impairments=("none",), slots=(),
    ),
)  # fmt: skip

FAMILIES: dict[str, Family] = {row.name: row for row in _ROWS}


def get_family(name: str) -> Family | None:
    """Return the family with this name, or that of the TOML file at this path; None if `name` is neither."""
    if name.endswith(".toml"):
        return read_family(Path(name))
    return FAMILIES.get(name)


def read_family(path: Path) -> Family:
    """Return the family that a TOML file defines. Its name is that of the file unless the file sets one."""
    try:
        tree = tomllib.loads(read_regular(path, MOST_BYTES, follow=True).decode())
        return msgspec.convert({"name": path.stem} | tree, Family)
    except FileNotFoundError:
        raise ConfigError(f"there is no family file {path}") from None
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} does not define a family: {error}") from error


def world_task(name: str, world: int, epochs: int | None = None) -> Task:
    """Return the task with this name, or the task of `world` in the family with this name, for `epochs` epochs."""
    family = None if name in TASKS else get_family(name)
    if name not in TASKS and family is None:
        raise unknown_name("task", name, [*TASKS, *FAMILIES])
    task = TASKS[name] if family is None else family.task(world)
    return task if epochs is None else replace(task, epochs=epochs)
