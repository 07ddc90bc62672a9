"""Generalised advantage estimation over rows that hold any mix of episodes.

Legend: T steps, E environments. Everything is `[T, E]`; `step_counts` is `[E]`, the valid steps of each column.

    end          done, truncated, or the last valid step of its column
    next value   0 where done, `bootstrap` at any other end, V[t+1] where the episode goes on
    delta        reward + γ·next value − V
    A[t]         delta[t], plus γλ·A[t+1] unless t is an end
    returns      A + V

Two ways to the same numbers: `gae_rows` (numpy, on the CPU) and `gae_scan` (torch, on any other device, where
few large kernels beat many small ones). Both compute in the precision they are given, both write 0 into
padding, and neither lets what lies behind an end through to what lies before it: not a number, not a NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]

MIN_WIDTH = 1024
"""Elements that one numpy call should handle: below this, most of its time is the call, not the arithmetic."""


def gae_rows(
    rewards: Floats, values: Floats, done: Bools, truncated: Bools, bootstrap: Floats,
    step_counts: NDArray[np.int64], gamma: float, lam: float, *, out: tuple[Floats, Floats] | None = None,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Advantages and returns, each `[T, E]`, written into `out` (two contiguous arrays of their own) if given.

    The fast sweep multiplies by 0 at ends, which would turn a NaN or an infinity behind an end into a NaN
    before it. But then that NaN reaches row 0 of its column, since nothing multiplied or added makes it finite
    again: so a finite row 0 proves every number, and anything else is done again with the slow, guarded sweep.
    """
    advantages, returns = (
        out if out is not None else (np.empty_like(rewards, order="C"), np.empty_like(values, order="C"))
    )
    steps, envs = rewards.shape
    if not rewards.size:
        return advantages, returns
    end = done | truncated
    end[step_counts - 1, np.arange(envs)] = True  # an empty column gets its end in the padding, where it does no harm
    ends = np.flatnonzero(end)
    padding = np.arange(steps)[:, None] >= step_counts if step_counts.min() < steps else None

    def write_deltas() -> None:
        np.multiply(values[1:], gamma, out=advantages[:-1])
        after = bootstrap.take(ends)
        after[done.take(ends)] = 0.0
        advantages.reshape(-1)[ends] = after * gamma
        np.add(advantages, rewards, out=advantages)
        np.subtract(advantages, values, out=advantages)
        if padding is not None:
            np.putmask(advantages, padding, 0.0)

    with np.errstate(over="ignore", invalid="ignore"):
        write_deltas()
        carry = returns  # free until the end: γλ, and 0 at ends
        carry.fill(gamma * lam)
        carry.reshape(-1)[ends] = 0.0
        _sweep(advantages, carry)
        if not np.isfinite(advantages[0]).all():
            write_deltas()
            _guarded_sweep(advantages, end, gamma * lam)
        np.add(advantages, values, out=returns)
    if padding is not None:
        np.putmask(returns, padding, 0.0)
    return advantages, returns


def _sweep(x: Floats, carry: Floats) -> None:
    """x[t] += carry[t]·x[t+1], from the last row to the first, in place; `carry` is used up.

    Rows of few environments are first made wider: each doubling folds x[t+s] into x[t] for all t at once, after
    which x[t] needs x[t+2s] only, and 2s rows can go through the sequential loop as one.
    """
    steps, envs = x.shape
    stride = 1
    while stride < steps and 2 * stride * envs <= MIN_WIDTH:
        head = carry[:-stride]
        x[:-stride] += head * x[stride:]
        head *= carry[stride:]
        stride *= 2
    if stride >= steps:
        return
    rest = steps % stride  # the first rows, fewer than a block
    blocks = x[rest:].reshape(-1, stride * envs)[::-1]
    factors = carry[rest:].reshape(-1, stride * envs)[::-1]
    multiply, add, later = np.multiply, np.add, blocks[0]
    for block, factor in zip(blocks[1:], factors[1:], strict=True):
        multiply(factor, later, factor)
        add(block, factor, block)
        later = block
    if rest:
        x[:rest] += carry[:rest] * x[stride : stride + rest]


def _guarded_sweep(x: Floats, end: Bools, carry: float) -> None:
    """What `_sweep` does, one row at a time, without touching what lies behind an end."""
    for t in range(len(x) - 2, -1, -1):
        x[t] += np.where(end[t], x.dtype.type(0), x[t + 1] * carry)


def gae_scan(
    rewards: Tensor, values: Tensor, done: Tensor, truncated: Tensor, bootstrap: Tensor,
    step_counts: Tensor, gamma: float, lam: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advantages and returns, each `[T, E]`, in log2(T) rounds.

    Round by round, `s` doubles and x[t] covers the deltas of t … t+2s−1 as far as its episode reaches. `is_open[t]`
    says that none of t … t+s−1 is an end, so that x[t+s] belongs to x[t] with weight (γλ)^s.
    """
    steps = len(rewards)
    row = torch.arange(steps, device=rewards.device)[:, None]
    valid = row < step_counts
    end = done | truncated | (row >= step_counts - 1)
    zero = rewards.new_zeros(())
    following = torch.where(done, zero, bootstrap)
    following[:-1] = torch.where(end[:-1], following[:-1], values[1:])
    x = torch.where(valid, rewards + gamma * following - values, zero)

    is_open, stride = ~end[:-1], 1
    while stride < steps:
        x[:-stride] += torch.where(is_open, (gamma * lam) ** stride * x[stride:], zero)
        is_open = is_open[:-stride] & is_open[stride:]
        stride *= 2
    return x, torch.where(valid, x + values, zero)


def normalized_advantages(advantages: Tensor, counted: Tensor, *, std_floor: float = 1e-3) -> Tensor:
    """Advantages with mean 0 and spread 1 over the `counted` steps (valid, not forced), 0 elsewhere.

    Only steps with a choice teach the actor, so only they set the scale. The floor keeps a round in which every
    choice was as good as any other from being blown up into a lesson.
    """
    zero = advantages.new_zeros(())
    count = counted.sum().clamp(min=1)
    mean = torch.where(counted, advantages, zero).sum() / count
    centred = torch.where(counted, advantages - mean, zero)
    std = (centred.square().sum() / count).sqrt()
    return centred / std.clamp(min=std_floor)
