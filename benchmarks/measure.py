"""Timing, command-line options and output that the benchmarks share."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any


def make_parser(doc: str | None, *, repeats: int, min_repeats: int = 3) -> argparse.ArgumentParser:
    """Return a parser of the options that every benchmark has; `doc` is the module's docstring."""

    def enough(text: str) -> int:
        value = int(text)
        if value < min_repeats:
            raise argparse.ArgumentTypeError(f"at least {min_repeats} repeats are needed, got {value}")
        return value

    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats", type=enough, default=repeats, help=f"interleaved repeats; medians are reported (default {repeats})"
    )
    return parser


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add --json and --quick."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="smaller sizes: a check that it runs, not a measurement")


def print_json(results: Any) -> None:
    print(json.dumps(results, indent=1))


def timed(work: Callable[[], Any]) -> float:
    """Return the CPU seconds that this process spends in `work`; other work on the machine does not count."""
    start = time.process_time()
    work()
    return time.process_time() - start


def median_ratio(ours: Callable[[], Any], reference: Callable[[], Any], repeats: int) -> float:
    """Return the median of our time over the reference's, measured in turn. Both are run once before."""
    ours()
    reference()
    ratios = []
    for i in range(repeats):
        pair = (ours, reference) if i % 2 else (reference, ours)
        seconds = {work: timed(work) for work in pair}
        ratios.append(seconds[ours] / seconds[reference])
    return statistics.median(ratios)
