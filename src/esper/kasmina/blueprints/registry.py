"""Blueprint registry: features at a slot, registration, construction, cost, and the checks of a new seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import BlueprintError, unknown_name


class Layout(StrEnum):
    """Layout of the features at a slot. A blueprint declares which layouts it supports."""

    MAP = "map"  # [B, C, H, W]
    SEQUENCE = "sequence"  # [B, T, D], a position may depend on earlier ones only
    VECTOR = "vector"  # [B, D]
    BIDIRECTIONAL = "bidirectional"  # [B, T, D], positions of the model depend on later ones
    SIGNAL = "signal"  # [B, C, L], positions of the model depend on later ones
    VOLUME = "volume"  # [B, C, D, H, W]


SPATIAL = {Layout.SIGNAL: 1, Layout.MAP: 2, Layout.VOLUME: 3}
"""Number of axes after the channels, for layouts with the channels on axis 1."""


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The features at one slot, as observed in the probe."""

    layout: Layout
    dim: int
    """Number of channels of a map, signal or volume, or width of a sequence or vector."""
    shape: tuple[int, ...]
    """Shape of one sample, without the batch dimension."""
    channels_last: bool = False
    """Whether a map has channels_last memory format. Seeds are built in the same format."""
    batch_axis: int = 0
    """Axis of the features that holds the batch: 1 for recurrent states and time-major sequences, else 0."""
    swapped: tuple[int, int] | None = None
    """Two axes that are swapped for the seed, which takes [B, T, D]: (0, 1) for [T, B, D], (1, 2) for [B, D, T]."""

    @property
    def channel_axis(self) -> int:
        """Return the axis of the features that holds the channels or the width."""
        return 1 if self.layout in SPATIAL or self.swapped == (1, 2) else -1

    def batch_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of a batch of `size` samples."""
        return (*self.shape[: self.batch_axis], size, *self.shape[self.batch_axis :])


Factory = Callable[[int], nn.Module]
"""Function from the width of the features to a seed."""


@runtime_checkable
class HostFactory(Protocol):
    """A function that can also make seeds from the model in which they are planted."""

    def __call__(self, dim: int, /) -> nn.Module:
        """Return a seed."""
        ...

    def fits(self, host: nn.Module) -> bool:
        """Return whether a seed can be made from this model."""
        ...

    def from_host(self, host: nn.Module) -> nn.Module:
        """Return a seed made from this model."""
        ...


_FACTORIES: dict[tuple[str, Layout], Factory] = {}
_NUMBERS: dict[str, int] = {name: number for number, name in enumerate(BLUEPRINTS)}


@dataclass(frozen=True, slots=True)
class Cost:
    """Parameters and multiply-adds that a seed adds to its host."""

    params: int
    macs: int
    """Multiply-adds of one forward pass over one sample, counting matrix products and convolutions."""


class Swapped(nn.Module):
    """A module for [B, T, D] at features with two of these axes swapped."""

    def __init__(self, module: nn.Module, axes: tuple[int, int]) -> None:
        super().__init__()
        self.module = module
        self.axes = axes

    def forward(self, h: Tensor) -> Tensor:
        """Return the module's output with the axes of the features."""
        return self.module(h.transpose(*self.axes)).transpose(*self.axes)


class MaskedSwapped(Swapped):
    """The same for a module that takes the mask of its host module."""

    takes_mask = True

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the module's output with the axes of the features."""
        return self.module(h.transpose(*self.axes), mask).transpose(*self.axes)


