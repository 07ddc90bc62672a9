"""Queries in a separate process, which can be killed at any time and has a memory limit.

DuckDB handles an interrupt only between two chunks of rows, and its memory limit counts neither the allocations of
functions such as `repeat` and `range` nor the Python objects of a result. The system can limit and kill a process.

The process reads one JSON object from stdin and writes JSON lines: what could not be read, then columns and types, then
one line per row. A line with "error" may replace either of the first two.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from esper.karn.sql import QUERY_BYTES, TOO_MUCH_MEMORY, Answer, Runs
from esper.leyline import errors
from esper.leyline.errors import EsperError

SPARE_S = 60.0
"""Processor time in seconds beyond the timeout, after which the system kills a process whose parent has died."""


def ask(
    paths: Sequence[Path],
    query: str,
    *,
    limit: int | None,
    timeout_s: float | None,
    on_trouble: Callable[[str], None],
) -> Answer:
    """Return the result of a query over these runs. Raise EsperError if it takes too long or too much memory.

    `on_trouble` is called with each message about what could not be read. Reading the runs does not count as query
    time. Values that JSON does not have, such as dates, are returned as text.
    """
    question = {"paths": [str(path) for path in paths], "query": query, "limit": limit, "timeout_s": timeout_s}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "esper.karn.sql_process"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout_s or 0.0, stop)
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process could not start: `_line` raises
            process.stdin.write(json.dumps(question).encode())
            process.stdin.close()
        for trouble in _line(process)["troubles"]:
            on_trouble(trouble)
        if timeout_s is not None:
            timer.start()
        head = _line(process)
        timer.cancel()
        return _answer(process, head)
    except EsperError:
        if not late.is_set():
            raise
        raise EsperError(
            f"the query was stopped after {timeout_s:g} s. Narrow it, or give it more time with --timeout"
        ) from None
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def _line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise _ended(process)
    message: dict[str, Any] = json.loads(line)
    if "error" in message:
        raise getattr(errors, message["kind"])(message["error"])
    return message


def _ended(process: subprocess.Popen[bytes]) -> EsperError:
    """Return the error of a process that ended early: killed for its memory, or failed with an exit code."""
    code = process.wait()
    return EsperError(TOO_MUCH_MEMORY if code < 0 else f"the process of the query ended with exit code {code}")


def _answer(process: subprocess.Popen[bytes], head: dict[str, Any]) -> Answer:
    assert process.stdout is not None
    rows = [tuple(json.loads(line)) for line in process.stdout]
    if len(rows) != head["rows"]:
        raise _ended(process)
    return Answer(head["columns"], head["types"], rows, head["more"])


# In the query process ----------------------------------------------------------------------------------------------


def main() -> None:
    """Read the query from stdin and write its result to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    question = json.loads(sys.stdin.buffer.read())
    try:
        with Runs([Path(path) for path in question["paths"]]) as runs:
            _send({"troubles": runs.troubles})
            _limit_resources(question["timeout_s"])
            answer = runs.ask(question["query"], limit=question["limit"])
            _send_answer(answer)
    except EsperError as error:
        _send({"error": str(error), "kind": type(error).__name__})
    except MemoryError:
        _send({"error": TOO_MUCH_MEMORY, "kind": "EsperError"})
    os._exit(0)  # a DuckDB thread may still be busy


def _send_answer(answer: Answer) -> None:
    _send({"columns": answer.columns, "types": answer.types, "rows": len(answer.rows), "more": answer.more})
    for row in answer.rows:
        sys.stdout.write(json.dumps([_plain(value) for value in row]) + "\n")
    sys.stdout.flush()


def _send(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _limit_resources(timeout_s: float | None) -> None:
    """Set system limits for memory, and for CPU time in case the parent dies. Windows has neither."""
    try:
        import resource
    except ImportError:
        return
    statm = Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, _within(resource.getrlimit(resource.RLIMIT_AS), size + 2 * QUERY_BYTES))
    if timeout_s is not None:
        most = int(sum(os.times()[:2]) + (timeout_s + SPARE_S) * (os.cpu_count() or 1))
        resource.setrlimit(resource.RLIMIT_CPU, _within(resource.getrlimit(resource.RLIMIT_CPU), most))


def _within(limits: tuple[int, int], most: int) -> tuple[int, int]:
    """Return a soft limit of at most `most` and the unchanged hard limit."""
    soft, hard = limits
    return min(each for each in (soft, hard, most) if each >= 0), hard  # -1 means no limit


if __name__ == "__main__":
    main()
