"""Batched modules: run one module's forward code once with the weights of R modules of the same structure.

Features of all rows are concatenated: maps [B, R·C, H, W], vectors [B, R, D]. Layers with weights are replaced by
batched versions that compute each row with its own weights (`RULES`). At a slot of a host the rows are separated: seeds
of the same kind run through one batched module, any other seed runs by itself.

Legend: R rows (hosts or seeds in one pass), B samples, C channels, D features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.body import Body
from esper.kasmina.slot import Mode, Slot, detached
from esper.leyline.actions import Operator
from esper.leyline.errors import ConfigError

Member = tuple[int, Slot]
"""A row (environment) and one of its slots."""


class Code:
    """A module whose layers with weights compute R rows separately; all other layers run unchanged."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        for name, part in module.named_modules():
            if (rule := RULES.get(type(part))) is not None:
                part.forward = partial(rule, self, f"{name}." if name else "", part)
            elif next(part.parameters(recurse=False), None) is not None or part._buffers:
                raise ConfigError(f"no rule for the weights of {name or 'the model itself'}, {type(part).__name__}")
        self.tensors: dict[str, Tensor] = {}  # [R, …] parameters and buffers of this pass
        self.rows = 0

    def apart(self, h: Tensor) -> Tensor:
        """Return features as [B, R, C, …]: linear layers return vectors so, other layers concatenate the rows."""
        return h if h.dim() == 3 else h.unflatten(1, (self.rows, -1))


class Wide(Code):
    """The batched module of a host."""

    def __init__(self, host: Body) -> None:
        body = copy.deepcopy(host)
        for name, slot in body.slots.items():
            slot.remove_seed()
            slot.seed = nn.Identity()  # the slot's hook calls `forward` only if it has a seed
            slot.forward = partial(self._at_slot, name)  # type: ignore[method-assign]
        super().__init__(body.model)
        self.groups_at: dict[str, list[list[Member]]] = {}  # slot → groups of seeds that run together
        self.kinds: dict[Slot, Hashable] = {}
        self.seeds: dict[Hashable, WideSeed | None] = {}
        self.errors: dict[Slot, Exception] = {}

    def begin(self) -> None:
        """Start an epoch: discard the kinds of the previous epoch's seeds and its errors."""
        self.kinds = {}
        self.errors = {}

    def __call__(self, tensors: dict[str, Tensor], active: Iterable[Member], x: Tensor) -> Tensor:
        """Return the outputs [R, B, V] of inputs [R, B, …]; `active` lists the seeds that take part, by row."""
        self.tensors = tensors
        self.rows = len(x)
        self.groups_at = {}
        groups: dict[Hashable, list[Member]] = {}
        for row, slot in active:
            groups.setdefault((slot.name, slot.mode, self._kind(slot, x.shape[1])), []).append((row, slot))
        for group in groups.values():
            self.groups_at.setdefault(group[0][1].name, []).append(group)
        wide = x.transpose(1, 2).flatten(0, 1).contiguous() if x.dim() == 5 else x  # [R·C, B, H, W]
        output: Tensor = self.module(wide.transpose(0, 1))
        return output.transpose(0, 1)

    def _kind(self, slot: Slot, batch: int) -> Hashable:
        """Return a key that is equal for seeds that run together; the slot itself for a seed that runs alone."""
        if slot not in self.kinds:
            kind = batch, kind_of(slot)
            if kind not in self.seeds:
                self.seeds[kind] = WideSeed.of(slot, batch)
            self.kinds[slot] = slot if self.seeds[kind] is None else kind
        return self.kinds[slot]

    def _at_slot(self, name: str, h: Tensor, _training: bool = False) -> Tensor:
        """Run each row through its seed, if it has one. An error is stored for that row and does not affect others."""
        if name not in self.groups_at:
            return h
        is_map = h.dim() == 4
        rows = [r.transpose(0, 1) for r in self.apart(h).unbind(1)] if is_map else [*self.apart(h).permute(1, 2, 0)]
        for group in self.groups_at[name]:  # rows are [C, B, H, W] or [D, B]
            inputs = [rows[row].transpose(0, 1) for row, _ in group]
            for (row, slot), out in zip(group, self._through(group, inputs), strict=True):
                if isinstance(out, Exception):
                    self.errors.setdefault(slot, out)
                else:
                    rows[row] = out.transpose(0, 1)
        if not is_map:
            return torch.stack(rows).permute(2, 0, 1)
        y = torch.cat(rows).transpose(0, 1)
        as_planes = h.transpose(0, 1).is_contiguous()
        # the memory format is that of h, because the rounding of sums depends on it
        return y if as_planes else y.contiguous(memory_format=torch.channels_last)

    def _through(self, group: list[Member], inputs: list[Tensor]) -> Iterable[Tensor | Exception]:
        seeds = self.seeds.get(self.kinds[group[0][1]])
        if seeds is not None:
            return seeds([slot for _, slot in group], inputs)
        return [_alone(slot, h) for (_, slot), h in zip(group, inputs, strict=True)]


