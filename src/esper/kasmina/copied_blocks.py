"""Seeds that start as copies of a residual block of the host.

A residual block computes h + f(h). Its copy, as a seed, returns Δ(h) = block(h) − h. The parameters of its last
projections are zeroed, so Δ = 0 at birth. All its other weights are those that the block has when the seed is planted.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint, factory_of
from esper.kasmina.body import Body
from esper.kasmina.optimizer_sync import is_sharded, refuse_ungrafted
from esper.kasmina.probing import quietly
from esper.kasmina.slot import Slot
from esper.leyline.actions import BLUEPRINTS
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


class CopyFactory:
    """Blueprint function whose seeds copy a block of the model in which they are planted.

    Args:
        name: Name of the block in the model.
        block: A copy of the block, from which a seed is made where no model is given, for example to count its cost.
        zeroed: Names of the parameters that are zero at birth.
    """

    def __init__(self, name: str, block: nn.Module, zeroed: Sequence[str]) -> None:
        self.name = name
        self.block = block
        self.zeroed = tuple(zeroed)

    def __call__(self, _dim: int, /) -> nn.Module:
        """Return a seed with the weights of the stored block."""
        return self._seed(copy.deepcopy(self.block))

    def fits(self, host: nn.Module) -> bool:
        """Return whether the model has a block of this name with parameters of the same names and shapes."""
        block = dict(host.named_modules()).get(self.name)
        return block is not None and _shapes(block) == _shapes(self.block)

    def from_host(self, host: nn.Module) -> nn.Module:
        """Return a seed with the weights that the block of this model has now."""
        return self._seed(_block(host, self.name))

    def is_same(self, other: object) -> bool:
        """Return whether another function makes the same seeds."""
        if not isinstance(other, CopyFactory) or type(self.block) is not type(other.block):
            return False
        return (self.name, self.zeroed, _shapes(self.block)) == (other.name, other.zeroed, _shapes(other.block))

    def _seed(self, twin: nn.Module) -> nn.Module:
        for name, p in twin.named_parameters():
            p.requires_grad_(p.is_floating_point())
            if name in self.zeroed:
                p.data.zero_()
        return CopiedBlock(twin)


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
    refuse_ungrafted(body)
    return [name for name, h in _block_inputs(body).items() if _is_repeatable(body, name, h)]


def register_copy(body: Body, block: str, *, name: str = "copy") -> str:
    """Register a blueprint whose seeds start as copies of a block of the host.

    A seed has the weights that the block has when the seed is planted, except for the last projections, which are zero,
    so that planting does not change the output. All its weights learn, also if those of the block are frozen. Register
    it before the grower is built. Bodies with such a block of this name and size offer the blueprint, others do not.
    It keeps one copy of the block in memory; `esper.kasmina.blueprints.unregister(name)` removes it.

    Args:
        body: The body whose block is copied. If it was grafted with a list of blueprints, this one is added to it.
        block: Name of the block in the model, one of `esper.repeatable_blocks(body)`.
        name: Name of the blueprint.

    Returns:
        The name of the blueprint.

    Raises:
        BlueprintError: The block cannot be copied, or another blueprint has the name.
        UnknownNameError: The model has no such module.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
        >>> deep = esper.graft(nn.Sequential(layer), at=["0"], probe=torch.randn(4, 5, 8))
        >>> esper.register_copy(deep, "0")
        'copy'
        >>> from esper.kasmina.blueprints import unregister
        >>> unregister("copy")
    """
    refuse_ungrafted(body)
    if not isinstance(block, str):
        raise BlueprintError(f"a block is given by its name in the model, got a {type(block).__name__}")
    if name in BLUEPRINTS:
        raise BlueprintError(f"{name!r} is the name of a built-in blueprint. Choose another name")
    if block not in dict(body.model.named_modules()):
        raise unknown_name("module", block, repeatable_blocks(body))
    inputs = _block_inputs(body)
    try:
        module = body.model.get_submodule(block)
        if isinstance(module, CONTAINERS):
            raise BlueprintError(f"a {type(module).__name__} holds blocks. Name one of them")
        if block not in inputs:
            raise BlueprintError(
                "on the probe it must get one tensor and no other argument, and return one tensor, both with the shape "
                "of a slot's features"
            )
        zeroed = last_projections(_block(body.model, block), inputs[block])
    except BlueprintError as error:
        others = ", ".join(repeatable_blocks(body)) or "none"
        raise BlueprintError(
            f"{block!r} cannot be copied: {error}. Blocks of this model that can be copied: {others}"
        ) from error
    factory = CopyFactory(block, _block(body.model, block).cpu(), zeroed)
    layouts = sorted({slot.spec.layout for slot in _slots_like(body, inputs[block])})
    if not all(factory.is_same(factory_of(name, layout)) for layout in layouts):
        blueprint(name, layouts=layouts)(factory)
    if body.allowed_blueprints and name not in body.allowed_blueprints:
        body.allowed_blueprints += (name,)
    return name


def last_projections(block: nn.Module, h: Tensor) -> list[str]:
    """Return the parameters whose zeros make a block return its input.

    Parameters are zeroed, beginning with the last that is used, until the block returns its input. Then, beginning with
    the first, they get their values back unless the block would change its input. The block is tested on noise of the
    shape of h and with noise added to its weights: the values of features and weights at this moment do not decide.
    The weights of `block` are changed.

    Raises:
        BlueprintError: There are no such parameters, the block writes into its input, or its zeros could not learn.
    """
    noise = torch.Generator().manual_seed(0)
    x = _noise(h, noise)
    params = [(name, p) for name, p in _parameters(block, x) if p.is_floating_point()]
    with torch.no_grad():
        for _, p in params:
            p.requires_grad_()
            p.add_(0.1 * _noise(p, noise))
    values = [p.detach().clone() for _, p in params]
    first = len(params)
    while first and not _returns_input(block, x):
        first -= 1
        _set(params[first][1], None)
        if not torch.isfinite(_run(block, x)).all():  # the direction of a normalised weight
            _set(params[first][1], values[first])
    if not _returns_input(block, x):
        raise BlueprintError("no zeroed weights make it return its input. Nothing may follow its residual sum")
    zeroed = []
    for (name, p), value in zip(params[first:], values[first:], strict=True):
        _set(p, value)
        if not _returns_input(block, x):
            _set(p, None)
            zeroed.append((name, p))
    _refuse_stuck(block, x, dict(zeroed), noise)
    return [name for name, _ in zeroed]


def _refuse_stuck(block: nn.Module, x: Tensor, zeroed: dict[str, nn.Parameter], noise: torch.Generator) -> None:
    """Raise BlueprintError if a zeroed parameter gets no gradient, as before a ReLU or if it is used twice."""
    if not zeroed:
        raise BlueprintError("it returns its input whatever its weights are")
    out = _run(block, x)
    grads = torch.autograd.grad((out * _noise(out, noise)).sum(), list(zeroed.values()), allow_unused=True)
    stuck = [name for name, g in zip(zeroed, grads, strict=True) if g is None or not g.any()]
    if stuck:
        raise BlueprintError(
            f"{', '.join(stuck)} would be zero in the seed and get no gradient. No ReLU may follow the last "
            "projection, and its weight may not be used elsewhere in the block"
        )


def _parameters(block: nn.Module, x: Tensor) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a block in the order in which their modules are executed.

    A module that is not called itself, such as the output projection of `nn.MultiheadAttention`, follows the module
    that contains it and is called.
    """
    called: dict[str, None] = {}

    def record(name: str) -> Callable[..., None]:
        return lambda *_: called.update({name: None})

    with _hooked(dict(block.named_modules()), record):
        _run(block, x)
    order = {name: place for place, name in enumerate(called)}

    def place(name: str) -> int:
        while name not in order and name:
            name = name.rpartition(".")[0]
        return order.get(name, len(order))

    return sorted(block.named_parameters(), key=lambda item: place(item[0].rpartition(".")[0]))


