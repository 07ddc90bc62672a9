"""Tables for the console and for Markdown, and the chart."""

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from esper.commands.frontier_chart import NAME_HEIGHT, frontier_chart
from esper.studies.contract import Arm, Claim
from esper.studies.rendering import as_markdown, as_text
from esper.studies.statistics import summarize
from tests.support.example_studies import example_study, point

LONGEST = "a" * 20


def ordered(arm, world):
    return 0.5 + arm / 10 + world / 500


def summary(metric="test_quality", arms=("worse", "better"), quality=ordered, params=123_456):
    study = example_study(
        arms=tuple(Arm(name=arm, kind="example_formula") for arm in arms), metric=metric,
        claims=(Claim(arm=arms[1], against=arms[0]),),
    )  # fmt: skip
    data = {
        ("rescue", arm, world): tuple(point(b, quality(i, world - 100), params=params) for b in study.budgets)
        for i, arm in enumerate(arms)
        for world in range(100, 104)
    }
    return summarize(study, data, metric)


def test_console_table_shows_means_intervals_differences_and_verdicts():
    lines = as_text(summary()).splitlines()
    assert lines[:4] == [
        "rescue, 0.5 × one full training, 4 worlds, 95 % intervals",
        "arm     test quality            difference  × full  params",
        "worse     50.3 ± 0.2                     –    0.50  123.5k",
        "better    60.3 ± 0.2  +10.0 [+10.0, +10.0]    0.50  123.5k",
    ]
    assert "won: better higher than worse" in lines
    assert "    +10.0 [+10.0, +10.0], higher in 4, equal in 0, lower in 0 worlds" in lines


@pytest.mark.parametrize(("metric", "largest"), [("test_quality", 1.0), ("test_loss", 4.5)])
def test_console_output_fits_80_columns(metric, largest):
    arms = (LONGEST, LONGEST[1:] + "b")
    table = as_text(summary(metric, arms, lambda arm, world: largest * (arm - world % 2), params=12_345_678))
    assert max(map(len, table.splitlines())) <= 80


def test_markdown_holds_the_same_cells():
    shown = as_markdown(summary())
    assert "| arm | test quality | difference | × full | params |\n|---|---|---|---|---|\n" in shown
    assert "| better | 60.3 ± 0.2 | +10.0 [+10.0, +10.0] | 0.50 | 123.5k |" in shown
    assert "| claim | × 0.5 | × 1 |" in shown
    won = "**won** +10.0 [+10.0, +10.0], 4 of 4"
    assert f"| better higher than worse | {won} | {won} |" in shown


def test_claim_with_two_budgets_shows_both_and_has_its_own_table():
    claims = (
        Claim(arm="better", against="worse", budget=0.5),
        Claim(arm="better", against="worse", budget=0.5, against_budget=1.0),
    )
    study = example_study(claims=claims)
    data = {
        ("rescue", arm, world): tuple(point(b, quality + b / 5) for b in study.budgets)
        for arm, quality in (("worse", 0.5), ("better", 0.55))
        for world in range(100, 104)
    }
    shown = summarize(study, data, "test_quality")
    same = "| claim | × 0.5 |\n|---|---|\n| better higher than worse | **won** +5.0 [+5.0, +5.0], 4 of 4 |"
    other = (
        "| claim at different compute | outcome |\n|---|---|\n"
        "| better × 0.5 higher than worse × 1 | **lost** −5.0 [−5.0, −5.0], 0 of 4 |"
    )
    assert f"**rescue**\n\n{same}\n\n{other}\n\n## Tables" in as_markdown(shown)
    lines = as_text(shown).splitlines()
    at = lines.index("lost: better × 0.5 higher than worse × 1")
    assert lines[at + 1] == "    rescue, different compute, in multiples of one full training"
    only_other = example_study(claims=claims[1:])
    assert f"**rescue**\n\n{other}" in as_markdown(summarize(only_other, data, "test_quality"))


def test_markdown_verdicts_of_unequal_compute_have_a_reason_and_untested_places_are_empty():
    arms = (Arm(name="worse", kind="example_formula"), Arm(name="better", kind="example_formula"))
    claims = (
        Claim(arm="better", against="worse", budget=0.5, direction="lower"), Claim(arm="worse", against="better"),
    )  # fmt: skip
    study = example_study(arms=arms, claims=claims)
    data = {
        ("rescue", arm.name, world): tuple(point(b, 0.5 + i / 10, train_macs=10 + 10 * i) for b in study.budgets)
        for i, arm in enumerate(arms)
        for world in range(100, 104)
    }
    lines = as_markdown(summarize(study, data, "test_quality")).splitlines()
    lost = "**lost** −10.0 [−10.0, −10.0], 0 of 4"
    assert "| better lower than worse | refused: better used 2.00 times the compute |  |" in lines
    assert f"| worse higher than better | {lost} | {lost} |" in lines


def test_chart_has_one_named_line_and_band_per_arm_and_colours_for_dark_pages():
    arms = tuple(f"arm{i}" for i in range(9))
    chart = frontier_chart(summary(arms=arms, quality=lambda arm, _world: 0.5 + arm / 1e6), "rescue")

    root = ET.fromstring(chart)
    space = "{http://www.w3.org/2000/svg}"
    paths = [path.get("class") for path in root.iter(f"{space}path")]
    names = [text for text in root.iter(f"{space}text") if text.get("class") == "name"]
    heights = sorted(float(text.get("y")) for text in names)
    assert paths.count("band") == 9
    assert (paths.count("line"), paths.count("line dashed")) == (8, 1)
    assert {text.text for text in names} == set(arms)
    assert min(b - a for a, b in pairwise(heights)) >= NAME_HEIGHT - 0.11
    assert "prefers-color-scheme: dark" in chart


def test_chart_of_a_single_point_can_be_drawn():
    study = example_study(budgets=(1.0,), claims=())
    data = {("rescue", "worse", 100): (point(1.0, 0.5),)}
    ET.fromstring(frontier_chart(summarize(study, data, "test_quality"), "rescue"))
