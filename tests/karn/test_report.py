"""The report: first the pure functions, then the page in a real browser."""

import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.commands.report import digest, facts, run_report
from esper.karn import report, sections
from esper.karn.charts import Chart, Series, data_script, downsample, duration, render, spoken, tick_labels, ticks
from esper.karn.summary import RunSummary
from esper.leyline.checksums import open_json, seal_json
from esper.leyline.errors import EsperError
from esper.leyline.events import Episode, Governor, Health
from esper.nissa.record import sealed
from tests.support.sample_runs import Journal, grow_like, grow_run, started, step, train_run

NASTY = "</script><img src=x onerror=alert(1)>\"'&{{x}}<!--body-->"
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


# -- downsampling


def obvious_downsample(points, most):
    """Return the reference result: buckets of almost equal size, and for each the first of its extremes."""
    if len(points) <= most:
        return list(points)
    inner, buckets = list(points[1:-1]), max(1, (most - 2) // 3)
    edges = [b * len(inner) // buckets for b in range(buckets + 1)]
    out = [points[0]]
    for a, b in pairwise(edges):
        part = inner[a:b]
        finite = [p for p in part if p[1] is not None and math.isfinite(p[1])]
        odd = [p for p in part if p[1] is not None and not math.isfinite(p[1])]
        chosen = odd[:1]
        if finite:
            chosen += [min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])]
        if part:
            out += sorted(set(chosen), key=lambda p: p[0]) or [(part[0][0], None)]
    return [*out, points[-1]]


VALUES = st.lists(st.none() | st.floats(-5, 5) | st.sampled_from([math.inf, -math.inf]), max_size=90)


@given(VALUES, st.integers(5, 40))
@settings(max_examples=200, deadline=None)
def test_downsampling_equals_the_reference(values, most):
    points = list(enumerate(values))
    thin = downsample(points, most)
    assert thin == obvious_downsample(points, most)
    assert len(thin) <= max(most, 5)
    finite = [y for y in values if y is not None and math.isfinite(y)]
    left = [y for _, y in thin if y is not None and math.isfinite(y)]
    assert (not finite) or (min(left), max(left)) == (min(finite), max(finite))


def test_long_gap_stays_a_gap_and_nan_stays_visible():
    points = [(x, None if 3_000 <= x < 4_000 else math.nan if x == 7_777 else 1.0) for x in range(10_000)]
    thin = downsample(points)
    assert any(y is None for _, y in thin)
    assert [x for x, y in thin if y is not None and y != y] == [7_777]


def test_gap_breaks_the_line_and_is_not_drawn_as_zero():
    html = render(Chart("t", [Series("s", [(0, 0.5), (1, 0.6), (2, None), (3, 0.7), (4, 0.8)])]))
    (line,) = re.findall(r'class="line" d="([^"]+)"', html)
    assert line.count("M") == 2
    data = json.loads(re.search(r"<script[^>]*>(.*?)</script>", html)[1])
    assert data["series"][0]["y"] == [0.5, 0.6, None, 0.7, 0.8]


def test_empty_chart_says_so():
    assert "Not measured." in render(Chart("t", [Series("s", [(0, None), (1, None)])]))
    parsed(render(Chart("t", [])))


def test_non_finite_value_is_marked_and_named():
    html = render(Chart("t", [Series("s", [(0, 1.0), (1, math.nan)])]))
    assert 'class="odd"' in html
    assert '"NaN"' in html


# -- numbers as text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(None, "percent", "not measured"), (math.nan, "number", "NaN"), (-math.inf, "count", "−∞"),
     (0.7764, "percent", "77.6 %"),
     (0.014, "points", "+1.4"), (-0.014, "points", "−1.4"), (12_345, "count", "12\u2009345"), (0.0, "number", "0"),
     (1e-5, "number", "1.00e−05"), (91.4, "seconds", "1 min 31 s")],
)  # fmt: skip
def test_values_are_formatted(value, unit, text):
    assert spoken(value, unit) == text


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_ordered_and_inside(low, width):
    found = ticks(low, low + width)
    assert len(found) <= 7
    assert found == sorted(set(found))
    assert all(low - width * 1e-6 <= t <= low + width * (1 + 1e-6) for t in found)


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
    found = {"grown": [grown], "train": [train], "hostile": [hostile], "both": [grown, train, hostile]}
    return {name: report.write([RunSummary.of(p) for p in runs], root / f"{name}.html") for name, runs in found.items()}


