"""Resuming: an interrupted run ends with the same weights, optimiser, random generators and events."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from esper.commands import train
from esper.commands.resuming import must_fit
from esper.commands.train import TrainOptions, last_checkpoint
from esper.leyline.errors import CheckpointError, ConfigError, RunError
from esper.leyline.events import NullReceiver, unspelled
from esper.nissa.journal_reader import read
from esper.nissa.journal_writer import JsonlSink
from esper.nissa.recorder import record, record_on
from esper.nissa.run import RunDirectory, is_owned
from esper.simic.agent.ppo import PPO
from esper.simic.env import GrowthVectorEnv
from esper.simic.evaluation.no_growth_baseline import NoGrowthBaselines
from esper.simic.training import checkpointer as store
from esper.simic.training.checkpointer import CHECKPOINTS, Checkpointer, TrainingState, differences, run_metadata
from esper.simic.training.config import TrainConfig, load_config
from esper.simic.training.distributed import ProcessGroup
from esper.simic.training.heartbeat import RankLostError
from esper.simic.training.vectorized import make_env, train_ppo_vectorized
from esper.tolaria.best_host import GrownHost
from esper.tolaria.checkpoint import Checkpoints, Saved
from tests.support.run_outcomes import Outcome, is_whole, outcome_of

SIM = load_config(
    sets=["simulated=true", "rounds=4", "envs=5", "worlds=8", "epochs=15", "ppo.minibatches=2", "network.width=16",
          "network.patience=0.5", "checkpoint_share=1"]
)  # fmt: skip
HOSTS = load_config(
    sets=["task=digits", "rounds=3", "envs=2", "worlds=3", "epochs=12", "ppo.minibatches=2", "network.width=16",
          "network.patience=0.5", "checkpoint_share=1"]
)  # fmt: skip


SIMULATED: Any = SimpleNamespace(data_hash="simulated")


class Interrupted(Exception):
    """Represents whatever ends a process."""


class Countdown:
    """A callable that raises at its n-th call."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, *_: Any, **__: Any) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise Interrupted


def start(config: TrainConfig, run: Path, **kwargs: Any) -> None:
    with record("test", out=run, level="debug") as recorded:
        train_ppo_vectorized(config, recorded.hub, directory=run, **kwargs)


def newest(run: Path) -> Saved:
    saved = Checkpoints(run / CHECKPOINTS).newest()
    assert saved is not None
    return saved


def restored(saved: Saved, env: GrowthVectorEnv) -> Checkpointer:
    """Load a checkpoint of a run on hosts into a new training state."""
    checkpointer = Checkpointer(HOSTS, saved.path.parent.parent, NullReceiver(), ProcessGroup())
    checkpointer.restore(saved, TrainingState.new(HOSTS, env.layout, resumed=True), env.backend)
    return checkpointer


