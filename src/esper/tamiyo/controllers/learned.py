"""Controller that runs a trained policy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.leyline.actions import NUM_HEADS, Head
from esper.leyline.errors import ConfigError
from esper.leyline.rng import random_bits, uniform, world_keys
from esper.leyline.slot_table import Bools, Ints, SlotTable
from esper.tamiyo.decision_record import DecisionLog
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy.action_masks import DEFAULT_FIXED, MaskLayout, compute_batch_masks
from esper.tamiyo.policy.feature_ranges import Excess, FeatureRanges
from esper.tamiyo.policy.feature_table import BASE, PER_SLOT
from esper.tamiyo.policy.features import ObsContext, batch_obs_to_features
from esper.tamiyo.policy_file import load_policy, load_ranges

SHIPPED = Path(__file__).parent.parent / "shipped" / "tamiyo.safetensors"
"""Path of the policy shipped with the package, trained on the family `general`."""

SHOWN_OUTSIDE = 4
"""Number of features named in the warning about a model outside the ranges of training."""


class Learned:
    """Runs a trained policy.

    Call `bind` first: sizes and prices of the host are part of the observation. Actions are sampled with random numbers
    that depend on world and step only; `sample=False` takes the likeliest ones.
    """

    def __init__(
        self,
        network: TamiyoNetwork,
        *,
        fixed: Mapping[Head, int] | None = None,
        sample: bool = True,
        rng_seed: int = 0,
        ranges: FeatureRanges | None = None,
    ) -> None:
        self.network = network.eval()
        self.ranges = ranges
        """Ranges of the observations that the policy was trained with; None if they are not known."""
        self.outside: dict[str, Excess] = {}
        """What lay beyond these ranges since the last `bind`, by name."""
        self._has_warned = False
        self.fixed = dict(DEFAULT_FIXED if fixed is None else fixed)
        self.sample = sample
        self.rng_seed = rng_seed
        self.context: ObsContext | None = None
        self.log: DecisionLog | None = None
        """Collects every decision with its inputs; None collects nothing."""

    @classmethod
    def load(cls, path: Path) -> Learned:
        """Return a controller with the policy of a policy file or run directory."""
        network, fixed = load_policy(path)
        return cls(network, fixed=fixed, ranges=load_ranges(path))

    def bind(self, context: ObsContext, worlds: Sequence[int] | None = None) -> None:
        """Set the host's context and the worlds of its environments."""
        self.context = context
        self.worlds = worlds
        self.outside = {}

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8]. Raise ConfigError if `bind` has not been called."""
        if self.context is None:
            raise ConfigError("a trained policy observes its host: call controller.bind(context) before act()")
        obs = torch.from_numpy(batch_obs_to_features(table, self.context, legal=legal))
        masks = torch.from_numpy(compute_batch_masks(table, legal, fixed=self.fixed))
        layout = MaskLayout(slots=table.num_slots, blueprints=table.takes.shape[1])
        self._compare_with_training(obs, is_start=not table.step.any())
        draws = None
        if self.sample:
            keys = world_keys(range(table.num_envs) if self.worlds is None else self.worlds)
            draws = torch.from_numpy(uniform(random_bits(keys, f"played {self.rng_seed}", NUM_HEADS, table.step)))
        choice = self.network.act(obs, masks, layout, draws)
        if self.log is not None:
            self.log.add(obs, masks, choice.actions)
        return np.asarray(choice.actions.numpy())

    def _compare_with_training(self, obs: Tensor, *, is_start: bool) -> None:
        """Record what lies beyond the ranges of training. It has no effect on decisions.

        Warn once, at the start of an episode: what lies outside then is the model's size, its slots or the horizon.
        """
        if self.ranges is None:
            return
        slots = [f"slot {s}" for s in range((obs.shape[1] - BASE) // PER_SLOT)]
        for row in obs:
            self.outside |= {each.name: each for each in self.ranges.outside(row, slots)}
        if self.outside and is_start and not self._has_warned:
            self._has_warned = True
            warnings.warn(self.outside_text(), stacklevel=3)

    def outside_text(self) -> str:
        """Return what of the model lies outside what the policy was trained on; empty if nothing does."""
        if not self.outside:
            return ""
        shown = [str(each) for each in list(self.outside.values())[:SHOWN_OUTSIDE]]
        more = len(self.outside) - len(shown)
        return (
            "the model lies outside what the policy was trained on, so its decisions may be poor; the controller "
            f"'schedule' needs no training. Scaled features outside their ranges: {', '.join(shown)}"
            + (f", and {more} more" if more > 0 else "")
        )

    def why_waiting(self, _table: SlotTable) -> str:
        """Return why the policy plants nothing."""
        return "the trained policy chose another operation at every epoch; it has no threshold. Try 'schedule'"
