"""Recording: every run records how it ended, and recording never changes what is learnt."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.leyline.errors import ConfigError
from esper.leyline.events import Level, NullReceiver, Step
from esper.leyline.lifecycle import legal
from esper.nissa.hub import NissaHub
from esper.nissa.journal_reader import read
from esper.nissa.recorder import record
from esper.nissa.run import read_manifest
from esper.simic.attribution import CounterfactualHelper
from esper.simic.telemetry.emitters import TelemetryEmitter
from esper.tamiyo.controllers import Schedule
from esper.tolaria.engine import Engine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.tasks import get_task
from tests.support.command_line import ESPER, esper, esper_in_process
from tests.support.journal_checks import missing_seqs
from tests.support.run_outcomes import restore_signal_handling


class RaisingSink:
    def write(self, _records):
        raise RuntimeError("full")

    def close(self):
        pass


class HangingSink:
    def __init__(self):
        self.let_go = threading.Event()

    def write(self, _records):
        self.let_go.wait(60)

    def close(self):
        self.let_go.set()


class KindsSink:
    def __init__(self):
        self.kinds = set()

    def write(self, records):
        self.kinds |= {type(r.event).__name__ for r in records}

    def close(self):
        pass


def trained(hub, level=Level.NORMAL) -> str:
    """Return the hash of every weight and of the table after a short scheduled run recorded by `hub`."""
    torch.manual_seed(0)
    engine = Engine(get_task("digits"), [0, 1])
    emit = TelemetryEmitter(hub, slots=engine.task.slots, worlds=[0, 1], host_params=1, level=level)
    controller, helper = Schedule(), CounterfactualHelper()
    for _ in range(14):
        allowed = legal(engine.table, engine.rules)
        actions = controller.act(engine.table, allowed)
        emit.step(engine.table, actions, engine.step(actions), allowed)
        emit.worth(engine.table, helper.process_batch(engine))
        emit.phases(engine.phases)
    digest = hashlib.sha256()
    for network in engine.networks:
        for name, tensor in network.body.state_dict().items():
            digest.update(name.encode() + tensor.numpy().tobytes())
    for array in engine.table.arrays().values():
        digest.update(array.tobytes())
    return digest.hexdigest()


def test_recording_never_changes_what_is_learnt():
    alone = trained(NullReceiver())
    for level in Level:
        sink = KindsSink()
        with NissaHub([sink], level=level, strict=True) as hub:
            assert trained(hub, level) == alone, level
        assert ("Step" in sink.kinds) == (level >= Level.NORMAL)
    with NissaHub([RaisingSink()], strict=True) as hub:
        assert trained(hub) == alone
    hanging = HangingSink()
    hub = NissaHub([hanging, KindsSink()], hang_s=0.2, strict=True)
    try:
        assert trained(hub) == alone
        deadline = time.monotonic() + 30
        while not hub.health()["sinks"]["HangingSink"]["retired"]:  # noticed by whoever looks, a moment after hang_s
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        hanging.let_go.set()
        hub.close()


@pytest.mark.parametrize("stride", [1, 3, 50])
def test_gradient_sampling_rate_never_changes_what_is_learnt(stride):
    """The table's gradient columns are the sampled ones; the weights are the same."""

    def weights(every: int) -> torch.Tensor:
        engine = Engine(get_task("digits"), [0], config=EngineConfig(gradient_telemetry_stride=every))
        controller = Schedule()
        for _ in range(14):
            engine.step(controller.act(engine.table, legal(engine.table, engine.rules)))
        assert np.isfinite(engine.table.grad_norm[0, 0])
        return torch.cat([p.detach().flatten() for p in engine.networks[0].body.parameters()])

    assert torch.equal(weights(10), weights(stride))


def test_tensorboard_reads_what_was_recorded(tmp_path):
    with record("mine", out=tmp_path / "run", tensorboard=True) as run:
        run.emit(step(1))
    accumulator = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    accumulator.Reload()
    assert any("quality" in tag for tag in accumulator.Tags()["scalars"])