def _block_inputs(body: Body) -> dict[str, Tensor]:
    """Return the inputs, on the probe, of modules that map one tensor to one with the shape of a slot's features."""
    inputs: dict[str, Tensor] = {}
    modules = {n: m for n, m in body.model.named_modules() if n and not isinstance(m, CONTAINERS)}
    blocks = {n: m for n, m in modules.items() if next(m.parameters(), None) is not None}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            values = _given(module, args, kwargs)
            if len(values) == 1 and isinstance(values[0], Tensor) and isinstance(output, Tensor):
                h = values[0].detach()
                if (h.shape, h.dtype) == (output.shape, output.dtype) and _slots_like(body, h):
                    inputs.setdefault(name, h)

        return hook

    with _hooked(blocks, record):
        quietly(body, body.probe)
    return inputs


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call that are not the defaults of the module's forward."""
    signature = inspect.signature(module.forward)
    arguments = signature.bind(*args, **kwargs).arguments
    return [value for name, value in arguments.items() if value is not signature.parameters[name].default]


def _is_repeatable(body: Body, name: str, h: Tensor) -> bool:
    try:
        last_projections(_block(body.model, name), h)
    except BlueprintError:
        return False
    return True


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
    return [s for s in body.slots.values() if s.spec.swapped is None and s.spec.batch_shape(len(h)) == tuple(h.shape)]


