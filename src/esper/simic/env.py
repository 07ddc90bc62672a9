"""Gymnasium environments of growing hosts, and the backend of real hosts (`simulator.py` has a simulated one).

    backend = HostBackend(task)
    env = GrowthVectorEnv(backend, worlds=[0, 1, 2, 3])
    obs, info = env.reset()                               # [E, F]; info["masks"] [E, M] packed
    obs, reward, terminated, truncated, info = env.step(actions)      # actions [E, 8]

A backend owns the table, the prices and the no-growth baselines; the environment computes observations and rewards.
`step` applies the actions, trains an epoch and validates before it computes the reward, so an action is rewarded for
its own consequences. `GrowthVectorEnv` implements Gymnasium's vector interface; our training loop uses it too.
`GrowthEnv` in `single_env.py` is a single environment. A backend serves one environment object at a time.

Every episode ends at its horizon, which is a true end: `terminated` is set, never `truncated`. In a task family the
episodes of different worlds may have different lengths: an environment that has ended keeps its last observation, with
`terminated` set and reward 0, until all have ended. The step after that resets all environments and ignores its
actions.

A seed selects worlds: environment e of `reset(seed=s)` uses world s + e, as `GrowthEnv.reset(seed=s + e)` does, and
the round counter restarts at 0. Without a seed, each round uses the worlds given to the constructor.

Legend: E environments, S slots, B blueprints, F features, M mask columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from esper.kasmina.body import Body
from esper.leyline.actions import NUM_HEADS, Head
from esper.leyline.errors import ConfigError, unknown_name
from esper.leyline.lifecycle import Outcome, Rules, legal
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.leyline.stages import Thresholds
from esper.simic.attribution import CounterfactualHelper, Worth
from esper.simic.evaluation.no_growth_baseline import NoGrowthBaselines
from esper.simic.rewards import Frame, RewardConfig, reward, utility
from esper.tamiyo.policy.action_masks import (
    DEFAULT_FIXED,
    MaskLayout,
    compute_batch_masks,
    padded_legal,
    padded_masks,
)
from esper.tamiyo.policy.features import ObsContext, batch_obs_to_features, num_features, padded_features
from esper.tolaria.data import Dataset
from esper.tolaria.engine import Engine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.governor import Alarm
from esper.tolaria.host_costs import blueprint_costs, host_macs_and_order
from esper.tolaria.rollout import PhaseTimers
from esper.tolaria.tasks import Task


@dataclass(frozen=True, slots=True)
class Part:
    """Environments of a backend that share one host structure: what observations and rewards are computed from."""

    table: SlotTable
    context: ObsContext
    baseline_quality: Floats  # [E] of each world's no-growth baseline


class Backend(Protocol):
    """Interface of a backend: E environments that are stepped together."""

    table: SlotTable
    rules: Rules
    slots: tuple[str, ...]
    worlds: list[int]
    data_hash: str
    """Hash of the data that the hosts are trained on."""
    worth: list[Worth]
    """Worth measured in the last step, one per environment; empty if nothing was measured."""
    on_pause: Callable[[], None]
    """Called at points where long computations can be interrupted. It may raise."""

    @property
    def horizon(self) -> int:
        """Steps of the longest episode."""
        ...

    @property
    def parts(self) -> list[Part]:
        """The environments in order, grouped by host structure."""
        ...

    @property
    def host_params(self) -> Ints:
        """[E] parameters of each host without seeds."""
        ...

    @property
    def alarms(self) -> list[Alarm]:
        """Alarms of the governor in the last step."""
        ...

    @property
    def legal(self) -> Bools:
        """[E, O, S] operations that are legal now."""
        ...

    @property
    def baseline_quality(self) -> Floats:
        """[E] quality of each world's no-growth baseline at the current step of its environment."""
        ...

    def baseline_curves(self) -> dict[int, list[float]]:
        """Return the no-growth baselines computed so far, by world."""
        ...

    def add_baselines(self, curves: Mapping[int, list[float]]) -> None:
        """Add no-growth baselines computed earlier, by world."""
        ...

    def reset(self, worlds: Sequence[int]) -> None:
        """Start new episodes, one per world."""
        ...

    def step(self, actions: Ints) -> Outcome:
        """Apply actions [E, 8], tick, train an epoch, validate and record."""
        ...


