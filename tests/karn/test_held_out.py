"""The held-out comparison in the report: it is shown as written; damaged files are refused and names escaped."""

import pytest

from esper.karn import held_out
from esper.karn.held_out import HELD_OUT, MOST_BYTES
from esper.karn.summary import RunSummary
from esper.leyline.checksums import seal_json

NAME = "<script>alert(1)</script>\x1b[2J"


def row(name, mean, lead=None):
    figure = {"mean": mean, "sd": 0.02, "worlds": [mean]}
    found = {"name": name, "test": figure, "utility": figure, "params": figure, "macs": None, "quality": figure}
    more = {} if lead is None else {"test_lead": lead, "utility_lead": lead}
    return found | more


def test_comparison_shows_every_controller_with_intervals_and_escaped_names(tmp_path):
    sure, unsure = ({"mean": 0.011, "low": low, "high": 0.03} for low in (0.004, -0.004))
    figures = {"worlds": [100, 101, 102], "rows": [row("learned", 0.75), row(NAME, 0.74, sure), row("b", 0.7, unsure)]}
    held_out.write(tmp_path, figures, rounds=7)
    shown = held_out.held_out(RunSummary(tmp_path))
    assert "3 worlds that had no part in training, the same for all controllers, after round 7" in shown
    assert "standard deviation over the 3 worlds" in shown
    assert "<b>+1.1 [+0.4, +3.0]</b>" in shown
    assert ">+1.1 [-0.4, +3.0]<" in shown
    assert "+0.0110 [+0.0040, +0.0300]" in shown
    assert "75.0" in shown
    assert NAME not in shown
    assert "\x1b" not in shown


def test_run_without_a_comparison_shows_none(tmp_path):
    assert held_out.held_out(RunSummary(tmp_path)) == ""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"worlds": [1], "rows": []}',
        seal_json(b'{"worlds": [1], "rows": [{"name": 3}]}'),
        seal_json(b'{"worlds": ' + b"[" * 100_000),
        b" " * (MOST_BYTES + 2),
    ],
)
def test_damaged_comparison_is_named_and_the_report_is_complete(content, tmp_path):
    (tmp_path / HELD_OUT).write_bytes(content)
    assert "held_out.json" in held_out.held_out(RunSummary(tmp_path))


def test_path_of_a_damaged_comparison_is_escaped(tmp_path):
    run = tmp_path / "a\x1b[2J"
    run.mkdir()
    (run / HELD_OUT).write_bytes(b"")
    assert "a\\x1b[2J" in held_out.held_out(RunSummary(run))


def test_symlink_is_not_followed(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_bytes(seal_json(b'{"worlds": [1], "rows": [{"name": "secret"}]}'))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / HELD_OUT).symlink_to(secret)
    shown = held_out.held_out(RunSummary(tmp_path / "run"))
    assert "symbolic link" in shown
    assert ">secret<" not in shown
