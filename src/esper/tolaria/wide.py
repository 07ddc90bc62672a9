"""A host's code, widened: called with the weights of R hosts, it answers as all of them.

The code runs once for all, on features that lie side by side: maps [B, R·C, H, W], vectors [B, R, D]. Only the modules
with weights are told to keep the rows apart (`RULES`). At a slot the rows part, and each live seed runs by itself, as
the very module it is: seeds differ from row to row, so most groups of equal ones would have one member.

Legend: R rows (hosts in one pass), B samples, C channels, D features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.body import Body
from esper.kasmina.slot import Slot
from esper.leyline.errors import ConfigError


class Wide:
    """A host's code, widened: called with the weights of R hosts, it answers as all of them."""

    def __init__(self, host: Body) -> None:
        body = copy.deepcopy(host)
        for name, slot in body.slots.items():
            slot.uproot()
            slot.seed = nn.Identity()  # its hook asks `forward` only if something lives here
            slot.forward = partial(self._at_slot, name)  # type: ignore[method-assign]
        self.code = body.model
        for name, module in self.code.named_modules():
            if (rule := RULES.get(type(module))) is not None:
                module.forward = partial(rule, self, f"{name}.", module)
            elif next(module.parameters(recurse=False), None) is not None:
                raise ConfigError(f"no rule for the weights of {name or 'the model itself'}, {type(module).__name__}")
        self.tensors: dict[str, Tensor] = {}  # [R, …] parameters and buffers of this pass
        self.felt: dict[str, dict[int, Slot]] = {}  # slot → row → what lives there
        self.errors: dict[Slot, Exception] = {}
        self.rows = 0

    def __call__(self, tensors: dict[str, Tensor], felt: Iterable[tuple[int, Slot]], x: Tensor) -> Tensor:
        """Outputs [R, B, V] of inputs [R, B, …]; `felt` are the seeds on the way, by row."""
        self.tensors, self.rows, self.felt = tensors, len(x), {}
        for row, slot in felt:
            self.felt.setdefault(slot.name, {})[row] = slot
        wide = x.transpose(1, 2).flatten(0, 1).contiguous() if x.dim() == 5 else x  # [R·C, B, H, W]
        output: Tensor = self.code(wide.transpose(0, 1))
        return output.transpose(0, 1)

    def _at_slot(self, name: str, h: Tensor, training: bool = False) -> Tensor:
        """Send each row that holds a seed through it; an error is that row's alone."""
        if name not in self.felt:
            return h
        if h.dim() == 4:
            rows = [r.transpose(0, 1) for r in self.apart(h).unbind(1)]  # [C, B, H, W]
        else:
            rows = list(self.apart(h).permute(1, 2, 0).unbind(0))  # [D, B]
        for row, slot in self.felt[name].items():
            seen = rows[row].transpose(0, 1)
            seen = seen.contiguous(memory_format=torch.channels_last) if h.dim() == 4 else seen
            try:
                rows[row] = slot.forward(seen, True).transpose(0, 1)
            except Exception as error:
                self.errors.setdefault(slot, error)
        return torch.cat(rows).transpose(0, 1) if h.dim() == 4 else torch.stack(rows).permute(2, 0, 1)

    def apart(self, h: Tensor) -> Tensor:
        """[B, R, C, …]: vectors come so from a linear layer, and side by side from elsewhere."""
        return h if h.dim() == 3 else h.unflatten(1, (self.rows, -1))


# -- rules: one module, R hosts. Maps are best kept as planes, [R·C, B, H, W] in memory.


def _linear(wide: Wide, name: str, m: nn.Linear, x: Tensor) -> Tensor:
    """Features before samples, [R, O, B]: so the gradient of the weights comes out as they lie."""
    x, weight = wide.apart(x).permute(1, 2, 0), wide.tensors[name + "weight"]
    bias = wide.tensors.get(name + "bias")
    y = torch.bmm(weight, x) if bias is None else torch.baddbmm(bias[..., None], weight, x)
    return y.permute(2, 0, 1)


def _convolve(wide: Wide, name: str, m: nn.Conv2d, x: Tensor) -> Tensor:
    weight = wide.tensors[name + "weight"]  # [R, O, C, h, w]
    bias = wide.tensors.get(name + "bias")
    if m.kernel_size == m.stride == (1, 1) and m.padding == (0, 0) and m.groups == 1 and bias is None:
        planes = x.transpose(0, 1)
        y = torch.bmm(weight.flatten(2), planes.reshape(wide.rows, weight.shape[2], -1))
        return y.view(-1, *planes.shape[1:]).transpose(0, 1)
    x = x.contiguous(memory_format=torch.channels_last)
    bias = None if bias is None else bias.flatten()
    return F.conv2d(x, weight.flatten(0, 1), bias, m.stride, m.padding, m.dilation, wide.rows * m.groups)


def _normalise(wide: Wide, name: str, m: nn.BatchNorm2d, x: Tensor) -> Tensor:
    if m.training:
        wide.tensors[name + "num_batches_tracked"] += 1
    each = [wide.tensors[name + n].flatten() for n in ("running_mean", "running_var", "weight", "bias")]
    act = partial(F.batch_norm, training=m.training, momentum=m.momentum or 0.0, eps=m.eps)
    planes = x.transpose(0, 1)
    if not planes.is_contiguous():
        return act(x, *each)
    return act(planes.view(1, len(planes), -1), *each).view(planes.shape).transpose(0, 1)


def _pool(wide: Wide, name: str, m: nn.MaxPool2d, x: Tensor) -> Tensor:
    """Channels and samples are all one to a pool."""
    planes = x.transpose(0, 1)
    return type(m).forward(m, planes).transpose(0, 1) if planes.is_contiguous() else type(m).forward(m, x)


RULES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolve,
    nn.BatchNorm2d: _normalise,
    nn.MaxPool2d: _pool,
}