def _returns_input(block: nn.Module, x: Tensor) -> bool:
    """Return whether a block returns its input, in evaluation and in training."""
    return all(torch.equal(_run(block, x, training=training), x) for training in (False, True))


def _run(block: nn.Module, x: Tensor, *, training: bool = False) -> Tensor:
    """Return the output of a block. Raise BlueprintError if it fails or writes into its input.

    Gradients are enabled: without them torch's own layers run as one operation, and their parts are not called.
    """
    given = x.clone()
    version = given._version
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            out: Tensor = block.train(training)(given)
    except Exception as error:
        raise BlueprintError(f"called with one tensor, it fails with {type(error).__name__}: {error}") from error
    if given._version != version:
        raise BlueprintError("it writes into its input. Use operations on the input that are not in-place")
    return out


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal noise with the shape, dtype and device of a tensor."""
    return torch.randn(like.shape, generator=generator).to(like)


def _set(p: nn.Parameter, value: Tensor | None) -> None:
    """Set a parameter to a value, or to zero."""
    with torch.no_grad():
        p.zero_() if value is None else p.copy_(value)


def _shapes(block: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in block.named_parameters()}


def _block(model: nn.Module, name: str) -> nn.Module:
    """Return a copy of a block of the host without the hooks of slots, whose seeds are not part of it."""
    block = model.get_submodule(name)
    if any(is_sharded(p) for p in block.parameters()):
        raise BlueprintError("its parameters are sharded. Plant copies before sharding")
    slots = [_slot_of(hook) for module in block.modules() for hook in module._forward_hooks.values()]
    try:
        twin = copy.deepcopy(block, {id(slot): slot for slot in slots if slot})  # the slots themselves are not copied
    except Exception as error:
        raise BlueprintError(f"copy.deepcopy fails with {type(error).__name__}: {error}") from error
    for module in twin.modules():
        for handle in [h for h, hook in module._forward_hooks.items() if _slot_of(hook)]:
            del module._forward_hooks[handle]
            module._forward_hooks_with_kwargs.pop(handle, None)
    return twin


def _slot_of(hook: Callable[..., Any]) -> Slot | None:
    """Return the slot whose forward hook this is, or None."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, Slot) else None
