"""Summaries of journals: stage intervals, gaps, several episodes, losses, and runs that did not finish."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.karn.number_table import NumberTable
from esper.karn.sections import COUNTED
from esper.karn.summary import RunSummary, SlotLife
from esper.leyline.checksums import seal_json
from esper.leyline.events import Episode, Health, PhaseProfile, RunFinished, Worth
from esper.leyline.stages import SeedStage as S
from esper.nissa.journal_reader import Entry
from tests.support.sample_runs import Journal, grow_run, moved, started, step, train_run


def told(*events):
    """Return the summary of these events, without a file."""
    run = RunSummary(None)
    run.add(entries(events))
    return run


def entries(events, first=0):
    import msgspec

    for seq, event in enumerate(events, first):
        data = msgspec.to_builtins(event)
        data = {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}
        yield Entry(seq, 100.0 + seq, 0, data.pop("kind"), data)


def stages(run, slot="r0c0", env=0, episode=0):
    return [(i.stage, i.blueprint, i.start, i.end) for i in run.envs[env].episodes[episode].slots[slot].intervals]


def row(n, stage, blueprint="norm", **changed):
    return step(n, stages=(stage, 0, 0), blueprints=(blueprint if 0 < stage < 6 else "", "", ""), **changed)


# -- stage intervals


def test_steps_in_one_stage_make_one_interval():
    run = told(started(), row(1, S.DORMANT), row(2, S.TRAINING), row(3, S.TRAINING), row(4, S.BLENDING))
    assert stages(run) == [(S.TRAINING, "norm", 2, 3), (S.BLENDING, "norm", 4, 4)]


def test_next_seed_of_a_slot_starts_a_new_interval():
    run = told(started(), row(1, S.TRAINING, "norm"), row(2, S.TRAINING, "lora"))
    assert stages(run) == [(S.TRAINING, "norm", 1, 1), (S.TRAINING, "lora", 2, 2)]


def test_missing_steps_are_not_bridged():
    run = told(started(), row(1, S.TRAINING), row(2, S.TRAINING), row(6, S.TRAINING), row(7, S.TRAINING))
    assert stages(run) == [(S.TRAINING, "norm", 1, 2), (S.TRAINING, "norm", 6, 7)]


def test_transitions_alone_give_the_same_intervals():
    run = told(
        started(),
        moved(3, "r0c0", S.DORMANT, S.GERMINATED),
        moved(4, "r0c0", S.GERMINATED, S.TRAINING, dwell=1),
        moved(12, "r0c0", S.TRAINING, S.BLENDING, dwell=8),
        Episode(env=0, episode=0, world=1, name="x", steps=20, quality=0.5, quality_best=0.5, params=1, host_params=1,
                germinated=1, fossilized=0, pruned=0, structure={}),
    )  # fmt: skip
    assert stages(run) == [(S.GERMINATED, "norm", 3, 3), (S.TRAINING, "norm", 4, 11), (S.BLENDING, "norm", 12, 20)]


def test_transition_implies_the_stage_before_it():
    run = told(started(), moved(12, "r0c0", S.TRAINING, S.BLENDING, dwell=5))
    assert stages(run) == [(S.TRAINING, "norm", 7, 11), (S.BLENDING, "norm", 12, 12)]


@pytest.mark.parametrize("moves_first", [True, False])
def test_stage_entered_and_left_in_one_epoch_has_no_interval(moves_first):
    moves = [moved(3, "r0c0", S.DORMANT, S.GERMINATED), moved(3, "r0c0", S.GERMINATED, S.TRAINING)]
    both = [*moves, row(3, S.TRAINING)] if moves_first else [row(3, S.TRAINING), *moves]
    run = told(started(), row(1, S.DORMANT), row(2, S.DORMANT), *both, row(4, S.TRAINING))
    assert stages(run) == [(S.TRAINING, "norm", 3, 4)]


def test_repeated_steps_of_a_resumed_run_replace_the_old_ones():
    first = [row(n, S.TRAINING if n < 4 else S.BLENDING, quality=0.1) for n in range(1, 7)]
    again = [row(n, S.TRAINING, quality=0.9) for n in range(3, 6)]
    run = told(started(), *first, *again)
    assert stages(run) == [(S.TRAINING, "norm", 1, 5)]
    assert run.envs[0].episodes[0].steps.column("quality")[:5] == [0.1, 0.1, 0.9, 0.9, 0.9]


LIVES = st.lists(
    st.sampled_from([(S.DORMANT, ""), (S.TRAINING, "a"), (S.TRAINING, "b"), (S.HOLDING, "a")]), max_size=30
)


@given(LIVES, st.sets(st.integers(1, 30)))
@settings(max_examples=150, deadline=None)
def test_intervals_match_the_stage_of_every_recorded_epoch(life, missing):
    kept = {n: shown for n, shown in enumerate(life, 1) if n not in missing}
    run = told(started(), *(row(n, stage, blueprint) for n, (stage, blueprint) in kept.items()))
    found = {}
    for stage, blueprint, start, end in stages(run) if kept else []:
        assert start <= end
        for n in range(start, end + 1):
            assert n not in found
            found[n] = (stage, blueprint)
    assert found == {n: shown for n, shown in kept.items() if shown[0] != S.DORMANT}


@given(LIVES, st.lists(st.integers(1, 8), max_size=10))
@settings(max_examples=60, deadline=None)
def test_result_does_not_depend_on_how_entries_are_batched(life, portions):
    events = [started(), *(row(n, stage, blueprint) for n, (stage, blueprint) in enumerate(life, 1))]
    run, at = RunSummary(None), 0
    for size in [*portions, len(events)]:
        run.add(entries(events[at : at + size], at))
        at += size
    whole = told(*events)
    assert not life or stages(run) == stages(whole)
    assert run.kinds == whole.kinds
    assert not life or run.envs[0].episodes[0].slots["r0c0"].alpha == whole.envs[0].episodes[0].slots["r0c0"].alpha


def test_alpha_is_kept_where_it_changed():
    run = told(started(), *(step(n, alphas=(a, 0.0, 0.0)) for n, a in enumerate((0.0, 0.5, 0.5, 1.0), 1)))
    assert run.envs[0].episodes[0].slots["r0c0"].alpha == [(1, 0.0), (2, 0.5), (4, 1.0)]


# -- numbers


def test_unmeasured_and_nan_are_distinct():
    table = NumberTable(("step", "y"))
    for n, y in enumerate((0.5, None, math.nan, -math.inf, "words")):
        table.add({"step": n, "y": y})
    got = table.column("y")
    assert got[:2] == [0.5, None]
    assert math.isnan(got[2])
    assert got[3:] == [-math.inf, None]


def test_fields_missing_in_older_versions_are_unmeasured():
    table = NumberTable(("step", "new"))
    table.add({"step": 1})
    assert table.column("new") == [None]


def test_final_quality_is_the_last_measured_one():
    run = told(started(), row(1, 0, quality=0.4), row(2, 0, quality=0.7), row(3, 0, quality=None))
    episode = run.envs[0].episodes[0]
    assert (episode.quality, episode.quality_best, episode.params) == (0.7, 0.7, 1_234)


def test_best_ignores_non_finite_values():
    run = told(started(), row(1, 0, quality=0.4), row(2, 0, quality=math.nan))
    assert run.envs[0].episodes[0].quality_best == 0.4
    assert math.isnan(run.envs[0].episodes[0].quality)


def test_worth_is_kept_per_slot():
    def worth(n, slot, value):
        return Worth(env=0, episode=0, step=n, slot=slot, seed=0, blueprint="norm", contribution=value)

    run = told(started(), worth(1, "r0c0", 0.1), worth(2, "r0c0", None), worth(1, "r0c1", 0.3))
    slots = run.envs[0].episodes[0].slots
    assert slots["r0c0"].worth.column("contribution") == [0.1, None]
    assert slots["r0c1"].worth.column("contribution") == [0.3]
    assert slots["r0c0"].blueprints == {0: "norm"}
    assert SlotLife("x").was_used() is False


# -- episodes, phases, losses


def test_episodes_are_kept_per_environment(tmp_path):
    run = RunSummary.of(train_run(tmp_path / "run", envs=3, rounds=4, epochs=30))
    assert [len(env.episodes) for env in run.envs.values()] == [4, 4, 4]
    assert run.envs[2].name == "world 2"
    assert run.envs[2].latest.episode == 3
    assert all(len(e.steps) == 30 for e in run.episodes)
    assert all(len(e.slots["r0c0"].intervals) == 5 for e in run.episodes)
    assert len(run.updates) == 4


def test_phases_are_totals_so_the_newest_counts():
    run = told(*(PhaseProfile(phase="train", wall_ms=w, cpu_ms=w / 2, calls=n) for n, w in ((1, 10.0), (2, 25.0))))
    assert [(p.name, p.wall_ms, p.cpu_ms, p.calls) for p in run.phases] == [("train", 25.0, 12.5, 2)]


def test_unknown_or_invalid_entries_are_counted_and_skipped():
    run = RunSummary(None)
    wrong = {"phase": "train", "wall_ms": "soon", "cpu_ms": 1, "calls": 1}
    told = [("from_the_future", {"x": 1}), ("step", {"env": 0}), ("phase_profile", wrong)]
    run.add(Entry(seq, 1.0, 0, kind, data) for seq, (kind, data) in enumerate(told))
    assert (run.unreadable, run.kinds["from_the_future"], run.episodes) == (2, 1, [])


# -- slots that the run did not name


@pytest.mark.parametrize("order", [1, -1])
def test_no_slot_has_two_names_where_only_transitions_name_it(order):
    first = [moved(2, "left", S.DORMANT, S.TRAINING, dwell=0), row(2, S.TRAINING)][::order]
    run = told(row(1, S.DORMANT), *first, row(3, S.TRAINING), moved(4, "left", S.TRAINING, S.BLENDING, dwell=2))
    assert [s.name for s in run.episodes[0].slots.values()] == ["left"]
    assert [(i.stage, i.start, i.end) for i in run.episodes[0].slots["left"].intervals] == [
        (S.TRAINING, 2, 3), (S.BLENDING, 4, 4)
    ]  # fmt: skip


def test_unnamed_slots_are_shown_by_index():
    assert stages(told(row(1, S.TRAINING)), "slot 0") == [(S.TRAINING, "norm", 1, 1)]


def test_manifest_names_slots_where_the_run_does_not():
    run = RunSummary(None, {"slots": ["left", "right", "middle"]})
    run.add(entries([moved(1, "left", S.DORMANT, S.TRAINING), row(1, S.TRAINING), row(2, S.TRAINING)]))
    assert list(run.episodes[0].slots) == ["left", "right", "middle"]
    assert stages(run, "left") == [(S.TRAINING, "norm", 1, 2)]


# -- runs in every state


def test_finished_run_is_summarised(tmp_path):
    run = RunSummary.of(grow_run(tmp_path / "run"))
    assert (run.status, run.wall_s, run.losses, run.unreadable) == ("finished", 91.4, [], 0)
    assert [e.name for e in run.episodes][:2] == ["grown", "no growth"]
    assert [run.episodes[0].count(stage) for stage in COUNTED] == [3, 1, 1]


def test_killed_run_shows_what_it_wrote(tmp_path):
    journal = Journal(tmp_path / "run", status="running")
    journal.write(started())
    journal.write(row(1, S.TRAINING))
    journal.file.write(b'{"seq":2,"time_s":17')
    run = RunSummary.of(journal.close())
    assert (run.status, run.damage.torn, len(run.episodes[0].steps)) == ("killed", 1, 1)


def test_run_without_events_is_only_a_manifest(tmp_path):
    (tmp_path / "manifest.json").write_bytes(seal_json(json.dumps({"status": "running", "task": "quick"}).encode()))
    run = RunSummary.of(tmp_path)
    assert (run.status, run.about("task"), run.episodes, run.wall_s, run.phases) == ("killed", "quick", [], None, [])


def test_manifest_decides_how_a_run_ended(tmp_path):
    journal = Journal(tmp_path / "run", status="failed", error="boom")
    journal.write(RunFinished(status="finished", wall_s=1.0, env_steps=0))
    journal.write(Health(source="hub", severity="info", text="fine"))
    assert RunSummary.of(journal.close()).status == "failed"
