"""`esper study --docs`: pages and charts of saved studies, outdated files, and errors."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from esper.cli import app
from esper.commands.study_docs import BEGIN, DOCS, END, VERDICT, run_docs
from esper.leyline.errors import ConfigError, UnknownNameError
from esper.studies.results import JobResult, SavedStudy, read_saved
from esper.studies.table import SETTINGS_STUDIES, STUDIES
from tests.support import ROOT
from tests.support.example_studies import evaluation, example_study, settings_study, train_by_formula, trained_arm

EXAMPLE = ["docs/studies/example-rescue.svg", "docs/studies/example.md"]
POLICIES = ["docs/studies/policy-heal.svg", "docs/studies/policy.md"]
SETTINGS = ["docs/studies/settings.svg", "docs/studies/settings.md"]
EVERYTHING = [
    *EXAMPLE,
    "docs/studies/stability.md",
    *SETTINGS,
    *POLICIES,
    "docs/studies/simulator_fit.md",
]
FIT = {
    "task": "triage", "recordings": [0, 1], "simulated_worlds": 256, "command": "fit_simulator.py triage",
    "gap": {"loss gap": [{"mean": mean, "se": 0.01} for mean in (-0.2, 0.1, -0.1)]},
}  # fmt: skip


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Change to a directory with results of every kind and an empty page on policies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SETTINGS_STUDIES, "settings", settings_study())
    for folder in ("docs/studies", "studies/policies/heal", "studies/repeated", "studies/simulator_fit"):
        Path(folder).mkdir(parents=True)
    study = example_study()
    monkeypatch.setitem(STUDIES, study.name, study)
    records = [
        JobResult(
            task="rescue", arm=arm.name, world=world, settings_hash=study.settings_hash(arm), versions={}, seconds=1.0,
            points=tuple(train_by_formula(arm, "rescue", world, study.budgets)),
        )
        for world in (100, 101)
        for arm in study.arms
    ]  # fmt: skip
    saved = SavedStudy(command="esper study example", study=study, versions=[], summary=None, records=records)
    Path("studies/example.json").write_bytes(msgspec.json.encode(saved))
    Path("studies/repeated/example.avx2.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, records)))
    Path("studies/policies/settings.jsonl").write_bytes(msgspec.json.encode(trained_arm("first", 0, [0.1, 0.2, 0.3])))
    Path("studies/policies/heal/a.json").write_text(json.dumps(evaluation("a", [0.7, 0.5])))
    Path("studies/policies/heal/returns.csv").write_text("round,0,1\n1,0.1,0.3\n2,0.2,0.2\n")
    Path("studies/simulator_fit/triage.json").write_text(json.dumps(FIT))
    (DOCS / "policy.md").write_text(f"Result.\n{BEGIN}{END}\nMore.\n")


def written(capsys):
    return [line.removeprefix("wrote: ") for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("repository")
def test_all_files_are_written_once(capsys):
    run_docs(None, check=False)
    assert written(capsys) == EVERYTHING
    run_docs(None, check=False)
    run_docs(None, check=True)
    assert written(capsys) == ["The documentation is up to date."] * 2


@pytest.mark.usefixtures("repository")
def test_pages_have_their_tables_and_charts():
    run_docs(None, check=False)
    pages = {path.stem: path.read_text() for path in DOCS.glob("*.md")}
    assert pages["example"].startswith(f"# Example\n\nIs the better arm better?\n\n{VERDICT}\n\n{BEGIN}\n")
    assert "![rescue against training compute](example-rescue.svg)" in pages["example"]
    assert "| better | 40.5 ± 0.1 | +10.0 [+10.0, +10.0] | 1.00 | 0.0k |" in pages["example"]
    assert pages["example"].endswith(f"\n\nCommand: `esper study example`\n{END}\n")
    assert "| example | rescue | better | 1 | avx2 | 2 | 40.5 | by world: +0.0, +0.0 | 40.4 |" in pages["stability"]
    assert "| first | +0.2000 ± 0.1000 | +0.2000 | – |\n\n**Unfinished: 1 of 4 trainings.**" in pages["settings"]
    assert "![mean U of the training episodes](settings.svg)" in pages["settings"]
    assert "Command: `esper study settings --save`" in pages["settings"]
    assert "### `heal`: 2 held-out worlds of `heal`" in pages["policy"]
    assert "![mean return by round](policy-heal.svg)" in pages["policy"]
    assert "### `triage`: 2 real, 256 simulated worlds" in pages["simulator_fit"]
    assert "| loss gap | −0.200 ± 0.010 | 0.100 ± 0.010 | −0.100 ± 0.010 |" in pages["simulator_fit"]
    for chart in DOCS.glob("*.svg"):
        assert ET.parse(chart).getroot().tag.endswith("svg")


@pytest.mark.usefixtures("repository")
def test_page_shows_validation_quality_of_saved_tuning_and_no_test_quality():
    saved = read_saved(Path("studies/example.json"))
    tuned = saved.study.for_tuning()
    records = [msgspec.structs.replace(record, world=record.world - 100) for record in saved.records]
    Path("studies/tuning").mkdir()
    tuning = SavedStudy(command="tuning command", study=tuned, versions=[], summary=None, records=records)
    Path("studies/tuning/example.json").write_bytes(msgspec.json.encode(tuning))

    run_docs(None, check=False)

    tables = (DOCS / "example.md").read_text().partition("## Tuning")[2]
    assert "`worse` and arms that differ from it" in tables
    assert "| better | 90.5 ± 0.1 | +10.0 [+10.0, +10.0] | 1.00 | 0.0k |" in tables
    assert "40.5" not in tables
    assert tables.endswith(f"\n\nCommand: `tuning command`\n{END}\n")


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("example", [*EXAMPLE, "docs/studies/stability.md"]),
        ("settings", SETTINGS),
        ("heal", POLICIES),
        ("triage", ["docs/studies/simulator_fit.md"]),
    ],
)
def test_one_study_updates_only_the_files_that_show_it(name, files, capsys):
    run_docs(name, check=False)
    assert written(capsys) == files


@pytest.mark.usefixtures("repository")
def test_check_names_outdated_files_and_changes_nothing(capsys):
    run_docs(None, check=False)
    page = DOCS / "example.md"
    outdated = "Introduction.\n" + page.read_text().replace("40.5", "41.5")
    page.write_text(outdated)
    (DOCS / "settings.md").unlink()
    capsys.readouterr()

    with pytest.raises(SystemExit) as end:
        run_docs(None, check=True)

    assert end.value.code == 1
    names = ["not up to date: docs/studies/example.md", "not up to date: docs/studies/settings.md"]
    assert capsys.readouterr().out.splitlines() == names
    assert page.read_text() == outdated
    run_docs("settings", check=False)
    with pytest.raises(SystemExit):
        run_docs("example", check=True)
    run_docs("heal", check=True)


@pytest.mark.usefixtures("repository")
def test_text_around_the_markers_is_kept():
    run_docs(None, check=False)
    text = (DOCS / "policy.md").read_text()
    assert text.startswith(f"Result.\n{BEGIN}\n\n### `heal`")
    assert text.endswith(f"\n\n{END}\nMore.\n")


@pytest.mark.usefixtures("repository")
def test_command_of_a_removed_study_is_that_of_an_earlier_version(monkeypatch):
    monkeypatch.delitem(STUDIES, "example")
    run_docs("example", check=False)
    page = (DOCS / "example.md").read_text()
    assert page.endswith(f"\n\nCommand, in an earlier version: `esper study example`\n{END}\n")


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("docs/studies/policy.md", f"{END}{BEGIN}".encode(), "policy.md must contain each marker once, in this order"),
        ("docs/studies/policy.md", b"\xff", "policy.md is not UTF-8 text"),
        ("docs/studies/example-rescue.svg", b"\xff", "example-rescue.svg is not UTF-8 text"),
        ("studies/simulator_fit/triage.json", b"{", "triage.json is not a result of scripts/fit_simulator.py"),
        ("studies/simulator_fit/triage.json", b"{}", "triage.json is not a result of .*'task'"),
        ("studies/simulator_fit/triage.json", b"[]", "triage.json is not a result of"),
    ],
)
def test_broken_files_are_refused_and_nothing_is_written(path, content, message):
    Path(path).write_bytes(content)
    before = {file: file.read_bytes() for file in DOCS.iterdir()}
    with pytest.raises(ConfigError, match=message):
        run_docs(None, check=False)
    assert {file: file.read_bytes() for file in DOCS.iterdir()} == before


@pytest.mark.usefixtures("repository")
def test_wrong_names_and_files_are_refused():
    with pytest.raises(UnknownNameError, match=r"no study named 'heel'. Did you mean 'heal'\?"):
        run_docs("heel", check=False)
    with pytest.raises(ConfigError, match="study 'search_or_enlarge' is not saved"):
        run_docs("search_or_enlarge", check=False)
    page = DOCS / "policy.md"
    page.write_text(f"{BEGIN} only")
    with pytest.raises(ConfigError, match=r"policy.md must contain each marker once"):
        run_docs(None, check=False)
    Path("studies/example.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"studies/example.json is not a saved study"):
        run_docs(None, check=False)


def test_directory_without_studies_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no directory studies/ here. Use --docs in the root"):
        run_docs(None, check=False)


@pytest.mark.parametrize("arguments", [["--docs", "--save"], ["--docs", "--arm", "a"], ["open_birth", "--check"]])
def test_options_that_do_not_fit_are_refused(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert isinstance(CliRunner().invoke(app, ["study", *arguments]).exception, ConfigError)


# The repository -------------------------------------------------------------------------------------------------------


def test_documentation_of_this_repository_is_up_to_date(monkeypatch):
    monkeypatch.chdir(ROOT)
    check = CliRunner().invoke(app, ["study", "--docs", "--check"])
    assert check.exit_code == 0, f"{check.output}\nRun: esper study --docs"


SAVED_NAMES = [path.stem for path in [*(ROOT / "studies").glob("*.json"), *(ROOT / "studies/policies").glob("*.jsonl")]]


@pytest.mark.parametrize("name", sorted(SAVED_NAMES))
def test_pages_of_saved_studies_state_the_result_before_the_tables(name):
    before = (ROOT / DOCS / f"{name}.md").read_text().partition(BEGIN)[0]
    assert before.partition(f"{VERDICT}\n")[2].strip()


@pytest.mark.parametrize("name", ["policy", "simulator_fit"])
def test_pages_of_policies_state_the_result_before_the_tables(name):
    assert "**Result" in (ROOT / DOCS / f"{name}.md").read_text().partition(BEGIN)[0]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_pages_have_no_gaps_to_fill(page):
    assert "@@" not in page.read_text()
