"""One growing host as a Gymnasium environment, for libraries that take single environments.

    env = GrowthEnv(backend, worlds=range(100))

`action_masks()` is as required by sb3-contrib's MaskablePPO. `env.py` describes episodes and seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from esper.leyline.actions import Head
from esper.leyline.slot_table import Bools, Ints
from esper.simic.env import Backend, GrowthVectorEnv
from esper.simic.rewards import RewardConfig
from esper.tamiyo.policy.action_masks import CANONICAL


class GrowthEnv(gym.Env[Any, Any]):
    """Gymnasium environment of one growing host. Episodes cycle through `worlds`.

    Args:
        backend: Real hosts (`HostBackend`) or simulated ones (`Simulator`), with one environment.
        worlds: Worlds of the episodes, in turn.
        reward: Settings of the reward; None is `RewardConfig()`.
        fixed: Heads fixed to one option; None fixes tempo, alpha speed and alpha curve.

    Raises:
        ConfigError: `worlds` is empty.

    Example:
        >>> env = esper.GrowthEnv(esper.Simulator(esper.SimConfig(), [0]), worlds=range(100))
        >>> observation, info = env.reset(seed=0)
        >>> observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (Gymnasium's own convention)

    def __init__(
        self,
        backend: Backend,
        worlds: Sequence[int] = (0,),
        *,
        reward: RewardConfig | None = None,
        fixed: Mapping[Head, int] | None = None,
    ) -> None:
        pool = list(worlds)
        self.env = GrowthVectorEnv(backend, lambda n: [pool[n % len(pool)]] if pool else [], reward=reward, fixed=fixed)
        self.observation_space = self.env.single_observation_space
        self.action_space = self.env.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: World of the episode; None takes the next one of `worlds`.
            options: `{"worlds": [n]}` takes world n.

        Returns:
            Observation and info.
        """
        super().reset(seed=seed)
        obs, info = self.env.reset(seed=seed, options=options)
        return obs[0], _only(info)

    def step(self, action: Ints) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply one action and train an epoch.

        Args:
            action: `[8]`, columns as in `esper.leyline.actions.Head`.

        Returns:
            Observation, reward, whether the episode has ended, False, and info.

        Raises:
            gymnasium.error.ResetNeeded: The episode is over.
        """
        if self.env.over:
            raise gym.error.ResetNeeded("the episode is over: call reset()")
        obs, rewards, ended, cut, info = self.env.step(np.asarray(action)[None])
        return obs[0], float(rewards[0]), bool(ended[0]), bool(cut[0]), _only(info)

    def action_masks(self) -> Bools:
        """Return the masks of all heads, as sb3-contrib's MaskablePPO needs them.

        An option is allowed if some legal action contains it. Heads chosen independently may still form an illegal
        action, which has the effect of WAIT.

        Returns:
            The masks of all heads, concatenated.
        """
        layout = self.env.layout
        mask = self.env.masks[0]
        by_op = mask[layout.slot_by_op].reshape(-1, layout.slots)
        takes = mask[layout.blueprint_by_slot].reshape(layout.slots, layout.blueprints)
        heads: list[Bools] = [by_op[mask[layout.op]].any(0), takes.any(0)]
        if not heads[Head.BLUEPRINT].any():  # nothing can be planted, but a head needs an allowed option
            heads[Head.BLUEPRINT][CANONICAL[Head.BLUEPRINT]] = True
        heads += [mask[where] for where in layout.tail.values()]
        return np.concatenate([*heads, mask[layout.op]])


def _only(info: dict[str, Any]) -> dict[str, Any]:
    """Return the info of the only environment, without the `_key` entries."""
    return {name: value[0] for name, value in info.items() if not name.startswith("_")}
