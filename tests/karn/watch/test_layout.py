"""The terminal view at its three sizes: what is shown at each, and that nothing is cut off."""

import asyncio

import pytest
from textual.widgets import DataTable, Sparkline, Static

from esper.karn.watch.app import WatchApp
from tests.support.sample_runs import grow_run

SIZES = [(80, 24), (120, 40), (200, 60)]


def looked_at(path, size, look):
    """Return what `look` returns of the screen of a finished run."""

    async def session():
        app = WatchApp(path)
        async with app.run_test(size=size) as pilot:
            await app.read()
            await pilot.pause(1.0)
            return look(app)

    return asyncio.run(session())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return grow_run(tmp_path_factory.mktemp("watch") / "run")


@pytest.mark.parametrize("size", SIZES)
def test_no_table_is_wider_than_its_place(run, size):
    def widths(app):
        tables = [app.query_one(f"#{name}", DataTable) for name in ("envs", "slots")]
        return [(table.virtual_size.width, table.size.width) for table in tables]

    assert all(needed <= there for needed, there in looked_at(run, size, widths))


@pytest.mark.parametrize("size", SIZES)
def test_trend_of_a_finished_run_is_shown_on_tall_terminals(run, size):
    trend = looked_at(run, size, lambda app: (app.query_one(Sparkline).display, len(app.query_one(Sparkline).data)))
    assert trend == ((True, 40) if size[1] >= 40 else (False, 0))


@pytest.mark.parametrize("size", SIZES)
def test_lives_of_seeds_fill_a_wide_screen(run, size):
    def lifecycle_text(app):
        widget = app.query_one("#lives", Static)
        lines = ["".join(segment.text for segment in strip) for strip in widget.render_lines(widget.size.region)]
        return "\n".join(lines) if widget.size.height else ""

    text = looked_at(run, size, lifecycle_text)
    if size[0] < 200:
        assert text == ""
    else:
        assert "conv_light in r0c0" in text
        assert "germinated → training" in text
        assert "GERMINATE norm" in text


def test_footer_names_the_key_of_the_details(run):
    def keys(app):
        return [active.binding.description for active in app.active_bindings.values() if active.binding.show]

    assert "Detail" in looked_at(run, (80, 24), keys)
