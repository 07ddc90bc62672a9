"""One run shows the same numbers, under the same names, on the console, in the report, in SQL and in watch."""

import json
import re

import pytest

pytest.importorskip("duckdb", reason="SQL needs the extra sql")

from tests.support import command_line

ROUNDS = 3
TRAIN = [
    "train", "--sim", "--rounds", ROUNDS, "--envs", "4", "--epochs", "20", "--set", "worlds=8",
    "--set", "network.width=16", "--set", "ppo.minibatches=2",
]  # fmt: skip


def esper(*args):
    done = command_line.esper_in_process(*args, env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "mine"
    return out, esper(*TRAIN, "--out", out)


def sql(run, query):
    return json.loads(esper("sql", "--json", run, query))


def report_data(run):
    """Return the document inside the report."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', (run / "report.html").read_text())[1]
    return json.loads(text)["runs"][0]["document"]


def test_return_of_a_round_is_the_same_number_everywhere(trained):
    run, printed = trained
    updates = sql(run, "select round, return_mean, return_sd from updates order by round")
    episodes = sql(run, "select episode, avg(episode_return) as mean, stddev_samp(episode_return) as sd "
                        "from episodes group by 1 order by 1")  # fmt: skip
    assert [row["round"] for row in updates] == [row["episode"] for row in episodes] == [1, 2, 3]
    for row, own in zip(updates, episodes, strict=True):
        assert row["return_mean"] == pytest.approx(own["mean"], abs=1e-12)
        assert row["return_sd"] == pytest.approx(own["sd"], abs=1e-12)

    lines = re.findall(r"^round (\d)/3  return (\S+) ± (\S+) \(sd over 4 episodes\)", printed, re.MULTILINE)
    expected = [(str(row["round"]), f"{row['return_mean']:+.4f}", f"{row['return_sd']:.4f}") for row in updates]
    assert lines == expected

    columns = report_data(run)["updates"]["columns"]
    assert columns["round"] == [1, 2, 3]
    assert columns["return_mean"] == pytest.approx([row["return_mean"] for row in updates], rel=1e-4, abs=1e-6)

    watched = esper("watch", "--once", run)
    match = re.search(r"PPO round 3 .*return (\S+) ± (\S+) sd", watched)
    assert match is not None, watched
    assert float(match[1].replace("−", "-")) == pytest.approx(updates[-1]["return_mean"], abs=1e-4)
    assert float(match[2]) == pytest.approx(updates[-1]["return_sd"], abs=1e-4)


def test_eval_of_a_simulated_run_compares_it_on_simulated_hosts(trained):
    run, _ = trained
    printed = esper("eval", run, "--worlds", "2")
    assert "learned (mine)" in printed
    assert "from-start" not in printed


def test_rounds_that_only_imitate_are_named(tmp_path):
    printed = esper(*TRAIN, "--set", "imitation=3", "--no-compare", "--out", tmp_path / "run")
    assert printed.count("imitates a teacher") == ROUNDS
    assert "all 3 rounds imitated a teacher (imitation = 3)" in " ".join(printed.split())


def test_held_out_comparison_is_saved_and_shown_in_the_report(trained):
    run, printed = trained
    saved = json.loads((run / "held_out.json").read_text())
    table = report_data(run)["held_out"]
    assert saved["rounds"] == ROUNDS
    assert [row["name"] for row in saved["rows"]] == ["learned (mine)", "heuristic", "schedule", "random", "none"]
    assert f"standard deviation over the {len(saved['worlds'])} worlds" in table["note"]
    for row, cells in zip(saved["rows"], table["rows"], strict=True):
        assert row["name"] == cells[0]
        assert f"{row['utility']['mean']:+.4f}" in printed
        assert f"{row['utility']['mean']:+.4f} ± {row['utility']['sd']:.4f}" in cells


def test_training_tables_fit_into_80_columns(trained):
    _, printed = trained
    table = printed[printed.index("Learning") :]
    rows = [row for row in table.splitlines() if not row.startswith(("policy:", "report:"))]
    assert max(map(len, rows)) <= 80
    assert "…" not in table


def test_task_list_fits_into_80_columns_with_complete_descriptions():
    from esper.tolaria.tasks import TASKS

    printed = esper("tasks")
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    flat = " ".join(printed.split())
    for task in TASKS.values():
        assert task.question in flat, task.name
        assert f"{task.name} " in printed
    assert len(printed.splitlines()) < 3.5 * len(TASKS)


def test_every_printed_plus_minus_states_its_meaning(trained):
    run, printed = trained
    for text in (printed, esper("watch", "--once", run)):
        for row in text.splitlines():
            if "±" in row and not re.search(r"[0-9.]+ ± [0-9.]+  ", row):  # a cell: its column header states it
                assert re.search(r"± (se|sd|SE|standard)|± \S+ (\(sd|sd|se)", row), row
