"""PPO training over vectorised growth environments.

    result = train_ppo_vectorized(load_config(preset="sim"))

Telemetry goes through the emitter; `PhaseTimers` (`tolaria/rollout.py`) records how long each phase of the loop takes.

Legend: E environments, R of them on this rank, T steps, F features, M mask columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from esper.leyline.actions import NUM_HEADS
from esper.leyline.events import EventReceiver, NullReceiver, Update, level
from esper.leyline.rng import derive_seed, random_bits, uniform, world_keys
from esper.leyline.slot_table import Bools, Floats, Ints, SlotTable
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.env import Backend, GrowthVectorEnv, HostBackend
from esper.simic.evaluation.no_growth_baseline import BASELINES
from esper.simic.family_backend import FamilyBackend, FamilyTasks
from esper.simic.simulator import Simulator
from esper.simic.telemetry.emitters import StepStats, TelemetryEmitter
from esper.simic.training.checkpointer import Checkpointer, Round, TrainingResult, TrainingState
from esper.simic.training.config import TrainConfig
from esper.simic.training.distributed import ProcessGroup
from esper.simic.training.imitation import ImitationController, check_plans
from esper.tamiyo.decision_record import DecisionRecord
from esper.tamiyo.network import Choice, TamiyoNetwork
from esper.tamiyo.policy.action_masks import MaskLayout, forced
from esper.tamiyo.policy.features import num_features
from esper.tolaria.checkpoint import Saved
from esper.tolaria.rollout import PhaseTimers, rollout
from esper.tolaria.tasks import get_task


def train_ppo_vectorized(
    config: TrainConfig,
    hub: EventReceiver | None = None,
    *,
    env: GrowthVectorEnv | None = None,
    directory: Path | None = None,
    baselines: Path | None = None,
    data_root: Path | None = None,
    resume: Saved | None = None,
    group: ProcessGroup | None = None,
    poll: Callable[[], None] = lambda: None,
    on_round: Callable[[Round], None] = lambda _: None,
) -> TrainingResult:
    """Train a policy and return it with the results of every round.

    env        environments of this rank, from `make_env` with the same config and group; None builds them
    directory  run directory for the policy, the no-growth baselines and the checkpoints; None writes nothing
    baselines  directory of no-growth baselines that runs share; None shares none
    resume     checkpoint to resume from; the result is bit-identical to an uninterrupted run
    group      process group that shares the environments; results do not depend on its size
    poll       called between steps; it may raise, and the run can be resumed from its last completed round
    on_round   called with the result of each round
    """
    torch.set_num_threads(config.threads)  # results depend on the number of threads
    hub = NullReceiver() if hub is None else hub
    group = group or ProcessGroup()
    E = config.envs
    mine = group.share(config.envs)
    env = make_env(config, data_root, group) if env is None else env
    check_plans(env, config)
    phases = env.phases
    if isinstance(env.backend, (HostBackend, FamilyBackend)):
        for place in (None if directory is None else directory / BASELINES, baselines):
            if place is not None:
                env.backend.store_baselines_in(place)
    training = TrainingState.new(config, env.layout, resumed=resume is not None)
    network = training.network
    result = training.result
    checkpointer = Checkpointer(config, directory, hub, group)
    buffer = TamiyoRolloutBuffer(
        steps=env.horizon, envs=E, features=num_features(env.layout.slots), masks=env.layout.size
    )
    emit = TelemetryEmitter(
        hub, slots=env.backend.slots, worlds=env.backend.worlds, host_params=env.backend.host_params,
        envs=range(E)[mine], level=level(config.telemetry), is_rank_zero=group.is_rank_zero,
    )  # fmt: skip
    if resume is None:
        checkpointer.save_if_due(training, env.backend)
    else:
        checkpointer.restore(resume, training, env.backend)
        env.round = training.done - 1

    def check_for_stop() -> None:
        poll()
        group.check()

    env.backend.on_pause = check_for_stop

    for number in range(training.done, config.rounds):
        with checkpointer.save_on_error(training, env.backend):
            obs, info = env.reset()
            emit.begin(env.backend.worlds, number + 1, env.backend.host_params)
            buffer.reset()
            draws = choice_draws(config.seed, number, round_worlds(config, number), env.horizon)
            sampler = Sampler(network, env.layout, group, draws, obs, info["masks"])
            earned = np.zeros(env.num_envs)
            taught = number < config.imitation
            controller = ImitationController(sampler, env, config, number) if taught else sampler
            for step in rollout(env, controller, env.horizon, before_step=check_for_stop, phases=phases):
                alive = env.backend.table.step == step.number + 1  # [R] others have ended before
                obs, paid, ended, cut, info = step.result  # after apply, tick, training and validation
                done = group.pad_rows(ended, E, ended.all())
                choice = sampler.choice
                actions = (
                    group.pad_rows(controller.teacher_actions, E)
                    if isinstance(controller, ImitationController)
                    else choice.actions
                )
                buffer.add(
                    obs=sampler.obs, masks=sampler.masks, actions=actions, log_probs=choice.log_probs,
                    values=choice.values, rewards=group.pad_rows(paid, E), done=done, truncated=group.pad_rows(cut, E),
                    forced=forced(sampler.masks, env.layout),
                    alive=group.pad_rows(alive, E, True),
                )  # fmt: skip
                sampler.observe(obs, info["masks"])
                earned = earned + paid
                with phases("telemetry"):
                    stats = step_stats(choice, mine, paid, info["utility"])
                    emit.step(env.backend.table, step.actions, env.outcome, step.allowed, stats, alive=alive)
                    emit.governed(env.backend.alarms)
                    emit.worth(env.backend.table, env.backend.worth)
                    emit.phases(phases)
                if env.over:
                    break
            with phases("gather"):
                group.gather(buffer.fields(), poll=poll)
                lengths = group.gather_rows(env.backend.table.step.astype(np.float64), E)
                buffer.close(torch.from_numpy(lengths))
                ends = {"returns": earned, "utility": info["utility"], "quality": info["quality"]}
                ends = {name: group.gather_rows(rows, E) for name, rows in ends.items()}
        decisions = None
        if not taught:  # the buffer of a taught round holds the teacher's actions
            decisions = DecisionRecord.of(
                network, env.layout, obs=buffer.obs, masks=buffer.masks, actions=buffer.actions,
                lengths=buffer.step_counts, slots=env.backend.slots, worlds=round_worlds(config, number),
                episode=number + 1,
            )  # fmt: skip
        with phases("update"):
            training.ranges.add(buffer.obs[buffer.valid])
            update = training.ppo.update(buffer.finish(), training.shuffle, imitate=taught)
            update = with_returns(update, ends["returns"])
        with phases("telemetry"):
            emit.run_event(update)
            emit.episode(
                env.backend.table, [f"env {e}" for e in range(E)[mine]], episode_return=earned.tolist(),
                utility=info["utility"].tolist(), baseline_quality=env.backend.baseline_quality.tolist(),
                multiply_adds=np.concatenate([frame.macs for frame in env.frames]).tolist(),
            )  # fmt: skip
            emit.phases(phases, last=True)
        result.rounds.append(Round(number=number, update=update, **ends))
        result.env_steps += int(lengths.sum())
        with phases("checkpoint"):
            checkpointer.offer_hosts(env.backend, ends["utility"], number + 1)
            group.agree(training.digest, "the updated policies")
            checkpointer.save_if_due(training, env.backend, decisions)
        on_round(result.rounds[-1])
    return result


class Sampler:
    """Controller that samples the policy's actions for one round, on a batch padded to all E environments.

    The bits of a row do not depend on the rank that computes it: every rank evaluates all E rows and uses its own R.
    """

    def __init__(
        self, network: TamiyoNetwork, layout: MaskLayout, group: ProcessGroup, draws: Tensor, obs: Floats, masks: Bools
    ) -> None:
        self.network = network
        self.layout = layout
        self.group = group
        self.draws = draws  # [T, E, 8]
        self.envs = draws.shape[1]
        self.obs, self.masks = self._padded(obs, masks)
        self.choice: Choice
        self._step = 0

    def act(self, _table: SlotTable, _legal: Bools) -> Ints:
        """Return actions [R, 8]. The arguments are unused: `obs` and `masks` hold the environment's current state."""
        self.choice = self.network.act(self.obs, self.masks, self.layout, self.draws[self._step])
        self._step += 1
        return np.asarray(self.choice.actions.numpy()[self.group.share(self.envs)])

    def observe(self, obs: Floats, masks: Bools) -> None:
        """Store the observations and masks after a step."""
        self.obs, self.masks = self._padded(obs, masks)

    def _padded(self, obs: Floats, masks: Bools) -> tuple[Tensor, Tensor]:
        return self.group.pad_rows(obs, self.envs), self.group.pad_rows(masks, self.envs, True)


