"""Seeds that start as copies of a residual block of the host.

A residual block computes h + f(h). Its copy, as a seed, returns Δ(h) = block(h) − h. The last projections of the copy
are zeroed, so Δ = 0 at birth. All its other weights are those that the block has when the seed is planted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint
from esper.kasmina.body import Body
from esper.kasmina.optimizer_sync import is_sharded
from esper.kasmina.probing import quietly
from esper.kasmina.slot import Slot
from esper.leyline.errors import BlueprintError, unknown_name

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that hold blocks and are not blocks themselves."""


class CopiedBlock(nn.Module):
    """Seed that returns Δ(h) = block(h) − h."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, h: Tensor) -> Tensor:
        """Return Δ(h)."""
        out: Tensor = self.block(h)
        return out - h


def repeatable_blocks(body: Body) -> list[str]:
    """Return the names of the host's blocks that `esper.register_copy` can copy.

    Such a block takes one tensor, returns one with the shape of a slot's features, and returns its input once some of
    its weights are zeroed: a residual block without an operation after the sum.

    Args:
        body: The body whose model is searched.

    Returns:
        Names as in `dict(model.named_modules())`.

    Example:
        >>> layers = [nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True) for _ in range(2)]
        >>> deep = esper.graft(nn.Sequential(*layers), at=["0", "1"], probe=torch.randn(4, 5, 8))
        >>> esper.repeatable_blocks(deep)
        ['0', '1']
    """
    return [name for name, h in _block_inputs(body).items() if last_projections(_block(body, name), h)]


def register_copy(body: Body, block: str, *, name: str = "copy") -> str:
    """Register a blueprint whose seeds start as copies of a block of the host.

    A seed has the weights that the block has when the seed is planted, except for the last projections, which are zero,
    so that planting does not change the output. Register it before the grower is built. The blueprint belongs to this
    body and keeps it in memory; `esper.kasmina.blueprints.unregister(name)` removes it.

    Args:
        body: The body whose block is copied.
        block: Name of the block in the model, one of `esper.repeatable_blocks(body)`.
        name: Name of the blueprint.

    Returns:
        The name of the blueprint.

    Raises:
        BlueprintError: The block cannot be copied, or the name is taken.
        UnknownNameError: The model has no such module.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
        >>> deep = esper.graft(nn.Sequential(layer), at=["0"], probe=torch.randn(4, 5, 8))
        >>> esper.register_copy(deep, "0")
        'copy'
        >>> from esper.kasmina.blueprints import unregister
        >>> unregister("copy")
    """
    if block not in dict(body.model.named_modules()):
        raise unknown_name("module", block, repeatable_blocks(body))
    inputs = _block_inputs(body)
    zeroed = last_projections(_block(body, block), inputs[block]) if block in inputs else []
    if not zeroed:
        raise BlueprintError(
            f"{block!r} cannot be copied. A block must take one tensor, return one with the shape of a slot's "
            "features, and return its input once weights are zeroed, as residual blocks do if nothing follows the sum. "
            f"Blocks of this model that can be copied: {', '.join(repeatable_blocks(body)) or 'none'}"
        )

    def factory(_dim: int) -> nn.Module:
        twin = _block(body, block)
        for part in zeroed:
            _zero(twin.get_submodule(part))
        return CopiedBlock(twin.requires_grad_(True))

    blueprint(name, layouts=sorted({slot.site.layout for slot in _slots_like(body, inputs[block])}))(factory)
    return name


def last_projections(block: nn.Module, h: Tensor) -> list[str]:
    """Return the parts of a block whose zeroed weights make it return its input h; [] if there are none.

    Parts are zeroed, beginning with the last that is executed, until the block returns its input. Then, beginning with
    the first, parts get their weights back unless the block would change its input. The weights of `block` are changed.
    """
    parts = [
        (name, part, [p.detach().clone() for p in part.parameters(recurse=False)]) for name, part in _parts(block, h)
    ]
    first = len(parts)
    while first and not _returns_input(block, h):
        first -= 1
        _zero(parts[first][1])
    if not _returns_input(block, h):
        return []
    needed = []
    for name, part, weights in parts[first:]:
        with torch.no_grad():
            for p, value in zip(part.parameters(recurse=False), weights, strict=True):
                p.copy_(value)
        if not _returns_input(block, h):
            _zero(part)
            needed.append(name)
    return needed


def _parts(block: nn.Module, h: Tensor) -> list[tuple[str, nn.Module]]:
    """Return the parts of a block with parameters of their own, in the order in which they are executed.

    A part that is not called itself, such as the output projection of `nn.MultiheadAttention`, follows the module that
    contains it and is called.
    """
    called: dict[str, nn.Module] = {}

    def record(name: str) -> Callable[..., None]:
        return lambda module, *_: called.update({name: module})

    modules = dict(block.named_modules())
    with _hooked(modules, record):
        quietly(block, h, grad=True)  # without gradients torch's own layers run as one operation
    order = {name: place for place, name in enumerate(called)}

    def place(name: str) -> int:
        while name not in order and name:
            name = name.rpartition(".")[0]
        return order.get(name, len(order))

    own = [(n, m) for n, m in modules.items() if next(m.parameters(recurse=False), None) is not None]
    return sorted(own, key=lambda item: place(item[0]))  # stable: a module comes before those that it contains


def _block_inputs(body: Body) -> dict[str, Tensor]:
    """Return the inputs, on the probe, of modules that map one tensor to one with the shape of a slot's features."""
    inputs: dict[str, Tensor] = {}
    blocks = {n: m for n, m in body.model.named_modules() if n and not isinstance(m, CONTAINERS) and any(m.children())}

    def record(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            values = [v for v in (*args, *kwargs.values()) if v is not None and v is not False]
            if len(values) == 1 and isinstance(values[0], Tensor) and isinstance(output, Tensor):
                h = values[0].detach()
                if (h.shape, h.dtype) == (output.shape, output.dtype) and _slots_like(body, h):
                    inputs.setdefault(name, h.clone())

        return hook

    with _hooked(blocks, record):
        quietly(body, body.probe)
    return inputs


@contextmanager
def _hooked(modules: dict[str, nn.Module], record: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    """Within the context each module has the forward hook that `record` returns for its name."""
    handles = [m.register_forward_hook(record(name), with_kwargs=True) for name, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _slots_like(body: Body, h: Tensor) -> list[Slot]:
    """Return the slots whose features have the shape of h and no swapped axes."""
    return [s for s in body.slots.values() if s.site.swapped is None and s.site.batch_shape(len(h)) == tuple(h.shape)]


def _returns_input(block: nn.Module, h: Tensor) -> bool:
    return torch.equal(quietly(block, h.clone(), grad=True), h)


def _zero(part: nn.Module) -> None:
    """Set the parameters of a module, without those of its children, to zero."""
    with torch.no_grad():
        for p in part.parameters(recurse=False):
            p.zero_()


def _block(body: Body, name: str) -> nn.Module:
    """Return a copy of a block of the host without the hooks of slots, whose seeds are not part of it."""
    block = body.model.get_submodule(name)
    if any(is_sharded(p) for p in block.parameters()):
        raise BlueprintError(f"{name!r} cannot be copied: its parameters are sharded. Plant copies before sharding")
    slots = [_slot_of(hook) for module in block.modules() for hook in module._forward_hooks.values()]
    twin = copy.deepcopy(block, {id(slot): slot for slot in slots if slot})  # the slots themselves are not copied
    for module in twin.modules():
        for handle in [h for h, hook in module._forward_hooks.items() if _slot_of(hook)]:
            del module._forward_hooks[handle]
            module._forward_hooks_with_kwargs.pop(handle, None)
    return twin


def _slot_of(hook: Callable[..., Any]) -> Slot | None:
    """Return the slot whose forward hook this is, or None."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, Slot) else None
