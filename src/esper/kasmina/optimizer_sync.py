"""Structural changes: apply effects to one body and keep its optimiser in sync; clip and sample its gradients.

One empty parameter group for seeds is added to the optimiser, once, before any scheduler is built. Afterwards
parameters only move: into that group when a seed is built, out of it when the seed is dropped, into the group
of the module it follows when it is committed. Other parameters keep their state. There is no per-batch work.

FSDP2 (`fully_shard`) may shard the host over ranks; a seed is whole on every rank. Functions that need the other ranks
are collective: every rank must call them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.blueprints import blueprint_name
from esper.kasmina.body import Body
from esper.kasmina.slot import Slot, grafted_module
from esper.leyline.actions import Operator
from esper.leyline.errors import GraftError, OptimizerError
from esper.leyline.lifecycle import Effect, EffectKind
from esper.leyline.rng import derive_seed
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage

SEED_GROUP = "esper_seeds"
"""Key that marks the seeds' group among `optimizer.param_groups`."""
SHARDING_WAY_OUT = "Use DDP(body), or FSDP2: torch.distributed.fsdp.fully_shard(body.model)."
REFUSED = {
    "LBFGS": "it keeps one flat history of all parameters. Use SGD or AdamW.",
    "Muon": "it updates matrices only, and seeds have biases and convolutions. Use AdamW or SGD.",
    "ZeroRedundancyOptimizer": "it shards its state when it is built. Use the plain optimiser with DDP.",
    "FullyShardedDataParallel": f"FSDP1 flattens parameters, so seeds cannot be added. {SHARDING_WAY_OUT}",
    "DeepSpeedEngine": f"DeepSpeed partitions parameters and replaces the optimiser. {SHARDING_WAY_OUT}",
    "SparseAdam": "it takes sparse gradients only, and seeds have dense ones.",
}
"""Class names of unsupported optimisers and wrappers, each with the reason and an alternative."""
WRAPPERS = ("AcceleratedOptimizer", "LightningOptimizer")
"""Class names of wrappers around a torch optimiser, which is their attribute `optimizer`."""


