"""Training and comparing policies from the command line: real files, and a real process for one of the runs."""

import json
import xml.etree.ElementTree as ET
from collections import Counter
from functools import wraps

import pytest
import torch
from safetensors.torch import load_file

from esper.commands.train import TrainOptions, run_train, settings_line
from esper.nissa.journal_reader import read
from esper.nissa.run import read_manifest
from esper.simic import env as env_module
from esper.simic.env import HostBackend
from esper.simic.training.config import load_config
from esper.tolaria.tasks import Task
from tests.support.command_line import esper, esper_in_process

SMALL = ["--rounds", "2", "--envs", "4", "--epochs", "14", "--set", "ppo.minibatches=2", "--set", "worlds=4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the directory of a policy trained very briefly on real hosts."""
    out = tmp_path_factory.mktemp("runs") / "mine"
    done = esper("train", "--task", "digits", *SMALL, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_train_writes_policy_journal_and_report_and_prints_a_table(run):
    out, message = run
    assert {p.name for p in out.iterdir()} >= {
        "manifest.json",
        "events",
        "policy.safetensors",
        "report.html",
        "baselines",
    }
    result = read_manifest(out)
    assert (result["status"], result["controller"], result["env_steps"]) == ("finished", "tamiyo", 2 * 4 * 14)
    assert result["config"]["ppo"]["minibatches"] == 2
    kinds = [e.kind for e in read(out)]
    assert kinds.count("update") == 2
    assert kinds.count("episode") == 8
    assert kinds.count("step") == 2 * 4 * 14
    for row in ("Learning", "learned (mine)", "heuristic", "none", "test accuracy", "report:"):
        assert row in message, row
    assert '"position"' in (out / "report.html").read_text()  # the document that the page draws


def test_eval_compares_a_trained_policy_world_by_world(run, tmp_path):
    out, _ = run
    done = esper_in_process("eval", out, "none", "from-start", "--worlds", "2", "--out", tmp_path / "eval", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [r["name"] for r in result["rows"]] == ["learned (mine)", "none", "same structure from step 0"]
    assert len(result["worlds"]) == 2
    assert result["rows"][1]["utility"]["mean"] == pytest.approx(0.0, abs=1e-6)
    lead = result["rows"][1]["utility_lead"]
    assert lead["low"] <= lead["mean"] <= lead["high"]
    assert json.loads((tmp_path / "eval" / "eval.json").read_text()) == result
    assert ET.parse(tmp_path / "eval" / "eval.svg").getroot().tag.endswith("svg")


def test_trained_policy_grows_another_host(run, tmp_path):
    out, _ = run
    done = esper_in_process(
        "grow", "--task", "rescue", "--epochs", "2", "--no-compare", "--controller", out, "--out", tmp_path / "g"
    )
    assert done.returncode == 0, done.stderr
    assert read_manifest(tmp_path / "g")["status"] == "finished"


def test_simulated_training_is_deterministic_per_seed(tmp_path):
    weights = []
    for name, seed, run_esper in (("a", 0, esper), ("b", 0, esper_in_process), ("c", 1, esper_in_process)):
        done = run_esper("train", "--sim", *SMALL, "--seed", seed, "--no-compare", "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
        weights.append(load_file(tmp_path / name / "policy.safetensors"))
    assert all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())
    assert any(not torch.equal(tensor, weights[2][key]) for key, tensor in weights[0].items())


def test_start_builds_and_probes_the_environments_once(tmp_path, monkeypatch):
    """Each rank loads the data, builds the environments and probes a host for its costs once per start."""
    calls = Counter()
    for owner, name in ((HostBackend, "__init__"), (env_module, "context_of"), (Task, "load_data")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), calls))
    options = {"task": "digits", "rounds": 1, "envs": 2, "epochs": 2, "seed": 0}
    flags = TrainOptions(out=tmp_path / "run", compare=False)
    run_train(flags, preset=None, config_file=None, sets=["ppo.minibatches=1", "worlds=2"], more=options, show=False)
    assert calls == {"__init__": 1, "context_of": 1, "load_data": 1}
    assert list((tmp_path / "run" / "baselines").rglob("*.json"))


def counted(function, calls):
    @wraps(function)
    def wrapper(*args, **kwargs):
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (["--set", "ppo.lrr=1"], "Did you mean 'lr'?"),
        (["--set", "ppo.lr=fast"], "ppo.lr"),
        (["--set", "ppo.clip_ratio=3"], "clip_ratio must lie between 0 and 1"),
        (["--set", "nonsense"], "--set takes a.b=c"),
        (["--preset", "quik"], "Did you mean 'quick'?"),
        (["--task", "resque"], "Did you mean 'rescue'?"),
        (["--set", "fixed.op=WAIT"], "nothing to decide"),
        (["--config", "missing.toml"], "no config file"),
        (["--start-from", "nowhere"], "no policy"),
        (["--telemetry", "loud"], "telemetry level"),
    ],
    ids=lambda v: v[-1] if isinstance(v, list) else "",
)
def test_invalid_arguments_are_reported_in_one_paragraph(requested, message, tmp_path):
    done = esper_in_process("train", "--sim", *requested, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_printed_settings_can_be_read_back(tmp_path):
    config = json.loads(esper_in_process("train", "--preset", "quick", "--set", "ppo.lr=0.5", "--show").stdout)
    assert config["ppo"]["lr"] == 0.5
    (tmp_path / "mine.toml").write_text('task = "quick"\n[ppo]\nlr = 0.25\n')
    shown = esper_in_process("train", "--config", tmp_path / "mine.toml", "--set", "ppo.epochs=2", "--show")
    config = json.loads(shown.stdout)
    assert (config["task"], config["ppo"]["lr"], config["ppo"]["epochs"]) == ("quick", 0.25, 2)


def test_policy_features_are_listed():
    message = esper_in_process("features").stdout
    assert "contribution" in message
    assert "val_loss" in message


def test_settings_line_counts_plans_and_names_other_settings():
    plans = {str(world): {"r0c0": "norm"} for world in range(3)}
    line = settings_line(load_config(sets=["ppo.lr=0.5"], more={"task": "mend_mlp", "plans": plans, "imitation": 2}))
    assert "task=mend_mlp" in line
    assert "plans of 3 worlds" in line
    assert "ppo.lr=0.5" in line
    assert "imitation=2" in line
    assert "r0c0" not in line
    assert "plans" not in settings_line(load_config())
