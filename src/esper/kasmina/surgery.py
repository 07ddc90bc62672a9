"""Surgery: carry out effects on one body and its one optimiser.

The optimiser gets one empty group for seeds, once, before any scheduler is built. From then on parameters
only move: into that group when a seed is built, out of it when the seed is dropped, into the group of the
module it follows when it is committed. Survivors keep their state; nothing is compared per batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from esper.kasmina.blueprints import blueprint_name
from esper.kasmina.body import Body
from esper.kasmina.lifecycle import Effect, EffectKind
from esper.kasmina.slot import Slot
from esper.leyline.actions import Operator
from esper.leyline.errors import OptimizerError
from esper.leyline.seeding import derive_seed
from esper.leyline.slot_table import SlotTable

SEED_GROUP = "esper_seeds"
"""The key that marks the seeds' group among `optimizer.param_groups`."""
REFUSED = {
    "Muon": "it updates matrices only, and seeds have biases and convolutions. Use AdamW or SGD.",
    "ZeroRedundancyOptimizer": "it shards its state when it is built. Use the plain optimiser with DDP.",
    "SparseAdam": "it takes sparse gradients only, and seeds have dense ones.",
}


class Surgeon:
    """Keeps modules and optimiser in step with the table of one environment."""

    def __init__(self, body: Body, optimizer: Optimizer, *, seed: int = 0, **seed_options: Any) -> None:
        refuse(body, optimizer)
        self.body, self.optimizer, self.seed = body, optimizer, seed
        self.on_change: list[Callable[[Effect, Slot], None]] = []
        self.names = list(body.slots)
        first = optimizer.param_groups[0]
        self.named = "param_names" in first
        options = {"lr": first["lr"], **({"weight_decay": 0.0} if "weight_decay" in first else {}), **seed_options}
        unknown = [k for k in options if k not in optimizer.defaults]
        if unknown:
            raise OptimizerError(
                f"{type(optimizer).__name__} has no option {unknown[0]!r}; it has {', '.join(optimizer.defaults)}"
            )
        group: dict[str, Any] = {"params": [], SEED_GROUP: True, **options}
        if self.named:
            group["param_names"] = []
        optimizer.add_param_group(group)
        self.group = optimizer.param_groups[-1]
        self.owner: dict[int, dict[str, Any]] = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        for slot in body.slots.values():
            if slot.seed is not None:
                self._adopt(slot)

    def carry_out(self, effects: list[Effect], table: SlotTable, env: int = 0) -> None:
        """Do what the rules ask of this environment, then let the slots follow the table."""
        changed = []
        for effect in effects:
            if effect.env == env:
                slot = self.body.slots[self.names[effect.slot]]
                _ACTS[effect.kind](self, slot, table, effect)
                table.params[env, effect.slot] = sum(p.numel() for p in slot.parameters())
                changed.append((effect, slot))
        self.body.sync(table, env)
        for effect, slot in changed:
            for listener in self.on_change:
                listener(effect, slot)

    # -- one method per effect

    def _build(self, slot: Slot, table: SlotTable, effect: Effect) -> None:
        at = effect.env, effect.slot
        serial = int(table.serial[at])
        self.body.plant(
            slot.name,
            blueprint_name(int(table.blueprint[at])),
            Operator(int(table.operator[at])),
            seed=derive_seed(self.seed, "seed", slot.name, serial),
        )
        self._adopt(slot)

    def _drop(self, slot: Slot, table: SlotTable, effect: Effect) -> None:
        for p in slot.parameters():
            self._release(p)
            p.grad = None
        slot.uproot()

    def _commit(self, slot: Slot, table: SlotTable, effect: Effect) -> None:
        homes = self._host_groups(slot)
        for name, p in slot.named_parameters():
            state = self.optimizer.state.get(p)
            self._release(p)
            if state is not None:
                self.optimizer.state[p] = state
            self._join(homes[p.ndim > 1], f"esper.{slot.name}.{name}", p)

    def _set_operator(self, slot: Slot, table: SlotTable, effect: Effect) -> None:
        for p in slot.parameters():
            if slot.gate is not None and any(p is q for q in slot.gate.parameters()):
                self._release(p)
        slot.set_operator(Operator(int(table.operator[effect.env, effect.slot])))
        self._adopt(slot)

    # -- the optimiser's books

    def _adopt(self, slot: Slot) -> None:
        """Give the seed group whatever of this slot it does not have yet."""
        for name, p in slot.named_parameters():
            if id(p) not in self.owner:
                self._join(self.group, f"esper.{slot.name}.{name}", p)

    def _join(self, group: dict[str, Any], name: str, p: nn.Parameter) -> None:
        group["params"].append(p)
        if self.named:
            group["param_names"].append(name)
        self.owner[id(p)] = group
        if group.get("fused") and group.get("momentum"):  # fused SGD takes buffers for all of a group, or for none
            self.optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))

    def _release(self, p: nn.Parameter) -> None:
        group = self.owner.pop(id(p), None)
        if group is None:
            return
        index = next(i for i, q in enumerate(group["params"]) if q is p)
        del group["params"][index]
        if self.named:
            del group["param_names"][index]
        self.optimizer.state.pop(p, None)

    def _host_groups(self, slot: Slot) -> dict[bool, dict[str, Any]]:
        """Where a fossil's vectors (False) and matrices (True) belong: with those of the module it follows.

        So a user's decay and no-decay groups keep their meaning.
        """
        homes: dict[bool, dict[str, Any]] = {}
        names = slot.module_name.split(".")
        for depth in range(len(names), -1, -1):
            for p in self.body.model.get_submodule(".".join(names[:depth])).parameters():
                group = self.owner.get(id(p))
                if group is not None and group is not self.group:
                    homes.setdefault(p.ndim > 1, group)
            if len(homes) == 2:
                break
        fallback = homes.get(True) or homes.get(False) or self.optimizer.param_groups[0]
        return {kind: homes.get(kind, fallback) for kind in (False, True)}

    def reload(self) -> None:
        """The body was rebuilt from a file: forget parameters that are gone, take in those that came."""
        alive = {id(p) for p in self.body.parameters()}
        for group in self.optimizer.param_groups:
            for p in [p for p in group["params"] if id(p) not in alive and id(p) in self.owner]:
                if group is self.group:
                    self._release(p)
        for slot in self.body.slots.values():
            self._adopt(slot)


