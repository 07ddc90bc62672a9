"""Our GAE against a scalar loop and the forms that other libraries use.

    scalar      a Python loop over environments and time of 0-dim torch tensors: the slowest form in use
    SB3         stable_baselines3's RolloutBuffer.compute_returns_and_advantage
    CleanRL     the loop over time on [T, E] tensors that CleanRL's scripts share
    TorchRL     the faster of its two functions, fed in its own layout

All are given the same rewards, values and episode ends beforehand, each in its own layout; ours is the buffer's whole
`compute_advantages_and_returns`. Interleaved, one thread, medians of CPU seconds. The scalar loop's time is linear in
the number of environments, so it is timed on a few of them and scaled. A library that is not installed is reported
as missing.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import add_output_options, make_parser, print_json
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer

SHAPES = ((4, 25), (16, 150), (128, 150), (256, 512), (1024, 1024))
"""(environments, steps), from a small run to one larger than a CPU's cache."""

GAMMA, LAM = 0.99, 0.95
SCALAR_STEPS = 2500
"""Steps of the scalar loop that are run; its total time is extrapolated."""

Work = Callable[[], tuple[Tensor, Tensor] | None]


def main() -> None:
    parser = make_parser(__doc__, repeats=9)
    add_output_options(parser)
    options = parser.parse_args()
    results = rows(options.repeats, options.quick)
    if options.json:
        print_json(results)
        return
    title = f"GAE: times as fast, medians of {options.repeats} interleaved repeats, one thread"
    table = Table("E × T", "ours, µs", title=title)
    for name in RIVALS:
        table.add_column(f"vs {name}", justify="right")
    for row in results:
        cells = (row[f"vs {name}"] for name in RIVALS)
        ratios = (cell if isinstance(cell, str) else f"{cell:,.1f}×" for cell in cells)
        table.add_row(row["shape"], f"{row['ours_us']:.0f}", *ratios)
    Console().print(table)


