"""Body: a model with slots. It is called like the model and forwards unknown attributes to it.

The model keeps its type, keys and outputs. `state_dict` has the model's own keys, plus `esper.…` keys once
a seed is planted. Loading such a state rebuilds the seeds it names.

Training libraries inspect the class of a model. transformers' Trainer reads the names of a model's arguments and labels
from `type(model).forward`, and its loss from the class name. So each body gets a class of its own (`body_type`).
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from esper.kasmina import blueprints
from esper.kasmina.attention_masks import MaskArgument
from esper.kasmina.blueprints import Cost
from esper.kasmina.blueprints.registry import Layout
from esper.kasmina.fork_state import ForkState
from esper.kasmina.forking import Norm
from esper.kasmina.slot import Incubation, Mode, Slot
from esper.leyline.actions import Operator
from esper.leyline.atomic_io import write_atomically
from esper.leyline.errors import BlueprintError, ConfigError, GraftError, unknown_name
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import SeedStage

STRUCTURE = "esper.structure"
"""State key under which a grown body stores which seeds it holds."""


class Body(nn.Module):
    """A model with slots. `esper.graft` returns one.

    `state_dict` holds the model under its own keys and the seeds under `esper.…` keys; `load_state_dict` rebuilds them.
    An instance has a class of its own, derived from this one, with the name and call signature of the model's class.

    Args:
        model: The model.
        slots: The slots, already placed in the model.
        probe: The batch with which the model was grafted.
        allowed: Names of the blueprints that may be planted; empty allows all that fit a slot.

    Example:
        >>> body.model is model, list(body.slots), type(body).__name__
        (True, ['1'], 'Sequential')
    """

    def __init__(self, model: nn.Module, slots: Sequence[Slot], probe: Any, allowed: Sequence[str] = ()) -> None:
        super().__init__()
        self.__class__ = body_type(Body, type(model))
        if "esper" in dict(model.named_children()):
            raise GraftError(
                "the model has a child named 'esper', the name under which a body stores its slots. Rename it"
            )
        self.model = model
        self.esper = nn.Module()  # not a ModuleDict: a slot may be named `values`
        for slot in slots:
            self.esper.add_module(slot.name.replace(".", "/"), slot)
        self.slots: dict[str, Slot] = {slot.name: slot for slot in slots}  # plain dict: `esper` owns the modules
        self.training = model.training
        self.esper.train(model.training)
        self.allowed_blueprints = tuple(allowed)
        self.probe = probe  # a few samples, on which `harden` compares outputs
        self.incubation: Incubation = "shadow"
        self.forking = ForkState(model, self.slots)
        self.on_load: list[Callable[[], None]] = []
        self.register_load_state_dict_post_hook(_notify)  # also if a module that holds the body is loaded
        modules = dict(model.named_modules())
        for slot in slots:
            module = modules[slot.module_name]
            if slot.spec.layout == Layout.BIDIRECTIONAL:
                slot.mask_argument = MaskArgument.of(module)
            module.register_forward_hook(slot.after, with_kwargs=True)
        self.norms = [m for m in model.modules() if isinstance(m, Norm) and m.running_mean is not None]

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that the body lacks (`config`, `generate`, …) on its model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and saving, without the `on_load` listeners of this instance."""
        return {**self.__dict__, "on_load": []}

    def __reduce__(self) -> Any:
        """Return how to rebuild the body from its state; its class is made at run time and cannot be imported."""
        return new_body, (Body, type(self.model)), self.__getstate__()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Names that DistributedDataParallel leaves out: its buckets are fixed when it is built, seeds come and go."""
        own = [name for name, _ in (*self.esper.named_parameters(), *self.esper.named_buffers())]
        ignored = getattr(self.model, "_ddp_params_and_buffers_to_ignore", ())
        return [*(f"esper.{name}" for name in own), *(f"model.{name}" for name in ignored)]

    # -- growth: called when effects are carried out

    def slot(self, name: str) -> Slot:
        """Return the slot `name`. Raise UnknownNameError if there is none."""
        if name not in self.slots:
            raise unknown_name("slot", name, self.slots)
        return self.slots[name]

    def anchor(self, slot: Slot) -> tuple[torch.device, torch.dtype]:
        """Return the device and dtype for a seed of this slot: those of the module it follows."""
        module = self.model.get_submodule(slot.module_name)
        for p in (*module.parameters(), *self.model.parameters()):
            if p.is_floating_point():
                return p.device, p.dtype
        return slot.alpha.device, torch.get_default_dtype()

    def plant(self, name: str, blueprint: str, operator: Operator = Operator.ADD, *, rng_seed: int = 0) -> Slot:
        """Build a seed in the slot `name`, with weights drawn from `rng_seed`, and return the slot."""
        slot = self.slot(name)
        self.check_allowed(blueprint)
        device, dtype = self.anchor(slot)
        slot.to(device)
        slot.plant(blueprint, operator, device=device, dtype=dtype, rng_seed=rng_seed, host=self.model)
        slot.train(self.model.training)
        return slot

    def check_allowed(self, blueprint: str) -> None:
        """Raise BlueprintError unless the graft allows this blueprint."""
        if self.allowed_blueprints and blueprint not in self.allowed_blueprints:
            raise BlueprintError(
                f"{blueprint!r} is not among the blueprints that this body was grafted with: "
                f"{', '.join(self.allowed_blueprints)}. Use one of these, or graft with blueprints=[..., {blueprint!r}]"
            )

    def sync(self, table: SlotTable, env: int = 0) -> None:
        """Copy stage, alpha and frozenness from the table to the slots. Nothing else writes them during a run."""
        frozen = table.frozen[env]
        for s, slot in enumerate(self.slots.values()):
            self.set_slot(slot, SeedStage(int(table.stage[env, s])), float(table.alpha[env, s]), bool(frozen[s]))

    def set_slot(self, slot: Slot, stage: SeedStage, alpha: float, frozen: bool = False) -> None:
        """Set a slot's stage and alpha, and `requires_grad` of its parameters."""
        slot.stage = stage
        slot.mode = Mode.of(stage, self.incubation)
        if slot.amplitude != alpha:
            slot.amplitude = alpha
            slot.alpha.fill_(alpha)
        learns = stage >= SeedStage.TRAINING and not frozen
        for p in slot.parameters():
            if p.requires_grad != learns and stage != SeedStage.FOSSILIZED:  # users freeze fossils themselves
                p.requires_grad_(learns)
                p.grad = None

    # -- queries

    def players(self, fossils: bool = False) -> list[Slot]:
        """Return the players of a coalition: slots with an uncommitted seed and alpha > 0, and fossils if `fossils`."""
        last = SeedStage.FOSSILIZED if fossils else SeedStage.HOLDING
        return [s for s in self.slots.values() if SeedStage.BLENDING <= s.stage <= last and s.amplitude > 0]

    @property
    def training_slots(self) -> list[Slot]:
        """Return the slots whose seed is TRAINING."""
        return [s for s in self.slots.values() if s.stage == SeedStage.TRAINING]

    def costs(self) -> dict[str, dict[str, Cost]]:
        """Return what every blueprint would cost at every slot that takes it, before anything is built.

        Returns:
            Parameters and multiply-adds by slot and blueprint.
        """
        return {
            name: {b: blueprints.cost(b, self.slots[name].spec) for b in names}
            for name, names in self.valid_blueprints().items()
        }

    def valid_blueprints(self) -> dict[str, list[str]]:
        """Return the blueprints that can be planted in each slot.

        A user's own blueprint is built and checked at every slot whose layout it serves. Slots at which it fails the
        check do not offer it, and a warning is issued.

        Returns:
            Names of blueprints by slot.

        Raises:
            BlueprintError: No slot takes one of your blueprints.
        """
        valid: dict[str, list[str]] = {}
        refused: dict[str, dict[str, BlueprintError]] = {}
        for slot_name, slot in self.slots.items():
            fitting = blueprints.blueprints_for(slot.spec.layout, self.model)
            valid[slot_name] = [name for name in fitting if name in (self.allowed_blueprints or fitting)]
            device, dtype = self.anchor(slot)
            for name in list(valid[slot_name]):
                try:
                    blueprints.check_own(name, slot.spec, device=device, dtype=dtype, host=self.model)
                except BlueprintError as error:
                    valid[slot_name].remove(name)
                    refused.setdefault(name, {})[slot_name] = error
        for name, reasons in refused.items():
            _report_refusal(name, reasons, is_taken=any(name in names for names in valid.values()))
        return valid

    # -- shadow pass: a separate training pass for one seed

    @contextmanager
    def shadowed(self, slot: Slot) -> Iterator[None]:
        """Run a pass with this seed at full strength on detached features, and restore all other state on exit.

        BatchNorms normalise this pass by its own batch statistics and do not update their running statistics.
        Running statistics are wrong behind a seed that is on, and a seed trained under them is worth less once they
        adapt. Other buffers and the random generator are restored, so later dropout does not depend on this pass.
        """
        own = set(slot.modules())
        others = [m for m in self.modules() if m not in own]
        norms = [m for m in others if isinstance(m, Norm) and m.training and m.track_running_stats]
        buffers = [(b, b._version, b.clone()) for m in others if not isinstance(m, Norm) for b in m._buffers.values()
                    if b is not None]  # fmt: skip
        device = slot.alpha.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for n in norms:
                n.track_running_stats = False
            try:
                with slot.shadowing():
                    yield
            finally:
                for n in norms:
                    n.track_running_stats = True
                for buffer, version, before in buffers:
                    if buffer._version != version:
                        with torch.no_grad():
                            buffer.copy_(before)

    def shadow_backward(self, loss: Callable[[], Tensor]) -> None:
        """Add to every TRAINING seed, and nothing else, the gradient of `loss()` with that seed switched on."""
        for slot in self.training_slots:
            params = [p for p in slot.parameters() if p.requires_grad]
            with self.shadowed(slot):
                value = loss()
                if slot.shadow_input is None:
                    continue  # the forward pass did not reach the slot on this batch
                # inside the context: activation checkpointing runs the model again here
                # also request the features' gradient: GroupNorm's backward crashes torch 2.13 without it
                *grads, _ = torch.autograd.grad(value, [*params, slot.shadow_input], allow_unused=True)
            for p, g in zip(params, grads, strict=True):
                if g is not None:
                    if g.stride() != p.stride():  # fused optimisers pair elements by memory offset
                        g = torch.empty_like(p).copy_(g)
                    p.grad = g if p.grad is None else p.grad + g

    # -- state

    def structure(self) -> dict[str, dict[str, Any]]:
        """Return what has grown: enough to rebuild the body.

        Returns:
            Blueprint, operator, stage and alpha of every seed by slot.
        """
        return {
            name: {"blueprint": s.blueprint, "operator": int(s.operator), "stage": int(s.stage), "alpha": s.amplitude}
            for name, s in self.slots.items()
            if s.seed is not None
        }

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the model's state, plus seeds and structure under `esper.…` keys.

        The further names of tied weights hold copies: safetensors refuses tensors that share memory.
        """
        if args:
            raise TypeError("body.state_dict takes keywords only: destination, prefix, keep_vars")
        out = self.model.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name in () if keep_vars else tied_names(self.model):
            if prefix + name in out:
                out[prefix + name] = out[prefix + name].clone()
        self.esper.state_dict(destination=out, prefix=f"{prefix}esper.", keep_vars=keep_vars)
        if structure := self.structure():
            text = json.dumps(structure, sort_keys=True).encode()
            out[prefix + STRUCTURE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return out

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Rebuild the seeds that the state names, then load the state of every module."""
        packed = state_dict.pop(prefix + STRUCTURE, None)
        seeds = {} if packed is None else self._read(packed)
        removed = [n for n, s in self.slots.items() if s.seed is not None and n not in seeds]
        if removed:
            warnings.warn(f"the state has no seed in {', '.join(removed)}: the seeds there are removed", stacklevel=3)
        self._rebuild(seeds)
        for key in [k for k in state_dict if k.startswith(prefix) and not k.startswith(f"{prefix}esper.")]:
            state_dict[f"{prefix}model.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _read(self, packed: Tensor) -> dict[str, tuple[str, Operator, SeedStage, float]]:
        """Decode and validate the structure of a state, before anything is changed."""
        try:
            seeds = {
                name: (str(s["blueprint"]), Operator(s["operator"]), SeedStage(s["stage"]), float(s["alpha"]))
                for name, s in json.loads(bytes(packed.cpu().numpy())).items()
            }
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"the state's {STRUCTURE!r} is not readable: {error!r}") from error
        for name, (blueprint, *_) in seeds.items():
            if name not in self.slots:
                raise GraftError(
                    f"the state holds a seed in slot {name!r}, which this body does not have "
                    f"(it has {', '.join(self.slots)}). Graft at the same places as when it was saved."
                )
            self.check_allowed(blueprint)
            blueprints.cost(blueprint, self.slots[name].spec)  # raises if there is no such blueprint for such a slot
        return seeds

    def _rebuild(self, seeds: dict[str, tuple[str, Operator, SeedStage, float]]) -> None:
        """Remove, plant or update seeds so that the slots match `seeds`."""
        for name, slot in self.slots.items():
            if name not in seeds:
                slot.remove_seed()
                self.set_slot(slot, SeedStage.DORMANT, 0.0)
                continue
            blueprint, operator, stage, alpha = seeds[name]
            if slot.seed is None or slot.blueprint != blueprint:
                slot.remove_seed()
                self.plant(name, blueprint, operator)
            else:
                slot.set_operator(operator)
            self.set_slot(slot, stage, alpha)


