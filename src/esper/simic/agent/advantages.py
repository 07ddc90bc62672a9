"""Generalised advantage estimation over columns that hold any mix of episodes.

Legend: T steps, E environments. Everything is `[T, E]`; `step_counts` is `[E]`, the valid steps of each column.

    end          done, truncated, or the last valid step of its column
    next value   0 where done, `bootstrap` at any other end, V[t+1] where the episode continues
    delta        reward + γ·next value − V
    A[t]         delta[t], plus γλ·A[t+1] unless t is an end
    returns      A + V

There are two implementations with equal results: `gae_rows` (numpy, for the CPU) and `gae_scan` (torch, for other
devices, where few large kernels are faster than many small ones). Both keep the input precision and write 0 into
padding. Values after an end, including NaN, never affect values before it.
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
"""Minimum number of elements per numpy call. Below it, call overhead exceeds the arithmetic."""


def gae_rows(
    rewards: Floats, values: Floats, done: Bools, truncated: Bools, bootstrap: Floats,
    step_counts: NDArray[np.int64], gamma: float, lam: float, *, out: tuple[Floats, Floats] | None = None,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return advantages and returns, each `[T, E]`, written into `out` (two contiguous arrays) if given.

    The fast sweep multiplies by 0 at ends, so a NaN or an infinity after an end becomes a NaN before it. Such a NaN
    always reaches row 0 of its column, since no later multiplication or addition makes it finite. A finite row 0
    therefore proves that all numbers are valid; otherwise the slow, guarded sweep recomputes them.
    """
    advantages, returns = (
        out if out is not None else (np.empty_like(rewards, order="C"), np.empty_like(values, order="C"))
    )
    steps, envs = rewards.shape
    if not rewards.size:
        return advantages, returns
    end = done | truncated
    end[step_counts - 1, np.arange(envs)] = True  # the end of an empty column lies in the padding and has no effect
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
        carry = returns  # used as scratch space: γλ, and 0 at ends
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
    """Compute x[t] += carry[t]·x[t+1] from the last row to the first, in place. `carry` is overwritten.

    Narrow rows are widened first: each doubling folds x[t+s] into x[t] for all t at once. Afterwards x[t] depends on
    x[t+2s] only, and the sequential loop processes 2s rows at a time.
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
    rest = steps % stride  # the first rows, an incomplete block
    blocks = x[rest:].reshape(-1, stride * envs)[::-1]
    factors = carry[rest:].reshape(-1, stride * envs)[::-1]
    multiply = np.multiply
    add = np.add
    later = blocks[0]
    for block, factor in zip(blocks[1:], factors[1:], strict=True):
        multiply(factor, later, factor)
        add(block, factor, block)
        later = block
    if rest:
        x[:rest] += carry[:rest] * x[stride : stride + rest]


def _guarded_sweep(x: Floats, end: Bools, carry: float) -> None:
    """Compute the same as `_sweep`, row by row, without reading values after an end."""
    for t in range(len(x) - 2, -1, -1):
        x[t] += np.where(end[t], x.dtype.type(0), x[t + 1] * carry)


def gae_scan(
    rewards: Tensor, values: Tensor, done: Tensor, truncated: Tensor, bootstrap: Tensor,
    step_counts: Tensor, gamma: float, lam: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return advantages and returns, each `[T, E]`, in log2(T) iterations.

    In each iteration `s` doubles and x[t] covers the deltas of t … t+2s−1 within its episode. `is_open[t]` is true
    if none of t … t+s−1 is an end, so that x[t+s] is added to x[t] with weight (γλ)^s.
    """
    steps = len(rewards)
    row = torch.arange(steps, device=rewards.device)[:, None]
    valid = row < step_counts
    end = done | truncated | (row >= step_counts - 1)
    zero = rewards.new_zeros(())
    following = torch.where(done, zero, bootstrap)
    following[:-1] = torch.where(end[:-1], following[:-1], values[1:])
    x = torch.where(valid, rewards + gamma * following - values, zero)

    is_open = ~end[:-1]
    stride = 1
    while stride < steps:
        x[:-stride] += torch.where(is_open, (gamma * lam) ** stride * x[stride:], zero)
        is_open = is_open[:-stride] & is_open[stride:]
        stride *= 2
    return x, torch.where(valid, x + values, zero)


STD_FLOOR = 1e-3
"""Smallest standard deviation that advantages are divided by."""


def normalized_advantages(advantages: Tensor, counted: Tensor) -> Tensor:
    """Return advantages with mean 0 and standard deviation 1 over the `counted` steps (valid, not forced), 0 elsewhere.

    Only steps with a choice contribute to the policy loss, so only they set the scale. The floor avoids amplifying
    noise in rounds in which all choices were about equally good.
    """
    zero = advantages.new_zeros(())
    count = counted.sum().clamp(min=1)
    mean = torch.where(counted, advantages, zero).sum() / count
    centred = torch.where(counted, advantages - mean, zero)
    std = (centred.square().sum() / count).sqrt()
    return centred / std.clamp(min=STD_FLOOR)
