"""Growth as an environment: decide, let an epoch pass, and only then be paid: an act is paid for what it led to.

    env = GrowthVectorEnv(ground, worlds=[0, 1, 2, 3])
    obs, info = env.reset()                               # [E, F]; info["masks"] [E, M] packed
    obs, reward, terminated, truncated, info = env.step(actions)      # actions [E, 8]

`GrowthVectorEnv` is Gymnasium's vector interface, and what our own loop runs on. `GrowthEnv` is the same for one
environment, with `action_masks()` as sb3-contrib's MaskablePPO asks for it. A ground serves one environment at a time.

Every episode ends at the horizon, for all environments at once. The horizon is a true end: what comes after it does
not exist, so `terminated` is said, never `truncated`. The step after it begins the next round and ignores its actions.

A seed is a world: environment e of `reset(seed=s)` lives in world s + e, as `GrowthEnv.reset(seed=s + e)` does, and
rounds are counted anew. Without seeds, rounds go through the worlds the environment was made with.

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
from esper.leyline.phases import Phases
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.simic.ground import Ground
from esper.simic.rewards import Frame, RewardConfig, reward, utility
from esper.tamiyo.policy.action_masks import CANONICAL, DEFAULT_FIXED, MaskLayout, compute_batch_masks
from esper.tamiyo.policy.features import batch_obs_to_features, num_features

Worlds = Callable[[int], Sequence[int]]
"""From the number of a round to the worlds that its environments live in."""


class GrowthVectorEnv(VectorEnv[Any, Any, Any]):
    """E hosts that grow side by side on one ground.

    worlds   the world of each environment; or, for a new one each round, a function of the round's number
    reward   how steps are paid
    fixed    heads narrowed to one option (by default tempo, alpha speed and alpha curve)
    phases   the clocks of the loop that this environment is part of
    """

    def __init__(
        self,
        ground: Ground,
        worlds: Sequence[int] | Worlds,
        *,
        reward: RewardConfig | None = None,
        fixed: Mapping[Head, int] | None = None,
        phases: Phases | None = None,
    ) -> None:
        self.ground, self.config, self.phases = ground, reward or RewardConfig(), phases or Phases()
        self.fixed = dict(DEFAULT_FIXED if fixed is None else fixed)
        self._worlds: Worlds = worlds if callable(worlds) else lambda _: worlds
        self.num_envs = len(self._worlds(0))
        if not self.num_envs:
            raise ConfigError("a growth environment needs at least one world")
        slots, blueprints = ground.table.num_slots, ground.table.takes.shape[1]
        self.layout = MaskLayout(slots=slots, blueprints=blueprints)
        self.single_observation_space = gym.spaces.Box(-1.0, 1.0, (num_features(slots),), np.float32)
        self.single_action_space = gym.spaces.MultiDiscrete(list(self.layout.head_sizes))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}
        self.round = -1
        self.over = False
        """The episodes have ended: the next step begins others."""

    @property
    def table(self) -> SlotTable:
        return self.ground.table

    @property
    def horizon(self) -> int:
        return self.ground.context.horizon

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes. A seed stands for the worlds seed, seed + 1, …; `options["worlds"]` names them."""
        seed = int(seed) if isinstance(seed, np.integer) else seed
        super().reset(seed=seed if isinstance(seed, int) else None)
        self.round = self.round + 1 if seed is None else 0
        self.ground.reset(self._worlds_of(seed, dict(options or {})))
        self.outcome, self.over = Outcome(np.ones(self.num_envs, dtype=bool), []), False
        self._frame = self._framed()
        return self._seen(), self._info()

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
        """One decision per environment and the epoch that follows; after an end, a reset instead."""
        never = np.zeros(self.num_envs, dtype=bool)
        if self.round < 0:
            raise gym.error.ResetNeeded("call reset() before the first step()")
        if self.over:
            obs, info = self.reset()
            return obs, np.zeros(self.num_envs, dtype=np.float32), never, never.copy(), info
        asked = np.asarray(actions)
        with np.errstate(invalid="ignore"):
            rows = asked.astype(np.int64)
        if rows.shape != (self.num_envs, NUM_HEADS):
            raise ConfigError(f"actions must have shape {(self.num_envs, NUM_HEADS)}, got {rows.shape}")
        if (rows != asked).any():
            raise ConfigError(f"actions are numbers of options, whole and finite, got {asked[rows != asked][0]}")
        self.outcome = self.ground.step(rows)
        before, self._frame = self._frame, self._framed()
        paid = reward(before, self._frame, self.config)
        ended = self._frame.ended
        self.over = bool(ended.all())
        return self._seen(), paid.astype(np.float32), ended, never, self._info()

    @property
    def frame(self) -> Frame:
        """How every environment stands, as the reward sees it."""
        return self._frame

    @property
    def utility(self) -> Floats:
        return utility(self._frame, self.config)

    @property
    def masks(self) -> Bools:
        """[E, M] packed: what may be chosen now."""
        return self._masks

    def _framed(self) -> Frame:
        return Frame.of(self.ground.table, self.ground.context, self.ground.twin_quality)

    def _seen(self) -> Floats:
        """The observation; with it, what is legal and so what may be chosen."""
        table = self.ground.table
        with self.phases("features"):
            self.legal = legal(table, self.ground.rules)
            self._masks = compute_batch_masks(table, self.legal, fixed=self.fixed)
            return batch_obs_to_features(table, self.ground.context, legal=self.legal)

    def _info(self) -> dict[str, Any]:
        """One row per environment and, as Gymnasium has it, beside each `key` a `_key`: who has such a row (all)."""
        rows = {
            "masks": self._masks,
            "utility": self.utility,
            "quality": self.ground.table.quality.copy(),
            "happened": self.outcome.happened,
        }
        everyone = np.ones(self.num_envs, dtype=bool)
        return rows | {f"_{name}": everyone for name in rows}


