"""Graft: add slots to any model without changing what it computes.

    body = esper.graft(model, at=["layer1", "layer2"], probe=x)

A forward hook is installed after each named module, once. Then the model is run on a few samples of `probe`.
Every slot must be reached, and its features must be a floating-point tensor with a supported layout. The point
where the batch may fork for coalition evaluation is found by trial (see `fork_state`).
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from esper.kasmina.attention_masks import EXCLUDES, with_padding
from esper.kasmina.blueprints.registry import SPATIAL, FeatureSpec, Layout, blueprints_for, registered
from esper.kasmina.body import Body
from esper.kasmina.causality import TokenSpec, looking_ahead
from esper.kasmina.forking import ArgumentForm, argument_form, as_arguments, is_batched
from esper.kasmina.probing import (
    PROBE_SAMPLES,
    channels_first_modules,
    floating_items,
    module_outputs,
    unread_modules,
)
from esper.kasmina.slot import Path, Select, Slot, grafted_module
from esper.leyline.errors import GraftError, unknown_name

Key = int | str | Path
"""Key of the features in a module's output, or a path of keys."""
AUTO_SLOTS = 3
LAYOUTS = {5: Layout.VOLUME, 4: Layout.MAP, 3: Layout.SEQUENCE, 2: Layout.VECTOR}
KINDS = "[B, C, H, W], [B, C, L], [B, C, D, H, W], [B, T, D], [T, B, D] or [B, D]"
"""Shapes of features for which there are blueprints."""
WRAPPERS = {
    "DistributedDataParallel": "Graft the plain module first, then wrap the body: DDP(esper.graft(model, …)).",
    "DataParallel": "Graft the plain module first; DataParallel copies modules each call and cannot carry growth.",
    "FullyShardedDataParallel": "FSDP1 flattens parameters, so seeds cannot be added. Graft the plain module, then use "
    "DDP(body), or FSDP2: fully_shard(body.model).",
    "FSDPModule": "Graft the plain module first, then shard it: fully_shard(body.model).",
    "DeepSpeedEngine": "DeepSpeed partitions parameters. Graft the plain module, then use DDP(body), or FSDP2: "
    "fully_shard(body.model).",
    "OptimizedModule": "Graft the model before torch.compile, then compile the body.",
    "ScriptModule": "A scripted module has no Python forward to hook: graft the model it was made from.",
}


def graft(
    model: nn.Module,
    at: str | Sequence[str] | Mapping[str, str] = "auto",
    *,
    probe: Any,
    select: Mapping[str, Key] | None = None,
    blueprints: Sequence[str] = (),
) -> Body:
    """Add slots to a model. Outputs, call signature and keys of the model do not change.

    Args:
        model: Any module. It gets the slots and stays available as `body.model`. Pass a copy to keep it as it is.
        at: Module names or patterns ("layer*"), a mapping of slot id → module name, or "auto", which proposes modules
            and prints them.
        probe: One batch that the model accepts, with at least 3 samples: a tensor, a tuple of positional arguments or a
            mapping of keyword arguments. "labels" in a mapping are left out.
        select: For modules that return a tuple or mapping: module name → key of the features, or a tuple of keys for an
            item within an item, such as (1, 0) for the last hidden state of an LSTM.
        blueprints: Names of the blueprints that may be planted; empty allows all that fit a slot.

    Returns:
        The body, which is the model with its slots.

    Raises:
        GraftError: A module cannot hold a slot, or a slot takes none of `blueprints`; the message says why and names
            alternatives.
        UnknownNameError: The model has no module of that name, or there is no blueprint of that name.

    Example:
        >>> model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> body = esper.graft(model, at=["1"], probe=x)
        >>> torch.equal(body(x), model(x)), list(body.slots)
        (True, ['1'])
    """
    refuse_wrapped(model)
    if isinstance(probe, Mapping):  # without labels, as in `Grower.step`: a loss over the batch would mix its samples
        probe = {key: value for key, value in probe.items() if key != "labels"}
    probe, form = few_samples(probe)
    sites = find_sites(model, at, probe)
    _, outputs = module_outputs(model, probe, sites.values())
    for name in select or {}:
        if name not in sites.values():
            raise unknown_name("module with a slot", name, sites.values())
    features = {name: _features(name, outputs, (select or {}).get(name)) for name in sites.values()}
    selects = {name: each[0][0] for name, each in features.items()}
    specs = find_specs(model, probe, features)
    refuse_unread(model, probe, selects)
    slots = [
        Slot(slot_id, name, specs[name], selects[name]).to(features[name][0][1].device)
        for slot_id, name in sites.items()
    ]
    body = Body(model, slots, probe, checked_blueprints(blueprints, slots))
    body.forking.arguments[""] = form
    body.forking.find_points(with_padding(model, probe, PROBE_SAMPLES))
    _warn_of_unseen_padding(body, probe)
    return body


