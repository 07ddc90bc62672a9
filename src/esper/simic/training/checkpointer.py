"""State of a training run between two rounds, and its checkpoints, policy file and best host.

    training = TrainingState.new(config, layout)
    checkpointer = Checkpointer(config, run_directory, hub, group)
    checkpointer.save_if_due(training, backend)      # flush the journal, then write a checkpoint
    checkpointer.restore(saved, training, backend)   # resume from one

No host exists between rounds, so the state is small. The hosts of a round are a function of the round's number.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.events import Checkpoint, EventReceiver, Update, spelled, unspelled
from esper.leyline.rng import derive_seed
from esper.leyline.run_files import DECISIONS
from esper.leyline.slot_table import Floats
from esper.simic.agent.ppo import PPO
from esper.simic.env import Backend, HostBackend
from esper.simic.family_backend import FamilyBackend
from esper.simic.simulator import Simulator
from esper.simic.training.config import TrainConfig, as_tree
from esper.simic.training.distributed import ProcessGroup
from esper.tamiyo.controllers.learned import SHIPPED
from esper.tamiyo.decision_record import DecisionRecord
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.action_masks import MaskLayout
from esper.tamiyo.policy.feature_ranges import FeatureRanges
from esper.tamiyo.policy_file import POLICY, load_policy, load_ranges, save_policy
from esper.tolaria.best_host import BEST_HOST, GrownHost
from esper.tolaria.checkpoint import Checkpoints, Saved
from esper.tolaria.checkpoint_schedule import CheckpointSchedule
from esper.tolaria.engine import Engine
from esper.tolaria.packing import packed, unpacked
from esper.tolaria.reproducibility import changes, fingerprint

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
    """Generator that assigns steps to minibatches: the only random stream that continues from round to round.
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
        theirs, ours = msgspec.to_builtins(network), msgspec.to_builtins(config.network)
        others = {name: value for name, value in theirs.items() if value != ours[name]}
        raise ConfigError(
            f"start_from={config.start_from} has other network settings than this training, of which a preset may set "
            f"some. Use {' '.join(f'--set network.{k}={json.dumps(v)}' for k, v in others.items())}, or train a new "
            "policy"
        )
    return msgspec.structs.replace(config, network=network)


CHECKPOINTS = "checkpoints"
STATE, RUN = "learner", "run"
"""Names of the files of a checkpoint: the training state, and the run's metadata."""
NOT_MINE, NOT_FINITE, NOT_WRITTEN, WRITTEN = range(4)
"""Outcome of writing a best host, as one rank reports it to the others."""