class GrowthEnv(gym.Env[Any, Any]):
    """One host that grows: Gymnasium's interface for one environment. Episodes go through `worlds` in turn."""

    metadata = {"render_modes": []}  # noqa: RUF012  (Gymnasium's own convention)

    def __init__(
        self,
        ground: Ground,
        worlds: Sequence[int] = (0,),
        *,
        reward: RewardConfig | None = None,
        fixed: Mapping[Head, int] | None = None,
    ) -> None:
        pool = list(worlds)
        self.env = GrowthVectorEnv(ground, lambda n: [pool[n % len(pool)]] if pool else [], reward=reward, fixed=fixed)
        self.observation_space, self.action_space = self.env.single_observation_space, self.env.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: in the next world, in world `seed`, or in that of `options["worlds"]`, a list of one."""
        super().reset(seed=seed)
        obs, info = self.env.reset(seed=seed, options=options)
        return obs[0], _only(info)

    def step(self, action: Ints) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.env.over:
            raise gym.error.ResetNeeded("the episode is over: call reset()")
        obs, paid, ended, cut, info = self.env.step(np.asarray(action)[None])
        return obs[0], float(paid[0]), bool(ended[0]), bool(cut[0]), _only(info)

    def action_masks(self) -> Bools:
        """Every head's mask by itself, one after another: an option is on if some legal action has it.

        Heads chosen apart may still not fit together; such an action does nothing, as WAIT does.
        """
        layout, mask = self.env.layout, self.env.masks[0]
        by_op = mask[layout.slot_by_op].reshape(-1, layout.slots)
        takes = mask[layout.blueprint_by_slot].reshape(layout.slots, layout.blueprints)
        heads: list[Bools] = [by_op[mask[layout.op]].any(0), takes.any(0)]
        if not heads[Head.BLUEPRINT].any():  # nothing can be planted, but a head must say something
            heads[Head.BLUEPRINT][CANONICAL[Head.BLUEPRINT]] = True
        heads += [mask[where] for where in layout.tail.values()]
        return np.concatenate([*heads, mask[layout.op]])


def _only(info: dict[str, Any]) -> dict[str, Any]:
    """What is told of one environment among one."""
    return {name: value[0] for name, value in info.items() if not name.startswith("_")}
