"""All that a run knows between two rounds: the policy, how it learns, and how it went. Enough to go on from.

    learner = Learner.new(config, layout)
    learner.load(saved)                          # of an earlier process
    keeper.keep(learner)                         # flush the journal, then write a checkpoint

Between rounds no host is alive, so this is little: what a round repeats is a function of its number.
"""

from __future__ import annotations

import hashlib
import math
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.events import Checkpoint, Emits, Update, spelled, unspelled
from esper.leyline.seeding import derive_seed
from esper.leyline.slot_table import Floats
from esper.simic.agent.ppo import PPO
from esper.simic.best_host import BEST_HOST, BestHost, GrownHost
from esper.simic.ground import Ground, HostGround
from esper.simic.training.config import TrainConfig, as_tree
from esper.simic.training.team import Team
from esper.simic.twins import code_hash, processor
from esper.tamiyo.controllers.learned import SHIPPED
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.action_masks import MaskLayout
from esper.tamiyo.policy_file import POLICY, load_policy, save_policy
from esper.tolaria.checkpoint import Checkpoints, Saved, packed, unpacked

CHECKPOINTS = "checkpoints"
LEARNER, RUN = "learner", "run"
NOT_MINE, NOT_FINITE, NOT_WRITTEN, KEPT = range(4)
"""What became of a best host that was to be written, as one rank tells the others."""
_OF_A_ROUND = ("returns", "utility", "quality")


@dataclass(slots=True)
class Round:
    """How one round went, for whoever looks on."""

    number: int
    """Counted from 0; whatever is shown or recorded counts from 1."""
    returns: Floats  # [E] the undiscounted sum of each episode's rewards
    utility: Floats  # [E] at the end
    quality: Floats  # [E] at the end
    update: Update


@dataclass(slots=True)
class Trained:
    """A policy, and how it came to be."""

    network: TamiyoNetwork
    rounds: list[Round]
    env_steps: int


@dataclass(slots=True)
class Learner:
    """A policy that is being trained, between two rounds."""

    ppo: PPO
    shuffle: torch.Generator
    """Which environments learn side by side: the one stream of random numbers that goes on from round to round. All
    others are drawn by name, of a world, a round, a step."""
    trained: Trained

    @classmethod
    def new(cls, config: TrainConfig, layout: MaskLayout, *, resumed: bool = False) -> Learner:
        network = new_network(config, resumed=resumed)
        shuffle = torch.Generator().manual_seed(derive_seed(config.seed, "minibatches"))
        return cls(PPO(network, layout, config.ppo, rounds=config.rounds), shuffle, Trained(network, [], 0))

    @property
    def network(self) -> TamiyoNetwork:
        return self.trained.network

    @property
    def done(self) -> int:
        """Rounds that lie behind."""
        return len(self.trained.rounds)

    def state(self) -> dict[str, Any]:
        rounds, ppo = self.trained.rounds, self.ppo
        columns = {name: [getattr(r, name) for r in rounds] for name in _OF_A_ROUND}
        return {
            "network": self.network.state_dict(),
            "optimizer": ppo.optimizer.state_dict(),
            "return_scale": ppo.scale.state(),
            "updates": ppo.round,
            "bad_in_a_row": ppo.bad_in_a_row,
            "shuffle": self.shuffle.get_state(),
            "rounds": {name: torch.from_numpy(np.array(column)) for name, column in columns.items()},
            "told": [msgspec.to_builtins(r.update) for r in rounds],
            "env_steps": self.trained.env_steps,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.network.load_state_dict(state["network"])
        self.ppo.optimizer.load_state_dict(state["optimizer"])
        self.ppo.scale.load(state["return_scale"])
        self.ppo.round, self.ppo.bad_in_a_row = state["updates"], state["bad_in_a_row"]
        self.shuffle.set_state(state["shuffle"])
        columns = {name: state["rounds"][name].numpy() for name in _OF_A_ROUND}
        self.trained.rounds[:] = [
            Round(number=n, update=msgspec.convert(told, Update), **{name: c[n] for name, c in columns.items()})
            for n, told in enumerate(state["told"])
        ]
        self.trained.env_steps = state["env_steps"]

    def digest(self) -> bytes:
        """Of every bit that the next round depends on."""
        digest = hashlib.sha256()
        for tensor in _tensors(self.state()):
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.digest()


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)


def new_network(config: TrainConfig, *, resumed: bool = False) -> TamiyoNetwork:
    """A policy to begin with: a new one, or another run's. Where a checkpoint follows, only its shape counts."""
    if config.start_from is not None and not resumed:
        return load_policy(policy_path(config.start_from))[0]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(config.seed, "policy"))
        return TamiyoNetwork(config.network)


