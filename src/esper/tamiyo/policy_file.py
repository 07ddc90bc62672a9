"""A policy as a file: safetensors with its settings in the header. Small, without pickle, readable anywhere."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from esper.leyline.actions import HEAD_OPTIONS, Head
from esper.leyline.errors import DataError
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.features import feature_names

FORMAT = "esper-policy"
POLICY = "policy.safetensors"


def view() -> str:
    """A fingerprint of what a policy sees and can say: weights mean nothing under another."""
    heads = {head.name: options for head, options in HEAD_OPTIONS.items()}
    return hashlib.sha256(json.dumps([feature_names(1), heads]).encode()).hexdigest()[:16]


def save_policy(network: TamiyoNetwork, path: Path, *, fixed: Mapping[Head, int], **about: Any) -> None:
    """Write a policy, whole or not at all, with the heads it never had to choose. `about` says where it comes from."""
    header = {
        "format": FORMAT,
        "view": view(),
        "network": msgspec.json.encode(network.config).decode(),
        "fixed": json.dumps({head.name: option for head, option in fixed.items()}),
        "about": json.dumps(about),
    }
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    save_file({name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}, draft, header)
    draft.replace(path)


def load_policy(path: Path) -> tuple[TamiyoNetwork, dict[Head, int]]:
    """A policy and the heads fixed for it, from its file, or from a run directory that holds one."""
    file = path / POLICY if path.is_dir() else path
    if not file.exists():
        raise DataError(f"there is no policy in {path}. `esper train` leaves one in its run directory")
    try:
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
        if header.get("format") != FORMAT:
            raise DataError(f"{file} is not a policy: it was not written by `esper train`")
        if header.get("view") != view():
            raise DataError(
                f"the policy in {file} was trained with other observations or choices than this version has. "
                "Train it anew, or use the version that trained it"
            )
        network = TamiyoNetwork(msgspec.json.decode(header["network"], type=NetworkConfig))
        network.load_state_dict(load_file(file))
        fixed = {Head[name]: int(option) for name, option in json.loads(header["fixed"]).items()}
    except (SafetensorError, msgspec.MsgspecError, RuntimeError, KeyError, ValueError, OSError) as error:
        raise DataError(f"{file} is damaged or not a policy: {error}") from error
    return network, fixed
