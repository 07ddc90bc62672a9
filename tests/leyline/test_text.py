import pytest

from esper.leyline.text import LONGEST, cut, escape, html_table, not_installed, printable

ACTING = {
    "escape": "\x1b", "bell": "\x07", "line end": "\n", "return": "\r", "delete": "\x7f", "C1": "\x9b",
    "bidirectional override": "\u202e", "isolate": "\u2066", "line separator": "\u2028", "zero width": "\u200b",
    "byte order mark": "\ufeff", "lone surrogate": "\ud800", "tag": "\U000e0041",
}  # fmt: skip


@pytest.mark.parametrize("name", ACTING)
def test_control_characters_are_escaped(name):
    text = printable(f"a{ACTING[name]}b")
    assert text.isprintable()
    assert text.startswith("a\\")
    assert ACTING[name] not in escape(f"a{ACTING[name]}b") or name == "line end"


def test_printable_text_is_kept_and_length_is_bounded():
    assert printable("λ × 日本 é") == "λ × 日本 é"
    assert printable("1\u2009754\u00a0MB") == "1\u2009754\u00a0MB"  # thin and no-break spaces of our own figures
    assert printable("a\n\x1b", keep="\n") == "a\n\\x1b"
    assert len(printable("x" * 10**7)) < LONGEST + 100
    assert printable("x" * 10**4, None) == "x" * 10**4
    assert cut("abcdef", 2) == "ab… (4 more characters)"
    assert escape("<a\x1b>") == "&lt;a\\x1b&gt;"


def test_texts_of_html_tables_are_escaped():
    html = html_table("<b>", ["<i>"], [["<script>"]], note="a & b")
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "a &amp; b" in html


def test_missing_packages_are_named_in_singular_and_plural():
    assert not_installed(["uvicorn"]) == "uvicorn, which is not installed. Install it"
    assert not_installed(["starlette", "uvicorn"]) == "starlette and uvicorn, which are not installed. Install them"
