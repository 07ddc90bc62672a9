"""Words of every page are in an English dictionary, in the glossary or in docs/spelling.txt."""

import re
from pathlib import Path

import pytest
from spellchecker import SpellChecker

from tests.support import ROOT
from tests.support.pages import NOTEBOOKS, PAGES, inline_tokens, page_id

WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?")
GLOSSARY_ROW = re.compile(r"^\| ([^|`]+) \|", re.MULTILINE)


def glossary() -> set[str]:
    """Return the words that the glossary of docs/concepts.md explains."""
    text = (ROOT / "docs" / "concepts.md").read_text().split("## Glossary")[1]
    return {word for entry in GLOSSARY_ROW.findall(text) for word in WORD.findall(entry.lower())}


def names() -> set[str]:
    """Return the names and technical words of docs/spelling.txt."""
    return set((ROOT / "docs" / "spelling.txt").read_text().lower().split())


@pytest.fixture(scope="module")
def dictionary() -> SpellChecker:
    checker = SpellChecker(language="en")
    checker.word_frequency.load_words(glossary() | names())
    return checker


def unknown_words(page: Path, dictionary: SpellChecker) -> set[str]:
    text = " ".join(token.content for token in inline_tokens(page) if token.type in ("text", "html_inline"))
    words = [word for word in WORD.findall(text) if word.isascii() and not word.isupper()]
    plain = [word.lower().removesuffix("'s") for word in words if not re.search(r"[a-z][A-Z]", word)]
    return {word for word in dictionary.unknown(plain) if len(word) > 2}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=page_id)
def test_words_of_a_page_are_spelled_correctly(page, dictionary):
    unknown = sorted(unknown_words(page, dictionary))
    assert unknown == [], "correct these words, or add names and technical words to docs/spelling.txt"


def test_spelling_mistake_is_found(tmp_path, dictionary):
    page = tmp_path / "page.md"
    page.write_text(
        "# A netwrok\n\nSeeds *germinate* in `slotz`; [Lightning](x.md) SGD PyTorch is colour. The hsot is prunned.\n"
    )
    assert unknown_words(page, dictionary) == {"netwrok", "hsot", "prunned"}


def test_list_of_words_is_sorted_and_needed(dictionary):
    words = (ROOT / "docs" / "spelling.txt").read_text().split()
    assert words == sorted(set(words), key=str.lower)
    plain = SpellChecker(language="en")
    assert sorted(plain.known(word.lower() for word in words)) == []
