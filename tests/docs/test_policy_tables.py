"""Tables of policies in families that `scripts/study_tables.py` writes."""

from __future__ import annotations

import msgspec
import pytest

from esper.simic.evaluation.plan_search import Plan, PlanTable
from scripts.study_tables import policies
from tests.support import ROOT

PAGE = "Result.\n<!-- study tables: begin --><!-- study tables: end -->\nMore.\n"


def figure(worlds):
    return {"mean": sum(worlds) / len(worlds), "sd": 0.0, "worlds": worlds}


def result(policy, worlds, baseline_at_equal_compute):
    rows = [
        {"name": f"learned ({policy})", "utility": figure([0.3, 0.1]), "test": figure([0.8, 0.6]), "equal_test": None},
        {"name": "none", "utility": figure([0.0, 0.0]), "equal_test": figure(baseline_at_equal_compute)},
    ]
    return {"task": "heal", "worlds": worlds, "rows": rows}


@pytest.fixture
def root(tmp_path):
    for folder in ("docs/studies", "studies/policies/heal", "studies/plans"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs/studies/policy.md").write_text(PAGE)
    for policy, baseline in (("a", [0.7, 0.5]), ("b", [0.6, 0.4])):
        content = msgspec.json.encode(result(policy, [10_000, 10_001], baseline))
        (tmp_path / f"studies/policies/heal/{policy}.json").write_bytes(content)
    return tmp_path


def test_every_policy_is_compared_with_each_controller_at_its_own_compute(root):
    ((page, text),) = policies(root)
    assert page == root / "docs/studies/policy.md"
    assert text.startswith("Result.\n")
    assert text.endswith("\nMore.\n")
    assert "| policy a | 0.200 |" in text
    assert "| none | 0.000 | +0.200 [+0.100, +0.300] | +0.200 [+0.100, +0.300] | +0.200 [+0.100, +0.300] |" in text
    assert "| none | 50.0 to 60.0 | +10.0 [+10.0, +10.0] | +20.0 [+20.0, +20.0] | +15.0 [+15.0, +15.0] |" in text


def test_results_of_other_worlds_are_refused(root):
    other = msgspec.json.encode(result("c", [10_000, 10_002], [0.0, 0.0]))
    (root / "studies/policies/heal/c.json").write_bytes(other)
    with pytest.raises(SystemExit, match="same worlds"):
        list(policies(root))


def test_plans_show_what_knowledge_of_a_world_gains(root):
    table = PlanTable(
        task="heal", episodes=12, worlds=[0, 1], plans=[Plan(), Plan(1, 1)], utility=[[0, 0], [-0.1, 0.3]]
    )
    (root / "studies/plans/heal.json").write_bytes(msgspec.json.encode(table))
    ((_, text),) = policies(root)
    assert "| `heal` | 2 | 12 | −0.0500 |" in text
    assert "| +0.1500 |" in text


def test_page_states_its_result():
    assert "**Result" in (ROOT / "docs" / "studies" / "policy.md").read_text()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_pages_have_no_gaps_to_fill(page):
    assert "@@" not in page.read_text()
