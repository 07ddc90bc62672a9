"""Estimate the memory of a run before it starts.

Rollouts, data and weights are counted exactly; activations and libraries are estimated from above.
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
from esper.simic.env import Backend, GrowthVectorEnv, HostBackend
from esper.simic.family_backend import FamilyBackend
from esper.simic.training.config import TrainConfig
from esper.tamiyo.policy.features import num_features

COPIES = 8
"""Copies of a host's weights: weights, gradients, optimiser (two), average, snapshot (weights, optimiser, average)."""
VALIDATED = 2048
"""Maximum number of samples that a validation pass processes at once."""
LAYERS = 16
"""Activations and gradients of a minibatch in the policy, in multiples of its width, per slot. Measured: 10."""
FAMILY_SAMPLE = 8
"""Number of worlds of a family whose largest host stands for all."""
PASSES = 4
"""Multiples of a batch's activations: forward pass, backward pass, a seed's shadow pass, allocator overhead."""


def needed(config: TrainConfig, env: GrowthVectorEnv, ranks: int = 1) -> dict[str, int]:
    """Return the bytes that this process will need, by purpose."""
    with torch.device("meta"):  # allocates nothing
        buffer = TamiyoRolloutBuffer(
            steps=env.horizon, envs=config.envs, features=num_features(env.layout.slots), masks=env.layout.size,
            device="meta",
        )  # fmt: skip
    rollouts = 2 * sum(t.nbytes for t in (*buffer.fields(), buffer.advantages, buffer.returns))
    steps = -(-env.horizon * config.envs // config.ppo.minibatches)  # of one minibatch
    rows = steps * (env.layout.slots + 2)
    need = {"the program": _now(), "rollouts": rollouts, "updates": LAYERS * 4 * rows * config.network.width}
    hosts = _sample_hosts(env.backend)
    if hosts:
        mine = -(-config.envs // ranks)
        params = max(h.context.host_params + int(h.context.slot_params.max(1).sum()) for h in hosts)
        need["hosts"] = mine * COPIES * 4 * params
        need["activations"] = max(_activations(host) for host in hosts)
    if isinstance(env.backend, FamilyBackend):
        need["samples"] = mine * max(host.data.train.x.nbytes for host in hosts)
    return need


def _sample_hosts(backend: Backend) -> list[HostBackend]:
    """Return hosts whose sizes stand for all: the only one of a task, or those of some worlds of a family."""
    if isinstance(backend, FamilyBackend):
        return [backend.host(world) for world in range(FAMILY_SAMPLE)]
    return [backend] if isinstance(backend, HostBackend) else []


def _activations(host: HostBackend) -> int:
    batch = max(host.task.batch, min(VALIDATED, host.task.val_size))
    return PASSES * batch * _sample_bytes(host.engine.networks[0].body)


def _sample_bytes(body: Body) -> int:
    """Return the size of all module outputs of the host for one sample, in bytes."""
    sizes: list[int] = []

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        sizes.extend(t.nbytes for t in tree_leaves(output) if isinstance(t, Tensor))

    leaves = [m for m in body.model.modules() if not any(True for _ in m.children())]
    handles = [m.register_forward_hook(after) for m in leaves]
    try:
        quietly(body.model, body.probe)
    finally:
        for handle in handles:
            handle.remove()
    return sum(sizes) // PROBE_SAMPLES


def available() -> int | None:
    """Return the free memory of the machine or of the process's cgroup in bytes; None if it cannot be determined."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        most = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, most - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no cgroup limit
    return free


def describe(need: dict[str, int], free: int | None, ranks: int = 1) -> str:
    """Return the estimate as one line of text. Raise ConfigError if the run does not fit into `free` bytes."""
    total = sum(need.values()) * ranks
    parts = ", ".join(f"{name} {_size(b)}" for name, b in need.items() if b >= 1 << 20)
    text = f"memory: about {_size(total)}" + (f" in {ranks} processes" if ranks > 1 else "") + f" ({parts})"
    if free is None:
        return text
    more = total - need["the program"]  # the first process is already running
    if more > free:
        raise ConfigError(
            f"this run needs about {_size(total)} ({parts}) and {_size(free)} are free: use fewer envs, epochs or "
            "workers, or a larger machine"
        )
    return f"{text}; {_size(free)} free"


def _now() -> int:
    """Return the peak memory of this process so far in bytes: libraries and data."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MB"
