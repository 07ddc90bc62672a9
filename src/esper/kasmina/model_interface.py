"""Make a body look like its model: class name, signature of `forward`, `save_pretrained`, and tied weights.

Training libraries inspect the class of a model. transformers' Trainer reads the names of a model's arguments and labels
from `type(model).forward`, and its loss from the class name. So each body gets a class of its own.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save
from torch import nn

from esper.leyline.atomic_io import write_atomically
from esper.leyline.errors import ConfigError

if TYPE_CHECKING:
    from esper.kasmina.body import Body

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
