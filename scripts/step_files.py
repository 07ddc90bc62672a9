"""List the files of the package whose functions one training step calls.

    python scripts/step_files.py                 # task digits; files and functions of the longest step
    python scripts/step_files.py --all           # of every step of a round together
    python scripts/step_files.py engine.strategy=stacked

A step is one pass of the loop over `rollout` in `train_ppo_vectorized`: decide, apply, train an epoch, measure, store,
emit. The steps of the second round are traced, so that work done once per start is not counted. Functions called on
the training thread count; those on the threads of sinks do not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import esper
from esper.nissa.recorder import record
from esper.simic.training.config import load_config
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tolaria.rollout import rollout

PACKAGE = Path(esper.__file__).parent
SETTINGS = ["task=digits", "envs=4", "worlds=4", "epochs=12", "rounds=2", "ppo.minibatches=2", "checkpoint_share=0.1"]
Functions = set[tuple[str, str]]  # (file, qualified name)


def trace_steps(sets: list[str]) -> list[Functions]:
    """Train for two rounds and return the functions that each step of the second round calls, but for the last."""
    steps: list[Functions] = []

    def trace(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and steps and code.co_filename.startswith(str(PACKAGE)):
            steps[-1].add((str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname))

    def poll() -> None:  # called before each step, by way of `before_step` of `rollout`
        if rounds and sys._getframe(2).f_code is rollout.__code__:
            steps.append(set())
            sys.setprofile(trace)

    rounds: list[int] = []
    with tempfile.TemporaryDirectory() as place, record("trace", out=Path(place) / "run") as run:
        try:
            train_ppo_vectorized(
                load_config(sets=sets), run.hub, directory=run.path, poll=poll,
                on_round=lambda done: rounds.append(done.number),
            )  # fmt: skip
        finally:
            sys.setprofile(None)
    return steps[:-1]  # the last one ends with the update


def files_of(functions: Functions) -> set[str]:
    """Return the files that the functions are in."""
    return {path for path, _ in functions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="show all steps of the round together")
    parser.add_argument("sets", nargs="*", help="settings of the training run, as in `esper train --set`")
    options = parser.parse_args()
    steps = trace_steps([*SETTINGS, *options.sets])
    shown = set.union(*steps) if options.all else max(steps, key=lambda step: len(files_of(step)))
    for path in sorted(files_of(shown)):
        print(path, ":", ", ".join(sorted(name for other, name in shown if other == path)))
    counts = [len(files_of(step)) for step in steps]
    print(f"{len(files_of(shown))} files, {len(shown)} functions; files of each step: {counts}")


if __name__ == "__main__":
    main()
