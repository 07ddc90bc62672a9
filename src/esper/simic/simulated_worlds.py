"""Simulated worlds: learning curves of hosts and potentials of seeds, drawn from the world's number.

A world has a *demand* for three kinds of help (spatial mixing, channel mixing, calibration), which depends on depth
and on the world; a blueprint offers each kind to some degree. The worth of a fully trained seed is

    potential = gain · need of the slot · (offer · demand − what the host provides itself) · surprise

Part of it is predictable (depth, blueprint), part is observable on the host (a slow start indicates spatial demand, a
gap between training and validation loss calibration, a low ceiling responsiveness to growth), and the rest is
observable only after planting. Some seeds are bad: they are harmful, or stillborn and never learn.

Legend: E environments, S slots, B blueprints, K kinds of help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from esper.leyline.actions import BLUEPRINTS, Operator
from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.rng import Bits, bell, random_bits, uniform, world_keys
from esper.leyline.slot_table import Bools, Floats, Ints

MOST_SLOTS = 1000
MOST_SPREAD, MOST_FACTOR = 100.0, 1e4
LEAST_CEILING, MOST_CEILING = 0.15, 0.98
LEAST_ROOM = 0.01
_AT_LEAST_0 = ("gain", "gain_spread", "kind_spread", "slot_spread", "surprise", "shock", "quality_noise", "noise",
               "ceiling_spread", "room_spread", "pace_spread", "overfit_spread")  # fmt: skip


class SimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of simulated worlds: their variation and the measurement noise.

    Raises:
        ConfigError: A setting is out of its range.

    Example:
        >>> esper.SimConfig(slots=5).horizon
        40
    """

    horizon: int = 40
    """An episode has this many steps, ≥ 1."""
    slots: int = 3
    """A host has this many slots, 1 to 1000."""
    gain: float = 0.06
    """A well-fitting seed adds this quality in a typical slot, as a fraction from 0 to 100."""
    gain_spread: float = 0.35
    """`gain` varies between worlds by their responsiveness to growth, with this standard deviation of its logarithm, 0
    to 100."""
    kind_spread: float = 1.6
    """The demand for each kind of help varies between worlds, with this standard deviation of its logarithm, 0 to 100.
    At 0 one schedule fits all worlds."""
    slot_spread: float = 0.5
    """Need varies between the slots of a world, with this standard deviation of its logarithm, 0 to 100."""
    surprise: float = 0.35
    """A seed's potential varies by what neither kind nor need explain, with this standard deviation relative to its
    scale, 0 to 100."""
    bad_share: float = 0.12
    """This fraction of seeds learns to be harmful, 0 to 1."""
    stillborn_share: float = 0.06
    """This fraction of seeds learns nothing, 0 to 1 together with `bad_share`. Their gradients show it: they fail their
    gate."""
    blueprints: tuple[str, ...] = ()
    """Only these blueprints may be planted, of those for feature maps; an empty list allows all of them."""
    seed_params: float = 1.0
    """The parameters of seeds are multiplied by this factor, 1e-4 to 1e4. At 1 they are those of seeds in a CNN of
    eight channels at first."""
    seed_macs: float = 1.0
    """The multiply-adds of seeds are multiplied by this factor, 1e-4 to 1e4."""
    ceiling: float = 0.74
    """A host without growth approaches this quality on average over worlds, as a fraction from 0.15 to 0.98."""
    ceiling_spread: float = 0.05
    """That quality varies between worlds by their responsiveness to growth, with this standard deviation, 0 to 100.
    Each world's lies in 0.15 to 0.98."""
    room: float = 0.16
    """Growth adds at most this quality on average over worlds, as a fraction above 0 and at most 1."""
    room_spread: float = 0.03
    """That maximum varies between worlds by their responsiveness to growth, with this standard deviation, 0 to 100.
    Each world's is at least 0.01."""
    pace: float = 4.0
    """The learning curve of a host has this time constant in epochs, as the median over worlds, 1e-4 to 1e4."""
    pace_spread: float = 0.2
    """Time constants vary between worlds by their demand for spatial mixing, with this standard deviation of the
    logarithm, 0 to 100."""
    overfit: float = 0.15
    """Training loss lies below validation loss by this fraction in the end, on average over worlds, −1 to 0.5. Below 0
    training loss is the higher one. All worlds have the sign of this setting."""
    overfit_spread: float = 0.07
    """That fraction varies between worlds by their demand for calibration, with this standard deviation, 0 to 100."""
    shock: float = 0.02
    """This quality is lost temporarily when alpha moves by 1 in one step, as a fraction from 0 to 100."""
    val_samples: int = 2000
    """The simulated validation split has this many samples, ≥ 1. They determine the standard errors of
    contributions."""
    quality_noise: float = 0.0015
    """Quality varies from epoch to epoch with this standard deviation, as a fraction from 0 to 100."""
    noise: float = 1.0
    """All measurement noise is multiplied by this factor, 0 to 100. At 0 measurements are exact."""

    def __post_init__(self) -> None:
        if self.slots > MOST_SLOTS:
            raise ConfigError(f"slots must be at most {MOST_SLOTS}, got {self.slots}: every table is that wide")
        if self.horizon < 1 or self.slots < 1 or self.val_samples < 1:
            raise ConfigError(
                f"horizon, slots and val_samples must be ≥ 1, got {self.horizon}, {self.slots} and {self.val_samples}"
            )
        if not (self.bad_share >= 0 and self.stillborn_share >= 0 and self.bad_share + self.stillborn_share <= 1):
            raise ConfigError(f"shares must lie in 0…1 together, got {self.bad_share} and {self.stillborn_share}")
        for name in _AT_LEAST_0:
            if not 0 <= getattr(self, name) <= MOST_SPREAD:
                raise ConfigError(f"{name} must be ≥ 0 and at most {MOST_SPREAD:g}, got {getattr(self, name)}")
        for name in self.blueprints:
            if name not in MAP_BLUEPRINTS:
                raise unknown_name("blueprint of simulated slots", name, MAP_BLUEPRINTS)
        self._check_curves()

    def _check_curves(self) -> None:
        for name in ("pace", "seed_params", "seed_macs"):
            if not 1 / MOST_FACTOR <= getattr(self, name) <= MOST_FACTOR:
                raise ConfigError(f"{name} must be > 0, from 1e-4 to 1e4, got {getattr(self, name)}")
        if not 0 < self.room <= 1:
            raise ConfigError(f"room must be above 0 and at most 1, got {self.room}")
        if not LEAST_CEILING <= self.ceiling <= MOST_CEILING:
            raise ConfigError(f"ceiling must lie in {LEAST_CEILING}…{MOST_CEILING}, got {self.ceiling}")
        if not -1 <= self.overfit <= 0.5:
            raise ConfigError(f"overfit must lie in −1…0.5, got {self.overfit}")

    @property
    def allowed(self) -> list[int]:
        """Numbers of the blueprints that may be planted."""
        return [BLUEPRINTS.index(name) for name in self.blueprints or MAP_BLUEPRINTS]