class Checkpointer:
    """Writes the checkpoints and the best host of a run. Write errors become warnings, and the run continues.

    Without a directory, nothing is written.
    """

    def __init__(self, config: TrainConfig, directory: Path | None, hub: EventReceiver, group: ProcessGroup) -> None:
        self.config = config
        self.hub = hub
        self.group = group
        self.directory = directory
        self.best_utility = -math.inf  # of all hosts so far
        self.schedule = CheckpointSchedule(hub, config.checkpoint_share)
        self._next_seq = [0] * group.size  # of every rank's journal, at the end of the last round
        self._last_saved = -1  # completed rounds at the last checkpoint

    def save_if_due(self, training: TrainingState, backend: Backend, decisions: DecisionRecord | None = None) -> None:
        """Write a checkpoint at the start of the run or the end of a round, and the round's decisions, if one is due.

        The journal is flushed first, so that a resumed run has no gap in it. While flushing fails, checkpoints are
        postponed, except the last one.
        """
        if self.directory is None:
            return
        is_unstable = training.ppo.bad_in_a_row > 0  # the run may stop soon: save its last completed round
        is_last = training.done == self.config.rounds
        due = self.schedule.is_due(always=is_unstable or is_last)
        flushed = self.schedule.flush() if due or self.group.size > 1 else True
        self._next_seq = self.group.gather_ints(getattr(self.hub, "next_seq", 0))
        if due and self.schedule.is_possible(flushed, always=is_last):
            self._write(training, backend, decisions)
            self.schedule.record()

    def restore(self, saved: Saved, training: TrainingState, backend: Backend) -> None:
        """Load a checkpoint and emit an event.

        No-growth baselines are reused only if they would be trained identically now.
        """
        metadata = run_metadata(saved)
        try:
            state = unpacked(saved.document(STATE), saved.tensors(STATE))
            training.load_state_dict(state)
            if not differences(saved, self.config, backend):
                backend.add_baselines(state["baselines"])
        except (KeyError, TypeError, ValueError, RuntimeError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"the checkpoint {saved.path} does not fit this run: {error!r}") from error
        self.best_utility, self._next_seq = metadata["best_utility"], metadata["next_seq"]
        self._last_saved = metadata["done"]
        if self.group.is_rank_zero:
            size = sum(file.stat().st_size for file in saved.path.iterdir())
            path = f"{CHECKPOINTS}/{saved.path.name}"
            self.hub.emit(Checkpoint(path=path, reason="resumed", round=metadata["done"], size_bytes=size))

    @contextmanager
    def save_on_error(self, training: TrainingState, backend: Backend) -> Iterator[None]:
        """Context manager around the work between two updates: on an exception, save the last completed round first."""
        try:
            yield
        except BaseException:
            if self._last_saved < training.done and self.directory is not None:
                self.schedule.flush()
                self._write(training, backend)
            raise

    def _write(self, training: TrainingState, backend: Backend, decisions: DecisionRecord | None = None) -> None:
        """Write a checkpoint numbered by the completed rounds, and the current policy."""
        if not self.group.is_rank_zero or self.directory is None:
            return
        if not self.directory.is_dir():  # moved or removed: do not recreate it
            warnings.warn(f"{self.directory} no longer exists: no checkpoint can be written", stacklevel=2)
            return
        document, tensors = packed(training.state_dict() | {"baselines": backend.baseline_curves()})
        config = msgspec.structs.replace(self.config, network=training.network.config)  # `start_from` may set another
        run = {"config": as_tree(config), "done": training.done, "best_utility": self.best_utility}
        run |= {"next_seq": self._next_seq, "exact": run_fingerprint(self.config, backend)}
        recent = training.result.rounds[-1:]
        try:
            self._save_policy(self.directory, training)
            if decisions is not None:
                decisions.save(self.directory / DECISIONS)
            written = Checkpoints(self.directory / CHECKPOINTS, keep=self.config.keep).write(
                f"round-{training.done:06d}", tensors={STATE: tensors}, documents={STATE: document, RUN: spelled(run)},
                score=float(np.mean(recent[0].returns)) if recent else None,
            )  # fmt: skip
        except (CheckpointError, OSError) as error:
            warnings.warn(f"{error}. The run continues; its last checkpoint is an earlier one", stacklevel=2)
            return
        self._last_saved = training.done
        self.hub.emit(
            Checkpoint(
                path=written.path.relative_to(self.directory).as_posix(), reason="round" if training.done else "start",
                round=training.done, size_bytes=written.size_bytes, write_ms=written.write_ms,
            )
        )  # fmt: skip

    def _save_policy(self, directory: Path, training: TrainingState) -> None:
        save_policy(
            training.network, directory / POLICY, fixed=self.config.fixed_heads(), ranges=training.ranges,
            env_steps=training.result.env_steps, trained_on=self.config.task_label,
        )  # fmt: skip

    def offer_hosts(self, backend: Backend, utility: Floats, number: int) -> None:
        """Save the best finite host of a round [E] if its utility exceeds all previous ones.

        The host's rank writes it. All ranks receive the outcome: `best_utility` is raised on all of them, and only if
        the host was written.
        """
        if self.directory is None or isinstance(backend, Simulator):
            return
        scores = np.where(np.isfinite(utility), utility, -math.inf)
        mine = range(len(scores))[self.group.share(len(scores))]
        for env in np.argsort(-scores, kind="stable").tolist():
            best = float(scores[env])
            if not best > self.best_utility:
                return
            outcome = NOT_MINE
            if env in mine:
                host = GrownHost.of(*engine_of(backend, mine.index(env)), utility=best, round=number)
                outcome = _save_host(host, self.directory)
            outcome = max(self.group.gather_ints(outcome))
            if outcome == WRITTEN:
                self.best_utility = best
            if outcome != NOT_FINITE:
                return


def engine_of(backend: Backend, env: int) -> tuple[Engine, int]:
    """Return the engine that trains an environment, and the environment's number in it."""
    if isinstance(backend, FamilyBackend):
        return backend.hosts[env].engine, 0
    assert isinstance(backend, HostBackend)
    return backend.engine, env


def _save_host(host: GrownHost, directory: Path) -> int:
    if not host.is_finite:
        return NOT_FINITE
    if not directory.is_dir():
        return NOT_WRITTEN
    try:
        host.save(directory / BEST_HOST)
    except CheckpointError as error:
        warnings.warn(f"{error}. The run continues; this best host is not saved", stacklevel=2)
        return NOT_WRITTEN
    return WRITTEN


def run_metadata(saved: Saved) -> dict[str, Any]:
    """Return a checkpoint's metadata: settings, completed rounds, next event of each rank, versions and hardware."""
    metadata = unspelled(saved.document(RUN))
    types: dict[str, Any] = {"config": dict, "done": int, "next_seq": list, "best_utility": (float, int), "exact": dict}
    if not isinstance(metadata, dict) or not all(isinstance(metadata.get(key), kind) for key, kind in types.items()):
        raise CheckpointError(
            f"the checkpoint {saved.path} is not one of `esper train`: {RUN}.json must contain {', '.join(types)}"
        )
    return metadata


def run_fingerprint(config: TrainConfig, backend: Backend) -> dict[str, str]:
    """Return what must be unchanged for a bit-identical resume."""
    return fingerprint(config.threads, config.engine.device, backend.data_hash)


def differences(saved: Saved, config: TrainConfig, backend: Backend) -> list[str]:
    """Return descriptions of what has changed since a checkpoint and could change bits."""
    return changes(run_metadata(saved)["exact"], run_fingerprint(config, backend))
