"""Graft: give any model slots, without changing what it computes.

    body = esper.graft(model, at=["layer1", "layer2"], probe=x)

A hook is installed after each named module, once. Then the model is run on a few samples of `probe`:
every slot must be reached, its features must be a floating tensor that seeds can be built for, and the
place where the batch may fork for coalition evaluation is found by trying it (see `forking`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.kasmina.body import Body, call
from esper.kasmina.forking import ForkError, ForkPlan, ForkPoint, is_batched
from esper.kasmina.site import Layout, Site
from esper.kasmina.slot import Select, Slot
from esper.leyline.errors import GraftError, unknown_name
from esper.leyline.stages import SeedStage

PROBE_SAMPLES = 3
"""Samples in the fork probe: with one, or with no difference between rows, mixing would go unseen."""
AUTO_SLOTS = 3
LAYOUTS = {4: Layout.MAP, 3: Layout.SEQUENCE, 2: Layout.VECTOR}
WRAPPERS = {
    "DistributedDataParallel": "Graft the plain module first, then wrap the body: DDP(esper.graft(model, …)).",
    "DataParallel": "Graft the plain module first; DataParallel copies modules each call and cannot carry growth.",
    "FullyShardedDataParallel": "FSDP shards parameters when it wraps, so seeds cannot join later: use DDP.",
    "FSDPModule": "FSDP shards parameters when it wraps, so seeds cannot join later: use DDP.",
    "OptimizedModule": "Graft the model before torch.compile, then compile the body.",
    "ScriptModule": "A scripted module has no Python forward to hook: graft the model it was made from.",
}


def graft(
    model: nn.Module,
    at: str | Sequence[str] | Mapping[str, str] = "auto",
    *,
    probe: Any,
    select: Mapping[str, int | str] | None = None,
) -> Body:
    """Give `model` slots and return the body.

    at      module names or patterns ("layer*"), or a mapping of slot id → module name, or "auto"
    probe   one batch the model accepts (a tensor, a tuple of positions or a mapping of keywords), ≥ 3 samples
    select  for modules that return a tuple or mapping: where in it the features are, by module name
    """
    refuse_wrapped(model)
    probe, size = few_samples(probe)
    sites = find_sites(model, at, probe)
    handles: list[Any] = []
    seen: dict[str, Any] = {}
    calls: list[str] = []

    def watch(name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            seen.setdefault(name, output)
            calls.append(name)

        return look

    modules = dict(model.named_modules())
    try:
        for name in sites.values():
            handles.append(modules[name].register_forward_hook(watch(name)))
        quietly(model, probe)
    finally:
        for handle in handles:
            handle.remove()

    slots = []
    for slot_id, name in sites.items():
        if name not in seen:
            ran = ", ".join(dict.fromkeys(calls)) or "none of those named"
            raise GraftError(
                f"module {name!r} was not called when the model ran on the probe, so a slot there would never "
                f"be reached. Graft after a module that runs (of those named, these did: {ran})"
            )
        chosen, features = find_features(name, seen[name], (select or {}).get(name))
        slots.append(Slot(slot_id, name, site_of(name, features), chosen).to(features.device))
    body = Body(model, slots, probe)
    find_forks(body, probe, size)
    return body


def refuse_wrapped(model: nn.Module) -> None:
    if isinstance(model, Body):
        raise GraftError("this model is a body already. Name all its slots in one call of esper.graft.")
    kinds = {c.__name__ for c in type(model).__mro__}
    for kind, way_out in WRAPPERS.items():
        if kind in kinds:
            raise GraftError(f"cannot graft a {type(model).__name__}. {way_out}")
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise GraftError("cannot graft a model that was compiled in place. Graft it first, then compile the body.")


def few_samples(probe: Any) -> tuple[Any, int]:
    """The first few samples of a batch, and how many they are."""
    tensors = [x for x in pytree.tree_leaves(probe) if isinstance(x, Tensor) and x.ndim > 0]
    if not tensors:
        raise GraftError(f"the probe holds no tensor with a batch dimension: {type(probe).__name__}")
    size = tensors[0].shape[0]
    if size < PROBE_SAMPLES:
        raise GraftError(
            f"the probe has {size} sample(s). Give at least {PROBE_SAMPLES}: with fewer, samples that influence "
            "each other could not be told from samples that do not."
        )
    few = pytree.tree_map(lambda x: x[:PROBE_SAMPLES] if is_batched(x, size) else x, probe)
    return few, PROBE_SAMPLES


@torch.no_grad()
def quietly(model: nn.Module, batch: Any) -> Any:
    """Run a model in eval without leaving a trace: modes and the random stream are put back."""
    training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        with torch.random.fork_rng(devices=[]):
            return call(model, batch)
    except (TypeError, RuntimeError, ValueError) as error:
        raise GraftError(f"the model does not run on the probe: {error}") from error
    finally:
        for module in training:
            module.training = True


def find_sites(model: nn.Module, at: str | Sequence[str] | Mapping[str, str], probe: Any) -> dict[str, str]:
    """Slot id → module name, in the order given."""
    names = [name for name, _ in model.named_modules() if name]
    if at == "auto":
        sites = propose_sites(model, probe)
        print("esper: slots proposed after " + ", ".join(sites))
        return {name: name for name in sites}
    wanted = dict(at) if isinstance(at, Mapping) else {}
    for pattern in () if isinstance(at, Mapping) else ([at] if isinstance(at, str) else at):
        if pattern in names:
            found = [pattern]
        else:  # one * stays within one level: "blocks.*" means the blocks, not their parts
            found = [n for n in names if fnmatch.fnmatchcase(n, pattern) and n.count(".") == pattern.count(".")]
        if not found:
            raise unknown_name("module", pattern, names)
        wanted |= {name: name for name in found}
    for name in wanted.values():
        if name not in names:
            raise unknown_name("module", name, names)
    if not wanted:
        raise GraftError("no place named: give module names in `at`, or at='auto'")
    twice = [n for n in wanted.values() if list(wanted.values()).count(n) > 1]
    if twice:
        raise GraftError(f"two slots after the same module {twice[0]!r}: one module holds one slot")
    return wanted


def propose_sites(model: nn.Module, probe: Any) -> list[str]:
    """Up to three places spread over the model: after its blocks, or its layers if it has none."""
    order: list[tuple[str, nn.Module, Any]] = []
    handles = []
    names = {id(m): n for n, m in reversed(list(model.named_modules()))}

    def look(module: nn.Module, args: Any, output: Any) -> None:
        order.append((names[id(module)], module, output))

    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(look))
    try:
        output = quietly(model, probe)
    finally:
        for handle in handles:
            handle.remove()
    ends = {id(x) for x in pytree.tree_leaves(output)}
    fit: dict[str, nn.Module] = {}
    for name, module, out in order:
        try:
            _, features = find_features(name, out, None)
            site_of(name, features)
        except GraftError:
            continue
        if id(features) not in ends and not name.startswith("lm_head"):
            fit[name] = module
    blocks = {n for n, m in fit.items() if any(True for _ in m.children()) and any(True for _ in m.parameters())}
    for depth in range(4):
        level = [n for n in fit if n in blocks and n.count(".") == depth]
        if len(level) >= 2:
            break
    else:
        level = [n for n, m in fit.items() if not any(True for _ in m.children())]
        nonlinear = [n for n in level if not any(True for _ in fit[n].parameters())]
        level = nonlinear or level
    if not level:
        raise GraftError(
            "found no place for a slot: no inner module returns a floating tensor [B, C, H, W], [B, T, D] or [B, D]. "
            "Name the modules in `at` to see why each does not fit."
        )
    n = min(AUTO_SLOTS, len(level))
    return [level[(i + 1) * len(level) // n - 1] for i in range(n)]


def find_features(name: str, output: Any, key: int | str | None) -> tuple[Select, Tensor]:
    """Where in a module's output the features are; said explicitly, or plain from its shape."""
    if isinstance(output, Tensor):
        if key is not None:
            raise GraftError(f"select={key!r} was given for {name!r}, but it returns a tensor, not a tuple or mapping")
        return Select(), _floating(name, output)
    if isinstance(output, Mapping):
        choices: dict[int | str, Any] = dict(output)
    elif isinstance(output, (tuple, list)):
        choices = dict(enumerate(output))
    else:
        raise GraftError(f"module {name!r} returns a {type(output).__name__}; a slot needs a tensor, tuple or mapping")
    floats = [k for k, v in choices.items() if isinstance(v, Tensor) and v.is_floating_point()]
    if key is None:
        plain = 0 if 0 in floats else "last_hidden_state" if "last_hidden_state" in floats else None
        if plain is None and len(floats) == 1:
            plain = floats[0]
        if plain is None:
            raise GraftError(
                f"module {name!r} returns a {type(output).__name__} in which the features are not obvious. "
                f"Say where: select={{{name!r}: …}} with one of {floats or 'its floating tensors (it has none)'}"
            )
        key = plain
    if key not in choices:
        raise GraftError(f"select={key!r} for {name!r}: its output has {list(choices)}")
    value = choices[key]
    if not isinstance(value, Tensor):
        raise GraftError(f"item {key!r} of {name!r}'s output is a {type(value).__name__}, not a tensor")
    return Select(key, hasattr(output, "_fields")), _floating(name, value)


