"""How the command line ends: messages and exit codes."""

from __future__ import annotations

import contextlib
import os
import sys


def exit_rank(code: str | int | None) -> None:
    """Exit at once if this process is a rank of a group; otherwise return.

    Threads of the group may still hold Python objects. They abort the process when the interpreter is finalised.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def print_message(text: str) -> None:
    """Print a line to stderr, with control characters escaped."""
    from esper.leyline.text import printable  # imported here, so that help does not load NumPy

    print(f"esper: {printable(text)}", file=sys.stderr)


def error_text(error: Exception) -> str:
    """Return the message of an error outside the program. Raise any other error again, so that bugs have a trace."""
    import errno

    from esper.leyline.errors import EsperError

    text = " ".join(line.strip() for line in str(error).splitlines())
    if isinstance(error, EsperError) or (isinstance(error, ImportError) and error.name == "esper"):
        return text
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"{text}. Free disk space, or choose another directory"
        return text
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in text:
        return f"out of memory: {text[-200:] or 'allocation failed'}. Reduce the number of envs, the batch or the host"
    raise error
