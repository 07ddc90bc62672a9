"""The report: its file, and the page in a real browser."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.commands.charts import tick_labels, ticks
from esper.commands.report import digest, facts, run_report
from esper.karn import report
from esper.karn.document import detail, document
from esper.karn.formatting import compact, duration, number_text
from esper.karn.problems import problems
from esper.karn.report import MOST_DIFFERENCES
from esper.karn.run_state import RunState
from esper.leyline.checksums import open_json, seal_json
from esper.leyline.errors import EsperError
from esper.leyline.events import Episode, GovernorAlarm, Health
from esper.nissa.record import sealed
from tests.support.browser import NASTY
from tests.support.compared_runs import decided, write_run
from tests.support.sample_runs import Journal, grow_like, grow_run, started, step, train_run

VOID = {"meta", "link", "img", "br"}


class Structure(HTMLParser):
    """A parser that checks that every element is closed in order, and records tags, attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(html):
    tree = Structure()
    tree.feed(html)
    assert tree.open == []
    return tree


# -- numbers as text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(None, "percent", "not measured"), (math.nan, "number", "NaN"), (-math.inf, "count", "−∞"),
     (0.7764, "percent", "77.6 %"),
     (0.014, "points", "+1.4"), (-0.014, "points", "−1.4"), (12_345, "count", "12\u2009345"), (0.0, "number", "0"),
     (1e-5, "number", "1.00e−05"), (91.4, "seconds", "1 min 31 s")],
)  # fmt: skip
def test_values_are_formatted(value, unit, text):
    assert number_text(value, unit) == text


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_ordered_and_inside(low, width):
    marks = ticks(low, low + width)
    assert len(marks) <= 7
    assert marks == sorted(set(marks))
    assert all(low - width * 1e-6 <= t <= low + width * (1 + 1e-6) for t in marks)


@pytest.mark.parametrize("unit", ["number", "percent", "points", "count", "seconds"])
def test_numbers_beyond_floats_are_infinite(unit):
    assert number_text(10**400, unit) == "∞"
    assert number_text(-(10**400), unit) == "−∞"
    assert number_text(math.nan, unit) == "NaN"
    assert compact(10**400) == "∞"


def test_tick_labels_are_distinct():
    assert tick_labels([0.0, 0.25, 0.5], "number") == ["0.00", "0.25", "0.50"]
    assert tick_labels([0.2, 0.4], "percent") == ["20 %", "40 %"]
    assert duration(0.05) == "50 ms"


# -- the page


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Return reports of a grown host, a trained controller with failures, hostile names, and two runs compared."""
    root = tmp_path_factory.mktemp("runs")
    grown = grow_run(root / "grown")
    train = train_run(root / "train", envs=12, rounds=5, clean=False)
    hostile = grow_run(root / "hostile", names=(NASTY, "no growth"), controller=NASTY)
    named = open_json((hostile / "manifest.json").read_bytes())
    named |= {"run_id": NASTY, "config": {NASTY: {NASTY: NASTY}}, "command": NASTY}
    (hostile / "manifest.json").write_bytes(seal_json(json.dumps(named).encode()))
    groups = {"grown": [grown], "train": [train], "hostile": [hostile], "both": [grown, train, hostile]}
    return {name: report.write([RunState.of(p) for p in runs], root / f"{name}.html") for name, runs in groups.items()}


@pytest.mark.parametrize("name", ["grown", "train", "hostile", "both"])
def test_every_page_is_well_formed_and_fetches_nothing(places, name):
    tree = parsed(places[name].read_text())
    for tag, attrs in tree.tags:
        assert tag not in ("img", "iframe", "object"), attrs
        assert not any(key.startswith("on") for key in attrs)
        for key in ("src", "href"):
            assert attrs.get(key, "#").startswith(("#", "data:,"))
    assert places[name].stat().st_size < 1_000_000


def data_of(path):
    """Return the data inside a report."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S)[1]
    return json.loads(text)["runs"]


