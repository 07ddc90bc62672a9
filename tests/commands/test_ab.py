"""`esper train --ab`: two runs over the same worlds, each reproducible by its recorded command, and a comparison."""

import sys

import pytest

from esper.commands.ab import run_ab, without
from esper.commands.train import TrainOptions, run_train
from esper.karn.comparison import compare_runs
from esper.leyline.errors import ConfigError
from esper.nissa.run import read_manifest
from esper.nissa.run_list import list_runs
from tests.support.command_line import esper, esper_in_process
from tests.support.compared_runs import write_run

SMALL = {"simulated": True, "rounds": 2, "envs": 4, "epochs": 14, "task": None, "seed": None, "start_from": None}
SETS = ["ppo.minibatches=2", "worlds=4"]


def train_ab(ab, out=None, opens=None, **more):
    run_ab(
        TrainOptions(out=out, compare=False),
        ab,
        preset=None,
        config_file=None,
        sets=SETS,
        more=SMALL | more,
        show=False,
        opens=opens,
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
    assert '"comparison":{"arms":[{"name":"a"' in (tmp_path / "comparison.html").read_text()
    assert {row.name for row in list_runs(tmp_path)} == {"a", "b"}


@pytest.mark.parametrize(
    ("opens", "is_terminal", "display", "is_opened"),
    [(None, True, ":0", True), (None, False, ":0", False), (None, True, "", False), (True, False, "", True),
     (False, True, ":0", False)],
)  # fmt: skip
def test_comparison_is_opened_on_a_terminal_with_a_display(
    opens, is_terminal, display, is_opened, tmp_path, monkeypatch, capsys
):
    for name, quality in (("a", 0.5), ("b", 0.6)):
        write_run(tmp_path / name, [{"quality": quality}], config={"ppo": {"lr": quality}})
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr("esper.commands.ab.run_train", lambda options, **_: options.out)
    train_ab(["ppo.lr=0.05"], tmp_path, opens=opens)
    assert opened == [(tmp_path / "comparison.html").as_uri()] * is_opened
    assert "comparison.html" in capsys.readouterr().out.replace("\n", "")


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
        (["ppo.minibatches=2"], {}, "changes nothing"),
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
    done = esper_in_process("train", "--resume", tmp_path, "--ab", "ppo.lr=1")
    assert done.returncode == 2
    assert "Resume each of them by itself" in done.stderr


def test_options_are_removed_with_their_values():
    assert without(["x", "--ab", "a=1", "--ab=b=2", "--sim", "--out", "d", "--about"], "--ab", "--out") == [
        "x", "--sim", "--about",
    ]  # fmt: skip


def test_workers_train_both_runs(tmp_path):
    done = esper(
        "train", "--sim", "--rounds", "1", "--envs", "4", "--epochs", "6", "--set", "ppo.minibatches=2",
        "--set", "worlds=4", "--workers", "2", "--no-compare", "--ab", "ppo.lr=0.05", "--out", tmp_path / "x",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "b against a" in done.stdout
    assert [sorted(read_manifest(tmp_path / "x" / name)["journal"]) for name in "ab"] == [["0", "1"], ["0", "1"]]
