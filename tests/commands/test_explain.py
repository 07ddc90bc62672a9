"""`esper explain` and `esper features` on runs of `esper train` and `esper grow`."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from esper.commands.explain import life_table, run_explain, seed_life
from esper.commands.explained_run import MOST_INFLUENCES, explain_run
from esper.commands.features import run_features
from esper.commands.grow import GrowOptions, run_grow
from esper.commands.growing import GrowSettings
from esper.leyline.errors import ConfigError, DataError
from esper.leyline.run_files import DECISIONS
from esper.nissa.recorder import record
from esper.simic.training.config import load_config
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tamiyo.decision_record import DecisionRecord
from esper.tamiyo.explanation import explain, importances, operations

SETS = ["task=digits", "rounds=2", "envs=2", "worlds=2", "epochs=10", "ppo.minibatches=1", "network.width=16",
        "network.patience=0.0", "checkpoint_share=1"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "trained"
    with record("digits", out=path) as run:
        train_ppo_vectorized(load_config(sets=SETS), run.hub, directory=run.path)
    return path


@pytest.fixture(scope="module")
def grown(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "grown"
    settings = GrowSettings(task="digits", controller=str(trained), epochs=10, compare=False)
    run_grow(settings, GrowOptions(out=path))
    return path


@pytest.mark.parametrize("kind", ["trained", "grown"])
def test_decision_is_explained_with_the_life_of_its_seed(
    kind: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    run = request.getfixturevalue(kind)
    capsys.readouterr()
    run_explain(run, env=0, step=None, as_json=True)
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["op"] == "GERMINATE"
    assert sum(explanation["ops"].values()) == pytest.approx(1.0, abs=1e-4)
    assert explanation["influences"][0]["effect"] != 0.0
    moves, end = explanation["seed"][:-1], explanation["seed"][-1]
    assert (moves[0]["step"], moves[0]["was"], moves[0]["now"]) == (explanation["step"], "DORMANT", "GERMINATED")
    assert moves[0]["cause"] == "controller"
    assert {move["blueprint"] for move in moves} == {explanation["heads"]["blueprint"]}
    assert end["now"] == "end of the episode"
    assert end["quality"] > 0


def test_explanation_is_readable_and_names_other_steps(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_explain(trained, env=1, step=None, as_json=False)
    out = capsys.readouterr().out
    for part in ("steps with an operation", "environment 1", "probabilities of the alternatives", "effect",
                 "What happened to the seed"):  # fmt: skip
        assert part in out, part


def test_seed_of_an_operation_is_followed_from_its_step_on(trained: Path) -> None:
    decisions = DecisionRecord.load(trained)
    first = explain(decisions, 0, 1)
    for row in seed_life(trained, decisions, first):
        assert row["step"] >= 1
    console = Console(width=100, file=io.StringIO())
    console.print(life_table([{"step": 3, "now": "end of the episode", "quality": 0.5, "utility": None}]))
    assert "quality 0.500" in console.file.getvalue()  # type: ignore[attr-defined]


def test_importance_of_every_feature_is_listed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_features(trained, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    listed = {(row["scope"], row["name"]) for row in rows}
    run_features(None, as_json=True)
    assert listed == {(row["scope"], row["name"]) for row in json.loads(capsys.readouterr().out)}
    assert [row["nats"] for row in rows] == sorted((row["nats"] for row in rows), reverse=True)
    run_features(trained, as_json=False)
    out = capsys.readouterr().out
    assert "20 decisions in 2 environments" in out
    assert "constant in these decisions: " in out


def test_page_gets_the_explanations_of_the_command(trained: Path, tmp_path: Path) -> None:
    decisions = DecisionRecord.load(trained)
    steps = list(operations(decisions, 1))
    explained = explain_run(trained, 1)
    assert explained is not None
    assert [row["step"] for row in explained["rows"]] == steps[: len(explained["rows"])]
    whole = asdict(explain(decisions, 1, steps[0]))
    assert explained["rows"][0] == whole | {"influences": whole["influences"][:MOST_INFLUENCES]}
    features = explain_run(trained, None)
    assert features is not None
    assert features["rows"] == [each.as_row() for each in importances(decisions)]
    missing = explain_run(trained, 2)
    assert missing is not None
    assert (missing["is_recorded"], missing["rows"]) == (False, [])
    assert explain_run(tmp_path, 0) is None
    (tmp_path / DECISIONS).write_bytes(b"no tensors")
    damaged = explain_run(tmp_path, 0)
    assert damaged is not None
    assert "is damaged" in damaged["damage"]


def test_runs_without_decisions_and_wrong_steps_are_reported(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps 1 to 10"):
        run_explain(trained, env=0, step=11, as_json=False)
    with pytest.raises(ConfigError, match="environments 0 to 1"):
        run_explain(trained, env=2, step=None, as_json=False)
    with record("other", out=tmp_path / "other"):
        pass
    with pytest.raises(DataError, match="no recorded decisions"):
        run_explain(tmp_path / "other", env=0, step=1, as_json=False)
    with pytest.raises(DataError, match="no recorded decisions"):
        run_features(tmp_path / "other", as_json=False)
