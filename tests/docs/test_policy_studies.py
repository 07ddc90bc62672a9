"""Studies of policies on the simulator: which records count, the ranking, and the generated pages."""

import msgspec
import pytest

from scripts import policy_studies
from scripts.policy_studies import STUDIES, PolicyStudy, Record, is_outdated, records, records_path, table
from tests.support import ROOT


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return a root with the records of a study of two arms, one of them with an earlier setting too."""
    study = PolicyStudy(arms={"first": ("rounds=2",), "better": ("rounds=2", "envs=4")}, seeds=(0, 1), worlds=(10, 3))
    monkeypatch.setattr(policy_studies, "STUDIES", {"example": study})
    path = records_path("example", tmp_path)
    path.parent.mkdir(parents=True)
    lines = [
        record("first", ("rounds=2",), 0, [0.01, 0.02, 0.03]),
        record("first", ("rounds=2",), 1, [0.03, 0.04, 0.05]),
        record("better", ("rounds=2", "envs=4"), 0, [0.05, 0.06, 0.07]),
        record("better", ("rounds=1", "envs=4"), 1, [9.0, 9.0, 9.0]),
        record("better", ("rounds=2", "envs=4"), 2, [9.0, 9.0, 9.0]),
    ]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return tmp_path


def record(arm, settings, seed, utility):
    return Record(arm=arm, settings=settings, seed=seed, cpu_s=8.0, first_world=10, utility=utility, curve=[0.0])


def test_only_records_with_the_present_settings_and_seeds_count(root):
    assert sorted(records("example", root)) == [("better", 0), ("first", 0), ("first", 1)]


def test_arms_are_ranked_by_utility_with_paired_leads(root):
    rows = table("example", root).splitlines()[-2:]
    assert rows[0].startswith("| `better` | +0.0600 [+0.0500, +0.0700] | +0.0600 | +0.0300 [+0.0300, +0.0300] |")
    assert rows[1].startswith("| `first` | +0.0300 [+0.0200, +0.0400] | +0.0200, +0.0400 | – |")
    assert "3 of 4 trainings" in table("example", root)


def test_page_is_written_and_checked(root):
    (root / "docs" / "studies").mkdir(parents=True)
    assert is_outdated("example", root, write=True)
    assert not is_outdated("example", root, write=False)
    page = root / "docs" / "studies" / "example.md"
    page.write_text("Introduction.\n" + page.read_text().replace("+0.0300", "+0.0400"))
    assert is_outdated("example", root, write=True)
    assert not is_outdated("example", root, write=False)
    assert page.read_text().startswith("Introduction.")


@pytest.mark.parametrize("name", STUDIES)
def test_page_of_every_study_is_up_to_date(name):
    assert not is_outdated(name, ROOT, write=False), "run python scripts/policy_studies.py --tables"
