"""The display of `esper grow` during training: how often it changes, and the time left."""

import re

import pytest
from rich.console import Console

from esper.commands import grow, grow_progress
from esper.commands.grow import GrowOptions, run_grow
from esper.commands.grow_progress import EpochTimer
from esper.commands.growing import GrowSettings


@pytest.fixture
def clock(monkeypatch):
    """Return a clock, a list whose only entry is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(grow_progress.time, "monotonic", lambda: now[0])
    return now


def test_time_left_follows_the_last_epochs_and_counts_down(clock):
    timer = EpochTimer(epochs_left=100)
    assert timer.time_left() == ""
    for seconds in (1, *[10] * grow_progress.RECENT_EPOCHS):
        clock[0] += seconds
        timer.epoch_ended()
    assert timer.time_left() == "  0:15:40 left"  # 94 epochs of 10 s
    clock[0] += 30
    assert timer.time_left() == "  0:15:10 left"
    clock[0] += 10_000
    assert timer.time_left() == "  0:00:00 left"


def lines_of(capsys, tmp_path, epochs=7):
    run_grow(
        GrowSettings(task="digits", controller="schedule", epochs=epochs, compare=False), GrowOptions(out=tmp_path)
    )
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("grown: epoch")]


def test_piped_output_has_a_line_every_five_epochs_with_the_time_left(tmp_path, capsys):
    lines = lines_of(capsys, tmp_path)
    assert [line.split()[2] for line in lines] == ["5/7", "7/7"]
    assert re.search(r" params  0:00:\d\d left  r0c0:", lines[0])
    assert "left" not in lines[1]


def test_piped_output_has_a_line_for_every_slow_epoch(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grow_progress, "PLAIN_SILENCE_S", 0.0)
    assert [line.split()[2] for line in lines_of(capsys, tmp_path, 3)] == ["1/3", "2/3", "3/3"]


def test_terminal_shows_every_epoch_and_the_time_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grow, "Console", lambda: Console(force_terminal=True, width=120))
    monkeypatch.setattr(grow_progress, "REFRESH_PER_SECOND", 100)  # an epoch takes about 100 times as long
    run_grow(GrowSettings(task="rescue", controller="schedule", epochs=3, compare=False), GrowOptions(out=tmp_path))
    printed = capsys.readouterr().out
    assert "epoch 1 of 3 is training" in printed
    assert re.search(r"epoch   2/3  train loss .* params  0:00:\d\d left", printed)