def checked_blueprints(names: Sequence[str], slots: Sequence[Slot]) -> tuple[str, ...]:
    """Return the names. Raise UnknownNameError for an unregistered one, GraftError if a slot takes none of them."""
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise GraftError(f"blueprints must be a list of names, such as ['norm'], got {names!r}")
    names = tuple(dict.fromkeys(names))
    if not all(isinstance(name, str) for name in names):
        raise GraftError(f"blueprints must be names, got {names!r}")
    for name in names:
        if name not in registered():
            raise unknown_name("blueprint", name, registered())
    for slot in slots:
        fitting = blueprints_for(slot.spec.layout)
        if names and not set(names) & set(fitting):
            raise GraftError(
                f"slot {slot.name!r} takes none of the blueprints {', '.join(names)}. It takes: {', '.join(fitting)}"
            )
    return names


def _warn_of_unseen_padding(body: Body, probe: Any) -> None:
    """Warn about slots whose attention seeds cannot see the padding mask that the model takes."""
    has_mask = isinstance(probe, Mapping) and any(probe.get(name) is not None for name in EXCLUDES)
    slots = [s.name for s in body.slots.values() if s.spec.layout == Layout.BIDIRECTIONAL and s.mask_argument is None]
    if has_mask and slots:
        warnings.warn(
            f"attention seeds in {', '.join(map(repr, slots))} will attend to padding: the module there takes no "
            f"argument {' or '.join(EXCLUDES)}. Graft after a whole layer, which takes one, or plant other seeds.",
            stacklevel=3,
        )


def _features(name: str, outputs: Mapping[str, list[Any]], key: Key | None) -> list[tuple[Select, Tensor]]:
    """Return the location and tensor of the features in each output of a module. Raise GraftError without outputs."""
    if name not in outputs:
        raise GraftError(
            f"module {name!r} was not called when the model ran on the probe, so a slot there would never "
            f"be reached. Graft after a module that runs (of those named, these did: {', '.join(outputs) or 'none'})"
        )
    return [find_features(name, output, key) for output in outputs[name]]


def find_specs(
    model: nn.Module, probe: Any, features: Mapping[str, list[tuple[Select, Tensor]]]
) -> dict[str, FeatureSpec]:
    """Return the spec of the features after each module. Raise GraftError if no seed fits its features."""
    selects = {name: each[0][0] for name, each in features.items()}
    channels_first = channels_first_modules(model, probe, selects)
    specs: dict[str, FeatureSpec] = {}
    for name, each in features.items():
        module = model.get_submodule(name)
        is_signal = name in channels_first
        kinds = [spec_of(name, h, module, select, is_signal=is_signal) for select, h in each]
        if len({(spec.layout, spec.dim) for spec in kinds}) > 1:
            shapes = ", ".join(str(spec.shape) for spec in kinds)
            raise GraftError(
                f"module {name!r} is called {len(kinds)} times with features of different kinds ({shapes}); no seed "
                "fits them all. Graft after a neighbour of it."
            )
        specs[name] = kinds[0]
    tokens = {
        name: TokenSpec(selects[name], spec.batch_axis, _token_axis(spec), tuple(features[name][0][1].shape))
        for name, spec in specs.items()
        if spec.layout in (Layout.SEQUENCE, Layout.SIGNAL)
    }
    ahead = looking_ahead(model, probe, tokens) if tokens else set()
    return {name: _directed(spec, name in ahead) for name, spec in specs.items()}


