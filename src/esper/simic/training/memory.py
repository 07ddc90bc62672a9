"""How much memory a run will need, before it is needed.

An estimate: what is counted is exact (rollouts, data, weights), what is not (activations, the libraries themselves)
is rounded up.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.kasmina.body import Body
from esper.kasmina.probing import PROBE_SAMPLES, quietly
from esper.leyline.errors import ConfigError
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.env import GrowthVectorEnv
from esper.simic.ground import HostGround
from esper.simic.training.config import TrainConfig
from esper.tamiyo.policy.features import num_features

COPIES = 8
"""Of a host's weights: itself, gradients, optimiser (two), average, snapshot (weights, optimiser, average)."""
VALIDATED = 2048
"""Samples that a validation pass holds at once, at most."""
LAYERS = 64
"""Activations and gradients of a minibatch in the policy, in units of its width, per slot."""
PASSES = 4
"""Of a batch's activations: forward, backward, the lesson of a seed, and room for the allocator."""


def needed(config: TrainConfig, env: GrowthVectorEnv, hidden: int, ranks: int = 1) -> dict[str, int]:
    """Bytes that this process will need, by what for."""
    with torch.device("meta"):  # nothing is allocated
        buffer = TamiyoRolloutBuffer(
            steps=env.horizon, envs=config.envs, features=num_features(env.layout.slots), masks=env.layout.size,
            hidden=(hidden,), device="meta",
        )  # fmt: skip
    rollouts = 2 * sum(t.nbytes for t in (*buffer.fields(), buffer.advantages, buffer.returns))
    group = -(-config.envs // min(config.ppo.groups, config.envs))  # environments of one minibatch
    taught = env.horizon * group * (env.layout.slots + 2)  # rows
    found = {"the program": _now(), "rollouts": rollouts, "updates": LAYERS * 4 * taught * config.network.width}
    if isinstance(env.ground, HostGround):
        ground, mine = env.ground, -(-config.envs // ranks)
        params = ground.context.host_params + int(ground.context.slot_params.max(1).sum())
        found["hosts"] = mine * COPIES * 4 * params
        rows = max(ground.task.batch, min(VALIDATED, ground.task.val_size))
        found["activations"] = PASSES * rows * _sample_bytes(ground.engine.networks[0].body)
    return found


def _sample_bytes(body: Body) -> int:
    """Of everything that the host's modules hand on for one sample."""
    seen: list[int] = []

    def after(module: nn.Module, args: Any, output: Any) -> None:
        seen.extend(t.nbytes for t in tree_leaves(output) if isinstance(t, Tensor))

    leaves = [m for m in body.model.modules() if not any(True for _ in m.children())]
    handles = [m.register_forward_hook(after) for m in leaves]
    try:
        quietly(body.model, body.probe)
    finally:
        for handle in handles:
            handle.remove()
    return sum(seen) // PROBE_SAMPLES


def available() -> int | None:
    """Bytes that this machine, or what confines this process, can still give; None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        most = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, most - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass  # not confined
    return free


def told(need: dict[str, int], free: int | None, ranks: int = 1) -> str:
    """One line; raises where it does not fit."""
    total = sum(need.values()) * ranks
    parts = ", ".join(f"{name} {_size(b)}" for name, b in need.items() if b >= 1 << 20)
    text = f"memory: about {_size(total)}" + (f" in {ranks} processes" if ranks > 1 else "") + f" ({parts})"
    if free is None:
        return text
    more = total - need["the program"]  # the leading process is there already
    if more > free:
        raise ConfigError(
            f"this run needs about {_size(total)} ({parts}) and {_size(free)} are free: ask for fewer envs, epochs or "
            "workers, or use a larger machine"
        )
    return f"{text}; {_size(free)} free"


def _now() -> int:
    """What the process takes by itself: its libraries and the data."""
    try:
        import resource
    except ImportError:  # Windows does not say it so
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MB"
