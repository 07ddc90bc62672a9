"""The commands `esper features` and `esper explain`, which read the decisions of a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunPath = Annotated[Path, typer.Argument(help="Run directory of `esper train`, or of `esper grow` with a policy.")]


def add_policy_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(features)
    app.command()(explain)


def features(
    run: Annotated[
        Path | None,
        typer.Argument(help="Run whose policy to examine; without it, list the columns of an observation."),
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
    env: Annotated[int, typer.Option(min=0, help="Number of the environment.")] = 0,
    step: Annotated[int | None, typer.Option(min=1, help="Step of the episode; default: its first operation.")] = None,
    json: Json = False,
) -> None:
    """Explain a decision of a policy: its alternatives, what moved it, and what happened to the seed.

    Of `esper train`, the decisions of the last saved round are recorded (of at most 16 environments), with the policy
    that made them; of `esper grow --controller tamiyo`, all of the grown host.

    Example:  esper explain runs/mine --env 3 --step 7
    """
    from esper.commands.explain import run_explain

    run_explain(run, env=env, step=step, as_json=json)
