"""The held-out comparison in the report: it is shown as written; damaged files are refused and names printable."""

import pytest

from esper.karn import held_out
from esper.karn.document import comparison
from esper.karn.held_out import HELD_OUT, MOST_BYTES
from esper.karn.run_state import RunState
from esper.leyline.checksums import seal_json

NAME = "<script>alert(1)</script>\x1b[2J"


def row(name, mean, lead=None):
    figure = {"mean": mean, "sd": 0.02, "worlds": [mean]}
    cells = {"name": name, "test": figure, "utility": figure, "params": figure, "macs": None, "quality": figure}
    more = {} if lead is None else {"test_lead": lead, "utility_lead": lead}
    return cells | more


def test_comparison_shows_every_controller_with_intervals(tmp_path):
    sure, unsure = ({"mean": 0.011, "low": low, "high": 0.03} for low in (0.004, -0.004))
    figures = {"worlds": [100, 101, 102], "rows": [row("learned", 0.75), row(NAME, 0.74, sure), row("b", 0.7, unsure)]}
    held_out.write(tmp_path, figures, rounds=7)
    content = comparison(RunState(tmp_path))
    assert "3 worlds that had no part in training, the same for all controllers, after round 7" in content["note"]
    assert "standard deviation over the 3 worlds" in content["note"]
    assert content["heads"][:3] == ["controller", "test accuracy", "lead of the first row"]
    assert content["rows"][1][:3] == [NAME, "74.0 % ± 2.0", ["+1.1 [+0.4, +3.0]"]]  # a list: the interval excludes 0
    assert content["rows"][2][2] == "+1.1 [-0.4, +3.0]"
    assert content["rows"][1][4] == ["+0.0110 [+0.0040, +0.0300]"]


def test_run_without_a_comparison_shows_none(tmp_path):
    assert comparison(RunState(tmp_path)) is None


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
    assert "held_out.json" in comparison(RunState(tmp_path))["damage"]


def test_symlink_is_not_followed(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_bytes(seal_json(b'{"worlds": [1], "rows": [{"name": "secret"}]}'))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / HELD_OUT).symlink_to(secret)
    content = comparison(RunState(tmp_path / "run"))
    assert "symbolic link" in content["damage"]
    assert "rows" not in content
