"""Settings of the engine: how hosts are trained and measured."""

from __future__ import annotations

import msgspec
import torch

from esper.kasmina.body import Incubation
from esper.leyline.errors import ConfigError
from esper.tolaria.batched_training import Strategy
from esper.tolaria.governor import GovernorConfig


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How hosts are trained and measured, whatever the task."""

    incubation: Incubation = "shadow"
    """How a TRAINING seed learns: by a pass of its own, or straight-through in the main pass."""
    shadow_every: int = 2
    """A shadow pass every so many batches: half the lessons teach nearly as much (docs/incubation.md)."""
    gradient_telemetry_stride: int = 10
    """Gradient statistics every so many batches."""
    ema_decay: float = 0.98
    """Of the weight average that quality is measured on."""
    device: str = "cpu"
    compile: bool = False
    """Compile the forward passes. Off: on a CPU it loses."""
    governor: GovernorConfig = GovernorConfig()
    """When a host counts as sick."""
    strategy: Strategy = "loop"
    """Train environments one by one (`loop`), small ones as one stack (`stacked`), or as a short measurement at the
    start finds faster (`auto`). The last bits of a stack depend on how many it holds, and a measurement on the mood of
    the machine: only `loop` gives the same run bit for bit in any company."""

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
