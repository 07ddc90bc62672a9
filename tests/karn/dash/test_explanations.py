"""Explained decisions in the report and on the live page: alternatives, features, the seed's life, and importance."""

import pytest

pytest.importorskip("starlette", reason="the live page needs the extra web")

from esper.karn import report
from esper.karn.run_state import RunState
from esper.leyline.run_files import DECISIONS
from tests.support.browser import NASTY, too_wide
from tests.support.page_server import TOKEN, served
from tests.support.sample_runs import grow_run

TITLE = "Why the policy decided so"


def explained(_path, env):
    """Explain two operations of environment 0 and the importance of three features, with a hostile name in each."""
    if env is None:
        rows = [("quality", 0.25, 0.5), (NASTY, 0.125, 0.25), ("constant_one", 0.0, 0.0)]
        fields = [{"name": name, "scope": "env", "low": 0, "high": 1, "sd": sd, "nats": n} for name, n, sd in rows]
        return {"decisions": 40, "episode": 0, "rows": fields}
    if env:
        return {"episode": 0, "is_recorded": False, "all": 0, "rows": []}
    base = {"env": 0, "world": 7, "slot": "r0c0", "probability": 0.25, "value": 0.0125}
    plant = base | {
        "step": 5, "op": "GERMINATE", "heads": {"blueprint": "norm", "tempo": "STANDARD"},
        "ops": {"GERMINATE": 0.75, "WAIT": 0.25}, "slots": {"r0c0": 0.625, NASTY: 0.375},
        "options": {"blueprint": {"norm": 0.9, "lora": 0.1}, "tempo": {"STANDARD": 1.0}},
        "influences": [{"name": "val_loss", "slot": "", "value": 0.5, "neutral": -0.25, "effect": -1.5},
                       {"name": "quality_1", "slot": "", "value": 3.0, "neutral": 0.0, "effect": 0.75}],
    }  # fmt: skip
    wait = base | {
        "step": 20, "op": "ADVANCE", "heads": {}, "ops": {"ADVANCE": 1.0}, "slots": {"r0c0": 1.0}, "options": {},
        "influences": [],
    }  # fmt: skip
    return {"episode": 0, "is_recorded": True, "all": 3, "rows": [plant, wait]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = grow_run(tmp_path_factory.mktemp("runs") / "grown")
    (path / DECISIONS).touch()
    return path


def panel(page):
    return page.get_by_role("region", name=TITLE, exact=True)


def assert_explains(visits, page):
    """Check the panel of environment 0."""
    section = panel(page)
    visits.expect(section).to_contain_text(
        "before epoch 5: GERMINATE r0c0 norm. Probability of the whole action 25.0 %"
    )
    for text in ("75.0 %", "62.5 %", NASTY, "−1.50", "+0.75", "0.5 against −0.25", "3 against 0",
                 "The first 2 of 3 operations", "What happened to the seed"):  # fmt: skip
        visits.expect(section).to_contain_text(text)
    assert "STANDARD" not in section.locator("p.note.after").inner_text()  # it was the only option
    assert section.locator(".life li").count() > 1
    section.get_by_label("Operation").select_option(index=1)
    visits.expect(section).to_contain_text("before epoch 20: ADVANCE r0c0")
    section.locator("details").evaluate("d => d.open = true")
    rows = section.locator("table tbody tr")
    assert [row.locator("td").first.inner_text() for row in rows.all()] == ["quality", NASTY]
    visits.expect(section).to_contain_text("Constant in these decisions: constant_one.")


@pytest.mark.parametrize(("width", "scheme"), [(420, "dark"), (1400, "light")])
def test_report_explains_decisions(run, visits, tmp_path, width, scheme):
    out = report.write([RunState.of(run)], tmp_path / "report.html", explained)
    page = visits.open(out.as_uri(), width, scheme)
    assert_explains(visits, page)
    assert too_wide(page, width) == []
    page.get_by_label("Environment", exact=False).first.focus()
    assert panel(page).get_by_role("button").count() == 0


def test_live_page_reads_decisions_on_demand(run, visits):
    calls = []

    def counted(path, env):
        calls.append(env)
        return explained(path, env)

    with served(run.parent, explains=counted) as port:
        page = visits.open(f"http://127.0.0.1:{port}/?token={TOKEN}#/run/0")
        panel(page).get_by_role("button", name="Explain").wait_for()
        assert calls == []
        panel(page).get_by_role("button", name="Explain").click()
        assert_explains(visits, page)
        assert calls == [0, None]


def test_page_has_no_panel_without_recorded_decisions(visits, tmp_path):
    run = grow_run(tmp_path / "grown")
    page = visits.open(report.write([RunState.of(run)], tmp_path / "report.html").as_uri())
    page.wait_for_selector(".life")
    assert not page.get_by_text(TITLE).is_visible()


def test_page_says_why_decisions_cannot_be_read(run, visits, tmp_path):
    out = report.write([RunState.of(run)], tmp_path / "report.html", lambda _path, _env: {"damage": f"broken {NASTY}"})
    page = visits.open(out.as_uri())
    visits.expect(panel(page)).to_contain_text(f"broken {NASTY}")
