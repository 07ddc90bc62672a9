"""Controller that runs a trained policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.leyline.actions import NUM_HEADS, Head
from esper.leyline.errors import ConfigError
from esper.leyline.rng import random_bits, uniform, world_keys
from esper.leyline.slot_table import Bools, Ints, SlotTable
from esper.tamiyo.decision_record import DecisionLog
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy.action_masks import DEFAULT_FIXED, MaskLayout, compute_batch_masks
from esper.tamiyo.policy.features import ObsContext, batch_obs_to_features
from esper.tamiyo.policy_file import load_policy

SHIPPED = Path(__file__).parent.parent / "shipped" / "tamiyo.safetensors"
"""Path of the policy shipped with the package, trained on `rescue`."""


class Learned:
    """Runs a trained policy, with its recurrent state kept from the first step of each episode.

    Call `bind` first: sizes and prices of the host are part of the observation. Actions are sampled with random numbers
    that depend on world and step only; `sample=False` takes the likeliest ones.
    """

    def __init__(
        self, network: TamiyoNetwork, *, fixed: Mapping[Head, int] | None = None, sample: bool = True, seed: int = 0
    ) -> None:
        self.network = network.eval()
        self.fixed = dict(DEFAULT_FIXED if fixed is None else fixed)
        self.sample, self.seed = sample, seed
        self.context: ObsContext | None = None
        self._hidden = network.initial(0)
        self.log: DecisionLog | None = None
        """Collects every decision with its inputs; None collects nothing."""

    @classmethod
    def load(cls, path: Path, *, sample: bool = True) -> Learned:
        """Return a controller with the policy of a policy file or run directory."""
        network, fixed = load_policy(path)
        return cls(network, fixed=fixed, sample=sample)

    def bind(self, context: ObsContext, worlds: Sequence[int] | None = None) -> None:
        """Set the host's context and the worlds of its environments, and clear the recurrent state."""
        self.context, self.worlds = context, worlds
        self._hidden = self.network.initial(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the recurrent state. The policy is not included: it has its own file."""
        return {"hidden": self._hidden.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`. Raise ConfigError if it belongs to a policy of another size."""
        hidden, width = state.get("hidden"), self._hidden.shape[1:]
        if not isinstance(hidden, torch.Tensor) or hidden.shape[1:] != width or hidden.dtype != self._hidden.dtype:
            given = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else hidden
            raise ConfigError(
                f"the recurrent state is of another policy: expected shape (environments, {width[0]}), got {given}"
            )
        self._hidden = hidden.clone()

    def act(self, table: SlotTable, legal: Bools) -> Ints:
        """Return actions [E, 8]. Raise ConfigError if `bind` has not been called."""
        if self.context is None:
            raise ConfigError("a trained policy observes its host: call controller.bind(context) before act()")
        envs = table.num_envs
        if len(self._hidden) != envs:
            self._hidden = self.network.initial(envs)
        self._hidden[torch.from_numpy(table.step == 0)] = 0.0  # reset the state at the start of an episode
        obs = torch.from_numpy(batch_obs_to_features(table, self.context, legal=legal))
        masks = torch.from_numpy(compute_batch_masks(table, legal, fixed=self.fixed))
        layout = MaskLayout(slots=table.num_slots, blueprints=table.takes.shape[1])
        draws = None
        if self.sample:
            keys = world_keys(range(envs) if self.worlds is None else self.worlds)
            draws = torch.from_numpy(uniform(random_bits(keys, f"played {self.seed}", NUM_HEADS, table.step)))
        choice = self.network.act(obs, masks, self._hidden, layout, draws)
        if self.log is not None:
            self.log.add(obs, masks, choice.actions, self._hidden)
        self._hidden = choice.hidden
        return np.asarray(choice.actions.numpy())

    def why_waiting(self, _table: SlotTable) -> str:
        """Return why the policy plants nothing."""
        return "the trained policy chose another operation at every epoch; it has no threshold. Try 'schedule'"
