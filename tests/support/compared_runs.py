"""Runs and evaluations with given outcomes, for tests of comparisons."""

from __future__ import annotations

import json

from esper.leyline.events import Decision, Episode
from tests.support.sample_runs import Journal, started, step

EPISODE = {
    "name": "env",
    "steps": 2,
    "quality_best": 0.5,
    "host_params": 100,
    "germinated": 0,
    "fossilized": 0,
    "pruned": 0,
}


CONFIG = {"ppo": {"lr": 0.1}, "seed": 3, "task": "rescue"}


def decided(step, op="GERMINATE", **fields):
    return {"step": step, "op": op, "slot": "r0c0", "blueprint": "norm", "happened": True, "legal_ops": ()} | fields


def write_run(path, outcomes, *, command="train", config=CONFIG, task="rescue", env_names=None, steps=True):
    """Write a run. `outcomes`: one dict per finished episode; env is its position unless given."""
    names = env_names or tuple(f"env {e}" for e in range(len(outcomes)))
    journal = Journal(path, config=config, controller="tamiyo", task=task)
    journal.write(started(command=command, task=task, env_names=names))
    for e, outcome in enumerate(outcomes):
        fields = {"env": e, "episode": 1, "world": e, "quality": 0.5, "params": 100, "structure": {}} | outcome
        decisions, macs = fields.pop("decisions", []), fields.pop("macs", 1000)
        place = {name: fields[name] for name in ("env", "episode")}
        for n in (1, 2) if steps else ():
            journal.write(step(n, **place, world=fields["world"], train_macs=n * macs // 2))
        for decision in decisions:
            journal.write(Decision(**place, **decision))
        journal.write(Episode(**EPISODE | fields))
    return journal.close()


def evaluation(*rows, worlds=(100, 101), task="rescue"):
    def figure(values):
        return {"mean": 0.0, "sd": 0.0, "worlds": values}

    listed = [
        {"name": name, "quality": figure(values), "test": None, "utility": figure(values), "params": figure([1, 1]),
         "macs": None, "structures": [{"r0c0": "norm"}, {}]}
        for name, values in rows
    ]  # fmt: skip
    return {"task": task, "worlds": list(worlds), "rows": listed}


def write_evaluation(path, *rows, **fields):
    path.mkdir()
    (path / "eval.json").write_text(json.dumps(evaluation(*rows, **fields)))
    return path
