"""Settings of the engine: how hosts are trained and evaluated."""

from __future__ import annotations

import msgspec
import torch

from esper.kasmina.slot import Incubation
from esper.leyline.errors import ConfigError
from esper.tolaria.batched_training import Strategy
from esper.tolaria.governor import GovernorConfig


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How hosts are trained and evaluated, for every task."""

    incubation: Incubation = "shadow"
    """How a TRAINING seed of an isolated birth learns: in a separate pass ("shadow") or in the main pass
    ("straight_through")."""
    shadow_every: int = 2
    """A shadow pass runs every this many batches, at least 1; at 2 seeds learn nearly as much (docs/incubation.md)."""
    gradient_telemetry_stride: int = 10
    """Gradient statistics are sampled every this many batches, at least 1."""
    ema_decay: float = 0.98
    """Quality is measured on a moving average of the weights with this decay per batch, in [0, 1); 0 is no average."""
    device: str = "cpu"
    """Hosts and data are placed on this torch device, such as "cpu" or "cuda:0"."""
    compile: bool = False
    """The forward pass is compiled if this is true; on a CPU that makes training slower."""
    governor: GovernorConfig = GovernorConfig()
    """These settings determine when an environment is rolled back."""
    strategy: Strategy = "loop"
    """Environments are trained one by one ("loop"), all at once as one batch ("stacked"), or in whichever way a short
    measurement at the start finds faster ("auto"). Only "loop" is bit-identical for any number of environments: the
    rounding of a batch depends on its size, and the choice of "auto" on the load of the machine."""

    def __post_init__(self) -> None:
        if self.shadow_every < 1 or self.gradient_telemetry_stride < 1:
            raise ConfigError("shadow_every and gradient_telemetry_stride must be ≥ 1")
        if not 0.0 <= self.ema_decay < 1.0:
            raise ConfigError(f"ema_decay must lie in [0, 1), got {self.ema_decay}")
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ConfigError(f"device must be a torch device such as cpu or cuda:0, got {self.device!r}") from None
        if self.strategy not in ("loop", "stacked", "auto"):
            raise ConfigError(f"strategy must be 'loop', 'stacked' or 'auto', got {self.strategy!r}")
        if self.incubation not in ("shadow", "straight_through"):
            raise ConfigError(f"incubation must be 'shadow' or 'straight_through', got {self.incubation!r}")
