"""`esper …`: the command line. Commands import what they need when they run, so that help is quick."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from esper.cli_errors import error_text, exit_rank, print_message
from esper.cli_options import AllowInexact, DataRoot, Json, Resume, RunDirectory, TensorBoard, Threads, Track, Version
from esper.cli_research import add_research_commands
from esper.installation import require_own_package


class Commands(TyperGroup):
    """The commands. Ctrl-C ends each of them with one line and exit code 130."""

    def invoke(self, context: Any) -> Any:
        """Run the selected command."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            print_message("interrupted")
            raise typer.Exit(130) from None


app = typer.Typer(
    name="esper",
    cls=Commands,
    help="Neural networks that grow while they train.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options_of_all(_version: Version = False) -> None:
    """Neural networks that grow while they train."""


@app.command()
def grow(
    context: typer.Context,
    task: Annotated[str, typer.Option(help="Train on this task; `esper tasks` lists the names.")] = "fashion",
    controller: Annotated[
        str,
        typer.Option(
            help="Decide with this controller: schedule, heuristic, tamiyo, random, none, or the policy of a run."
        ),
    ] = "schedule",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Train for this many epochs; the default is the task's own number.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Train in this world, which determines initial weights and data order.")
    ] = 0,
    out: RunDirectory = None,
    data: DataRoot = None,
    compare: Annotated[bool, typer.Option(help="Also train the hosts that it is compared with.")] = True,
    incubation: Annotated[
        str, typer.Option(help="Train isolated seeds by this method: shadow or straight_through.")
    ] = "shadow",
    birth: Annotated[
        str, typer.Option(help="Begin seeds in this way: open (they join the host at once) or isolated.")
    ] = "open",
    lr_schedule: Annotated[
        str, typer.Option(help="Use this schedule of learning rates: wsd (warm-up and decay) or constant.")
    ] = "wsd",
    threads: Threads = 1,
    telemetry: Annotated[
        str, typer.Option(help="Record events at this level: off, minimal, normal or debug.")
    ] = "normal",
    track: Track = None,
    tensorboard: TensorBoard = False,
    resume: Resume = None,
    allow_inexact: AllowInexact = False,
) -> None:
    """Train and grow one host, then compare it with hosts that did not grow.

    Shows loss, accuracy and the stage of every slot after each epoch. At the end, prints test accuracy, parameters
    and time next to the same host without growth, the same final structure trained from the start, and a wider host
    of equal size, each trained for the same number of epochs. The run directory holds all results: `esper watch`
    shows a run while it is running; `esper report` and `esper sql` analyse it. A checkpoint is written after every
    epoch (several short epochs share one). Ctrl-C loses nothing; a kill loses the epochs since the last checkpoint.

    Example:  esper grow --task rescue --seed 1 --out runs/rescue
    Example:  esper grow --task rescue --controller tamiyo
    Example:  esper grow --resume runs/rescue
    """
    from esper.commands.grow import GrowOptions, resume_grow, run_grow
    from esper.commands.growing import GrowSettings

    options = GrowOptions(out, data, (*(track or ()), *["tensorboard"] * tensorboard), allow_inexact)
    if resume is not None:
        settings = ("task", "controller", "epochs", "seed", "out", "compare", "incubation", "birth", "lr_schedule",
                    "threads", "telemetry")  # fmt: skip
        sources = {name: context.get_parameter_source(name) for name in settings}
        overrides = [
            f"--{name.replace('_', '-')}" for name, source in sources.items() if source and source.name == "COMMANDLINE"
        ]
        resume_grow(resume, overrides, options)
        return
    new = GrowSettings(
        task=task, controller=controller, epochs=epochs, seed=seed, compare=compare, incubation=incubation,
        birth=birth, lr_schedule=lr_schedule, threads=threads, telemetry=telemetry,
    )  # fmt: skip
    run_grow(new, options)