def make_env(config: TrainConfig, data_root: Path | None = None, group: ProcessGroup | None = None) -> GrowthVectorEnv:
    """Return this rank's environments of a config: simulated or real hosts, in the worlds of each round."""
    mine = (group or ProcessGroup()).share(config.envs)
    phases = PhaseTimers()

    def worlds(number: int) -> list[int]:
        return round_worlds(config, number)[mine]

    backend = make_backend(config, worlds(0), data_root, phases=phases)
    return GrowthVectorEnv(backend, worlds, reward=config.reward, fixed=config.fixed_heads(), phases=phases)


def make_backend(
    config: TrainConfig, worlds: Sequence[int], data_root: Path | None = None, *, baselines: Sequence[Path] = (),
    phases: PhaseTimers | None = None,
) -> Backend:  # fmt: skip
    """Return the backend of a config: simulated hosts in these worlds, or real hosts, of which there are none yet."""
    if config.simulated:
        sim = config.sim if config.epochs is None else msgspec.structs.replace(config.sim, horizon=config.epochs)
        return Simulator(sim, worlds, config.rules)
    if (family := config.family()) is not None:
        tasks = FamilyTasks(family, data_root)
        return FamilyBackend(tasks, rules=config.rules, config=config.engine, baselines=baselines, phases=phases)
    task = get_task(config.task)
    task = task if config.epochs is None else replace(task, epochs=config.epochs)
    data = task.load_data(data_root)
    return HostBackend(task, rules=config.rules, config=config.engine, data=data, baselines=baselines, phases=phases)