_ACTS: dict[EffectKind, Callable[[Surgeon, Slot, SlotTable, Effect], None]] = {
    EffectKind.BUILD: Surgeon._build,
    EffectKind.DROP: Surgeon._drop,
    EffectKind.COMMIT: Surgeon._commit,
    EffectKind.SET_OPERATOR: Surgeon._set_operator,
}


def refuse(body: Body, optimizer: Optimizer) -> None:
    """Say clearly what cannot follow growth, before anything is changed."""
    kind = type(optimizer).__name__
    if not isinstance(body, Body):
        raise OptimizerError(f"expected a body from esper.graft, got {type(body).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"expected a torch.optim.Optimizer, got {kind}")
    if isinstance(optimizer, LBFGS):
        raise OptimizerError("LBFGS keeps one flat history of all parameters and cannot grow. Use SGD or AdamW.")
    if kind in REFUSED:
        raise OptimizerError(f"{kind} cannot follow growth: {REFUSED[kind]}")
    if any(type(p).__name__ == "DTensor" for p in body.parameters()):
        raise OptimizerError("the model's parameters are sharded (FSDP); seeds cannot join later. Use DDP.")
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    if not any(id(p) in held for p in body.model.parameters()):
        raise OptimizerError(
            "this optimiser holds no parameter of the model. Build it from body.parameters() after grafting."
        )
    if any(g.get(SEED_GROUP) for g in optimizer.param_groups):
        raise OptimizerError("this optimiser has a seed group already: one optimiser serves one grower.")
    if hasattr(optimizer.step, "_wrapped_by_lr_sched") or any("initial_lr" in g for g in optimizer.param_groups):
        raise OptimizerError(
            "a scheduler was built on this optimiser before the grower. Build the grower first: it adds the "
            "group for seeds, and most schedulers read the groups only once."
        )


@torch.no_grad()
def clip_separately(groups: list[list[nn.Parameter]], max_norm: float) -> list[torch.Tensor]:
    """Clip each list of parameters to its own norm, in one sweep, so that none spends another's budget.

    Returns the norm of every gradient, list by list, still on the device.
    """
    with_grad = [[p.grad for p in group if p.grad is not None] for group in groups]
    flat = [g for grads in with_grad for g in grads]
    if not flat:
        return [torch.zeros(0) for _ in groups]
    norms = torch.stack(torch._foreach_norm(flat)).split([len(g) for g in with_grad])
    for grads, each in zip(with_grad, norms, strict=True):
        if grads:
            total = torch.linalg.vector_norm(each)
            torch._foreach_mul_(grads, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return list(norms)
