"""Probe runs of a model that leave its state unchanged, and the test whether its output depends on a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from esper.kasmina.forking import as_arguments, leaves_of
from esper.kasmina.slot import Path, Select
from esper.leyline.errors import GraftError

PROBE_SAMPLES = 3
"""Samples in the fork probe. With one sample, mixing between samples could not be detected."""


CHANNELS_FIRST = {
    "conv1d", "conv_transpose1d", "batch_norm", "group_norm", "instance_norm", "max_pool1d", "avg_pool1d", "lp_pool1d",
    "adaptive_avg_pool1d", "adaptive_max_pool1d",
}  # fmt: skip
"""Functions whose three-dimensional results are [B, C, L]."""


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model on one batch. A mapping is passed as keywords, a tuple or list as positional arguments."""
    args, kwargs = as_arguments(batch)
    return model(*args, **kwargs)


def quietly(model: nn.Module, batch: Any, *, grad: bool = False) -> Any:
    """Run a model in eval mode. Restore its training modes and the random generator afterwards."""
    training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        with torch.set_grad_enabled(grad), torch.random.fork_rng(devices=[]):
            return call(model, batch)
    except Exception as error:
        raise GraftError(
            f"the model does not run on {PROBE_SAMPLES} samples of the probe: {type(error).__name__}: {error}. "
            + _probe_hint(batch, error)
        ) from error
    finally:
        for module in training:
            module.training = True


def _probe_hint(batch: Any, error: Exception) -> str:
    """Return what may be wrong with a probe on which the model raises this error."""
    is_tuple = isinstance(batch, (tuple, list)) and len(batch) > 1
    hint = f"(A {type(batch).__name__} is taken as positional arguments; of a batch (x, y), pass x alone.)"
    cut = "(Tensors whose first size is the batch's were cut; if one has no samples, give a probe of another size.)"
    if is_tuple and isinstance(error, TypeError):
        return hint
    return f"{hint} {cut}" if is_tuple else cut


def floating_items(output: Any, path: Path = ()) -> dict[Path, Tensor]:
    """Return the floating-point tensors of a module's output by their path of keys."""
    if isinstance(output, Tensor):
        return {path: output} if output.is_floating_point() else {}
    if isinstance(output, Mapping):
        items: Iterable[tuple[Any, Any]] = output.items()
    elif isinstance(output, (tuple, list)):
        items = enumerate(output)
    else:
        return {}
    return {p: t for key, item in items for p, t in floating_items(item, (*path, key)).items()}


def module_outputs(model: nn.Module, probe: Any, names: Iterable[str]) -> tuple[Any, dict[str, list[Any]]]:
    """Run a model on the probe. Return its output, and the outputs of these modules by name, in calling order."""
    outputs: dict[str, list[Any]] = {}

    def collect(name: str) -> Callable[..., None]:
        return lambda _module, _args, output: outputs.setdefault(name, []).append(output)

    return run_hooked(model, probe, {name: collect(name) for name in names}), outputs


class _ChannelsFirst(TorchFunctionMode):
    """Record the tensors [B, C, L] of a run: results of `CHANNELS_FIRST`, and results computed from them.

    A result with the batch and channel sizes of a recorded argument is recorded: an activation, dropout, a sum. A
    transpose changes these sizes, or the order of the strides if the tensor is square.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}  # by id; the reference keeps the id unique

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim == 3:
            sources = [self.tensors[id(x)] for x in args if id(x) in self.tensors]
            if getattr(func, "__name__", "") in CHANNELS_FIRST or any(_same_axes(x, result) for x in sources):
                self.tensors[id(result)] = result
        return result


def _same_axes(x: Tensor, y: Tensor) -> bool:
    """Return whether y has the batch and channel sizes of x, and its axes in the same order in memory."""
    is_square = y.shape[1] == y.shape[2]
    return x.shape[:2] == y.shape[:2] and not (is_square and (x.stride(1) < x.stride(2)) != (y.stride(1) < y.stride(2)))


def channels_first_modules(model: nn.Module, probe: Any, selects: Mapping[str, Select]) -> list[str]:
    """Return the modules whose selected features are [B, C, L] instead of [B, T, D]."""
    recorder = _ChannelsFirst()
    names: dict[str, None] = {}

    def check(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if id(selects[name].get(output)) in recorder.tensors:
                names[name] = None

        return hook

    with recorder:
        run_hooked(model, probe, {name: check(name) for name in selects})
    return list(names)


def unread_modules(model: nn.Module, probe: Any, selects: Mapping[str, Select]) -> dict[str, list[Path]]:
    """Return modules whose selected features do not affect the model's output, each with the items that do.

    The autograd graph decides, so a branch whose last weight is still zero counts as used. Features that no gradient
    reaches (behind a `detach`, within `no_grad`) count as used if noise in them changes the output.
    """
    read = _items_in_graph(model, probe, selects)
    missed = [n for n, select in selects.items() if select.path not in read[n]]
    unread = [n for n in missed if not _noise_shows(model, probe, n, selects[n])]
    return {n: read[n] for n in unread}


def _items_in_graph(model: nn.Module, probe: Any, names: Iterable[str]) -> dict[str, list[Path]]:
    """Return per module the paths of its items that are in the autograd graph of the model's output."""
    marks: dict[str, dict[Path, set[Node]]] = {name: {} for name in names}

    def mark(name: str) -> Callable[..., Any]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            for path, h in floating_items(output).items():
                marked = (h if h.requires_grad else h.detach().requires_grad_()).clone()
                if marked.grad_fn is not None:  # None within no_grad
                    marks[name].setdefault(path, set()).add(marked.grad_fn)
                    output = Select.at(output, path, name).put(output, marked)
            return output

        return hook

    try:
        output = run_hooked(model, probe, {name: mark(name) for name in marks}, grad=True)
    except GraftError:
        return {name: [] for name in marks}  # cannot run with gradients: use the noise test
    graph = _graph_of(x for x in leaves_of(output) if isinstance(x, Tensor))
    return {name: [path for path, nodes in items.items() if nodes & graph] for name, items in marks.items()}


def _graph_of(outputs: Iterable[Tensor]) -> set[Node]:
    """Return every node of the autograd graph behind these tensors."""
    waiting = [x.grad_fn for x in outputs if x.grad_fn is not None]
    graph: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in graph:
            graph.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return graph


def _noise_shows(model: nn.Module, probe: Any, name: str, select: Select) -> bool:
    """Return whether noise in a module's features changes the model's output; True if it cannot be determined."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        h = select.get(output)
        size = h.float().square().mean().sqrt().clamp(min=1e-3)
        return select.put(output, h + (torch.randn(h.shape, device=h.device) * size).to(h))

    plain = _floats(quietly(model, probe))
    try:
        noisy = _floats(run_hooked(model, probe, {name: hook}))
    except GraftError:
        return True  # the model fails on noise: assume that it reads the features
    if not plain or [x.shape for x in plain] != [x.shape for x in noisy]:
        return True
    return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(plain, noisy, strict=True))


def _floats(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output."""
    return [x for x in leaves_of(output) if isinstance(x, Tensor) and x.is_floating_point()]


def run_hooked(model: nn.Module, probe: Any, hooks: Mapping[str, Callable[..., Any]], *, grad: bool = False) -> Any:
    """Run a model on the probe with these forward hooks, by module name."""
    handles = [model.get_submodule(name).register_forward_hook(hook) for name, hook in hooks.items()]
    try:
        return quietly(model, probe, grad=grad)
    finally:
        for handle in handles:
            handle.remove()
