"""Policy files: safetensors with the settings and a checksum in the header. Equal policies have equal bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from esper.leyline.actions import HEAD_OPTIONS, Head
from esper.leyline.atomic_io import read_regular, write_atomically
from esper.leyline.checksums import check_tensors, seal_tensors
from esper.leyline.errors import DataError
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.feature_ranges import FeatureRanges
from esper.tamiyo.policy.features import feature_names

FORMAT = "esper-policy"
POLICY = "policy.safetensors"
MOST_BYTES = 1 << 30
"""Maximum size of a policy file in bytes, far above that of the largest policy that the settings allow."""


def view() -> str:
    """Return a hash of the policy's inputs and options. Weights are valid only for the same hash."""
    heads = {head.name: options for head, options in HEAD_OPTIONS.items()}
    return hashlib.sha256(json.dumps([feature_names(1), heads]).encode()).hexdigest()[:16]


def save_policy(
    network: TamiyoNetwork, path: Path, *, fixed: Mapping[Head, int], ranges: FeatureRanges | None = None, **about: Any
) -> None:
    """Write a policy, its fixed heads and the ranges of its observations atomically. `about` describes its origin."""
    header = {
        "format": FORMAT,
        "view": view(),
        "network": msgspec.json.encode(network.config).decode(),
        "fixed": json.dumps({head.name: option for head, option in fixed.items()}),
        "about": json.dumps(about),
    }
    if ranges is not None and ranges.is_known:
        header["ranges"] = json.dumps(ranges.bounds.tolist())
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_atomically(path, seal_tensors(save(tensors, header)))


def load_policy(path: Path) -> tuple[TamiyoNetwork, dict[Head, int]]:
    """Return a policy and its fixed heads, from a policy file or a run directory. Raise DataError if it is invalid."""
    file = path / POLICY if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"there is no policy in {path}. `esper train` leaves one in its run directory")
    try:
        content = read_regular(file, MOST_BYTES, follow=True)
        header = check_tensors(content)
        if header.get("format") != FORMAT:
            raise DataError(f"{file} is not a policy: it was not written by `esper train`")
        settings = msgspec.json.decode(header["network"], type=dict[str, Any])
        if header.get("view") != view() or not settings.keys() <= set(NetworkConfig.__struct_fields__):
            raise DataError(
                f"the policy in {file} was trained with other observations, choices or network settings than this "
                "version has. Train it again, or use the version that trained it"
            )
        config = msgspec.convert(settings, NetworkConfig)
        weights = load(content)
        must_fit(config, weights)
        network = TamiyoNetwork(config)
        network.load_state_dict(weights)
        fixed = read_fixed(header["fixed"])
    except (SafetensorError, msgspec.MsgspecError, RuntimeError, KeyError, ValueError, OSError) as error:
        raise DataError(f"{file} is damaged or not a policy: {error}. Fetch it again, or train one") from error
    return network, fixed


def load_ranges(path: Path) -> FeatureRanges | None:
    """Return the ranges of the observations that a policy was trained with; None if its file has none.

    Raise DataError if the file is invalid.
    """
    file = path / POLICY if path.is_dir() else path
    try:
        text = check_tensors(read_regular(file, MOST_BYTES, follow=True)).get("ranges")
        bounds = None if text is None else torch.tensor(msgspec.json.decode(text, type=list[list[float]]))
        return None if bounds is None else FeatureRanges(bounds)
    except (SafetensorError, msgspec.MsgspecError, RuntimeError, KeyError, ValueError, OSError) as error:
        raise DataError(f"{file} is damaged or not a policy: {error}. Fetch it again, or train one") from error


def must_fit(config: NetworkConfig, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the weights fit the settings and are finite. Allocates no memory for the network."""
    with torch.device("meta"):
        expected = {name: (tuple(t.shape), t.dtype) for name, t in TamiyoNetwork(config).state_dict().items()}
    actual = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    if wrong := sorted({name for name, _ in expected.items() ^ actual.items()}):
        name = wrong[0]
        raise ValueError(
            f"tensor {name!r} is {actual.get(name, 'missing')}, its settings require {expected.get(name, 'none')}"
        )
    if nonfinite := [name for name, t in weights.items() if not bool(t.isfinite().all())]:
        raise ValueError(f"tensor {nonfinite[0]!r} has weights that are NaN or infinite")


def read_fixed(text: str) -> dict[Head, int]:
    """Return the fixed heads and their options from JSON. Raise ValueError if an option does not exist."""
    fixed = {Head[name]: option for name, option in msgspec.json.decode(text, type=dict[str, int]).items()}
    for head, option in fixed.items():
        options = HEAD_OPTIONS[head]
        if options is None or not 0 <= option < len(options):
            raise ValueError(f"head {head.name} is fixed at {option}, which is none of {options or 'its slots'}")
    return fixed
