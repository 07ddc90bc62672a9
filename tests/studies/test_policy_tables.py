"""Tables of policies in families: differences to other controllers, gains of plans, and returns of training."""

import json

import msgspec
import pytest

from esper.leyline.errors import ConfigError, UnknownNameError
from esper.simic.evaluation.plan_search import Plan, PlanTable
from esper.studies.policy_tables import gains_of_plans, policy_tables, read_evaluations, read_returns
from tests.support.example_studies import evaluation


@pytest.fixture
def directory(tmp_path):
    """Return a directory with the results of two policies."""
    for policy, equal_test in (("a", [0.7, 0.5]), ("b", [0.6, 0.4])):
        (tmp_path / f"{policy}.json").write_text(json.dumps(evaluation(policy, equal_test)))
    return tmp_path


def test_every_policy_is_compared_with_each_controller_at_its_own_compute(directory):
    heading, utility, test = policy_tables("heal", read_evaluations(directory))
    assert heading == "### `heal`: 2 held-out worlds of `heal`"
    assert "| policy a | 0.200 |" in utility
    assert "| none | 0.000 | +0.200 [+0.100, +0.300] | +0.200 [+0.100, +0.300] | +0.200 [+0.100, +0.300] |" in utility
    assert "| none | 50.0 to 60.0 | +10.0 [+10.0, +10.0] | +20.0 [+20.0, +20.0] | +15.0 [+15.0, +15.0] |" in test


def test_range_of_a_controller_at_several_computes_begins_with_the_lowest():
    parts = [evaluation("a", [0.102, 0.102]), evaluation("b", [0.095, 0.095])]
    assert "| none | 9.5 to 10.2 |" in policy_tables("heal", parts)[2]


def test_results_without_equal_compute_have_one_table():
    assert len(policy_tables("heal", [evaluation("a", None)])) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            evaluation("c", [0.0, 0.0], worlds=(0, 1)),
            "c.json must have the same task, worlds and controllers",
        ),
        (evaluation("c", [0.0, 0.0], baseline="random"), "c.json must have the same task, worlds and controllers"),
        ({"task": "heal"}, "c.json is not a result of `esper eval`"),
        ([], "c.json is not a result of `esper eval`"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(directory, content, message):
    (directory / "c.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_evaluations(directory)


def test_directory_without_results_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no results of `esper eval`"):
        read_evaluations(tmp_path)


def plans(path, task):
    table = PlanTable(task=task, episodes=12, worlds=[0, 1], plans=[Plan(), Plan(1, 1)], utility=[[0, 0], [-0.1, 0.3]])
    path.write_bytes(msgspec.json.encode(table))
    return path


def test_plans_show_what_knowledge_of_a_world_gains(tmp_path):
    row = gains_of_plans([plans(tmp_path / "heal.json", "heal")]).splitlines()[-1]
    assert row.startswith("| `heal` | 2 | 12 | −0.0500 |")
    assert row.endswith("| +0.1500 |")


def test_plans_of_an_unknown_family_are_refused(tmp_path):
    with pytest.raises(UnknownNameError, match=r"no family of .*heal.json named 'heel'. Did you mean 'heal'"):
        gains_of_plans([plans(tmp_path / "heal.json", "heel")])


def test_returns_are_summarized_over_training_seeds(tmp_path):
    path = tmp_path / "returns.csv"
    path.write_text("round,0,1\n1,0.1,0.3\n2,0.2,0.2\n")
    assert read_returns(path) == [(1.0, 0.2, 0.1, 0.3), (2.0, 0.2, 0.2, 0.2)]