class HostBackend:
    """Backend of real hosts of one task.

    No-growth baselines are trained once per world and cached in the directories `baselines`. Before the first `reset`
    there is one environment, of `world`.
    """

    def __init__(
        self,
        task: Task,
        *,
        rules: Rules | None = None,
        config: EngineConfig | None = None,
        data: Dataset | None = None,
        baselines: Sequence[Path] = (),
        phases: PhaseTimers | None = None,
        world: int = 0,
    ) -> None:
        self.task = task
        self.rules = rules or Rules()
        self.config = config or EngineConfig()
        self.data = data or task.load_data()
        self.phases = phases or PhaseTimers()
        self.baselines = NoGrowthBaselines(task, self.data, self.config, baselines)
        self.on_pause: Callable[[], None] = lambda: None
        self.baselines.on_progress = lambda *_: self.on_pause()
        self.slots = task.slots
        self.data_hash = self.data.sha256
        self._helper = CounterfactualHelper()
        self.reset([world])
        self.context = context_of(self.engine.networks[0].body, task.epochs, self.rules.thresholds, self.data.classes)

    def reset(self, worlds: Sequence[int]) -> None:
        """Build new hosts, one per world."""
        self.worlds = list(worlds)
        self.worth: list[Worth] = []
        self._curves: Floats | None = None  # [E, T] no-growth baselines of these worlds, computed on first use
        self.engine = Engine(
            self.task, self.worlds, rules=self.rules, config=self.config, data=self.data, phases=self.phases
        )
        self.table = self.engine.table

    def step(self, actions: Ints) -> Outcome:
        """Apply actions [E, 8], train an epoch, validate and compute the worth of the seeds."""
        outcome = self.engine.step(actions)
        with self.phases("worth"):
            self.worth = self._helper.process_batch(self.engine)
        return outcome

    @property
    def horizon(self) -> int:
        """Steps of an episode."""
        return self.context.horizon

    @property
    def parts(self) -> list[Part]:
        """All environments: they share one host structure."""
        return [Part(self.table, self.context, self.baseline_quality)]

    @property
    def host_params(self) -> Ints:
        """[E] parameters of each host without seeds."""
        return np.full(len(self.worlds), self.context.host_params)

    @property
    def alarms(self) -> list[Alarm]:
        """Alarms of the governor in the last step."""
        return self.engine.alarms

    @property
    def legal(self) -> Bools:
        """[E, O, S] operations that are legal now."""
        return self.engine.legal

    @property
    def baseline_quality(self) -> Floats:
        """[E] quality of each world's no-growth baseline at the current step; NaN before the first step."""
        step = self.table.step
        if not step.any():  # no environment has been validated yet
            return np.full(len(step), np.nan)
        if self._curves is None:
            with self.phases("baselines"):
                self._curves = self.baselines.curves(self.worlds)
        now = self._curves[np.arange(len(step)), np.clip(step, 1, self._curves.shape[1]) - 1]
        return np.where(step > 0, now, np.nan)

    def store_baselines_in(self, directory: Path) -> None:
        """Cache no-growth baselines in this directory, too."""
        self.baselines.store_in(directory)

    def baseline_curves(self) -> dict[int, list[float]]:
        """Return the no-growth baselines computed so far, by world."""
        return dict(self.baselines.cached)

    def add_baselines(self, curves: Mapping[int, list[float]]) -> None:
        """Add no-growth baselines computed earlier, by world."""
        self.baselines.cached.update(curves)


