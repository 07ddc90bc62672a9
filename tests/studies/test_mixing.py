"""Mixing times equal results worked out by hand, and are shown where an arm has a counterpart from step 0."""

import pytest

from esper.studies.contract import Arm
from esper.studies.mixing import mixing_time
from esper.studies.rendering import as_markdown, as_text
from esper.studies.statistics import summarize
from tests.support.example_studies import example_study, point

REFERENCE = [(4, 0.60), (8, 0.70), (16, 0.80), (24, 0.80)]


@pytest.mark.parametrize(
    ("grown", "expected"),
    [
        ([(6, 0.65), (12, 0.75)], (1.0, 7.0)),  # never apart: met at the first point
        ([(8, 0.50), (16, 0.70), (24, 0.80)], (18.5, 19.0)),  # gap 0.1 at 16, 0 at 24, 0.00625 at 23.5
        ([(8, 0.70), (16, 0.70), (24, 0.80)], (18.5, 19.0)),  # met, apart again, met for good
        ([(8, 0.70), (16, 0.70)], (None, 11.0)),  # apart at the last point
        ([(2, 0.10), (8, 0.70), (30, 0.10)], (3.0, 3.0)),  # points outside the reference do not count
        ([(30, 0.90)], (None, 0.0)),  # nothing to compare
    ],
)
def test_mixing_time_is_the_last_crossing(grown, expected):
    assert mixing_time(grown, REFERENCE, start=5, tolerance=0.00625) == pytest.approx(expected)


def study_and_results(metric="test_quality"):
    arms = (
        Arm(name="from_start", kind="static", settings={"structure": "full"}),
        Arm(name="wider", kind="static", settings={"structure": "full", "host": "wider"}),
        Arm(name="planted", kind="planted", settings={"structure": "full", "start": 2}),
        Arm(name="other", kind="planted", settings={"structure": "mlp", "start": 2}),
        Arm(name="trained", kind="planted", settings={"structure": "full", "start": 2, "pretrain": 9}),
    )
    study = example_study(arms=arms, budgets=(0.1, 0.5, 1.0), claims=(), metric=metric)
    gap = {"planted": (0.2, 0.1, 0.0)}
    results = {
        ("rescue", arm.name, world): tuple(
            point(b, 0.5 + b / 10 - g + world / 1000)
            for b, g in zip(study.budgets, gap.get(arm.name, (0, 0, 0)), strict=True)
        )
        for arm in arms
        for world in (100, 101)
    }
    return study, results


@pytest.mark.parametrize(
    ("metric", "tolerance"), [("test_quality", 0.005), ("val_quality", 0.005), ("test_loss", 0.01)]
)
def test_summary_compares_planted_structures_with_the_same_one_from_step_0(metric, tolerance):
    study, results = study_and_results()
    (mixing,) = summarize(study, results, metric).mixing
    assert (mixing.task, mixing.arm, mixing.against, mixing.tolerance) == ("rescue", "planted", "from_start", tolerance)
    assert mixing.epochs == pytest.approx(20 + 20 * (0.1 - tolerance) / 0.1 - 2)
    assert mixing.observed == 38


def test_arm_of_equal_steps_in_the_same_situation_is_preferred():
    arms = (
        Arm(name="from_start", kind="static", settings={"structure": "full", "change": 3}),
        Arm(name="equal_steps", kind="static", settings={"structure": "full", "change": 3, "epochs": [2]}),
        Arm(name="restart", kind="static", settings={"structure": "full", "epochs": [2]}),
        Arm(name="planted", kind="planted", settings={"structure": "full", "change": 3, "start": 1}),
    )
    study = example_study(arms=arms, budgets=(0.5,), claims=())
    results = {("rescue", arm.name, world): (point(0.5, 0.5),) for arm in arms for world in (100, 101)}
    assert [m.against for m in summarize(study, results, "test_quality").mixing] == ["equal_steps"]
    unfinished = {key: points for key, points in results.items() if key[1] != "equal_steps"}
    assert [m.against for m in summarize(study, unfinished, "test_quality").mixing] == ["from_start"]


def test_tables_show_mixing_times_and_what_was_not_reached():
    study, results = study_and_results()
    assert "planted  from_start      37" in as_text(summarize(study, results, "test_quality")).splitlines()
    short = {key: points[:2] for key, points in results.items()}
    table = as_markdown(summarize(study, short, "test_quality"))
    assert "rescue, mixing time after the first seed:\n\n| arm | against | epochs |" in table
    assert "| planted | from_start | > 18 |" in table
