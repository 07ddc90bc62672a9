"""Studies of settings: which trainings count, the ranking, and one training."""

import msgspec
import pytest

from esper.leyline.errors import ConfigError, UnknownNameError
from esper.simic.training.config import load_config
from esper.studies.results import append_result
from esper.studies.simulated_policies import (
    ROUNDS_SHOWN,
    Training,
    current_trainings,
    learning_curves,
    ranking,
    ranking_title,
    seed_rows,
    train_arm,
)
from esper.studies.simulated_references import CONTROLLERS, reference_utility
from esper.studies.table import SETTINGS_STUDIES
from tests.support.example_studies import settings_study, trained_arm

STUDY = settings_study()
REFERRED = msgspec.structs.replace(STUDY, references=("informed_planner",), first_worlds=2)


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


def test_references_are_played_once_before_the_trainings():
    assert REFERRED.jobs()[:3] == [("informed_planner", 0), ("first", 0), ("better", 0)]
    assert REFERRED.jobs(["better"]) == [("better", 0), ("better", 1)]
    played = train_arm(REFERRED, Training("informed_planner", 0))
    utility = reference_utility("informed_planner", load_config(preset="sim"), range(10, 13))
    assert played.utility == utility.round(6).tolist()
    assert (played.settings, played.curve) == ((), [])


def test_unknown_references_and_too_many_first_worlds_are_refused():
    with pytest.raises(
        UnknownNameError, match=r"no reference of study 'settings' named 'oracel'\. Did you mean 'oracle'"
    ):
        msgspec.structs.replace(STUDY, references=("oracel",))
    with pytest.raises(ConfigError, match=r"first_worlds must lie between 0 and 3, .*, got 4"):
        msgspec.structs.replace(REFERRED, first_worlds=4)
    with pytest.raises(ConfigError, match="be 0 without references, got 2"):
        msgspec.structs.replace(STUDY, first_worlds=2)
    with pytest.raises(ConfigError, match="references and arms must have different names"):
        msgspec.structs.replace(STUDY, references=("oracle", "oracle"))


def test_each_training_seed_is_compared_with_the_reference(finished):
    reference = trained_arm("informed_planner", 0, [0.0, 0.01, 0.04])
    trainings = {Training("informed_planner", 0): reference, **finished}
    assert ranking(REFERRED, trainings)[-1] == ("informed_planner", "+0.0167 ± 0.0200", "–", "–")
    assert seed_rows(REFERRED, trainings)[:2] == [
        (
            "arm", "training seed", "U in 3 worlds", "against informed_planner in 3 worlds",
            "U in 2 worlds", "against informed_planner in 2 worlds",
        ),
        (
            "first", "0", "+0.0200 ± 0.0100", "+0.0033 [−0.0100, +0.0100]",
            "+0.0150 ± 0.0050", "+0.0100 [+0.0100, +0.0100]",
        ),
    ]  # fmt: skip
    assert len(seed_rows(REFERRED, trainings)) == 4
    assert seed_rows(REFERRED, finished) == []
    assert seed_rows(STUDY, trainings) == []


def test_learning_curves_have_the_mean_and_the_range_of_the_training_seeds():
    rounds = 2 * ROUNDS_SHOWN
    trainings = {
        Training("first", 0): trained_arm("first", 0, [0.0], curve=[0.0] * rounds),
        Training("first", 1): trained_arm("first", 1, [0.0], curve=[1.0, 3.0] * ROUNDS_SHOWN),
        Training("better", 0): trained_arm("better", 0, [0.0], curve=[0.1, 0.2]),
        Training("better", 1): trained_arm("better", 1, [0.0], curve=[0.1, 0.1, 0.2, 0.2]),  # other numbers of rounds
    }
    curves = learning_curves(STUDY, trainings)
    assert curves["better"] == [(50.0, 0.1, 0.1, 0.1), (100.0, 0.2, 0.2, 0.2)]
    assert len(curves["first"]) == ROUNDS_SHOWN
    assert curves["first"][-1] == (100.0, 1.0, 0.0, 2.0)


def test_references_are_ordered_by_what_they_know():
    config = load_config(preset="sim")
    utility = {name: reference_utility(name, config, range(10_000, 10_004)) for name in CONTROLLERS}
    assert (utility["oracle"] > utility["informed_planner"]).all()
    many = {
        name: reference_utility(name, config, range(10_000, 10_128)).mean() for name in CONTROLLERS if name != "oracle"
    }
    assert 0.04 < many["best_schedule"] < many["uninformed_planner"] < many["informed_planner"]
    assert many["replacing_planner"] > many["informed_planner"] + 0.001
