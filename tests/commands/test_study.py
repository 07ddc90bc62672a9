"""`esper study` and `scripts/study_tables.py`: options, errors, tables, saved files and generated docs."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from esper.commands.study import list_studies, parse_shard, parse_worlds, run_study
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.studies.results import read_results
from esper.studies.table import STUDIES
from scripts.study_tables import policies
from tests.support import ROOT
from tests.support.example_studies import example_study

SCRIPT = ROOT / "scripts" / "study_tables.py"


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
        "save": False,
    }  # fmt: skip
    run_study(name, **options | changes)


def tables(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("study")
def test_study_runs_prints_saves_and_generates_its_docs(capsys):
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

    assert tables("--check").returncode == 1
    assert tables().returncode == 0
    assert tables("--check").returncode == 0
    page = Path("docs/studies/example.md")
    text = page.read_text()
    assert "| better | 40.5 ± 0.1 | +10.0 [+10.0, +10.0] | 1.00 | 0.0k |" in text
    page.write_text("Introduction.\n" + text.replace("40.5", "41.5"))
    check = tables("--check")
    assert (check.returncode, check.stdout) == (1, "not up to date: docs/studies/example.md\n")
    tables()
    assert page.read_text() == "Introduction.\n" + text


def test_docs_of_saved_studies_are_up_to_date():
    check = tables("--check", "--root", str(ROOT))
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.parametrize("saved", sorted((ROOT / "studies").glob("*.json")), ids=lambda path: path.stem)
def test_pages_of_saved_studies_state_the_result_before_the_tables(saved):
    page = (ROOT / "docs" / "studies" / f"{saved.stem}.md").read_text()
    before = page.partition("<!-- study tables: begin -->")[0]
    assert before.partition("## What it shows\n")[2].strip()


@pytest.mark.usefixtures("study")
def test_tuning_shows_validation_quality_and_no_test_quality(capsys):
    run(tuning=True, worlds="0:2")
    printed = capsys.readouterr().out
    assert "better   90.1 ± 0.1" in printed  # validation; the test quality is 40.1
    assert "40." not in printed
    assert "won" not in printed
    assert {r.world for r in read_results(Path("out/example"))} == {0, 1}


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
        ({"tuning": True, "save": True}, ConfigError, "leave out --tuning"),
        ({"worlds": "100:5", "save": True}, ConfigError, "leave out --tuning, --arm, --worlds"),
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


def test_range_of_a_controller_at_several_computes_begins_with_the_lowest(tmp_path):
    def figure(mean):
        return {"mean": mean, "worlds": [mean, mean]}

    results = tmp_path / "studies" / "policies" / "heal"
    results.mkdir(parents=True)
    for policy, accuracy in (("a", 0.102), ("b", 0.095)):
        rows = [
            {"name": f"learned ({policy})", "utility": figure(0.1), "test": figure(0.2), "equal_test": None},
            {"name": "none", "utility": figure(0.0), "test": figure(0.1), "equal_test": figure(accuracy)},
        ]
        (results / f"{policy}.json").write_text(json.dumps({"task": "heal", "worlds": [0, 1], "rows": rows}))
    (tmp_path / "docs" / "studies").mkdir(parents=True)
    page = tmp_path / "docs" / "studies" / "policy.md"
    page.write_text("<!-- study tables: begin --><!-- study tables: end -->")
    ((_, text),) = policies(tmp_path)
    assert "| none | 9.5 to 10.2 |" in text
