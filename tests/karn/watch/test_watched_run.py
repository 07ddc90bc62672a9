"""The watched run without a terminal: which run is found, its state in one word, its pace, and the texts of a frame."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.karn.watch import cells
from esper.karn.watch.cells import frame
from esper.karn.watch.watched_run import WatchedRun
from esper.leyline.checksums import seal_json
from esper.leyline.errors import EsperError
from esper.leyline.events import GovernorAlarm, Health, RunFinished, Step
from esper.nissa.run_list import find_run
from tests.support.live_run import lines_of, run_events, started, update, write_run


class Clock:
    """A clock that a test sets."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def step(env=0, t=1, quality=0.5, stages=(0, 0), **more):
    values = {
        "world": 0, "committed_quality": None, "val_loss": None, "train_loss": 0.5, "params": 100, "op": "WAIT",
        "alphas": tuple(0.0 for _ in stages), "blueprints": tuple("" for _ in stages), "episode": 0,
    }  # fmt: skip
    return Step(env=env, step=t, quality=quality, stages=stages, **(values | more))


def small_run(**more):
    return started(envs=2, slots=2, steps=10, rounds=2, **more)


class Growing:
    """A run directory whose journal a test extends."""

    def __init__(self, path, clock):
        (path / "events").mkdir(parents=True)
        self.path, self.clock, self.events = path, clock, []
        self.watched = WatchedRun(path, clock)

    def add(self, *events):
        self.events += events
        content = b"".join(lines_of(self.events, at=1000.0))
        (self.path / "events" / "rank0-00000.jsonl").write_bytes(content)
        return self.watched.read()


@pytest.fixture
def growing(tmp_path):
    return Growing(tmp_path / "run", Clock())


def watched(tmp_path, *events, status=None, clock=None):
    run = write_run(tmp_path / "run", events, at=1000.0, status=status)
    viewer = WatchedRun(run, clock or Clock(1000.0 + 0.1 * len(events)))
    viewer.read()
    return viewer


# -- state and pace


def test_limits_follow_the_pauses_of_the_run(growing):
    growing.add(small_run())
    words = []
    for seconds in (4.0, 2.0, 10.0):
        growing.clock.now += seconds
        words.append(growing.watched.word())
    assert words == ["LIVE", "SLOW", "STALE"]
    growing.add(step())  # this run pauses for 16 s, so it is not slow after 30 s
    growing.clock.now += 30.0
    assert growing.watched.word() == "LIVE"
    growing.clock.now += 60.0
    assert growing.watched.word() == "STALE"


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted"])
def test_final_status_comes_from_the_run(tmp_path, status):
    run = watched(tmp_path, small_run(), RunFinished(status=status, wall_s=1.0, env_steps=0))
    assert run.word() == status.upper()
    assert run.is_over()


def test_run_without_owner_is_killed_unless_events_arrive(tmp_path):
    clock = Clock()
    run = watched(tmp_path, small_run(), status="running", clock=clock)
    assert run.word() == "KILLED"
    (tmp_path / "run" / "events" / "rank0-00000.jsonl").write_bytes(
        b"".join(lines_of([small_run(), step()], at=1000.0))
    )
    clock.now += 1.0
    assert run.read()
    assert run.word() == "LIVE"
    clock.now += 60.0
    assert run.word() == "KILLED"


def test_run_without_events_is_waited_for(tmp_path):
    run = WatchedRun(tmp_path, Clock())
    assert not run.read()
    assert (run.word(), run.nothing()) == ("WAITING", f"waiting for a run to begin in {tmp_path}")


def test_read_says_whether_something_changed(growing):
    assert growing.add(small_run())
    assert not growing.watched.read()
    assert growing.add(step())


def test_pace_is_measured_over_a_window_and_gives_the_remaining_time(growing):
    growing.add(small_run())
    for t in range(1, 11):
        growing.clock.now += 1.0
        growing.add(step(env=0, t=t), step(env=1, t=t))
    pace = growing.watched.pace()
    assert growing.watched.done() == 0.5
    assert pace.steps_per_s == pytest.approx(2.0, rel=0.2)
    assert pace.eta_s == pytest.approx(10.0, rel=0.2)


# -- alarms


def test_all_clear_without_problems(tmp_path):
    assert cells.problem_lines(watched(tmp_path, small_run(), step())).plain == "ALL CLEAR"


@pytest.mark.parametrize(
    ("event", "alarm"),
    [(step(quality=math.nan), "not finite"), (update(1, kl=0.2), "KL 0.2 is above"),
     (update(1, skipped=3), "3 minibatches"),
     (update(1, clip_fraction=0.5), "50% of ratios"), (update(1, policy_loss=math.nan), "policy loss not finite"),
     (update(1, entropy={"op": 0.01}), "entropy collapsed (op 0.01)"),
     (GovernorAlarm(env=0, episode=0, step=3, alarm="diverged", action="rolled back"), "diverged"),
     (Health(source="hub", severity="error", text="disk full"), "disk full")],
)  # fmt: skip
def test_each_problem_is_reported(tmp_path, event, alarm):
    assert alarm in cells.problem_lines(watched(tmp_path, small_run(), event)).plain


def test_worst_problem_comes_first_and_the_rest_are_counted(tmp_path):
    run = watched(tmp_path, small_run(), update(1, kl=0.2), Health(source="hub", severity="error", text="disk full"))
    assert cells.problem_lines(run).plain == "hub: disk full  +1 more"


# -- texts