def _token_axis(spec: FeatureSpec) -> int:
    """Return the axis of the positions of a sequence or signal."""
    return 2 if spec.layout == Layout.SIGNAL else 1 - spec.batch_axis


def _directed(spec: FeatureSpec, looks_ahead: bool) -> FeatureSpec:
    """Return the spec for seeds that may look ahead, or may not.

    Convolutions over a signal look ahead, so a signal of a causal model takes the seeds of sequences.
    """
    if spec.layout == Layout.SEQUENCE and looks_ahead:
        return replace(spec, layout=Layout.BIDIRECTIONAL)
    if spec.layout == Layout.SIGNAL and not looks_ahead:
        return replace(spec, layout=Layout.SEQUENCE, swapped=(1, 2))
    return spec


def refuse_wrapped(model: Any) -> None:
    """Raise GraftError if the model is no module, or is wrapped, compiled or scripted, or already has slots."""
    if isinstance(model, Body):
        raise GraftError("this model is a body already. Name all its slots in one call of esper.graft.")
    kinds = {c.__name__ for c in type(model).__mro__}
    for kind, way_out in WRAPPERS.items():
        if kind in kinds:
            raise GraftError(f"cannot graft a {type(model).__name__}. {way_out}")
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type) and issubclass(model, nn.Module)
        got = f"the class {model.__name__}" if is_class else f"a {type(model).__name__}"
        way_out = "Pass an instance of it." if is_class else "Call it in the forward of a module, and graft that."
        raise GraftError(f"esper.graft takes a model, an instance of torch.nn.Module, got {got}. {way_out}")
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise GraftError(
                f"cannot graft a model compiled in place ({name or 'the model itself'}). Graft it first, then compile."
            )
    grafted = grafted_module(model)
    if grafted is not None:
        raise GraftError(
            f"this model has slots already (after {grafted!r}). Name all its slots in one call of esper.graft, "
            "or graft a fresh copy of the model."
        )


def refuse_unread(model: nn.Module, probe: Any, selects: Mapping[str, Select]) -> None:
    """Raise GraftError if the model's output does not depend on a slot's features: its seed would have no effect."""
    for name, read in unread_modules(model, probe, selects).items():
        path = selects[name].path
        what = f"item {_shown(path)} of what module {name!r} returns" if path else f"what module {name!r} returns"
        choices = " or ".join(f"select={{{name!r}: {_shown(each)}}}" for each in read)
        way_out = f"It reads another item: use {choices}" if read else "Graft after a module whose output is used"
        raise GraftError(
            f"the model's output does not depend on {what}, so a seed there would change nothing. {way_out}."
        )


def _shown(path: Path) -> str:
    """Return a path in the form that `select` accepts."""
    return repr(path[0] if len(path) == 1 else path)


def few_samples(probe: Any) -> tuple[Any, ArgumentForm]:
    """Return the first few samples of a batch, and which of its tensors have a batch dimension."""
    tensors = [x for x in pytree.tree_leaves(probe) if isinstance(x, Tensor) and x.ndim > 0]
    if not tensors:
        raise GraftError(
            f"the probe holds no tensor with a batch dimension, got a {type(probe).__name__}. {_probe_way_out(probe)}"
        )
    size = tensors[0].shape[0]
    if size < PROBE_SAMPLES:
        raise GraftError(
            f"the probe has {size} sample(s). Give at least {PROBE_SAMPLES}: with fewer, an influence of samples on "
            "each other could not be detected."
        )
    few = pytree.tree_map(lambda x: x[:PROBE_SAMPLES] if is_batched(x, size) else x, probe)
    return few, argument_form(as_arguments(probe), size)


