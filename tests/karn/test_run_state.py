"""The fold of journals: stage intervals, gaps, several episodes, losses, and runs that did not finish.

It equals a slow reference over the whole journal, in portions of any size.
"""

import json
import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from esper.karn.document import COUNTED, detail, document
from esper.karn.episode_state import SlotHistory
from esper.karn.run_state import RunState
from esper.karn.series import BLOCK_ROWS, MOST_GROUPS, Means, Series
from esper.leyline.checksums import seal_json
from esper.leyline.events import Decision, Episode, Health, PhaseProfile, RunFinished, SeedWorth
from esper.leyline.stages import SeedStage as Stage
from esper.nissa.journal_reader import read
from esper.nissa.journal_rows import decoded_row, decoded_rows
from esper.nissa.record import Record, line, sealed
from tests.reference.run_facts import run_facts
from tests.support.live_run import run_events
from tests.support.sample_runs import Journal, grow_run, moved, started, step, train_run


def folded(*events):
    """Return the state after these events, without a file."""
    run = RunState(Path("run"))
    run.fold(rows(events))
    return run


def rows(events, first=0):
    return [
        decoded_row(line(Record(seq, 100.0 + seq, 0, event)).rstrip(), 0) for seq, event in enumerate(events, first)
    ]


def stages(run, slot="r0c0", env=0):
    return [(i.stage, i.blueprint, i.start, i.end) for i in run.envs[env].latest.slots[slot].intervals]


def row(n, stage, blueprint="norm", **changed):
    return step(n, stages=(stage, 0, 0), blueprints=(blueprint if 0 < stage < 6 else "", "", ""), **changed)


# -- stage intervals


def test_steps_in_one_stage_make_one_interval():
    run = folded(
        started(), row(1, Stage.DORMANT), row(2, Stage.TRAINING), row(3, Stage.TRAINING), row(4, Stage.BLENDING)
    )
    assert stages(run) == [(Stage.TRAINING, "norm", 2, 3), (Stage.BLENDING, "norm", 4, 4)]


def test_next_seed_of_a_slot_starts_a_new_interval():
    run = folded(started(), row(1, Stage.TRAINING, "norm"), row(2, Stage.TRAINING, "lora"))
    assert stages(run) == [(Stage.TRAINING, "norm", 1, 1), (Stage.TRAINING, "lora", 2, 2)]


def test_missing_steps_are_not_bridged():
    run = folded(
        started(), row(1, Stage.TRAINING), row(2, Stage.TRAINING), row(6, Stage.TRAINING), row(7, Stage.TRAINING)
    )
    assert stages(run) == [(Stage.TRAINING, "norm", 1, 2), (Stage.TRAINING, "norm", 6, 7)]


def test_transitions_alone_give_the_same_intervals():
    run = folded(
        started(),
        moved(3, "r0c0", Stage.DORMANT, Stage.GERMINATED),
        moved(4, "r0c0", Stage.GERMINATED, Stage.TRAINING, dwell=1),
        moved(12, "r0c0", Stage.TRAINING, Stage.BLENDING, dwell=8),
        Episode(env=0, episode=0, world=1, name="x", steps=20, quality=0.5, quality_best=0.5, params=1, host_params=1,
                germinated=1, fossilized=0, pruned=0, structure={}),
    )  # fmt: skip
    assert stages(run) == [
        (Stage.GERMINATED, "norm", 3, 3),
        (Stage.TRAINING, "norm", 4, 11),
        (Stage.BLENDING, "norm", 12, 20),
    ]


def test_transition_implies_the_stage_before_it():
    run = folded(started(), moved(12, "r0c0", Stage.TRAINING, Stage.BLENDING, dwell=5))
    assert stages(run) == [(Stage.TRAINING, "norm", 7, 11), (Stage.BLENDING, "norm", 12, 12)]


@pytest.mark.parametrize("moves_first", [True, False])
def test_stage_entered_and_left_in_one_epoch_has_no_interval(moves_first):
    moves = [moved(3, "r0c0", Stage.DORMANT, Stage.GERMINATED), moved(3, "r0c0", Stage.GERMINATED, Stage.TRAINING)]
    both = [*moves, row(3, Stage.TRAINING)] if moves_first else [row(3, Stage.TRAINING), *moves]
    run = folded(started(), row(1, Stage.DORMANT), row(2, Stage.DORMANT), *both, row(4, Stage.TRAINING))
    assert stages(run) == [(Stage.TRAINING, "norm", 3, 4)]


