"""Lifecycle stages of a seed, the transitions between them, and the gates that guard the transitions."""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np

from esper.leyline.errors import ConfigError


class SeedStage(IntEnum):
    """Lifecycle stage of a seed, in order. The numbers are stored in files: never reuse one.

    Example:
        >>> [stage.name for stage in esper.SeedStage][:6]
        ['DORMANT', 'GERMINATED', 'TRAINING', 'BLENDING', 'HOLDING', 'FOSSILIZED']
    """

    DORMANT = 0  # no seed: the slot passes features through
    GERMINATED = 1  # seed attached, not trained yet
    TRAINING = 2  # trains in isolation; the host's output does not change
    BLENDING = 3  # alpha moves towards its target, or rests below 1
    HOLDING = 4  # alpha = 1; waits to be fossilised or pruned
    FOSSILIZED = 5  # permanent part of the host
    PRUNED = 6  # removed; 6, 7 and 8 label one cooldown countdown
    EMBARGOED = 7
    RESETTING = 8


Stage = SeedStage
NEXT_STAGES: dict[SeedStage, frozenset[SeedStage]] = {
    Stage.DORMANT: frozenset({Stage.GERMINATED}),
    Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.BLENDING, Stage.PRUNED}),  # BLENDING: an open birth
    Stage.TRAINING: frozenset({Stage.BLENDING, Stage.PRUNED}),
    Stage.BLENDING: frozenset({Stage.HOLDING, Stage.PRUNED}),
    Stage.HOLDING: frozenset({Stage.FOSSILIZED, Stage.BLENDING, Stage.PRUNED}),
    Stage.FOSSILIZED: frozenset(),
    Stage.PRUNED: frozenset({Stage.EMBARGOED}),
    Stage.EMBARGOED: frozenset({Stage.RESETTING}),
    Stage.RESETTING: frozenset({Stage.DORMANT}),
}
NUM_STAGES = len(SeedStage)
GROWING = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
"""Stages of a seed that is not committed and may be pruned."""
COOLING = (Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)

PRUNED_TICKS = 1
EMBARGOED_TICKS = 5
RESETTING_TICKS = 1
COOLDOWN_TICKS = PRUNED_TICKS + EMBARGOED_TICKS + RESETTING_TICKS
"""Ticks after pruning until the slot is empty again."""
COOLDOWN_LABEL = np.array(
    [Stage.DORMANT]
    + [Stage.RESETTING] * RESETTING_TICKS
    + [Stage.EMBARGOED] * EMBARGOED_TICKS
    + [Stage.PRUNED] * PRUNED_TICKS,
    dtype=np.int8,
)
"""Stage of a slot by the number of cooldown ticks left."""


class Check(IntEnum):
    """Conditions of the gates between stages; `leyline.gates` defines them."""

    DWELL = 0
    GRADIENT_HEALTH = 1
    GRADIENT_RATIO = 2
    IMPROVEMENT = 3
    ALPHA_AT_FULL = 4
    CONTRIBUTION = 5


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Minimum value that each gate requires. −inf requires only a finite measurement, None requires nothing.

    Qualities are fractions, 0…1 (accuracy), or in the unit of the quality function.

    Raises:
        ConfigError: A setting is out of its range.

    Example:
        >>> esper.Rules(thresholds=esper.Thresholds(fossil_contribution=0.01)).thresholds.z
        2.5
    """

    blend_dwell: int = 10
    """A seed must spend at least this many epochs in TRAINING before blending, ≥ 0."""
    blend_health: float | None = 0.7
    """Blending requires at least this gradient health, which is measured in 0…1: 1 is healthy, 0 is dead or
    exploding."""
    blend_ratio: float | None = None
    """Blending requires at least this ratio of seed to host gradient, each divided by the square root of its parameter
    count, which is measured in 0…10."""
    blend_improvement: float | None = None
    """Blending requires that the host's quality has improved by at least this much since TRAINING began, in units of
    quality."""
    hold_dwell: int = 0
    """A seed must spend at least this many epochs in BLENDING before holding, ≥ 0."""
    fossil_contribution: float | None = float("-inf")
    """Fossilising requires that the contribution minus `z` standard errors is at least this value, in units of
    quality."""
    z: float = 2.5
    """This many standard errors, ≥ 0, are subtracted from a contribution."""

    def __post_init__(self) -> None:
        if self.blend_dwell < 0 or self.hold_dwell < 0:
            raise ConfigError(f"a dwell must be ≥ 0, got {self.blend_dwell} and {self.hold_dwell}")
        for name in ("blend_health", "blend_ratio", "blend_improvement", "fossil_contribution"):
            value = getattr(self, name)
            if value is not None and np.isnan(value):
                raise ConfigError(f"{name} must be a number or None, got {value}")
        if not self.z >= 0:
            raise ConfigError(f"z must be ≥ 0, got {self.z}")


PERMISSIVE = Thresholds()
"""The default thresholds: a seed can be committed once its contribution was measured at alpha = 1."""
STRICT = Thresholds(
    blend_health=None, blend_ratio=0.10, blend_improvement=0.005, hold_dwell=10, fossil_contribution=0.01
)
"""Stricter thresholds: among others, a contribution of one point after subtracting 2.5 standard errors."""
