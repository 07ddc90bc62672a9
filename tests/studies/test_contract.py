"""What a valid study is, and which results a change of it invalidates."""

import msgspec
import pytest

from esper.leyline.errors import ConfigError, UnknownNameError
from esper.studies.contract import Arm, Claim
from esper.studies.table import STUDIES, get_study
from esper.studies.trainers import trainer, trainer_of
from tests.support.example_studies import example_study

ARM = Arm(name="a", kind="example_formula")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "No Name"}, "names are a letter"),
        ({"arms": (), "claims": ()}, "arms must have different names"),
        ({"arms": (ARM, ARM), "claims": ()}, "arms must have different names"),
        ({"task": ()}, "one or more tasks"),
        ({"budgets": ()}, "positive and ascending"),
        ({"budgets": (1.0, 0.5)}, "positive and ascending"),
        ({"budgets": (0.0, 1.0)}, "positive and ascending"),
        ({"min_worlds": 1}, "at least 2"),
        ({"worlds": (99, 4)}, "start at 100"),
        ({"worlds": (100, 0)}, "at least one"),
        ({"tuning_worlds": (98, 3)}, "below 100"),
        ({"claims": (Claim(arm="better", against="worse", budget=0.7),)}, "must be one of"),
        ({"claims": (Claim(arm="better", against="worse", budget=1.0, at="frontier area"),)}, "must be one of"),
        ({"claims": (Claim(arm="better", against="worse", against_budget=1.0),)}, "needs a budget"),
        ({"claims": (Claim(arm="better", against="worse", budget=1.0, against_budget=0.7),)}, r"among \[0.5\]"),
        ({"claims": (Claim(arm="better", against="worse", budget=1.0, against_budget=1.0),)}, r"among \[0.5\]"),
        (
            {"claims": (Claim(arm="better", against="worse", budget=1.0, against_budget=0.5, at="equal steps"),)},
            "neither equal steps nor frontiers",
        ),
    ],
)
def test_invalid_study_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        example_study(**changes)


def test_claim_about_an_unknown_arm_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownNameError, match=r"no arm of study 'example' named 'beter'. Did you mean 'better'"):
        example_study(claims=(Claim(arm="beter", against="worse"),))


def test_settings_hash_covers_kind_settings_and_budgets_only():
    study = example_study()
    arm = study.arms[1]
    same = [study.settings_hash(Arm(name="renamed", kind=arm.kind, settings=arm.settings))]
    same.append(example_study(worlds=(200, 9), question="?").settings_hash(arm))
    two_budgets = Claim(arm="better", against="worse", budget=0.5, against_budget=1.0)
    same.append(example_study(claims=(two_budgets,)).settings_hash(arm))
    others = [
        study.settings_hash(msgspec.structs.replace(arm, kind="other")),
        study.settings_hash(msgspec.structs.replace(arm, settings={"base": 0.4})),
        example_study(budgets=(0.5, 2.0)).settings_hash(arm),
    ]
    assert set(same) == {study.settings_hash(arm)}
    assert len({*others, study.settings_hash(arm)}) == 4


def test_unknown_study_kind_without_trainer_and_second_trainer_are_refused():
    with pytest.raises(UnknownNameError, match=r"no study named 'open_brith'. Did you mean 'open_birth'"):
        get_study("open_brith")
    with pytest.raises(
        ConfigError, match=r"arm 'a' is of kind 'none', which has no trainer. Kinds with one: .*example"
    ):
        trainer_of(Arm(name="a", kind="none"))
    with pytest.raises(ConfigError, match="already have a trainer"):
        trainer("example_formula")


def test_every_row_of_the_table_survives_json():
    for study in STUDIES.values():
        assert msgspec.json.decode(msgspec.json.encode(study), type=type(study)) == study
