"""The terminal view at its three sizes: what is shown at each, and that nothing is cut off."""

import asyncio
import time

import pytest
from textual.widgets import DataTable, Sparkline, Static

from esper.karn.watch.app import WatchApp
from tests.support.sample_runs import grow_run

SIZES = [(80, 24), (120, 40), (200, 60)]
DEADLINE_S = 60.0


def looked_at(path, size, look, *, until=lambda value: True):
    """Return what `look` returns of the screen of a finished run, once it is arranged and `until` holds.

    After the deadline, return what `look` returns then, so that the caller's assertion shows it.
    """

    async def session():
        app = WatchApp(path)
        async with app.run_test(size=size) as pilot:
            await app.read()
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:
                await pilot.pause(0.1)
                if is_arranged(app, size) and until(look(app)):
                    break
            return look(app)

    return asyncio.run(session())


def is_arranged(app, size):
    """Return whether the app has arranged its widgets for `size` and filled its tables."""
    filled = all(app.query_one(f"#{name}", DataTable).row_count for name in ("envs", "slots"))
    classes = (app.screen.has_class("wide"), app.screen.has_class("tall"))
    return filled and classes == (size[0] >= 200, size[1] >= 34)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return grow_run(tmp_path_factory.mktemp("watch") / "run")


@pytest.mark.parametrize("size", SIZES)
def test_no_table_is_wider_than_its_place(run, size):
    def widths(app):
        tables = [app.query_one(f"#{name}", DataTable) for name in ("envs", "slots")]
        return [(table.virtual_size.width, table.size.width) for table in tables]

    def fits(values):
        return all(0 < needed <= there for needed, there in values)

    assert fits(looked_at(run, size, widths, until=fits))


@pytest.mark.parametrize("size", SIZES)
def test_trend_of_a_finished_run_is_shown_on_tall_terminals(run, size):
    expected = (True, 40) if size[1] >= 40 else (False, 0)

    def trend(app):
        line = app.query_one(Sparkline)
        return line.display, len(line.data)

    assert looked_at(run, size, trend, until=lambda value: value == expected) == expected


@pytest.mark.parametrize("size", SIZES)
def test_lives_of_seeds_fill_a_wide_screen(run, size):
    def lifecycle_text(app):
        widget = app.query_one("#lives", Static)
        lines = ["".join(segment.text for segment in strip) for strip in widget.render_lines(widget.size.region)]
        return "\n".join(lines) if widget.size.height else ""

    is_wide = size[0] >= 200
    text = looked_at(run, size, lifecycle_text, until=lambda text: is_wide == ("GERMINATE norm" in text))
    if not is_wide:
        assert text == ""
    else:
        assert "conv_light in r0c0" in text
        assert "germinated → training" in text
        assert "GERMINATE norm" in text


def test_footer_names_the_key_of_the_details(run):
    def keys(app):
        return [active.binding.description for active in app.active_bindings.values() if active.binding.show]

    assert "Detail" in looked_at(run, (80, 24), keys, until=lambda shown: "Detail" in shown)
