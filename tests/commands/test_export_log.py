"""`esper export-log`: what each tracker stored equals the journal, number by number; bad calls change nothing."""

import sqlite3

import pytest

from esper.commands.export_log import run_export_log
from esper.leyline.errors import ConfigError, EsperError, UnknownNameError
from tests.support.sample_runs import grow_run, train_run
from tests.support.trackers import esper, loaded, mlflow_metrics, needs, wandb_metrics

QUALITY = "env0/quality"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with two recorded runs, and no tracker's files."""
    root = tmp_path_factory.mktemp("export")
    grow_run(root / "grown")
    train_run(root / "trained", envs=2, rounds=3, epochs=6)
    return root


@pytest.fixture(scope="module")
def expected(place):
    """Return tag → (step, value) of the journal, by the sink that the tests of TensorBoard check."""
    pytest.importorskip("tensorboard")
    scalars = {}
    for name in ("grown", "trained"):
        run_export_log(place / name, "tensorboard", place / f"expected-{name}")
        scalars[name] = loaded(place / f"expected-{name}")
    assert len(scalars["grown"][QUALITY]) == 40
    assert [step for step, _ in scalars["trained"]["update/kl"]] == [1, 2, 3]
    return scalars


def is_same(stored, expected):
    """Return whether two tables tag → (step, value) are the same, with float32 values."""
    assert set(stored) == set(expected)
    for tag, points in expected.items():
        assert [step for step, _ in stored[tag]] == [step for step, _ in points], tag
        assert [v for _, v in stored[tag]] == pytest.approx([v for _, v in points], rel=1e-6, nan_ok=True), tag
    return True


@needs("tensorboard")
def test_tensorboard_files_go_into_the_run_and_are_not_overwritten(place, expected, capsys):
    run_export_log(place / "grown", "tensorboard", None)
    assert f"sent to tensorboard: {place / 'grown' / 'tensorboard'}" in capsys.readouterr().out.replace("\n", "")
    assert is_same(loaded(place / "grown" / "tensorboard"), expected["grown"])
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        run_export_log(place / "grown", "tensorboard", None)


@needs("tensorboard", "accelerate", "wandb")
@pytest.mark.parametrize("name", ["grown", "trained"])
def test_wandb_offline_has_every_number(place, expected, name):
    assert "sent to wandb" in esper(place, "export-log", place / name, "--to", "wandb").stdout
    assert is_same(wandb_metrics(place / name)[0], expected[name])


@needs("tensorboard", "accelerate", "mlflow")
def test_mlflow_has_every_number(place, expected):
    for number, name in enumerate(("grown", "trained")):
        assert "sent to mlflow" in esper(place, "export-log", place / name, "--to", "mlflow").stdout
        assert is_same(mlflow_metrics(place, number)[0], expected[name])


@needs("tensorboard", "accelerate", "trackio")
def test_trackio_has_every_number(place, expected):
    import json

    assert "sent to trackio" in esper(place, "export-log", place / "trained", "--to", "trackio").stdout
    stored = {}
    for file in place.rglob("*.db"):
        with sqlite3.connect(file) as db:
            for (row,) in db.execute("select metrics from metrics where run_name like '%trained%' order by id"):
                values = json.loads(row)
                (axis,) = [key for key in values if key.endswith("/step")]
                for tag, value in values.items():
                    if tag != axis:
                        stored.setdefault(tag, []).append((values[axis], value))
    assert is_same(stored, expected["trained"])


def test_bad_calls_are_refused_with_their_reason(place, tmp_path):
    before = sorted(place.rglob("*"))
    with pytest.raises(UnknownNameError, match="Did you mean 'mlflow'"):
        run_export_log(place / "grown", "mlfow", None)
    with pytest.raises(ConfigError, match="Remove --out"):
        run_export_log(place / "grown", "mlflow", tmp_path)
    with pytest.raises(EsperError, match="manifest"):
        run_export_log(tmp_path / "nowhere", "tensorboard", tmp_path / "tb")
    assert sorted(place.rglob("*")) == before