def _notify(body: Body, _incompatible_keys: Any) -> None:
    """Call the listeners of a body whose state was loaded."""
    for listener in body.on_load:
        listener()


def _report_refusal(name: str, reasons: Mapping[str, BlueprintError], *, is_taken: bool) -> None:
    """Warn about a blueprint that some slots do not take. Raise BlueprintError if no slot takes it."""
    slot, reason = next(iter(reasons.items()))
    if not is_taken:
        raise BlueprintError(
            f"no slot can take blueprint {name!r}. In slot {slot!r}: {reason}. Fix it, or remove it with "
            f"esper.kasmina.blueprints.unregister({name!r})"
        ) from reason
    warnings.warn(f"blueprint {name!r} is not offered in {', '.join(map(repr, reasons))}: {reason}", stacklevel=5)


def hidden_buffers(body: Body) -> Iterator[tuple[str, Tensor]]:
    """Yield the non-persistent buffers, which no state dict has. Some models keep state in them."""
    for path, module in body.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None and not isinstance(module, Slot):
                yield f"{path}.{name}", buffer


SEEDS_FILE = "esper.safetensors"
"""File with the seeds of a body, next to the files of a model's own `save_pretrained`."""
_TYPES: dict[type[nn.Module], type[Body]] = {}


def body_type(base: type[Body], model_type: type[nn.Module]) -> type[Body]:
    """Return the subclass of `base`, which is Body, for models of a class: with its name and signature of `forward`."""
    if model_type not in _TYPES:
        _TYPES[model_type] = _new_type(base, model_type)
    return _TYPES[model_type]