class Noop(nn.Module):
    """Seed with Δ = 0. The only seed that may have no parameters."""

    def forward(self, h: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(h)


def fitted(module: nn.Module, spec: FeatureSpec) -> nn.Module:
    """Return a module for a layout as one for the axes of these features."""
    if spec.swapped is None or isinstance(module, Noop):
        return module
    return (MaskedSwapped if getattr(module, "takes_mask", False) else Swapped)(module, spec.swapped)


def blueprint(name: str, *, layouts: Iterable[Layout | str] | str) -> Callable[[Factory], Factory]:
    """Register a function from width to module as a blueprint. Use it as a decorator.

    The module returns the change Δ(h) of the features h, in their shape, with Δ = 0 when it is built. A name may have
    one function per layout. User-defined names are numbered after the built-in ones, in order of registration.

    Args:
        name: Name of the blueprint.
        layouts: Layouts that it serves: "map", "signal", "volume", "vector", "sequence" or "bidirectional".

    Returns:
        The decorator; it returns the function itself.

    Raises:
        BlueprintError: The name is taken or empty, or a layout does not exist.

    Example:
        >>> @esper.blueprint("scale_and_shift", layouts="vector")
        ... def scale_and_shift(dim):
        ...     layer = nn.Linear(dim, dim)
        ...     nn.init.zeros_(layer.weight)
        ...     nn.init.zeros_(layer.bias)
        ...     return layer
        >>> grower.germinate("1", "scale_and_shift")
        >>> from esper.kasmina.blueprints import unregister
        >>> unregister("scale_and_shift")
    """
    served = [_layout(each) for each in ([layouts] if isinstance(layouts, str) else layouts)]
    if not name or not served:
        raise BlueprintError(
            f"a blueprint needs a name and a layout, got {name!r} for {served}. Layouts: {_listed(Layout)}"
        )

    def register(factory: Factory) -> Factory:
        duplicates = [each for each in served if (name, each) in _FACTORIES]
        if duplicates:
            raise BlueprintError(
                f"blueprint {name!r} is already registered for {_listed(duplicates)}. Choose another name, or remove "
                f"the first with unregister({name!r}) if it is yours"
            )
        _FACTORIES.update({(name, each): factory for each in served})
        _NUMBERS.setdefault(name, max(_NUMBERS.values()) + 1)
        return factory

    return register


def unregister(name: str) -> None:
    """Remove a user-defined blueprint. The numbers of other blueprints do not change."""
    if name in BLUEPRINTS:
        raise BlueprintError(f"blueprint {name!r} is built in and cannot be unregistered")
    blueprint_index(name)
    del _NUMBERS[name]
    for layout in Layout:
        _FACTORIES.pop((name, layout), None)
    cost.cache_clear()


def blueprint_index(name: str) -> int:
    """Return the stored number of a blueprint."""
    if name not in _NUMBERS:
        raise unknown_name("blueprint", name, _NUMBERS)
    return _NUMBERS[name]


def blueprint_name(index: int) -> str:
    """Return the name of the blueprint with this stored number."""
    for name, number in _NUMBERS.items():
        if number == index:
            return name
    raise unknown_name("blueprint with number", str(index), map(str, _NUMBERS.values()))


def registered() -> list[str]:
    """Return the names of all blueprints, in the order of their stored numbers."""
    return sorted(_NUMBERS, key=_NUMBERS.__getitem__)


def blueprints_for(layout: Layout | str, host: nn.Module | None = None) -> list[str]:
    """Return the blueprints for a layout in the order of their stored numbers, without `noop`.

    With `host`, those whose seeds cannot be made from this model are left out.
    """
    layout = _layout(layout)
    factories = {name: factory_of(name, layout) for name in registered() if name != "noop"}
    return [name for name, factory in factories.items() if factory is not None and _is_offered(factory, host)]


def _is_offered(factory: Factory, host: nn.Module | None) -> bool:
    return host is None or not isinstance(factory, HostFactory) or factory.fits(host)


def build(
    name: str,
    spec: FeatureSpec,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    rng_seed: int | None = None,
    host: nn.Module | None = None,
) -> nn.Module:
    """Return a new seed for features of this kind. With `rng_seed` its weights are the same on every device.

    `host` is the model from which a `HostFactory` makes the seed.
    """
    with seeded(rng_seed), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        return _make(name, spec, host).to(device=device, dtype=dtype)


@contextmanager
def seeded(rng_seed: int | None) -> Iterator[None]:
    """Seed the global generator with `rng_seed` and restore it on exit. None does nothing."""
    if rng_seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng_seed)  # torch.manual_seed would also reset the CUDA generators
        yield


class MacCounter(TorchDispatchMode):
    """Adds up the operations for which `torch.utils.flop_counter` has a formula.

    `FlopCounterMode` itself does not work with `torch.autograd.grad`, which shadow passes use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it."""
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def count_macs(run: Callable[[], object]) -> int:
    """Return the multiply-adds of the matrix products and convolutions that `run` performs."""
    with sdpa_kernel(SDPBackend.MATH), MacCounter() as counter:  # there is no formula for fused attention on a CPU
        run()
    return counter.flops // 2


@lru_cache(maxsize=4096)
def cost(name: str, spec: FeatureSpec) -> Cost:
    """Return what a blueprint would add to such features, counted on the meta device without memory or arithmetic."""
    try:
        return _count(name, spec, "meta")
    except (BlueprintError, RuntimeError):  # a factory that reads tensor values needs real ones
        with seeded(0):
            return _count(name, spec, "cpu")


def _count(name: str, spec: FeatureSpec, device: str) -> Cost:
    """Build the seed on `device` and count its parameters and multiply-adds."""
    with torch.device(device):
        seed = _make(name, spec).to(device, torch.get_default_dtype()).eval()
        h = torch.empty(spec.batch_shape(1))
        macs = count_macs(lambda: _quiet_forward(seed, h, f"blueprint {name!r}", spec))
    return Cost(sum(p.numel() for p in seed.parameters()), macs)


