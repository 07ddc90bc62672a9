"""`esper mcp`, called by a real client in this process and as a subprocess."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from esper.commands.mcp import MOST_ROWS, make_server, run_mcp
from esper.leyline.errors import ConfigError, EsperError
from tests.support.compared_runs import decided, write_evaluation, write_run
from tests.support.sample_runs import SLOTS, Journal, grow_like, started

mcp = pytest.importorskip("mcp", reason="the MCP SDK is not installed")
TOOLS = {"runs", "summary", "schema", "sql", "seed_life", "compare"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a directory with runs, beside a run outside that must not be readable."""
    base = tmp_path_factory.mktemp("mcp")
    root = base / "runs"
    root.mkdir()
    journal = Journal(root / "grown", task="rescue", controller="heuristic")
    journal.write(started())
    grow_like(journal, 0, "grown", episode=0)
    journal.close()
    for name, lr in (("a", 0.1), ("b", 0.2)):
        quality = {"quality": 0.5 + lr, "decisions": [decided(2)] if name == "b" else []}
        write_run(root / name, [quality, {"quality": 0.5}], config={"ppo": {"lr": lr}})
    write_evaluation(root / "a" / "eval", ("learned", [0.1, 0.2]), ("none", [0.0, 0.0]))
    write_run(root / "far", [{"world": 8}], config={"ppo": {"lr": 0.3}})
    write_run(base / "outside", [{}])
    (root / "link").symlink_to(base / "outside", target_is_directory=True)
    (root / "note.txt").write_text("not a run")
    return root


def call(server, *calls):
    """Call tools in one session. Return (is_error, structured content or text) of each."""

    async def session():
        async with mcp.Client(server) as client:
            answers = []
            for name, arguments in calls:
                answer = await client.call_tool(name, arguments)
                texts = "".join(getattr(part, "text", "") for part in answer.content)
                answers.append((answer.is_error, texts if answer.is_error else answer.structured_content))
            return (await client.list_tools()).tools, answers

    return asyncio.run(session())


def one(root, name, **arguments):
    _, ((is_error, content),) = call(make_server(root), (name, arguments))
    assert not is_error, content
    return content


def reason(root, name, **arguments):
    _, ((is_error, text),) = call(make_server(root), (name, arguments))
    assert is_error
    return text


def test_tools_are_listed_as_read_only_with_descriptions(root):
    tools, _ = call(make_server(root))
    assert {tool.name for tool in tools} == TOOLS
    for tool in tools:
        assert tool.annotations.read_only_hint
        assert len(tool.description) > 40
        assert "self" not in tool.input_schema["properties"]
    assert {tool.name: tool.input_schema.get("required", []) for tool in tools}["sql"] == ["query", "runs"]


def test_runs_lists_what_lies_in_the_directory(root):
    listed = one(root, "runs")
    assert {row["run"] for row in listed["runs"]} == {"grown", "a", "b", "far"}
    (grown,) = [row for row in listed["runs"] if row["run"] == "grown"]
    assert (grown["task"], grown["controller"], grown["status"]) == ("rescue", "heuristic", "finished")
    assert listed["more"] == 0


def test_summary_names_no_path_outside(root):
    summary = one(root, "summary", run="grown")
    assert (summary["run"], summary["environments"][0]["steps"]) == ("grown", 40)
    assert str(root.parent) not in json.dumps(summary)


def test_schema_and_sql_fit_together(root):
    tables = one(root, "schema")["tables"]
    assert "FOSSILIZED" in str(one(root, "sql", query="select now from lifecycle", runs=["grown"])["rows"])
    assert "now" in tables["lifecycle"]["columns"]
    answer = one(
        root, "sql", query="select run, count(*) as n from episodes group by run order by run", runs=["a", "b"]
    )
    assert answer["rows"] == [{"run": "a", "n": 2}, {"run": "b", "n": 2}]
    answer = one(root, "sql", query="select 1 as x, 'NaN'::double as y from steps", runs=["a"], limit=2)
    assert (answer["rows"], answer["more"]) == ([{"x": 1, "y": "NaN"}] * 2, 2)


def test_seed_life_lists_moves_decisions_and_worth_in_order(root):
    life = one(root, "seed_life", run="grown", slot=SLOTS[0])
    kinds = [event["kind"] for event in life["events"]]
    assert {"lifecycle", "decision", "worth"} <= set(kinds)
    steps = [event["step"] for event in life["events"]]
    assert steps == sorted(steps)
    moves = [(event["now"], event["cause"]) for event in life["events"] if event["kind"] == "lifecycle"]
    assert moves[0][0] == "GERMINATED"
    assert moves[-1][0] == "FOSSILIZED"


