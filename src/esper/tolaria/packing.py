"""Trees of plain values, arrays and tensors as a JSON document and named tensors, and back."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline.checksums import METADATA
from esper.leyline.errors import CheckpointError

TAG = "~"
_MAPPINGS: dict[str, Callable[[Iterable[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda items: Counter(dict(items)),
}
_TAG_OF = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def packed(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a tree of dicts, lists, tuples, numbers, strings, None, tensors and arrays as JSON document and tensors.

    `unpacked` restores the same types, including tuples, keys that are not strings, bools and NaN. Tensors are not
    copied: write them before they change. They are restored as plain tensors on the CPU. Raise CheckpointError with
    the path for a value that would not be restored as the same type.

    >>> packed({"lr": 0.1, "betas": (0.9, 0.99)})
    ({'lr': 0.1, 'betas': {'~': 'tuple', 'items': [0.9, 0.99]}}, {})
    """
    tensors: dict[str, Tensor] = {}
    try:
        return _pack(tree, "", tensors), tensors
    except RecursionError:
        raise CheckpointError("cannot pack this tree: it is nested too deeply, or contains itself") from None


def unpacked(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree that `packed` was given."""
    try:
        return _unpack(document, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the document or its tensors were not made by packed(): {error}") from error


def _pack(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    kind = type(tree)
    if tree is None or kind in (bool, str):
        return tree
    if kind is int:
        if abs(tree).bit_length() > 4096:  # Python limits the length of numbers as text
            raise _unpackable(path, "an int of more than 4096 bits")
        return tree
    if kind is float:
        return tree if math.isfinite(tree) else {TAG: "float", "value": str(tree)}
    if kind is list:
        return [_pack(each, f"{path}[{i}]", tensors) for i, each in enumerate(tree)]
    if kind is tuple:
        return {TAG: "tuple", "items": [_pack(each, f"{path}[{i}]", tensors) for i, each in enumerate(tree)]}
    if kind in _TAG_OF:
        return _pack_mapping(tree, path, tensors)
    if isinstance(tree, Tensor):
        must_be_plain(tree, path or "the tree")
        return {TAG: "tensor", "name": _stored(tree, path, tensors)}
    if isinstance(tree, (np.ndarray, np.generic)):
        return _pack_array(tree, path, tensors)
    raise _unpackable(path, f"a {kind.__module__}.{kind.__qualname__}")


def _pack_mapping(tree: dict[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    if type(tree) is dict and all(type(key) is str for key in tree) and TAG not in tree:
        return {key: _pack(value, f"{path}.{key}" if path else key, tensors) for key, value in tree.items()}
    items = []
    for key, value in tree.items():
        if isinstance(key, (Tensor, np.generic)):
            raise _unpackable(path, f"a {type(key).__name__} as a key")
        items.append([_pack(key, f"{path} (a key)", {}), _pack(value, f"{path}.{key}" if path else str(key), tensors)])
    return {TAG: _TAG_OF[type(tree)], "items": items}


def _pack_array(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    try:
        if type(tree) is not np.ndarray and not isinstance(tree, np.generic):
            raise TypeError
        tensor = torch.from_numpy(np.array(tree, order="C"))
    except (TypeError, ValueError):
        raise _unpackable(path, f"a {type(tree).__name__} of {tree.dtype}") from None
    must_be_plain(tensor, path or "the tree")
    kind = "array" if isinstance(tree, np.ndarray) else "scalar"
    return {TAG: kind, "name": _stored(tensor, path, tensors)}


def _stored(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Store the tensor under a unique name derived from its path, and return the name."""
    stem, count = path.encode("utf-8", "backslashreplace").decode() or "tensor", 1
    name = stem
    while name in tensors or name == METADATA:
        count += 1
        name = f"{stem}~{count}"
    tensors[name] = tensor
    return name


def _unpackable(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"cannot pack {path or 'the tree'}: it is {what}. A checkpoint holds dicts, lists, tuples, numbers, strings, "
        "None, tensors and numpy arrays; convert it to one of these"
    )


def _unpack(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(document, list):
        return [_unpack(each, tensors) for each in document]
    if not isinstance(document, dict):
        return document
    tag = document.get(TAG)
    if tag is None:
        return {key: _unpack(value, tensors) for key, value in document.items()}
    if tag == "float":
        return _NON_FINITE[document["value"]]
    if tag == "tuple":
        return tuple(_unpack(each, tensors) for each in document["items"])
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]([(_unpack(key, tensors), _unpack(value, tensors)) for key, value in document["items"]])
    tensor = tensors[document["name"]]
    if tag == "tensor":
        return tensor
    return {"array": tensor.numpy, "scalar": lambda: tensor.numpy()[()]}[tag]()


def must_be_plain(tensor: Any, where: str) -> None:
    """Raise for a tensor that would be loaded as something else."""
    if type(tensor) not in (Tensor, nn.Parameter):
        raise CheckpointError(f"{where} is a {type(tensor).__name__}; a checkpoint holds plain tensors only")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype == torch.complex128:
        raise CheckpointError(
            f"{where} is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}; "
            "a checkpoint holds dense tensors with data only"
        )
