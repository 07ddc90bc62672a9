"""Two machines on one: network namespaces that are connected by a virtual cable. Needs root."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def missing_requirement() -> str:
    """Return why namespaces cannot be made here; "" if they can."""
    if shutil.which("ip") is None:
        return "the command `ip` is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"esper{secrets.token_hex(3)}"
    result = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if result.returncode == 0 else f"`ip netns add` fails: {result.stderr.strip()}"


@contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Yield the names of two namespaces. Their addresses are 10.213.7.1 and 10.213.7.2, on the interface `cable`."""
    names = tuple(f"esper{secrets.token_hex(3)}" for _ in range(2))
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def cut_cable(machine: str) -> None:
    """Drop every packet to and from a machine; no connection is closed."""
    _ip("-n", machine, "link", "set", "cable", "down")


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)