class OptimizerSync:
    """Keep the modules and the optimiser consistent with the table of one environment."""

    def __init__(self, body: Body, optimizer: Optimizer, *, rng_seed: int = 0, **seed_options: Any) -> None:
        refuse(body, optimizer)
        self.body = body
        self.optimizer = optimizer
        self.rng_seed = rng_seed
        self.on_change: list[Callable[[Effect, Slot], None]] = []
        self.names = list(body.slots)
        self.positions: dict[nn.Parameter, tuple[int, int]] = {}  # seed parameter → (slot index, index within the slot)
        self.seed_group = len(optimizer.param_groups)  # index of the seeds' group: loading a state replaces the dicts
        optimizer.add_param_group(seed_group(optimizer, seed_options))
        self.reload()

    @property
    def group(self) -> dict[str, Any]:
        """Return the parameter group of the seeds."""
        return self.optimizer.param_groups[self.seed_group]

    def carry_out(self, effects: list[Effect], table: SlotTable, env: int = 0) -> None:
        """Apply the effects of this environment, sync the slots with the table and call the `on_change` listeners."""
        changed = []
        for effect in effects:
            if effect.env == env:
                slot = self.body.slots[self.names[effect.slot]]
                self._apply(effect.kind, slot, table, (env, effect.slot))
                table.params[env, effect.slot] = sum(p.numel() for p in slot.parameters())
                changed.append((effect, slot))
        self.body.sync(table, env)
        for effect, slot in changed:
            for listener in self.on_change:
                listener(effect, slot)

    def reload(self) -> None:
        """Update the optimiser after the body was rebuilt from a state: release removed parameters, add new ones."""
        alive = set(self.body.parameters())
        for p in [p for p in self.positions if p not in alive]:
            self._release(p)
        for slot in self.body.slots.values():
            self._settle(slot, committed=slot.stage == SeedStage.FOSSILIZED)

    def _apply(self, kind: EffectKind, slot: Slot, table: SlotTable, at: tuple[int, int]) -> None:
        """Carry out one effect: plant the seed that the table describes, remove or commit it, or set its operator."""
        if kind == EffectKind.BUILD:
            rng_seed = derive_seed(self.rng_seed, "seed", slot.name, int(table.serial[at]))
            operator = Operator(int(table.operator[at]))
            blueprint = blueprint_name(int(table.blueprint[at]))
            self.body.plant(slot.name, blueprint, operator, rng_seed=rng_seed)
            self._settle(slot)
        elif kind == EffectKind.DROP:
            self._drop(slot)
        elif kind == EffectKind.COMMIT:
            self._settle(slot, committed=True)
        else:
            self._set_operator(slot, Operator(int(table.operator[at])))

    def _drop(self, slot: Slot) -> None:
        """Remove a seed and its parameters."""
        for p in slot.parameters():
            self._release(p)
            p.grad = None
        slot.remove_seed()

    def _set_operator(self, slot: Slot, operator: Operator) -> None:
        """Change the blending operator and update the optimiser for an added or removed gate."""
        if slot.gate is not None:
            for p in slot.gate.parameters():
                self._release(p)
        slot.set_operator(operator)
        self._settle(slot)

    # -- optimiser groups and state

    def _settle(self, slot: Slot, *, committed: bool = False) -> None:
        """Move a slot's parameters, with their state, to the seeds' group or, once committed, to the host's groups."""
        holder = {p: i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        committed = committed and not any(is_sharded(p) for p in holder)  # torch updates no group of both kinds
        homes = self._host_groups(slot, holder) if committed else {}
        for place, (name, p) in enumerate(slot.named_parameters()):
            home = homes[p.ndim > 1] if committed else self.seed_group
            position = self.names.index(slot.name), place
            if holder.get(p) == home or (committed and p in holder and p not in self.positions):
                self.positions[p] = position  # already in the right group, or in one the user chose
                continue
            state = self.optimizer.state.get(p)
            self._release(p)
            self._join(home, f"esper.{slot.name}.{name}", p, position)
            if state is not None:
                self.optimizer.state[p] = state
        for home in {self.seed_group, *homes.values()}:
            self._even_out(self.optimizer.param_groups[home])

    def _join(self, home: int, name: str, p: nn.Parameter, position: tuple[int, int]) -> None:
        """Insert a parameter after the host's own, sorted by slot, so that a saved optimiser state always matches."""
        group = self.optimizer.param_groups[home]
        later = (i for i, q in enumerate(group["params"]) if self.positions.get(q, ()) > position)
        index = next(later, len(group["params"]))
        group["params"].insert(index, p)
        if "param_names" in group:
            group["param_names"].insert(index, name)
        self.positions[p] = position

    def _release(self, p: nn.Parameter) -> None:
        """Remove a parameter and its state from the optimiser."""
        self.positions.pop(p, None)
        self.optimizer.state.pop(p, None)
        for group in self.optimizer.param_groups:
            for index, q in enumerate(group["params"]):
                if q is p:
                    del group["params"][index]
                    if "param_names" in group:
                        del group["param_names"][index]
                    return

    def _even_out(self, group: dict[str, Any]) -> None:
        """Fill missing momentum buffers with zeros: fused SGD requires them for all parameters of a group or none."""
        if group.get("fused") and group.get("momentum"):
            for p in group["params"]:
                if p.requires_grad or p in self.positions:
                    self.optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))

    def _host_groups(self, slot: Slot, holder: dict[nn.Parameter, int]) -> dict[bool, int]:
        """Return the groups for a fossil's vectors (False) and matrices (True): those of the module it follows.

        This preserves a user's split into groups with and without weight decay.
        """
        homes: dict[bool, int] = {}
        names = slot.module_name.split(".")
        for depth in range(len(names), -1, -1):
            for p in self.body.model.get_submodule(".".join(names[:depth])).parameters():
                if holder.get(p, self.seed_group) != self.seed_group:
                    homes.setdefault(p.ndim > 1, holder[p])
            if len(homes) == 2:
                break
        fallback = next(iter(homes.values()), 0)
        return {kind: homes.get(kind, fallback) for kind in (False, True)}