def resume_training(config: TrainConfig, run: Path, **kwargs: Any) -> None:
    saved = newest(run)
    with record_on(run, run_metadata(saved)["next_seq"], level="debug") as recorded:
        train_ppo_vectorized(config, recorded.hub, directory=run, resume=saved, **kwargs)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return the outcomes of the uninterrupted runs."""
    home = tmp_path_factory.mktemp("uninterrupted")
    for name, config in (("sim", SIM), ("hosts", HOSTS)):
        start(config, home / name)
        assert is_whole(home / name)
    return {name: outcome_of(home / name) for name in ("sim", "hosts")}


@pytest.mark.parametrize("calls", [1, 2, 15, 16, 17, 31, 44, 60])
def test_run_interrupted_at_any_step_ends_bit_identical(
    calls: int, uninterrupted: dict[str, Outcome], tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        start(SIM, tmp_path / "run", poll=Countdown(calls))
    resume_training(SIM, tmp_path / "run")
    assert outcome_of(tmp_path / "run") == uninterrupted["sim"]
    assert is_whole(tmp_path / "run")


@pytest.mark.parametrize(
    ("where", "name", "calls"),
    [(PPO, "_step", 3), (PPO, "_check", 2), (Checkpointer, "_save_policy", 3), (Checkpoints, "write", 2),
     (Checkpoints, "write", 4), (TrainingState, "state_dict", 3)],
)  # fmt: skip
def test_interruption_in_an_update_or_checkpoint_changes_nothing(
    where: type,
    name: str,
    calls: int,
    uninterrupted: dict[str, Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, countdown = getattr(where, name), Countdown(calls)

    def counted(*args: Any, **kwargs: Any) -> Any:
        countdown()
        return real(*args, **kwargs)

    monkeypatch.setattr(where, name, counted)
    with pytest.raises(Interrupted):
        start(SIM, tmp_path / "run")
    monkeypatch.undo()
    resume_training(SIM, tmp_path / "run")
    assert outcome_of(tmp_path / "run") == uninterrupted["sim"]
    assert is_whole(tmp_path / "run")


def test_run_interrupted_in_every_round_ends_bit_identical(uninterrupted: dict[str, Outcome], tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        start(SIM, tmp_path / "run", poll=Countdown(9))
    for calls in (3, 18, 30, 22):
        with pytest.raises(Interrupted):
            resume_training(SIM, tmp_path / "run", poll=Countdown(calls))
    resume_training(SIM, tmp_path / "run")
    assert outcome_of(tmp_path / "run") == uninterrupted["sim"]
    assert is_whole(tmp_path / "run")


def test_run_of_real_hosts_resumes_bit_for_bit_from_step_and_baseline(
    uninterrupted: dict[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoGrowthBaselines, "_write", Countdown(2))
    with pytest.raises(Interrupted):
        start(HOSTS, tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(Interrupted):
        resume_training(HOSTS, tmp_path / "run", poll=Countdown(20))
    resume_training(HOSTS, tmp_path / "run")
    assert outcome_of(tmp_path / "run") == uninterrupted["hosts"]
    assert is_whole(tmp_path / "run")


SMALLER = ["simulated=true", "envs=4", "worlds=8", "epochs=8", "network.width=16", "checkpoint_share=1"]


def test_run_can_be_extended_to_more_rounds(tmp_path: Path) -> None:
    less, more = (
        load_config(sets=[*SMALLER, "ppo.entropy_final=0.01", f"rounds={rounds}"]) for rounds in (2, 3)
    )  # the entropy weight is constant, so nothing depends on the planned number of rounds
    start(more, tmp_path / "more")
    start(less, tmp_path / "less")
    resume_training(more, tmp_path / "less")
    assert outcome_of(tmp_path / "less") == outcome_of(tmp_path / "more")


def damaged(saved: Saved) -> None:
    for file in saved.path.iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"?")


def test_damaged_checkpoint_is_named_and_the_previous_one_used(
    uninterrupted: dict[str, Outcome], tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        start(SIM, tmp_path / "run", poll=Countdown(50))
    last = newest(tmp_path / "run")
    damaged(last)
    with pytest.warns(UserWarning, match=last.name):
        resume_training(SIM, tmp_path / "run")
    with pytest.warns(UserWarning, match=last.name):
        assert outcome_of(tmp_path / "run") == uninterrupted["sim"]
    assert is_whole(tmp_path / "run")


def test_full_disk_skips_checkpoints_and_the_run_continues(
    uninterrupted: dict[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, writes = Checkpoints.write, iter([False, True, True, False, False])

    def full(self: Checkpoints, *args: Any, **kwargs: Any) -> Any:
        if next(writes):
            raise CheckpointError("cannot write a checkpoint: No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Checkpoints, "write", full)
    with pytest.warns(UserWarning, match="No space left") as values:
        start(SIM, tmp_path / "run")
    assert len([w for w in values if "No space left" in str(w.message)]) == 2
    assert outcome_of(tmp_path / "run") == uninterrupted["sim"]
    assert Checkpoints(tmp_path / "run" / CHECKPOINTS).names() == ["round-000000", "round-000003", "round-000004"]


@pytest.mark.parametrize("changed", ["torch", "python", "processor", "esper's code"])
def test_settings_that_would_change_bits_are_named_and_refused(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted):
        start(SIM, tmp_path / "run", poll=Countdown(16))
    saved = newest(tmp_path / "run")
    must_fit(differences(saved, SIM, SIMULATED), False)
    real: Callable[[TrainConfig, Any], dict[str, str]] = store.run_fingerprint
    monkeypatch.setattr(store, "run_fingerprint", lambda config, backend: real(config, backend) | {changed: "another"})
    assert len(differences(saved, SIM, SIMULATED)) == 1
    with pytest.raises(ConfigError, match=rf"{changed}: .* then, another now.*--allow-inexact"):
        must_fit(differences(saved, SIM, SIMULATED), False)


def test_initial_policy_file_is_not_needed_to_resume(tmp_path: Path) -> None:
    start(SIM, tmp_path / "first")
    policy = tmp_path / "policy.safetensors"
    policy.write_bytes((tmp_path / "first" / "policy.safetensors").read_bytes())
    config = load_config(
        sets=["simulated=true", "rounds=4", "envs=5", "worlds=8", "epochs=15", "ppo.minibatches=2"],
        more={"start_from": str(policy), "checkpoint_share": 1},
    )  # of another shape than a new policy would have
    start(config, tmp_path / "uninterrupted")
    with pytest.raises(Interrupted):
        start(config, tmp_path / "run", poll=Countdown(31))
    policy.unlink()
    _, values = last_checkpoint(tmp_path / "run", None)
    resume_training(values, tmp_path / "run")
    assert outcome_of(tmp_path / "run") == outcome_of(tmp_path / "uninterrupted")


def test_other_data_than_at_the_start_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        start(HOSTS, tmp_path / "run", poll=Countdown(20))
    saved, backend = newest(tmp_path / "run"), make_env(HOSTS).backend
    must_fit(differences(saved, HOSTS, backend), False)
    backend.data_hash = "0" * 64
    with pytest.raises(ConfigError, match=r"data: \w+ then, 0{16} now.*--allow-inexact"):
        must_fit(differences(saved, HOSTS, backend), False)


def test_best_host_that_failed_to_save_does_not_block_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env(HOSTS)
    env.reset()
    env.step(np.zeros((2, 8), dtype=np.int64))
    checkpointer = Checkpointer(HOSTS, tmp_path, NullReceiver(), ProcessGroup())

    def full(*_: Any) -> None:
        raise CheckpointError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(GrownHost, "save", full)
        with pytest.warns(UserWarning, match="this best host is not saved"):
            checkpointer.offer_hosts(env.backend, np.array([0.5, 0.1]), 0)
    checkpointer.offer_hosts(env.backend, np.array([0.2, 0.3]), 1)
    host = GrownHost.load(tmp_path / "best_host")
    assert (host.utility, host.round) == (0.3, 1)


def test_resume_keeps_the_best_host_until_a_better_one_is_grown(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        start(HOSTS, tmp_path / "run", poll=Countdown(20))
    best = GrownHost.load(tmp_path / "run" / "best_host")
    env = make_env(HOSTS)
    env.reset()
    env.step(np.zeros((2, 8), dtype=np.int64))
    checkpointer = restored(newest(tmp_path / "run"), env)
    for number, gain in ((7, -0.1), (8, 0.0), (9, 0.1)):
        checkpointer.offer_hosts(env.backend, np.array([best.utility + gain, -1.0]), number)
        host = GrownHost.load(tmp_path / "run" / "best_host")
        assert host.round == (9 if gain > 0 else best.round)


@pytest.mark.parametrize("share", [1, 1e-9], ids=["after every round", "when stopped"])
def test_journal_is_synced_to_disk_before_each_checkpoint(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run continues the journal at the checkpoint's `next_seq`: events before it must not be lost."""
    run = tmp_path / "run"
    flush = JsonlSink.flush
    write = Checkpoints.write
    synced = [-1]
    written: list[int] = []

    def flush_and_note(self: JsonlSink) -> None:
        flush(self)
        synced.append(max(entry.seq for entry in read(run)))

    def write_after_sync(self: Checkpoints, *args: Any, **kwargs: Any) -> Any:
        (next_seq,) = unspelled(kwargs["documents"]["run"])["next_seq"]
        assert synced[-1] >= next_seq - 1
        written.append(next_seq)
        return write(self, *args, **kwargs)

    monkeypatch.setattr(JsonlSink, "flush", flush_and_note)
    monkeypatch.setattr(Checkpoints, "write", write_after_sync)
    config = msgspec.structs.replace(SIM, checkpoint_share=share)
    with pytest.raises(Interrupted):
        start(config, run, poll=Countdown(50))
    assert len(written) == (4 if share == 1 else 2)


