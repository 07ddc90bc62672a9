"""`esper …`: the command line. Commands import what they need when they run, so that help is quick."""

from __future__ import annotations

import sys
import warnings
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


@app.command()
def grow(
    context: typer.Context,
    task: Annotated[str, typer.Option(help="What to train; `esper tasks` lists them.")] = "fashion",
    controller: Annotated[str, typer.Option(help="heuristic, schedule, tamiyo, random, none, or a run.")] = "heuristic",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs to train; the task's own by default.")] = None,
    seed: Annotated[int, typer.Option(help="The world: initial weights and order of data.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The run directory; by default a new one in runs/.")] = None,
    data: Annotated[Path | None, typer.Option(help="Where the files of a task that is not embedded lie.")] = None,
    compare: Annotated[bool, typer.Option(help="Also train the hosts to compare with.")] = True,
    incubation: Annotated[str, typer.Option(help="How a seed learns apart: shadow or straight_through.")] = "shadow",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; small hosts gain nothing from more.")] = 1,
    telemetry: Annotated[str, typer.Option(help="How much to record: off, minimal, normal or debug.")] = "normal",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write scalars for TensorBoard.")] = False,
    resume: Annotated[
        Path | None,
        typer.Option(help="Resume a stopped or killed run. The result is bit-identical to an uninterrupted run."),
    ] = None,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Resume although versions, threads or processor differ.")
    ] = False,
) -> None:
    """Train and grow one host, then compare it with hosts that did not grow.

    Shows each epoch's loss and accuracy and the life of every slot while it runs. At the end: test accuracy,
    parameters and time, against the same host without growth, the same final structure trained from the start,
    and a wider host of equal size, all with the same budget of epochs. Everything is recorded in a run directory:
    `esper watch` looks on while it runs, `esper report` and `esper sql` look back. A checkpoint is written after
    every epoch (short epochs share one): Ctrl-C costs nothing, a kill or a power cut the epochs since the last one.

    Example:  esper grow --task rescue --seed 1 --out runs/rescue
    Example:  esper grow --resume runs/rescue
    """
    from esper.commands.grow import GrowOptions, resume_grow, run_grow
    from esper.commands.growing import Settings

    options = GrowOptions(out, data, tensorboard, allow_inexact)
    try:
        if resume is not None:
            settings = ("task", "controller", "epochs", "seed", "out", "compare", "incubation", "threads", "telemetry")
            sources = {name: context.get_parameter_source(name) for name in settings}
            given = [f"--{name}" for name, source in sources.items() if source and source.name == "COMMANDLINE"]
            resume_grow(resume, given, options)
            return
        run_grow(
            Settings(
                task=task, controller=controller, epochs=epochs, seed=seed, compare=compare, incubation=incubation,
                threads=threads, telemetry=telemetry,
            ),
            options,
        )  # fmt: skip
    except KeyboardInterrupt:
        print("esper: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command()
def train(
    task: Annotated[str | None, typer.Option(help="What the hosts learn; `esper tasks` lists them.")] = None,
    sim: Annotated[bool, typer.Option("--sim", help="Simulated hosts: thousands of steps per second.")] = False,
    preset: Annotated[str | None, typer.Option(help="Where settings begin: quick, standard or sim.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds: episodes side by side, then an update.")] = None,
    envs: Annotated[int | None, typer.Option(min=1, help="Hosts side by side.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Steps of an episode; the task's own by default.")] = None,
    seed: Annotated[int | None, typer.Option(help="The root of all randomness.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="One setting; repeat it.")] = None,
    start_from: Annotated[str | None, typer.Option(help="A run or policy file to begin with.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with a run that was stopped or killed, as it would have gone on.")
    ] = None,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Go on although versions, threads or processor differ.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the hosts; the run stays the same.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The run directory; by default a new one in runs/.")] = None,
    data: Annotated[Path | None, typer.Option(help="Where the files of a task that is not embedded lie.")] = None,
    telemetry: Annotated[str | None, typer.Option(help="How much to record: off, minimal, normal, debug.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write scalars for TensorBoard.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the settings and leave.")] = False,
    compare: Annotated[bool, typer.Option(help="At the end, a first look at other controllers.")] = True,
) -> None:
    """Train a policy that decides when, where and what to grow.

    Many hosts grow side by side; after each round of episodes the policy learns from what its decisions led to,
    against the same hosts without growth. The run directory keeps the policy, everything that happened, and the
    no-growth twins. Settings: defaults < --preset < --config < --set < the other options. After every round a
    checkpoint is written (short rounds share one): a kill or a power cut costs the round that was under way.

    Example:  esper train --sim --preset sim        a policy in minutes
    Example:  esper train --task rescue --rounds 60 --workers 2 --set ppo.lr=5e-4
    Example:  esper train --resume runs/mine
    """
    from esper.commands.train import TrainOptions, run_train

    more = {"task": task, "simulated": sim or None, "rounds": rounds, "envs": envs, "epochs": epochs, "seed": seed,
            "start_from": start_from, "telemetry": telemetry}  # fmt: skip
    options = TrainOptions(resume, allow_inexact, workers, out, data, compare, tensorboard)
    run_train(options, preset=preset, config_file=config, sets=sets or [], more=more, show=show)


@app.command("eval")
def evaluate(
    controllers: Annotated[
        list[str],
        typer.Argument(
            help="Runs, policy files, tamiyo, heuristic, schedule, best-schedule, random, none; and, sized by what the "
            "first one grew: from-start, wider, deeper. One alone is compared with all the others."
        ),
    ],
    task: Annotated[str | None, typer.Option(help="The task; that of the first run by default.")] = None,
    sim: Annotated[bool, typer.Option("--sim", help="Compare on simulated hosts.")] = False,
    seeds: Annotated[int, typer.Option(min=2, help="Held-out worlds, the same for all.")] = 16,
    out: Annotated[Path | None, typer.Option(help="Leave eval.json and eval.svg here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    data: Annotated[Path | None, typer.Option(help="Where the files of a task that is not embedded lie.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Compare controllers in worlds that no policy was trained in.

    The same worlds for all; differences are taken world by world, with a bootstrap 95 % interval. U is the utility a
    policy is trained for: validation quality above the no-growth twin, minus rent on parameters and multiply-adds.

    Example:  esper eval runs/mine --seeds 16 --out runs/mine/eval
    """
    from esper.commands.evaluate import run_eval

    run_eval(controllers, task=task, simulated=sim, seeds=seeds, out=out, as_json=json, data_root=data, threads=threads)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory of `esper grow` or `esper train`.")],
    format: Annotated[str, typer.Option(help="torch, torch-export, onnx or safetensors.")] = "torch",
    out: Annotated[Path | None, typer.Option(help="The file to write; below RUN/export by default.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Write the best host that a run has grown as a plain model, which loads where Esper is not installed.

    torch: readable Python source with its weights beside it, which trains on; torch-export: one .pt2 file; onnx: for
    other runtimes; safetensors: the weights alone. Each is asked what the host was asked when it was measured, and
    written only if it answers the same.

    Example:  esper export runs/mine --format onnx --out grown.onnx
    """
    from esper.commands.export import run_export

    run_export(run, format, out=out, force=force)


@app.command()
def runs(
    root: Annotated[Path, typer.Argument(help="Where runs lie.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the runs: task, controller, how each ended, how long it took, how large it is."""
    from esper.commands.runs import run_runs

    run_runs(root, json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run directory, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; RUN/report.html by default.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write a run, or several side by side, as one HTML file that needs nothing else, and a summary here.

    Curves of accuracy and loss, the life of every slot, alpha, worth with error bars, parameters, decisions, where
    the time went, and whether anything was lost. Works on a run that still goes on.
    """
    from esper.commands.report import run_report

    run_report(runs, out, json, open_browser)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="A run directory, or a directory of runs for the newest.")] = Path("runs"),
    once: Annotated[bool, typer.Option(help="Print one plain frame and leave.")] = False,
) -> None:
    """Look on while a run goes on, or look at one that has ended: environments, slots, events. ? is help, q leaves."""
    from esper.commands.watch import run_watch

    run_watch(run, once)


@app.command()
def sql(
    arguments: Annotated[list[str], typer.Argument(metavar="RUN… [QUERY]", help="Run directories, then a query.")],
    json: Annotated[bool, typer.Option("--json", help="Print rows as JSON.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print rows as CSV.")] = False,
    limit: Annotated[int | None, typer.Option(min=0, help="Rows to print; 0 for all. 200 on a terminal.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds a query may take.")] = 60.0,
) -> None:
    """Ask a run in SQL. Without a query: the views there are, and what their columns mean.

    Example:  esper sql runs/* "select blueprint, count(*) from lifecycle where now = 'FOSSILIZED' group by 1"
    """
    from esper.commands.sql import run_sql, split_arguments

    paths, query = split_arguments(arguments)
    run_sql(paths, query, as_json=json, as_csv=csv, limit=limit, timeout_s=timeout)


@app.command()
def features() -> None:
    """List what a policy sees: the name, meaning, formula and range of every column of an observation."""
    from esper.commands.features import run_features

    run_features()


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


def main() -> None:
    """Run the command line; what goes wrong outside the program is said in one line, not as a stack trace."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot encode × still shows the rest
    warnings.showwarning = lambda message, *_: say(f"warning: {message}")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has closed it
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        say(in_words(error))
        sys.exit(2)


def say(text: str) -> None:
    """Print a line to stderr, with the characters of strangers' files made harmless."""
    from esper.leyline.text import printable  # imported here, so that help does not load NumPy

    print(f"esper: {printable(text)}", file=sys.stderr)


def in_words(error: Exception) -> str:
    """What went wrong outside the program, and the way out. An error inside it is raised again: a bug has a trace."""
    import errno

    from esper.leyline.errors import EsperError

    text = " ".join(line.strip() for line in str(error).splitlines())
    if isinstance(error, EsperError):
        return text
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"{text}. Make room there, or choose another place"
        return text
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in text:
        return f"there is not enough memory: {text[-200:] or 'no more was given'}. Ask for less: envs, batch or sizes"
    raise error


if __name__ == "__main__":
    main()