def step(i: int) -> Step:
    return Step(env=0, episode=0, step=i, world=0, op="WAIT", quality=0.5, committed_quality=None, val_loss=1.0,
                train_loss=1.0, params=1, stages=(), alphas=(), blueprints=())  # fmt: skip


def test_finished_run_is_recorded_in_manifest_and_journal(tmp_path):
    with record("mine", root=tmp_path, manifest={"seed": 3}) as run:
        for i in range(100):
            run.emit(step(i))
        run.env_steps = 100
    result = read_manifest(run.path)
    assert (result["status"], result["seed"], result["env_steps"]) == ("finished", 3, 100)
    entries = list(read(run.path))
    assert [e.kind for e in entries[-2:]] == ["run_finished", "health"]
    assert entries[-2].data["status"] == "finished"
    assert not any(missing_seqs(entries).values())
    assert len(entries) == 102


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("no"), "failed"), (KeyboardInterrupt(), "interrupted"), (SystemExit(3), "failed")]
)
def test_failed_run_records_its_error(tmp_path, error, status):
    def raise_in_run() -> None:
        with record("mine", out=tmp_path / "run") as run:
            run.emit(step(0))
            raise error

    with pytest.raises(type(error)):
        raise_in_run()
    assert read_manifest(tmp_path / "run")["status"] == status
    (finished,) = [e for e in read(tmp_path / "run") if e.kind == "run_finished"]
    assert finished.data["status"] == status
    assert (finished.data["error"] is None) == (status == "interrupted")


def start_growing(place: Path) -> tuple[subprocess.Popen, Path]:
    command = [str(ESPER), "grow", "--task", "digits", "--epochs", "4000", "--no-compare", "--out", "run"]
    process = subprocess.Popen(
        command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=restore_signal_handling,
    )  # fmt: skip
    journal = place / "run" / "events" / "rank0-00000.jsonl"
    end = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b'"kind":"step"') > 5):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.05)
    return process, place / "run"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_stopped_grow_leaves_a_complete_journal(tmp_path, number, code):
    process, run = start_growing(tmp_path)
    process.send_signal(number)
    assert process.wait(120) == code
    assert "Traceback" not in process.stderr.read()
    assert read_manifest(run)["status"] == "interrupted"
    entries = list(read(run))
    assert [e.kind for e in entries[-2:]] == ["run_finished", "health"]
    assert not any(missing_seqs(entries).values())


def test_killed_grow_keeps_all_events_its_journal_held(tmp_path):
    process, run = start_growing(tmp_path)
    before = list(read(run))
    os.kill(process.pid, signal.SIGKILL)
    process.wait(120)
    assert read_manifest(run)["status"] == "killed"
    entries = list(read(run))
    assert not any(missing_seqs(entries).values())
    assert entries[: len(before)] == before
    json.loads((run / "manifest.json").read_text())


@pytest.mark.parametrize("place", ["afile/x", "dangling", "x" * 300, "bad\udcff"])
def test_unusable_run_directory_gives_one_line_and_exit_code_2(tmp_path, place):
    (tmp_path / "afile").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at" / "all")
    run = esper_in_process if place.isprintable() else esper  # a name that is not UTF-8 needs a real standard error
    done = run("grow", "--task", "digits", "--epochs", "1", "--no-compare", "--out", place, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("esper: ")


def test_odd_names_are_shown_verbatim_even_on_ascii_output(tmp_path):
    name = "[/b]x a*b?[c] ü ö"
    done = esper(
        "grow", "--task", "digits", "--epochs", "1", "--no-compare", "--out", name,
        cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"report: {name}/report.html".encode("ascii", "replace").decode() in done.stdout


def test_directory_removed_during_a_run_is_reported(tmp_path, capsys):
    def remove_run() -> None:
        with record("mine", out=tmp_path / "run") as run:
            shutil.rmtree(run.path)

    remove_run()
    assert "the manifest could not be written" in capsys.readouterr().err


def test_sink_without_its_two_methods_is_refused(tmp_path):
    def refused() -> None:
        with record("mine", out=tmp_path / "run", sinks=[object()]):
            pass

    with pytest.raises(ConfigError, match=r"write\(records\) and close\(\)"):
        refused()
