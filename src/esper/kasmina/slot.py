"""Slots: the modules that hold a seed and blend its Δ with the features h of a host module.

The forward hook of the host module calls `Slot.after`, which extracts the features from the output (`Select`)
and passes them through `Slot.forward`. That calls one function, chosen by the slot's `mode`.

Shapes of h: maps [B, C, H, W], sequences [B, T, D], vectors [B, D]. Its dtype and memory format are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from esper.kasmina import blueprints
from esper.kasmina.attention_masks import MaskArgument
from esper.kasmina.blueprints.registry import SPATIAL, FeatureSpec, Layout
from esper.kasmina.forking import ForkPlan
from esper.leyline.actions import Operator
from esper.leyline.errors import GraftError
from esper.leyline.stages import SeedStage

GATE_BIAS = 2.0
"""Initial gate bias. σ(2) ≈ 0.88 lets the seed learn at once without saturating the gate."""

TINY = 1e-12
"""Lower bound that keeps 1/rms finite where Δ and h are 0."""

MOST_PULL = 2.0
"""Upper bound of the pull, as a multiple of the gradient, so that positions with h = 0 do not dominate."""


def blend(h: Tensor, delta: Tensor, weight: Tensor, operator: Operator, out: Tensor | None = None) -> Tensor:
    """Return the features with the seed's change. The gradient of h has full strength at any weight.

    `weight` is alpha, a 0-dim tensor; for GATE it is alpha · gate(h). Without gradients the result can go to `out`.
    """
    delta, weight = delta.to(h.dtype), weight.to(h.dtype)  # dtypes may differ under autocast
    if operator == Operator.MULTIPLY:
        return torch.addcmul(h, h, weight * torch.tanh(delta), out=out)
    return torch.addcmul(h, delta, weight, out=out)  # one pass over memory; h + w·Δ takes two


class BlendGate(nn.Module):
    """Learned factor of Δ, 0…1, per sample (map, signal, volume, vector) or per token (sequence).

    A token's gate depends on that token alone: a mean over the sequence would not be causal.
    """

    def __init__(self, dim: int, layout: Layout) -> None:
        super().__init__()
        width = max(8, dim // 4)
        self.spatial = SPATIAL.get(layout, 0)
        self.hidden = nn.Linear(dim, width)
        self.score = nn.Linear(width, 1)
        nn.init.normal_(self.score.weight, std=0.1)  # outputs start near the bias, yet `hidden` gets a gradient
        nn.init.constant_(self.score.bias, GATE_BIAS)

    def forward(self, h: Tensor) -> Tensor:
        """Return the gate as [B, 1, 1, 1], [B, T, 1] or [B, 1], which broadcasts against h."""
        pooled = h.mean(tuple(range(-self.spatial, 0))) if self.spatial else h
        gate = torch.sigmoid(self.score(F.gelu(self.hidden(pooled))))
        for _ in range(self.spatial):
            gate = gate.unsqueeze(-1)
        return gate


class FeelNothing(torch.autograd.Function):
    """Return exactly `host` in the forward pass, and pass the gradient to both inputs in the backward pass.

    The seed learns from the host's error, and the host's gradient is the same as without a seed. A sum such as
    `host + (delta - delta.detach())` would turn one inf in the seed into a NaN in the host.
    """

    @staticmethod
    def forward(_ctx: Any, host: Tensor, _delta: Tensor) -> Tensor:
        """Return a copy of `host`."""
        return host.clone()  # a view would forbid in-place operations after the slot

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient for both inputs."""
        return grad, grad