def policy_path(name: str) -> Path:
    """A run or policy file by its path; the policy that comes with the package by its name."""
    return SHIPPED if name == "tamiyo" else Path(name)


def with_its_network(config: TrainConfig) -> TrainConfig:
    """The settings as they are in effect: of a policy to start from, its own shape."""
    if config.start_from is None:
        return config
    found = load_policy(policy_path(config.start_from))[0].config
    if config.network not in (NetworkConfig(), found):
        raise ConfigError(
            f"the policy to start from ({config.start_from}) has the shape {msgspec.to_builtins(found)}: network.* "
            "cannot be set otherwise. Leave it out, or train a new policy"
        )
    return msgspec.structs.replace(config, network=found)


class Keeper:
    """Writes a run's checkpoints and its best host. What cannot be written is said, and the run goes on without it."""

    def __init__(self, config: TrainConfig, directory: Path | None, hub: Emits, team: Team) -> None:
        self.config, self.hub, self.team, self.directory = config, hub, team, directory
        self.checkpoints = None if directory is None else Checkpoints(directory / CHECKPOINTS, keep=config.keep)
        self.best_utility = -math.inf  # of all hosts so far
        self._ended, self._cost_s = -math.inf, 0.0  # when the last one was written, and how long that took
        self._next_seq = [0] * team.size  # of every rank's journal, when the last round ended
        self._kept = -1  # rounds that lay behind the last checkpoint

    def keep(self, learner: Learner, ground: Ground) -> None:
        """The end of a round, or the beginning of all: a checkpoint of it, if one is due.

        The journal is flushed first: a run that goes on from here has no hole in it. While it cannot be, a checkpoint
        is put off, unless it is the last one.
        """
        if self.directory is None:
            return
        start = time.monotonic()
        sick = learner.ppo.bad_in_a_row > 0  # it may have to stop soon, and then its last whole round counts
        always = sick or learner.done == self.config.rounds or self.config.checkpoint_share == 1
        due = always or (start - self._ended) * self.config.checkpoint_share >= self._cost_s
        flushed = self._flush() if due or self.team.size > 1 else True
        self._next_seq = self.team.each(getattr(self.hub, "next_seq", 0))
        if due and not flushed and learner.done < self.config.rounds:
            warnings.warn("the journal cannot be flushed to disk; this checkpoint is put off", stacklevel=2)
        elif due:
            self._write(learner, ground)
            self._ended = time.monotonic()
            self._cost_s = self._ended - start

    def _flush(self) -> bool:
        """Whether everything emitted so far is on disk, or lost for good: no later checkpoint would find more of it."""
        flush = getattr(self.hub, "flush", None)
        return flush is None or bool(flush()) or bool(getattr(self.hub, "has_lost", False))

    def went_on(self, saved: Saved) -> None:
        """This run goes on from a checkpoint: say so, and know what it knew."""
        told = about(saved)
        self.best_utility, self._next_seq, self._kept = told["best_utility"], told["next_seq"], told["done"]
        if self.team.leads:
            size = sum(file.stat().st_size for file in saved.path.iterdir())
            path = f"{CHECKPOINTS}/{saved.path.name}"
            self.hub.emit(Checkpoint(path=path, reason="resumed", round=told["done"], size_bytes=size))

    @contextmanager
    def keeping(self, learner: Learner, ground: Ground) -> Iterator[None]:
        """Within, between two updates: whatever ends the run, the last whole round is kept first."""
        try:
            yield
        except BaseException:
            if self._kept < learner.done and self.directory is not None:
                self._flush()
                self._write(learner, ground)
            raise

    def _write(self, learner: Learner, ground: Ground) -> None:
        """A checkpoint, and the policy as it is now; its number is that of the rounds that lie behind."""
        if not self.team.leads or self.checkpoints is None or self.directory is None:
            return
        if not self.directory.is_dir():  # moved or removed: it must not be made again
            warnings.warn(f"{self.directory} is gone: no checkpoint can be written", stacklevel=2)
            return
        document, tensors = packed(learner.state() | {"twins": ground.twin_curves()})
        config = msgspec.structs.replace(self.config, network=learner.network.config)  # that of `start_from`, if given
        run = {"config": as_tree(config), "done": learner.done, "best_utility": self.best_utility}
        run |= {"next_seq": self._next_seq, "exact": fingerprint(self.config, ground)}
        recent = learner.trained.rounds[-1:]
        score = float(np.mean(recent[0].returns)) if recent else None
        try:
            self._keep_policy(learner.trained)
            written = self.checkpoints.write(
                f"round-{learner.done:06d}", tensors={LEARNER: tensors}, score=score,
                documents={LEARNER: document, RUN: spelled(run)},
            )  # fmt: skip
        except (CheckpointError, OSError) as error:
            warnings.warn(f"{error}. The run goes on; its last checkpoint is an earlier one", stacklevel=2)
            return
        self._kept = learner.done
        self.hub.emit(
            Checkpoint(
                path=written.path.relative_to(self.directory).as_posix(), reason="round" if learner.done else "start",
                round=learner.done, size_bytes=written.size_bytes, write_ms=written.write_ms,
            )
        )  # fmt: skip

    def offer(self, ground: Ground, utility: Floats, number: int) -> None:
        """Keep the best finite host of a round [E] if it beats those of all rounds before. Its rank writes it.

        All ranks learn whether it was written: what is not kept does not raise `best_utility` on any of them.
        """
        if self.directory is None or not isinstance(ground, HostGround):
            return
        scores = np.where(np.isfinite(utility), utility, -math.inf)
        mine = range(len(scores))[self.team.share(len(scores))]
        for champion in np.argsort(-scores, kind="stable").tolist():
            best = float(scores[champion])
            if not best > self.best_utility:
                return
            outcome = NOT_MINE
            if champion in mine:
                host = GrownHost.of(ground.engine, mine.index(champion), utility=best, round=number)
                outcome = self._save_host(host, self.directory)
            outcome = max(self.team.each(outcome))
            if outcome == KEPT:
                self.best_utility = best
            if outcome != NOT_FINITE:
                return

    def _save_host(self, host: GrownHost, directory: Path) -> int:
        if not host.is_finite:
            return NOT_FINITE
        if not directory.is_dir():
            return NOT_WRITTEN
        try:
            BestHost(host).save(directory / BEST_HOST)
        except CheckpointError as error:
            warnings.warn(f"{error}. The run goes on; this best host is not kept", stacklevel=2)
            return NOT_WRITTEN
        return KEPT

    def _keep_policy(self, trained: Trained) -> None:
        assert self.directory is not None
        where = "sim" if self.config.simulated else self.config.task
        save_policy(
            trained.network, self.directory / POLICY, fixed=self.config.fixed_heads(), trained_on=where,
            env_steps=trained.env_steps,
        )  # fmt: skip


