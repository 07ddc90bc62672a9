"""Rollout buffer: one preallocated tensor per field, one row per step of all environments.

Legend: T steps, E environments, F features, M mask columns, C steps of a chunk, N sequences of a minibatch.

A column may hold several episodes and may end early: `step_counts [E]` is the number of its valid steps, always a
prefix. The rest is padding and is never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.actions import NUM_HEADS
from esper.leyline.errors import ConfigError, DataError
from esper.simic.agent.advantages import gae_rows, gae_scan

Row = Tensor | NDArray[Any]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Chunks of some environments' columns: N sequences of C steps.

    Sequences shorter than C repeat their last valid step, so that padding is legal and finite. `valid` excludes it from
    every sum.
    """

    obs: Tensor  # [C, N, F]
    masks: Tensor  # [C, N, M] bool
    actions: Tensor  # [C, N, 8]
    log_probs: Tensor  # [C, N, 8] per head, at sampling time
    values: Tensor  # [C, N] at sampling time
    advantages: Tensor  # [C, N]
    returns: Tensor  # [C, N]
    starts: Tensor  # [C, N] bool: zero the hidden state before this step
    forced: Tensor  # [C, N] bool: only one operation was legal
    valid: Tensor  # [C, N] bool
    hidden: Tensor  # [N, *hidden] state before each sequence's first step
    steps: Tensor  # [C, N] int64, row of each step in the buffer
    envs: Tensor  # [N] int64, column of each sequence in the buffer


