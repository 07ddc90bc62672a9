"""Tables in the terminal define their columns, within 80 columns."""

import io

import pytest
from rich.console import Console

from esper.commands.evaluate import results_tables
from esper.commands.grow import WORTH_NOTES


def row(name, **leads):
    def over_worlds(mean):
        return {"mean": mean, "sd": 0.012, "worlds": [mean, mean]}

    return {"name": name, "test": over_worlds(0.8123), "utility": over_worlds(-0.0123), "params": over_worlds(1e6),
            "macs": over_worlds(123_456_789.0), **leads}  # fmt: skip


@pytest.mark.parametrize("simulated", [False, True])
def test_comparison_defines_utility_and_lead_within_80_columns(simulated):
    lead = {"mean": 0.0312, "low": 0.0101, "high": 0.0523}
    rows = [row("learned (some-run-name)"), row("same structure from step 0", test_lead=lead, utility_lead=lead)]
    out = io.StringIO()
    Console(file=out, width=80).print(results_tables({"worlds": [100, 101], "rows": rows}, simulated))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]

    assert max(map(len, lines)) <= 80
    assert "U: utility, the quality gained over no growth minus rent on size and compute" in lines
    assert "lead: mean over worlds of first row − this row, with its bootstrap 95 % interval" in lines
    assert any("+0.0312 [+0.0101, +0.0523]" in line for line in lines)
    assert any("81.2% ± 1.2" in line for line in lines) == (not simulated)


def test_notes_below_the_seed_table_fit_into_80_columns():
    lines = WORTH_NOTES.splitlines()
    assert [line.split(":")[0] for line in lines] == ["contribution", "dependence", "Shapley φ"]
    assert max(map(len, lines)) <= 80
