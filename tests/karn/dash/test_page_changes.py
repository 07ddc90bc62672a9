"""The page while things change under it: new runs, removed and replaced journals, navigation, printing."""

import re
import shutil
import threading

import pytest

pytest.importorskip("starlette", reason="the live page needs the extra web")

from esper.karn import report
from esper.karn.dash import server
from esper.karn.run_state import RunState
from esper.nissa.recorder import record
from tests.support.compared_runs import decided, write_run
from tests.support.page_server import TOKEN, served
from tests.support.sample_runs import Journal, grow_run, started, step, train_run

SLOW = 30_000


def address(port, hash_=""):
    return f"http://127.0.0.1:{port}/?token={TOKEN}{hash_}"


def test_list_shows_runs_that_begin_and_is_filtered(visits, tmp_path):
    grow_run(tmp_path / "first")
    with served(tmp_path) as port:
        page = visits.open(address(port))
        visits.expect(page.locator("tbody tr")).to_have_count(1)
        page.locator("input[type=checkbox]").check()
        grow_run(tmp_path / "group" / "second")
        visits.expect(page.locator("tbody tr")).to_have_count(2, timeout=SLOW)
        assert page.get_by_role("link", name="group/second").count() == 1
        assert page.get_by_label("Choose first").is_checked()
        page.get_by_label("Filter runs").fill("SECOND")
        visits.expect(page.locator("tbody tr")).to_have_count(1)


def test_cut_and_replaced_journals_are_shown_as_they_are_now(visits, tmp_path):
    with record("mine", out=tmp_path / "run") as run, served(tmp_path) as port:
        run.emit(started())
        for n in range(1, 21):
            run.emit(step(n, quality=0.5))
        run.hub.flush()
        page = visits.open(address(port, "#/run/0"))
        chart = page.locator(".plot").first
        visits.expect(chart).to_have_attribute("aria-label", re.compile("ends at 50.0 %"))
        other = Journal(tmp_path.parent / f"{tmp_path.name}-other", start_s=1_763_999_000.0)
        other.write(started())
        for n in range(1, 41):
            other.write(step(n, quality=0.9))
        (other.close() / "events" / "rank0-00000.jsonl").replace(tmp_path / "run" / "events" / "rank0-00000.jsonl")
        visits.expect(chart).to_have_attribute("aria-label", re.compile("ends at 90.0 %"), timeout=SLOW)
        visits.expect(page.locator(".scrub output")).to_have_text("epoch 40 of 40")
        visits.close()


def test_page_of_a_removed_run_says_so(visits, tmp_path):
    runs = tmp_path / "runs"
    with record("mine", out=runs / "run") as run, served(runs) as port:
        run.emit(started())
        run.emit(step(1))
        run.hub.flush()
        page = visits.open(address(port, "#/run/0"))
        page.wait_for_selector(".pill.live")
        (runs / "run").rename(tmp_path / "moved")
        page.wait_for_selector(".removed", timeout=SLOW)
        assert "was removed" in page.locator(".removed").inner_text()
        assert page.locator(".pill.live").count() == 0
        (tmp_path / "moved").rename(runs / "run")
        visits.trouble.clear()  # the browser reports the refused stream
        visits.close()


def test_page_that_was_left_while_it_loaded_does_not_appear(visits, tmp_path, monkeypatch):
    grow_run(tmp_path / "run")
    is_free = threading.Event()
    listing = server.LiveRuns.listing

    def slow_listing(runs):
        is_free.wait(20)
        return listing(runs)

    with served(tmp_path) as port:
        page = visits.open(address(port, "#/run/0"))
        page.wait_for_selector(".tile")
        monkeypatch.setattr(server.LiveRuns, "listing", slow_listing)
        page.evaluate("location.hash = '#/'")
        page.wait_for_selector("text=Reading the journal")
        page.evaluate("location.hash = '#/run/0'")
        page.wait_for_selector(".tile")
        with page.expect_response(re.compile("api/runs$")):
            is_free.set()
        page.wait_for_timeout(300)
        assert page.locator("h1").inner_text() == "run"
        assert page.locator(".tile").count() > 0


def test_several_runs_in_one_report_are_paired(visits, tmp_path):
    paths = [
        write_run(tmp_path / "a", [{"quality": 0.5}, {"quality": 0.6}], config={"ppo": {"lr": 0.1}}),
        write_run(tmp_path / "b", [{"quality": 0.7, "decisions": [decided(2)]}, {"quality": 0.8}]),
        write_run(tmp_path / "c", [{"world": 8}], config={"ppo": {"lr": 0.9}}),
    ]
    page = visits.open(report.write([RunState.of(path) for path in paths], tmp_path / "r.html").as_uri())
    paired = page.locator(".paired").first
    assert "b against a" in paired.inner_text()
    assert "+20.0 [" in paired.inner_text()
    paired.locator("summary").first.click()
    assert "GERMINATE r0c0 (norm)" in paired.inner_text()
    assert "no world in common" in paired.inner_text()


def test_means_of_compared_runs_include_environments_that_did_not_grow(visits, tmp_path):
    outcomes = [{"quality": 0.8, "germinated": 1}, {"quality": 0.6}]
    paths = [write_run(tmp_path / name, outcomes) for name in ("a", "b")]
    page = visits.open(report.write([RunState.of(path) for path in paths], tmp_path / "r.html").as_uri())
    cells = page.locator(".many-columns tbody tr").first.locator("td, th").all_inner_texts()
    assert cells[5] == "2"


@pytest.mark.parametrize("make", [grow_run, train_run])
def test_printed_page_is_light_and_fits_the_paper(visits, tmp_path, make):
    place = report.write([RunState.of(make(tmp_path / "run"))], tmp_path / "r.html")
    page = visits.open(place.as_uri(), width=1400, scheme="dark")
    page.wait_for_selector(".plot .uplot")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(23, 32, 42)"
    assert page.evaluate("getComputedStyle(document.querySelector('.bar')).printColorAdjust") == "exact"
    assert page.locator(".plot:visible").count() == page.locator(".plot:visible .uplot").count()
    wide = "[...document.querySelectorAll('section, figure, canvas, svg, .tile')].filter(n => n.getBoundingClientRect()"
    assert page.evaluate(f"{wide}.right > 704).map(n => n.className)") == []  # A4 less 2 × 12 mm
    assert page.locator("input[type=range]:visible, button.small-button:visible").count() == 0
    page.emulate_media(media="screen", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_removed_directory_of_a_finished_run_is_an_error_page(visits, tmp_path):
    grow_run(tmp_path / "run")
    with served(tmp_path) as port:
        page = visits.open(address(port))
        page.wait_for_selector("tbody tr")
        shutil.rmtree(tmp_path / "run")
        page.get_by_role("link", name="run").click()
        page.wait_for_selector("[role=alert]")
        assert "was removed" in page.locator("[role=alert]").inner_text()
        visits.trouble.clear()  # the browser reports the status 404
