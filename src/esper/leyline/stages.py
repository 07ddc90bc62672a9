"""The stages of a seed's life, the transitions between them, and the gates that guard them."""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np

from esper.leyline.errors import ConfigError


class SeedStage(IntEnum):
    """Where a seed stands in its life, in order. The numbers are stored: never reuse one."""

    DORMANT = 0  # no seed: the slot passes features through
    GERMINATED = 1  # seed attached, nothing learnt yet
    TRAINING = 2  # learns behind isolation; the host cannot feel it
    BLENDING = 3  # alpha moves towards its target, or rests below 1
    HOLDING = 4  # full strength, waiting for the verdict
    FOSSILIZED = 5  # part of the host for good
    PRUNED = 6  # removed; 6, 7 and 8 label one cooldown countdown
    EMBARGOED = 7
    RESETTING = 8

    def can_become(self, target: SeedStage) -> bool:
        return target in NEXT_STAGES[self]


S = SeedStage
NEXT_STAGES: dict[SeedStage, frozenset[SeedStage]] = {
    S.DORMANT: frozenset({S.GERMINATED}),
    S.GERMINATED: frozenset({S.TRAINING, S.PRUNED}),
    S.TRAINING: frozenset({S.BLENDING, S.PRUNED}),
    S.BLENDING: frozenset({S.HOLDING, S.PRUNED}),
    S.HOLDING: frozenset({S.FOSSILIZED, S.BLENDING, S.PRUNED}),
    S.FOSSILIZED: frozenset(),
    S.PRUNED: frozenset({S.EMBARGOED}),
    S.EMBARGOED: frozenset({S.RESETTING}),
    S.RESETTING: frozenset({S.DORMANT}),
}
NUM_STAGES = len(SeedStage)
GROWING = (S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING)
"""Stages in which a seed lives but is not committed; they may be pruned."""
COOLING = (S.PRUNED, S.EMBARGOED, S.RESETTING)

PRUNED_TICKS, EMBARGOED_TICKS, RESETTING_TICKS = 1, 5, 1
COOLDOWN_TICKS = PRUNED_TICKS + EMBARGOED_TICKS + RESETTING_TICKS
"""A pruned slot is empty again after this many ticks."""
COOLDOWN_LABEL = np.array(
    [S.DORMANT] + [S.RESETTING] * RESETTING_TICKS + [S.EMBARGOED] * EMBARGOED_TICKS + [S.PRUNED] * PRUNED_TICKS,
    dtype=np.int8,
)
"""The stage a slot shows with so many ticks of cooldown left: an index, not a rule."""


class Gate(IntEnum):
    """What must hold before a seed moves on. The value indexes threshold tables and reason bits."""

    TRAINING = 0  # GERMINATED → TRAINING: always open
    BLENDING = 1  # TRAINING → BLENDING: it has learnt something, stably
    HOLDING = 2  # BLENDING → HOLDING: full amplitude reached and at rest
    FOSSILIZED = 3  # HOLDING → FOSSILIZED: measured to be worth it


class Check(IntEnum):
    """Why a gate stays shut: one bit each in the `reasons` of `kasmina.lifecycle.gates`.

    `kasmina.gate_reasons` has the words.
    """

    DWELL = 0
    GRADIENT_HEALTH = 1
    GRADIENT_RATIO = 2
    IMPROVEMENT = 3
    ALPHA_AT_FULL = 4
    CONTRIBUTION = 5


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The least value each gate asks for; −inf asks only that there is a measurement, None asks nothing.

    Qualities are fractions, 0…1 (accuracy), or whatever unit the quality function has.
    """

    blend_dwell: int = 10
    """Epochs in TRAINING before blending."""
    blend_health: float | None = 0.7
    """Gradient health: 1 is healthy, 0 is dead or exploding."""
    blend_ratio: float | None = None
    """Seed gradient over host gradient, each per square root of its parameters."""
    blend_improvement: float | None = None
    """Host quality since the stage began."""
    hold_dwell: int = 0
    """Epochs in BLENDING before holding."""
    fossil_contribution: float | None = float("-inf")
    """Contribution minus z standard errors."""
    z: float = 2.5
    """How many standard errors a contribution is discounted by."""

    def __post_init__(self) -> None:
        if self.blend_dwell < 0 or self.hold_dwell < 0:
            raise ConfigError(f"a dwell must be ≥ 0, got {self.blend_dwell} and {self.hold_dwell}")
        if not self.z >= 0:
            raise ConfigError(f"z must be ≥ 0, got {self.z}")


PERMISSIVE = Thresholds()
STRICT = Thresholds(
    blend_health=None, blend_ratio=0.10, blend_improvement=0.005, hold_dwell=10, fossil_contribution=0.01
)