def test_compare_equals_the_command(root):
    comparison = one(root, "compare", runs=["a", "b"])
    (pair,) = comparison["pairs"]
    assert pair["measures"][0]["lead"]["mean"] == pytest.approx(0.05)
    assert pair["choices"]["first_differences"][0]["other"] == "GERMINATE r0c0 (norm)"
    assert [arm["paths"] for arm in comparison["arms"]] == [["a"], ["b"]]
    assert [pair["other"] for pair in one(root, "compare", runs=["a/eval"])["pairs"]] == ["none"]


@pytest.mark.parametrize("name", ["../outside", "link", "/etc", ".", "", "a/../../outside", "x\0y", "a/../.."])
@pytest.mark.parametrize("tool", ["summary", "sql", "seed_life", "compare"])
def test_nothing_outside_the_directory_is_read(root, tool, name):
    arguments = {"summary": {"run": name}, "sql": {"query": "select 1", "runs": [name]},
                 "seed_life": {"run": name, "slot": "r0c0"}, "compare": {"runs": [name, "a"]}}[tool]  # fmt: skip
    assert "not below the directory of runs" in reason(root, tool, **arguments)


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("summary", {"run": "grwn"}, "Did you mean 'grown'?"),
        ("summary", {"run": "note.txt"}, "no run named 'note.txt'"),
        ("summary", {}, "Field required"),
        ("sql", {"query": "selec 1", "runs": ["a"]}, "the query does not run"),
        ("sql", {"query": "select * from read_text('/etc/passwd')", "runs": ["a"]}, "reaches beyond the run"),
        ("sql", {"query": "drop table steps", "runs": ["a"]}, "may only read"),
        ("sql", {"query": "select 1", "runs": []}, "no run was given"),
        ("sql", {"query": "select 1", "runs": ["a"], "limit": MOST_ROWS + 1}, "limit must be between 1 and"),
        ("seed_life", {"run": "grown", "slot": "r0c9"}, "There are: r0c0, r0c1, r1c0"),
        ("seed_life", {"run": "grown", "slot": "r0c0", "episode": 7}, "Episodes with events: 0"),
        ("compare", {"runs": ["a", "far"]}, "no world in common"),
        ("compare", {"runs": ["a"]}, "nothing to compare with"),
    ],
)
def test_errors_carry_their_reason(root, tool, arguments, text):
    assert text in reason(root, tool, **arguments)


def test_server_runs_as_a_subprocess(root):
    from mcp import StdioServerParameters

    esper = Path(sys.executable).parent / "esper"
    tools, answers = call(
        StdioServerParameters(command=str(esper), args=["mcp", str(root)], env=dict(os.environ)),
        ("runs", {}),
        ("sql", {"query": "select count(*) as n from decisions", "runs": ["grown"]}),
        ("summary", {"run": "nowhere"}),
        ("compare", {"runs": ["a", "b"]}),
        ("summary", {"run": "grown"}),
        ("schema", {}),
        ("seed_life", {"run": "grown", "slot": SLOTS[0]}),
        ("seed_life", {"run": "grown", "slot": "nowhere"}),
    )
    assert {tool.name for tool in tools} == TOOLS
    assert [is_error for is_error, _ in answers] == [False, False, True, False, False, False, False, True]
    assert answers[1][1]["rows"][0]["n"] > 0
    assert "no run named 'nowhere'" in answers[2][1]
    calls = (("runs", {}), ("compare", {"runs": ["a", "b"]}), ("summary", {"run": "grown"}), ("schema", {}),
             ("seed_life", {"run": "grown", "slot": SLOTS[0]}))  # fmt: skip
    in_process = call(make_server(root), *calls)[1]
    assert [answers[i] for i in (0, 3, 4, 5, 6)] == in_process
    assert "There are: r0c0" in answers[7][1]


def test_runs_of_groups_are_named_by_their_path(root, tmp_path):
    write_run(tmp_path / "lr" / "a", [{"quality": 0.5}], config={"ppo": {"lr": 0.1}})
    write_run(tmp_path / "lr" / "b", [{"quality": 0.6}], config={"ppo": {"lr": 0.2}})
    assert {row["run"] for row in one(tmp_path, "runs")["runs"]} == {"lr/a", "lr/b"}
    assert one(tmp_path, "summary", run="lr/a")["run"] == "lr/a"
    assert [arm["paths"] for arm in one(tmp_path, "compare", runs=["lr/a", "lr/b"])["arms"]] == [["lr/a"], ["lr/b"]]


def test_missing_sdk_and_missing_directory_state_a_remedy(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="esper mcp DIR"):
        run_mcp(tmp_path / "none")
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(EsperError, match=r"pip install 'esper-lite\[mcp\]'"):
        make_server(tmp_path)