# ---- constants: blueprints, the host's shape ---------------------------------------------------------------------

MAP_BLUEPRINTS = ("conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy")
"""Built-in blueprints for feature maps, which simulated slots accept."""
_OFFERS = {  # space, channels, calibration; fraction of the remaining skill learnt per epoch
    "conv_light": (0.75, 0.45, 0.05, 0.20),
    "attention": (0.00, 0.40, 0.75, 0.26),
    "norm": (0.00, 0.05, 0.85, 0.35),
    "depthwise": (0.85, 0.20, 0.05, 0.20),
    "bottleneck": (0.50, 0.65, 0.05, 0.17),
    "conv_small": (0.00, 0.80, 0.10, 0.24),
    "conv_heavy": (1.00, 0.90, 0.05, 0.11),
}
OFFER = np.zeros((len(BLUEPRINTS), 3))  # [B, K]
LEARNING_RATE = np.zeros(len(BLUEPRINTS))  # [B]
for _name, (*_offer, _rate) in _OFFERS.items():
    OFFER[BLUEPRINTS.index(_name)] = _offer
    LEARNING_RATE[BLUEPRINTS.index(_name)] = _rate

_NORM = np.maximum(np.sqrt((OFFER**2).sum(axis=1)), 1e-9)
_ALIKE = (OFFER[:, None] * OFFER[None]).sum(axis=2) / (_NORM[:, None] * _NORM[None])
INTERACTION = 0.35 - 0.85 * _ALIKE
"""[B, B] interaction of seeds in neighbouring slots, relative to the weaker one: similar seeds are redundant, different
ones complementary."""