def seed_group(optimizer: Optimizer, options: dict[str, Any]) -> dict[str, Any]:
    """Return an empty group for seeds: the first group's learning rate and no weight decay, unless in `options`."""
    first = optimizer.param_groups[0]
    lr = first["lr"].clone() if isinstance(first["lr"], torch.Tensor) else first["lr"]
    options = {"lr": lr, **({"weight_decay": 0.0} if "weight_decay" in first else {}), **options}
    unknown = [k for k in options if k not in optimizer.defaults]
    if unknown:
        raise OptimizerError(
            f"{type(optimizer).__name__} has no option {unknown[0]!r}; it has {', '.join(optimizer.defaults)}"
        )
    group = {"params": [], SEED_GROUP: True, **options}
    if "param_names" in first:
        group["param_names"] = []
    if "initial_lr" in first:  # from a run with a scheduler; the next scheduler requires it in every group
        group["initial_lr"] = options["lr"]
    return group


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimiser in the wrapper of a training library."""
    while type(optimizer).__name__ in WRAPPERS:
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def refuse_scheduled(optimizer: Optimizer) -> None:
    """Raise OptimizerError if a scheduler was built on this optimiser."""
    if hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched"):
        raise OptimizerError(
            "a scheduler was built on this optimiser before the grower. Build the grower first: it adds the "
            "group for seeds, and most schedulers read the groups only once."
        )


def refuse(body: Body, optimizer: Any) -> None:
    """Raise OptimizerError if the body or optimiser does not support growth, before anything is changed."""
    refuse_ungrafted(body)
    if not isinstance(optimizer, Optimizer):
        is_class = isinstance(optimizer, type)
        got = f"the class {optimizer.__name__}" if is_class else type(optimizer).__name__
        example = optimizer.__name__ if is_class else "torch.optim.AdamW"
        way_out = f"Pass an instance, such as {example}(body.parameters(), lr=0.001)."
        if "deepspeed" in type(optimizer).__module__:
            way_out = f"DeepSpeed is not supported. {SHARDING_WAY_OUT}"
        raise OptimizerError(f"expected an optimiser of torch, got {got}. {way_out}")
    refuse_kind(optimizer)
    refuse_sharding(body, optimizer)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    is_frozen = not any(p.requires_grad for p in body.model.parameters())
    if not is_frozen and not held & set(body.model.parameters()):
        raise OptimizerError(
            "this optimiser holds no parameter of the model. Build it from body.parameters() after grafting."
        )
    if any(g.get(SEED_GROUP) for g in optimizer.param_groups):
        raise OptimizerError(
            "this optimiser has a seed group already: one optimiser serves one grower. Build a new optimiser."
        )
    refuse_scheduled(optimizer)


def refuse_ungrafted(body: nn.Module) -> None:
    """Raise GraftError if a model is not a body, OptimizerError if it is an unsupported wrapper."""
    if not isinstance(body, Body):
        refuse_kind(body)
        raise GraftError(not_a_body(body, "Graft the model first."))


def not_a_body(model: object, way_out: str) -> str:
    """Return the message about a model that is not a body, with this way out if it has no slots."""
    inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
    if isinstance(inner, Body):
        way_out = "Pass the body that it wraps."
    elif isinstance(model, nn.Module) and grafted_module(model) is not None:
        way_out = "It has slots: pass the body that esper.graft returned."
    return f"expected a body from esper.graft, got {type(model).__name__}. {way_out}"


def refuse_kind(instance: object) -> None:
    """Raise OptimizerError if an optimiser or wrapper is of an unsupported class."""
    for ancestor in type(instance).__mro__:
        if ancestor.__name__ in REFUSED:
            raise OptimizerError(f"{type(instance).__name__} does not support growth: {REFUSED[ancestor.__name__]}")


def refuse_sharding(body: Body, optimizer: Optimizer) -> None:
    """Raise OptimizerError for a kind of sharding to which no seed can be added."""
    params = [*body.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    if any(hasattr(p, "_fsdp_flattened") or type(p).__name__ == "FlatParameter" for p in params):
        raise OptimizerError(f"FSDP1 (FullyShardedDataParallel) flattens the model's parameters. {SHARDING_WAY_OUT}")
    if any(hasattr(p, "ds_id") for p in params):
        raise OptimizerError(f"DeepSpeed partitions the model's parameters. {SHARDING_WAY_OUT}")
    if any(is_sharded(p) for p in body.esper.parameters()):
        raise OptimizerError("the seeds are sharded, too. Shard the model without them: fully_shard(body.model).")
    if any(is_sharded(p) for p in body.parameters()):
        kinds = {base.__name__ for module in body.modules() for base in type(module).__mro__}
        if "FSDPModule" not in kinds:
            raise OptimizerError(f"the model's parameters are DTensors, but not of fully_shard. {SHARDING_WAY_OUT}")


@torch.no_grad()
def clip_separately(groups: list[list[nn.Parameter]], max_norm: float) -> list[torch.Tensor]:
    """Clip each list of parameters to its own gradient norm, in one sweep. Lists do not share a norm budget.

    Return the norm of every gradient, list by list, on the device.
    """
    with_grad = [[p.grad for p in group if p.grad is not None] for group in groups]
    flat = [g for grads in with_grad for g in grads]
    if not flat:
        return [torch.zeros(0) for _ in groups]
    norms = norms_of(flat).split([len(g) for g in with_grad])
    for grads, each in zip(with_grad, norms, strict=True):
        if grads:
            total = torch.linalg.vector_norm(each)
            torch._foreach_mul_([local_part(g) for g in grads], clip_factor(total, max_norm))
    return list(norms)


def clip_factor(total_norm: Tensor, max_norm: float) -> Tensor:
    """Return what gradients of this total norm are multiplied by, at most 1; elementwise over several norms."""
    return (max_norm / (total_norm + 1e-6)).clamp(max=1.0)


VANISHING, EXPLODING = 1e-7, 10.0
"""A gradient tensor counts as dead if its norm is below the first, as exploding if it is above the second."""
RATIO_CAP, RATIO_KEEP = 10.0, 0.9


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Gradient statistics of one seed."""

    norm: float
    ratio: float
    """Seed gradient over host gradient, each divided by the square root of its parameter count; smoothed."""
    health: float
    """1 minus half the share of dead tensors; 0 if any tensor explodes or is not finite."""


