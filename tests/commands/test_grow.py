"""The end of `esper grow`: what the printed notes and sizes say about seeds that are not part of the network."""

import json
from pathlib import Path

import pytest

from esper.commands.export import Plain
from esper.commands.grow import GrowOptions, run_grow
from esper.commands.growing import Settings
from esper.tolaria.best_host import BEST_HOST, BestHost


def grown(run: Path, capsys: pytest.CaptureFixture[str], **settings: object) -> tuple[str, dict[str, object]]:
    """Grow one host and return the output, with line breaks as spaces, and its result."""
    run_grow(Settings(task="digits", compare=False, **settings), GrowOptions(out=run))
    (result,) = json.loads((run / "result.json").read_text())["results"]
    return " ".join(capsys.readouterr().out.split()), result


def test_seed_in_training_is_named_and_neither_counted_nor_exported(tmp_path, capsys):
    printed, result = grown(tmp_path / "run", capsys, controller="schedule", epochs=6)
    _, bare = grown(tmp_path / "bare", capsys, controller="none", epochs=1)
    assert result["history"][-1]["stage"][0] == "TRAINING"
    assert "r0c0: still in training at the end, so not part of the grown network" in printed
    exported = Plain.of(BestHost.load(tmp_path / "run" / BEST_HOST).host)
    assert result["params"] == exported.params == bare["params"] < result["history"][-1]["params"]


def test_note_says_why_nothing_was_planted(tmp_path, capsys):
    printed, _ = grown(tmp_path / "run", capsys, controller="heuristic", epochs=2)
    assert "Nothing was planted in 2 epochs: the heuristic plants from epoch 5 on (first_epoch)." in printed
    assert "still in training" not in printed