def _floating(name: str, features: Tensor) -> Tensor:
    if not features.is_floating_point():
        raise GraftError(f"module {name!r} returns {features.dtype}; a seed needs floating-point features")
    return features


def site_of(name: str, features: Tensor) -> Site:
    layout = LAYOUTS.get(features.ndim)
    if layout is None:
        raise GraftError(
            f"module {name!r} returns shape {tuple(features.shape)}; slots take [B, C, H, W], [B, T, D] or [B, D]. "
            "Graft after a neighbouring module."
        )
    dim = features.shape[1] if layout == Layout.MAP else features.shape[-1]
    strided = features.ndim == 4 and features.shape[1] > 1 and features.shape[2] * features.shape[3] > 1
    channels_last = strided and features.is_contiguous(memory_format=torch.channels_last)
    return Site(layout, dim, tuple(features.shape[1:]), channels_last)


# -- fork points


class _Noise(nn.Module):
    """A stand-in seed for the probe: a fixed change per sample, so that rows differ and mixing shows."""

    def __init__(self, samples: int, scale: float) -> None:
        super().__init__()
        self.samples, self.scale = samples, scale

    def forward(self, h: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(h[0].numel())
        noise = torch.randn(self.samples, *h.shape[1:], generator=generator).to(h.device, h.dtype) * self.scale
        if h.shape[0] % self.samples:
            raise ForkError("the leading dimension is not a multiple of the batch")
        return noise.repeat(h.shape[0] // self.samples, *[1] * (h.ndim - 1))


def _ancestors(name: str) -> Iterable[str]:
    """Enclosing modules from the nearest to the model itself ("")."""
    parts = name.split(".")
    for i in range(len(parts) - 1, -1, -1):
        yield ".".join(parts[:i])


@torch.no_grad()
def find_forks(body: Body, probe: Any, size: int) -> None:
    """For each slot the innermost place where the batch may fork, and the order in which they are met."""
    training = [m for m in body.modules() if m.training]
    body.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            sequence = _meeting_order(body, probe)
            for slot in body.slots.values():
                body.forks[slot.name] = _find_fork(body, slot, probe, size, sequence)
    finally:
        for module in training:
            module.training = True
    used = {point for point in body.forks.values() if point is not None}
    body.fork_sequence = [p for p in sequence if p in used]


def _meeting_order(body: Body, probe: Any) -> list[ForkPoint]:
    """Every possible fork point in the order of one plain run."""
    met: list[ForkPoint] = [ForkPoint(True, "")]
    handles = []
    modules = dict(body.model.named_modules())

    def note(point: ForkPoint) -> Any:
        return lambda *_: met.append(point)

    try:
        for name in {a for s in body.slots.values() for a in _ancestors(s.module_name) if a}:
            handles.append(modules[name].register_forward_pre_hook(note(ForkPoint(True, name))))
        for slot in body.slots.values():
            handles.append(modules[slot.module_name].register_forward_hook(note(ForkPoint(False, slot.name))))
        call(body.model, probe)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(met))


def _find_fork(body: Body, slot: Slot, probe: Any, size: int, sequence: list[ForkPoint]) -> ForkPoint | None:
    slot.seed, slot.stage = _Noise(size, 1.0), SeedStage.TRAINING
    try:
        expected = []
        for on in (False, True):
            expected.append(body.evaluate_rows(probe, size, ForkPlan.single([on], [slot.name]))[0])
        candidates = [
            ForkPoint(False, slot.name),
            *(ForkPoint(True, a) for a in _ancestors(slot.module_name)),
        ]
        for point in candidates:
            plan = ForkPlan.build([[False], [True]], [slot.name], {slot.name: point}, [point], [True])
            try:
                got = body.evaluate_rows(probe, size, plan)
            except (ForkError, RuntimeError, ValueError, IndexError, TypeError, AssertionError):
                continue  # shapes do not fit: something goes around this point
            if point in sequence and all(same(a, b) for a, b in zip(got, expected, strict=True)):
                return point
        return None
    except ForkError:
        return None
    finally:
        slot.uproot()
        slot.stage = SeedStage.DORMANT


def same(a: Any, b: Any, tolerance: float = 1e-3) -> bool:
    """Whether two outputs agree, up to the rounding that another batch size brings."""
    compared = 0
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.is_floating_point():
            if x.shape != y.shape:
                return False
            scale = y.abs().amax().clamp(min=1e-6) if y.numel() else 1.0
            if not bool(((x - y).abs() <= tolerance * scale).all()):  # sync: once, at graft
                return False
            compared += 1
    return compared > 0
