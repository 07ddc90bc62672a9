"""Small studies and results. Trainers of the studies compute points from formulas, fail, wait or end their process."""

import os
import time
from pathlib import Path

import torch

from esper.studies.contract import Arm, Claim, Point, Study
from esper.studies.simulated_policies import SettingsStudy, TrainedArm
from esper.studies.trainers import trainer


def point(budget=1.0, quality=0.5, **fields):
    defaults = {
        "train_macs": round(1000 * budget), "val_quality": quality, "test_quality": quality, "test_loss": 1 - quality,
        "params": 1234, "macs_per_sample": 10, "epochs": round(40 * budget), "structure": {}, "seconds": 0.1,
    }  # fmt: skip
    return Point(budget=budget, **defaults | fields)


@trainer("example_formula")
def train_by_formula(arm, _task, world, budgets):
    """Quality rises with the budget and differs by world; validation and test quality differ by 0.5."""
    quality = [arm.settings.get("base", 0.2) + 0.1 * budget + 0.002 * (world % 7) for budget in budgets]
    return [
        point(b, q, val_quality=q + 0.5, params=torch.get_num_threads()) for b, q in zip(budgets, quality, strict=True)
    ]


@trainer("example_error")
def train_with_error(arm, task, world, budgets):
    if world == arm.settings["world"]:
        raise ValueError("no such data")
    return train_by_formula(arm, task, world, budgets)


@trainer("example_exit")
def train_and_exit(_arm, _task, _world, _budgets):
    os._exit(3)


@trainer("example_wait")
def train_and_wait(arm, task, world, budgets):
    """Wait in every world after the first one until a file exists."""
    while world > 100 and not Path(arm.settings["file"]).exists():
        time.sleep(0.05)
    return train_by_formula(arm, task, world, budgets)


def example_study(**changes):
    fields = {
        "name": "example", "question": "Is the better arm better?", "task": ("rescue",), "budgets": (0.5, 1.0),
        "worlds": (100, 2), "min_worlds": 2,
        "arms": (
            Arm(name="worse", kind="example_formula"),
            Arm(name="better", kind="example_formula", settings={"base": 0.3}),
        ),
        "claims": (Claim(arm="better", against="worse"), Claim(arm="better", against="worse", at="frontier area")),
    }  # fmt: skip
    return Study(**fields | changes)


def settings_study():
    """Return a study of settings whose trainings take less than a second."""
    short = ("rounds=2", "imitation=0", "sim.horizon=6", "ppo.epochs=1")
    arms = {"first": (*short, "envs=2"), "better": (*short, "envs=4")}
    return SettingsStudy(name="settings", question="Which is better?", arms=arms, seeds=(0, 1), worlds=(10, 3))


def trained_arm(arm, seed, utility, **changes):
    settings = settings_study().arms.get(arm, ())
    fields = {"settings": settings, "seconds": 8.0, "first_world": 10, "curve": [0.0]}
    return TrainedArm(arm=arm, seed=seed, utility=utility, **fields | changes)


def evaluation(policy, equal_test, worlds=(10_000, 10_001), baseline="none"):
    """Return a result of `esper eval`: a policy and one other controller, with its test accuracies at equal compute."""
    equal = None if equal_test is None else figure(equal_test)
    rows = [
        {"name": f"learned ({policy})", "utility": figure([0.3, 0.1]), "test": figure([0.8, 0.6]), "equal_test": None},
        {"name": baseline, "utility": figure([0.0, 0.0]), "equal_test": equal},
    ]
    return {"task": "heal", "worlds": list(worlds), "rows": rows}


def figure(worlds):
    return {"mean": sum(worlds) / len(worlds), "sd": 0.0, "worlds": worlds}