def _new_type(base: type[Body], model_type: type[nn.Module]) -> type[Body]:
    """Return a new class for bodies of models of a class."""

    def forward(self: Body, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    forward.__doc__ = model_type.forward.__doc__
    forward.__signature__ = inspect.signature(model_type.forward)  # type: ignore[attr-defined]
    members: dict[str, Any] = {"forward": forward, "__doc__": model_type.__doc__, "__module__": base.__module__}
    if hasattr(model_type, "save_pretrained"):
        members["save_pretrained"] = _save_pretrained
    if hasattr(model_type, "push_to_hub"):
        members["push_to_hub"] = _push_to_hub
    return type(model_type.__name__, (base,), members)


def new_body(base: type[Body], model_type: type[nn.Module]) -> Body:
    """Return an empty body for a model of this class, to be filled by `__setstate__`."""
    kind = body_type(base, model_type)
    return kind.__new__(kind)


def tied_names(model: nn.Module) -> Iterator[str]:
    """Yield the further names of parameters that have several."""
    seen: set[nn.Parameter] = set()
    for name, p in model.named_parameters(remove_duplicate=False):
        if p in seen:
            yield name
        seen.add(p)


def save_seeds(body: Body, directory: str | Path) -> None:
    """Write the seeds of a body to `SEEDS_FILE` in a directory, or remove that file if the body has none."""
    path = Path(directory) / SEEDS_FILE
    seeds = {name: tensor for name, tensor in body.state_dict().items() if name.startswith("esper.")}
    if seeds:
        write_atomically(path, save({name: tensor.contiguous() for name, tensor in seeds.items()}))
    else:
        path.unlink(missing_ok=True)


def load_seeds(body: Body, directory: str | Path) -> None:
    """Give a body the seeds of `SEEDS_FILE` in a directory; without that file, none. The model's weights stay."""
    path = Path(directory) / SEEDS_FILE
    seeds = load_file(path) if path.exists() else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the state has no seed in")  # the directory describes the whole body
        body.load_state_dict({**body.model.state_dict(), **seeds})


def _save_pretrained(self: Body, save_directory: str | Path, **kwargs: Any) -> None:
    """Save the model with its own `save_pretrained` and the seeds next to it, for `esper.hf.load_pretrained`."""
    if kwargs.get("push_to_hub"):
        raise ConfigError("save_pretrained(push_to_hub=True) would upload no seeds. Use body.push_to_hub(repo_id).")
    if "state_dict" in kwargs and kwargs["state_dict"] is not None:
        state = kwargs["state_dict"]
        kwargs["state_dict"] = {name: value for name, value in state.items() if not name.startswith("esper.")}
    model_type: Any = type(self.model)
    model_type.save_pretrained(self.model, save_directory, **kwargs)
    if kwargs.get("is_main_process", True):
        save_seeds(self, save_directory)


def _push_to_hub(self: Body, *args: Any, **kwargs: Any) -> Any:
    """Upload with the model's own `push_to_hub`, which saves to a directory first: there, with the seeds."""
    model: Any = self.model
    model.save_pretrained = partial(_save_pretrained, self)
    try:
        return model.push_to_hub(*args, **kwargs)
    finally:
        del model.save_pretrained
