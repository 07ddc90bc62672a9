"""Shell, TOML, JSON and YAML blocks of every page are valid. Python blocks are run by tests/test_docs.py."""

import json
import re
import shlex
import tomllib

import pytest
import typer
import yaml

from esper.cli import app
from tests.support.pages import PAGES, PARSER, page_id

COMMANDS = typer.main.get_command(app).commands
SHELL = ("bash", "")


def blocks(page, languages):
    tokens = PARSER.parse(page.read_text())
    return [token.content for token in tokens if token.type == "fence" and token.info.strip() in languages]


def command_lines(page):
    """Return the words of every `esper …` command in the shell blocks of a page, without comments."""
    for block in blocks(page, SHELL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;|\|", line.split("  #")[0]):
                command = re.search(r"(?:^|\s|-m )esper ([a-z].*)$", part.strip().removesuffix("& PID=$!"))
                if command and not part.strip().startswith(("pip", "#")):
                    yield command.group(1)


def unknown_parts(line):
    words = shlex.split(line.replace("…", "…"))
    if words[0] not in COMMANDS:
        return [words[0]]
    options = {option for each in COMMANDS[words[0]].params for option in [*each.opts, *each.secondary_opts]}
    return [word for word in words[1:] if word.startswith("--") and word.split("=")[0] not in options | {"--help"}]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_of_a_page_exist(page):
    assert [(line, unknown) for line in command_lines(page) if (unknown := unknown_parts(line))] == []


def test_commands_are_found_in_pages():
    commands = {line.split()[0] for page in PAGES for line in command_lines(page)}
    assert {"grow", "train", "export", "compare", "report", "dash", "sweep"} <= commands
    assert unknown_parts("grow --task rescue --epoch 3") == ["--epoch"]
    assert unknown_parts("grew --task rescue") == ["grew"]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_data_blocks_of_a_page_are_valid(page):
    for block in blocks(page, ("toml",)):
        tomllib.loads(block)
    for block in blocks(page, ("json",)):
        json.loads(block)
    for block in blocks(page, ("yaml",)):
        list(yaml.safe_load_all(block))
