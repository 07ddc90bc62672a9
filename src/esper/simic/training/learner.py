"""State of a training run between two rounds: policy, optimiser and results. Checkpoints save it.

    learner = Learner.new(config, layout)
    learner.load(state)                          # state of an earlier process
    checkpointer.save_if_due(learner, backend)                 # flush the journal, then write a checkpoint

No host exists between rounds, so the state is small. The hosts of a round are a function of the round's number.
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
from esper.leyline.rng import derive_seed
from esper.leyline.slot_table import Floats
from esper.simic.agent.ppo import PPO
from esper.simic.backend import Backend, HostBackend
from esper.simic.no_growth_baseline import code_hash, processor
from esper.simic.training.config import TrainConfig, as_tree
from esper.simic.training.distributed import ProcessGroup
from esper.tamiyo.controllers.learned import SHIPPED
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.action_masks import MaskLayout
from esper.tamiyo.policy_file import POLICY, load_policy, save_policy
from esper.tolaria.best_host import BEST_HOST, BestHost, GrownHost
from esper.tolaria.checkpoint import Checkpoints, Saved
from esper.tolaria.packing import packed, unpacked

CHECKPOINTS = "checkpoints"
LEARNER, RUN = "learner", "run"
NOT_MINE, NOT_FINITE, NOT_WRITTEN, KEPT = range(4)
"""Outcome of writing a best host, as one rank reports it to the others."""
_OF_A_ROUND = ("returns", "utility", "quality")


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
class Trained:
    """A trained policy and the results of its rounds."""

    network: TamiyoNetwork
    rounds: list[Round]
    env_steps: int


@dataclass(slots=True)
class Learner:
    """A policy in training, between two rounds."""

    ppo: PPO
    shuffle: torch.Generator
    """Generator that assigns environments to minibatches: the only random stream that continues from round to round.
    All other random numbers are keyed by world, round or step."""
    trained: Trained

    @classmethod
    def new(cls, config: TrainConfig, layout: MaskLayout, *, resumed: bool = False) -> Learner:
        """Return the initial state of a run."""
        network = new_network(config, resumed=resumed)
        shuffle = torch.Generator().manual_seed(derive_seed(config.seed, "minibatches"))
        return cls(PPO(network, layout, config.ppo, rounds=config.rounds), shuffle, Trained(network, [], 0))

    @property
    def network(self) -> TamiyoNetwork:
        """The policy."""
        return self.trained.network

    @property
    def done(self) -> int:
        """Number of completed rounds."""
        return len(self.trained.rounds)

    def state(self) -> dict[str, Any]:
        """Return the state as nested dicts of tensors and plain data."""
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
        """Restore a result of `state`."""
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
        """Return a hash of every tensor that the next round depends on."""
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


def with_its_network(config: TrainConfig) -> TrainConfig:
    """Return the config with the network settings of `start_from`.

    Raise ConfigError if `network.*` differs from them.
    """
    if config.start_from is None:
        return config
    found = load_policy(policy_path(config.start_from))[0].config
    if config.network not in (NetworkConfig(), found):
        raise ConfigError(
            f"the policy to start from ({config.start_from}) has the shape {msgspec.to_builtins(found)}: network.* "
            "cannot be set otherwise. Leave it out, or train a new policy"
        )
    return msgspec.structs.replace(config, network=found)


class Checkpointer:
    """Writes the checkpoints and the best host of a run. Write errors become warnings, and the run continues."""

    def __init__(self, config: TrainConfig, directory: Path | None, hub: Emits, group: ProcessGroup) -> None:
        self.config, self.hub, self.group, self.directory = config, hub, group, directory
        self.checkpoints = None if directory is None else Checkpoints(directory / CHECKPOINTS, keep=config.keep)
        self.best_utility = -math.inf  # of all hosts so far
        self._ended, self._cost_s = -math.inf, 0.0  # end and duration of the last write
        self._next_seq = [0] * group.size  # of every rank's journal, at the end of the last round
        self._kept = -1  # completed rounds at the last checkpoint

    def save_if_due(self, learner: Learner, backend: Backend) -> None:
        """Write a checkpoint at the start of the run or the end of a round, if one is due.

        The journal is flushed first, so that a resumed run has no gap in it. While flushing fails, checkpoints are
        postponed, except the last one.
        """
        if self.directory is None:
            return
        start = time.monotonic()
        sick = learner.ppo.bad_in_a_row > 0  # the run may stop soon: keep its last completed round
        always = sick or learner.done == self.config.rounds or self.config.checkpoint_share == 1
        due = always or (start - self._ended) * self.config.checkpoint_share >= self._cost_s
        flushed = self._flush() if due or self.group.size > 1 else True
        self._next_seq = self.group.gather_ints(getattr(self.hub, "next_seq", 0))
        if due and not flushed and learner.done < self.config.rounds:
            warnings.warn("the journal cannot be flushed to disk; this checkpoint is put off", stacklevel=2)
        elif due:
            self._write(learner, backend)
            self._ended = time.monotonic()
            self._cost_s = self._ended - start

    def _flush(self) -> bool:
        """Return whether all events so far are on disk or permanently lost: no later checkpoint could have more."""
        flush = getattr(self.hub, "flush", None)
        return flush is None or bool(flush()) or bool(getattr(self.hub, "has_lost", False))

    def resume_from(self, saved: Saved) -> None:
        """Take over the state of the checkpoint that the run resumes from, and emit an event."""
        told = about(saved)
        self.best_utility, self._next_seq, self._kept = told["best_utility"], told["next_seq"], told["done"]
        if self.group.leads:
            size = sum(file.stat().st_size for file in saved.path.iterdir())
            path = f"{CHECKPOINTS}/{saved.path.name}"
            self.hub.emit(Checkpoint(path=path, reason="resumed", round=told["done"], size_bytes=size))

    @contextmanager
    def save_on_error(self, learner: Learner, backend: Backend) -> Iterator[None]:
        """Context manager around the work between two updates: on an exception, save the last completed round first."""
        try:
            yield
        except BaseException:
            if self._kept < learner.done and self.directory is not None:
                self._flush()
                self._write(learner, backend)
            raise

    def _write(self, learner: Learner, backend: Backend) -> None:
        """Write a checkpoint numbered by the completed rounds, and the current policy."""
        if not self.group.leads or self.checkpoints is None or self.directory is None:
            return
        if not self.directory.is_dir():  # moved or removed: do not recreate it
            warnings.warn(f"{self.directory} is gone: no checkpoint can be written", stacklevel=2)
            return
        document, tensors = packed(learner.state() | {"twins": backend.twin_curves()})
        config = msgspec.structs.replace(self.config, network=learner.network.config)  # `start_from` may set another
        run = {"config": as_tree(config), "done": learner.done, "best_utility": self.best_utility}
        run |= {"next_seq": self._next_seq, "exact": fingerprint(self.config, backend)}
        recent = learner.trained.rounds[-1:]
        score = float(np.mean(recent[0].returns)) if recent else None
        try:
            self._save_policy(learner.trained)
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

    def offer_hosts(self, backend: Backend, utility: Floats, number: int) -> None:
        """Save the best finite host of a round [E] if its utility exceeds all previous ones.

        The host's rank writes it. All ranks receive the outcome: `best_utility` is raised on all of them, and only if
        the host was written.
        """
        if self.directory is None or not isinstance(backend, HostBackend):
            return
        scores = np.where(np.isfinite(utility), utility, -math.inf)
        mine = range(len(scores))[self.group.share(len(scores))]
        for champion in np.argsort(-scores, kind="stable").tolist():
            best = float(scores[champion])
            if not best > self.best_utility:
                return
            outcome = NOT_MINE
            if champion in mine:
                host = GrownHost.of(backend.engine, mine.index(champion), utility=best, round=number)
                outcome = self._save_host(host, self.directory)
            outcome = max(self.group.gather_ints(outcome))
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

    def _save_policy(self, trained: Trained) -> None:
        assert self.directory is not None
        where = "sim" if self.config.simulated else self.config.task
        save_policy(
            trained.network, self.directory / POLICY, fixed=self.config.fixed_heads(), trained_on=where,
            env_steps=trained.env_steps,
        )  # fmt: skip


def about(saved: Saved) -> dict[str, Any]:
    """Return a checkpoint's metadata: settings, completed rounds, next event of each rank, versions and hardware."""
    told = unspelled(saved.document(RUN))
    kinds: dict[str, Any] = {"config": dict, "done": int, "next_seq": list, "best_utility": (float, int), "exact": dict}
    if not isinstance(told, dict) or not all(isinstance(told.get(key), kind) for key, kind in kinds.items()):
        raise CheckpointError(
            f"the checkpoint {saved.path} is not one of `esper train`: it does not say {', '.join(kinds)}"
        )
    return told


