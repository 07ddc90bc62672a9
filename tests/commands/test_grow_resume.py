"""`esper grow --resume`: an interrupted run ends bit-identical to an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from esper.commands import grow, growing
from esper.commands.grow import GrowOptions, resume_grow, run_grow
from esper.commands.growing import GrowSettings
from esper.leyline.errors import CheckpointError, ConfigError, RunError
from esper.nissa.hub import NissaHub
from esper.nissa.journal_reader import read
from esper.nissa.journal_writer import JsonlSink
from esper.nissa.run import RunDirectory, read_manifest
from esper.tolaria.checkpoint import Checkpoints
from tests.support.run_outcomes import events, is_whole, restore_signal_handling, wait_for_first_write

SETTINGS = GrowSettings(task="digits", controller="schedule", epochs=17, birth="isolated")
EPOCHS = 4 * 17
ESPER = Path(sys.executable).with_name("esper")


def outcome(run: Path) -> dict[str, Any]:
    """Return what must not depend on interruptions: weights, figures without durations, events without times."""
    figures = json.loads((run / "result.json").read_text())
    for result in figures["results"]:
        del result["seconds"]
    values = [(env, kind, {k: v for k, v in data.items() if k != "wall_s"}) for env, kind, data in events(run)]
    weights = (run / "body.safetensors").read_bytes()
    return {"weights": weights, "figures": figures, "events": values, "program": (run / "plain.pt2").exists()}


@pytest.fixture(autouse=True)
def every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a checkpoint after every epoch, and do not trace the plain model, whose weights are compared anyway."""
    monkeypatch.setattr(growing, "CHECKPOINT_SHARE", 1e9)
    monkeypatch.setattr(grow, "exported_program", lambda *_: b"program")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    run_grow(SETTINGS, GrowOptions(out=run))
    return outcome(run)


