"""Settings of the engine and of its governor: how hosts are trained and evaluated, and when they are rolled back."""

from __future__ import annotations

from math import inf

import msgspec
import torch

from esper.kasmina.slot import Incubation
from esper.leyline.errors import ConfigError
from esper.tolaria.batched_training import Strategy


class GovernorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an environment is rolled back, by its validation losses.

    Chance is the loss of guessing, ln(classes). The median and the spread (a robust standard deviation) are those of
    the losses in the history. The lead is how far the median is below chance.
    """

    window: int = 20
    """The history holds at most this many losses without alarm, the newest ones, at least 1."""
    enough: int = 5
    """The median and the spread are used once the history holds this many losses, from 1 to `window`."""
    spreads: float = 6.0
    """A loss diverges if it exceeds the median by this many spreads (≥ 0) and exceeds `above_chance`."""
    above_chance: float = 1.25
    """A loss diverges only above this multiple of chance, at least 1."""
    early: float = 4.0
    """With fewer than `enough` losses, a loss diverges above this multiple of chance, at least 1."""
    lead_spreads: float = 3.0
    """A host can collapse only if its lead exceeds this many spreads (≥ 0), within the two bounds that follow."""
    least_lead: float = 0.02
    """A host can collapse only if its lead exceeds this share of chance (≥ 0): early losses stay near chance."""
    clear_lead: float = 0.4
    """A lead above this share of chance (≥ `least_lead`) suffices at any spread: fast falling losses spread widely."""
    lead_left: float = 0.1
    """A loss collapses if at most this share of the lead is left, in [0, 1)."""
    patience: int = 3
    """An environment is rolled back after this many divergences and collapses in a row, at least 1."""
    snapshot_every: int = 5
    """A snapshot of an environment without alarm is taken every this many steps, at least 1."""
    give_up: int = 3
    """The run ends after this many steps in a row, at least 1, with an error in every environment."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            least = 0 if name in ("spreads", "lead_spreads", "least_lead", "clear_lead", "lead_left") else 1
            if not least <= getattr(self, name) < inf:
                raise ConfigError(f"governor.{name} must be finite and ≥ {least}, got {getattr(self, name)}")
        if self.enough > self.window:
            raise ConfigError(f"governor.enough must be ≤ window ({self.window}), got {self.enough}")
        if self.least_lead > self.clear_lead:
            raise ConfigError(f"governor.least_lead must be ≤ clear_lead ({self.clear_lead}), got {self.least_lead}")
        if self.lead_left >= 1.0:
            raise ConfigError(f"governor.lead_left must be below 1, got {self.lead_left}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How hosts are trained and evaluated, for every task.

    Raises:
        ConfigError: A setting is out of its range.

    Example:
        >>> esper.EngineConfig(strategy="stacked").device
        'cpu'
    """

    incubation: Incubation = "shadow"
    """A TRAINING seed of an isolated birth learns in a separate pass ("shadow") or in the main pass
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
            raise ConfigError(
                f"shadow_every and gradient_telemetry_stride must be ≥ 1, got {self.shadow_every} and "
                f"{self.gradient_telemetry_stride}"
            )
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