def test_repeated_steps_of_a_resumed_run_replace_the_old_ones():
    first = [row(n, Stage.TRAINING if n < 4 else Stage.BLENDING, quality=0.1) for n in range(1, 7)]
    again = [row(n, Stage.TRAINING, quality=0.9) for n in range(3, 6)]
    run = folded(started(), *first, *again)
    assert stages(run) == [(Stage.TRAINING, "norm", 1, 5)]
    assert run.envs[0].latest.steps.column("quality")[:5] == [0.1, 0.1, 0.9, 0.9, 0.9]


LIVES = st.lists(
    st.sampled_from([(Stage.DORMANT, ""), (Stage.TRAINING, "a"), (Stage.TRAINING, "b"), (Stage.HOLDING, "a")]),
    max_size=30,
)


@given(LIVES, st.sets(st.integers(1, 30)))
@settings(max_examples=150, deadline=None)
def test_intervals_match_the_stage_of_every_recorded_epoch(life, missing):
    kept = {n: state for n, state in enumerate(life, 1) if n not in missing}
    run = folded(started(), *(row(n, stage, blueprint) for n, (stage, blueprint) in kept.items()))
    by_step = {}
    for stage, blueprint, start, end in stages(run) if kept else []:
        assert start <= end
        for n in range(start, end + 1):
            assert n not in by_step
            by_step[n] = (stage, blueprint)
    assert by_step == {n: state for n, state in kept.items() if state[0] != Stage.DORMANT}


@given(LIVES, st.lists(st.integers(1, 8), max_size=10))
@settings(max_examples=60, deadline=None)
def test_result_does_not_depend_on_how_entries_are_batched(life, portions):
    events = [started(), *(row(n, stage, blueprint) for n, (stage, blueprint) in enumerate(life, 1))]
    run, at = RunState(Path("run")), 0
    for size in [*portions, len(events)]:
        run.fold(rows(events[at : at + size], at))
        at += size
    whole = folded(*events)
    assert not life or stages(run) == stages(whole)
    assert run.kinds == whole.kinds
    assert not life or run.envs[0].latest.slots["r0c0"].alpha == whole.envs[0].latest.slots["r0c0"].alpha


def test_alpha_is_kept_where_it_changed():
    run = folded(started(), *(step(n, alphas=(a, 0.0, 0.0)) for n, a in enumerate((0.0, 0.5, 0.5, 1.0), 1)))
    assert run.envs[0].latest.slots["r0c0"].alpha == [(1, 0.0), (2, 0.5), (4, 1.0)]


# -- numbers


def test_final_quality_is_the_last_measured_one():
    run = folded(started(), row(1, 0, quality=0.4), row(2, 0, quality=0.7), row(3, 0, quality=None))
    episode = run.envs[0].latest
    assert (episode.quality, episode.best, episode.params) == (0.7, 0.7, 1_234)


def test_best_ignores_non_finite_values():
    run = folded(started(), row(1, 0, quality=0.4), row(2, 0, quality=math.nan))
    assert run.envs[0].latest.best == 0.4
    assert math.isnan(run.envs[0].latest.quality)


def test_worth_is_kept_per_slot():
    def worth(n, slot, value):
        return SeedWorth(env=0, episode=0, step=n, slot=slot, seed=0, blueprint="norm", contribution=value)

    run = folded(started(), worth(1, "r0c0", 0.1), worth(2, "r0c0", None), worth(1, "r0c1", 0.3))
    slots = run.envs[0].latest.slots
    assert slots["r0c0"].worth.column("contribution") == [0.1, None]
    assert slots["r0c1"].worth.column("contribution") == [0.3]
    assert slots["r0c0"].newest_worth.blueprint == "norm"
    assert SlotHistory("x").was_used() is False


# -- episodes, phases, losses


