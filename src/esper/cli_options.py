"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataRoot = Annotated[
    Path | None, typer.Option(help="Read the data files of a task that is not embedded from this directory.")
]
RunDirectory = Annotated[
    Path | None, typer.Option(help="Create this run directory; the default is a new one in runs/.")
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Log to TensorBoard, as --track tensorboard does.")]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Also log to tensorboard, wandb, mlflow or trackio; repeat the option for more."),
]
Resume = Annotated[
    Path | None,
    typer.Option(help="Resume a stopped or killed run. The result is bit-identical to an uninterrupted run."),
]
AllowInexact = Annotated[
    bool, typer.Option("--allow-inexact", help="Resume although versions, threads or processor differ.")
]
Threads = Annotated[
    int, typer.Option(min=1, help="Use this many CPU threads; small hosts do not benefit from more than one.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_version(requested: bool) -> None:
    """Print the version and exit, if requested."""
    if requested:
        from esper import __version__  # another distribution's package has none

        typer.echo(f"esper {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
]
