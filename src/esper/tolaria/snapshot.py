"""Snapshots of one host: the state a rollback restores, and the tensors that must stay finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.kasmina.forking import ForkPoint
from esper.leyline.errors import TrainingError
from esper.leyline.stages import SeedStage
from esper.tolaria.weight_average import WeightAverage, norm_statistics

if TYPE_CHECKING:
    from esper.tolaria.host_network import HostNetwork


class Snapshot:
    """A copy of one environment's host and fossils with their optimiser state and averages.

    `restore` writes into the tensors that the snapshot was taken of, so references to them (optimiser, average, hooks)
    stay valid. Live seeds are not part of it: a rollback drops them.
    """

    def __init__(self, network: HostNetwork) -> None:
        self.network = network
        self.tensors: list[Tensor] = []
        self.copies: list[Tensor] = []

    @property
    def is_taken(self) -> bool:
        """Whether there is a snapshot to restore."""
        return bool(self.tensors)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the current state, into the previous snapshot's memory if nothing was committed since.

        Raise TrainingError if anything is not finite; the previous snapshot is kept then.
        """
        body, optimizer, average = self.network.body, self.network.optimizer, self.network.average
        fossils = [slot.name for slot in body.slots.values() if slot.stage == SeedStage.FOSSILIZED]
        params, tensors = self._host_tensors(fossils)
        state = {p: dict(optimizer.state[p]) for p in params if p in optimizer.state}
        tensors += state_tensors(optimizer, params)
        if not bool(largest(tensors).isfinite()):  # sync: once per snapshot
            raise TrainingError("no snapshot is taken: weights, norm statistics or optimiser state are not finite")
        options = [_options(group) for group in optimizer.param_groups]
        if len(tensors) == len(self.tensors) and all(a is b for a, b in zip(tensors, self.tensors, strict=True)):
            torch._foreach_copy_(self.copies, tensors)
        else:
            self.tensors, self.copies = tensors, [t.detach().clone() for t in tensors]
        self.params, self.state, self.updates = params, state, average.updates
        self.fossils, self.options = fossils, options
        self.forking = body.forking.failure, set(body.forking.proven)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state bit for bit. Allocates next to no memory, because there may be none left."""
        body, optimizer = self.network.body, self.network.optimizer
        torch._foreach_copy_(self.tensors, self.copies)
        for p in self.params:
            if p in self.state:
                optimizer.state[p] = dict(self.state[p])
            else:
                optimizer.state.pop(p, None)
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(_options(options))
        self.network.average.updates = self.updates
        body.forking.failure, body.forking.proven = self.forking[0], set(self.forking[1])

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshot. Tensors of the optimiser state are in `copies`; `state` has None in their place."""
        return {
            "fossils": list(self.fossils),
            "copies": list(self.copies),
            "state": [
                {k: None if isinstance(v, Tensor) else (v,) for k, v in self.state[p].items()}
                if p in self.state
                else None
                for p in self.params
            ],
            "updates": self.updates,
            "options": [dict(options) for options in self.options],
            "forking": (self.forking[0], tuple((p.at_input, p.name) for p in sorted(self.forking[1]))),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned in another process. The network must have loaded its own state before."""
        optimizer = self.network.optimizer
        self.fossils = list(state["fossils"])
        self.params, self.tensors = self._host_tensors(self.fossils)
        self.state = {
            p: {k: optimizer.state[p][k] if v is None else v[0] for k, v in values.items()}
            for p, values in zip(self.params, state["state"], strict=True)
            if values is not None
        }
        self.tensors += [v for each in self.state.values() for v in each.values() if isinstance(v, Tensor)]
        self.copies = [torch.empty_like(t).copy_(c) for t, c in zip(self.tensors, state["copies"], strict=True)]
        self.updates, self.options = state["updates"], [dict(options) for options in state["options"]]
        self.forking = state["forking"][0], {ForkPoint(*point) for point in state["forking"][1]}

    def _host_tensors(self, fossils: Sequence[str]) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return the parameters of host and fossils, and these with their buffers and averages."""
        body, average = self.network.body, self.network.average
        modules = [body.model, *(body.slots[name] for name in fossils)]
        params = [p for module in modules for p in module.parameters()]
        averages = average.by_tensor()
        live: list[Tensor] = [*params, *(b for module in modules for b in module.buffers())]
        return params, [*live, *(averages[t] for t in live if t in averages)]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an optimiser group: everything but its parameters."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}


def vital_tensors(
    modules: Sequence[nn.Module], average: WeightAverage, optimizer: torch.optim.Optimizer
) -> list[Tensor]:
    """Return what must stay finite: weights, their averages and optimiser state, and the statistics of norms."""
    averages = average.by_tensor()
    params = [p for module in modules for p in module.parameters()]
    live: list[Tensor] = [*params, *(b for module in modules for b in norm_statistics(module))]
    return [*live, *(averages[t] for t in live), *state_tensors(optimizer, params)]


def state_tensors(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the tensors of the optimiser's state for these parameters."""
    return [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]


@torch.no_grad()
def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in these tensors, on the device; NaN if any value is NaN."""
    numbers = [t for t in tensors if t.is_floating_point() and t.numel()]
    return torch.stack([n.float() for n in torch._foreach_norm(numbers, inf)]).max()