def stop_after(epochs: int, monkeypatch: pytest.MonkeyPatch, settings: GrowSettings, run: Path) -> None:
    """Grow until a total number of epochs is done, then stop as SIGTERM requests it."""
    count, take = 0, growing.epoch_figures

    def counted(engine: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count == epochs:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(engine)

    with monkeypatch.context() as patch:
        patch.setattr(growing, "epoch_figures", counted)
        with pytest.raises(SystemExit) as ended:
            run_grow(settings, GrowOptions(out=run))
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("epochs", [1, 9, 14, 16, 17, 20, 34 + 5, 51 + 3])
def test_stopped_run_resumes_bit_for_bit(
    epochs: int,
    uninterrupted: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    stop_after(epochs, monkeypatch, SETTINGS, run)
    message = capsys.readouterr()
    assert f"Resume with: esper grow --resume {run}" in message.out.replace("\n", "")
    assert read_manifest(run)["status"] == "interrupted"
    resume_grow(run, [], GrowOptions())
    resumed = outcome(run)
    assert resumed["weights"] == uninterrupted["weights"]
    assert resumed["figures"] == uninterrupted["figures"]
    assert resumed["events"] == uninterrupted["events"]
    assert is_whole(run)
    manifest = read_manifest(run)
    assert manifest["status"] == "finished"
    assert manifest["env_steps"] == EPOCHS


@pytest.mark.filterwarnings("ignore:the model lies outside")
@pytest.mark.parametrize("controller", ["heuristic", "random", "tamiyo"])
def test_controller_resumes_with_its_memory(controller: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = GrowSettings(task="digits", controller=controller, epochs=20, compare=False, seed=3)
    run_grow(settings, GrowOptions(out=tmp_path / "uninterrupted"))
    stop_after(11, monkeypatch, settings, tmp_path / "run")
    resume_grow(tmp_path / "run", [], GrowOptions())
    assert outcome(tmp_path / "run") == outcome(tmp_path / "uninterrupted")


def test_what_cannot_be_resumed_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = GrowSettings(task="digits", controller="schedule", epochs=3, compare=False)
    run = tmp_path / "run"
    stop_after(1, monkeypatch, settings, run)
    with pytest.raises(ConfigError, match=r"--epochs cannot be given with --resume"):
        resume_grow(run, ["--epochs"], GrowOptions())
    with monkeypatch.context() as patch:
        patch.setattr(growing, "fingerprint", lambda *_: {"torch": "0.1"})
        with pytest.raises(ConfigError, match=r"cannot be resumed bit-exactly: torch: .* Restore these"):
            resume_grow(run, [], GrowOptions())
    resume_grow(run, [], GrowOptions())
    with pytest.raises(ConfigError, match="has finished"):
        resume_grow(run, [], GrowOptions())
    with pytest.raises(RunError, match="is not a run"):
        resume_grow(tmp_path / "nothing", [], GrowOptions())


def test_full_disk_skips_checkpoints_and_the_run_continues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise CheckpointError("no space left")

    monkeypatch.setattr(Checkpoints, "write", full)
    monkeypatch.setattr(grow, "save_models", lambda *_: None)  # the best host is saved by the same function
    settings = GrowSettings(task="digits", controller="schedule", epochs=2, compare=False)
    with pytest.warns(UserWarning, match="The run continues"):
        run_grow(settings, GrowOptions(out=tmp_path / "run"))
    assert read_manifest(tmp_path / "run")["status"] == "finished"


def test_journal_is_synced_to_disk_before_each_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, flush, write = tmp_path / "run", JsonlSink.flush, Checkpoints.write
    synced, written = [-1], 0

    def flush_and_note(self: JsonlSink) -> None:
        flush(self)
        synced.append(max((entry.seq for entry in read(run)), default=-1))

    def write_after_sync(self: Checkpoints, *args: Any, **kwargs: Any) -> Any:
        nonlocal written
        if kwargs.get("kind") == "grow":
            assert synced[-1] >= kwargs["documents"]["run"]["next_seq"] - 1
            written += 1
        return write(self, *args, **kwargs)

    monkeypatch.setattr(JsonlSink, "flush", flush_and_note)
    monkeypatch.setattr(Checkpoints, "write", write_after_sync)
    run_grow(GrowSettings(task="digits", controller="schedule", epochs=3, compare=False), GrowOptions(out=run))
    assert written == 4


def test_checkpoint_is_deferred_while_the_journal_cannot_be_flushed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(NissaHub, "flush", lambda self, timeout=10.0: False)
    settings = GrowSettings(task="digits", controller="schedule", epochs=3, compare=False)
    with pytest.warns(UserWarning, match="this checkpoint is postponed"):
        run_grow(settings, GrowOptions(out=tmp_path / "run"))
    assert Checkpoints(tmp_path / "run" / "checkpoints").names() == ["grown-00000", "grown-00003"]


@pytest.mark.parametrize("is_removed", [False, True], ids=["moved", "removed"])
def test_run_whose_directory_is_moved_or_removed_ends(
    is_removed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(growing, "CHECKPOINT_SHARE", 0.0)  # no checkpoint is due after the epoch
    epochs, take = [], growing.epoch_figures

    def moved(engine: Any) -> dict[str, Any]:
        epochs.append(take(engine))
        if len(epochs) == 2:
            (tmp_path / "run").rename(tmp_path / "elsewhere")
            if is_removed:
                shutil.rmtree(tmp_path / "elsewhere")
        return epochs[-1]

    monkeypatch.setattr(growing, "epoch_figures", moved)
    with pytest.raises(RunError, match="was moved or removed during the run"):
        run_grow(GrowSettings(task="digits", controller="none", epochs=9), GrowOptions(out=tmp_path / "run"))
    assert len(epochs) == 2
    assert not (tmp_path / "run").exists()


def test_resume_takes_the_lock_before_it_chooses_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, choose, rivals = tmp_path / "run", grow.checkpoint_of, []
    stop_after(1, monkeypatch, GrowSettings(task="digits", controller="none", epochs=2), run)

    def chosen(*args: Any) -> Any:
        with pytest.raises(RunError, match=r"owned by a running process \(pid") as error:
            RunDirectory.resume(run)
        rivals.append(error.value)
        return choose(*args)

    monkeypatch.setattr(grow, "checkpoint_of", chosen)
    resume_grow(run, [], GrowOptions())
    assert len(rivals) == 1


@pytest.mark.slow
@pytest.mark.parametrize("chance", [0, 1])
def test_run_killed_at_random_moments_ends_bit_identical(
    chance: int, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    """Kill real processes with SIGKILL, each up to a second after it begins to write; the last one may finish."""
    rng, run, kills = random.Random(chance), tmp_path / "run", 2
    command = [str(ESPER), "grow", "--task", "digits", "--epochs", "17", "--birth", "isolated", "--out", str(run)]
    for session in range(kills + 1):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=restore_signal_handling
        )
        wait_for_first_write(run, process, begun=run.exists())
        try:
            _, message = process.communicate(timeout=rng.random() if session < kills else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            if (run / "manifest.json").exists() and read_manifest(run)["status"] == "finished":
                break  # killed while it wrote its report
            if (run / "checkpoints").is_dir() and Checkpoints(run / "checkpoints").newest() is not None:
                command = [str(ESPER), "grow", "--resume", str(run)]
            elif run.exists():  # killed before its first checkpoint: start again elsewhere
                run = tmp_path / f"run-{time.monotonic_ns()}"
                command[-1] = str(run)
            continue
        assert process.returncode == 0, message.decode()
        break
    assert read_manifest(run)["status"] == "finished"
    resumed = outcome(run)
    assert resumed["weights"] == uninterrupted["weights"]
    assert resumed["figures"] == uninterrupted["figures"]
    assert resumed["events"] == uninterrupted["events"]
    assert is_whole(run)
