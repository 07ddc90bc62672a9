"""`esper train --ab`: train two settings over the same worlds, one after the other, and compare them."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from esper.commands import plainly
from esper.commands.compare import comparison_tables
from esper.commands.explained_run import explain_run
from esper.commands.train import OPTION, TrainOptions, run_train
from esper.karn import report
from esper.karn.comparison import compare_runs
from esper.karn.run_state import RunState
from esper.leyline.errors import ConfigError
from esper.simic.training.config import load_config, parse_set

COMPARISON = "comparison.html"


def run_ab(
    options: TrainOptions, ab: list[str], *, preset: str | None, config_file: Path | None, sets: list[str],
    more: dict[str, Any], show: bool, opens: bool | None = None,
) -> None:  # fmt: skip
    """Train with the settings, then with the settings changed by `ab`, into OUT/a and OUT/b. Show the comparison.

    It is printed, and written to OUT/comparison.html. `opens` opens that file in a browser; None: if there is one.
    """
    if options.resume is not None:
        raise ConfigError("--ab starts two new runs. Resume each of them by itself: esper train --resume RUN")
    twice = [name for text in ab for name in parse_set(text) if more.get(name) is not None]
    if twice:
        option = OPTION.get(twice[0], f"--{twice[0].replace('_', '-')}")
        raise ConfigError(f"{twice[0]} is set by {option} and by --ab. Use --set {twice[0]}=… instead of {option}")
    arms = {"a": sets, "b": [*sets, *ab]}
    configs = [load_config(preset=preset, file=config_file, sets=arm, more=more) for arm in arms.values()]
    if configs[0] == configs[1]:
        raise ConfigError(f"--ab {' '.join(ab)} changes nothing: it equals the settings that are compared with")
    if configs[0].task_label != configs[1].task_label:
        raise ConfigError(
            "--ab cannot change the task: different tasks have no world in common. Change another setting"
        )
    paths = []
    for name, arm in arms.items():
        out = None if options.out is None else options.out / name
        added = arm[len(sets) :]
        if not show:
            plainly(Console(), f"{name}: {'the settings as given' if name == 'a' else ', '.join(added)}")
        with command_line(without(sys.argv, "--ab", "--out", flags=("--open", "--no-open")), added, out):
            path = run_train(
                replace(options, out=out), preset=preset, config_file=config_file, sets=arm, more=more, show=show
            )
        paths += [] if path is None else [path]
    if len(paths) == len(arms):  # only rank 0 has the paths
        show_comparison(paths, (options.out or paths[-1]) / COMPARISON, opens=has_screen() if opens is None else opens)


def show_comparison(paths: list[Path], out: Path, *, opens: bool) -> None:
    """Print the comparison of runs, write it to a file, and open that in a browser."""
    console = Console()
    console.print(comparison_tables(compare_runs(paths)))
    report.write([RunState.of(path) for path in paths], out, explain_run)
    plainly(console, f"side by side: {out}")
    plainly(console, f"show it again: esper compare {' '.join(map(str, paths))}")
    if opens:
        webbrowser.open(out.absolute().as_uri())


def has_screen() -> bool:
    """Return whether the program runs in a terminal on a machine with a display."""
    has_windows = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return sys.stdout.isatty() and has_windows


def without(arguments: Sequence[str], *options: str, flags: Sequence[str] = ()) -> list[str]:
    """Return a command line without these options and their values, and without these flags."""
    out: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in options:
            next(rest, None)
        elif argument not in flags and not argument.startswith(tuple(f"{option}=" for option in options)):
            out.append(argument)
    return out


@contextmanager
def command_line(arguments: Sequence[str], sets: Sequence[str], out: Path | None) -> Iterator[None]:
    """Set the command line of one arm: workers start with it, and the manifest records it."""
    before = sys.argv
    sys.argv = [*arguments, *(part for text in sets for part in ("--set", text))]
    sys.argv += [] if out is None else ["--out", str(out)]
    try:
        yield
    finally:
        sys.argv = before
