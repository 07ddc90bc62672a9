"""The action space: operations, and the heads that parametrise them, as tables.

Network, masks, buffer, executor and telemetry read these tables, so a head is declared once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Op(IntEnum):
    """Operation on one environment, one per step."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


class Operator(IntEnum):
    """How a seed's Δ is combined with the host's features h; w is alpha and g the gate."""

    ADD = 0  # y = h + w·Δ
    MULTIPLY = 1  # y = h·(1 + w·tanh Δ)
    GATE = 2  # y = h + w·g(h)·Δ


class Curve(IntEnum):
    """Shape of an alpha ramp."""

    LINEAR = 0
    COSINE = 1
    SIGMOID_GENTLE = 2
    SIGMOID = 3
    SIGMOID_SHARP = 4


CURVE_STEEPNESS = np.array([0.0, 0.0, 6.0, 12.0, 24.0])
"""Steepness k of the sigmoid per curve; 0 if the curve is not a sigmoid."""


@dataclass(frozen=True, slots=True)
class Style:
    """Ramp curve and operator as one choice, so that no illegal pair can be chosen."""

    name: str
    curve: Curve
    operator: Operator


STYLES = (
    Style("LINEAR_ADD", Curve.LINEAR, Operator.ADD),
    Style("LINEAR_MULTIPLY", Curve.LINEAR, Operator.MULTIPLY),
    Style("SIGMOID_ADD", Curve.SIGMOID, Operator.ADD),
    Style("GATED_GATE", Curve.LINEAR, Operator.GATE),
)
STYLE_CURVE = np.array([s.curve for s in STYLES], dtype=np.int8)
STYLE_OPERATOR = np.array([s.operator for s in STYLES], dtype=np.int8)

TEMPO_EPOCHS = np.array([3, 5, 8], dtype=np.int16)
"""Length of the first alpha ramp in epochs, by TEMPO choice."""
ALPHA_TARGETS = np.array([0.5, 0.7, 1.0], dtype=np.float32)
"""Target value of alpha, by ALPHA_TARGET choice."""
SPEED_TICKS = np.array([0, 3, 5, 8], dtype=np.int16)
"""Length of an alpha ramp in ticks, by ALPHA_SPEED choice; 0 is immediate."""

BLUEPRINTS = (
    "noop", "conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy",
    "lora", "lora_large", "mlp_small", "mlp", "flex_attention",
)  # fmt: skip
"""Built-in blueprints in the order of their stored numbers. User-defined ones follow."""


class Head(IntEnum):
    """Columns of an action row `[E, 8]`."""

    SLOT = 0
    BLUEPRINT = 1
    STYLE = 2
    TEMPO = 3
    ALPHA_TARGET = 4
    ALPHA_SPEED = 5
    ALPHA_CURVE = 6
    OP = 7


NUM_OPS, NUM_HEADS = len(Op), len(Head)

HEAD_OPTIONS: dict[Head, tuple[str, ...] | None] = {
    Head.SLOT: None,  # one per slot of the host
    Head.BLUEPRINT: BLUEPRINTS,
    Head.STYLE: tuple(s.name for s in STYLES),
    Head.TEMPO: ("FAST", "STANDARD", "SLOW"),
    Head.ALPHA_TARGET: ("HALF", "MOST", "FULL"),
    Head.ALPHA_SPEED: ("INSTANT", "FAST", "MEDIUM", "SLOW"),
    Head.ALPHA_CURVE: tuple(c.name for c in Curve),
    Head.OP: tuple(o.name for o in Op),
}
"""Names of the choices of each head."""

_H = Head
_RELEVANT: dict[Op, tuple[Head, ...]] = {
    Op.WAIT: (),
    Op.GERMINATE: (_H.SLOT, _H.BLUEPRINT, _H.STYLE, _H.TEMPO, _H.ALPHA_TARGET),
    Op.SET_ALPHA_TARGET: (_H.SLOT, _H.STYLE, _H.ALPHA_TARGET, _H.ALPHA_SPEED, _H.ALPHA_CURVE),
    Op.PRUNE: (_H.SLOT, _H.ALPHA_SPEED, _H.ALPHA_CURVE),
    Op.FOSSILIZE: (_H.SLOT,),
    Op.ADVANCE: (_H.SLOT,),
}
RELEVANCE = np.zeros((NUM_OPS, NUM_HEADS), dtype=bool)
"""Which heads an operation reads: `RELEVANCE[op, head]`."""
for _op, _heads in _RELEVANT.items():
    RELEVANCE[_op, [*_heads, Head.OP]] = True
RELEVANCE.setflags(write=False)
