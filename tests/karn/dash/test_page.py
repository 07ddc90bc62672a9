"""The page in a real browser: the report from disk, and the live page of a run that is being written."""

import json
import math
import re

import pytest

pytest.importorskip("starlette", reason="the live page needs the extra web")

from esper.karn import report
from esper.karn.run_state import RunState
from esper.leyline.checksums import open_json, seal_json
from esper.leyline.events import Checkpoint, GovernorAlarm, Health, PhaseProfile
from esper.nissa.recorder import record
from tests.support.browser import NASTY, too_wide
from tests.support.page_server import TOKEN, served
from tests.support.sample_runs import Journal, grow_like, grow_run, started, step, train_run


def hostile_run(path):
    """Write a run whose every text is hostile."""
    journal = Journal(path, command=NASTY, task=NASTY, error=NASTY)
    names = (NASTY, "b" + NASTY)
    journal.write(started(run_id=NASTY, command=NASTY, task=NASTY, controller=NASTY, env_names=names, device=NASTY,
                          slots=(NASTY, "r0c1", "r1c0")))  # fmt: skip
    for env, name in enumerate(names):
        grow_like(journal, env, name, grows=True)
    journal.write(step(41, op=NASTY, stages=(2, 0, 0), blueprints=(NASTY, "", "")))
    journal.write(GovernorAlarm(env=0, episode=0, step=1, alarm=NASTY, action=NASTY))
    journal.write(Health(source=NASTY, severity="error", text=NASTY))
    journal.write(Checkpoint(path=NASTY, reason=NASTY, size_bytes=1))
    journal.write(PhaseProfile(phase=NASTY, wall_ms=1.0, cpu_ms=1.0, calls=1))
    named = open_json((journal.close() / "manifest.json").read_bytes())
    named |= {"run_id": NASTY, "config": {NASTY: {NASTY: NASTY}}, "started": NASTY}
    (path / "manifest.json").write_bytes(seal_json(json.dumps(named).encode()))
    return path


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Return reports of a grown host, a trained controller with failures, hostile names, and three runs compared."""
    root = tmp_path_factory.mktemp("runs")
    paths = {
        "grown": [grow_run(root / "grown")],
        "train": [train_run(root / "train", envs=12, rounds=5, clean=False)],
        "hostile": [hostile_run(root / "hostile")],
    }
    paths["both"] = [path for (path,) in paths.values()]
    return {name: report.write([RunState.of(p) for p in runs], root / f"{name}.html") for name, runs in paths.items()}


def opened_folds(page):
    for fold in page.query_selector_all("details"):
        fold.evaluate("d => d.open = true")


# -- the report


@pytest.mark.parametrize("name", ["grown", "train", "hostile", "both"])
@pytest.mark.parametrize(("width", "scheme"), [(420, "dark"), (1400, "light")])
def test_no_report_is_wider_than_the_screen(places, visits, name, width, scheme):
    page = visits.open(places[name].as_uri(), width, scheme)
    page.wait_for_selector("section")
    opened_folds(page)
    page.wait_for_timeout(200)
    assert too_wide(page, width) == []


def test_hostile_names_run_nothing_and_add_no_element(places, visits):
    page = visits.open(places["hostile"].as_uri())
    page.wait_for_selector(".life")
    opened_folds(page)
    assert page.locator("img, iframe, object, embed").count() == 0
    assert page.locator("script").count() == 1 + len(report.SCRIPT_LINK.findall(report.web_file("index.html")))
    assert NASTY in page.locator("h3").all_inner_texts() or page.get_by_text(NASTY, exact=False).count() > 5


def test_pointer_and_arrow_keys_show_values(places, visits):
    page = visits.open(places["grown"].as_uri())
    plot = page.locator(".plot").first
    plot.scroll_into_view_if_needed()
    page.wait_for_selector(".plot .u-over")
    plot.locator(".u-over").hover(position={"x": 400, "y": 60})
    tip = page.locator("#tip")
    assert re.search(r"epoch \d+", tip.inner_text())
    assert "no growth" in tip.inner_text()
    assert " %" in tip.inner_text()
    page.mouse.move(2, 2)
    assert not tip.is_visible()
    plot.focus()
    page.keyboard.press("ArrowLeft")
    assert "epoch 40" in tip.inner_text()
    page.keyboard.press("ArrowLeft")
    assert "epoch 39" in tip.inner_text()


def test_legend_switches_a_curve_off(places, visits):
    page = visits.open(places["grown"].as_uri())
    plot = page.locator(".plot").first
    plot.scroll_into_view_if_needed()
    page.wait_for_selector(".plot .u-over")
    button = page.get_by_role("button", name="no growth", exact=True)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    plot.locator(".u-over").hover(position={"x": 400, "y": 60})
    assert "no growth" not in page.locator("#tip").inner_text()
    assert "grown" in page.locator("#tip").inner_text()


def test_curves_can_be_drawn_against_multiply_adds(visits, tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    for n in range(1, 11):
        journal.write(step(n, train_macs=10**9 * n, quality=0.05 * n))
    page = visits.open(report.write([RunState.of(journal.close())], tmp_path / "r.html").as_uri())
    page.get_by_role("button", name="by training multiply-adds").click()
    plot = page.locator(".plot").first
    assert "over training multiply-adds" in plot.get_attribute("aria-label")
    plot.focus()
    page.keyboard.press("ArrowLeft")
    assert "10G" in page.locator("#tip").inner_text()


def test_network_is_scrubbed_over_time(places, visits):
    page = visits.open(places["grown"].as_uri())
    slot = page.locator(".network g[aria-label^='slot r0c0']")
    assert "fossilized" in slot.get_attribute("aria-label")
    page.locator("input[type=range]").fill("6")
    assert "epoch 6 of 40" in page.locator(".scrub output").inner_text()
    assert "conv_light, training" in slot.get_attribute("aria-label")
    page.locator("input[type=range]").fill("1")
    assert "empty" in slot.get_attribute("aria-label")


def test_click_on_a_slot_shows_the_life_of_its_seed(places, visits):
    page = visits.open(places["grown"].as_uri())
    page.locator(".cell[aria-label*='slot r0c1']").first.click()
    page.wait_for_selector(".life.chosen")
    life = page.locator(".life.chosen").first.inner_text()
    assert "norm in r0c1" in life
    assert "chosen by the controller: GERMINATE norm" in life
    assert "chosen by the controller: PRUNE" in life


def test_printing_draws_every_chart(places, visits):
    page = visits.open(places["train"].as_uri())
    assert page.locator(".plot:visible").count() > page.locator(".plot:visible .uplot").count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".plot:visible").count() == page.locator(".plot:visible .uplot").count()


def test_value_that_is_not_finite_is_named(visits, tmp_path):
    journal = Journal(tmp_path / "run")
    for event in (started(), step(1), step(2, val_loss=math.nan), step(3)):
        journal.write(event)
    page = visits.open(report.write([RunState.of(journal.close())], tmp_path / "r.html").as_uri())
    plot = page.locator(".plot").nth(1)
    plot.scroll_into_view_if_needed()
    page.wait_for_timeout(200)
    plot.focus()
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    assert "not finite" in page.locator("#tip").inner_text()


# -- the live page


def test_live_run_shows_points_as_they_arrive_and_resumes_after_a_reload(visits, tmp_path):
    with record("mine", out=tmp_path / "run") as run, served(tmp_path) as port:
        run.emit(started())
        for n in range(1, 11):
            run.emit(step(n, quality=0.05 * n))
        run.hub.flush()
        page = visits.open(f"http://127.0.0.1:{port}/?token={TOKEN}")
        page.get_by_role("link", name="run").click()
        page.wait_for_selector(".pill.live")
        chart = page.locator(".plot").first
        visits.expect(chart).to_have_attribute("aria-label", re.compile("ends at 50.0 %"))
        for n in range(11, 14):
            run.emit(step(n, quality=0.05 * n))
        run.hub.flush()
        visits.expect(chart).to_have_attribute("aria-label", re.compile("ends at 65.0 %"), timeout=30_000)
        page.reload()
        page.wait_for_selector(".pill.live")
        assert "ends at 65.0 %" in page.locator(".plot").first.get_attribute("aria-label")
        run.emit(step(14, quality=0.7))
        run.hub.flush()
        visits.expect(chart).to_have_attribute("aria-label", re.compile("ends at 70.0 %"), timeout=30_000)
        visits.close()  # before the server, which would break off the stream of the live run


def test_end_of_a_run_ends_the_live_mark(visits, tmp_path):
    with served(tmp_path) as port:
        with record("mine", out=tmp_path / "run") as run:
            run.emit(started())
            run.emit(step(1))
            run.hub.flush()
            page = visits.open(f"http://127.0.0.1:{port}/?token={TOKEN}")
            page.get_by_role("link", name="run").click()
            page.wait_for_selector(".pill.live")
        page.wait_for_selector(".pill.good")
        assert page.locator(".pill.live").count() == 0


def test_zoom_asks_for_every_row(visits, tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started())
    for n in range(1, 10_001):
        journal.write(step(n, quality=0.9 if n == 5_000 else 0.5))
    journal.close()
    with served(tmp_path) as port:
        page = visits.open(f"http://127.0.0.1:{port}/?token={TOKEN}")
        page.get_by_role("link", name="run").click()
        page.wait_for_selector(".plot .u-over")
        assert page.get_by_text("Each point covers").count() == 1
        over = page.locator(".plot .u-over").first
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        with page.expect_response(re.compile("/rows")) as answer:
            page.mouse.move(box["x"] + 0.48 * box["width"], box["y"] + 50)
            page.mouse.down()
            page.mouse.move(box["x"] + 0.52 * box["width"], box["y"] + 50, steps=4)
            page.mouse.up()
        rows = answer.value.json()
        assert rows["stride"] == 1
        assert max(rows["columns"]["quality"]) == 0.9
        page.get_by_role("button", name="show all").click()
        assert page.get_by_role("button", name="show all").count() == 0


def test_runs_are_chosen_and_compared(visits, tmp_path):
    for seed in (1, 2):
        grow_run(tmp_path / f"run{seed}", skill=0.1 * seed)
    with served(tmp_path) as port:
        page = visits.open(f"http://127.0.0.1:{port}/?token={TOKEN}")
        page.wait_for_selector("input[type=checkbox]")
        for box in page.locator("input[type=checkbox]").all():
            box.check()
        page.get_by_role("button", name="Compare the chosen runs").click()
        page.wait_for_selector("text=against")
        assert page.locator("h1").inner_text() == "2 runs compared"
        assert page.get_by_text("difference [95 %]").count() == 1
        page.wait_for_selector(".plot .u-over")


@pytest.mark.parametrize(("width", "scheme"), [(420, "light"), (1400, "dark")])
def test_hostile_live_run_runs_nothing(visits, tmp_path, width, scheme):
    hostile_run(tmp_path / "run")
    with served(tmp_path) as port:
        page = visits.open(f"http://127.0.0.1:{port}/?token={TOKEN}", width, scheme)
        page.get_by_role("link", name="run").click()
        page.wait_for_selector(".life")
        opened_folds(page)
        for cell in page.locator(".cell").all()[:4]:
            cell.click()
        assert page.locator("img, iframe, object, embed").count() == 0
        assert too_wide(page, width) == []


def test_keyboard_reaches_slots_and_charts(visits, tmp_path):
    grow_run(tmp_path / "run")
    page = visits.open(report.write([RunState.of(tmp_path / "run")], tmp_path / "r.html").as_uri())
    page.wait_for_selector(".cell")
    page.locator(".network g[tabindex]").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".life.chosen")
    focusable = page.evaluate("[...document.querySelectorAll('.plot, .cell, .table')].every(n => n.tabIndex >= 0)")
    assert focusable
    named = "n.textContent.trim() || n.getAttribute('aria-label') || n.labels?.length"
    unnamed = page.evaluate(f"[...document.querySelectorAll('button, input, select')].filter(n => !({named})).length")
    assert unnamed == 0


def test_network_of_many_slots_is_drawn_on_a_narrow_screen(visits, tmp_path):
    journal = Journal(tmp_path / "run")
    journal.write(started(slots=tuple(f"r0c{i}" for i in range(25))))
    empty = 22
    journal.write(step(1, stages=(0, 2, 5) + (0,) * empty, alphas=(0.0,) * 25,
                       blueprints=("", "norm", "norm") + ("",) * empty))  # fmt: skip
    place = report.write([RunState.of(journal.close())], tmp_path / "report.html")
    page = visits.open(place.as_uri(), width=420)
    visits.expect(page.locator("svg.network g")).to_have_count(25)