@app.command()
def train(
    task: Annotated[str | None, typer.Option(help="Train hosts on this task; `esper tasks` lists the names.")] = None,
    sim: Annotated[bool, typer.Option("--sim", help="Use simulated hosts (thousands of steps per second).")] = False,
    preset: Annotated[
        str | None, typer.Option(help="Use the settings of this preset: quick, standard, sim or family.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Train for this many rounds: an episode per host, then an update.")
    ] = None,
    envs: Annotated[int | None, typer.Option(min=1, help="Train this many hosts side by side.")] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Use this many steps per episode; the default is the task's own number.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Derive all random generators from this random seed.")] = None,
    config: Annotated[Path | None, typer.Option(help="Read settings from this TOML file.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one setting; repeat the option for more.")
    ] = None,
    ab: Annotated[
        list[str] | None, typer.Option("--ab", metavar="A.B=C", help="Train again with this setting, and compare.")
    ] = None,
    start_from: Annotated[str | None, typer.Option(help="Start with the policy of this run or policy file.")] = None,
    resume: Resume = None,
    allow_inexact: AllowInexact = False,
    workers: Annotated[
        int, typer.Option(min=1, help="Divide the hosts among this many processes. The result is the same.")
    ] = 1,
    out: RunDirectory = None,
    data: DataRoot = None,
    telemetry: Annotated[
        str | None, typer.Option(help="Record events at this level: off, minimal, normal or debug.")
    ] = None,
    track: Track = None,
    tensorboard: TensorBoard = False,
    show: Annotated[bool, typer.Option("--show", help="Print the settings and exit.")] = False,
    compare: Annotated[bool, typer.Option(help="Compare the policy with other controllers at the end.")] = True,
    opens: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open the comparison of --ab in a browser.")
    ] = None,
) -> None:
    """Train a policy that decides when, where and what to grow.

    Many hosts grow side by side. After each round of episodes the policy is updated; rewards compare each host with
    the same host without growth. The run directory holds the policy, the journal and the no-growth baselines.
    Precedence of settings: defaults < --preset < --config < --set < other options. A checkpoint is written after
    every round (several short rounds share one). A kill loses the rounds since the last checkpoint.

    Example:  esper train --sim --preset sim
    Example:  esper train --task rescue --rounds 60 --workers 2 --set ppo.lr=5e-4
    Example:  esper train --resume runs/mine
    With --ab, two runs are trained over the same worlds, OUT/a and OUT/b. Their comparison is printed, written to
    OUT/comparison.html and opened in a browser, if the program runs in a terminal on a machine with a display.

    Example:  esper train --sim --preset sim --ab ppo.lr=1e-3 --out runs/lr
    """
    from esper.commands.train import TrainOptions, run_train

    more = {"task": task, "simulated": sim or None, "rounds": rounds, "envs": envs, "epochs": epochs, "seed": seed,
            "start_from": start_from, "telemetry": telemetry}  # fmt: skip
    options = TrainOptions(
        resume, allow_inexact, workers, out, data, compare, (*(track or ()), *["tensorboard"] * tensorboard)
    )
    if ab:
        from esper.commands.ab import run_ab

        run_ab(options, ab, preset=preset, config_file=config, sets=sets or [], more=more, show=show, opens=opens)
        return
    run_train(options, preset=preset, config_file=config, sets=sets or [], more=more, show=show)


@app.command("eval")
def evaluate(
    controllers: Annotated[
        list[str],
        typer.Argument(
            help="Compare these controllers: run directories, policy files, tamiyo, heuristic, schedule, random, none; "
            "plans found by search: best-schedule, best-per-kind, best-per-impairment, search; and static hosts sized "
            "like what the first one grew: from-start, wider, deeper. A single name is compared with all but "
            "best-per-kind, best-per-impairment and search."
        ),
    ],
    task: Annotated[
        str | None, typer.Option(help="Compare on this task; the default is that of the first run.")
    ] = None,
    sim: Annotated[bool, typer.Option("--sim", help="Compare on simulated hosts.")] = False,
    worlds: Annotated[
        int, typer.Option(min=2, help="Use this many held-out worlds, the same for all controllers.")
    ] = 16,
    out: Annotated[Path | None, typer.Option(help="Write eval.json and eval.svg to this directory.")] = None,
    search_episodes: Annotated[
        int | None, typer.Option(min=2, help="Search each best plan for this many episodes.")
    ] = None,
    fit_task: Annotated[str | None, typer.Option(help="Search best plans in training worlds of this task.")] = None,
    plans: Annotated[
        Path | None,
        typer.Option(help="Use this file of `esper plans` (plans.json) instead of a search for best plans."),
    ] = None,
    json: Json = False,
    data: DataRoot = None,
    threads: Threads = 1,
) -> None:
    """Compare controllers in worlds that no policy was trained in.

    All controllers get the same worlds. Differences are computed per world, with a bootstrap 95 % interval. U is the
    utility that a policy is trained to maximise: validation quality minus that of the same world without growth, minus
    a rent on parameters and multiply-adds.

    Example:  esper eval runs/mine --worlds 16 --out runs/mine/eval
    """
    from esper.commands.evaluate import run_eval

    run_eval(
        controllers, task=task, simulated=sim, worlds=worlds, out=out, as_json=json, data_root=data, threads=threads,
        search_episodes=search_episodes, fit_task=fit_task, plans=plans,
    )  # fmt: skip


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Export a host of this run of `esper grow` or `esper train`.")],
    format: Annotated[str, typer.Option(help="Write this format: torch, torch-export, onnx or safetensors.")] = "torch",
    out: Annotated[Path | None, typer.Option(help="Write this file; the default is one below RUN/export.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Export the best host of a run as a plain model that loads without Esper.

    torch: Python source and weights, which can be trained further; torch-export: one .pt2 file; onnx: for other
    runtimes; safetensors: weights only. A file is written only if its outputs on validation samples equal the host's.

    Example:  esper export runs/mine --format onnx --out grown.onnx
    """
    from esper.commands.export import run_export

    run_export(run, format, out=out, force=force)


@app.command("export-log")
def export_log(
    run: Annotated[Path, typer.Argument(help="Send the journal of this run directory.")],
    to: Annotated[str, typer.Option(help="Send it to this tracker: tensorboard, wandb, mlflow or trackio.")],
    out: Annotated[
        Path | None, typer.Option(help="Write TensorBoard files to this directory; the default is RUN/tensorboard.")
    ] = None,
) -> None:
    """Send the journal of a run to an experiment tracker, with the same numbers as --track.

    Unlike --track, it includes the environments of all workers and sends every number. W&B, MLflow and Trackio are
    configured by their own environment variables, for instance WANDB_MODE=offline or MLFLOW_TRACKING_URI.

    Example:  esper export-log runs/mine --to mlflow
    """
    from esper.commands.export_log import run_export_log

    run_export_log(run, to, out)


@app.command()
def runs(
    root: Annotated[Path, typer.Argument(help="List the run directories in this directory.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List runs: task, controller, status, duration and size."""
    from esper.commands.runs import run_runs

    run_runs(root, json)


@app.command()
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Report on this run directory, or compare several; the default is the newest in runs/."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write this file; the default is RUN/report.html, or report.html here for several runs."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> None:
    """Write a report on one or several runs as a self-contained HTML file, and print a summary.

    It is the page of `esper dash` in one file: curves, the growing network, the life and worth of every seed,
    decisions, PPO, time per phase and problems. The run may still be running.
    """
    from esper.commands.report import run_report

    run_report(runs or [], out, json, open_browser)


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Compare these directories of runs or of `esper eval --out`. The first is the reference."),
    ],
    json: Json = False,
) -> None:
    """Compare runs in the worlds that they have in common.

    Prints quality, utility, parameters and training multiply-adds with paired differences and bootstrap 95 %
    intervals, and what the runs decided differently: operations, blueprints, and the first different decision in each
    world. Of `esper train`, the last episode in each world and the held-out comparison count; of `esper grow`, the
    grown host (runs that differ in --seed only count as one); of `esper eval`, the first controller. A single
    directory is compared within itself.

    Example:  esper compare runs/a runs/b
    Example:  esper compare runs/mine/eval
    """
    from esper.commands.compare import run_compare

    run_compare(runs, json)