def _probe_way_out(probe: Any) -> str:
    """Return how to get a probe from an object that holds no tensor."""
    if isinstance(probe, DataLoader):
        return "Pass the inputs of one batch: if batches are (inputs, target), next(iter(loader))[0]."
    if any(hasattr(leaf, "__array__") and not isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(probe)):
        return "Convert arrays to tensors with torch.from_numpy(…)."
    return "Pass one batch as the model takes it: a tensor, a tuple of positional arguments or a mapping of keywords."


def _check_names(at: str | Sequence[Any] | Mapping[Any, str]) -> None:
    """Raise GraftError if an item of `at` is not a name, or is repeated."""
    for name in at:
        if not isinstance(name, str):
            raise GraftError(f"`at` takes module names, got a {type(name).__name__}. See model.named_modules().")
        if not isinstance(at, str) and list(at).count(name) > 1:
            raise GraftError(f"`at` names {name!r} more than once; a module can have one slot. Name it once")


def find_sites(model: nn.Module, at: str | Sequence[str] | Mapping[str, str], probe: Any) -> dict[str, str]:
    """Return slot id → module name, in the order given."""
    names = [name for name, _ in model.named_modules() if name]
    if at == "auto":
        proposed = propose_sites(model, probe)
        print("esper: slots proposed after " + ", ".join(proposed))
        return {name: name for name in proposed}
    _check_names(at)
    sites = dict(at) if isinstance(at, Mapping) else {}
    for pattern in () if isinstance(at, Mapping) else ([at] if isinstance(at, str) else at):
        if pattern in names:
            matches = [pattern]
        else:  # a pattern matches names of its own depth: "blocks.*" selects the blocks, not their children
            matches = [n for n in names if fnmatch.fnmatchcase(n, pattern) and n.count(".") == pattern.count(".")]
        if not matches:
            raise unknown_name("module", pattern, names)
        sites |= {name: name for name in matches}
    for name in sites.values():
        if name not in names:
            raise unknown_name("module", name, names)
        if list(sites.values()).count(name) > 1:
            raise GraftError(f"`at` names module {name!r} for two slots; a module can have one slot. Name it once")
    if not sites:
        raise GraftError("`at` is empty. Give module names, or at='auto'")
    return sites


SAME_PLACE = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
"""Layers after which there is no other place than before them."""


