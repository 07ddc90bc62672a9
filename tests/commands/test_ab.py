"""`esper train --ab`: two runs over the same worlds, each reproducible by its recorded command, and a comparison."""

import sys

import pytest

from esper.commands.ab import run_ab, without
from esper.commands.train import TrainOptions, run_train
from esper.karn.comparison import compare_runs
from esper.leyline.errors import ConfigError
from esper.nissa.run import read_manifest
from tests.commands.test_train import esper

SMALL = {"simulated": True, "rounds": 2, "envs": 4, "epochs": 14, "task": None, "seed": None, "start_from": None}
SETS = ["ppo.groups=2", "worlds=4"]


def train_ab(ab, out=None, **more):
    run_ab(
        TrainOptions(out=out, compare=False),
        ab,
        preset=None,
        config_file=None,
        sets=SETS,
        more=SMALL | more,
        show=False,
    )


def test_both_settings_are_trained_over_the_same_worlds_and_compared(tmp_path, capsys, monkeypatch):
    command = ["esper", "train", "--sim", "--ab", "ppo.lr=0.05", "--out", "x"]
    monkeypatch.setattr(sys, "argv", command)
    train_ab(["ppo.lr=0.05"], tmp_path)
    assert sys.argv == command
    printed = capsys.readouterr().out
    assert "b against a: last finished episode in each world, 4 worlds" in printed.replace("\n", " ")
    assert "ppo.lr=0.05" in printed
    manifests = [read_manifest(tmp_path / name) for name in "ab"]
    assert [m["config"]["ppo"]["lr"] for m in manifests] == [0.001, 0.05]
    assert [m["command"] for m in manifests] == [
        f"esper train --sim --out {tmp_path}/a",
        f"esper train --sim --set ppo.lr=0.05 --out {tmp_path}/b",
    ]
    (pair,) = compare_runs([tmp_path / "a", tmp_path / "b"]).pairs
    assert pair.worlds == [0, 1, 2, 3]


def test_second_run_does_not_depend_on_the_first(tmp_path):
    train_ab(["ppo.lr=0.05"], tmp_path / "both")
    run_train(
        TrainOptions(out=tmp_path / "alone", compare=False), preset=None, config_file=None, more=SMALL, show=False,
        sets=[*SETS, "ppo.lr=0.05"],
    )  # fmt: skip
    policies = [(tmp_path / name / "policy.safetensors").read_bytes() for name in ("both/a", "both/b", "alone")]
    assert policies[1] == policies[2]
    assert policies[0] != policies[1]


@pytest.mark.parametrize(
    ("ab", "more", "message"),
    [
        (["seed=3"], {"seed": 1}, "Use --set seed=… instead of --seed"),
        (["simulated=false"], {}, "Use --set simulated=… instead of --sim"),
        (["task=digits"], {"simulated": None}, "--ab cannot change the task"),
        (["ppo.groups=2"], {}, "changes nothing"),
        (["ppo.lrr=2"], {}, "Did you mean 'lr'"),
        (["ppo"], {}, "takes a.b=c"),
    ],
)
def test_invalid_settings_are_refused_before_training(ab, more, message, tmp_path):
    with pytest.raises(Exception, match=message) as caught:
        train_ab(ab, tmp_path / "out", **more)
    assert isinstance(caught.value, ConfigError | KeyError)
    assert not (tmp_path / "out").exists()


def test_resuming_both_at_once_is_refused(tmp_path):
    done = esper("train", "--resume", tmp_path, "--ab", "ppo.lr=1")
    assert done.returncode == 2
    assert "Resume each of them by itself" in done.stderr


def test_options_are_removed_with_their_values():
    assert without(["x", "--ab", "a=1", "--ab=b=2", "--sim", "--out", "d", "--about"], "--ab", "--out") == [
        "x", "--sim", "--about",
    ]  # fmt: skip


def test_workers_train_both_runs(tmp_path):
    done = esper(
        "train", "--sim", "--rounds", "1", "--envs", "4", "--epochs", "6", "--set", "ppo.groups=2", "--set", "worlds=4",
        "--workers", "2", "--no-compare", "--ab", "ppo.lr=0.05", "--out", tmp_path / "x",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "b against a" in done.stdout
    assert [sorted(read_manifest(tmp_path / "x" / name)["journal"]) for name in "ab"] == [["0", "1"], ["0", "1"]]