@app.command()
def dash(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Show the runs in this directory, or this run directory.")
    ] = Path("runs"),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Serve on this port of 127.0.0.1; 0 chooses a free one.")
    ] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs in the browser, live or afterwards: one run in detail, or several side by side.

    Prints an address that only works on this machine. The page updates itself while a run is training.
    """
    from esper.commands.live_views import run_dash

    run_dash(directory, port, open_browser)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="Show this run directory, or the newest run in this directory.")] = Path(
        "runs"
    ),
    once: Annotated[bool, typer.Option(help="Print one frame as plain text and exit.")] = False,
) -> None:
    """Show environments, slots and events of a run in the terminal, live or afterwards. Press ? for help, q to quit."""
    from esper.commands.live_views import run_watch

    run_watch(run, once)


@app.command()
def sql(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RUN… [QUERY]", help="Query these run directories; the SQL query comes last.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print rows as JSON.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print rows as CSV.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="Print at most this many rows; 0 prints all. The default is 200 in a table."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Stop the query after this many seconds.")] = 60.0,
) -> None:
    """Query runs with SQL. Without a query, list the views and their columns.

    Example:  esper sql runs/* "select blueprint, count(*) from lifecycle where now = 'FOSSILIZED' group by 1"
    """
    from esper.commands.sql import run_sql, split_arguments

    paths, query = split_arguments(arguments)
    run_sql(paths, query, as_json=json, as_csv=csv, limit=limit, timeout_s=timeout)


@app.command()
def mcp(
    root: Annotated[Path, typer.Argument(metavar="DIR", help="Serve the run directories in this directory.")] = Path(
        "runs"
    ),
) -> None:
    """Serve runs to an assistant by the Model Context Protocol, on standard input and output.

    Tools, all read-only and limited to the runs below DIR: runs, summary, schema, sql, seed_life, compare. A client
    starts this command itself; see docs/mcp.md.
    """
    from esper.commands.mcp import run_mcp

    run_mcp(root)


@app.command()
def tasks() -> None:
    """List the tasks: host, data, size, slots and purpose."""
    from esper.commands.listing import list_tasks

    list_tasks()


@app.command()
def blueprints(
    task: Annotated[str | None, typer.Option(help="Show the costs at the slots of this task.")] = None,
) -> None:
    """List the blueprints per kind of features, with parameters and multiply-adds."""
    from esper.commands.listing import list_blueprints

    list_blueprints(task)


add_research_commands(app)


def main() -> None:
    """Run the command line. Errors outside the program are printed in one line, without a stack trace."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal that cannot encode × still shows the rest; lines of a piped stdout keep their order with stderr
            stream.reconfigure(errors="replace", line_buffering=True)
    warnings.showwarning = lambda message, *_: print_message(f"warning: {message}")
    try:
        require_own_package()
        app()
    except BrokenPipeError:  # the reader of our output has closed it
        sys.stderr.close()
        sys.exit(141)
    except SystemExit as end:
        exit_rank(end.code)
        raise
    except Exception as error:
        print_message(error_text(error))
        code = getattr(error, "exit_code", 2)
        exit_rank(code)
        sys.exit(code)


if __name__ == "__main__":
    main()
