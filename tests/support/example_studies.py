"""Small studies and their trainers: they compute points from formulas, fail, wait or end their process."""

import os
import time
from pathlib import Path

import torch

from esper.studies.contract import Arm, Claim, Point, Study
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