OPERATOR_FIT = np.ones((len(Operator), len(BLUEPRINTS)))
"""[operators, B] factor of a seed's strength: blueprints that scale channels suit MULTIPLY, the others ADD."""
OPERATOR_FIT[Operator.MULTIPLY] = 0.8
OPERATOR_FIT[Operator.MULTIPLY, [BLUEPRINTS.index("attention"), BLUEPRINTS.index("norm")]] = 1.15
OPERATOR_FIT[Operator.GATE] = 0.9
GATED_HARM = 0.5
"""Fraction of a seed's harm that passes a gate."""

BASE_WIDTH = 8
LEVELS = 3
IMAGE = 14
CLASSES = 10


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the simulated host: one convolution before each slot, widths doubling twice from first to last."""

    width: Ints  # [S] channels
    depth: Floats  # [S] 0…1
    params: Ints  # [S, B] parameters of a seed
    macs: Ints  # [S, B]
    host_params: int
    host_macs: int


def host_shape(config: SimConfig) -> Shape:
    """Return the shape of the host and its seeds."""
    slots = config.slots
    level = np.arange(slots) * LEVELS // slots
    width = BASE_WIDTH * 2**level
    pixels = (IMAGE >> level) ** 2  # of the convolution
    behind = (IMAGE >> level + 1) ** 2  # after its pooling
    before = np.concatenate([[1], width[:-1]])
    params, macs = np.zeros((2, slots, len(BLUEPRINTS)), dtype=np.int64)
    for name in MAP_BLUEPRINTS:
        b = BLUEPRINTS.index(name)
        weights, others = _weights(name, width)
        params[:, b] = np.rint((weights + others) * config.seed_params)
        positions = 1 if name == "attention" else behind  # attention operates on the mean over pixels
        macs[:, b] = np.rint(weights * positions * config.seed_macs)
    host_params = int((9 * before * width + 2 * width).sum() + (width[-1] + 1) * CLASSES)
    host_macs = int((9 * before * width * pixels).sum() + width[-1] * CLASSES)
    return Shape(width, (np.arange(slots) + 0.5) / slots, params, macs, host_params, host_macs)


def _weights(name: str, c: Ints) -> tuple[Ints, Ints]:
    """Return a blueprint's multiplying parameters and its other ones (norms, biases), by channels."""
    quarter, neck = np.maximum(1, c // 4), np.maximum(8, c // 4)
    return {
        "conv_light": (9 * c * c, 2 * c),
        "attention": (2 * c * quarter, c),
        "norm": (0 * c, 2 * c + 1),
        "depthwise": (9 * c + c * c, 2 * c),
        "bottleneck": (2 * c * neck + 9 * neck * neck, 2 * c),
        "conv_small": (c * c, 2 * c),
        "conv_heavy": (18 * c * c, 4 * c),
    }[name]


# ---- worlds ------------------------------------------------------------------------------------------------------

KINDS = OFFER.shape[1]
HOST_HAS = 0.22
"""Fit below which a seed offers no more than the host itself."""
# standard deviations that nothing else in a world explains
CEILING_NOISE = 0.01
PACE_NOISE = 0.05
"""Of the logarithm of the pace."""
OVERFIT_NOISE = 0.02


@dataclass(frozen=True, slots=True)
class Worlds:
    """True parameters of E worlds."""

    keys: Bits  # [E]
    start: Floats  # [E] quality before the first epoch
    ceiling: Floats  # [E] quality without growth, in the long run
    pace: Floats  # [E] time constant of the host's learning curve, in epochs
    overfit: Floats  # [E] final fraction by which training loss lies below validation loss
    room: Floats  # [E] maximum that growth can add
    need: Floats  # [E, S] of each slot, around 1
    scale: Floats  # [E, S] unit of potentials and of their surprises
    usual: Floats  # [E, S, B] potential of a sound seed without its surprise
    expected: Floats  # [E, S, B] mean of `potential` over surprises; −1 where `blueprints` does not allow the seed
    potential: Floats  # [E, S, B] what a seed adds at full skill and strength
    stillborn: Bools  # [E, S, B]

    def host_quality(self, step: Ints) -> Floats:
        """Return the quality [E] of the host without growth after `step` epochs."""
        return self.ceiling - (self.ceiling - self.start) * np.exp(-step / self.pace)


def draw_worlds(worlds: Sequence[int] | Ints, config: SimConfig) -> Worlds:
    """Return the true parameters of these worlds. They depend on the world's number and the settings only."""
    keys = world_keys(worlds)
    shape = host_shape(config)
    size = len(keys), config.slots, len(BLUEPRINTS)

    def normal(purpose: str, *axes: int) -> Floats:
        return bell(random_bits(keys, purpose, int(np.prod(axes)))).reshape(size[0], *axes)

    responsiveness = normal("head-room", 1)[:, 0]
    kind = normal("kind", KINDS)
    usual = np.stack([1.0 - shape.depth, 0.3 + 0.6 * shape.depth, np.full(config.slots, 0.4)], axis=1)  # [S, K]
    demand = np.exp(usual + config.kind_spread * kind[:, None])
    demand /= demand.sum(axis=2, keepdims=True)  # [E, S, K]
    fit = sum(demand[:, :, None, k] * OFFER[:, k] for k in range(KINDS))  # [E, S, B]
    need = np.exp(config.slot_spread * normal("need", config.slots))
    typical = config.gain * np.exp(config.gain_spread * responsiveness)[:, None, None]
    scale = typical * need[:, :, None]
    usually = 2.0 * scale * (fit - HOST_HAS)
    potential = usually + scale * config.surprise * normal("surprise", *size[1:])

    draw = uniform(random_bits(keys, "fate", int(np.prod(size[1:])))).reshape(size)
    bad = draw < config.bad_share
    stillborn = ~bad & (draw < config.bad_share + config.stillborn_share)
    harm = -0.6 * scale - 0.3 * np.abs(potential)
    sound_share = 1.0 - config.bad_share - config.stillborn_share
    expected = sound_share * usually + config.bad_share * (-0.6 * scale - 0.3 * np.abs(usually))
    ceiling = config.ceiling - config.ceiling_spread * responsiveness + CEILING_NOISE * normal("ceiling", 1)[:, 0]
    overfit = config.overfit + config.overfit_spread * kind[:, 2] + OVERFIT_NOISE * normal("overfit", 1)[:, 0]
    return Worlds(
        keys=keys,
        start=np.full(size[0], 1.0 / CLASSES),
        ceiling=np.clip(ceiling, LEAST_CEILING, MOST_CEILING),
        pace=np.exp(np.log(config.pace) + config.pace_spread * kind[:, 0] + PACE_NOISE * normal("pace", 1)[:, 0]),
        overfit=np.clip(overfit, *((0.0, 0.5) if config.overfit >= 0 else (-1.0, 0.0))),
        room=np.maximum(config.room + config.room_spread * responsiveness, LEAST_ROOM),
        need=need,
        scale=scale[:, :, 0],
        usual=usually,
        expected=expected,
        potential=np.where(bad, harm, np.where(stillborn, 0.0, potential)),
        stillborn=stillborn,
    )
