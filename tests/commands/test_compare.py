"""`esper compare`: tables and JSON show the comparison; errors are one paragraph."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from esper.cli import app
from esper.commands.compare import run_compare
from tests.support.compared_runs import decided, write_run


def runs(tmp_path):
    shaped = {"reward": {"mode": "shaped"}}
    utility = {"reward": {"mode": "utility"}}
    a = write_run(tmp_path / "a", [{"quality": 0.5, "decisions": [decided(3)]}, {"quality": 0.6}], config=utility)
    b = write_run(tmp_path / "b", [{"quality": 0.7}, {"quality": 0.9, "macs": 4 * 10**9}], config=shaped)
    return a, b


def test_tables_show_differences_settings_and_decisions(tmp_path):
    out = io.StringIO()
    run_compare(list(runs(tmp_path)), False, Console(file=out, width=100))
    text = out.getvalue()
    for line in (
        "reward.mode=shaped",
        "b against a: last finished episode in each world, 2 worlds",
        "+25.0 [+20.0, +30.0]",
        "training multiply-adds, 10⁹  0.000   2.000",
        "2 / 0 / 0",
        "first different decision (1 of 2 worlds differ):",
        "GERMINATE r0c0 (norm)",
        "bootstrap 95 % interval",
    ):
        assert line in text, line


def test_json_is_the_whole_comparison(tmp_path):
    done = CliRunner().invoke(app, ["compare", *map(str, runs(tmp_path)), "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    (pair,) = data["pairs"]
    lead = pair["measures"][0]["lead"]
    assert lead["mean"] == pytest.approx(0.25)
    assert (lead["wins"], lead["ties"], lead["losses"]) == (2, 0, 0)
    assert data["arms"][1]["settings"] == {"reward.mode": "shaped"}
    assert pair["choices"]["first_differences"][0]["step"] == 3
