"""Trackers receive the scalars of a run, live and from its journal, each in its own offline mode."""

import threading
import time
from importlib.util import find_spec

import pytest

from esper.leyline.errors import EsperError, UnknownNameError
from esper.nissa import sinks
from esper.nissa.hub import NissaHub
from esper.nissa.record import Record
from esper.nissa.recorder import record
from esper.nissa.sinks import MOST_LAG_S, CallThread, TrackerSink, must_be_available
from tests.support.trackers import EPISODE, STARTED, esper, loaded, mlflow_metrics, needs, step, update, wandb_metrics

TRAIN = [
    "train", "--sim", "--rounds", "2", "--envs", "2", "--epochs", "6", "--set", "ppo.minibatches=2", "--no-compare",
]  # fmt: skip


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """Return the directory of a run that was tracked live by all installed trackers."""
    tmp_path = tmp_path_factory.mktemp("tracked")
    names = [name for name in ("tensorboard", "mlflow", "wandb", "trackio") if find_spec(name) is not None]
    esper(tmp_path, *TRAIN, "--out", tmp_path / "run", *(part for name in names for part in ("--track", name)))
    return tmp_path


@needs("tensorboard")
def test_tensorboard_export_equals_the_live_files(tracked):
    esper(tracked, "export-log", tracked / "run", "--to", "tensorboard", "--out", tracked / "tb")
    live, exported = loaded(tracked / "run" / "tensorboard"), loaded(tracked / "tb")
    assert len(exported["env1/quality"]) == 12
    assert repr(live) == repr(exported)


@needs("tensorboard", "accelerate", "mlflow")
def test_mlflow_receives_the_same_scalars_live_and_from_the_journal(tracked):
    esper(tracked, "export-log", tracked / "run", "--to", "mlflow")
    written = loaded(tracked / "run" / "tensorboard")
    for number in (0, 1):
        metrics, settings = mlflow_metrics(tracked, number)
        assert set(metrics) == set(written)
        assert [(step, pytest.approx(value, rel=1e-6)) for step, value in metrics["env1/quality"]] == written[
            "env1/quality"
        ]
        assert settings["ppo.minibatches"] == "2"


@needs("tensorboard", "accelerate", "wandb")
def test_wandb_receives_the_same_scalars_live_and_from_the_journal(tracked):
    esper(tracked, "export-log", tracked / "run", "--to", "wandb")
    written = loaded(tracked / "run" / "tensorboard")
    for number in (0, 1):
        metrics, settings = wandb_metrics(tracked / "run", number)
        assert set(metrics) == set(written)
        assert [(step, pytest.approx(value, rel=1e-6)) for step, value in metrics["update/kl"]] == written["update/kl"]
        assert len(metrics["env0/quality"]) == 12
        assert settings["ppo.minibatches"] == "2"


@needs("accelerate", "trackio")
def test_trackio_receives_the_journal(tracked):
    assert "sent to trackio" in esper(tracked, "export-log", tracked / "run", "--to", "trackio").stdout


def test_tracking_does_not_change_training(tracked):
    esper(tracked, *TRAIN, "--out", tracked / "plain")
    policies = [(tracked / name / "policy.safetensors").read_bytes() for name in ("run", "plain")]
    assert policies[0] == policies[1]


# -- the sink itself


class RecordingTracker:
    """A tracker that stores calls and their threads."""

    def __init__(self):
        self.logged, self.threads, self.error = [], set(), None

    def log(self, values, step=None, timestamp=None):
        self.threads.add(threading.get_ident())
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.logged.append((values, step))

    def finish(self):
        self.threads.add(threading.get_ident())


@pytest.fixture
def tracker(monkeypatch):
    tracker = RecordingTracker()

    def started(name, run, settings):
        tracker.threads.add(threading.get_ident())
        tracker.settings = settings
        return tracker

    monkeypatch.setattr(sinks, "_started", started)
    return tracker


def test_every_call_of_a_tracker_runs_in_one_thread_of_its_own(tracker, tmp_path):
    manifest = {"task": "rescue", "controller": "tamiyo", "seed": 3, "config": {"ppo": {"lr": 0.1}}}
    with NissaHub([TrackerSink("mlflow", tmp_path, manifest)]) as hub:
        hub.emit(step())
    assert len(tracker.threads) == 1
    assert threading.get_ident() not in tracker.threads
    assert tracker.settings == {"task": "rescue", "controller": "tamiyo", "seed": "3", "ppo.lr": "0.1"}


def test_slow_tracker_is_sent_episodes_and_updates_only(tracker, tmp_path):
    sink = TrackerSink("mlflow", tmp_path, {})
    old = time.time() - 2 * MOST_LAG_S
    events = [STARTED, step(step=1), step(step=2), update(1), EPISODE]
    sink.write([Record(i, old, 0, event) for i, event in enumerate(events)])
    assert [next(iter(values)).split("/")[0] for values, _ in tracker.logged] == ["update", "episode"]
    with pytest.warns(UserWarning, match="2 events were not sent to mlflow.*esper export-log"):
        sink.close()


def test_repeated_records_are_sent_once(tracker, tmp_path):
    sink = TrackerSink("mlflow", tmp_path, {}, most_lag_s=None)
    records = [Record(0, 0.0, 0, update(1)), Record(1, 0.0, 0, update(2))]
    sink.write(records)
    sink.write(records)
    assert [step for _, step in tracker.logged] == [1, 2]


def test_failed_record_is_sent_again_with_the_same_step(tracker, tmp_path):
    sink = TrackerSink("mlflow", tmp_path, {}, most_lag_s=None)
    records = [Record(0, 0.0, 0, update(1)), Record(1, 0.0, 0, update(2))]
    tracker.error = OSError("no connection")
    with pytest.raises(OSError, match="no connection"):
        sink.write(records)
    sink.write(records)
    assert [step for _, step in tracker.logged] == [1, 2]


def test_namespaces_of_wandb_and_trackio_have_their_own_axes(tracker, tmp_path):
    sink = TrackerSink("trackio", tmp_path, {}, most_lag_s=None)
    sink.write([Record(0, 0.0, 0, update(7)), Record(1, 0.0, 0, step(env=4, step=3))])
    (first, one), (second, two) = tracker.logged
    assert (one, two) == (None, None)
    assert (first["update/step"], second["env4/step"]) == (1, 3)


def test_unknown_and_missing_trackers_leave_no_run(tmp_path, monkeypatch):
    with (
        pytest.raises(UnknownNameError, match="Did you mean 'wandb'"),
        record("x", out=tmp_path / "a", track=["wanbd"]),
    ):
        pass
    monkeypatch.setattr(sinks, "find_spec", lambda _: None)
    with pytest.raises(EsperError, match=r"pip install 'esper-lite\[trackers\]' mlflow"):
        must_be_available(["mlflow"])
    with (
        pytest.raises(EsperError, match=r"esper-lite\[tensorboard\]'$"),
        record("x", out=tmp_path / "a", tensorboard=True),
    ):
        pass
    assert not (tmp_path / "a").exists()


def test_tracker_that_cannot_start_says_what_to_do(monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(sinks, "_started", fail)
    with pytest.raises(EsperError, match=r"could not be started: api_key not configured\. Log in with `wandb login`"):
        TrackerSink("wandb", tmp_path, {})


def test_call_thread_passes_results_and_errors():
    thread = CallThread("x")
    assert thread.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 / 0)
    thread.end()
