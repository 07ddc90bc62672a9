"""Find out by probe runs whether positions of a model depend on later ones, so that seeds do not use later positions.

A seed that mixes positions in both directions is offered only where the model itself does so. Without evidence, as in
a model that treats each position alone, the model counts as causal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.kasmina.attention_masks import without_padding
from esper.kasmina.probing import PROBE_SAMPLES, floating_items, module_outputs, run_hooked
from esper.kasmina.slot import Select
from esper.leyline.errors import GraftError

TOLERANCE = 1e-5
"""Largest relative difference of two results that count as equal."""


@dataclass(frozen=True, slots=True)
class TokenSpec:
    """Three-dimensional features of a module: where they are in its output, and which axes hold batch and positions."""

    select: Select
    batch_axis: int
    token_axis: int
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Return the number of positions."""
        return self.shape[self.token_axis]

    def has_tokens(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the same samples and positions on the same axes."""
        axes = (self.batch_axis, self.token_axis)
        return tensor.ndim == 3 and all(tensor.shape[a] == self.shape[a] for a in axes)


def looking_ahead(model: nn.Module, probe: Any, specs: Mapping[str, TokenSpec]) -> set[str]:
    """Return the modules before or after which a position of the model depends on later positions."""
    probe = without_padding(model, probe, PROBE_SAMPLES)  # other positions do not depend on padding
    names = [name for name, _ in model.named_modules()]
    _, plain = module_outputs(model, probe, names)
    names_ahead = set()
    for name, spec in specs.items():
        if spec.length < 2 or spec.shape.count(spec.length) > 1:
            continue  # positions cannot be distinguished from samples or channels
        before = _from_inputs(model, probe, name, spec, plain)
        if before is None:
            before = _from_first_module(model, probe, name, spec, plain)
        if before or _after(model, probe, name, spec, plain):
            names_ahead.add(name)
    return names_ahead


Outputs = Mapping[str, list[Any]]


def _from_inputs(model: nn.Module, probe: Any, name: str, spec: TokenSpec, plain: Outputs) -> bool | None:
    """Return whether a change of the last position of every input reaches earlier features; None if none reaches any.

    Of an encoder-decoder, the encoder's input reaches all positions of the decoder; the decoder's own input decides.
    """
    verdicts = []
    for changed in _changed_inputs(probe, spec.length):
        try:
            _, outputs = module_outputs(model, changed, [name])
        except GraftError:
            continue  # the model does not accept this change
        early, late = _differences(plain[name], outputs.get(name, []), spec)
        if early or late:
            verdicts.append(early)
    return all(verdicts) if verdicts else None


def _changed_inputs(probe: Any, length: int) -> Iterator[Any]:
    """Yield the probe with another last position, for each tensor and each of its axes that has this length."""
    leaves, form = pytree.tree_flatten(probe)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        for axis, size in enumerate(leaf.shape):
            if size == length and not (axis == 0 and size == PROBE_SAMPLES):
                changed = _with_other_last(leaf, axis)
                if changed is not None:
                    yield pytree.tree_unflatten([*leaves[:i], changed, *leaves[i + 1 :]], form)


def _with_other_last(x: Tensor, axis: int) -> Tensor | None:
    """Return a tensor with another last position along an axis: noise, or for integers the values of another one."""
    changed = x.clone()
    last = changed.select(axis, -1)
    if x.is_floating_point():
        last += _noise(last)
        return changed
    for position in range(x.shape[axis] - 1):
        other = x.select(axis, position)
        if not torch.equal(other, last):
            last.copy_(other)
            return changed
    return None


def _from_first_module(model: nn.Module, probe: Any, name: str, spec: TokenSpec, plain: Outputs) -> bool:
    """Return whether noise in the last position of the first module with these positions reaches earlier features."""
    first = next((n for n, each in plain.items() if isinstance(each[0], Tensor) and spec.has_tokens(each[0])), None)
    if first is None or first == name:
        return False
    outputs: list[Any] = []
    hooks = {first: _disturb(Select(), spec), name: lambda _m, _a, output: outputs.append(output)}
    return _survives(model, probe, hooks) and _differences(plain[name], outputs, spec)[0]


def _after(model: nn.Module, probe: Any, name: str, spec: TokenSpec, plain: Outputs) -> bool:
    """Return whether noise in the last position of the features reaches earlier positions of any later result."""
    outputs: dict[str, list[Any]] = {n: [] for n in plain if n != name}

    def collect(n: str) -> Callable[..., None]:
        return lambda _module, _args, output: outputs[n].append(output)

    hooks = {**{n: collect(n) for n in outputs}, name: _disturb(spec.select, spec)}
    if not _survives(model, probe, hooks):
        return False
    return any(_item_differs(plain[n], each, spec) for n, each in outputs.items())


def _item_differs(before: list[Any], after: list[Any], spec: TokenSpec) -> bool:
    """Return whether an early position of any tensor with the same positions differs between two runs."""
    for x, y in zip(before, after, strict=False):
        there = floating_items(y)
        for path, a in floating_items(x).items():
            if spec.has_tokens(a) and path in there and _differ(a, there[path], spec.token_axis)[0]:
                return True
    return False


def _differences(before: list[Any], after: list[Any], spec: TokenSpec) -> tuple[bool, bool]:
    """Return whether early positions and whether the last position of the features differ between two runs."""
    pairs = [(spec.select.get(x), spec.select.get(y)) for x, y in zip(before, after, strict=False)]
    verdicts = [_differ(a, b, spec.token_axis) for a, b in pairs if a.shape == b.shape]
    return any(early for early, _ in verdicts), any(late for _, late in verdicts)


def _differ(a: Tensor, b: Tensor, axis: int) -> tuple[bool, bool]:
    """Return whether two tensors differ in their early positions, and in the last one."""
    if a.shape != b.shape:
        return False, False
    a, b = a.float().nan_to_num(), b.float().nan_to_num()
    gaps = (a - b).abs().transpose(0, axis).flatten(1).amax(1)
    is_large = (gaps > TOLERANCE * a.abs().amax().clamp(min=1e-6)).tolist()  # sync: at graft
    return any(is_large[:-1]), is_large[-1]


def _disturb(select: Select, spec: TokenSpec) -> Callable[..., Any]:
    """Return a forward hook that adds noise to the last position of the features."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        changed = select.get(output).clone()
        last = changed.select(spec.token_axis, -1)
        last += _noise(last)
        return select.put(output, changed)

    return hook


def _noise(x: Tensor) -> Tensor:
    """Return fixed noise as large as a tensor."""
    size = x.float().square().mean().sqrt().clamp(min=1e-3)
    return (torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.device) * size).to(x.dtype)


def _survives(model: nn.Module, probe: Any, hooks: Mapping[str, Callable[..., Any]]) -> bool:
    try:
        run_hooked(model, probe, hooks)
    except GraftError:
        return False
    return True