def restore(saved: Saved, config: TrainConfig, learner: Learner, backend: Backend) -> None:
    """Load a checkpoint. No-growth baselines are reused only if they would be trained identically now."""
    try:
        state = unpacked(saved.document(LEARNER), saved.tensors(LEARNER))
        learner.load(state)
        if not differences(saved, config, backend):
            backend.know_twins(state["twins"])
    except (KeyError, TypeError, ValueError, RuntimeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"the checkpoint {saved.path} does not fit this run: {error!r}") from error


def fingerprint(config: TrainConfig, backend: Backend) -> dict[str, str]:
    """Return what must be unchanged for a bit-identical resume."""
    return exactness(config.threads, config.engine.device, backend.data_hash)


def exactness(threads: int, device: str, data_hash: str) -> dict[str, str]:
    """Return what determines the bits of a run besides its settings: versions, machine, data and code."""
    versions = {name: metadata.version(name) for name in ("torch", "numpy")}
    return versions | {
        "python": platform.python_version(),
        "threads": str(threads),
        "processor": " ".join(processor(device)),
        "platform": sys.platform,
        "data": data_hash[:16],
        "esper's code": code_hash("leyline", "kasmina", "tolaria", "tamiyo", "simic")[:16],
    }


def differences(saved: Saved, config: TrainConfig, backend: Backend) -> list[str]:
    """Return descriptions of what has changed since a checkpoint and could change bits."""
    return changes(about(saved)["exact"], fingerprint(config, backend))


def changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a description of each difference between two results of `exactness`."""
    changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{name}: {then.get(name)} then, {now.get(name)} now" for name in changed]


def must_be_exact(saved: Saved, config: TrainConfig, backend: Backend) -> None:
    """Raise ConfigError if resuming would not be bit-identical."""
    refuse_changes(differences(saved, config, backend))


def refuse_changes(changed: list[str]) -> None:
    """Raise ConfigError if `changed` is not empty."""
    if changed:
        raise ConfigError(
            f"the run cannot go on bit for bit: {'; '.join(changed)}. Restore these, or add --allow-inexact"
        )