def test_newest_episode_of_every_environment_and_the_best_one_are_kept(tmp_path):
    run = RunState.of(train_run(tmp_path / "run", envs=3, rounds=4, epochs=30))
    assert [(env.name, env.episodes, env.latest.number) for env in run.envs.values()] == [
        (f"world {i}", 4, 3) for i in range(3)
    ]
    assert all(len(e.steps) == 30 and len(e.slots["r0c0"].intervals) == 5 for e in run.latest)
    assert (run.episodes, run.env_steps, len(run.updates), len(run.rounds)) == (12, 360, 4, 4)
    assert run.best.quality == max(mean_of[2] for mean_of in run.rounds.column("quality"))


def test_phases_are_totals_so_the_newest_counts():
    run = folded(*(PhaseProfile(phase="train", wall_ms=w, cpu_ms=w / 2, calls=n) for n, w in ((1, 10.0), (2, 25.0))))
    assert [(p.phase, p.wall_ms, p.cpu_ms, p.calls) for p in run.phases] == [("train", 25.0, 12.5, 2)]


def test_unknown_or_invalid_entries_are_counted_and_skipped():
    texts = ['"kind":"from_the_future","x":1', '"kind":"step","env":0',
             '"kind":"phase_profile","phase":"train","wall_ms":"soon","cpu_ms":1,"calls":1']  # fmt: skip
    lines = [sealed(f'{{"seq":{i},"time_s":1.0,"rank":0,{text}'.encode()).rstrip() for i, text in enumerate(texts)]
    run = RunState(Path("run"))
    run.fold([decoded_row(each, 0) for each in lines])
    assert (run.unreadable, run.kinds, run.latest) == (2, {"from_the_future": 1, "step": 1, "phase_profile": 1}, [])


@pytest.mark.parametrize("spoil", [lambda x: x.replace(b'"env":0', b'"env":1'), lambda x: x[:-1], lambda x: b"",
                                   lambda x: b"[1]", lambda x: x.replace(b'"rank":0', b'"rank":1')])  # fmt: skip
def test_damaged_line_is_no_row(spoil):
    raw = line(Record(3, 1.0, 0, step(1))).rstrip()
    assert decoded_row(raw, 0).env == 0
    assert decoded_row(spoil(raw), 0) is None


def test_lines_are_decoded_together_as_one_by_one():
    lines = [line(Record(seq, 1.0, 0, step(seq + 1))).rstrip() for seq in range(4)]
    unknown = sealed(b'{"seq":9,"time_s":1.0,"rank":0,"kind":"from_the_future"').rstrip()
    not_finite = line(Record(5, 1.0, 0, step(6, quality=math.inf))).rstrip()
    changed = lines[1].replace(b'"env":0', b'"env":1')
    other_rank = line(Record(6, 1.0, 1, step(7))).rstrip()
    replaced = line(Record(0, 1.0, 0, step(8), replaced=3)).rstrip()
    for odd in ([], [unknown], [not_finite], [changed], [other_rank], [replaced], [b""], [b" "], [b"{"]):
        mixed = [*lines, *odd, *lines]
        assert decoded_rows(mixed, 0) == [row for each in mixed if (row := decoded_row(each, 0)) is not None]


# -- slots that the run did not name


@pytest.mark.parametrize("order", [1, -1])
def test_no_slot_has_two_names_where_only_transitions_name_it(order):
    first = [moved(2, "left", Stage.DORMANT, Stage.TRAINING, dwell=0), row(2, Stage.TRAINING)][::order]
    run = folded(
        row(1, Stage.DORMANT), *first, row(3, Stage.TRAINING), moved(4, "left", Stage.TRAINING, Stage.BLENDING, dwell=2)
    )
    assert [s.name for s in run.latest[0].slots.values()] == ["left"]
    assert [(i.stage, i.start, i.end) for i in run.latest[0].slots["left"].intervals] == [
        (Stage.TRAINING, 2, 3), (Stage.BLENDING, 4, 4)
    ]  # fmt: skip


def test_unnamed_slots_are_shown_by_index():
    assert stages(folded(row(1, Stage.TRAINING)), "slot 0") == [(Stage.TRAINING, "norm", 1, 1)]


def test_manifest_names_slots_where_the_run_does_not():
    run = RunState(Path("run"), {"slots": ["left", "right", "middle"]})
    run.fold(rows([moved(1, "left", Stage.DORMANT, Stage.TRAINING), row(1, Stage.TRAINING), row(2, Stage.TRAINING)]))
    assert list(run.latest[0].slots) == ["left", "right", "middle"]
    assert stages(run, "left") == [(Stage.TRAINING, "norm", 1, 2)]