def rows(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Return one row per shape: our microseconds, and the time of each other implementation relative to ours."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [measure(envs, steps, repeats) for envs, steps in (SHAPES[:2] if quick else SHAPES)]
    finally:
        torch.set_num_threads(threads)


def measure(envs: int, steps: int, repeats: int) -> dict[str, Any]:
    buffer = filled_buffer(envs, steps)

    def ours() -> tuple[Tensor, Tensor]:
        buffer.compute_advantages_and_returns(GAMMA, LAM)
        return buffer.advantages, buffer.returns

    works: dict[str, list[Work]] = {name: build(buffer) for name, build in RIVALS.items()}
    differences = [difference(ours(), work) for rival_works in works.values() for work in rival_works]
    inner = max(1, 20_000 // (envs * steps))  # long enough for the resolution of the clock
    mine: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name, rival_works in works.items() if rival_works}
    for _ in range(repeats):
        mine.append(seconds(ours, inner))
        for name, times in theirs.items():
            scale = envs / scalar_envs(buffer) if name == "scalar" else 1.0
            times.append(scale * min(seconds(work, 1 if name == "scalar" else inner) for work in works[name]))
    row: dict[str, Any] = {"shape": f"{envs} × {steps}", "ours_us": 1e6 * statistics.median(mine)}
    for name in RIVALS:
        ratios = [theirs[name][i] / mine[i] for i in range(repeats)] if name in theirs else []
        row[f"vs {name}"] = statistics.median(ratios) if ratios else "not installed"
    row["largest difference"] = max(differences)
    return row


def filled_buffer(envs: int, steps: int) -> TamiyoRolloutBuffer:
    """Return a full buffer with an episode end about every 100 steps. No truncation: the others do not support it."""
    noise = torch.Generator().manual_seed(0)
    buffer = TamiyoRolloutBuffer(steps=steps, envs=envs, features=1, masks=1)
    buffer.rewards.normal_(generator=noise)
    buffer.values.normal_(generator=noise)
    buffer.bootstrap[-1].normal_(generator=noise)
    buffer.done.bernoulli_(0.01, generator=noise)
    buffer.rows = steps
    buffer.step_counts.fill_(steps)
    return buffer


def difference(ours: tuple[Tensor, Tensor], work: Work) -> float:
    """Return the largest difference of the results, on the environments that the other implementation computed."""
    theirs = work()
    if theirs is None:
        return 0.0
    return max(float((a[:, : b.shape[1]] - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def seconds(work: Work, inner: int) -> float:
    """Return the CPU seconds of this process per call."""
    start = time.process_time()
    for _ in range(inner):
        work()
    return (time.process_time() - start) / inner


def scalar_envs(buffer: TamiyoRolloutBuffer) -> int:
    return min(buffer.envs, max(1, SCALAR_STEPS // buffer.steps))


def scalar_form(buffer: TamiyoRolloutBuffer) -> list[Work]:
    columns = scalar_envs(buffer)
    r, v, done, b = (x.T.contiguous() for x in (buffer.rewards, buffer.values, buffer.done, buffer.bootstrap))

    def work() -> tuple[Tensor, Tensor]:
        advantages = torch.zeros(columns, buffer.steps)
        for env in range(columns):
            last = torch.tensor(0.0)
            next_value = b[env, -1]
            for t in reversed(range(buffer.steps)):
                goes_on = 1.0 - done[env, t].float()
                delta = r[env, t] + GAMMA * next_value * goes_on - v[env, t]
                last = delta + GAMMA * LAM * goes_on * last
                advantages[env, t] = last
                next_value = v[env, t]
        return advantages.T, (advantages + v[:columns]).T

    return [work]


def cleanrl_form(buffer: TamiyoRolloutBuffer) -> list[Work]:
    r = buffer.rewards
    v = buffer.values
    next_value = buffer.bootstrap[-1]
    steps = buffer.steps
    starts = torch.cat([torch.zeros(1, buffer.envs), buffer.done[:-1].float()])  # whether an episode starts
    next_done = buffer.done[-1].float()

    def work() -> tuple[Tensor, Tensor]:
        advantages = torch.zeros_like(r)
        last: Tensor | float = 0.0
        for t in reversed(range(steps)):
            is_last = t == steps - 1
            goes_on = 1.0 - (next_done if is_last else starts[t + 1])
            delta = r[t] + GAMMA * (next_value if is_last else v[t + 1]) * goes_on - v[t]
            advantages[t] = last = delta + GAMMA * LAM * goes_on * last
        return advantages, advantages + v

    return [work]


def sb3_form(buffer: TamiyoRolloutBuffer) -> list[Work]:
    try:
        buffers: Any = importlib.import_module("stable_baselines3.common.buffers")
        spaces: Any = importlib.import_module("gymnasium.spaces")
    except ImportError:
        return []
    box = spaces.Box(-1.0, 1.0, (1,))
    theirs = buffers.RolloutBuffer(buffer.steps, box, box, gae_lambda=LAM, gamma=GAMMA, n_envs=buffer.envs)
    theirs.rewards[:] = buffer.rewards.numpy()
    theirs.values[:] = buffer.values.numpy()
    theirs.episode_starts[1:] = buffer.done[:-1].numpy()
    last_value = buffer.bootstrap[-1]
    last_done = buffer.done[-1].numpy()

    def work() -> tuple[Tensor, Tensor]:
        theirs.compute_returns_and_advantage(last_value, last_done)
        return torch.from_numpy(theirs.advantages), torch.from_numpy(np.asarray(theirs.returns))

    return [work]


def torchrl_form(buffer: TamiyoRolloutBuffer) -> list[Work]:
    try:
        functional: Any = importlib.import_module("torchrl.objectives.value.functional")
    except ImportError:
        return []
    fields = buffer.values, torch.cat([buffer.values[1:], buffer.bootstrap[-1:]]), buffer.rewards, buffer.done
    v, next_v, r, done = (x.T.contiguous()[..., None] for x in fields)  # [E, T, 1]

    def form(function: Callable[..., tuple[Tensor, Tensor]]) -> Work:
        def work() -> tuple[Tensor, Tensor]:
            advantages, returns = function(GAMMA, LAM, v, next_v, r, done, done)
            return advantages[..., 0].T, returns[..., 0].T

        return work

    return [form(functional.generalized_advantage_estimate), form(functional.vec_generalized_advantage_estimate)]


RIVALS: dict[str, Callable[[TamiyoRolloutBuffer], list[Work]]] = {
    "scalar": scalar_form,
    "SB3": sb3_form,
    "CleanRL": cleanrl_form,
    "TorchRL": torchrl_form,
}


if __name__ == "__main__":
    main()
