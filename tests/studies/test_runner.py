"""Jobs in worker processes: resuming, failures, locks and interruption."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref

import pytest

from esper.leyline.errors import RunError, TrainingError
from esper.studies.contract import Arm
from esper.studies.results import Job, read_results
from esper.studies.runner import attempt, check_points, run_jobs, seconds_left, shard_lock
from tests.support import ROOT
from tests.support.example_studies import example_study, point, train_by_formula
from tests.support.run_outcomes import restore_signal_handling

STUDY = example_study()
JOBS = [Job("rescue", arm, world) for world in (100, 101) for arm in ("worse", "better")]


def test_finished_jobs_are_recorded_and_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # inherited by the workers, which must not use it
    lines = []
    run_jobs(STUDY, JOBS[:2], tmp_path, 1, lines.append)
    before = read_results(tmp_path)
    run_jobs(STUDY, JOBS, tmp_path, 2, lines.append)
    after = read_results(tmp_path)

    assert [(r.arm, r.world) for r in before] == [("worse", 100), ("better", 100)]
    assert after[:2] == before
    assert sorted((r.arm, r.world) for r in after[2:]) == [("better", 101), ("worse", 101)]
    assert {p.params for r in after for p in r.points} == {1}  # each worker has one thread
    for r in after:
        expected = train_by_formula(STUDY.arm(r.arm), r.task, r.world, STUDY.budgets)
        assert [p.test_quality for p in r.points] == [p.test_quality for p in expected]
        assert {"esper", "esper's code", "trainer", "torch", "processor"} <= r.versions.keys()
    assert "4 jobs, 2 of them finished before" in lines
    assert lines[-1].startswith("[4/4] rescue ")
    assert lines[-1].endswith("about 0 min left")


def test_failing_job_does_not_stop_the_others_and_is_retried(tmp_path):
    arms = (Arm(name="worse", kind="example_error", settings={"world": 100}), STUDY.arms[1])
    study = example_study(arms=arms)

    with pytest.raises(RunError, match="1 of 4 jobs failed, first rescue worse world 100: ValueError: no such data"):
        run_jobs(study, JOBS, tmp_path, 1, lambda _text: None)

    assert {(r.arm, r.world) for r in read_results(tmp_path)} == {("better", 100), ("worse", 101), ("better", 101)}
    with pytest.raises(RunError, match="1 of 4 jobs failed"):
        run_jobs(study, JOBS, tmp_path, 1, lambda _text: None)


@pytest.mark.parametrize("fails", [False, True])
def test_job_leaves_no_network_in_memory(capsys, fails):
    class Network:
        pass

    alive = []

    def train(_job):
        network = Network()
        network.itself = network  # a reference cycle, as between a module and its hooks
        alive.append(weakref.ref(network))
        if fails:
            raise TrainingError("diverged")
        return "trained"

    gc.disable()
    try:
        assert attempt(train, JOBS[0]) == ("TrainingError: diverged" if fails else "trained")
        assert alive[0]() is None
    finally:
        gc.enable()
    assert ("diverged" in capsys.readouterr().err) == fails


def test_worker_that_ends_is_reported(tmp_path):
    study = example_study(arms=(Arm(name="worse", kind="example_exit"), STUDY.arms[1]))
    with pytest.raises(RunError, match="a worker process was ended from outside"):
        run_jobs(study, JOBS[:1], tmp_path, 1, lambda _text: None)


def test_shard_has_one_owner(tmp_path):
    with shard_lock(tmp_path, (1, 2)):
        with shard_lock(tmp_path, (2, 2)):
            pass
        with pytest.raises(RunError, match="another process runs shard 1/2"), shard_lock(tmp_path, (1, 2)):
            pass
    with shard_lock(tmp_path, (1, 2)):
        pass


@pytest.mark.parametrize(
    "points",
    [
        [],
        [point(0.7)],
        [point(1.0), point(0.5)],
        [point(1.0), point(1.0)],
        [point(1.0, test_loss=float("nan"))],
        [point(1.0, val_quality=float("inf"))],
    ],
)
def test_invalid_points_of_a_trainer_are_refused(points):
    with pytest.raises(TrainingError, match="the trainer returned"):
        check_points(points, (0.5, 1.0))


def test_time_left_uses_the_mean_of_the_same_arm_or_of_all():
    finished = {JOBS[0]: 10.0, JOBS[1]: 30.0}
    assert seconds_left(finished, JOBS[2:3]) == 10.0
    assert seconds_left(finished, [Job("quick", "worse", 100)]) == 20.0
    assert seconds_left(finished, []) == 0.0


INTERRUPTED = """
import sys
from pathlib import Path
from tests.support.example_studies import Arm, example_study
from esper.commands import study as command
if __name__ == "__main__":
    arm = Arm(name="a", kind="example_wait", settings={"file": sys.argv[2]})
    command.STUDIES["example"] = example_study(arms=(arm,), claims=())
    command.run_study("example", arms=[], worlds=None, tuning=False, shard="1/1", workers=1, out=Path(sys.argv[1]),
                      show=False, save=False, extend=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_study_ends_at_once_keeps_finished_jobs_and_continues(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    go = tmp_path / "go"
    command = [sys.executable, str(script), str(tmp_path / "out"), str(go)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True,
                               preexec_fn=restore_signal_handling)  # fmt: skip
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("[1/2]") for line in lines)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    process.wait(300)

    directory = tmp_path / "out" / "example"
    assert process.returncode != 0
    assert [r.world for r in read_results(directory)] == [100]
    assert all_ended(process.pid)

    go.touch()
    subprocess.run(command, env=env, check=True, timeout=300)
    assert [r.world for r in read_results(directory)] == [100, 101]


def all_ended(group):
    """Return whether the process group is empty within a few seconds."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