# -- runs in every state


def test_finished_run_is_summarised(tmp_path):
    run = RunState.of(grow_run(tmp_path / "run"))
    assert (run.status, run.wall_s, run.losses, run.unreadable) == ("finished", 91.4, [], 0)
    assert [e.name for e in run.latest][:2] == ["grown", "no growth"]
    assert [run.latest[0].count(stage) for stage in COUNTED] == [3, 1, 1]


def test_killed_run_shows_what_it_wrote(tmp_path):
    journal = Journal(tmp_path / "run", status="running")
    journal.write(started())
    journal.write(row(1, Stage.TRAINING))
    journal.file.write(b'{"seq":2,"time_s":17')
    run = RunState.of(journal.close())
    assert (run.status, run.damage.torn, len(run.latest[0].steps)) == ("killed", 1, 1)


def test_run_without_events_is_only_a_manifest(tmp_path):
    (tmp_path / "manifest.json").write_bytes(seal_json(json.dumps({"status": "running", "task": "quick"}).encode()))
    run = RunState.of(tmp_path)
    assert (run.status, run.about("task"), run.latest, run.wall_s, run.phases) == ("killed", "quick", [], None, [])


def test_manifest_decides_how_a_run_ended(tmp_path):
    journal = Journal(tmp_path / "run", status="failed", error="boom")
    journal.write(RunFinished(status="finished", wall_s=1.0, env_steps=0))
    journal.write(Health(source="hub", severity="info", text="fine"))
    assert RunState.of(journal.close()).status == "failed"


# -- series


SERIES_ROWS = st.lists(st.none() | st.floats(-5, 5), max_size=60)


