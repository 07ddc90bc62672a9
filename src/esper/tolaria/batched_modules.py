"""A module's code, widened: called with the weights of R such modules, it answers as all of them.

The code runs once for all, on features that lie side by side: maps [B, R·C, H, W], vectors [B, R, D]. Only the modules
with weights are told to keep the rows apart (`RULES`). At a slot of a host the rows part: seeds of one kind go through
the widened code of their kind, any other through the very module it is.

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

from esper.kasmina.blending import detached
from esper.kasmina.body import Body
from esper.kasmina.slot import Slot
from esper.leyline.actions import Operator
from esper.leyline.errors import ConfigError
from esper.leyline.stages import SeedStage

Member = tuple[int, Slot]
"""A row and the slot that lives there."""


class Code:
    """A module of which the layers with weights keep R rows apart; the rest runs as it is."""

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
        """[B, R, C, …]: vectors come so from a linear layer, and side by side from elsewhere."""
        return h if h.dim() == 3 else h.unflatten(1, (self.rows, -1))


class Wide(Code):
    """A host's code, widened."""

    def __init__(self, host: Body) -> None:
        body = copy.deepcopy(host)
        for name, slot in body.slots.items():
            slot.uproot()
            slot.seed = nn.Identity()  # its hook asks `forward` only if something lives here
            slot.forward = partial(self._at_slot, name)  # type: ignore[method-assign]
        super().__init__(body.model)
        self.felt: dict[str, list[list[Member]]] = {}  # slot → groups of what lives there
        self.kinds: dict[Slot, Hashable] = {}
        self.seeds: dict[Hashable, WideSeed | None] = {}
        self.errors: dict[Slot, Exception] = {}

    def begin(self) -> None:
        """An epoch: seeds may be others than before, and no error is known."""
        self.kinds, self.errors = {}, {}

    def __call__(self, tensors: dict[str, Tensor], felt: Iterable[Member], x: Tensor) -> Tensor:
        """Outputs [R, B, V] of inputs [R, B, …]; `felt` are the seeds on the way, by row."""
        self.tensors, self.rows, self.felt = tensors, len(x), {}
        groups: dict[Hashable, list[Member]] = {}
        for row, slot in felt:
            groups.setdefault((slot.name, slot.shadow, self._kind(slot, x.shape[1])), []).append((row, slot))
        for group in groups.values():
            self.felt.setdefault(group[0][1].name, []).append(group)
        wide = x.transpose(1, 2).flatten(0, 1).contiguous() if x.dim() == 5 else x  # [R·C, B, H, W]
        output: Tensor = self.module(wide.transpose(0, 1))
        return output.transpose(0, 1)

    def _kind(self, slot: Slot, batch: int) -> Hashable:
        """What seeds must have in common to go through a slot together; one of its own for a seed that goes alone."""
        if slot not in self.kinds:
            kind = batch, kind_of(slot)
            if kind not in self.seeds:
                self.seeds[kind] = WideSeed.of(slot, batch)
            self.kinds[slot] = slot if self.seeds[kind] is None else kind
        return self.kinds[slot]

    def _at_slot(self, name: str, h: Tensor, training: bool = False) -> Tensor:
        """Send each row that holds a seed through it; an error is that row's alone."""
        if name not in self.felt:
            return h
        is_map = h.dim() == 4
        rows = [r.transpose(0, 1) for r in self.apart(h).unbind(1)] if is_map else [*self.apart(h).permute(1, 2, 0)]
        for group in self.felt[name]:  # rows are [C, B, H, W] or [D, B]
            seen = [rows[row].transpose(0, 1) for row, _ in group]
            for (row, slot), out in zip(group, self._through(group, seen), strict=True):
                if isinstance(out, Exception):
                    self.errors.setdefault(slot, out)
                else:
                    rows[row] = out.transpose(0, 1)
        if not is_map:
            return torch.stack(rows).permute(2, 0, 1)
        y = torch.cat(rows).transpose(0, 1)
        as_planes = h.transpose(0, 1).is_contiguous()
        return y if as_planes else y.contiguous(memory_format=torch.channels_last)  # a sum rounds by how its terms lie

    def _through(self, group: list[Member], seen: list[Tensor]) -> Iterable[Tensor | Exception]:
        seeds = self.seeds.get(self.kinds[group[0][1]])
        if seeds is not None:
            return seeds([slot for _, slot in group], seen)
        return [_alone(slot, h) for (_, slot), h in zip(group, seen, strict=True)]