class PullToZero(torch.autograd.Function):
    """Return Δ unchanged; backward adds a pull towards 0 as strong as the gradient where rms Δ = rms h.

    Straight-through gives a seed no feedback on its own output, so without a pull Δ diverges (measured: to 78–1567
    times h). With it Δ converges to −rms h · E[g] / E[rms g], with rms over the channels of a position and g the
    gradient there: as large as h where g is always the same, 0 where g averages out.
    """

    @staticmethod
    def forward(ctx: Any, delta: Tensor, h: Tensor, channel_axis: int) -> Tensor:
        """Return Δ and save Δ and rms h."""
        ctx.channel_axis = channel_axis
        ctx.save_for_backward(delta, _rms(h, channel_axis))
        return delta.view_as(delta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient plus the pull."""
        delta, reach = ctx.saved_tensors
        axis = ctx.channel_axis
        reach = torch.maximum(reach, _rms(delta, axis) / MOST_PULL).clamp(min=TINY)
        return grad + (delta * (_rms(grad, axis) / reach)).to(grad.dtype), None, None


def _rms(t: Tensor, channel_axis: int) -> Tensor:
    """Return the rms over the channels of each position, in float32 at least: squares overflow float16."""
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    return wide.square().mean(channel_axis, keepdim=True).sqrt()


def straight_through(h: Tensor, delta: Tensor, channel_axis: int) -> Tensor:
    """Return exactly h, while the seed behind Δ is trained through `PullToZero`. Needs no shadow pass."""
    return FeelNothing.apply(h, PullToZero.apply(delta, h.detach(), channel_axis))


def detached(h: Tensor) -> Tensor:
    """Return the features without a gradient path to the host.

    The result requires a gradient that is never used: GroupNorm's backward on channels_last features that do not
    require one crashes torch 2.13 on the CPU.
    """
    if torch.compiler.is_compiling():  # requires_grad_() on an intermediate breaks the graph
        return _Detached.apply(h)
    return h.detach().requires_grad_()


class _Detached(torch.autograd.Function):
    """`detach` for compiled graphs: no gradient reaches h, but the output requires one if h does."""

    @staticmethod
    def forward(_ctx: Any, h: Tensor) -> Tensor:
        """Return a view of h."""
        return h.view_as(h)

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> None:
        """Return no gradient."""
        return None


LOW_PRECISION = (torch.bfloat16, torch.float16)
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
                raise GraftError(f"select returns a {type(output).__name__} from the output of {owner}, not a tensor")
            return cls()
        key, rest = path[0], path[1:]
        keys = list(output) if isinstance(output, Mapping) else []
        keys = list(range(len(output))) if isinstance(output, (tuple, list)) else keys
        if key not in keys:
            raise GraftError(f"select={key!r} is not an item of the output of {owner}, which has {keys}")
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


Incubation = Literal["shadow", "straight_through"]
"""How a TRAINING seed learns: in a shadow pass of its own, or in the main pass by the straight-through estimator."""


class Mode(IntEnum):
    """What a slot does with the features. `Body.sync` sets one of the first three."""

    PASS = 0  # no seed, or one that the main pass does not use
    BLEND = 1  # from BLENDING on
    STRAIGHT_THROUGH = 2  # TRAINING with incubation "straight_through"
    SHADOW = 3  # during the shadow pass of this slot's seed
    FORK = 4  # during an evaluation of configurations that cover this slot

    @classmethod
    def of(cls, stage: SeedStage, incubation: Incubation) -> Mode:
        """Return the mode of a seed in the main pass."""
        if stage >= SeedStage.BLENDING:
            return cls.BLEND
        is_straight = stage == SeedStage.TRAINING and incubation == "straight_through"
        return cls.STRAIGHT_THROUGH if is_straight else cls.PASS


class Slot(nn.Module):
    """Hold at most one seed and blend it into the features that pass through."""

    alpha: Tensor

    def __init__(self, name: str, module_name: str, spec: FeatureSpec, select: Select) -> None:
        super().__init__()
        self.name = name
        self.module_name = module_name
        self.spec = spec
        self.select = select
        self.seed: nn.Module | None = None
        self.gate: nn.Module | None = None
        self.blueprint = ""
        self.rng_seed = 0  # random seed of the initial weights
        self.dtype = torch.float32  # of the seed's weights
        self.operator = Operator.ADD
        self.stage = SeedStage.DORMANT
        self.amplitude = 0.0  # alpha as a Python float, so that the buffer is written only when it changes
        self.mode = Mode.PASS
        self.shadow_input: Tensor | None = None  # detached features of the shadow pass
        self.fork: ForkPlan | None = None  # set in mode FORK
        self.mask_argument: MaskArgument | None = None  # of the host module
        self.register_buffer("alpha", torch.zeros(()), persistent=False)

    def plant(
        self,
        blueprint: str,
        operator: Operator,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rng_seed: int,
        host: nn.Module | None = None,
    ) -> None:
        """Build a seed and check it against the blueprint contract. The host's function does not change."""
        module = blueprints.build(blueprint, self.spec, device=device, dtype=dtype, rng_seed=rng_seed, host=host)
        blueprints.check(module, self.spec, name=blueprint)
        if self.spec.channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.seed = module
        self.blueprint = blueprint
        self.rng_seed = rng_seed
        self.dtype = dtype
        self.set_operator(operator)

    def set_operator(self, operator: Operator) -> None:
        """Set the blending operator. Create the gate module if the operator is GATE, remove it otherwise."""
        self.operator = operator
        if operator != Operator.GATE:
            self.gate = None
        elif self.gate is None:
            assert self.seed is not None
            anchor = next(self.seed.parameters())
            with blueprints.seeded(self.rng_seed):
                gate = blueprints.fitted(BlendGate(self.spec.dim, self.spec.layout), self.spec)
                self.gate = gate.to(anchor.device, anchor.dtype)

    def remove_seed(self) -> None:
        """Remove the seed and its gate."""
        self.seed = None
        self.gate = None
        self.blueprint = ""
        self.operator = Operator.ADD

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Forward hook: return the output with its features blended, or None to leave it unchanged."""
        if self.seed is None:
            return None
        h = self.select.get(output)
        if self.mask_argument is not None and getattr(self.seed, "takes_mask", False):
            y = self.forward(h, module.training, self.mask_argument.get(args, kwargs))
        else:
            y = self.forward(h, module.training)
        return None if y is h else self.select.put(output, y)

    def forward(self, h: Tensor, training: bool = False, mask: Any = None) -> Tensor:
        """Return the features after this slot. `training` is the mode of the host module, `mask` its own."""
        return FORWARDS[self.mode](self, h, training, mask)

    @contextmanager
    def shadowing(self) -> Iterator[None]:
        """Set mode SHADOW. Restore the mode and discard `shadow_input` on exit."""
        mode, self.mode = self.mode, Mode.SHADOW
        try:
            yield
        finally:
            self.mode = mode
            self.shadow_input = None

    def change(self, h: Tensor, mask: Any = None) -> Tensor:
        """Return the change that the seed at full strength adds to the features."""
        delta = self._applied(self._seed_for(h), h, *self._masks(mask, h))
        if self.operator == Operator.MULTIPLY:
            return h * torch.tanh(delta)
        return delta if self.gate is None else delta * self._applied(self.gate, h)

    def preserved_rng(self) -> AbstractContextManager[None]:
        """Return a context that restores the global random generator if the seed uses dropout."""
        assert self.seed is not None
        if torch.compiler.is_compiling() or not any(isinstance(m, _DropoutNd) for m in self.seed.modules()):
            return nullcontext()
        return torch.random.fork_rng(devices=[self.alpha.device] if self.alpha.is_cuda else [])

    def switched_on(self, h: Tensor, out: Tensor | None = None, mask: Any = None) -> Tensor:
        """Return the features with the seed on: at its current alpha, or at 1 before BLENDING."""
        weight = self.alpha if self.stage >= SeedStage.BLENDING else torch.ones_like(self.alpha)
        return self.blended(h, weight, out, mask)

    def blended(self, h: Tensor, weight: Tensor, out: Tensor | None = None, mask: Any = None) -> Tensor:
        """Return the features with the seed blended in at `weight`, written into `out` if given."""
        if torch.is_grad_enabled() and not h.requires_grad:
            h = detached(h)  # host layers before the slot are frozen; see `detached`
        delta = self._applied(self._seed_for(h), h, *self._masks(mask, h))
        weight = weight.to(h.dtype)
        if self.gate is not None:
            weight = weight * self._applied(self.gate, h).to(h.dtype)
        return blend(h, delta, weight, self.operator, out)

    def _applied(self, module: nn.Module, h: Tensor, *masks: Tensor) -> Tensor:
        """Return module(h). Features of lower precision than the weights, as with FSDP2's, are computed in theirs."""
        if h.dtype == self.dtype or h.dtype not in LOW_PRECISION or torch.is_autocast_enabled(h.device.type):
            return module(h, *masks)
        with torch.autocast(h.device.type, dtype=h.dtype):
            return module(h, *masks).to(h.dtype)

    def _masks(self, mask: Any, h: Tensor) -> tuple[Tensor, ...]:
        """Return the host module's mask in the form that a seed takes, if there is one that fits the features."""
        if mask is None or self.mask_argument is None:
            return ()
        batch_axis = self.spec.batch_axis
        fitting = self.mask_argument.for_features(mask, h.shape[batch_axis], h.shape[1 - batch_axis])
        return () if fitting is None else (fitting,)

    def _seed_for(self, h: Tensor) -> nn.Module:
        """Return the seed, moved to the device of the features."""
        assert self.seed is not None
        if self.alpha.device != h.device:
            self.to(h.device)
        return self.seed

    def extra_repr(self) -> str:
        """Return the slot's name, location, layout and seed for `repr`."""
        state = f"{self.blueprint} {self.stage.name} alpha={self.amplitude:.2f}" if self.seed is not None else "empty"
        return f"{self.name!r} after {self.module_name!r}, {self.spec.layout} of {self.spec.dim}: {state}"


# -- one function per mode


def _pass(_slot: Slot, h: Tensor, _training: bool, _mask: Any) -> Tensor:
    """Return the features unchanged."""
    return h


def _blend(slot: Slot, h: Tensor, _training: bool, mask: Any) -> Tensor:
    """Blend the seed in at the current alpha."""
    return slot.blended(h, slot.alpha, mask=mask)


def _straight_through(slot: Slot, h: Tensor, training: bool, mask: Any) -> Tensor:
    """Return the features unchanged; in training, the backward pass also trains the seed."""
    if not (training and torch.is_grad_enabled()):
        return h
    with slot.preserved_rng():
        return straight_through(h, slot.change(detached(h), mask), slot.spec.channel_axis)


def _shadow(slot: Slot, h: Tensor, _training: bool, mask: Any) -> Tensor:
    """Apply the seed at full strength to detached features, which become `shadow_input`."""
    slot.shadow_input = detached(h)
    return slot.switched_on(slot.shadow_input, mask=mask)


def _fork(slot: Slot, h: Tensor, _training: bool, mask: Any) -> Tensor:
    """Return the features of every row of the fork plan, which forks the first axis."""
    assert slot.fork is not None
    axis = slot.spec.batch_axis
    if axis == 0:
        return slot.fork.at_slot(slot.name, h, lambda rows, out: slot.switched_on(rows, out, mask))

    def switched_on(rows: Tensor, out: Tensor | None) -> Tensor:
        target = None if out is None else out.transpose(0, axis)
        return slot.switched_on(rows.transpose(0, axis), target, mask).transpose(0, axis)

    return slot.fork.at_slot(slot.name, h.transpose(0, axis), switched_on).transpose(0, axis)


FORWARDS: dict[Mode, Callable[[Slot, Tensor, bool, Any], Tensor]] = {
    Mode.PASS: _pass,
    Mode.BLEND: _blend,
    Mode.STRAIGHT_THROUGH: _straight_through,
    Mode.SHADOW: _shadow,
    Mode.FORK: _fork,
}


def grafted_module(model: nn.Module) -> str | None:
    """Return the name of the first module of a model that has a slot; None if there is none."""
    for name, module in model.named_modules():
        if any(isinstance(getattr(hook, "__self__", None), Slot) for hook in module._forward_hooks.values()):
            return name
    return None
