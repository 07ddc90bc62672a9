"""The reference is complete: every public name, command, option, setting, event and environment variable is in it."""

import re
from pathlib import Path

import msgspec
import pytest
import typer

import esper
from esper.cli import app
from esper.commands.growing import GrowSettings
from esper.commands.sweep import SweepPlan
from esper.karn.views import field_notes
from esper.leyline.event_fields import FIELD_NOTES
from esper.leyline.events import KINDS
from esper.simic.training.config import TrainConfig
from esper.tamiyo.controllers import HeuristicConfig
from scripts.reference_pages import ENVIRONMENT, INTERNAL, PAGES, attribute_notes, groups
from tests.support import ROOT

REFERENCE = ROOT / "docs" / "reference"
SOURCE = ROOT / "src" / "esper"
COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_up_to_date(name):
    assert (REFERENCE / f"{name}.md").read_text() == PAGES[name](), "run python scripts/reference_pages.py"


# API ------------------------------------------------------------------------------------------------------------------


def documented() -> list[str]:
    """Return the names of the directives of the API page."""
    text = (REFERENCE / "api.md").read_text()
    return re.findall(r"^\.\. auto(?:function|class|data|exception):: (\S+)$", text, re.MULTILINE)


def public_names(module: str) -> set[str]:
    """Return the names that a module of the package offers to users: its `__all__`."""
    text = (SOURCE / f"{module}.py").read_text()
    return set(re.findall(r'"(\w+)"', re.search(r"^__all__ = \[(.*?)\]", text, re.MULTILINE | re.DOTALL).group(1)))


def test_api_page_documents_every_public_name_once():
    names = documented()
    assert len(names) == len(set(names))
    own = {f"esper.{name}" for name in esper.__all__ if name != "__version__"}
    libraries = {f"esper.{module}.{name}" for module in ("hf", "lightning") for name in public_names(module)}
    assert set(names) == own | libraries


# Command line ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_command_line_page_has_every_option_of_a_command(name):
    text = (REFERENCE / "command_line.md").read_text()
    section = text.split(f"\n## esper {name}\n")[1].split("\n## ")[0]
    options = {option for each in COMMANDS[name].params for option in [*each.opts, *each.secondary_opts]}
    missing = [option for option in options if option.startswith("-") and option not in section]
    assert missing == []


def test_help_of_every_parameter_is_a_sentence():
    for name, command in COMMANDS.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, f"esper {name}: {parameter.name}"
            assert is_sentence(parameter.help), f"esper {name}: {parameter.name}: {parameter.help}"


def is_sentence(text: str) -> bool:
    """Return whether a text begins with a capital or a code word, has three words or more, and ends with a period.

    A test cannot find the verb, but names and fragments such as "Number of hosts." have usual beginnings.
    """
    beginnings = "Number|Name|Length|Minimum|Maximum|Whether|How|What|Which|Directory|Path|Weight|Factor|Fraction|Share"
    is_fragment = re.match(rf"(?:{beginnings})\b", text) is not None
    return bool(re.match("[A-Z`]", text)) and text.endswith(".") and len(text.split()) >= 3 and not is_fragment


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A host has this many slots.", True),
        ("`gain` varies between worlds.", True),
        ("Number of slots, 1 to 9.", False),
        ("Whether seeds advance by themselves.", False),
        ("a host has many slots.", False),
        ("A host has this many slots", False),
        ("Print JSON.", False),
    ],
)
def test_fragments_are_not_sentences(text, expected):
    assert is_sentence(text) is expected


# Settings -------------------------------------------------------------------------------------------------------------


def test_every_setting_is_listed_with_its_meaning():
    text = (REFERENCE / "settings.md").read_text()
    for path, struct in groups(TrainConfig):
        notes = attribute_notes(struct)
        for field in msgspec.structs.fields(struct):
            assert is_sentence(notes.get(field.name, "")), f"{struct.__name__}.{field.name}: {notes.get(field.name)}"
            if not (isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)):
                assert f"| `{f'{path}.{field.name}'.lstrip('.')}` |" in text


@pytest.mark.parametrize("struct", [esper.Family, HeuristicConfig, GrowSettings, SweepPlan, esper.Task])
def test_settings_outside_of_the_tree_are_explained_by_sentences(struct):
    notes = attribute_notes(struct)
    for name in struct.__annotations__:
        assert is_sentence(notes.get(name, "")), f"{struct.__name__}.{name}: {notes.get(name)}"


def test_every_environment_variable_is_listed():
    assert all(map(is_sentence, ENVIRONMENT.values()))
    used = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"\bESPER_[A-Z_]+", path.read_text())}
    assert used == set(ENVIRONMENT) | INTERNAL


# Events ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_an_event_is_listed_with_its_meaning(kind):
    section = (REFERENCE / "events.md").read_text().split(f"\n## `{kind}`\n")[1].split("\n## ")[0]
    notes = field_notes(KINDS[kind])
    for field in KINDS[kind].__struct_fields__:
        assert re.search(rf"^\| `{field}` \| [^|]+ \| [^|]+\S \|$", section, re.MULTILINE), field
        assert notes[field].endswith("."), field


def test_every_shared_meaning_belongs_to_a_field():
    assert set(FIELD_NOTES) <= {field for kind in KINDS.values() for field in kind.__struct_fields__}


def test_reference_pages_are_those_of_the_site():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.stem for path in REFERENCE.glob("*.md")}
    assert pages == {Path(line).name for line in re.findall(r"^reference/\w+$", index, re.MULTILINE)}
