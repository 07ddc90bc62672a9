"""`scripts/fit_simulator.py`: it records episodes, writes a config file for training, and repeats a fit."""

from __future__ import annotations

import warnings
from pathlib import Path

import msgspec
import pytest

from esper.simic.simulated_worlds import SimConfig
from esper.simic.training.config import load_config
from scripts import fit_simulator

FAMILY = """
name = "few"
datasets = ["digits"]
widths = [2]
blocks = [1, 2]
epochs = [8]
batch = [8]
batches_per_epoch = 2
val_size = 32
blueprints = ["conv_small"]
"""


def test_fit_is_saved_and_repeated_from_its_file(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.toml").write_text(FAMILY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_simulator.main(["few.toml", "--worlds", "4", "--save"])
    saved = tmp_path / "studies" / "simulator_fit" / "few.json"
    result = msgspec.json.decode(saved.read_bytes(), type=fit_simulator.Fit)
    assert result.command == "python scripts/fit_simulator.py few.toml --worlds 4"
    assert {each.slots for each in result.recordings} == {2, 4}
    assert result.settings.blueprints == ("conv_small",)
    assert {len(figures) for figures in result.gap.values()} == {3}
    printed = capsys.readouterr().out
    assert all(name in printed for name in result.gap)

    config = load_config(file=saved.with_suffix(".toml"))
    assert config.simulated
    assert config.sim == result.settings != SimConfig()

    fit_simulator.main(["few.toml", "--recorded", "--out", "again.toml"])
    assert (tmp_path / "again.toml").read_text() == saved.with_suffix(".toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["few.toml", "--recorded"], "there is no file"),
        (["few.toml", "--out", "nowhere/x.toml"], "there is no directory nowhere"),
        (["short.toml", "--worlds", "4"], "at least 8 epochs, 'short.toml' has some of 4"),
        (["rescue", "--worlds", "2"], "a fit needs 4 to 10000 training worlds, got 2"),
    ],
)
def test_wrong_use_is_an_error_of_one_line(arguments, message, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.toml").write_text(FAMILY.replace("epochs = [8]", "epochs = [4, 8]"))
    with pytest.raises(SystemExit, match=message):
        fit_simulator.main(arguments)
