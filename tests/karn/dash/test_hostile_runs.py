"""Runs of which every text is hostile, in every kind of event and file, looked at in a real browser."""

import json

import msgspec
import pytest

pytest.importorskip("starlette", reason="the live page needs the extra web")

from esper.karn import report
from esper.karn.run_state import RunState
from esper.leyline.checksums import open_json, seal_json
from esper.leyline.events import KINDS, Checkpoint, GovernorAlarm, Gradient, Health, RunFinished
from tests.support import browser
from tests.support.page_server import TOKEN, served
from tests.support.sample_runs import Journal, grow_like, phases, started, train_run

NASTY = browser.NASTY + "\u202e"
FOLDER = "<img src=x onerror=alert(1)>'\"&"
FLOW = ("op", "was", "now", "cause", "severity", "status")
"""Fields whose values choose what a view shows: hostile in one of the runs, and usual in the other."""


def hostile(
    value,
):
    """Return data with every text made hostile, in keys too."""
    if isinstance(value, str):
        return NASTY + value
    if isinstance(value, dict):
        return {NASTY + key: hostile(each) for key, each in value.items()}
    return [hostile(each) for each in value] if isinstance(value, list | tuple) else value


class HostileJournal(Journal):
    """A journal that makes every text of an event hostile."""

    usual = ()
    kinds = frozenset()

    def write(self, event, **options):
        data = msgspec.to_builtins(event)
        texts = {name: value if name in ("kind", *self.usual) else hostile(value) for name, value in data.items()}
        self.kinds |= {data["kind"]}
        super().write(msgspec.convert(texts, type(event)), **options)


def hostile_run(path, usual):
    """Write a run with every kind of event; `usual`: fields that keep their values."""
    journal = HostileJournal(path, task=NASTY, controller=NASTY, command=NASTY, error=NASTY)
    journal.usual = usual
    journal.write(started(env_names=("grown", "other"), rounds=2))
    for env, name in enumerate(("grown", "other")):
        grow_like(journal, env, name, episode=1)
    for event in (
        Gradient(env=0, episode=1, step=41, slot="r0c0", norm=1.0, ratio=1.0, health=0.5),
        GovernorAlarm(env=0, episode=1, step=1, alarm="jump", action="rolled back"),
        Health(source="hub", severity="error", text="lost", counters={"x": 1}),
        Checkpoint(path="x", reason="epoch", size_bytes=1),
        RunFinished(status="finished", wall_s=1.0, env_steps=80, error="e"),
    ):
        journal.write(event)
    phases(journal)
    other = train_run(path.parent / f".{path.name}", envs=1, rounds=2)  # for its updates
    for event in map(json.loads, (other / "events" / "rank0-00000.jsonl").read_bytes().splitlines()):
        if event["kind"] == "update":
            journal.write(msgspec.convert(event, KINDS["update"]))
    manifest = open_json((journal.close() / "manifest.json").read_bytes())
    manifest |= {"run_id": NASTY, "config": {NASTY: {NASTY: NASTY}}, "started": NASTY, "versions": {NASTY: NASTY}}
    (path / "manifest.json").write_bytes(seal_json(json.dumps(manifest).encode()))
    assert journal.kinds == set(KINDS)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile") / FOLDER
    for name, usual in (("all", ()), ("some", FLOW)):
        hostile_run(root / f"{FOLDER}{name}", usual)
    return root


def is_harmless(page):
    """Return whether no text became an element. Console messages and dialogs fail the test afterwards."""
    return page.locator("img, iframe, object, embed, form, base, style, link[rel=import]").count() == 0


@pytest.mark.parametrize(("width", "scheme"), [(420, "light"), (1400, "dark")])
def test_every_live_page_of_hostile_runs_shows_text_only(visits, runs, width, scheme):
    with served(runs) as port:
        page = visits.open(f"http://127.0.0.1:{port}/?token={TOKEN}", width, scheme)
        links = page.get_by_role("link", name=FOLDER)
        visits.expect(links).to_have_count(2)
        assert is_harmless(page)
        for number in (0, 1):
            page.goto(f"http://127.0.0.1:{port}/#/run/{number}")
            page.wait_for_selector(".log li")
            for fold in page.query_selector_all("details"):
                fold.evaluate("d => d.open = true")
            for cell in page.locator(".cell").all()[:3]:
                cell.click()
            page.locator("input[type=search]").fill("<img")
            for plot in page.locator(".plot:visible").all():
                plot.focus()
                page.keyboard.press("ArrowLeft")
            assert is_harmless(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.goto(f"http://127.0.0.1:{port}/#/compare/0,1")
        page.wait_for_selector(".paired > *")
        assert is_harmless(page)


def test_reports_of_hostile_runs_show_text_only(visits, runs, tmp_path):
    states = [RunState.of(path) for path in sorted(runs.iterdir()) if not path.name.startswith(".")]
    for chosen in (states[:1], states[1:], states):
        page = visits.open(report.write(chosen, tmp_path / "report.html").as_uri())
        page.wait_for_selector("section")
        for _ in range(2):  # folds have folds
            for fold in page.query_selector_all("details"):
                fold.evaluate("d => d.open = true")
        page.wait_for_timeout(200)
        assert page.locator("img, iframe, object, embed, form, base").count() == 0
        assert page.locator("script").count() == 1 + len(report.SCRIPT_LINK.findall(report.web_file("index.html")))
        assert page.locator("style").count() == 2
