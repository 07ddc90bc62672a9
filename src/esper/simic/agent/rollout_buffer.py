"""Rollout buffer: one preallocated tensor per field, one row per step of all environments.

Legend: T steps, E environments, F features, M mask columns, N steps of a minibatch.

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
    """Steps of the buffer, in random order."""

    obs: Tensor  # [N, F]
    masks: Tensor  # [N, M] bool
    actions: Tensor  # [N, 8]
    log_probs: Tensor  # [N, 8] per head, at sampling time
    values: Tensor  # [N] at sampling time
    advantages: Tensor  # [N]
    returns: Tensor  # [N]
    forced: Tensor  # [N] bool: only one operation was legal
    steps: Tensor  # [N] int64, row of each step in the buffer
    envs: Tensor  # [N] int64, column of each step in the buffer


class TamiyoRolloutBuffer:
    """Data of one round.

    Call `add` per step, `finish`, `compute_advantages_and_returns`, `minibatches` per pass, then `reset`.
    """

    def __init__(self, *, steps: int, envs: int, features: int, masks: int, device: torch.device | str = "cpu") -> None:
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
            self.bootstrap, self.forced,
        ]  # fmt: skip

    @property
    def valid(self) -> Tensor:
        """[T, E] bool: which steps were taken."""
        return torch.arange(self.steps, device=self.device)[:, None] < self.step_counts

    @torch.no_grad()
    def add(
        self, *, obs: Row, masks: Row, actions: Row, log_probs: Row, values: Row, rewards: Row, done: Row,
        truncated: Row, bootstrap: Row | None = None, forced: Row | None = None, alive: Row | None = None,
    ) -> None:  # fmt: skip
        """Copy one step of all environments. Where `alive` is False, this step and all later ones are padding."""
        t = self.rows
        if t == self.steps:
            raise DataError(f"the buffer holds all its {t} steps: reset() it, or build it with more steps")
        for name, value in (
            ("obs", obs), ("masks", masks), ("actions", actions), ("log_probs", log_probs), ("values", values),
            ("rewards", rewards), ("done", done), ("truncated", truncated), ("bootstrap", bootstrap),
            ("forced", forced),
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
    def minibatches(self, count: int, generator: torch.Generator) -> Iterator[Minibatch]:
        """Yield one pass over the data: `count` minibatches of shuffled valid steps, or fewer, of one step each.

        Every valid step occurs once.
        """
        if count < 1:
            raise ConfigError(f"a pass has at least one minibatch, got {count}")
        if not self._has_advantages:
            raise DataError("no advantages for these steps yet: call compute_advantages_and_returns(gamma, lam) first")
        steps, envs = self.valid.nonzero(as_tuple=True)  # sync: number of valid steps
        order = torch.randperm(len(steps), generator=generator, device=generator.device).to(self.device)
        if len(order):
            for some in order.tensor_split(min(count, len(order))):
                yield self._gather(steps[some], envs[some])

    def _gather(self, steps: Tensor, envs: Tensor) -> Minibatch:
        """Return the steps at rows `steps [N]` of columns `envs [N]`."""
        flat = steps * self.envs + envs

        def take(field: Tensor) -> Tensor:
            return field.flatten(0, 1).index_select(0, flat)

        return Minibatch(
            obs=take(self.obs), masks=take(self.masks), actions=take(self.actions), log_probs=take(self.log_probs),
            values=take(self.values), advantages=take(self.advantages), returns=take(self.returns),
            forced=take(self.forced), steps=steps, envs=envs,
        )  # fmt: skip


def _checked(name: str, value: Row, shape: tuple[int, ...]) -> Tensor:
    """Return `value` as a tensor. Raise DataError if its shape differs, since copying would silently broadcast it."""
    if tuple(value.shape) != tuple(shape):
        raise DataError(f"{name} of one step has shape {tuple(shape)} in this buffer, got {tuple(value.shape)}")
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch cannot wrap read-only arrays
    return torch.as_tensor(value)
