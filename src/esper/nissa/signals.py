"""Signals that end a process: let a run record how it ended, or end at a safe point."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def terminable() -> Iterator[None]:
    """Within the context SIGTERM and SIGHUP raise SystemExit, so that a run can record how it ended."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in not_ignored(ENDING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Within the context signals that end the program are deferred until its end, for work that must be completed."""
    deferred: list[int] = []
    before = {
        n: signal.signal(n, lambda number, _frame: deferred.append(number))
        for n in not_ignored([signal.SIGINT, *ENDING])
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in deferred[:1]:
        signal.raise_signal(number)


def not_ignored(numbers: Sequence[int]) -> list[int]:
    """Return the signals that this process does not ignore; `nohup`, for example, sets SIGHUP to be ignored."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


class Stop:
    """A request to end the process. Calling it raises SystemExit if a signal was received."""

    def __init__(self) -> None:
        self.signal_number = 0  # the number of the signal received

    def __call__(self) -> None:
        """Raise SystemExit if a signal was received."""
        if self.signal_number:
            raise SystemExit(128 + self.signal_number)


@contextmanager
def stoppable(message: str, on_stop: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """Within the context the first SIGINT, SIGTERM or SIGHUP is stored in the `Stop` and `message` is printed.

    The caller calls the `Stop` when it is safe to end. A second signal exits at once. The handler of the first signal
    calls `on_stop`, for example to end waits that would delay the caller.
    """
    stop = Stop()

    def request_stop(number: int, _frame: FrameType | None) -> None:
        if stop.signal_number:
            os._exit(128 + number)
        stop.signal_number = number
        on_stop()
        with contextlib.suppress(OSError):
            os.write(2, f"\nesper: {message}\n".encode())

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, request_stop) for number in not_ignored([signal.SIGINT, *ENDING])}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