def pool_world(config: TrainConfig, number: int) -> int:
    """Return the world of the run's n-th episode. Every pass over the pool uses a new random permutation.

    Episodes of imitation on real hosts use the worlds that have a plan.
    """
    is_taught = number < config.imitation * config.envs and not config.simulated
    pool = sorted(map(int, config.plans)) if is_taught else range(config.pool)
    turn, place = divmod(number, len(pool))
    return pool[_order(config.seed, turn, len(pool))[place]]


@lru_cache(maxsize=4)
def _order(rng_seed: int, turn: int, worlds: int) -> Ints:
    return np.random.default_rng(derive_seed(rng_seed, "worlds", turn)).permutation(worlds)


def round_worlds(config: TrainConfig, number: int) -> list[int]:
    """Return the worlds of a round, one per environment."""
    return [pool_world(config, number * config.envs + e) for e in range(config.envs)]


def choice_draws(rng_seed: int, number: int, worlds: Sequence[int], steps: int) -> Tensor:
    """Return uniform random numbers [T, E, 8] for a round's action sampling.

    They depend on the run's seed, round, world, step and head only. Repeated worlds of a round get different numbers.
    """
    turn = np.array([list(worlds[:e]).count(world) for e, world in enumerate(worlds)])
    counters = turn[:, None] * NUM_HEADS + np.arange(NUM_HEADS)
    keys = world_keys(worlds)
    purpose = f"choices {rng_seed} {number}"
    bits = [random_bits(keys, purpose, counters, np.full(len(worlds), step)) for step in range(steps)]
    return torch.from_numpy(uniform(np.array(bits)))


def with_returns(update: Update, returns: Floats) -> Update:
    """Return `update` with the mean and the standard deviation of a round's episode returns [E]."""
    spread = float(returns.std(ddof=1)) if len(returns) > 1 else None
    return msgspec.structs.replace(update, return_mean=float(returns.mean()), return_sd=spread)


def step_stats(choice: Choice, mine: slice, rewards: Floats, utility: Floats) -> StepStats:
    """Return the policy's outputs of this rank's environments, with their rewards and utilities, for telemetry."""
    value = choice.values.numpy()[mine]
    log_prob = choice.log_probs.sum(-1).numpy()[mine]
    return StepStats(value, log_prob, choice.entropy.numpy()[mine], rewards, utility)
