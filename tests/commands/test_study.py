"""`esper study`: options, errors, tables and saved files."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from esper.commands.study import list_studies, parse_shard, parse_worlds, run_study
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.studies.contract import Arm
from esper.studies.results import read_lines, read_results, read_saved
from esper.studies.simulated_policies import TrainedArm
from esper.studies.table import SETTINGS_STUDIES, STUDIES
from tests.support.example_studies import example_study, settings_study


@pytest.fixture
def study(monkeypatch, tmp_path):
    """Return a registered study, with the working directory in a temporary place."""
    monkeypatch.chdir(tmp_path)
    each = example_study()
    monkeypatch.setitem(STUDIES, each.name, each)
    return each


def run(name="example", **changes):
    options = {
        "arms": [], "worlds": None, "tuning": False, "shard": "1/1", "workers": 1, "out": Path("out"), "show": False,
        "save": False, "extend": False,
    }  # fmt: skip
    run_study(name, **options | changes)


@pytest.mark.usefixtures("study")
def test_study_runs_prints_and_saves(capsys):
    run(save=True)
    printed = capsys.readouterr().out
    assert "rescue, 1 × one full training, 2 worlds, 95 % intervals" in printed
    assert "won: better higher than worse" in printed
    assert ET.parse("out/example/rescue.svg").getroot().tag.endswith("svg")

    saved = json.loads(Path("studies/example.json").read_text())
    assert [(r["arm"], r["world"], len(r["points"])) for r in saved["records"]] == [
        ("worse", 100, 2), ("better", 100, 2), ("worse", 101, 2), ("better", 101, 2),
    ]  # fmt: skip
    assert saved["command"]
    assert len(saved["versions"]) == 1
    assert [v["outcome"] for v in saved["summary"]["verdicts"]] == ["won"] * 3

    list_studies(Path("out"))
    assert "example: 4 of 4 jobs finished, saved\n    Is the better arm better?" in capsys.readouterr().out


@pytest.mark.usefixtures("study")
def test_tuning_shows_validation_quality_and_no_test_quality(capsys):
    run(tuning=True, worlds="0:2")
    printed = capsys.readouterr().out
    assert "better   90.1 ± 0.1" in printed  # validation; the test quality is 40.1
    assert "40." not in printed
    assert "won" not in printed
    assert {r.world for r in read_results(Path("out/example"))} == {0, 1}


def test_tuning_of_candidates_is_saved_apart_and_extended(study, monkeypatch, capsys):
    wild = Arm(name="wild", kind="example_formula", settings={"base": 0.4})
    tuned = msgspec.structs.replace(study, candidates=(study.arm("better"), wild), tuning_worlds=(3, 2))
    monkeypatch.setitem(STUDIES, "example", tuned)
    run(tuning=True, save=True)
    assert not Path("studies/example.json").exists()
    saved = read_saved(Path("studies/tuning/example.json"))
    assert {(r.arm, r.world) for r in saved.records} == {(arm, world) for arm in ("better", "wild") for world in (3, 4)}
    assert saved.study.claims == ()
    capsys.readouterr()

    run(tuning=True, extend=True, out=Path("again"))
    assert "4 jobs, 4 of them finished before" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"'example' is not saved: there is no studies/example\.json"):
        run(extend=True)


def test_first_candidate_must_be_an_arm_of_the_study(study):
    stranger = Arm(name="stranger", kind="example_formula")
    with pytest.raises(ConfigError, match="the first of the candidates must be one of the arms"):
        msgspec.structs.replace(study, candidates=(stranger, study.arms[0]))


@pytest.mark.usefixtures("study")
def test_shards_share_the_worlds_and_one_alone_cannot_save(capsys):
    with pytest.raises(ConfigError, match=r"cannot be saved: 2 jobs are missing. Run the other shards first"):
        run(shard="2/2", save=True)
    assert "Incomplete: 2 of 4 jobs are missing." in capsys.readouterr().out
    assert {r.world for r in read_results(Path("out/example"))} == {101}

    run(shard="1/2", save=True)
    assert len(read_results(Path("out/example"))) == 4
    assert Path("studies/example.json").exists()


@pytest.mark.usefixtures("study")
def test_jobs_kept_in_the_repository_are_not_run_again_until_the_study_is_saved(capsys):
    run(shard="2/2")
    Path("studies").mkdir()
    Path("out/example/results.jsonl").rename("studies/example.jsonl")
    capsys.readouterr()

    run(save=True)

    assert "4 jobs, 2 of them finished before" in capsys.readouterr().out
    assert {r.world for r in read_results(Path("out/example"))} == {100}
    assert not Path("studies/example.jsonl").exists()


@pytest.mark.usefixtures("study")
def test_saved_study_is_repeated_or_extended(study, monkeypatch, capsys):
    run(save=True)
    new_arm = msgspec.structs.replace(study.arms[1], name="new")
    monkeypatch.setitem(STUDIES, "example", msgspec.structs.replace(study, arms=(*study.arms, new_arm)))
    capsys.readouterr()

    run(extend=True, out=Path("extended"), save=True)
    assert "6 jobs, 4 of them finished before" in capsys.readouterr().out
    assert {r.arm for r in read_results(Path("extended/example"))} == {"new"}
    assert len(json.loads(Path("studies/example.json").read_text())["records"]) == 6

    changed = msgspec.structs.replace(study.arms[0], settings={"base": 0.25})
    monkeypatch.setitem(STUDIES, "example", msgspec.structs.replace(study, arms=(changed, study.arms[1])))
    run(extend=True, out=Path("changed"))
    assert "4 jobs, 2 of them finished before" in capsys.readouterr().out
    assert {r.arm for r in read_results(Path("changed/example"))} == {"worse"}


@pytest.mark.usefixtures("study")
def test_saved_study_is_shown_until_it_is_repeated(capsys):
    run(save=True)
    run(show=True, out=Path("elsewhere"))
    assert "Incomplete" not in capsys.readouterr().out

    run(out=Path("repeated"), shard="1/2")
    assert "2 jobs, 0 of them finished before" in capsys.readouterr().out
    run(show=True, out=Path("repeated"))
    assert "Incomplete: 2 of 4 jobs are missing." in capsys.readouterr().out
    list_studies(Path("repeated"))
    assert "example: 2 of 4 jobs finished, saved" in capsys.readouterr().out


@pytest.mark.usefixtures("study")
def test_damaged_saved_study_does_not_hide_the_others(capsys):
    Path("studies").mkdir()
    Path("studies/example.json").write_text("{}")
    list_studies(Path("out"))
    printed = capsys.readouterr().out
    assert "example: studies/example.json is not a saved study" in printed
    assert "open_birth: " in printed


@pytest.mark.usefixtures("study")
def test_show_runs_nothing_and_arms_select(capsys):
    run(show=True)
    assert "Incomplete: 4 of 4 jobs are missing." in capsys.readouterr().out
    run(arms=["better"], worlds="300:1")
    assert [(r.arm, r.world) for r in read_results(Path("out/example"))] == [("better", 300)]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": "exampel"}, UnknownNameError, "no study named 'exampel'. Did you mean 'example'"),
        ({"arms": ["bettr"]}, UnknownNameError, "Did you mean 'better'"),
        ({"name": "without"}, ConfigError, "arm 'worse' is of kind 'missing', which has no trainer"),
        ({"worlds": "0:5"}, ConfigError, "worlds start at 100 or above"),
        ({"worlds": "100:5", "tuning": True}, ConfigError, "tuning worlds lie below 100"),
        ({"worlds": "100:1", "save": True}, ConfigError, "leave out --arm, --worlds and --show"),
        ({"tuning": True, "arms": ["better"], "save": True}, ConfigError, "leave out --arm, --worlds and --show"),
        ({"extend": True}, ConfigError, "'example' is not saved: there is no studies/example.json to extend"),
    ],
)
def test_invalid_request_is_refused_before_anything_runs(study, monkeypatch, changes, error, message):
    arms = tuple(type(arm)(name=arm.name, kind="missing") for arm in study.arms)
    monkeypatch.setitem(STUDIES, "without", example_study(name="without", arms=arms))
    with pytest.raises(error, match=message):
        run(**changes)
    assert read_results(Path("out/example")) == []


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "a/b", "-1/2", "1/2/3"])
def test_malformed_shard_is_refused(text):
    with pytest.raises(ConfigError, match="--shard must be I/N"):
        parse_shard(text)


@pytest.mark.parametrize("text", ["", "100", "100-16", "-1:5", "100:16:1"])
def test_malformed_worlds_are_refused(text):
    with pytest.raises(ConfigError, match="--worlds must be FIRST:COUNT"):
        parse_worlds(example_study(), text, tuning=False)


# Studies of settings --------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """Return a registered study of settings, with the working directory in a temporary place."""
    monkeypatch.chdir(tmp_path)
    each = settings_study()
    monkeypatch.setitem(SETTINGS_STUDIES, each.name, each)
    return each


def trainings(path="out/settings/results.jsonl"):
    return [(one.arm, one.seed) for one in read_lines(Path(path), TrainedArm)]


@pytest.mark.usefixtures("settings")
def test_missing_trainings_of_settings_run_in_shards_and_are_saved(capsys):
    with pytest.raises(ConfigError, match="cannot be saved: 2 jobs are missing"):
        run("settings", shard="1/2", save=True)
    assert trainings() == [("first", 0), ("first", 1)]
    printed = capsys.readouterr().out
    assert "2 jobs, 0 of them finished before\n[1/2] first seed 0: " in printed
    assert "Incomplete: 2 of 4 jobs are missing." in printed

    run("settings", workers=2, save=True)
    printed = capsys.readouterr().out
    assert "4 jobs, 2 of them finished before" in printed
    assert "U in worlds 10 to 12, training seeds 0, 1, 95 % intervals\narm " in printed
    assert "Saved: studies/policies/settings.jsonl" in printed
    saved = trainings("studies/policies/settings.jsonl")
    assert saved == [("first", 0), ("better", 0), ("first", 1), ("better", 1)]

    Path("out/settings/results.jsonl").unlink()
    run("settings", extend=True)
    assert "4 jobs, 4 of them finished before" in capsys.readouterr().out
    assert trainings() == []
    run("settings", arms=["first"], out=Path("repeated"))
    assert "2 jobs, 0 of them finished before" in capsys.readouterr().out
    list_studies(Path("out"))
    assert "settings: 4 of 4 jobs finished, saved\n    Which is better?" in capsys.readouterr().out


@pytest.mark.usefixtures("settings")
def test_arms_of_settings_select_and_show_runs_nothing(capsys):
    run("settings", arms=["better"])
    assert trainings() == [("better", 0), ("better", 1)]
    capsys.readouterr()
    run("settings", show=True)
    assert "Incomplete: 2 of 4 jobs are missing." in capsys.readouterr().out
    assert len(trainings()) == 2


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": "setings"}, UnknownNameError, "no study named 'setings'. Did you mean 'settings'"),
        ({"arms": ["bettr"]}, UnknownNameError, "Did you mean 'better'"),
        ({"worlds": "0:5"}, ConfigError, "leave out --tuning and --worlds"),
        ({"tuning": True}, ConfigError, "leave out --tuning and --worlds"),
        ({"extend": True}, ConfigError, "'settings' is not saved"),
        ({"show": True, "save": True}, ConfigError, "--save writes a whole study"),
    ],
)
def test_invalid_request_of_settings_is_refused_before_anything_runs(changes, error, message):
    with pytest.raises(error, match=message):
        run(**{"name": "settings"} | changes)
    assert trainings() == []
