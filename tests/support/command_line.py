"""The installed command `esper`, in a process of its own or in this one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from esper import cli

ESPER = Path(sys.executable).parent / "esper"
SETTINGS = {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
"""Environment variables of the process: one thread, and a fixed width of its tables."""


def esper(*args: object, env: Mapping[str, str] = {}, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run `esper` with these arguments and more environment variables; return its exit code and its output."""
    command = [str(ESPER), *map(str, args)]
    settings = {**os.environ, **SETTINGS, **env}
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=300, **kwargs)


def esper_in_process(
    *args: object, env: Mapping[str, str] = {}, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `esper` as the function above does, but in this process, which saves the seconds of importing torch.

    Any exception that the command line does not report itself is raised.
    """
    command = ["esper", *map(str, args)]
    output = io.StringIO()
    errors = io.StringIO()
    code: int | str | None = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", command))
        stack.enter_context(mock.patch.dict(os.environ, {**SETTINGS, **env}))
        stack.enter_context(contextlib.chdir(cwd or Path.cwd()))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default")
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(command, int(code or 0), output.getvalue(), errors.getvalue())
