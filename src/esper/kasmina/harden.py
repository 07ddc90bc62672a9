"""Harden: convert a grown body to a plain module that contains no Esper class.

Each grown module is replaced by a `torch.fx.GraphModule` that calls the original module (`host`) and then the
seed (`grown`), traced into torch operations. A module whose signature a graph cannot reproduce (`*args`,
`**kwargs`), or whose attributes other code of the model reads (`self.embed.weight`), stays and gets the traced
seed as a child and a forward hook. In both cases the result computes the same, trains, exports and loads
without Esper.
"""

from __future__ import annotations

import copy
import inspect
import operator
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from esper.kasmina.attention_masks import EXCLUDES, MaskArgument
from esper.kasmina.body import Body
from esper.kasmina.copied_blocks import CopiedBlock
from esper.kasmina.forking import same
from esper.kasmina.optimizer_sync import is_sharded, not_a_body
from esper.kasmina.probing import quietly
from esper.kasmina.slot import Select, Slot
from esper.leyline.actions import Operator
from esper.leyline.errors import GraftError, HardenError
from esper.leyline.stages import SeedStage

GROWN, HOST = "grown", "host"
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers in which an added child would become part of the computation."""


class _Blend(nn.Module):
    """One seed and its blending operator in traceable form, with alpha as a constant."""

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        assert slot.seed is not None
        self.seed = slot.seed
        self.gate = slot.gate
        self.alpha = slot.amplitude
        self.operator = slot.operator

    def forward(self, h: Tensor) -> Tensor:
        """Return the features with the seed blended in."""
        return self.blended(h, self.seed(h))

    def blended(self, h: Tensor, delta: Tensor) -> Tensor:
        """Return the features changed by Δ."""
        if self.operator == Operator.MULTIPLY:
            return h * (1 + self.alpha * torch.tanh(delta))
        weight = self.alpha if self.gate is None else self.alpha * self.gate(h)
        return h + (delta if isinstance(weight, float) and weight == 1.0 else weight * delta)


class _MaskedBlend(_Blend):
    """The same for a seed that takes the mask of its host module."""

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        """Return the features with the seed blended in."""
        return self.blended(h, self.seed(h, mask))


@overload
def harden(body: Body, *, key_map: Literal[False] = False) -> nn.Module: ...
@overload
def harden(body: Body, *, key_map: Literal[True]) -> tuple[nn.Module, dict[str, str]]: ...
def harden(body: Body, *, key_map: bool = False) -> nn.Module | tuple[nn.Module, dict[str, str]]:
    """Return a plain module that computes what the body computes. The body is not modified.

    Seeds before BLENDING (GERMINATED, TRAINING) are left out.

    Args:
        body: The body to convert.
        key_map: Whether to return also where each tensor went.

    Returns:
        The module; with `key_map` also a mapping from the keys of `body.state_dict()` to the new keys.

    Raises:
        HardenError: The body cannot be converted, for example because it is sharded.

    Example:
        >>> plain = esper.harden(body)
        >>> torch.allclose(plain(x), body(x)), type(plain).__name__
        (True, 'Sequential')
    """
    problem = None
    for swap in (True, False):
        plain, keys = _rebuilt(body, swap)
        problem = _differs(body, plain)
        if not problem:
            return (plain, keys) if key_map else plain
    raise HardenError(
        f"the hardened model {problem}. Other code of the model may reach into a grown module; graft after a "
        "neighbouring module, or export the body with torch.export."
    )


def _rebuilt(body: Body, swap: bool) -> tuple[nn.Module, dict[str, str]]:
    """Return a plain copy of the model and its key map. `swap` prefers replacing modules over attaching hooks."""
    if not isinstance(body, Body):
        raise HardenError(
            not_a_body(body, "It has no slots, so it is plain already: use it as it is, or graft it to grow it.")
        )
    if any(is_sharded(p) for p in body.parameters()):
        raise HardenError(
            "the model's parameters are sharded. Save them with grower.save on all ranks, load that checkpoint into a "
            "body that is not sharded, and harden that one."
        )
    body = copy.deepcopy(body)
    plain = body.model
    masks = _probed_masks(body)
    detach_hooks(body)
    blended = [s for s in body.slots.values() if s.seed is not None and s.stage >= SeedStage.BLENDING]
    keys = {k: k for k in plain.state_dict()}
    for slot in sorted(
        blended, key=lambda s: -s.module_name.count(".")
    ):  # inner modules first, so that names stay valid
        grown = _trace(slot, masked=slot.name in masks)
        module = plain.get_submodule(slot.module_name)
        swaps = _signature_of(module) is not None and (swap or isinstance(module, CONTAINERS))
        if swaps:
            _swap(plain, slot, module, grown, keys, masks)
        else:
            _attach(slot, module, grown, keys, masks)
    return plain, keys


def detach_hooks(body: Body) -> None:
    """Remove Esper's hooks, and no others, from the model."""
    for slot in body.slots.values():
        module = body.model.get_submodule(slot.module_name)
        for handle in [h for h, f in module._forward_hooks.items() if getattr(f, "__self__", None) is slot]:
            del module._forward_hooks[handle]
            module._forward_hooks_with_kwargs.pop(handle, None)


