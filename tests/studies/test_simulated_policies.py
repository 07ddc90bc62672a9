"""Studies of settings: which trainings count, the ranking, and one training."""

import pytest

from esper.leyline.errors import UnknownNameError
from esper.simic.training.config import load_config
from esper.studies.results import append_result
from esper.studies.simulated_policies import Training, current_trainings, ranking, ranking_title, train_arm
from esper.studies.table import SETTINGS_STUDIES
from tests.support.example_studies import settings_study, trained_arm

STUDY = settings_study()


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """Return the present trainings of a results file; others have earlier settings, seeds or worlds."""
    monkeypatch.chdir(tmp_path)
    for one in (
        trained_arm("better", 0, [0.05, 0.06, 0.07]),
        trained_arm("first", 0, [9.0, 9.0, 9.0]),
        trained_arm("first", 0, [0.01, 0.02, 0.03]),
        trained_arm("first", 1, [0.03, 0.04, 0.05]),
        trained_arm("better", 1, [9.0, 9.0, 9.0], settings=("rounds=2",)),
        trained_arm("better", 2, [9.0, 9.0, 9.0]),
        trained_arm("better", 1, [9.0, 9.0]),
        trained_arm("better", 1, [9.0, 9.0, 9.0], first_world=11),
    ):
        append_result(tmp_path, one)
    return current_trainings(STUDY, tmp_path)


def test_last_trainings_with_the_present_settings_seeds_and_worlds_count(finished):
    assert list(finished) == [Training("first", 0), Training("better", 0), Training("first", 1)]


def test_saved_trainings_count(finished, tmp_path):
    assert current_trainings(STUDY) == {}
    STUDY.saved.parent.mkdir(parents=True)
    (tmp_path / "results.jsonl").rename(STUDY.saved)
    assert current_trainings(STUDY) == finished


def test_arms_are_ranked_by_utility_with_paired_differences(finished):
    assert ranking(STUDY, finished) == [
        ("arm", "U", "of each training seed", "against first"),
        ("better", "+0.0600 ± 0.0100", "+0.0600", "+0.0300 [+0.0300, +0.0300]"),
        ("first", "+0.0300 ± 0.0100", "+0.0200, +0.0400", "–"),
    ]
    assert ranking_title(STUDY) == "U in worlds 10 to 12, training seeds 0, 1, 95 % intervals"


def test_ranking_without_the_reference_has_no_differences(finished):
    assert ranking(STUDY, {Training("better", 0): finished["better", 0]})[1:] == [
        ("better", "+0.0600 ± 0.0100", "+0.0600", "–")
    ]


def test_jobs_are_ordered_by_seed_and_selected_by_arm():
    assert STUDY.jobs() == [("first", 0), ("better", 0), ("first", 1), ("better", 1)]
    assert STUDY.jobs(["better"]) == [("better", 0), ("better", 1)]
    with pytest.raises(UnknownNameError, match=r"no arm of study 'settings' named 'bettr'. Did you mean 'better'"):
        STUDY.jobs(["bettr"])


def test_training_depends_on_its_seed_only():
    one, again = (train_arm(STUDY, Training("better", 1)) for _ in range(2))
    assert (one.arm, one.seed, one.settings, one.first_world) == ("better", 1, STUDY.arms["better"], 10)
    assert (len(one.utility), len(one.curve)) == (3, 2)
    assert (one.utility, one.curve) == (again.utility, again.curve)
    assert one.curve != train_arm(STUDY, Training("better", 0)).curve


@pytest.mark.parametrize("study", SETTINGS_STUDIES.values(), ids=lambda study: study.name)
def test_settings_of_every_arm_are_valid(study):
    for settings in study.arms.values():
        load_config(preset="sim", sets=list(settings))