class TamiyoRolloutBuffer:
    """Data of one round.

    Call `add` per step, `finish`, `compute_advantages_and_returns`, `minibatches` per pass, then `reset`. `hidden`
    is the shape of one environment's recurrent state, for example `(2, 64)` for an LSTM's h and c.
    """

    def __init__(
        self, *, steps: int, envs: int, features: int, masks: int, hidden: tuple[int, ...],
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        if min(steps, envs) < 1:
            raise ConfigError(f"a rollout needs at least one step and one environment, got {steps} and {envs}")
        self.steps = steps
        self.envs = envs
        self.device = torch.device(device)

        def field(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(steps, envs, *shape, dtype=dtype, device=self.device)

        self.obs = field(features)
        self.masks = field(masks, dtype=torch.bool)
        self.actions = field(NUM_HEADS, dtype=torch.int64)
        self.log_probs = field(NUM_HEADS)  # 0 for heads that the operation does not read
        self.values = field()
        self.rewards = field()
        self.done = field(dtype=torch.bool)  # the episode ended
        self.truncated = field(dtype=torch.bool)  # the episode was cut before its end
        self.bootstrap = field()  # value of the state after a cut
        self.starts = field(dtype=torch.bool)  # first step of an episode: hidden was zeroed before it
        self.hidden = field(*hidden)  # state before the step
        self.forced = field(dtype=torch.bool)  # only one operation was legal
        self.advantages = field()
        self.returns = field()
        self.step_counts = torch.zeros(envs, dtype=torch.int64, device=self.device)
        self.reset()

    def reset(self) -> None:
        """Clear the round. Old values stay in memory but are never read."""
        self.rows = 0
        self.step_counts.zero_()
        self._revived = torch.zeros((), dtype=torch.bool, device=self.device)
        self._has_advantages = False

    def fields(self) -> list[Tensor]:
        """Return the tensors written by `add`, [T, E, …] each: those that ranks exchange."""
        return [
            self.obs, self.masks, self.actions, self.log_probs, self.values, self.rewards, self.done, self.truncated,
            self.bootstrap, self.starts, self.hidden, self.forced,
        ]  # fmt: skip

    @property
    def valid(self) -> Tensor:
        """[T, E] bool: which steps were taken."""
        return torch.arange(self.steps, device=self.device)[:, None] < self.step_counts

    @torch.no_grad()
    def add(
        self, *, obs: Row, masks: Row, actions: Row, log_probs: Row, values: Row, rewards: Row, done: Row,
        truncated: Row, starts: Row, hidden: Row, bootstrap: Row | None = None, forced: Row | None = None,
        alive: Row | None = None,
    ) -> None:  # fmt: skip
        """Copy one step of all environments. Where `alive` is False, this step and all later ones are padding."""
        t = self.rows
        if t == self.steps:
            raise DataError(f"the buffer holds all its {t} steps: reset() it, or build it with more steps")
        for name, value in (
            ("obs", obs), ("masks", masks), ("actions", actions), ("log_probs", log_probs), ("values", values),
            ("rewards", rewards), ("done", done), ("truncated", truncated), ("bootstrap", bootstrap),
            ("starts", starts), ("hidden", hidden), ("forced", forced),
        ):  # fmt: skip
            row = getattr(self, name)[t]
            if value is None:
                row.zero_()
            else:
                row.copy_(_checked(name, value, row.shape))
        if alive is None:
            living = torch.ones(self.envs, dtype=torch.bool, device=self.device)
        else:
            living = _checked("alive", alive, (self.envs,)).to(self.device, torch.bool)
        self._revived |= (living & (self.step_counts < t)).any()
        self.step_counts += living
        self.rows = t + 1
        self._has_advantages = False

    def close(self, step_counts: Tensor) -> None:
        """Set the number of valid steps of every column [E], of which other ranks may have written some."""
        self.step_counts.copy_(step_counts)
        self.rows = self.steps
        self._has_advantages = False

    @torch.no_grad()
    def finish(self, last_values: Row | None = None) -> TamiyoRolloutBuffer:
        """Close the round. `last_values [E]` are the values of the states after columns that stop without an end."""
        if self._revived.item():  # sync: once per round
            raise DataError("an environment was alive again after a step in which it was not: a column is one prefix")
        if last_values is not None:
            next_values = _checked("last_values", last_values, (self.envs,)).to(self.bootstrap)
            last = (self.step_counts - 1).clamp(min=0)
            column = torch.arange(self.envs, device=self.device)
            ended = self.done[last, column] | self.truncated[last, column]
            self.bootstrap[last, column] = torch.where(ended, self.bootstrap[last, column], next_values)
            self._has_advantages = False
        return self

    def compute_advantages_and_returns(self, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
        """Compute and return `advantages` and `returns`, 0 in padding.

        On the CPU, numpy operates on the tensors' memory; on other devices torch runs few large kernels.
        """
        n = self.rows
        if self.device.type == "cpu":
            gae_rows(
                self.rewards.numpy()[:n], self.values.numpy()[:n], self.done.numpy()[:n], self.truncated.numpy()[:n],
                self.bootstrap.numpy()[:n], self.step_counts.numpy(), gamma, lam,
                out=(self.advantages.numpy()[:n], self.returns.numpy()[:n]),
            )  # fmt: skip
        else:
            self.advantages[:n], self.returns[:n] = gae_scan(
                self.rewards[:n], self.values[:n], self.done[:n], self.truncated[:n], self.bootstrap[:n],
                self.step_counts, gamma, lam,
            )  # fmt: skip
        if n < self.steps:
            self.advantages[n:] = 0.0
            self.returns[n:] = 0.0
        self._has_advantages = True
        return self.advantages, self.returns

    @torch.no_grad()
    def minibatches(self, num_groups: int, chunk: int, generator: torch.Generator) -> Iterator[Minibatch]:
        """Yield one pass over the data: shuffled groups of environments, cut into chunks. Every valid step occurs once.

        The chunks of a column are in the same minibatch, each with the hidden state stored before its first step.
        """
        if not 1 <= num_groups <= self.envs:
            raise ConfigError(f"cannot make {num_groups} groups of {self.envs} environments: choose 1 to {self.envs}")
        if chunk < 1:
            raise ConfigError(f"a chunk has at least one step, got {chunk}")
        if not self._has_advantages:
            raise DataError("no advantages for these steps yet: call compute_advantages_and_returns(gamma, lam) first")
        order = torch.randperm(self.envs, generator=generator, device=generator.device).to(self.device)
        first = torch.arange(0, self.rows, chunk, device=self.device)[:, None]  # [chunks, 1]
        for group in order.tensor_split(num_groups):
            chunks, members = (first < self.step_counts[group]).nonzero(as_tuple=True)  # sync: number of sequences
            if len(members):
                yield self._gather(first[chunks, 0], group[members], chunk)

    def _gather(self, first: Tensor, envs: Tensor, chunk: int) -> Minibatch:
        """Return the sequences that start at rows `first [N]` of columns `envs [N]`."""
        rows = first + torch.arange(min(chunk, self.rows), device=self.device)[:, None]  # [C, N]
        counts = self.step_counts[envs]
        steps = torch.minimum(rows, counts - 1)
        flat = (steps * self.envs + envs).flatten()

        def take(field: Tensor) -> Tensor:
            return field.flatten(0, 1).index_select(0, flat).unflatten(0, steps.shape)

        return Minibatch(
            obs=take(self.obs), masks=take(self.masks), actions=take(self.actions), log_probs=take(self.log_probs),
            values=take(self.values), advantages=take(self.advantages), returns=take(self.returns),
            starts=take(self.starts), forced=take(self.forced), valid=rows < counts,
            hidden=self.hidden[first, envs], steps=steps, envs=envs,
        )  # fmt: skip


def _checked(name: str, value: Row, shape: tuple[int, ...]) -> Tensor:
    """Return `value` as a tensor. Raise DataError if its shape differs, since copying would silently broadcast it."""
    if tuple(value.shape) != tuple(shape):
        raise DataError(f"{name} of one step has shape {tuple(shape)} in this buffer, got {tuple(value.shape)}")
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch cannot wrap read-only arrays
    return torch.as_tensor(value)
