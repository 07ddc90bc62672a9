"""New processes that share one import of torch: they are forked from a process that has imported it and done nothing.

Importing torch, its compiler and Esper takes 2 CPU seconds, longer than most functions that tests call in a process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "esper.grower"])


def start(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a process that calls a function of a module and ends with code 0, or 1 after an exception."""
    process = SERVER.Process(target=function, args=args)
    process.start()
    return process


def exit_codes(processes: list[BaseProcess], timeout: float = 240) -> list[int | None]:
    """Wait for processes and return their exit codes, then kill those that have not ended: their code is None."""
    for process in processes:
        process.join(timeout)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes
