"""The display of `esper grow` during training: how often it changes, and the time left."""

import io
import re

import pytest
from rich.console import Console

from esper.commands import grow, grow_progress
from esper.commands.grow import GrowOptions, run_grow
from esper.commands.grow_progress import EpochTimer, accuracy_curves
from esper.commands.growing import GrowSettings, HostResult
from esper.karn.formatting import BLOCKS


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
    assert len(set(re.findall(r"[▁-█]{1,3}", printed))) > 3  # curves of one, two and three epochs


def result_of(accuracies, stages):
    history = [
        {"epoch": i + 1, "val_accuracy": accuracy, "stage": [stage]}
        for i, (accuracy, stage) in enumerate(zip(accuracies, stages, strict=True))
    ]
    return HostResult("grown", history=history)


def curve_lines(results, epochs, width=120):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(accuracy_curves(results, epochs, width))
    title, rows = console.export_text().split(" last")
    assert "epochs 1 to" in title
    return [line.rstrip() for line in rows.splitlines()[1:]]


def test_curves_share_one_scale_and_mark_where_seeds_joined():
    grown = result_of([0.0, 0.5, 0.2, 1.0], ["DORMANT", "BLENDING", "PRUNED", "HOLDING"])
    bare = HostResult("no growth", history=result_of([0.0, 0.5], ["FOSSILIZED"] * 2).history)
    lines = curve_lines([grown, bare], epochs=4)
    assert lines[0].split() == ["grown", "▁▅▂█", "100.0%"]
    assert lines[1].index("▲ ▲") == lines[0].index("▁▅▂█") + 1
    assert [line.split() for line in lines[2:]] == [["no", "growth", "▁▅", "50.0%"]]  # no marks below other hosts


def test_long_curves_are_compressed_and_values_that_are_not_finite_are_gaps():
    epochs = 3 * grow_progress.CURVE_WIDTH
    values = [float("nan"), *(i / epochs for i in range(1, epochs))]
    lines = curve_lines([result_of(values, ["DORMANT"] * epochs)], epochs)
    assert len(lines[0].split()[1]) == grow_progress.CURVE_WIDTH
    assert not any("▲" in line for line in lines)
    assert curve_lines([result_of([float("nan")] * 4, ["DORMANT"] * 4)], 4)[0].split() == ["grown"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("epochs", [1, 2, 40, 1000])
def test_curves_fit_the_console_and_show_the_last_epoch(width, epochs):
    """A seed joins in the last epoch, so its mark is below the last column of the curve."""
    stages = ["DORMANT"] * (epochs - 1) + ["BLENDING"]
    grown = result_of([i / epochs for i in range(1, epochs + 1)], stages)
    other = HostResult("same structure from step 0", history=grown.history[: epochs // 2])
    lines = curve_lines([grown, other], epochs, width)
    assert len(lines) == 3
    assert all(len(line) <= width for line in lines)
    assert not any("…" in line for line in lines)
    assert lines[1].index("▲") == max(lines[0].rfind(block) for block in BLOCKS)
    shown = [len(re.sub("[^▁-█]", "", line)) for line in (lines[0], lines[2])]
    assert shown[1] == (max(1, shown[0] * (epochs // 2) // epochs) if epochs > 1 else 0)