@given(SERIES_ROWS, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_groups_have_the_minimum_and_maximum_of_their_rows(values, copies):
    values = values * copies * 20
    series = Series(("x", "y"))
    for x, y in enumerate(values):
        series.add((x, y))
    low, high = series.table()
    assert len(low) <= MOST_GROUPS
    assert len(series) == len(low)
    for i, (a, b) in enumerate(zip(low[:, 1], high[:, 1], strict=True)):
        part = [y for y in values[i * series.stride : (i + 1) * series.stride] if y is not None]
        assert (math.isnan(a) and math.isnan(b)) if not part else (a, b) == (min(part), max(part))


def test_series_of_a_million_rows_is_small_and_keeps_extremes():
    series = Series(("x", "y"))
    for x in range(1_000_000):
        series.add((x, 7.0 if x == 777_777 else 1.0))
    assert MOST_GROUPS / 2 <= len(series) <= MOST_GROUPS
    assert len(series.rows) <= max(BLOCK_ROWS, series.stride)
    assert max(series.column("y")) == 7.0
    assert series.column("x")[-1] == 999_999


def test_integers_beyond_floats_do_not_count_in_means():
    means = Means(("params",))
    for value in (10**400, -(10**400), math.nan, None, 3):
        means.add(1, (value,))
    assert means.column("params") == [(3, 3, 3)]


def test_values_that_are_not_finite_are_gaps_with_a_known_place():
    series = Series(("x", "y", "z"))
    for x, y in enumerate((0.5, None, math.nan, -math.inf, 10**400)):
        series.add((x, y, None))
    assert series.column("y") == [0.5, None, None, None, None]
    assert series.non_finite() == [(2, "y"), (3, "y"), (4, "y")]


# -- the fold equals the reference, in portions of any size


def whole_run():
    return [*run_events(envs=3, slots=3, steps=30, rounds=3, seed=2)]


def test_state_equals_the_reference_over_the_whole_journal(tmp_path):
    for path in (grow_run(tmp_path / "grow"), train_run(tmp_path / "train", envs=4, rounds=5, clean=False)):
        facts, run = run_facts(list(read(path))), RunState.of(path)
        for name, value in facts.items():
            assert state_facts(run)[name] == value, name


def state_facts(run):
    """Return the facts of the reference from a state."""
    return {
        "kinds": run.kinds,
        "ops": dict(run.ops),
        "env_steps": run.env_steps,
        "steps": {e.env: [tuple(row[:-1]) for row in e.steps.rows] for e in run.latest},
        "worth": {(e.env, s.name): s.worth.rows for e in run.latest for s in e.slots.values() if len(s.worth)},
        "moves": {(e.env, life.seed): [(d.step, d.was, d.now, d.cause, decision and decision.op)
                                       for d, decision in life.moves] for e in run.latest for life in e.seeds.values()},
        "blueprints": {name: (b.germinated, b.fossilized, b.pruned) for name, b in run.blueprints.items()},
        "quality_by_round": dict(zip(run.rounds.keys(), run.rounds.column("quality"), strict=True)),
        "best": run.best and (run.best.env, run.best.number),
        "kl": [row[3] for row in run.updates.rows],
        "phases": {p.phase: (p.wall_ms, p.cpu_ms, p.calls) for p in run.phases},
        "rollbacks": [(g.env, g.step) for g in run.rollbacks],
    }  # fmt: skip


@given(st.lists(st.integers(1, 200), max_size=12))
@settings(max_examples=25, deadline=None)
def test_document_does_not_depend_on_the_portions(portions):
    events = rows(whole_run())
    once, run, at = folded(*whole_run()), RunState(Path("run")), 0
    for size in [*portions, len(events)]:
        run.fold(events[at : at + size])
        at += size
        document(run)  # reading changes nothing
    assert document(run) == document(once)
    assert [detail(run, env) for env in range(3)] == [detail(once, env) for env in range(3)]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
@example([1500])  # only steps without decisions follow
@settings(max_examples=25, deadline=None)
def test_changes_since_a_position_complete_an_older_document(portions):
    events, run, shown = rows(whole_run()), RunState(Path("run")), None
    at = 0
    for size in [*portions, len(events)]:
        run.fold(events[at : at + size])
        at += size
        shown = document(run) if shown is None else patched(shown, document(run, shown["position"]))
    full = document(run)
    assert shown == full | {"events": shown["events"]}
    assert [event["at"] for event in shown["events"]][-len(full["events"]) :] == [e["at"] for e in full["events"]]


def patched(shown, patch):
    """Return a document with a patch applied, as the page does it."""
    envs = {env["env"]: env for env in shown["envs"]} | {env["env"]: env for env in patch["envs"]}
    series = dict(shown["series"])
    for index, new in patch["series"].items():
        old = series.get(index)
        if new["at"] and old and (old["stride"], old["episode"]) == (new["stride"], new["episode"]):
            nothing = [None] * len(new["columns"]["step"])
            columns = {
                name: old["columns"].get(name, [None] * new["at"])[: new["at"]] + new["columns"].get(name, nothing)
                for name in old["columns"] | new["columns"]
            }
            new = new | {"at": 0, "columns": columns}
        series[index] = new
    merged = shown | patch | {"since": 0, "envs": [envs[i] for i in sorted(envs)], "series": series}
    return merged | {"events": shown["events"] + patch["events"]}


def test_patch_has_only_new_rows():
    run = folded(started(env_names=("a", "b")), *(step(n, env=env) for n in range(1, 30) for env in (0, 1)))
    position = run.position
    run.fold(rows([step(30, env=1)], position))
    patch = document(run, position)
    assert [env["env"] for env in patch["envs"]] == [1]
    assert patch["series"]["1"]["at"] == 29
    assert patch["series"]["1"]["columns"]["step"] == [30]
    assert set(patch["series"]) == {"1"}
    assert "settings" not in patch


def test_move_has_the_decision_that_caused_it():
    decision = Decision(env=0, episode=0, step=3, op="GERMINATE", slot="r0c0", blueprint="norm", happened=True,
                        legal_ops=("WAIT", "GERMINATE"), entropy=0.4)  # fmt: skip
    first = moved(3, "r0c0", Stage.DORMANT, Stage.GERMINATED, cause="controller")
    second = moved(3, "r0c0", Stage.GERMINATED, Stage.TRAINING)
    run = folded(started(), row(1, 0), row(2, 0), decision, first, second, row(3, Stage.TRAINING))
    (seed,) = detail(run, 0)["seeds"]
    assert [move["cause"] for move in seed["moves"]] == ["controller", "rules"]
    assert seed["moves"][0]["decision"] == {"op": "GERMINATE", "how": "norm", "legal": ["WAIT", "GERMINATE"],
                                            "entropy": 0.4, "value": None}  # fmt: skip
    assert "decision" not in seed["moves"][1]
