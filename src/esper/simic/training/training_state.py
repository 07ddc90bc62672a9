"""State of a training run between two rounds: policy, optimiser and results.

    training = TrainingState.new(config, layout)
    training.load_state_dict(state)              # state of an earlier process

No host exists between rounds, so the state is small. The hosts of a round are a function of the round's number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from esper.leyline.errors import ConfigError
from esper.leyline.events import Update
from esper.leyline.rng import derive_seed
from esper.leyline.slot_table import Floats
from esper.simic.agent.ppo import PPO
from esper.simic.training.config import TrainConfig
from esper.tamiyo.controllers.learned import SHIPPED
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.action_masks import MaskLayout
from esper.tamiyo.policy.feature_ranges import FeatureRanges
from esper.tamiyo.policy_file import load_policy, load_ranges

_ROUND_COLUMNS = ("returns", "utility", "quality")


@dataclass(slots=True)
class Round:
    """Results of one round."""

    number: int
    """Counted from 0. Output and events count from 1."""
    returns: Floats  # [E] undiscounted sum of each episode's rewards
    utility: Floats  # [E] at the end
    quality: Floats  # [E] at the end
    update: Update


@dataclass(slots=True)
class TrainingResult:
    """A trained policy and the results of its rounds."""

    network: TamiyoNetwork
    rounds: list[Round]
    env_steps: int


@dataclass(slots=True)
class TrainingState:
    """A policy in training, between two rounds."""

    ppo: PPO
    shuffle: torch.Generator
    """Generator that assigns environments to minibatches: the only random stream that continues from round to round.
    All other random numbers are keyed by world, round or step."""
    result: TrainingResult
    ranges: FeatureRanges
    """Ranges of all observations that the policy was trained with."""

    @classmethod
    def new(cls, config: TrainConfig, layout: MaskLayout, *, resumed: bool = False) -> TrainingState:
        """Return the initial state of a run."""
        network = new_network(config, resumed=resumed)
        shuffle = torch.Generator().manual_seed(derive_seed(config.seed, "minibatches"))
        ppo = PPO(network, layout, config.ppo, rounds=config.rounds)
        start = None if config.start_from is None or resumed else load_ranges(policy_path(config.start_from))
        return cls(ppo, shuffle, TrainingResult(network, [], 0), start or FeatureRanges())

    @property
    def network(self) -> TamiyoNetwork:
        """The policy."""
        return self.result.network

    @property
    def done(self) -> int:
        """Number of completed rounds."""
        return len(self.result.rounds)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as nested dicts of tensors and plain data."""
        rounds, ppo = self.result.rounds, self.ppo
        columns = {name: [getattr(r, name) for r in rounds] for name in _ROUND_COLUMNS}
        return {
            "network": self.network.state_dict(),
            "optimizer": ppo.optimizer.state_dict(),
            "return_scale": ppo.scale.state(),
            "updates": ppo.round,
            "bad_in_a_row": ppo.bad_in_a_row,
            "shuffle": self.shuffle.get_state(),
            "rounds": {name: torch.from_numpy(np.array(column)) for name, column in columns.items()},
            "update_events": [msgspec.to_builtins(r.update) for r in rounds],
            "env_steps": self.result.env_steps,
            "feature_ranges": self.ranges.bounds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        self.network.load_state_dict(state["network"])
        self.ppo.optimizer.load_state_dict(state["optimizer"])
        self.ppo.scale.load(state["return_scale"])
        self.ppo.round, self.ppo.bad_in_a_row = state["updates"], state["bad_in_a_row"]
        self.shuffle.set_state(state["shuffle"])
        columns = {name: state["rounds"][name].numpy() for name in _ROUND_COLUMNS}
        self.result.rounds[:] = [
            Round(number=n, update=msgspec.convert(update, Update), **{name: c[n] for name, c in columns.items()})
            for n, update in enumerate(state["update_events"])
        ]
        self.result.env_steps = state["env_steps"]
        self.ranges = FeatureRanges(state["feature_ranges"].clone())

    def digest(self) -> bytes:
        """Return a hash of every tensor that the next round depends on."""
        digest = hashlib.sha256()
        for leaf in tree_leaves(self.state_dict()):
            if isinstance(leaf, Tensor):
                digest.update(leaf.cpu().contiguous().numpy().tobytes())
        return digest.digest()


def new_network(config: TrainConfig, *, resumed: bool = False) -> TamiyoNetwork:
    """Return the initial policy: a new one, or that of `start_from`.

    If a checkpoint follows, only its shape matters.
    """
    if config.start_from is not None and not resumed:
        return load_policy(policy_path(config.start_from))[0]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(config.seed, "policy"))
        return TamiyoNetwork(config.network)


def policy_path(name: str) -> Path:
    """Return the path of a run or policy file. "tamiyo" is the policy shipped with the package."""
    return SHIPPED if name == "tamiyo" else Path(name)


def with_policy_network(config: TrainConfig) -> TrainConfig:
    """Return the config with the network settings of `start_from`.

    Raise ConfigError if `network.*` differs from them.
    """
    if config.start_from is None:
        return config
    network = load_policy(policy_path(config.start_from))[0].config
    if config.network not in (NetworkConfig(), network):
        raise ConfigError(
            f"start_from={config.start_from} has the network settings {msgspec.to_builtins(network)}, which network.* "
            "contradicts. Leave network.* unset, or train a new policy"
        )
    return msgspec.structs.replace(config, network=network)