def test_non_finite_best_host_does_not_raise_the_best_utility(tmp_path: Path) -> None:
    env = make_env(HOSTS)
    env.reset()
    env.step(np.zeros((2, 8), dtype=np.int64))
    checkpointer = Checkpointer(HOSTS, tmp_path, NullReceiver(), ProcessGroup())
    average = env.backend.engine.networks[0].average.average[0]  # type: ignore[attr-defined]
    with torch.no_grad():
        average.view(-1)[0] = math.nan
    checkpointer.offer_hosts(env.backend, np.array([0.5, -math.inf]), 0)
    assert checkpointer.best_utility == -math.inf
    checkpointer.offer_hosts(env.backend, np.array([0.5, 0.1]), 1)
    assert checkpointer.best_utility == 0.1
    host = GrownHost.load(tmp_path / "best_host")
    assert (host.utility, host.round) == (0.1, 1)


class Pair(ProcessGroup):
    """Rank 0 of two; the messages of the other rank come from the test."""

    reply = 0

    def gather_ints(self, number: int) -> list[int]:
        return [number, self.reply]


@pytest.mark.parametrize(
    ("outcome", "best"),
    [(store.NOT_WRITTEN, -math.inf), (store.NOT_FINITE, 0.1), (store.WRITTEN, 0.5)],
)
def test_ranks_agree_on_the_best_utility(outcome: int, best: float, tmp_path: Path) -> None:
    """The champion belongs to the other rank: its result there counts here."""
    env = make_env(HOSTS)
    env.reset()
    env.step(np.zeros((2, 8), dtype=np.int64))
    group = Pair(0, 2)
    group.reply = outcome
    checkpointer = Checkpointer(HOSTS, tmp_path, NullReceiver(), group)
    checkpointer.offer_hosts(env.backend, np.array([0.1, 0.5]), 0)
    assert checkpointer.best_utility == best