@pytest.mark.parametrize("name", ["grown", "train", "hostile", "both"])
def test_every_page_is_well_formed_and_fetches_nothing(places, name):
    tree = parsed(places[name].read_text())
    for tag, attrs in tree.tags:
        assert tag not in ("img", "iframe", "object"), attrs
        assert not any(key.startswith("on") for key in attrs)
        for key in ("src", "href"):
            assert attrs.get(key, "#").startswith(("#", "data:,"))
    assert places[name].stat().st_size < 3_000_000


def test_names_are_shown_verbatim(places):
    tree = parsed(places["hostile"].read_text())
    assert any(NASTY in text for text in tree.text)
    scripts = re.findall(r'<script type="application/json">(.*?)</script>', places["hostile"].read_text(), re.S)
    assert any(NASTY in [s["name"] for s in json.loads(text)["series"]] for text in scripts)


@given(st.text())
def test_no_text_can_escape_its_script_element(text):
    html = data_script({"x": text})
    inside = html.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert "<" not in inside
    assert json.loads(inside) == {"x": text}


def test_failures_are_prominent_only_when_present(places):
    assert 'class="trouble"' in places["train"].read_text()
    assert "sink retired" in places["train"].read_text()
    clean = places["grown"].read_text()
    assert 'class="trouble"' not in clean
    assert "No problems" in clean


def test_quality_that_is_not_finite_is_a_trouble(tmp_path):
    journal = Journal(tmp_path / "run")
    for event in (started(), step(1), step(2, quality=math.nan)):
        journal.write(event)
    found = report.troubles(RunSummary.of(journal.close()))
    assert any(severity == "error" and "not finite" in text for severity, text in found)


def test_figures_have_no_escaped_spaces(places):
    assert not re.search(r"\d\\u2009\d", places["train"].read_text() + places["grown"].read_text())


@pytest.mark.parametrize("y", [1e308, -1e308, 1e200])
@pytest.mark.parametrize("x", [1.0, 2.0**63, 2.0**70])
def test_numbers_too_large_for_arithmetic_are_drawn_as_not_finite(x, y):
    page = render(Chart("t", [Series("a", [(0.0, 1.0), (x, y), (x + 1, 0.5)])], unit="percent"))
    assert "<figure" in page
    assert "Not measured" not in page
    assert "<figure" in render(Chart("t", [Series("a", [(x, 1.0)])], x_range=(x, x)))


