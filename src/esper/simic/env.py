"""Gymnasium environments of growing hosts.

    env = GrowthVectorEnv(backend, worlds=[0, 1, 2, 3])
    obs, info = env.reset()                               # [E, F]; info["masks"] [E, M] packed
    obs, reward, terminated, truncated, info = env.step(actions)      # actions [E, 8]

`step` applies the actions, trains an epoch and validates before it computes the reward, so an action is rewarded for
its own consequences. `GrowthVectorEnv` implements Gymnasium's vector interface; our training loop uses it too.
`GrowthEnv` is a single environment with `action_masks()` as required by sb3-contrib's MaskablePPO. A backend serves
one environment object at a time.

Every episode ends at its horizon, which is a true end: `terminated` is set, never `truncated`. In a task family the
episodes of different worlds may have different lengths: an environment that has ended keeps its last observation, with
`terminated` set and reward 0, until all have ended. The step after that resets all environments and ignores its
actions.

A seed selects worlds: environment e of `reset(seed=s)` uses world s + e, as `GrowthEnv.reset(seed=s + e)` does, and
the round counter restarts at 0. Without a seed, each round uses the worlds given to the constructor.

Legend: E environments, S slots, F features, M mask columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from esper.kasmina.lifecycle import Outcome, legal
from esper.leyline.actions import NUM_HEADS, Head
from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.profiler import PhaseTimers
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.simic.backend import Backend, Part
from esper.simic.rewards import Frame, RewardConfig, reward, utility
from esper.tamiyo.policy.action_masks import (
    CANONICAL,
    DEFAULT_FIXED,
    MaskLayout,
    compute_batch_masks,
    padded_legal,
    padded_masks,
)
from esper.tamiyo.policy.feature_table import num_features
from esper.tamiyo.policy.features import batch_obs_to_features, padded_features

Worlds = Callable[[int], Sequence[int]]
"""Function from a round's number to the worlds of its environments."""