def test_unmeasured_is_a_dash_and_non_finite_is_spelled_out(tmp_path):
    assert [cells.number(v).plain for v in (None, math.nan, math.inf, 0.0)] == ["–", "NaN", "∞", "0"]
    text = frame(watched(tmp_path, small_run(), step(quality=None), step(env=1, quality=math.nan)), 100)
    assert "NaN" in text
    assert "–" in text


@given(st.lists(st.none() | st.floats(0, 1), max_size=60), st.integers(1, 30))
def test_sparkline_has_its_width_and_ends_with_the_newest_value(values, width):
    line = cells.sparkline(values, width)
    assert len(line) == width
    if (
        len(values) >= width
        and values[-1] is not None
        and values[-1] == max(v for v in values if v is not None) > min(v for v in values if v is not None)
    ):
        assert line[-1] in "█▁▂▃▄▅▆▇"


def test_stage_letters_become_counts_if_there_are_many(tmp_path):
    few = watched(tmp_path / "a", started(envs=1, slots=3), step(stages=(2, 5, 0), blueprints=("a", "b", "")))
    assert cells.letters(few.state.latest[0]).plain == "TF·"
    many = watched(tmp_path / "b", started(envs=1, slots=20),
                   step(stages=(2,) * 15 + (5,) * 5, blueprints=("a",) * 20))  # fmt: skip
    assert cells.letters(many.state.latest[0]).plain == "15T 5F"


@pytest.mark.parametrize(
    ("qualities", "word"),
    [((0.1, 0.2), "rising"), ((0.5, 0.3), "worse"), ((0.5,) + (0.495,) * 12, "flat"), ((math.nan,), "broken"),
     ((None,), "running")],
)  # fmt: skip
def test_state_of_an_environment(tmp_path, qualities, word):
    run = watched(tmp_path, small_run(), *(step(t=t, quality=q) for t, q in enumerate(qualities, 1)))
    assert cells.env_state(run.state.latest[0])[0] == word


def test_return_is_shown_with_its_meaning(tmp_path):
    line = cells.ppo_line(watched(tmp_path, small_run(), update(1, return_mean=0.21, return_sd=0.08)).state).plain
    assert line.startswith("PPO round 1  return 0.21 ± 0.08 sd  KL 0.0121")


@pytest.mark.parametrize("width", [80, 120, 200])
def test_every_line_of_a_frame_fits(tmp_path, width):
    run = watched(tmp_path, *run_events(envs=4, slots=3, steps=20, rounds=1))
    lines = frame(run, width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith(" FINISHED ")
    for word in ("digits/3", "r0c2", "PPO round", "OPS", "run finished"):
        assert any(word in line for line in lines), word


def test_qualities_that_are_no_fractions_keep_their_unit(tmp_path):
    text = frame(watched(tmp_path, small_run(), step(quality=-3.25)), 100)
    assert "−3.25" in text


# -- run selection


def test_run_is_found_by_directory_parent_id_and_latest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old, new = (
        write_run(tmp_path / "runs" / name, []) for name in ("20251115-120000-a-0001", "20251115-130000-b-0002")
    )
    os.utime(old / "events", (1, 1))
    assert find_run(new) == new
    assert find_run(tmp_path / "runs") == new
    assert find_run(Path("latest")).resolve() == new
    assert find_run(Path("20251115-12")).name == "20251115-120000-a-0001"


def test_unknown_run_is_an_error_that_lists_existing_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "one-a", [])
    write_run(tmp_path / "runs" / "one-b", [])
    with pytest.raises(EsperError, match="one-b, one-a"):
        find_run(tmp_path / "nowhere")
    with pytest.raises(EsperError, match="2 runs begin with 'one'"):
        find_run(Path("one"))


def test_empty_directory_is_waited_for(tmp_path):
    assert find_run(tmp_path) is None


def test_removed_run_stays_on_the_screen_with_the_reason(growing):
    growing.add(small_run(), step())
    shutil.rmtree(growing.path)
    growing.watched.read()
    assert growing.watched.state.env_steps == 1
    assert "cannot be read any more" in cells.problem_lines(growing.watched).plain
    growing.watched.restart()
    growing.watched.read()
    assert growing.watched.state.env_steps == 1


def identified(path, run_id):
    content = seal_json(json.dumps({"status": "finished", "run_id": run_id}).encode())
    (path / "manifest.json").write_bytes(content)
    return path


def test_run_that_replaced_another_is_read_after_a_restart(tmp_path):
    path = identified(write_run(tmp_path / "run", [small_run(), step()], at=1000.0), "first")
    run = WatchedRun(path, Clock())
    run.read()
    shutil.rmtree(path)
    identified(write_run(path, [small_run(), step(), step(t=2), step(t=3)], at=1000.0), "second")
    run.read()
    assert run.state.env_steps == 1
    assert "another run" in cells.problem_lines(run).plain
    run.restart()
    run.read()
    assert (run.state.env_steps, run.trouble) == (3, "")


def test_long_names_are_cut_to_their_column(tmp_path):
    run = watched(tmp_path, started(slots=1, names=["structure " * 100]), step(stages=(0,)))
    assert len(cells.ENV_COLUMNS[0].cell(run.state, run.state.latest[0])) == 16


def test_integer_beyond_floats_is_shown_as_infinite(tmp_path):
    run = watched(tmp_path, small_run(), step(params=10**400, train_macs=10**400))
    cells_of_env = [column.cell(run.state, run.state.latest[0]).plain for column in cells.ENV_COLUMNS]
    assert cells_of_env.count("∞") == 2