def test_names_are_kept_verbatim(places):
    (run,) = data_of(places["hostile"])
    assert run["document"]["envs"][0]["name"] == NASTY
    assert run["document"]["run"]["controller"] == NASTY
    assert run["document"]["settings"]["Configuration"] == {NASTY: {NASTY: NASTY}}


@given(st.text())
def test_no_text_can_escape_its_script_element(text):
    inside = report.script_json({"x": text})
    assert "<" not in inside
    assert json.loads(inside) == {"x": text}


def test_failures_are_listed_only_when_present(places):
    texts = [problem["text"] for problem in data_of(places["train"])[0]["document"]["problems"]]
    assert any("sink retired" in text for text in texts)
    assert data_of(places["grown"])[0]["document"]["problems"] == []


def test_quality_that_is_not_finite_is_a_problem(tmp_path):
    journal = Journal(tmp_path / "run")
    for event in (started(), step(1), step(2, quality=math.nan)):
        journal.write(event)
    messages = problems(RunState.of(journal.close()))
    assert any(severity == "error" and "not finite" in text for severity, text in messages)


def test_alarms_without_rollback_take_one_line(tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    for step_, alarm, action in ((1, "divergence", "counted"), (2, "divergence", "counted"), (3, "collapse", "seen"),
                                 (4, "divergence", "rolled back")):  # fmt: skip
        journal.write(GovernorAlarm(env=0, episode=0, step=step_, alarm=alarm, action=action, value=9.0))
    alarms = [text for _, text in problems(RunState.of(journal.close())) if "Governor" in text]
    assert len(alarms) == 2
    assert re.search(r"epoch 4: divergence .* rolled back", alarms[0])
    assert "3 alarms that needed no rollback (divergence 2 times, collapse)" in alarms[1]


def test_unmeasured_quality_is_null_and_not_zero(tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    for n in range(1, 5):
        journal.write(step(n, quality=None, committed_quality=None))
    content = document(RunState.of(journal.close()))
    assert content["envs"][0]["quality"] is None
    assert "quality" not in content["series"]["0"]["columns"]


def test_seed_without_measured_worth_still_has_stages(tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    journal.write(step(1, stages=(2, 0, 0), blueprints=("norm", "", "")))
    content = detail(RunState.of(journal.close()), 0)
    assert content["slots"][0]["stages"] == [[2, "norm", 1, 1]]
    assert content["slots"][0]["worth"] is None


@pytest.mark.parametrize("status", ["running", "finished", "failed"])
def test_run_with_only_a_manifest_has_a_report(tmp_path, status):
    (tmp_path / "manifest.json").write_bytes(seal_json(json.dumps({"status": status}).encode()))
    parsed(report.page([RunState.of(tmp_path)]))


def test_report_of_a_large_run_is_small(tmp_path):
    path = train_run(tmp_path / "run", envs=64, rounds=3)
    page = report.page([RunState.of(path)])
    assert len(page) < 1_000_000
    (run,) = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["runs"]
    assert len(run["document"]["envs"]) == 64
    assert run["document"]["mean"]["episodes"] == 64
    assert len(run["document"]["series"]) == report.MOST_ENVS
    assert len(run["details"]) == report.MOST_DETAILS


def test_long_curves_keep_minimum_and_maximum(tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    for n in range(1, 30_001):
        journal.write(step(n, quality=0.9 if n == 12_345 else 0.5))
    (series,) = report.run_data(RunState.of(journal.close()), 1)["document"]["series"].values()
    assert series["stride"] > 1
    assert max(series["columns"]["quality"]) == 0.9
    assert min(series["low"]["quality"]) == 0.5
    assert (series["low"]["step"][0], series["columns"]["step"][-1]) == (1, 30_000)


# -- damaged files


ODD = (None, "text", -1, 10**30, 1.5, True, [], {}, ["x"], {"a": None}, "NaN", "Infinity")


def one_of_each(path):
    """Return the lines of a short run with one event of every kind that a report reads."""
    journal = Journal(path)
    journal.write(started(env_names=("grown", "no growth"), steps=6))
    for env, name in enumerate(("grown", "no growth")):
        grow_like(journal, env, name, epochs=6, grows=env == 0)
    rest = train_run(path.with_name("other"), envs=1, rounds=1, epochs=1, clean=False)
    journal.close()
    lines = [json.loads(each) for each in (path / "events/rank0-00000.jsonl").read_text().splitlines()]
    more = [json.loads(each) for each in (rest / "events/rank0-00000.jsonl").read_text().splitlines()]
    kinds = {each["kind"] for each in lines}
    lines += [each | {"seq": 1000 + i} for i, each in enumerate(more) if each["kind"] not in kinds]
    return [{name: value for name, value in each.items() if name != "crc"} for each in lines]


def test_wrong_type_anywhere_in_the_journal_breaks_no_report(tmp_path):
    path = tmp_path / "run"
    lines = one_of_each(path)
    places = {(each["kind"], name): i for i, each in enumerate(lines) for name in each}
    assert len({kind for kind, _ in places}) > 8
    for odd in ODD:
        spoilt = [dict(each) for each in lines]
        for (_, name), i in places.items():
            if name not in ("seq", "time_s", "rank", "kind"):
                spoilt.append(lines[i] | {name: odd, "seq": 2000 + len(spoilt)})
        (path / "events/rank0-00000.jsonl").write_bytes(
            b"".join(sealed(json.dumps(each).encode()[:-1]) for each in spoilt)
        )
        run = RunState.of(path)
        parsed(report.page([run]))
        digest(run)
        json.dumps(facts(run))
        assert run.unreadable > 0, odd


def test_wrong_type_anywhere_in_the_manifest_breaks_no_report(tmp_path):
    path = tmp_path / "run"
    one_of_each(path)
    manifest = open_json((path / "manifest.json").read_bytes())
    for name in (*manifest, "task", "controller", "seed", "slots", "rounds", "steps", "host_params", "device", "error"):
        for odd in (*ODD, [[[]]], {"a": {"b": [1]}}):
            if name != "status" or isinstance(odd, str):
                (path / "manifest.json").write_bytes(seal_json(json.dumps(manifest | {name: odd}).encode()))
                run = RunState.of(path)
                for page in ([run], [run, RunState.of(path)]) if odd == "text" else ([run],):
                    parsed(report.page(page))
                digest(run)
    deep = json.loads('{"a":' * 300 + "1" + "}" * 300)
    (path / "manifest.json").write_bytes(
        seal_json(json.dumps(manifest | {"config": deep, "versions": [deep]}).encode())
    )
    parsed(report.page([RunState.of(path)]))


def test_facts_missing_in_the_journal_come_from_a_valid_manifest(tmp_path):
    journal = Journal(tmp_path / "run", task="rescue", rounds="many", threads=3)
    journal.write(step(1))
    run = RunState.of(journal.close())
    assert [run.about(name) for name in ("task", "rounds", "threads")] == ["rescue", None, 3]


@pytest.mark.parametrize("content", ["{", "[1]", '{"task": "x"}', None])
def test_damaged_manifest_hides_no_journal(tmp_path, content):
    path = grow_run(tmp_path / "run")
    (path / "manifest.json").unlink() if content is None else (path / "manifest.json").write_text(content)
    run = RunState.of(path)
    assert (run.status, run.episodes) == ("finished", 4)
    ((severity, text),) = problems(run)
    assert severity == "warning"
    assert "manifest" in text
    parsed(report.page([run]))


def test_directory_named_like_a_segment_breaks_no_report(tmp_path):
    path = grow_run(tmp_path / "run")
    (path / "events" / "rank0-00007.jsonl").mkdir()
    assert RunState.of(path).status == "finished"


def test_text_of_any_length_is_truncated(tmp_path):
    journal = Journal(tmp_path / "run", error="e" * 9_000_000, status="failed", command="c" * 9_000_000)
    journal.write(started())
    journal.write(Health(source="x", severity="error", text="y" * 22_000_000))
    run = RunState.of(journal.close())
    assert len(report.page([run])) < 1_000_000
    assert any("(21,998,003 more characters)" in text for _, text in problems(run))


def test_events_missed_by_a_retired_sink_are_not_called_lost(tmp_path):
    journal = Journal(tmp_path / "run", status="running")
    counters = {"emitted": 107.0, "coalesced": 0.0, "Board.given_up": 10.0, "JsonlSink.given_up": 0.0}
    journal.write(Health(source="hub", severity="warning", text="107 events; 10 events lost", counters=counters))
    run = RunState.of(journal.close())
    assert ("warning", "hub: of 107 events sink Board missed 10") in problems(run)
    assert run.losses == []


# -- run names, and the gain of growth


def test_copy_is_named_after_its_directory(tmp_path):
    path = grow_run(tmp_path / "run")
    copy = tmp_path / "a copy"
    path.rename(copy)
    run = RunState.of(copy)
    facts = document(run)["run"]
    assert (facts["name"], facts["run_id"]) == ("a copy", "run")
    (tmp_path / "else").mkdir()
    other = RunState.of(grow_run(tmp_path / "else" / "a copy"))
    report.page([run, other])
    assert [run.name, other.name] == [f"{tmp_path.name}/a copy", "else/a copy"]


def test_grow_run_shows_the_gain_over_the_bare_host_of_its_world(tmp_path):
    journal = Journal(tmp_path / "run")
    names = ("grown", "no growth", "same structure", "wider")
    journal.write(started(env_names=names))
    ends = ((0.9, 1834, 1234, 1, {"r0c0": "norm"}), (0.8, 1234, 1234, 0, {}), (0.7, 1834, 1234, 0, {"r0c0": "norm"}),
            (0.85, 1834, 1834, 0, {}))  # fmt: skip
    for env, (quality, params, host, germinated, structure) in enumerate(ends):
        journal.write(Episode(env=env, episode=0, world=1, name=names[env], steps=4, quality=quality,
                              quality_best=quality, params=params, host_params=host, germinated=germinated,
                              fossilized=germinated, pruned=0, structure=structure))  # fmt: skip
    envs = document(RunState.of(journal.close()))["envs"]
    assert [env["no_growth"] for env in envs] == [0.8, None, 0.8, 0.8]
    assert [env["is_no_growth"] for env in envs] == [False, True, False, False]


def test_unknown_gain_is_null(tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    journal.write(step(1))
    assert document(RunState.of(journal.close()))["envs"][0]["no_growth"] is None


# -- the command


def test_command_writes_into_the_run_and_prints_a_summary(tmp_path, capsys):
    path = grow_run(tmp_path / "run")
    run_report([path], None, False, False)
    message = capsys.readouterr().out
    assert (path / "report.html").exists()
    assert "no growth" in message
    assert "no problems" in message


def test_command_prints_json(tmp_path, capsys):
    paths = [grow_run(tmp_path / name) for name in ("a", "b")]
    run_report(paths, tmp_path / "out.html", True, False)
    message = json.loads(capsys.readouterr().out)
    assert [run["status"] for run in message["runs"]] == ["finished", "finished"]
    assert message["runs"][0]["environments"][0]["germinated"] == 3


def test_non_run_directory_is_refused(tmp_path):
    with pytest.raises(EsperError):
        run_report([tmp_path], None, False, False)
    with pytest.raises(EsperError):
        run_report([], None, False, False)


def test_comparison_in_a_report_is_bounded(tmp_path):
    worlds = range(MOST_DIFFERENCES + 10)
    write_run(tmp_path / "a", [{"world": world} for world in worlds], config={"ppo": {"lr": 0.1}})
    write_run(tmp_path / "b", [{"world": world, "decisions": [decided(2)]} for world in worlds])
    pair = report.compared([tmp_path / "a", tmp_path / "b"])["pairs"][0]
    assert pair["choices"]["differing_worlds"] == len(worlds)
    assert [each["world"] for each in pair["choices"]["first_differences"]] == list(worlds)[:MOST_DIFFERENCES]
    assert report.compared([tmp_path / "a"])["notes"][0].startswith("nothing to compare with a")