def _alone(slot: Slot, h: Tensor) -> Tensor | Exception:
    try:
        return slot.forward(h.contiguous(memory_format=torch.channels_last) if h.dim() == 4 else h, True)
    except Exception as error:
        return error


# -- seeds of one kind


class WideSeed(Code):
    """The batched module of seeds of one kind. It runs at least two rows, since some kernels round one differently."""

    @classmethod
    def of(cls, slot: Slot, batch: int) -> WideSeed | None:
        """Return the batched module of this slot's seed, or None if it cannot be batched; tested on random weights.

        Accepted are only modules whose rows are bit-identical to single ones, at sizes for which that holds.
        """
        seed = slot.seed
        assert seed is not None
        is_known = all(type(m) in RULES or type(m) in APART for m in seed.modules())
        is_plain = slot.gate is None and not is_straight(slot) and any(True for _ in seed.parameters())
        if not is_known or not is_plain or not rounds_alike(seed, slot.spec.shape, batch):
            return None
        try:
            wide = cls(copy.deepcopy(seed))
            return wide if wide._matches(seed, slot) else None
        except Exception:
            return None

    @torch.no_grad()
    def _matches(self, seed: nn.Module, slot: Slot) -> bool:
        generator = torch.Generator().manual_seed(0)

        def some(like: Tensor, *shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=like.dtype).to(like.device)

        pair = [copy.deepcopy(seed) for _ in range(2)]
        first = next(seed.parameters())
        for each in pair:
            for p in each.parameters():
                p.copy_(some(p, *p.shape))
        inputs = [some(first, 3, *slot.spec.shape) for _ in pair]
        tensors = {n: torch.stack([dict(e.named_parameters())[n] for e in pair]) for n, _ in seed.named_parameters()}
        together = self._change(tensors, self._joined(inputs))
        alone = self._joined([each(h) for each, h in zip(pair, inputs, strict=True)])
        return together.shape == alone.shape and torch.allclose(together, alone, rtol=1e-3, atol=1e-4)

    def __call__(self, slots: Sequence[Slot], inputs: list[Tensor]) -> Iterable[Tensor]:
        """Return the output of each slot for its features [B, …], equal to what the slot returns by itself."""
        count, first = len(slots), slots[0]
        each: list[list[Tensor]] = [list(slot.seed.parameters()) for slot in slots if slot.seed is not None]
        if count == 1:
            inputs = inputs * 2
            each = [*each, [p.detach() for p in each[0]]]
        tensors = {n: torch.stack(p) for (n, _), *p in zip(self.module.named_parameters(), *each, strict=True)}
        h = self._joined(inputs)
        if first.mode == Mode.SHADOW or not h.requires_grad:
            h = detached(h)
        if first.mode == Mode.SHADOW:
            first.shadow_input = h
            weight = h.new_ones(len(inputs))
        else:
            weight = torch.stack([slot.alpha for slot in slots]).expand(len(inputs)).to(h.dtype)
        weight = weight.repeat_interleave(h.shape[1] // len(inputs)) if h.dim() == 4 else weight
        delta = self._change(tensors, h)
        multiplies = [slot.operator == Operator.MULTIPLY for slot in slots]
        if any(multiplies):
            scaled = h * torch.tanh(delta)
            which = torch.tensor(multiplies).expand(len(inputs)).repeat_interleave(len(weight) // len(inputs))
            delta = scaled if all(multiplies) else torch.where(across(which.to(h.device), h), scaled, delta)
        out = torch.addcmul(h, delta, across(weight, h))
        if h.dim() == 4:
            return out.unflatten(1, (len(inputs), -1)).unbind(1)[:count]
        return [each.transpose(0, 1) for each in out.permute(1, 2, 0)[:count]]

    def _change(self, tensors: dict[str, Tensor], h: Tensor) -> Tensor:
        self.tensors = tensors
        self.rows = len(next(iter(tensors.values())))
        delta: Tensor = self.module(h)
        return delta

    def _joined(self, inputs: Sequence[Tensor]) -> Tensor:
        if inputs[0].dim() == 4:
            return torch.cat(list(inputs), 1).contiguous(memory_format=torch.channels_last)
        return torch.stack([h.transpose(0, 1) for h in inputs]).permute(2, 0, 1)


APART = (nn.Sequential, nn.Identity, nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid)
"""Modules without weights that are elementwise or containers."""
ALIGNED = 16
"""Alignment in bytes. The rounding of a product of unaligned matrices depends on the row's position in the batch."""


def rounds_alike(seed: nn.Module, shape: Sequence[int], batch: int) -> bool:
    """Return whether a row of this seed rounds the same at every position in the batch."""
    samples = batch * math.prod(shape[1:])
    products = [m for m in seed.modules() if isinstance(m, nn.Linear) or _is_product(m)]
    weights = [p for m in products for n, p in m.named_parameters() if n == "weight"]
    return all(n * w.element_size() % ALIGNED == 0 for w in weights for n in (w.numel(), samples))


def across(each: Tensor, h: Tensor) -> Tensor:
    """Reshape one number per row or channel so that it broadcasts over features [B, …]."""
    return each.view(1, -1, *[1] * (h.dim() - 2))


def kind_of(slot: Slot) -> Hashable:
    """Return a key that is equal for seeds that differ only in their weights."""
    assert slot.seed is not None
    code = tuple((type(m), m.extra_repr()) for m in slot.seed.modules())
    shapes = tuple(p.shape for p in slot.seed.parameters())
    return slot.blueprint, slot.spec.shape, slot.gate is None, is_straight(slot), code, shapes


def is_straight(slot: Slot) -> bool:
    """Return whether the seed learns straight-through in the main pass, which uses another formula."""
    return slot.mode == Mode.STRAIGHT_THROUGH


# -- rules: the batched forward of each type of layer. Maps are fastest as [R·C, B, H, W] in memory ("planes").


def _linear(wide: Code, name: str, _m: nn.Linear, x: Tensor) -> Tensor:
    """Compute [R, O, B], features before samples, so that the weights' gradient has their memory layout."""
    x = wide.apart(x).permute(1, 2, 0)
    weight = wide.tensors[name + "weight"]
    bias = wide.tensors.get(name + "bias")
    if bias is None:
        return torch.bmm(weight, x).permute(2, 0, 1)
    y = torch.baddbmm(bias[..., None], weight, x)
    if y.requires_grad:  # the bias gradient is a sum whose rounding, if not contiguous, depends on the number of rows
        y.register_hook(Tensor.contiguous)
    return y.permute(2, 0, 1)


def _convolve(wide: Code, name: str, m: nn.Conv2d, x: Tensor) -> Tensor:
    weight = wide.tensors[name + "weight"]  # [R, O, C, h, w]
    bias = wide.tensors.get(name + "bias")
    if _is_product(m):
        planes = x.transpose(0, 1)
        y = torch.bmm(weight.flatten(2), planes.reshape(wide.rows, weight.shape[2], -1))
        return y.view(-1, *planes.shape[1:]).transpose(0, 1)
    x = x.contiguous(memory_format=torch.channels_last)
    bias = None if bias is None else bias.flatten()
    return F.conv2d(x, weight.flatten(0, 1), bias, m.stride, m.padding, m.dilation, wide.rows * m.groups)


def _is_product(m: nn.Module) -> bool:
    """Return whether a module is a convolution that equals a product of matrices: 1×1, without bias or groups."""
    if not isinstance(m, nn.Conv2d) or m.bias is not None:
        return False
    return m.kernel_size == m.stride == (1, 1) and m.padding == (0, 0) and m.groups == 1


def _normalise(wide: Code, name: str, m: nn.BatchNorm2d, x: Tensor) -> Tensor:
    if m.training:
        wide.tensors[name + "num_batches_tracked"] += 1
    # contiguous: the backward of batch_norm reads the weights as if they were
    each = [wide.tensors[name + n].flatten().contiguous() for n in ("running_mean", "running_var", "weight", "bias")]
    act = partial(F.batch_norm, training=m.training, momentum=m.momentum or 0.0, eps=m.eps)
    planes = x.transpose(0, 1)
    if not planes.is_contiguous():
        return act(x, *each)
    return act(planes.view(1, len(planes), -1), *each).view(planes.shape).transpose(0, 1)


def _pool(_wide: Code, _name: str, m: nn.MaxPool2d, x: Tensor) -> Tensor:
    """Pool the planes where that saves a copy: channels and samples are both batch dimensions to a pool."""
    planes = x.transpose(0, 1)
    return type(m).forward(m, planes).transpose(0, 1) if planes.is_contiguous() else type(m).forward(m, x)


def _group_norm(wide: Code, name: str, m: nn.GroupNorm, x: Tensor) -> Tensor:
    weight, bias = (wide.tensors.get(name + n) for n in ("weight", "bias"))
    if weight is not None and bias is not None:
        weight, bias = weight.flatten().contiguous(), bias.flatten().contiguous()
    return F.group_norm(x, wide.rows * m.num_groups, weight, bias, m.eps)


RULES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.GroupNorm: _group_norm,
    nn.Linear: _linear,
    nn.Conv2d: _convolve,
    nn.BatchNorm2d: _normalise,
    nn.MaxPool2d: _pool,
}
