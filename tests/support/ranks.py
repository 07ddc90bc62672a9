"""Run a function in several real processes of one gloo group, and collect what each rank returned or raised."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.fork_server import exit_codes, start

TIMEOUT_S = 20
"""Timeout of the ranks' process group in seconds."""


def run_ranks(function: Callable[..., Any], *args: str, size: int = 2) -> list[Any]:
    """Return what `function(rank, *args)` returned on each rank; for an exception, "Type: message"."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        names = (function.__module__, function.__name__, size)
        codes = exit_codes([start(run_rank, *names, rank, scratch, *args) for rank in range(size)])
        paths = [place / f"result-{rank}.pt" for rank in range(size)]
        return [
            torch.load(path, weights_only=True) if path.exists() else f"exit code {code}"
            for path, code in zip(paths, codes, strict=True)
        ]


def run_rank(module: str, name: str, size: int, rank: int, scratch: str, *args: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/meeting", rank=rank, world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    try:
        result = getattr(importlib.import_module(module), name)(rank, *args)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    torch.save(result, Path(scratch) / f"result-{rank}.tmp")
    Path(scratch, f"result-{rank}.tmp").rename(Path(scratch, f"result-{rank}.pt"))
    os._exit(0)  # as a process that ends: its connections close without waiting for the other ranks