class GrowthVectorEnv(VectorEnv[Any, Any, Any]):
    """Vector environment of E growing hosts on one backend.

    backend   the backend: real or simulated hosts
    worlds   the world of each environment, or a function from the round's number to these worlds
    reward   settings of the reward
    fixed    heads fixed to one option; default: tempo, alpha speed and alpha curve
    phases   timers of the surrounding loop
    """

    def __init__(
        self,
        backend: Backend,
        worlds: Sequence[int] | Worlds,
        *,
        reward: RewardConfig | None = None,
        fixed: Mapping[Head, int] | None = None,
        phases: PhaseTimers | None = None,
    ) -> None:
        self.backend, self.config, self.phases = backend, reward or RewardConfig(), phases or PhaseTimers()
        self.fixed = dict(DEFAULT_FIXED if fixed is None else fixed)
        self._worlds: Worlds = worlds if callable(worlds) else lambda _: worlds
        self.num_envs = len(self._worlds(0))
        if not self.num_envs:
            raise ConfigError("a growth environment needs at least one world")
        slots, blueprints = backend.table.num_slots, backend.table.takes.shape[1]
        self.layout = MaskLayout(slots=slots, blueprints=blueprints)
        self.single_observation_space = gym.spaces.Box(-1.0, 1.0, (num_features(slots),), np.float32)
        self.single_action_space = gym.spaces.MultiDiscrete(list(self.layout.head_sizes))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}
        self.round = -1
        self.over = False
        """Whether the episodes have ended: the next step starts new ones."""

    @property
    def table(self) -> SlotTable:
        """The backend's slot table."""
        return self.backend.table

    @property
    def horizon(self) -> int:
        """Steps of the longest episode."""
        return self.backend.horizon

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes.

        `seed` selects the worlds seed, seed + 1, …; `options["worlds"]` lists them explicitly.
        """
        seed = int(seed) if isinstance(seed, np.integer) else seed
        super().reset(seed=seed if isinstance(seed, int) else None)
        self.round = self.round + 1 if seed is None else 0
        self.backend.reset(self._worlds_of(seed, dict(options or {})))
        self.outcome, self.over = Outcome(np.ones(self.num_envs, dtype=bool), []), False
        self._frames = self._framed()
        return self._observe(), self._info()

    def _worlds_of(self, seed: int | Sequence[int | None] | None, options: dict[str, Any]) -> list[int]:
        named = options.pop("worlds", None)
        if options:
            raise unknown_name("option of reset", next(iter(options)), ["worlds"])
        worlds: Sequence[int] = self._worlds(self.round) if named is None else named
        if len(worlds) != self.num_envs:
            raise ConfigError(f"there are {self.num_envs} environments and {len(worlds)} worlds: {list(worlds)}")
        if named is None and seed is not None:
            seeds = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed
            worlds = [w if s is None else s for s, w in zip(seeds, worlds, strict=True)]
        return [int(w) for w in worlds]

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Apply one action per environment and train an epoch. After the end of the episodes, reset instead."""
        never = np.zeros(self.num_envs, dtype=bool)
        if self.round < 0:
            raise gym.error.ResetNeeded("call reset() before the first step()")
        if self.over:
            obs, info = self.reset()
            return obs, np.zeros(self.num_envs, dtype=np.float32), never, never.copy(), info
        given = np.asarray(actions)
        with np.errstate(invalid="ignore"):
            rows = given.astype(np.int64)
        if rows.shape != (self.num_envs, NUM_HEADS):
            raise ConfigError(f"actions must have shape {(self.num_envs, NUM_HEADS)}, got {rows.shape}")
        if (rows != given).any():
            raise ConfigError(f"actions must be finite integers, got {given[rows != given][0]}")
        self.outcome = self.backend.step(rows)
        before, self._frames = self._frames, self._framed()
        was_over = np.concatenate([frame.ended for frame in before])
        paid = [reward(*pair, self.config) for pair in zip(before, self._frames, strict=True)]
        rewards = np.where(was_over, 0.0, np.concatenate(paid))
        ended = np.concatenate([frame.ended for frame in self._frames])
        self.over = bool(ended.all())
        return self._observe(), rewards.astype(np.float32), ended, never, self._info()

    @property
    def frames(self) -> list[Frame]:
        """Current state of every environment, as the reward reads it, one frame per part of the backend."""
        return self._frames

    @property
    def ended(self) -> Bools:
        """[E] whether the episode of each environment has ended."""
        return np.concatenate([frame.ended for frame in self._frames])

    @property
    def utility(self) -> Floats:
        """[E] current utility of every environment."""
        return np.concatenate([utility(frame, self.config) for frame in self._frames])

    @property
    def masks(self) -> Bools:
        """[E, M] packed masks of the actions that are allowed now."""
        return self._masks

    def _framed(self) -> list[Frame]:
        return [Frame.of(part.table, part.context, part.baseline_quality) for part in self.backend.parts]

    def _observe(self) -> Floats:
        """Return the observations, and update `legal` and `masks`."""
        with self.phases("features"):
            rows = [self._observe_part(part) for part in self.backend.parts]
            self.legal, self._masks, obs = (np.concatenate(columns) for columns in zip(*rows, strict=True))
            return obs

    def _observe_part(self, part: Part) -> tuple[Bools, Bools, Floats]:
        """Return legal operations, masks and observations of a part, padded to the largest number of slots."""
        table, slots = part.table, self.layout.slots
        may = legal(table, self.backend.rules)
        masks = compute_batch_masks(table, may, fixed=self.fixed)
        own = MaskLayout(slots=table.num_slots, blueprints=table.takes.shape[1])
        obs = batch_obs_to_features(table, part.context, legal=may)
        return padded_legal(may, slots), padded_masks(masks, own, slots), padded_features(obs, slots)

    def _info(self) -> dict[str, Any]:
        """Return one row per environment and key.

        As in Gymnasium, `_key` marks the environments that have one (all).
        """
        rows = {
            "masks": self._masks,
            "utility": self.utility,
            "quality": self.backend.table.quality.copy(),
            "happened": self.outcome.happened,
        }
        everyone = np.ones(self.num_envs, dtype=bool)
        return rows | {f"_{name}": everyone for name in rows}


class GrowthEnv(gym.Env[Any, Any]):
    """Single environment of one growing host. Episodes cycle through `worlds`."""

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
        self.observation_space, self.action_space = self.env.single_observation_space, self.env.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode in the next world, in world `seed`, or in that of `options["worlds"]`, a list of one."""
        super().reset(seed=seed)
        obs, info = self.env.reset(seed=seed, options=options)
        return obs[0], _only(info)

    def step(self, action: Ints) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply one action [8] and train an epoch."""
        if self.env.over:
            raise gym.error.ResetNeeded("the episode is over: call reset()")
        obs, rewards, ended, cut, info = self.env.step(np.asarray(action)[None])
        return obs[0], float(rewards[0]), bool(ended[0]), bool(cut[0]), _only(info)

    def action_masks(self) -> Bools:
        """Return the masks of all heads, concatenated. An option is allowed if some legal action contains it.

        Heads chosen independently may still form an illegal action, which has the effect of WAIT.
        """
        layout, mask = self.env.layout, self.env.masks[0]
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