class _SeedTracer(fx.Tracer):
    """Trace seeds into torch operations. The block of a copied seed stays the module that it is."""

    def trace(self, root: Any, *args: Any, **kwargs: Any) -> fx.Graph:
        """Return the graph of a seed with its blending."""
        self.blocks = {part.block for part in root.modules() if isinstance(part, CopiedBlock)}
        return super().trace(root, *args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether the graph calls this module instead of its operations."""
        return m in self.blocks or super().is_leaf_module(m, module_qualified_name)


def _trace(slot: Slot, *, masked: bool) -> fx.GraphModule:
    """Return a seed with its blending as a traced graph."""
    try:
        tracer = _SeedTracer()
        blend_module = _MaskedBlend(slot) if masked else _Blend(slot)
        graph = tracer.trace(blend_module)
    except Exception as error:
        raise HardenError(
            f"the seed {slot.blueprint!r} in slot {slot.name!r} cannot be traced into torch parts: {error}. "
            "Write its forward without branches on values, or prune it before hardening."
        ) from error
    graph._tracer_cls = None
    for node in graph.nodes:
        node.type = None  # annotations are strings here; a saved graph would try to import them
    traced = fx.GraphModule(tracer.root, graph, class_name="Grown")
    for name, parameter in blend_module.named_parameters():
        traced.get_parameter(name).requires_grad_(parameter.requires_grad)
    return traced


def _signature_of(module: nn.Module) -> list[inspect.Parameter] | None:
    """Return the parameters of a module's forward, or None if a graph cannot reproduce them."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    loose = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    plain_default = (int, float, bool, str, type(None))
    for p in parameters:
        if p.kind in loose or not (p.default is p.empty or isinstance(p.default, plain_default)):
            return None
    return parameters


@dataclass(frozen=True, slots=True)
class _ProbedMask:
    """The mask of a host module in a run on the probe."""

    argument: MaskArgument
    is_positional: bool
    value: Any


def _probed_masks(body: Body) -> dict[str, _ProbedMask]:
    """Return the masks of host modules by slot, for the seeds that take one.

    A padding mask of torch's own layers that is None in the probe is left out: a graph cannot both bring it into the
    form for attention and accept None.
    """
    masks: dict[str, _ProbedMask] = {}
    handles = []
    for slot in body.slots.values():
        if slot.mask_argument is None or not getattr(slot.seed, "takes_mask", False):
            continue

        def note(
            _module: nn.Module,
            args: Any,
            kwargs: Any,
            name: str = slot.name,
            argument: MaskArgument = slot.mask_argument,
        ) -> None:
            value = argument.get(args, kwargs)
            if value is not None or argument.name == "attention_mask":
                masks[name] = _ProbedMask(argument, len(args) > argument.position, value)

        module = body.model.get_submodule(slot.module_name)
        handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    if handles:
        quietly(body, _probe(body))
    for handle in handles:
        handle.remove()
    return masks


def _mask(mask: fx.Node, probed: _ProbedMask) -> tuple[fx.Node]:
    """Return a host module's mask in the form for a seed, converted as the one in the probe must be."""
    value = probed.value
    excludes = EXCLUDES[probed.argument.name]
    if value is None or (value.ndim == 4 and (value.is_floating_point() or value.dtype == torch.bool)):
        return (mask,)  # attention takes it as it is, and None as well
    if value.ndim == 2:
        mask = mask.graph.call_method("unsqueeze", (mask.graph.call_method("unsqueeze", (mask, 1)), 1))
    if excludes and value.is_floating_point():
        return (mask,)
    return (mask.graph.call_function(operator.eq if excludes else operator.ne, (mask, 0)),)


def _swap(
    plain: nn.Module,
    slot: Slot,
    module: nn.Module,
    grown: fx.GraphModule,
    keys: dict[str, str],
    masks: dict[str, _ProbedMask],
) -> None:
    """Replace the module by a graph that calls the module and then the seed."""
    graph = fx.Graph()
    args: list[fx.Node] = []
    kwargs: dict[str, Any] = {}
    for p in _signature_of(module) or []:
        node = graph.placeholder(p.name) if p.default is p.empty else graph.placeholder(p.name, default_value=p.default)
        if p.kind == p.KEYWORD_ONLY:
            kwargs[p.name] = node
        else:
            args.append(node)
    output = graph.call_module(HOST, tuple(args), kwargs)
    mask: tuple[fx.Node, ...] = ()
    if slot.name in masks:
        probed = masks[slot.name]
        mask = _mask(next(n for n in (*args, *kwargs.values()) if n.target == probed.argument.name), probed)
    graph.output(_put(graph, output, slot.select, mask))
    swapped = fx.GraphModule(nn.ModuleDict({HOST: module, GROWN: grown}), graph, class_name="GrownModule")
    swapped.train(module.training)
    for name, value in vars(module).items():  # plain attributes that other code may read (`layer.kind`)
        if isinstance(value, (int, float, str, bool)) and name not in vars(swapped):
            setattr(swapped, name, value)
    for path in [n for n, m in plain.named_modules(remove_duplicate=False) if m is module]:
        for old, new in keys.items():
            if new.startswith(f"{path}."):
                keys[old] = f"{path}.{HOST}.{new[len(path) + 1 :]}"
        parent, _, child = path.rpartition(".")
        setattr(plain.get_submodule(parent), child, swapped)
    _add_keys(keys, slot, f"{slot.module_name}.{GROWN}", grown)


def _put(graph: fx.Graph, output: fx.Node, select: Select, mask: tuple[fx.Node, ...]) -> Any:
    """Return the output with grown features, as the same kind of tuple, list or mapping."""
    if select.key is None:
        return graph.call_module(GROWN, (output, *mask))
    item = graph.call_function(operator.getitem, (output, select.key))
    changed = _put(graph, item, select.inner or Select(), mask)
    if isinstance(select.key, str):
        return graph.call_function(operator.or_, (output, {select.key: changed}))
    if select.field:
        return graph.call_method("_replace", (output,), {select.field: changed})
    before = graph.call_function(operator.getitem, (output, slice(None, select.key)))
    after = graph.call_function(operator.getitem, (output, slice(select.key + 1, None)))
    middle = [changed] if select.is_list else (changed,)
    return graph.call_function(operator.add, (graph.call_function(operator.add, (before, middle)), after))


def _attach(
    slot: Slot, module: nn.Module, grown: fx.GraphModule, keys: dict[str, str], masks: dict[str, _ProbedMask]
) -> None:
    """Keep the module and add the traced seed as its child and forward hook."""
    if isinstance(module, CONTAINERS) or hasattr(module, GROWN):
        raise HardenError(f"module {slot.module_name!r} ({type(module).__name__}) cannot be replaced or extended")
    graph = fx.Graph()
    args, kwargs = [graph.placeholder(name) for name in ("module", "args", "kwargs")][1:]
    output = graph.placeholder("output")
    mask: tuple[fx.Node, ...] = ()
    if slot.name in masks:
        probed = masks[slot.name]
        if probed.is_positional:
            host_mask = graph.call_function(operator.getitem, (args, probed.argument.position))
        else:
            host_mask = graph.call_method("get", (kwargs, probed.argument.name))
        mask = _mask(host_mask, probed)
    graph.output(_put(graph, output, slot.select, mask))
    hook = fx.GraphModule(nn.ModuleDict({GROWN: grown}), graph, class_name="GrowAfter")
    module.add_module(GROWN, hook)
    module.register_forward_hook(hook, with_kwargs=True)
    _add_keys(keys, slot, f"{slot.module_name}.{GROWN}.{GROWN}", grown)


def _add_keys(keys: dict[str, str], slot: Slot, home: str, grown: nn.Module) -> None:
    """Add the keys of a seed to the key map."""
    keys |= {f"esper.{slot.name.replace('.', '/')}.{k}": f"{home}.{k}" for k in grown.state_dict()}


def _differs(body: Body, plain: nn.Module) -> str:
    """Return how the hardened model differs from the body on the probe; "" if it does not."""
    probe = _probe(body)
    expected = quietly(body, probe)
    try:
        output = quietly(plain, probe)
    except GraftError as error:
        return f"does not run: {error.__cause__}"
    return "" if same(output, expected, tolerance=1e-4) else "does not compute what the body computes on the probe"


def _probe(body: Body) -> Any:
    """Return the probe of a body on the device of its parameters."""
    device = next((p.device for p in body.parameters()), torch.device("cpu"))
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, body.probe)