@dataclass(slots=True)
class GradientMeter:
    """Keep the latest sample per slot as device tensors."""

    stride: int = 10
    latest: dict[str, Tensor] = field(default_factory=dict)  # slot → [norm, ratio, health]
    smoothed: dict[str, float] = field(default_factory=dict)

    def due(self, batch: int) -> bool:
        """Return whether this batch is sampled: every `stride`-th, none if `stride` is 0."""
        return self.stride > 0 and batch % self.stride == 0

    def take(self, host: Tensor, seeds: dict[str, Tensor], host_size: int, sizes: dict[str, int]) -> None:
        """Sample from the norms of the gradient tensors of the host and of each seed. Does not sync the device."""
        per_host = torch.linalg.vector_norm(host) / max(host_size, 1) ** 0.5
        for slot, norms in seeds.items():
            if not norms.numel():
                continue
            total = torch.linalg.vector_norm(norms)
            ratio = total / max(sizes[slot], 1) ** 0.5 / per_host.clamp(min=1e-30)
            ratio = torch.where(per_host < 1e-8, 0.0, ratio.clamp(max=RATIO_CAP))
            alive = 1.0 - 0.5 * (norms < VANISHING).float().mean()
            sound = torch.isfinite(norms).all() & (norms <= EXPLODING).all()
            self.latest[slot] = torch.stack([total, ratio, torch.where(sound, alive, 0.0)])

    def pending(self) -> Tensor:
        """Return the samples since the last `read`, three numbers per slot, on the device."""
        return torch.cat(list(self.latest.values())) if self.latest else torch.zeros(0)

    def read(self, numbers: Sequence[float]) -> dict[str, GradientStats]:
        """Return statistics from the numbers of `pending`. A slot that was not sampled is absent."""
        stats = {}
        for i, slot in enumerate(self.latest):
            norm, ratio, health = numbers[3 * i : 3 * i + 3]
            if math.isfinite(ratio):  # a non-finite ratio is reported but kept out of the moving average
                ratio = RATIO_KEEP * self.smoothed.get(slot, ratio) + (1 - RATIO_KEEP) * ratio
                self.smoothed[slot] = ratio
            stats[slot] = GradientStats(norm, ratio, health)
        self.latest = {}
        return stats

    def forget(self, slot: str) -> None:
        """Remove the samples of a slot."""
        self.latest.pop(slot, None)
        self.smoothed.pop(slot, None)


def gradient_norms(params: list[nn.Parameter]) -> Tensor:
    """Return the norm of each gradient, on the device."""
    grads = [p.grad for p in params if p.grad is not None]
    return norms_of(grads) if grads else torch.zeros(0)


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is sharded over ranks."""
    return type(tensor) is not Tensor and hasattr(tensor, "full_tensor")


def local_part(tensor: Any) -> Tensor:
    """Return the part of a sharded tensor on this rank, in the same memory; a plain tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Any) -> Any:
    """Return a sharded tensor as a plain one (collective), anything else unchanged."""
    return tensor.detach().full_tensor() if is_sharded(tensor) else tensor


def sharded_like(tensor: Tensor, like: Any) -> Tensor:
    """Return this rank's view of a whole tensor, sharded as `like` is. All ranks must have the same tensor."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    on_device = tensor.to(like.to_local().device)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor, on the device. Collective if one of them is sharded."""
    norms = torch.stack(torch._foreach_norm([local_part(t) for t in tensors]))
    sharded: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if is_sharded(tensor):
            sharded.setdefault((tensor.device_mesh, tensor.placements), []).append(i)  # type: ignore[attr-defined]
    for (mesh, placements), indices in sharded.items():
        from torch.distributed.tensor import DTensor, Partial, Replicate

        parts = [Partial() if placement.is_shard() else Replicate() for placement in placements]
        squares = DTensor.from_local(norms[indices].square(), mesh, parts, run_check=False)
        norms[indices] = squares.full_tensor().sqrt()
    return norms