def test_resume_takes_the_lock_before_it_chooses_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another resume could continue from the same checkpoint, and remove it, meanwhile."""
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        start(SIM, run, poll=Countdown(40))
    choose, rivals = train.last_checkpoint, []

    def chosen(*args: Any) -> Any:
        with pytest.raises(RunError, match=r"owned by a running process \(pid") as values:
            RunDirectory.resume(run)
        rivals.append(values.value)
        choose(*args)
        raise Interrupted

    monkeypatch.setattr(train, "last_checkpoint", chosen)
    with pytest.raises(Interrupted):
        train.run_train(TrainOptions(resume=run), preset=None, config_file=None, sets=[], more={}, show=False)
    assert len(rivals) == 1
    assert not is_owned(run)


def test_last_complete_round_is_saved_when_a_rank_is_lost_during_gather(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare = msgspec.structs.replace(SIM, checkpoint_share=1e-9)
    gathered = []

    def gather(*_: Any, axis: int = 0, poll: Any = None) -> None:
        gathered.append(poll is not None)
        if sum(gathered) == 3:
            raise RankLostError("rank 1 is lost", 1)

    monkeypatch.setattr(ProcessGroup, "gather", gather)
    with pytest.raises(RankLostError):
        start(rare, tmp_path / "run")
    assert newest(tmp_path / "run").name == "round-000002"


def test_baselines_of_other_code_are_not_taken_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted):
        start(HOSTS, tmp_path / "run", poll=Countdown(20))
    saved, env = newest(tmp_path / "run"), make_env(HOSTS)
    restored(saved, env)
    assert env.backend.baseline_curves()
    monkeypatch.setattr(store, "differences", lambda *_: ["torch: 1 then, 2 now"])
    env = make_env(HOSTS)
    restored(saved, env)
    assert not env.backend.baseline_curves()


def test_best_and_last_checkpoints_are_kept(tmp_path: Path) -> None:
    config = load_config(sets=[*SMALLER, "rounds=9", "keep=2"])
    scores: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_ppo_vectorized(
            config, directory=tmp_path, on_round=lambda values: scores.append(float(values.returns.mean()))
        )
    best = max(range(9), key=lambda i: scores[i]) + 1
    checkpoints = Checkpoints(tmp_path / CHECKPOINTS)
    assert set(checkpoints.names()) == {f"round-{n:06d}" for n in (best, 8, 9)}


def test_checkpoints_are_recorded_in_the_journal(tmp_path: Path) -> None:
    start(SIM, tmp_path / "run")
    values = [e.data for e in read(tmp_path / "run") if e.kind == "checkpoint"]
    assert [t["round"] for t in values] == [0, 1, 2, 3, 4]
    assert values[-1]["path"] == f"{CHECKPOINTS}/round-000004"
    assert (tmp_path / "run" / values[-1]["path"]).is_dir()
    assert values[-1]["size_bytes"] > 1000


def test_stop_saves_the_last_complete_round_without_a_due_checkpoint(tmp_path: Path) -> None:
    rare = load_config(sets=[*SMALLER, "rounds=9", "checkpoint_share=1e-9", "ppo.entropy_final=0.01"])
    with pytest.raises(Interrupted):
        start(rare, tmp_path / "run", poll=Countdown(8 * 5 + 3))
    assert run_metadata(newest(tmp_path / "run"))["done"] == 5
    start(rare, tmp_path / "uninterrupted")
    resume_training(rare, tmp_path / "run")
    assert outcome_of(tmp_path / "run") == outcome_of(tmp_path / "uninterrupted")
    assert is_whole(tmp_path / "run")


def test_incomplete_journal_is_reported_on_resume(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        start(SIM, tmp_path / "run", poll=Countdown(40))
    journal = next((tmp_path / "run" / "events").iterdir())
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:5] + lines[8:]))
    with pytest.warns(UserWarning, match=r"^3 of the \d+ events before this point are not in the journal"):
        resume_training(SIM, tmp_path / "run")


@pytest.mark.parametrize("content", [None, b'{"status":'])
def test_lost_or_damaged_manifest_is_rewritten_from_the_checkpoint(
    content: bytes | None, uninterrupted: dict[str, Outcome], tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        start(SIM, tmp_path / "run", poll=Countdown(20))
    manifest = tmp_path / "run" / "manifest.json"
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content)
    with pytest.warns(UserWarning, match="rebuilt from round-000001"):
        saved, config = last_checkpoint(tmp_path / "run", None)
    assert (config, saved.name) == (SIM, "round-000001")
    resume_training(SIM, tmp_path / "run")
    assert outcome_of(tmp_path / "run") == uninterrupted["sim"]


def test_run_with_a_failed_update_saves_every_round(tmp_path: Path) -> None:
    rare = load_config(sets=[*SMALLER, "rounds=9", "checkpoint_share=1e-9"])
    env, checkpointer = make_env(rare), Checkpointer(rare, tmp_path, NullReceiver(), ProcessGroup())
    training = TrainingState.new(rare, env.layout)
    checkpointer.save_if_due(training, env.backend)
    checkpointer.save_if_due(training, env.backend)
    assert Checkpoints(tmp_path / CHECKPOINTS).names() == ["round-000000"]
    training.ppo.bad_in_a_row = 1
    checkpointer.save_if_due(training, env.backend)
    assert Checkpoints(tmp_path / CHECKPOINTS).names() == ["round-000000", "round-000000"]


def test_checkpoint_is_deferred_while_the_journal_cannot_be_flushed(tmp_path: Path) -> None:
    class Unflushable:
        next_seq = 0

        def wants(self, _kind: type) -> bool:
            return False

        def emit(self, event: object) -> None: ...

        def flush(self) -> bool:
            return False

    with pytest.warns(UserWarning, match="this checkpoint is postponed"):
        train_ppo_vectorized(SIM, Unflushable(), directory=tmp_path)  # type: ignore[arg-type]
    names = Checkpoints(tmp_path / "checkpoints").names()
    assert names == [f"round-{SIM.rounds:06d}"]  # only the last one, which no later one could replace
