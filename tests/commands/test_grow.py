"""The end of `esper grow`: what the printed notes and sizes say about seeds that are not part of the network."""

import json
from pathlib import Path

import pytest
import torch

from esper import load_data
from esper.commands.export import Plain
from esper.commands.grow import GrowOptions, run_grow
from esper.commands.growing import GrowSettings
from esper.tolaria.best_host import BEST_HOST, GrownHost


def grown(run: Path, capsys: pytest.CaptureFixture[str], **settings: object) -> tuple[str, dict[str, dict]]:
    """Return the output of `esper grow`, with line breaks as spaces, and its results by the name of the host."""
    run_grow(GrowSettings(task="digits", **settings), GrowOptions(out=run))
    results = json.loads((run / "result.json").read_text())["results"]
    return " ".join(capsys.readouterr().out.split()), {result["name"]: result for result in results}


def test_seed_in_training_is_named_and_neither_counted_compared_nor_exported(tmp_path, capsys):
    printed, results = grown(tmp_path / "run", capsys, controller="schedule", epochs=6, birth="isolated")
    assert list(results) == ["grown", "no growth"]  # no structure has grown that could be trained from the start
    grew, bare = results["grown"], results["no growth"]
    assert grew["history"][-1]["stage"][0] == "TRAINING"
    assert "r0c0: still in training at the end, so not part of the grown network" in printed
    exported = Plain.of(GrownHost.load(tmp_path / "run" / BEST_HOST))
    assert grew["params"] == exported.params == bare["params"] < grew["history"][-1]["params"]


def test_note_says_why_nothing_was_planted(tmp_path, capsys):
    printed, _ = grown(tmp_path / "run", capsys, controller="heuristic", epochs=2, compare=False)
    assert "Nothing was planted in 2 epochs: the heuristic plants from epoch 5 on (first_epoch)." in printed
    assert "still in training" not in printed


def test_note_names_seeds_that_were_planted_too_late(tmp_path, capsys):
    printed, _ = grown(tmp_path / "run", capsys, controller="schedule", epochs=4, compare=False)
    assert "'r0c1': planted at most 10 optimiser steps before the end of training." in printed
    assert "'r0c0'" not in printed  # planted in the first half


def test_single_host_has_no_gain(tmp_path, capsys):
    alone, _ = grown(tmp_path / "alone", capsys, controller="schedule", epochs=1, compare=False)
    assert "Test results accuracy loss parameters 10⁹ MACs grown" in alone
    assert "gain:" not in alone
    compared, results = grown(tmp_path / "compared", capsys, controller="schedule", epochs=1)
    assert f"accuracy gain loss parameters 10⁹ MACs grown {results['grown']['accuracy']:.1%} " in compared
    assert "Validation accuracy, epochs 1 to 1, from" in compared
    assert compared.count("no growth") == 3  # a line while it trains, its curve, its results
    assert "gain: points of test accuracy above the host without growth" in compared


@pytest.mark.filterwarnings("ignore:the model lies outside")
def test_note_says_that_the_host_lies_outside_what_the_policy_was_trained_on(tmp_path, capsys):
    outside, _ = grown(tmp_path / "outside", capsys, controller="tamiyo", epochs=2, compare=False)
    assert "the model lies outside what the policy was trained on" in outside  # digits: a host of another size
    schedule, _ = grown(tmp_path / "schedule", capsys, controller="schedule", epochs=2, compare=False)
    assert "trained on" not in schedule


def test_saved_and_exported_networks_have_the_reported_test_accuracy_and_loss(tmp_path, capsys):
    run = tmp_path / "run"
    run_grow(GrowSettings(task="rescue", controller="schedule", epochs=3), GrowOptions(out=run))
    grew = json.loads((run / "result.json").read_text())["results"][0]
    test = load_data("fashion").test
    plain = torch.export.load(run / "plain.pt2").module()
    for network in (plain, GrownHost.load(run / BEST_HOST).body()):
        with torch.no_grad():
            output = network(test.x)
        assert (output.argmax(1) == test.y).float().mean().item() == pytest.approx(grew["accuracy"], abs=1e-6)
        assert torch.nn.functional.cross_entropy(output, test.y).item() == pytest.approx(grew["loss"], rel=1e-4)
