"""The commands `esper features`, `explain`, `plans`, `study` and `sweep`. They import what they need when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from esper.cli_options import Json

RunPath = Annotated[Path, typer.Argument(help="Explain this run of `esper train`, or of `esper grow` with a policy.")]
Workers = Annotated[int, typer.Option(min=1, help="Use this many worker processes with one CPU thread each.")]


def add_research_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (features, explain, plans, study, sweep):
        app.command()(command)


def features(
    run: Annotated[
        Path | None,
        typer.Argument(help="Examine the policy of this run; without it, list the columns of an observation."),
    ] = None,
    json: Json = False,
) -> None:
    """List the observation of a policy, or how much the policy of a run uses each column.

    Without a run: name, meaning, formula and range of every column. With a run: the range of each column in the
    recorded decisions, and how much decisions change when its values are permuted.

    Example:  esper features runs/mine
    """
    from esper.commands.features import run_features

    run_features(run, json)


def explain(
    run: RunPath,
    env: Annotated[int, typer.Option(min=0, help="Explain a decision in this environment, numbered from 0.")] = 0,
    step: Annotated[
        int | None, typer.Option(min=1, help="Explain this step of the episode; the default is its first operation.")
    ] = None,
    json: Json = False,
) -> None:
    """Explain a decision of a policy: its alternatives, what moved it, and what happened to the seed.

    Of `esper train`, the decisions of the last saved round are recorded (of at most 16 environments), with the policy
    that made them; of `esper grow --controller tamiyo`, all of the grown host.

    Example:  esper explain runs/mine --env 3 --step 7
    """
    from esper.commands.explain import run_explain

    run_explain(run, env=env, step=step, as_json=json)


def plans(
    task: Annotated[str, typer.Argument(help="Find plans for this task, family or family file.")],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change one setting of `esper train`; repeat the option for more."
        ),
    ] = None,
    worlds: Annotated[int, typer.Option(min=1, max=10_000, help="Find plans for this many training worlds.")] = 48,
    episodes: Annotated[
        int, typer.Option(min=2, help="Select a few plans for all worlds in this many episodes.")
    ] = 1700,
    least_gain: Annotated[float, typer.Option(help="Grow in a world only if that gains at least this utility.")] = 0.01,
    workers: Workers = 1,
    out: Annotated[Path, typer.Option(help="Write this config file of `esper train`.")] = Path("plans.toml"),
) -> None:
    """Find what to grow in each training world, for a policy to imitate.

    Fixed plans (a blueprint, where and when) compete in training worlds. The best few are followed in every world, and
    the best one is the world's plan; no growth if none gains enough. Give the same settings to `esper train`. The
    utilities of these plans are kept beside the config file, with the ending .json, for `esper eval --plans`.

    Example:  esper plans mend_mlp --workers 2 --out plans.toml
    Example:  esper train --preset family --config plans.toml --set imitation=12
    """
    from esper.commands.plans import run_plans

    run_plans(
        task, sets or [], worlds=worlds, episodes=episodes, least_gain=least_gain, workers=workers, out=out
    )  # fmt: skip


def study(
    name: Annotated[str | None, typer.Argument(help="Run this study; without a name, list them all.")] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="Run and show only this arm; repeat the option for more.")
    ] = None,
    worlds: Annotated[
        str | None, typer.Option(metavar="FIRST:COUNT", help="Use these worlds instead of the study's.")
    ] = None,
    tuning: Annotated[
        bool, typer.Option("--tuning", help="Run the tuning worlds and show validation quality only.")
    ] = False,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Run every N-th world or training, from the I-th.")] = "1/1",
    workers: Workers = 1,
    out: Annotated[Path, typer.Option(help="Keep the results in this directory.")] = Path("runs/studies"),
    show: Annotated[bool, typer.Option("--show", help="Show the finished jobs without running any.")] = False,
    extend: Annotated[
        bool, typer.Option("--extend", help="Keep the jobs of the saved study that still apply.")
    ] = False,
    save: Annotated[bool, typer.Option("--save", help="Write all results to studies/ when they are complete.")] = False,
    docs: Annotated[bool, typer.Option("--docs", help="Only write the tables and charts of docs/studies/.")] = False,
    check: Annotated[bool, typer.Option("--check", help="With --docs: only name outdated files, exit with 1.")] = False,
) -> None:
    """Compare training methods over paired worlds and compute budgets, or training settings of policies.

    Runs every arm of a study in every world, then prints one table per budget with 95 % intervals and a verdict for
    each claim, and draws quality against training multiply-adds. Finished jobs are kept: run the same command again to
    continue. Choose settings with --tuning (worlds below 100), then report once on worlds from 100 on. A study of
    settings trains each arm with several training seeds on the simulator and prints a ranking.

    --docs writes the generated files of docs/studies/ from studies/, all or those of one study. It needs the
    repository as working directory.

    Example:  esper study open_birth --workers 2
    Example:  esper study reward_modes --show
    Example:  esper study --docs --check
    """
    from esper.leyline.errors import ConfigError

    if docs:
        if arm or worlds or tuning or shard != "1/1" or show or save or extend:
            raise ConfigError("--docs writes what is saved: leave out every option except --check")
        from esper.commands.study_docs import run_docs

        run_docs(name, check=check)
        return
    if check:
        raise ConfigError("--check compares generated files: use it with --docs")
    from esper.commands.study import list_studies, run_study

    if name is None:
        if extend:
            raise ConfigError("--extend adds to a saved study: name it")
        list_studies(out)
    else:
        run_study(
            name, arms=arm or [], worlds=worlds, tuning=tuning, shard=shard, workers=workers, out=out, show=show,
            save=save, extend=extend,
        )  # fmt: skip


def sweep(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Run this plan, a TOML file of settings and worlds.")],
    shard: Annotated[str, typer.Option(metavar="I/N", help="Run every N-th world, from the I-th on.")] = "1/1",
    workers: Workers = 1,
    out: Annotated[Path | None, typer.Option(help="Keep the runs in this directory; the default is runs/PLAN.")] = None,
) -> None:
    """Run `esper grow` for every setting of a plan in every world, then compare.

    Several processes and machines that share the directory share the work: one of them works on each run.
    Finished runs are kept, interrupted ones are resumed: run the same command again to continue. When all runs have
    finished, prints the table of `esper compare` and draws a chart.

    Example:  esper sweep plan.toml --workers 2
    Example:  esper sweep plan.toml --shard 3/8 --out /shared/sweep
    """
    from esper.commands.sweep import run_sweep

    run_sweep(plan, shard=shard, workers=workers, out=out)