def context_of(body: Body, horizon: int, thresholds: Thresholds, classes: int | None = None) -> ObsContext:
    """Return the host's sizes and the cost of every blueprint, which a policy observes besides the table.

    Host sizes exclude seeds. `classes` is None if the loss has no chance level.
    """
    slots = list(body.slots.values())
    params, macs = blueprint_costs(body)
    host_macs, reached = host_macs_and_order(body)
    depth = [reached.index(slot.name) for slot in slots]
    return ObsContext(
        horizon=horizon,
        host_params=sum(p.numel() for p in body.model.parameters()),
        host_macs=max(1, host_macs),
        slot_width=np.array([slot.spec.dim for slot in slots]),
        slot_params=params,
        slot_macs=macs,
        slot_depth=np.array(depth) / max(1, len(slots) - 1),
        chance_loss=log(classes) if classes and classes > 1 else None,
        thresholds=thresholds,
    )


Worlds = Callable[[int], Sequence[int]]
"""Function from a round's number to the worlds of its environments."""


class GrowthVectorEnv(VectorEnv[Any, Any, Any]):
    """Gymnasium vector environment of E growing hosts on one backend.

    Args:
        backend: Real hosts (`HostBackend`) or simulated ones (`Simulator`).
        worlds: The world of each environment, or a function from the round's number to these worlds.
        reward: Settings of the reward; None is `RewardConfig()`.
        fixed: Heads fixed to one option; None fixes tempo, alpha speed and alpha curve.
        phases: Timers of the surrounding loop.

    Raises:
        ConfigError: `worlds` is empty.

    Example:
        >>> env = esper.GrowthVectorEnv(esper.Simulator(esper.SimConfig(), range(4)), range(4))
        >>> observations, info = env.reset()
        >>> observations.shape[0], env.horizon
        (4, 40)
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
        self.backend = backend
        self.config = reward or RewardConfig()
        self.phases = phases or PhaseTimers()
        self.fixed = dict(DEFAULT_FIXED if fixed is None else fixed)
        self._worlds: Worlds = worlds if callable(worlds) else lambda _: worlds
        self.num_envs = len(self._worlds(0))
        if not self.num_envs:
            raise ConfigError("a growth environment needs at least one world, got none. Give worlds, such as range(4)")
        slots = backend.table.num_slots
        blueprints = backend.table.takes.shape[1]
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

        Args:
            seed: The worlds seed, seed + 1, …, or one world per environment; None takes those of `worlds`.
            options: `{"worlds": […]}` lists the worlds.

        Returns:
            Observations and info.
        """
        seed = int(seed) if isinstance(seed, np.integer) else seed
        super().reset(seed=seed if isinstance(seed, int) else None)
        self.round = self.round + 1 if seed is None else 0
        self.backend.reset(self._worlds_of(seed, dict(options or {})))
        self.outcome = Outcome(np.ones(self.num_envs, dtype=bool), [])
        self.over = False
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
        """Apply one action per environment and train an epoch. After the end of the episodes, reset instead.

        Args:
            actions: `[E, 8]`, columns as in `esper.leyline.actions.Head`.

        Returns:
            Observations, rewards, which episodes have ended, False for each, and info.

        Raises:
            ConfigError: The actions are not integers of this shape.
            gymnasium.error.ResetNeeded: `reset` was not called.
        """
        never = np.zeros(self.num_envs, dtype=bool)
        if self.round < 0:
            raise gym.error.ResetNeeded("call reset() before the first step()")
        if self.over:
            obs, info = self.reset()
            return obs, np.zeros(self.num_envs, dtype=np.float32), never, never.copy(), info
        requested = np.asarray(actions)
        with np.errstate(invalid="ignore"):
            rows = requested.astype(np.int64)
        if rows.shape != (self.num_envs, NUM_HEADS):
            raise ConfigError(f"actions must have shape {(self.num_envs, NUM_HEADS)}, got {rows.shape}")
        if (rows != requested).any():
            raise ConfigError(f"actions must be finite integers, got {requested[rows != requested][0]}")
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
        table = part.table
        slots = self.layout.slots
        allowed = legal(table, self.backend.rules)
        masks = compute_batch_masks(table, allowed, fixed=self.fixed)
        own = MaskLayout(slots=table.num_slots, blueprints=table.takes.shape[1])
        obs = batch_obs_to_features(table, part.context, legal=allowed)
        return padded_legal(allowed, slots), padded_masks(masks, own, slots), padded_features(obs, slots)

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