def check(seed: nn.Module, spec: FeatureSpec, *, name: str | None = None) -> None:
    """Check a new seed. Raise BlueprintError with the rule it breaks.

    Germination must not change the host: Δ has the shape and dtype of the features, is exactly zero, and the features
    are not modified in place. Every seed except a noop has trainable parameters.
    """
    label = f"blueprint {name!r}" if name else f"seed {type(seed).__name__}"

    def broken(reason: str) -> BlueprintError:
        return _broken(label, spec, reason)

    like = next((p for p in seed.parameters() if p.is_floating_point()), torch.empty(0))
    noise = torch.Generator().manual_seed(0)
    probe = torch.randn(spec.batch_shape(2), generator=noise).to(like)  # includes negative values, to detect relu_
    before = probe.clone()
    delta = _quiet_forward(seed, probe, label, spec)

    if not isinstance(delta, Tensor):
        raise broken(f"it returns {type(delta).__name__}; return one tensor, the change Δ(h)")
    if delta.shape != probe.shape or delta.dtype != probe.dtype:
        raise broken(
            f"from {probe.dtype} {tuple(probe.shape)} it makes {delta.dtype} {tuple(delta.shape)}; "
            "Δ must have the shape and dtype of the features"
        )
    if not torch.equal(probe, before):
        raise broken("it writes into its input; use operations that are not in-place on the features")
    if delta.count_nonzero() > 0:  # sync: once per germination
        raise broken(
            f"Δ is not zero at birth, largest |Δ| is {delta.abs().max():.3g}. Return the change, not "
            "h + change, and zero the weight and bias of the last projection, with no norm after it"
        )
    if not isinstance(seed, Noop) and not any(p.requires_grad for p in seed.parameters()):
        raise broken("it has no trainable parameters")


def check_own(name: str, spec: FeatureSpec, *, device: torch.device, dtype: torch.dtype, host: nn.Module) -> None:
    """Raise BlueprintError if a user-defined blueprint does not build a valid seed for such features.

    Built-in blueprints are skipped: tests verify them at every width, so large ones need not be built here.
    """
    if name not in BLUEPRINTS:
        check(build(name, spec, device=device, dtype=dtype, rng_seed=0, host=host), spec, name=name)


def _broken(label: str, spec: FeatureSpec, reason: str) -> BlueprintError:
    """Return the error for a broken rule."""
    return BlueprintError(f"{label} is not valid for {spec.layout} features of shape {spec.shape}: {reason}")


def _quiet_forward(seed: nn.Module, probe: Tensor, label: str, spec: FeatureSpec) -> object:
    """Run the seed in eval mode without gradients, then restore the mode of each submodule.

    Autocast is disabled: it would change the output dtype whatever the seed does.
    """
    modes = [(part, part.training) for part in seed.modules()]
    try:
        # autocast does not support the meta device
        kind = probe.device.type
        with torch.no_grad(), nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            return seed.eval()(probe)
    except Exception as error:
        raise _broken(label, spec, f"its forward fails with {type(error).__name__}: {error}") from error
    finally:
        for part, training in modes:
            part.training = training


def _make(name: str, spec: FeatureSpec, host: nn.Module | None = None) -> nn.Module:
    """Call the factory of a blueprint for such features. Raise BlueprintError if it fails."""
    blueprint_index(name)
    factory = factory_of(name, spec.layout)
    if factory is None:
        raise BlueprintError(
            f"blueprint {name!r} serves {_listed(each for n, each in _FACTORIES if n == name)}, "
            f"not {spec.layout} features. These take: {_listed(blueprints_for(spec.layout))}"
        )
    try:
        seed = factory.from_host(host) if host is not None and isinstance(factory, HostFactory) else factory(spec.dim)
    except Exception as error:
        raise BlueprintError(
            f"blueprint {name!r} cannot be built for {spec.layout} features of width {spec.dim}: its function fails "
            f"with {type(error).__name__}: {error}"
        ) from error
    if not isinstance(seed, nn.Module):
        raise BlueprintError(f"blueprint {name!r} must return an nn.Module, got {type(seed).__name__}")
    return fitted(seed, spec)


def factory_of(name: str, layout: Layout) -> Factory | None:
    """Return the function of a blueprint for a layout. A user's for sequences also serves bidirectional models."""
    if layout == Layout.BIDIRECTIONAL and name not in BLUEPRINTS:
        return _FACTORIES.get((name, layout)) or _FACTORIES.get((name, Layout.SEQUENCE))
    return _FACTORIES.get((name, layout))


def _layout(layout: Layout | str) -> Layout:
    """Return the layout with this name. Raise UnknownNameError if there is none."""
    try:
        return Layout(layout)
    except ValueError:
        raise unknown_name("layout", str(layout), Layout) from None


def _listed(names: Iterable[str]) -> str:
    """Return the names separated by commas, or "none"."""
    return ", ".join(names) or "none"
