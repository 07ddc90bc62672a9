"""Events for trackers, and what each tracker stored of them."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec

import pytest

from esper.leyline.events import Episode, RunStarted, Step, Update
from tests.support import command_line

OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true", "OMP_NUM_THREADS": "1"}


def step(env=0, episode=0, step=1, **fields):
    plain = {"world": 0, "op": "wait", "quality": 0.5, "committed_quality": 0.4, "val_loss": 1.0, "train_loss": None}
    seeds = {"params": 10, "stages": (0, 3), "alphas": (0.0, 0.25), "blueprints": ("", "conv_light")}
    return Step(env=env, episode=episode, step=step, **plain | seeds | fields)


def update(round, **fields):
    names = ("policy_loss", "value_loss", "entropy_loss", "kl", "clip_fraction", "ratio_min", "ratio_max")
    more = ("explained_variance", "value_nrmse", "grad_norm", "lr")
    plain = dict.fromkeys(names + more, 0.5) | {"epochs": 2, "minibatches": 4}
    return Update(round=round, **plain | fields)


STARTED = RunStarted(
    run_id="r1", command="train", task="t", controller="c", seed=1, env_names=("a", "b"), slots=("r0c0", "r0c1"),
    steps=20, rounds=3, host_params=100,
)  # fmt: skip
EPISODE = Episode(
    env=1, episode=0, world=0, name="a", steps=20, quality=math.nan, quality_best=None, baseline_quality=0.25,
    params=120, host_params=100, germinated=3, fossilized=1, pruned=2, structure={},
)  # fmt: skip


def needs(*packages):
    """Skip a test if one of these packages is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def esper(tmp_path, *args):
    """Run `esper` in a directory with trackers that store their files there, and must not fail."""
    settings = OFFLINE | {"MLFLOW_TRACKING_URI": f"file:{tmp_path / 'mlruns'}", "TRACKIO_DIR": str(tmp_path)}
    done = command_line.esper(*args, env=settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done


# -- what each tracker stored: tag → (step, value)


def loaded(folder):
    """Read the scalars of TensorBoard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def mlflow_metrics(tmp_path, number=0):
    """Read the metrics and settings of a run in the file store of MLflow."""
    runs = sorted((tmp_path / "mlruns").glob("*/*/meta.yaml"), key=lambda file: file.parent.stat().st_ctime_ns)
    assert "end_time: null" not in runs[number].read_text()
    folder = runs[number].parent
    metrics = {}
    for file in (folder / "metrics").rglob("*"):
        if file.is_file():
            rows = [line.split() for line in file.read_text().splitlines()]
            metrics[str(file.relative_to(folder / "metrics"))] = [(int(row[2]), float(row[1])) for row in rows]
    settings = {file.name: file.read_text() for file in (folder / "params").iterdir()}
    return metrics, settings


def wandb_metrics(run, number=0):
    """Read a W&B transaction log: LevelDB blocks of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    file = sorted((run / "wandb").glob("offline-run-*/*.wandb"))[number]
    metrics, settings = {}, {}
    for data in log_records(file.read_bytes()):
        entry = WandbRecord()
        entry.ParseFromString(data)
        if entry.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in entry.history.item}
            (axis,) = [key for key in row if key.endswith("/step")]
            for key, value in row.items():
                if key != axis and not key.startswith("_"):
                    metrics.setdefault(key, []).append((row[axis], value))
        for item in [*entry.config.update, *entry.run.config.update]:
            settings[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return metrics, settings


def log_records(content, block=32768):
    """Yield the records of a LevelDB log."""
    whole, at = b"", 7
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a complete record, or its last part
            yield whole
            whole = b""
