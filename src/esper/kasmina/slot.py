"""Slots: the modules that hold a seed and blend it into a host module's output.

The forward hook of the host module calls `Slot.after`, which extracts the features from the output (`Select`)
and passes them through `Slot.forward`. Its behaviour depends on `stage`, `alpha` and `incubating`, which only
`Body.sync` writes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from esper.kasmina import blueprints
from esper.kasmina.blending import Gate, blend, detached, straight_through
from esper.kasmina.feature_spec import FeatureSpec
from esper.kasmina.forking import ForkPlan
from esper.leyline.actions import Operator
from esper.leyline.errors import GraftError
from esper.leyline.stages import SeedStage

Path = tuple[int | str, ...]
"""Keys from a module's output to one of its items, outermost first."""


@dataclass(frozen=True, slots=True)
class Select:
    """Location of the features in a module's output: the output itself, or an item of a tuple, list or mapping."""

    key: int | str | None = None
    field: str = ""
    """Name of the item if the output is a named tuple, else ""."""
    is_list: bool = False
    inner: Select | None = None
    """Location within that item if it is itself a tuple, list or mapping."""

    @classmethod
    def at(cls, output: Any, path: Path, owner: str) -> Select:
        """Return the location of the tensor at `path` in an output of `owner`. Raise GraftError if there is none."""
        if not path:
            if not isinstance(output, Tensor):
                raise GraftError(f"what select names of {owner}'s output is a {type(output).__name__}, not a tensor")
            return cls()
        key, rest = path[0], path[1:]
        keys = list(output) if isinstance(output, Mapping) else []
        known = list(range(len(output))) if isinstance(output, (tuple, list)) else keys
        if key not in known:
            raise GraftError(f"select={key!r} for {owner}: its output has {known}")
        field = output._fields[key] if hasattr(output, "_fields") and isinstance(key, int) else ""
        inner = cls.at(output[key], rest, owner)
        return cls(key, field, isinstance(output, list), inner if rest else None)

    @property
    def path(self) -> Path:
        """Return the keys from the module's output to the features."""
        if self.key is None:
            return ()
        return (self.key, *(self.inner.path if self.inner else ()))

    def get(self, output: Any) -> Tensor:
        """Return the features in `output`."""
        if self.key is None:
            return output
        return self.inner.get(output[self.key]) if self.inner else output[self.key]

    def put(self, output: Any, features: Tensor) -> Any:
        """Return `output` with its features replaced. The original is not modified."""
        if self.key is None:
            return features
        item = self.inner.put(output[self.key], features) if self.inner else features
        if isinstance(output, Mapping):
            changed = copy.copy(output)
            changed[self.key] = item  # type: ignore[index]
            return changed
        if self.field:
            return output._replace(**{self.field: item})
        return type(output)(item if i == self.key else each for i, each in enumerate(output))


class Slot(nn.Module):
    """Hold at most one seed and blend it into the features that pass through."""

    alpha: Tensor

    def __init__(self, name: str, module_name: str, site: FeatureSpec, select: Select) -> None:
        super().__init__()
        self.name, self.module_name, self.site, self.select = name, module_name, site, select
        self.seed: nn.Module | None = None
        self.gate: nn.Module | None = None
        self.blueprint = ""
        self.birth = 0  # random seed of the initial weights
        self.operator = Operator.ADD
        self.stage = SeedStage.DORMANT
        self.amplitude = 0.0  # alpha as a Python float, so that the buffer is written only when it changes
        self.incubating = False  # train by the straight-through estimator in the main pass
        self.shadow = False  # shadow pass: apply the seed at full strength to detached features
        self.lesson: Tensor | None = None  # detached features of the shadow pass
        self.fork: ForkPlan | None = None  # set during one forked evaluation
        self.register_buffer("alpha", torch.zeros(()), persistent=False)

    def plant(self, blueprint: str, operator: Operator, *, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        """Build a seed and check it against the blueprint contract. The host's function does not change."""
        module = blueprints.build(blueprint, self.site, device=device, dtype=dtype, seed=seed)
        blueprints.check(module, self.site, name=blueprint)
        if self.site.channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.seed, self.blueprint, self.birth = module, blueprint, seed
        self.set_operator(operator)

    def set_operator(self, operator: Operator) -> None:
        """Set the blending operator. Create the gate module if the operator is GATE, remove it otherwise."""
        self.operator = operator
        if operator != Operator.GATE:
            self.gate = None
        elif self.gate is None:
            assert self.seed is not None
            anchor = next(self.seed.parameters())
            with blueprints.seeded(self.birth):
                self.gate = Gate(self.site.dim, self.site.layout).to(anchor.device, anchor.dtype)

    def uproot(self) -> None:
        """Remove the seed and its gate."""
        self.seed, self.gate, self.blueprint, self.operator = None, None, "", Operator.ADD

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: return the output with its features blended, or None to leave it unchanged."""
        if self.seed is None:
            return None
        h = self.select.get(output)
        y = self.forward(h, module.training)
        return None if y is h else self.select.put(output, y)

    def forward(self, h: Tensor, training: bool = False) -> Tensor:
        """Return the features after this slot, according to its stage and mode."""
        if self.fork is not None and self.name in self.fork.players:
            return self.fork.at_slot(self.name, h, self.switched_on)
        if self.stage >= SeedStage.BLENDING:
            return self.blended(h, self.alpha)
        if self.shadow:
            self.lesson = detached(h)
            return self.switched_on(self.lesson)
        if self.incubating and training and torch.is_grad_enabled():
            with self._own_luck():
                return straight_through(h, self.change(detached(h)))
        return h

    def change(self, h: Tensor) -> Tensor:
        """Return the change that the seed at full strength adds to the features."""
        delta = self._seed_for(h)(h)
        if self.operator == Operator.MULTIPLY:
            return h * torch.tanh(delta)
        return delta if self.gate is None else delta * self.gate(h)

    def _own_luck(self) -> AbstractContextManager[None]:
        """Return a context that restores the global random generator if the seed uses dropout."""
        assert self.seed is not None
        if torch.compiler.is_compiling() or not any(isinstance(m, _DropoutNd) for m in self.seed.modules()):
            return nullcontext()
        return torch.random.fork_rng(devices=[self.alpha.device] if self.alpha.is_cuda else [])

    def switched_on(self, h: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the features with the seed on: at its current alpha, or at 1 before BLENDING."""
        return self.blended(h, self.alpha if self.stage >= SeedStage.BLENDING else torch.ones_like(self.alpha), out)

    def blended(self, h: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the features with the seed blended in at `weight`, written into `out` if given."""
        if torch.is_grad_enabled() and not h.requires_grad:
            h = detached(h)  # host layers before the slot are frozen; see `detached`
        delta = self._seed_for(h)(h)
        weight = weight.to(h.dtype)
        if self.gate is not None:
            weight = weight * self.gate(h).to(h.dtype)
        return blend(h, delta, weight, self.operator, out)

    def _seed_for(self, h: Tensor) -> nn.Module:
        """Return the seed, moved to the device of the features."""
        assert self.seed is not None
        if self.alpha.device != h.device:
            self.to(h.device)
        return self.seed

    def extra_repr(self) -> str:
        """Return the slot's name, location, layout and seed for `repr`."""
        state = f"{self.blueprint} {self.stage.name} alpha={self.amplitude:.2f}" if self.seed is not None else "empty"
        return f"{self.name!r} after {self.module_name!r}, {self.site.layout} of {self.site.dim}: {state}"
