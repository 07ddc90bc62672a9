"""The installed command `esper` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ESPER = Path(sys.executable).parent / "esper"
SETTINGS = {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
"""Environment variables of the process: one thread, and a fixed width of its tables."""


def esper(*args: object, env: Mapping[str, str] = {}, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run `esper` with these arguments and more environment variables; return its exit code and its output."""
    command = [str(ESPER), *map(str, args)]
    settings = {**os.environ, **SETTINGS, **env}
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=300, **kwargs)
