"""What determines the bits of a result besides the settings: versions, machine, data and code.

then = fingerprint(threads, device, data_hash)           # stored in a checkpoint
changes(then, fingerprint(threads, device, data_hash))   # on resuming; empty: the result will be bit-identical
"""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import torch

import esper


def fingerprint(threads: int, device: str, data_hash: str) -> dict[str, str]:
    """Return what determines the bits of a run besides its settings: versions, machine, data and code."""
    versions = {name: metadata.version(name) for name in ("torch", "numpy")}
    return versions | {
        "python": platform.python_version(),
        "threads": str(threads),
        "processor": " ".join(processor(device)),
        "platform": sys.platform,
        "data": data_hash[:16],
        "esper's code": code_hash("leyline", "kasmina", "tolaria", "tamiyo", "simic")[:16],
    }


def changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a description of each difference between two fingerprints."""
    changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{name}: {then.get(name)} then, {now.get(name)} now" for name in changed]


@lru_cache(maxsize=8)
def code_hash(*packages: str) -> str:
    """Return a hash of the code of these packages; by default those that train hosts.

    It keeps curves of older code from being reused. Comments, docstrings and layout do not count.
    """
    digest = hashlib.sha256()
    home = Path(esper.__path__[0])
    for package in packages or ("leyline", "kasmina", "tolaria"):
        for file in sorted((home / package).rglob("*.py")):
            code = _code_of(file)
            digest.update(f"{file.relative_to(home).as_posix()}\n{code}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _code_of(file: Path) -> str:
    """Return the code of a file. Packages of several hashes overlap; parsing them takes most of the time."""
    return syntax_without_prose(file.read_text(encoding="utf-8"))


def syntax_without_prose(source: str) -> str:
    """Return the syntax tree of a module as text, without comments, docstrings and attribute docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@lru_cache(maxsize=8)
def processor(device: str) -> list[str]:
    """Return a description of the processor. It decides which kernels run, and so the last bits of results."""
    if device.startswith("cuda"):
        cudnn = torch.backends.cudnn
        return [
            torch.cuda.get_device_name(device),
            str(torch.version.cuda),
            str(cudnn.version()),
            str(cudnn.allow_tf32),
        ]
    try:
        named = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        named = None
    model = named[1] if named else platform.processor()
    return [platform.machine(), model, torch.backends.cpu.get_cpu_capability()]