def about(saved: Saved) -> dict[str, Any]:
    """What a checkpoint says of its run: settings, rounds done, each rank's next event, and what computed it."""
    told = unspelled(saved.document(RUN))
    kinds: dict[str, Any] = {"config": dict, "done": int, "next_seq": list, "best_utility": (float, int), "exact": dict}
    if not isinstance(told, dict) or not all(isinstance(told.get(key), kind) for key, kind in kinds.items()):
        raise CheckpointError(
            f"the checkpoint {saved.path} is not one of `esper train`: it does not say {', '.join(kinds)}"
        )
    return told


def restore(saved: Saved, config: TrainConfig, learner: Learner, ground: Ground) -> None:
    """Go on from a checkpoint. Twins that were trained otherwise than they would be now are trained again."""
    try:
        state = unpacked(saved.document(LEARNER), saved.tensors(LEARNER))
        learner.load(state)
        if not differences(saved, config, ground):
            ground.know_twins(state["twins"])
    except (KeyError, TypeError, ValueError, RuntimeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"the checkpoint {saved.path} does not fit this run: {error!r}") from error


def fingerprint(config: TrainConfig, ground: Ground) -> dict[str, str]:
    """What must be the same for a run to go on bit for bit."""
    return exactness(config.threads, config.engine.device, ground.data_hash)


def exactness(threads: int, device: str, data_hash: str) -> dict[str, str]:
    """Return what decides the bits of a run besides its settings: versions, machine, data and code."""
    versions = {name: metadata.version(name) for name in ("torch", "numpy")}
    return versions | {
        "python": platform.python_version(),
        "threads": str(threads),
        "processor": " ".join(processor(device)),
        "platform": sys.platform,
        "data": data_hash[:16],
        "esper's code": code_hash("leyline", "kasmina", "tolaria", "tamiyo", "simic")[:16],
    }


def differences(saved: Saved, config: TrainConfig, ground: Ground) -> list[str]:
    """What has changed since a checkpoint that could change bits, in words."""
    return changes(about(saved)["exact"], fingerprint(config, ground))


def changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Say what differs between two results of `exactness`, one text each."""
    changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{name}: {then.get(name)} then, {now.get(name)} now" for name in changed]


def must_be_exact(saved: Saved, config: TrainConfig, ground: Ground) -> None:
    """Refuse to go on in another way than the run would have."""
    refuse_changes(differences(saved, config, ground))


def refuse_changes(changed: list[str]) -> None:
    """Raise ConfigError if anything has changed that could change bits."""
    if changed:
        raise ConfigError(
            f"the run cannot go on bit for bit: {'; '.join(changed)}. Restore these, or add --allow-inexact"
        )
