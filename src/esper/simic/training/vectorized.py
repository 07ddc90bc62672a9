"""train_ppo_vectorized: many hosts grow side by side under one policy, which learns from them.

    trained = train_ppo_vectorized(load_config(preset="sim"))

Telemetry goes through the emitter, one line per place; the phases of `leyline.phases` say where the time goes.

Legend: E environments, T steps, F features, M mask columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from esper.leyline.actions import NUM_HEADS, Head
from esper.leyline.chance import random_bits, uniform, world_keys
from esper.leyline.events import Emits, Silence, Update, level
from esper.leyline.phases import Phases
from esper.leyline.seeding import derive_seed
from esper.leyline.slot_table import Floats
from esper.simic.agent.ppo import PPO
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.env import GrowthVectorEnv
from esper.simic.ground import Ground, HostGround
from esper.simic.simulator import Simulator
from esper.simic.telemetry.emitters import Mind, TelemetryEmitter
from esper.simic.training.config import TrainConfig
from esper.tamiyo.network import Choice, TamiyoNetwork
from esper.tamiyo.policy.action_masks import forced
from esper.tamiyo.policy.features import num_features
from esper.tamiyo.policy_file import POLICY, load_policy, save_policy
from esper.tolaria.tasks import get_task


@dataclass(slots=True)
class Round:
    """How one round went, for whoever looks on."""

    number: int
    returns: Floats  # [E] sums of rewards
    utility: Floats  # [E] at the end
    quality: Floats  # [E] at the end
    update: Update


@dataclass(slots=True)
class Trained:
    """A policy, and how it came to be."""

    network: TamiyoNetwork
    rounds: list[Round]
    env_steps: int


def train_ppo_vectorized(
    config: TrainConfig,
    hub: Emits | None = None,
    *,
    directory: Path | None = None,
    data_root: Path | None = None,
    on_round: Callable[[Round], None] = lambda told: None,
) -> Trained:
    """Train a policy. `directory` keeps it after every round, with the twins; `on_round` is told how each went."""
    torch.set_num_threads(config.threads)  # results depend on it
    phases, hub = Phases(), Silence() if hub is None else hub
    env = make_env(config, phases, directory, data_root)
    network = new_network(config)
    ppo = PPO(network, env.layout, config.ppo, rounds=config.rounds)
    buffer = TamiyoRolloutBuffer(
        steps=env.horizon, envs=env.num_envs, features=num_features(env.layout.slots), masks=env.layout.size,
        hidden=(network.hidden_size,),
    )  # fmt: skip
    shuffle = torch.Generator().manual_seed(derive_seed(config.seed, "minibatches"))
    names = [f"env {e}" for e in range(env.num_envs)]
    trained = Trained(network, [], 0)
    emit = TelemetryEmitter(
        hub, slots=env.ground.slots, worlds=range(env.num_envs), host_params=env.ground.context.host_params,
        level=level(config.telemetry),
    )  # fmt: skip

    for number in range(config.rounds):
        obs, info = env.reset()
        emit.begin(env.ground.worlds)
        buffer.reset()
        hidden = network.initial(env.num_envs)
        starts, earned = np.ones(env.num_envs, dtype=bool), np.zeros(env.num_envs)
        for _ in range(env.horizon):
            seen, masks = torch.from_numpy(obs), torch.from_numpy(info["masks"])
            with phases("policy"):
                choice = network.act(seen, masks, hidden, env.layout, chances(config.seed, number, env))
            actions, allowed = choice.actions.numpy(), env.legal
            obs, paid, ended, cut, info = env.step(actions)  # apply, tick, train an epoch, validate
            buffer.add(
                obs=seen, masks=masks, actions=choice.actions, log_probs=choice.log_probs, values=choice.values,
                rewards=paid, done=ended, truncated=cut, starts=starts, hidden=hidden, forced=forced(masks, env.layout),
            )  # fmt: skip
            hidden = choice.hidden.masked_fill(torch.from_numpy(ended)[:, None], 0.0)  # a new episode remembers nothing
            starts, earned = ended, earned + paid
            with phases("telemetry"):
                emit.step(env.ground.table, actions, env.outcome, allowed, thoughts(choice, paid, info["utility"]))
                emit.worth(env.ground.table, env.ground.worth)
                emit.phases(phases)
        with phases("update"):
            told = ppo.update(buffer.finish(), shuffle)
        with phases("telemetry"):
            emit.say(told)
            emit.episode(
                env.ground.table, names, reward_sum=earned.tolist(), utility=info["utility"].tolist(),
                twin_quality=env.frame.twin_quality.tolist(), multiply_adds=env.frame.macs.tolist(),
            )  # fmt: skip
            emit.phases(phases, last=True)
        trained.rounds.append(Round(number, earned, info["utility"], info["quality"], told))
        trained.env_steps += env.num_envs * env.horizon
        if directory is not None:
            keep_policy(trained, config, directory)
        on_round(trained.rounds[-1])
    return trained


def make_env(
    config: TrainConfig, phases: Phases | None = None, directory: Path | None = None, data_root: Path | None = None
) -> GrowthVectorEnv:
    """The environments of a config: simulated hosts or real ones, in the worlds that each round has."""

    def worlds(number: int) -> list[int]:
        return [pool_world(config, number * config.envs + e) for e in range(config.envs)]

    ground: Ground
    if config.simulated:
        sim = config.sim if config.epochs is None else msgspec.structs.replace(config.sim, horizon=config.epochs)
        ground = Simulator(sim, worlds(0), config.rules)
    else:
        task = get_task(config.task)
        task = task if config.epochs is None else replace(task, epochs=config.epochs)
        twins = None if directory is None else directory / "twins"
        ground = HostGround(
            task, rules=config.rules, config=config.engine, data=task.load_data(data_root), twins=twins, phases=phases
        )
    return GrowthVectorEnv(ground, worlds, reward=config.reward, fixed=config.fixed_heads(), phases=phases)


def keep_policy(trained: Trained, config: TrainConfig, directory: Path) -> None:
    """The policy as it is now, in place of the one before."""
    where = "sim" if config.simulated else config.task
    save_policy(
        trained.network, directory / POLICY, fixed=config.fixed_heads(), trained_on=where, env_steps=trained.env_steps
    )


def pool_world(config: TrainConfig, number: int) -> int:
    """The world of the run's n-th episode: the pool is gone through in a new order each time."""
    turn, place = divmod(number, config.worlds)
    order = np.random.default_rng(derive_seed(config.seed, "worlds", turn)).permutation(config.worlds)
    return int(order[place])


def new_network(config: TrainConfig) -> TamiyoNetwork:
    """A policy to begin with: a new one, or another run's."""
    if config.start_from is not None:
        return load_policy(Path(config.start_from))[0]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(config.seed, "policy"))
        return TamiyoNetwork(config.network)


def chances(seed: int, number: int, env: GrowthVectorEnv) -> Tensor:
    """[E, 8] the numbers that choices fall by: of the run, round, world, step and head, and of nothing else.

    A world that appears twice in a round is told apart by its turn.
    """
    worlds = env.ground.worlds
    turn = np.array([worlds[:e].count(world) for e, world in enumerate(worlds)])
    counters = turn[:, None] * NUM_HEADS + np.arange(NUM_HEADS)
    bits = random_bits(world_keys(worlds), f"choices {seed} {number}", counters, env.ground.table.step)
    return torch.from_numpy(uniform(bits))


def thoughts(choice: Choice, paid: Floats, worth: Floats) -> Mind:
    """What the policy thought and what came of it, as telemetry has it."""
    value, log_prob = choice.values.numpy(), choice.log_probs.sum(-1).numpy()
    return Mind(value, log_prob, choice.entropy[:, Head.OP].numpy(), paid, worth)
