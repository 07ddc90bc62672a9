"""Masks of attention: where the call of a host module has one, and its form for the attention of a seed.

An attention seed after a layer uses the mask of that layer, so it attends to no padding. A seed takes one if it has
`takes_mask = True` and its forward accepts `(h, mask)`, with a mask as for `scaled_dot_product_attention`, or None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

EXCLUDES = {"attention_mask": False, "src_key_padding_mask": True, "key_padding_mask": True}
"""Names of arguments with a mask → whether True or 1 in a mask [B, T] excludes a position instead of keeping it."""


@dataclass(frozen=True, slots=True)
class MaskArgument:
    """The argument of a module's forward that holds the mask of its attention."""

    name: str
    position: int

    @classmethod
    def of(cls, module: nn.Module) -> MaskArgument | None:
        """Return the argument of a module; None if it takes no mask under a usual name."""
        names = list(inspect.signature(module.forward).parameters)
        return next((cls(name, names.index(name)) for name in EXCLUDES if name in names), None)

    def get(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the value in a call of the module; None if it has none."""
        return args[self.position] if len(args) > self.position else kwargs.get(self.name)

    def for_features(self, value: Any, rows: int, length: int) -> Tensor | None:
        """Return the mask for features of this many samples and positions, [B or 1, heads or 1, T or 1, T].

        Samples of a forked batch are repeated in their order, so the mask is repeated or cut. None if it does not fit,
        as with a key-value cache.
        """
        if not isinstance(value, Tensor) or value.ndim not in (2, 4) or value.shape[-1] != length:
            return None
        mask = self.expanded(value)
        samples = mask.shape[0]
        if samples in (1, rows):
            return mask
        if samples > rows:
            return mask[:rows]
        return None if rows % samples else mask.repeat(rows // samples, 1, 1, 1)

    def expanded(self, value: Any) -> Any:
        """Return a mask of any form as one of four dimensions: bool, True where attended, or floats to be added."""
        if value.ndim == 4:
            return value if value.is_floating_point() or value.dtype == torch.bool else value != 0
        value = value[:, None, None, :]
        if not EXCLUDES[self.name]:
            return value != 0
        return value if value.is_floating_point() else value == 0


def without_padding(model: nn.Module, probe: Any, samples: int) -> Any:
    """Return a probe of `samples` samples whose padding masks, [B, T], exclude nothing."""
    return _with_masks(model, probe, samples, lambda mask, excluded: torch.full_like(mask, 1 - excluded))


def with_padding(model: nn.Module, probe: Any, samples: int) -> Any:
    """Return a probe of `samples` samples whose padding masks, [B, T], exclude the last position of a sample.

    transformers replaces a mask that excludes nothing by None, so such a probe would not show what depends on a mask.
    """

    def padded(mask: Tensor, excluded: int) -> Tensor:
        changed = mask.clone()
        changed[0, -1] = excluded
        return changed

    return _with_masks(model, probe, samples, padded)


def _with_masks(model: nn.Module, probe: Any, samples: int, change: Callable[[Tensor, int], Tensor]) -> Any:
    """Return a probe with changed padding masks. `change` also gets the value that excludes a position."""

    def changed(name: str, value: Any) -> Any:
        is_mask = name in EXCLUDES and isinstance(value, Tensor) and value.ndim == 2 and len(value) == samples
        return change(value, int(EXCLUDES[name])) if is_mask else value

    if isinstance(probe, Mapping):
        return {name: changed(name, value) for name, value in probe.items()}
    if not isinstance(probe, (tuple, list)):
        return probe
    names = list(inspect.signature(model.forward).parameters)[: len(probe)]
    names += [""] * (len(probe) - len(names))
    return tuple(changed(name, value) for name, value in zip(names, probe, strict=True))