def _alone(slot: Slot, h: Tensor) -> Tensor | Exception:
    try:
        return slot.forward(h.contiguous(memory_format=torch.channels_last) if h.dim() == 4 else h, True)
    except Exception as error:
        return error


# -- seeds of one kind


class WideSeed(Code):
    """Seeds of one kind as one. At least two rows: with one, some kernels round otherwise than with several."""

    @classmethod
    def of(cls, slot: Slot, batch: int) -> WideSeed | None:
        """The widened code of this slot's seed, if it can be widened: tried on weights by chance.

        Only of modules that are known to keep rows apart to the last bit, at sizes where they do.
        """
        seed = slot.seed
        assert seed is not None
        is_known = all(type(m) in RULES or type(m) in APART for m in seed.modules())
        is_plain = slot.gate is None and not is_straight(slot) and any(True for _ in seed.parameters())
        if not is_known or not is_plain or not rounds_alike(seed, slot.site.shape, batch):
            return None
        try:
            found = cls(copy.deepcopy(seed))
            return found if found._answers_as(seed, slot) else None
        except Exception:
            return None

    @torch.no_grad()
    def _answers_as(self, seed: nn.Module, slot: Slot) -> bool:
        luck = torch.Generator().manual_seed(0)

        def some(like: Tensor, *shape: int) -> Tensor:
            return torch.randn(*shape, generator=luck, dtype=like.dtype).to(like.device)

        pair, first = [copy.deepcopy(seed) for _ in range(2)], next(seed.parameters())
        for each in pair:
            for p in each.parameters():
                p.copy_(some(p, *p.shape))
        seen = [some(first, 3, *slot.site.shape) for _ in pair]
        tensors = {n: torch.stack([dict(e.named_parameters())[n] for e in pair]) for n, _ in seed.named_parameters()}
        together = self._change(tensors, self._joined(seen))
        alone = self._joined([each(h) for each, h in zip(pair, seen, strict=True)])
        return together.shape == alone.shape and torch.allclose(together, alone, rtol=1e-3, atol=1e-4)

    def __call__(self, slots: Sequence[Slot], seen: list[Tensor]) -> Iterable[Tensor]:
        """What the slots make of their features [B, …] each, as each would by itself."""
        count, first = len(slots), slots[0]
        each: list[list[Tensor]] = [list(slot.seed.parameters()) for slot in slots if slot.seed is not None]
        if count == 1:
            seen, each = seen * 2, [*each, [p.detach() for p in each[0]]]
        tensors = {n: torch.stack(p) for (n, _), *p in zip(self.module.named_parameters(), *each, strict=True)}
        h = self._joined(seen)
        if first.shadow or not h.requires_grad:
            h = detached(h)
        if first.shadow:
            first.lesson = h
            weight = h.new_ones(len(seen))
        else:
            weight = torch.stack([slot.alpha for slot in slots]).expand(len(seen)).to(h.dtype)
        weight = weight.repeat_interleave(h.shape[1] // len(seen)) if h.dim() == 4 else weight
        delta = self._change(tensors, h)
        multiplies = [slot.operator == Operator.MULTIPLY for slot in slots]
        if any(multiplies):
            scaled = h * torch.tanh(delta)
            which = torch.tensor(multiplies).expand(len(seen)).repeat_interleave(len(weight) // len(seen))
            delta = scaled if all(multiplies) else torch.where(across(which.to(h.device), h), scaled, delta)
        out = torch.addcmul(h, delta, across(weight, h))
        if h.dim() == 4:
            return out.unflatten(1, (len(seen), -1)).unbind(1)[:count]
        return [each.transpose(0, 1) for each in out.permute(1, 2, 0)[:count]]

    def _change(self, tensors: dict[str, Tensor], h: Tensor) -> Tensor:
        self.tensors, self.rows = tensors, len(next(iter(tensors.values())))
        delta: Tensor = self.module(h)
        return delta

    def _joined(self, seen: Sequence[Tensor]) -> Tensor:
        if seen[0].dim() == 4:
            return torch.cat(list(seen), 1).contiguous(memory_format=torch.channels_last)
        return torch.stack([h.transpose(0, 1) for h in seen]).permute(2, 0, 1)


APART = (nn.Sequential, nn.Identity, nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid)
"""Modules without weights that treat every number by itself."""
ALIGNED = 16
"""Bytes. A product of matrices that begin elsewhere rounds by where they begin, so by a row's place among others."""


def rounds_alike(seed: nn.Module, shape: Sequence[int], batch: int) -> bool:
    """Whether a row of this seed rounds the same in any place."""
    samples = batch * math.prod(shape[1:])
    products = [m for m in seed.modules() if isinstance(m, nn.Linear) or _is_product(m)]
    weights = [p for m in products for n, p in m.named_parameters() if n == "weight"]
    return all(n * w.element_size() % ALIGNED == 0 for w in weights for n in (w.numel(), samples))


def across(each: Tensor, h: Tensor) -> Tensor:
    """One number per row or channel, as features [B, …] take it."""
    return each.view(1, -1, *[1] * (h.dim() - 2))


def kind_of(slot: Slot) -> Hashable:
    """Seeds that share it differ in their weights alone."""
    assert slot.seed is not None
    code = tuple((type(m), m.extra_repr()) for m in slot.seed.modules())
    shapes = tuple(p.shape for p in slot.seed.parameters())
    return slot.blueprint, slot.site.shape, slot.gate is None, is_straight(slot), code, shapes


def is_straight(slot: Slot) -> bool:
    """Whether it learns in the main pass, which another formula does."""
    return slot.stage < SeedStage.BLENDING and slot.incubating


# -- rules: one module, R hosts. Maps are best kept as planes, [R·C, B, H, W] in memory.


def _linear(wide: Code, name: str, m: nn.Linear, x: Tensor) -> Tensor:
    """Features before samples, [R, O, B]: so the gradient of the weights comes out as they lie."""
    x, weight = wide.apart(x).permute(1, 2, 0), wide.tensors[name + "weight"]
    bias = wide.tensors.get(name + "bias")
    if bias is None:
        return torch.bmm(weight, x).permute(2, 0, 1)
    y = torch.baddbmm(bias[..., None], weight, x)
    if y.requires_grad:  # summed over samples, a gradient that lies otherwise rounds by how many rows there are
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
    """A convolution that is a product of matrices."""
    if not isinstance(m, nn.Conv2d) or m.bias is not None:
        return False
    return m.kernel_size == m.stride == (1, 1) and m.padding == (0, 0) and m.groups == 1


def _normalise(wide: Code, name: str, m: nn.BatchNorm2d, x: Tensor) -> Tensor:
    if m.training:
        wide.tensors[name + "num_batches_tracked"] += 1
    # contiguous: torch's gradient reads the weight of one channel each as if it were
    each = [wide.tensors[name + n].flatten().contiguous() for n in ("running_mean", "running_var", "weight", "bias")]
    act = partial(F.batch_norm, training=m.training, momentum=m.momentum or 0.0, eps=m.eps)
    planes = x.transpose(0, 1)
    if not planes.is_contiguous():
        return act(x, *each)
    return act(planes.view(1, len(planes), -1), *each).view(planes.shape).transpose(0, 1)


def _pool(wide: Code, name: str, m: nn.MaxPool2d, x: Tensor) -> Tensor:
    """Channels and samples are all one to a pool."""
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
