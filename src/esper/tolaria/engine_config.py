"""Settings of the engine: how hosts are trained and evaluated."""

from __future__ import annotations

import msgspec
import torch

from esper.kasmina.body import Incubation
from esper.leyline.errors import ConfigError
from esper.tolaria.batched_training import Strategy
from esper.tolaria.governor import GovernorConfig


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How hosts are trained and evaluated, for every task."""

    incubation: Incubation = "shadow"
    """How a TRAINING seed learns: in a separate pass ("shadow"), or in the main pass ("straight_through")."""
    shadow_every: int = 2
    """Number of batches per shadow pass, at least 1. At 2, seeds learn nearly as much as at 1 (docs/incubation.md)."""
    gradient_telemetry_stride: int = 10
    """Number of batches between samples of gradient statistics, at least 1."""
    ema_decay: float = 0.98
    """Decay per batch of the weight average that quality is measured on, in [0, 1); 0 measures the raw weights."""
    device: str = "cpu"
    """The torch device that hosts and data are placed on, such as "cpu" or "cuda:0"."""
    compile: bool = False
    """Whether the forward passes are compiled; on a CPU compiling makes training slower."""
    governor: GovernorConfig = GovernorConfig()
    """When an environment is rolled back."""
    strategy: Strategy = "loop"
    """How environments are trained: one by one ("loop"), all at once as one stack ("stacked"), or whichever a short
    measurement at the start finds faster ("auto"). Only "loop" is bit-identical for any number of environments: the
    rounding of a stack depends on its size, and the choice of "auto" on the load of the machine."""

    def __post_init__(self) -> None:
        if self.shadow_every < 1 or self.gradient_telemetry_stride < 1:
            raise ConfigError("shadow_every and gradient_telemetry_stride must be ≥ 1")
        if not 0.0 <= self.ema_decay < 1.0:
            raise ConfigError(f"ema_decay must lie in [0, 1), got {self.ema_decay}")
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ConfigError(f"device is one that torch knows, such as cpu or cuda:0, got {self.device!r}") from None
        if self.strategy not in ("loop", "stacked", "auto"):
            raise ConfigError(f"strategy must be 'loop', 'stacked' or 'auto', got {self.strategy!r}")
        if self.incubation not in ("shadow", "straight_through"):
            raise ConfigError(f"incubation must be 'shadow' or 'straight_through', got {self.incubation!r}")