def propose_sites(model: nn.Module, probe: Any) -> list[str]:
    """Return up to three module names spread over the model: its blocks, or its layers if it has none."""
    modules = {name: module for name, module in model.named_modules() if name}
    output, outputs = module_outputs(model, probe, modules)
    ends = {id(x) for x in pytree.tree_leaves(output)}
    selects: dict[str, Select] = {}
    for name, each in outputs.items():
        try:
            select, features = find_features(name, each[-1], None)
            spec_of(name, features, modules[name], select)
        except GraftError:
            continue
        if id(features) not in ends and not name.startswith("lm_head"):
            selects[name] = select
    unread = unread_modules(model, probe, selects)
    fit = {name: modules[name] for name in selects if name not in unread}
    level = _siblings(fit) or [n for n, m in fit.items() if not any(True for _ in m.children())]
    if any(not any(True for _ in fit[n].parameters()) for n in level):  # plain layers: choose the activations
        plain = [n for n in level if not any(True for _ in fit[n].parameters())]
        level = [n for n in plain if not isinstance(fit[n], SAME_PLACE)] or plain
    if not level:
        raise GraftError(
            f"no module can have a slot: no inner module returns a floating tensor {KINDS}. "
            "Name the modules in `at` to see why each does not fit."
        )
    n = min(AUTO_SLOTS, len(level))
    return [level[(i + 1) * len(level) // n - 1] for i in range(n)]


def _siblings(fit: dict[str, nn.Module]) -> list[str]:
    """Return a model's blocks: non-leaf modules of one class under one parent, with the most parameters in total."""
    families: dict[tuple[str, type], list[str]] = {}
    for name, module in fit.items():
        if any(True for _ in module.children()) and any(True for _ in module.parameters()):
            families.setdefault((name.rpartition(".")[0], type(module)), []).append(name)
    several = [names for names in families.values() if len(names) > 1]
    return max(several, key=lambda names: sum(p.numel() for n in names for p in fit[n].parameters()), default=[])


def find_features(name: str, output: Any, key: Key | None) -> tuple[Select, Tensor]:
    """Return the location and the tensor of the features in a module's output, from `key` or by convention."""
    path = key if isinstance(key, tuple) else () if key is None else (key,)
    if isinstance(output, Tensor):
        if path:
            raise GraftError(f"select={key!r} was given for {name!r}, but it returns a tensor, not a tuple or mapping")
        return Select(), _floating(name, output)
    if not isinstance(output, (Mapping, tuple, list)):
        raise GraftError(f"module {name!r} returns a {type(output).__name__}; a slot needs a tensor, tuple or mapping")
    select = Select.at(output, path or (_plain_key(name, output),), f"module {name!r}")
    return select, _floating(name, select.get(output))


def _plain_key(name: str, output: Any) -> int | str:
    """Return the key of the features in a tuple or mapping when `select` does not give it."""
    floats = [path[0] for path in floating_items(output) if len(path) == 1]
    plain = 0 if 0 in floats else "last_hidden_state" if "last_hidden_state" in floats else None
    if plain is None and len(floats) == 1:
        return floats[0]
    if plain is None:
        choices = [path[0] if len(path) == 1 else path for path in floating_items(output)]
        raise GraftError(
            f"module {name!r} returns a {type(output).__name__} in which the features are not obvious. "
            f"Use select={{{name!r}: …}} with one of {choices or 'its floating tensors (it has none)'}"
        )
    return plain


def _floating(name: str, features: Tensor) -> Tensor:
    """Return the features. Raise GraftError if they are nested or not floating-point."""
    if features.is_nested:
        raise GraftError(
            f"module {name!r} returns a nested tensor. nn.TransformerEncoder makes them from a padding mask: build it "
            "with enable_nested_tensor=False, or graft after the whole encoder."
        )
    if not features.is_floating_point():
        raise GraftError(f"module {name!r} returns {features.dtype}; a seed needs floating-point features")
    return features


def spec_of(name: str, features: Tensor, module: nn.Module, select: Select, *, is_signal: bool = False) -> FeatureSpec:
    """Return the spec of these features. Raise GraftError if their layout is not supported."""
    layout = Layout.SIGNAL if is_signal else LAYOUTS.get(features.ndim)
    if layout is None:
        raise GraftError(
            f"module {name!r} returns shape {tuple(features.shape)}, for which there is no blueprint. Slots take "
            f"{KINDS}. Graft after a neighbouring module."
        )
    batch_axis = 0
    swapped = None
    is_time_major = isinstance(module, nn.RNNBase) and (_is_state(module, select) or not module.batch_first)
    if layout == Layout.SEQUENCE and (features.shape[0] != PROBE_SAMPLES or is_time_major):
        batch_axis = 1
        if features.shape[1] == PROBE_SAMPLES and not _is_state(module, select):
            swapped = (0, 1)
        else:
            layout = Layout.VECTOR  # axis 0 is not time: only position-wise seeds fit
    dim = features.shape[1] if layout in SPATIAL else features.shape[-1]
    strided = features.ndim == 4 and features.shape[1] > 1 and features.shape[2] * features.shape[3] > 1
    channels_last = strided and features.is_contiguous(memory_format=torch.channels_last)
    shape = tuple(size for axis, size in enumerate(features.shape) if axis != batch_axis)
    return FeatureSpec(layout, dim, shape, channels_last, batch_axis, swapped)


def _is_state(module: nn.Module, select: Select) -> bool:
    """Return whether the features are the last states of a recurrent module, [layers, B, D]."""
    return isinstance(module, nn.RNNBase) and select.key == 1
