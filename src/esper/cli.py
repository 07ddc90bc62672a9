"""`esper …`: the command line. Commands import what they need when they run, so that help is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="esper",
    help="Neural networks that grow while they train.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench_app = typer.Typer(
    help="Measure speed, as ratios against a named reference in the same process.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")


@app.command()
def grow(
    task: Annotated[str, typer.Option(help="What to train; `esper tasks` lists them.")] = "fashion",
    controller: Annotated[str, typer.Option(help="Who decides: heuristic, schedule, random or none.")] = "heuristic",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs to train; the task's own by default.")] = None,
    seed: Annotated[int, typer.Option(help="The world: initial weights and order of data.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Leave results, the body and the plain model here.")] = None,
    data: Annotated[Path | None, typer.Option(help="Where the files of a task that is not embedded lie.")] = None,
    compare: Annotated[bool, typer.Option(help="Also train the hosts to compare with.")] = True,
    incubation: Annotated[str, typer.Option(help="How a seed learns apart: shadow or straight_through.")] = "shadow",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; small hosts gain nothing from more.")] = 1,
) -> None:
    """Train and grow one host, then compare it with hosts that did not grow.

    Shows each epoch's loss and accuracy and the life of every slot while it runs. At the end: test accuracy,
    parameters and time, against the same host without growth, the same final structure trained from the start,
    and a wider host of equal size, all with the same budget of epochs.

    Example:  esper grow --task rescue --seed 1 --out runs/rescue
    """
    from esper.commands.grow import run_grow

    try:
        run_grow(task, controller, epochs=epochs, seed=seed, out=out, data_root=data, compare=compare,
                 incubation=incubation, threads=threads)  # fmt: skip
    except KeyboardInterrupt:
        print("esper: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command()
def tasks() -> None:
    """List the tasks: host, data, size, slots and the question each asks."""
    from esper.commands.listing import list_tasks

    list_tasks()


@app.command()
def blueprints(
    task: Annotated[str | None, typer.Option(help="Show the costs at this task's slots.")] = None,
) -> None:
    """List the blueprints: which features they serve, parameters and multiply-adds."""
    from esper.commands.listing import list_blueprints

    list_blueprints(task)


@bench_app.command("worth")
def bench_worth(
    repeats: Annotated[int, typer.Option(min=3, help="Interleaved repeats; medians are reported.")] = 15,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    quick: Annotated[bool, typer.Option(help="Fewer repeats of smaller work: a check that it runs.")] = False,
) -> None:
    """Coalitions against one validation pass; Shapley values for 3 to 25 players, their time and error.

    Also shows what judging costs as a share of a step: training an epoch, validating it with its coalitions, and
    turning those into worth.
    """
    from esper.commands.bench_worth import run_bench

    run_bench(repeats=repeats, as_json=json, quick=quick)


@bench_app.command("body")
def bench_body(
    repeats: Annotated[int, typer.Option(min=3, help="Interleaved repeats; medians are reported.")] = 15,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    quick: Annotated[bool, typer.Option(help="Smaller batches: a check that it runs, not a measurement.")] = False,
) -> None:
    """Train step with live seeds against the bare PyTorch loop; coalitions against one validation pass.

    Everything runs interleaved in one process on one thread. Bare loop: the same host and the same seeds as an
    ordinary module, with the same optimiser and clipping. Coalitions: all 8 of 3 live seeds on 512 images.
    """
    from esper.commands.bench_body import run_bench

    run_bench(repeats=repeats, as_json=json, quick=quick)


def main() -> None:
    """Run the command line; what goes wrong on purpose is said in one line, not as a stack trace."""
    try:
        app()
    except Exception as error:
        from esper.leyline.errors import EsperError

        if not isinstance(error, EsperError):
            raise
        print(f"esper: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
