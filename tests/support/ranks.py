"""Run a function in several real processes of one gloo group, and collect what each rank returned or raised."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import ROOT

TIMEOUT_S = 20
"""Timeout of the ranks' process group in seconds."""


def run_ranks(function: Callable[..., Any], *args: str, size: int = 2, directory: Path | None = None) -> list[Any]:
    """Return what `function(rank, *args)` returned on each rank; for an exception, "Type: message"."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)
        command = [sys.executable, "-m", "tests.support.ranks", function.__module__, function.__name__, str(size)]
        processes = [subprocess.Popen([*command, str(rank), scratch, *args], cwd=ROOT, env=env) for rank in range(size)]
        try:
            codes = [process.wait(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
        paths = [place / f"result-{rank}.pt" for rank in range(size)]
        return [
            torch.load(path, weights_only=True) if path.exists() else f"exit code {code}"
            for path, code in zip(paths, codes, strict=True)
        ]


def main() -> None:
    module, name, size, rank, scratch, *args = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/meeting", rank=int(rank), world_size=int(size),
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    try:
        result = getattr(importlib.import_module(module), name)(int(rank), *args)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    torch.save(result, Path(scratch) / f"result-{rank}.tmp")
    Path(scratch, f"result-{rank}.tmp").rename(Path(scratch, f"result-{rank}.pt"))
    os._exit(0)  # as a process that ends: its connections close without waiting for the other ranks


if __name__ == "__main__":
    main()