def test_alarms_without_rollback_take_one_line(tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    for step_, alarm, action in ((1, "divergence", "counted"), (2, "divergence", "counted"), (3, "collapse", "seen"),
                                 (4, "divergence", "rolled back")):  # fmt: skip
        journal.write(Governor(env=0, episode=0, step=step_, alarm=alarm, action=action, value=9.0))
    told = [text for _, text in report.troubles(RunSummary.of(journal.close())) if "Governor" in text]
    assert len(told) == 2
    assert re.search(r"epoch 4: divergence .* rolled back", told[0])
    assert "3 alarms that needed no rollback (divergence 2 times, collapse)" in told[1]


def test_unmeasured_quality_is_not_shown_as_zero(tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    for n in range(1, 5):
        journal.write(step(n, quality=None, committed_quality=None))
    html = report.page([RunSummary.of(journal.close())])
    assert "Not measured." in html
    assert "0.0 %" not in html


def test_seed_without_measured_worth_still_has_a_lifecycle(tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    journal.write(step(1, stages=(2, 0, 0), blueprints=("norm", "", "")))
    html = report.page([RunSummary.of(journal.close())])
    assert 'class="bar training"' in html
    parsed(html)


@pytest.mark.parametrize("status", ["running", "finished", "failed"])
def test_run_with_only_a_manifest_has_a_report(tmp_path, status):
    (tmp_path / "manifest.json").write_bytes(seal_json(json.dumps({"status": status}).encode()))
    parsed(report.page([RunSummary.of(tmp_path)]))


def test_page_states_how_many_of_many_episodes_it_shows(places, tmp_path):
    run = RunSummary.of(places["train"].parent / "train")
    shown = sections.views(run)
    assert len(shown) == sections.MOST_VIEWS
    assert shown[0].quality == max(e.quality for e in run.episodes)
    assert "12 of 60 episodes" in places["train"].read_text()


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
    known = {each["kind"] for each in lines}
    lines += [each | {"seq": 1000 + i} for i, each in enumerate(more) if each["kind"] not in known]
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
        run = RunSummary.of(path)
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
                run = RunSummary.of(path)
                for page in ([run], [run, RunSummary.of(path)]) if odd == "text" else ([run],):
                    parsed(report.page(page))
                digest(run)
    deep = json.loads('{"a":' * 300 + "1" + "}" * 300)
    (path / "manifest.json").write_bytes(
        seal_json(json.dumps(manifest | {"config": deep, "versions": [deep]}).encode())
    )
    parsed(report.page([RunSummary.of(path)]))


def test_facts_missing_in_the_journal_come_from_a_valid_manifest(tmp_path):
    journal = Journal(tmp_path / "run", task="rescue", rounds="many", threads=3)
    journal.write(step(1))
    run = RunSummary.of(journal.close())
    assert [run.about(name) for name in ("task", "rounds", "threads")] == ["rescue", None, 3]


@pytest.mark.parametrize("content", ["{", "[1]", '{"task": "x"}', None])
def test_damaged_manifest_hides_no_journal(tmp_path, content):
    path = grow_run(tmp_path / "run")
    (path / "manifest.json").unlink() if content is None else (path / "manifest.json").write_text(content)
    run = RunSummary.of(path)
    assert (run.status, len(run.episodes)) == ("finished", 4)
    ((severity, text),) = report.troubles(run)
    assert severity == "warning"
    assert "manifest" in text
    parsed(report.page([run]))


def test_directory_named_like_a_segment_breaks_no_report(tmp_path):
    path = grow_run(tmp_path / "run")
    (path / "events" / "rank0-00007.jsonl").mkdir()
    assert RunSummary.of(path).status == "finished"


def test_text_of_any_length_is_truncated(tmp_path):
    journal = Journal(tmp_path / "run", error="e" * 9_000_000, status="failed", command="c" * 9_000_000)
    journal.write(started())
    journal.write(Health(source="x", severity="error", text="y" * 22_000_000))
    run = RunSummary.of(journal.close())
    assert len(report.page([run])) < 1_000_000
    assert any("(21,998,003 more characters)" in text for _, text in report.troubles(run))


def test_events_missed_by_a_retired_sink_are_not_called_lost(tmp_path):
    journal = Journal(tmp_path / "run", status="running")
    counters = {"emitted": 107.0, "coalesced": 0.0, "Board.given_up": 10.0, "JsonlSink.given_up": 0.0}
    journal.write(Health(source="hub", severity="warning", text="107 events; 10 events lost", counters=counters))
    run = RunSummary.of(journal.close())
    assert ("warning", "hub: of 107 events sink Board missed 10") in report.troubles(run)
    assert run.losses == []


# -- run names, and the gain of growth


def test_copy_is_named_after_its_directory(tmp_path):
    path = grow_run(tmp_path / "run")
    copy = tmp_path / "a copy"
    path.rename(copy)
    run = RunSummary.of(copy)
    assert report.title_of(run) == "a copy"
    assert "<dt>run id</dt><dd>run</dd>" in report.page([run])
    (tmp_path / "else").mkdir()
    other = RunSummary.of(grow_run(tmp_path / "else" / "a copy"))
    html = report.page([run, other])
    assert "else/a copy" in html
    assert f"{tmp_path.name}/a copy" in html


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
    html = sections.results(RunSummary.of(journal.close()))
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in html.split("<tr>")[2:]]
    assert [row[3] for row in rows] == ["+10.0", "", "−10.0", "+5.0"]
    assert "over no growth: against the same world without growth, in points." in html
    assert "over twin" not in html


def test_unknown_gain_is_not_explained(tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    journal.write(step(1))
    assert "without growth" not in sections.results(RunSummary.of(journal.close()))


# -- the command


def test_command_writes_into_the_run_and_prints_a_summary(tmp_path, capsys):
    path = grow_run(tmp_path / "run")
    run_report([path], None, False, False)
    said = capsys.readouterr().out
    assert (path / "report.html").exists()
    assert "no growth" in said
    assert "no problems" in said


def test_command_prints_json(tmp_path, capsys):
    paths = [grow_run(tmp_path / name) for name in ("a", "b")]
    run_report(paths, tmp_path / "out.html", True, False)
    said = json.loads(capsys.readouterr().out)
    assert [run["status"] for run in said["runs"]] == ["finished", "finished"]
    assert said["runs"][0]["environments"][0]["germinated"] == 3


def test_non_run_directory_is_refused(tmp_path):
    with pytest.raises(EsperError):
        run_report([tmp_path], None, False, False)
    with pytest.raises(EsperError):
        run_report([], None, False, False)


# -- in a browser

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pages are not looked at")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: pages are not looked at")
    with api.sync_playwright() as play:
        chrome = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield chrome
        chrome.close()


@pytest.fixture
def visit(browser):
    """Return a function that opens a page; afterwards fail on any console message or network request."""
    trouble, pages = [], []

    def go(path, width=1280):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda said: trouble.append(said.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: trouble.append("a name ran as a script"))
        page.on(
            "request", lambda asked: asked.url == path.as_uri() or asked.url == "data:," or trouble.append(asked.url)
        )
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield go
    for page in pages:
        page.close()
    assert trouble == []


@pytest.mark.parametrize("name", ["grown", "train", "hostile", "both"])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_screen(places, visit, name, width):
    page = visit(places[name], width)
    for fold in page.query_selector_all("details"):
        fold.evaluate("d => d.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_pointer_shows_values(places, visit):
    page = visit(places["grown"])
    page.locator(".area").first.hover(position={"x": 400, "y": 60})
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert re.search(r"epoch 1\d", tip.inner_text())
    assert "no growth" in tip.inner_text()
    assert " %" in tip.inner_text()
    page.mouse.move(2, 2)
    assert not tip.is_visible()


def test_arrow_keys_show_values(places, visit):
    page = visit(places["grown"])
    page.locator(".area").first.focus()
    page.keyboard.press("ArrowLeft")
    assert "epoch 40" in page.locator("#tip").inner_text()
    page.keyboard.press("ArrowLeft")
    assert "epoch 39" in page.locator("#tip").inner_text()


def test_stage_has_a_tooltip(places, visit):
    page = visit(places["grown"])
    page.locator(".panel .bar.fossilized").first.hover()
    assert "conv_light in r0c0" in page.locator("#tip").inner_text()


def test_legend_toggles_a_curve_in_every_chart(places, visit):
    page = visit(places["grown"])
    curves = page.locator('g[data-key="e1"]')
    assert curves.count() == 4
    page.get_by_role("button", name="no growth").click()
    assert all(not curves.nth(i).is_visible() for i in range(4))
    page.locator(".area").first.hover(position={"x": 400, "y": 60})
    assert "no growth" not in page.locator("#tip").inner_text()
    page.get_by_role("button", name="no growth").click()
    assert curves.first.is_visible()


def test_selector_shows_one_episode_at_a_time(places, visit):
    page = visit(places["train"])
    assert page.locator(".panel:visible").count() == 1
    page.locator("select[data-panels]").select_option(index=3)
    chosen = page.locator("select[data-panels] option:checked").inner_text()
    assert page.locator(".panel:visible h4").inner_text() == chosen


def test_link_opens_the_run_it_names(places, visit):
    page = visit(places["both"])
    page.get_by_role("link", name="train").click()
    assert page.locator("#run1").evaluate("d => d.open")
