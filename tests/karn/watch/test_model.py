"""The model of the terminal view, without a terminal: event fold, status checks, text formatting and lines."""

import math
import os
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from esper.karn.watch import alarm_rules, layout, tables, views
from esper.karn.watch.event_text import event_line
from esper.karn.watch.find_run import find_run
from esper.karn.watch.formatting import bar, count, duration, letters, points, quality, short, sparkline
from esper.karn.watch.lines import fit, plain, whole_words
from esper.karn.watch.model import WatchModel
from esper.karn.watch.plain import frame
from esper.leyline.errors import EsperError
from esper.leyline.events import Decision, Episode, Governor, Health, Lifecycle, RunFinished, Step, Worth
from esper.leyline.stages import SeedStage
from esper.nissa.journal_reader import Entry
from tests.support.live_run import entries_of, run_events, started, update, write_run

D, T, B, F, P = (int(SeedStage[n]) for n in ("DORMANT", "TRAINING", "BLENDING", "FOSSILIZED", "PRUNED"))


def step(env=0, episode=0, t=1, op="WAIT", quality=0.5, stages=(0, 0), **more):
    values = {
        "world": 0, "committed_quality": None, "val_loss": None, "train_loss": 0.5, "params": 100,
        "alphas": tuple(0.0 for _ in stages), "blueprints": tuple("" for _ in stages),
    }  # fmt: skip
    return Step(env=env, episode=episode, step=t, op=op, quality=quality, stages=stages, **(values | more))


def model_of(*events, apart=0.1, now=None):
    model = WatchModel()
    model.feed(entries_of(events, apart=apart), now)
    return model


@cache
def pretended(envs, slots):
    """Return a short synthetic run of `envs` environments, and its state before the end."""
    return model_of(*run_events(envs=envs, slots=slots, steps=6, rounds=1, ends=False))


def small_run(**more):
    return started(envs=2, slots=2, steps=10, rounds=2, **more)


# the fold


def test_environments_and_slots_are_shown_before_their_first_step():
    model = model_of(small_run())

    assert [e.name for e in model.envs.values()] == ["digits/0", "digits/1"]
    assert model.slot_names == ["r0c0", "r0c1"]
    assert (model.envs[0].quality, model.envs[0].params) == (None, None)
    assert (model.steps, model.rounds, model.done) == (10, 2, 0.0)


def test_steps_carry_quality_best_losses_and_slots():
    model = model_of(
        small_run(),
        step(t=1, quality=0.6, stages=(T, D), blueprints=("norm", ""), alphas=(0.0, 0.0)),
        step(t=2, quality=0.8, stages=(T, D), blueprints=("norm", "")),
        step(t=3, quality=0.7, stages=(B, D), blueprints=("norm", ""), alphas=(0.25, 0.0)),
    )
    env = model.envs[0]

    assert (env.step, env.quality, env.best, env.best_step) == (3, 0.7, 0.8, 2)
    assert list(env.qualities) == [0.6, 0.8, 0.7]
    assert (env.slots[0].stage, env.slots[0].since, env.slots[0].alpha) == (B, 3, 0.25)
    assert (env.growing, env.fossils) == (1, 0)
    assert model.env_steps == 3


def test_new_episode_resets_the_environment():
    model = model_of(small_run(), step(quality=0.9, stages=(F, B)), step(episode=1, quality=0.2))
    env = model.envs[0]

    assert (env.best, env.episodes, env.growing, env.fossils) == (0.2, 2, 0, 0)
    assert model.done == pytest.approx((1 + 1 / 10) / 4)  # one env of two has done 1.1 of its 2 episodes


def test_worth_and_gradients_are_dropped_with_their_seed():
    worth = Worth(env=0, episode=0, step=1, slot="r0c0", seed=0, blueprint="norm", contribution=0.02,
                  contribution_se=0.01)  # fmt: skip
    alive = [small_run(), step(stages=(B, D), blueprints=("norm", "")), worth]

    assert model_of(*alive).envs[0].slots[0].worth["contribution"] == 0.02
    pruned = model_of(*alive, step(t=2, stages=(P, D)))
    assert pruned.envs[0].slots[0].worth == {}


def test_journal_without_steps_still_shows_seeds_and_episodes():
    life = Lifecycle(env=1, episode=0, step=4, slot="r0c1", seed=0, blueprint="lora", was="DORMANT", now="GERMINATED",
                     cause="controller", params=10, alpha=0.0, dwell_epochs=0)  # fmt: skip
    end = Episode(env=1, episode=0, world=0, name="digits/1", steps=10, quality=0.8, quality_best=0.85, params=120,
                  host_params=100, germinated=1, fossilized=0, pruned=0, structure={})  # fmt: skip
    model = model_of(small_run(), life, end)
    env = model.envs[1]

    assert (env.slots[1].stage, env.slots[1].blueprint) == (SeedStage.GERMINATED, "lora")
    assert (env.has_ended, env.step, env.quality, env.best, model.env_steps) == (True, 10, 0.8, 0.85, 10)


def test_actions_are_counted_over_unforced_steps_only():
    model = model_of(
        small_run(),
        step(t=1, stages=(F, P)),  # both slots were empty before it: germinating was legal
        step(t=2, stages=(F, F)),  # a fossil and a cooling slot: only WAIT is legal
        step(t=3, stages=(F, F)),
        step(env=1, t=1, op="GERMINATE", stages=(T, D)),
        Decision(env=1, episode=0, step=2, op="WAIT", slot="", happened=True, legal_ops=("WAIT",)),
        step(env=1, t=2, stages=(T, D)),  # the journal itself marks the step as forced
    )

    assert model.ops == Counter(WAIT=1, GERMINATE=1)
    assert model.forced == 3


def test_event_list_omits_steps_and_wait_decisions():
    wait = Decision(env=0, episode=0, step=1, op="WAIT", slot="", happened=True, legal_ops=("WAIT", "GERMINATE"))
    grow = Decision(env=0, episode=0, step=2, op="GERMINATE", slot="r0c0", happened=True, legal_ops=("WAIT",))
    model = model_of(small_run(), wait, step(), grow, step(t=2, op="GERMINATE"))

    assert [e.kind for e in model.happenings] == ["run_started", "decision"]
    assert [e.data["op"] for e in model.envs[0].happenings] == ["GERMINATE"]
    assert (model.envs[0].act, model.envs[0].act_slot) == ("GERMINATE", "r0c0")


def test_best_episodes_come_first_and_unmeasured_ones_last():
    def end(q, i):
        return Episode(env=0, episode=i, world=0, name="a", steps=1, quality=q, quality_best=q, params=1,
                       host_params=1, germinated=0, fossilized=0, pruned=0, structure={})  # fmt: skip

    model = model_of(small_run(), *(end(q, i) for i, q in enumerate([0.3, None, 0.9, math.nan, 0.5])))

    assert [d["episode"] for d in model.best[:3]] == [2, 4, 0]
    assert model.episodes == 5


def test_unknown_missing_or_wrongly_typed_fields_are_no_error():
    entries = [
        Entry(0, 1.0, 0, "from_the_future", {"x": 1}),
        Entry(1, 1.0, 0, "step", {}),
        Entry(2, 1.0, 0, "step", {"env": 3, "episode": 0, "stages": 7, "alphas": None, "quality": "high"}),
        Entry(3, 1.0, 0, "lifecycle", {"env": 0, "slot": None, "now": "MELTED"}),
        Entry(4, 1.0, 0, "update", {"entropy": [1], "kl": "x"}),
        Entry(5, 1.0, 0, "health", {"counters": 4}),
        Entry(6, 1.0, 0, "episode", {"env": "two"}),
        Entry(7, 1.0, 0, "run_started", {"env_names": 4, "slots": None, "steps": "many"}),
        Entry(8, 1.0, 0, "governor", {}),
        Entry(9, 1.0, 0, "run_finished", {}),
    ]
    model = WatchModel()

    assert model.feed(entries) == 10
    assert frame(model, "odd", 2.0, 80)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 3),
            st.one_of(st.none(), st.floats(0, 1), st.just(math.nan)),
            st.lists(st.integers(0, 8), min_size=2, max_size=2),
        ),
        max_size=40,
    ),
    st.integers(1, 40),
)
def test_fold_equals_the_reference_for_any_batching(rows, cut):
    events = [small_run()]
    events += [step(env=e, episode=i, t=k + 1, quality=q, stages=tuple(s)) for k, (e, i, q, s) in enumerate(rows)]
    entries = entries_of(events)
    model = WatchModel()
    for i in range(0, len(entries), cut):
        model.feed(entries[i : i + cut])

    for env in range(3):
        mine = [(k, *row) for k, row in enumerate(rows) if row[0] == env]
        if not mine:
            continue
        last = mine[-1]
        episode = []
        for row in reversed(mine):  # the trailing steps that share its episode
            if row[2] != last[2]:
                break
            episode.insert(0, row)
        seen = [row[3] for row in episode if row[3] is not None and math.isfinite(row[3])]
        state = model.envs[env]
        assert state.best == (max(seen) if seen else None)
        assert [s.stage for s in state.slots] == last[4]
        assert len(state.qualities) == len(episode)
        assert state.episodes == sum(a[2] != b[2] for a, b in pairwise(mine)) + 1
        for i, slot in enumerate(state.slots):
            since = 0
            for before, row in zip([None, *episode], episode, strict=False):
                if row[4][i] != (D if before is None else before[4][i]):
                    since = row[0] + 1
            assert slot.since == since
    assert model.env_steps == len(rows)


# run status and warnings


def test_silence_is_judged_by_the_runs_own_event_rate():
    quick = model_of(*run_events(ends=False), apart=0.1)
    slow = model_of(*run_events(ends=False), apart=20.0)

    def words(model, *quiet):
        return [alarm_rules.state(model, model.last_s + q)[0] for q in quiet]

    assert words(quick, 1, 10, 60) == ["LIVE", "SLOW", "STALE"]
    assert words(slow, 1, 10, 60, 200) == ["LIVE", "LIVE", "SLOW", "STALE"]


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted"])
def test_final_status_comes_from_the_run(status):
    model = model_of(small_run(), RunFinished(status=status, wall_s=1.0, env_steps=0, error="boom"))

    assert alarm_rules.state(model, 1e9)[0] == status.upper()
    assert ("boom" in plain(views.anomaly(model, 1e9, 80))) == (status == "failed")


def test_run_without_owner_is_killed_unless_events_still_arrive():
    model = model_of(small_run(), step())
    model.status = "killed"
    assert alarm_rules.state(model, model.fresh_at + 1)[0] == "KILLED"  # its events are recent, but it has no owner

    model = model_of(small_run(), step(), now=500.0)
    model.status = "killed"
    assert alarm_rules.state(model, 501.0)[0] == "LIVE"
    assert alarm_rules.state(model, 560.0)[0] == "KILLED"


def test_resumed_run_is_alive_and_its_pause_is_not_counted():
    entries = entries_of([small_run(), step(), RunFinished(status="interrupted", wall_s=1.0, env_steps=1)], at=0.0)
    again = entries_of([small_run(), step(t=2)], at=5000.0)
    model = WatchModel()
    model.feed([*entries, *(e._replace(seq=e.seq + 3) for e in again)])

    assert alarm_rules.state(model, 5000.2)[0] == "LIVE"
    assert alarm_rules.pace(model, model.last_s).elapsed_s < 1.0
    assert model.envs[0].step == 2


def test_run_without_events_is_waited_for():
    assert alarm_rules.state(WatchModel(), 5.0)[0] == "WAITING"
    assert "no events yet" in frame(WatchModel(), "x", 5.0, 80)


def test_pace_is_measured_over_a_window_and_gives_the_remaining_time():
    events = [started(envs=1, slots=0, steps=100, rounds=1), *(step(t=t, stages=()) for t in range(1, 51))]
    model = model_of(*events, apart=0.5)
    pace = alarm_rules.pace(model, model.last_s)

    assert pace.steps_per_s == pytest.approx(2.0, rel=0.1)
    assert pace.eta_s == pytest.approx(25.0, rel=0.1)
    assert alarm_rules.pace(model, model.last_s + 25).steps_per_s < 1.0  # it has stalled, and that is shown


def anomaly(*events):
    model = model_of(small_run(), *events)
    return plain(views.anomaly(model, model.last_s, 200))


def test_all_clear_without_problems():
    assert anomaly(step(), update(0)) == "ALL CLEAR"


def test_interrupted_run_is_not_all_clear():
    interrupted = RunFinished(status="interrupted", wall_s=1.0, env_steps=1)
    assert anomaly(step(), update(0), interrupted) == "interrupted before its end"


def test_return_is_shown_at_80_columns():
    model = model_of(small_run(), step(), update(0))
    assert "return" in plain(views.ppo_line(model, 80))


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (step(env=1, train_loss=math.nan), "train loss not finite in digits/1"),
        (step(quality=-math.inf), "quality not finite in digits/0"),
        (Governor(env=0, episode=0, step=3, alarm="loss_spike", action="rolled back"), "loss_spike (rolled back)"),
        (Health(source="hub", severity="error", text="sink jsonl was retired"), "hub: sink jsonl was retired"),
        (
            Health(source="hub", severity="info", text="-", counters={"Board.given_up": 4.0}),
            "sink Board missed 4 events",
        ),
        (Health(source="x", severity="info", text="-", counters={"dropped": 4.0}), "events lost: dropped 4"),
        (update(0, kl=0.2), "KL 0.200"),
        (update(0, kl=math.nan), "KL NaN"),
        (update(0, policy_loss=math.nan), "policy loss not finite"),
        (update(0, skipped=3), "skipped 3"),
        (update(0, entropy={"op": 0.02}, learnable={"op": 0.5}), "entropy collapsed: op 0.02"),
    ],
)
def test_each_problem_is_reported(event, said):
    line = anomaly(step(), event)

    assert said in line
    assert "ALL CLEAR" not in line


def test_events_missed_by_a_sink_are_not_called_lost():
    counters = {"emitted": 107.0, "unencodable": 0.0, "Board.given_up": 10.0, "JsonlSink.given_up": 0.0}
    last = Health(source="hub", severity="warning", text="107 events; 10 events lost", counters=counters)
    model = model_of(small_run(), step(), last)
    assert anomaly(step(), last) == "sink Board missed 10 events"
    assert "lost" not in frame(model, "x", model.last_s, 100)


def test_text_of_any_length_is_handled_in_bounded_time():
    model = model_of(small_run(), Health(source="x", severity="error", text="y" * 30_000_000))
    assert "yyy" in frame(model, "x", model.last_s, 80)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_truncated_text_keeps_the_worth_of_a_seed(width):
    move = Lifecycle(env=0, episode=0, step=10, slot="r0c1", seed=0, blueprint="conv_light", was="BLENDING",
                     now="HOLDING", cause="rules", params=1, alpha=1.0, dwell_epochs=3, contribution=0.012,
                     contribution_se=0.004)  # fmt: skip
    model = model_of(started(envs=1, slots=2, names=["same structure from step 0"]), move)
    line = plain(event_line(model, model.happenings[-1], width))
    assert line.endswith("HOLDING, +1.2 ± 0.4 se" + " (rules)" * (width >= 100))
    assert cell_len(line) <= width


# slots that the run did not name


def nameless(*events):
    """Return what is shown of a run without `run_started`."""
    model = model_of(*events)
    return model, [[(s.name, s.stage) for s in env.slots] for env in model.envs.values()]


def named_move(t=1, slot="left"):
    return Lifecycle(env=0, episode=0, step=t, slot=slot, seed=0, blueprint="norm", was="DORMANT", now="TRAINING",
                     cause="rules", params=1, alpha=0.0, dwell_epochs=0)  # fmt: skip


def test_unnamed_slots_are_shown_by_index():
    assert nameless(step(stages=(0, T)))[1] == [[("slot 0", D), ("slot 1", T)]]


@pytest.mark.parametrize("order", [1, -1])
def test_no_slot_is_shown_under_two_names(order):
    events = [named_move(), step(stages=(0, T))][::order]
    assert nameless(*events, step(t=2, stages=(0, T)))[1] == [[("left", T)]]


def test_manifest_names_slots_unless_the_run_does():
    model = WatchModel()
    model.name_slots(["right", "left"])
    model.feed(entries_of([named_move(), step(stages=(0, T))]))
    assert [(s.name, s.stage) for s in model.envs[0].slots] == [("right", D), ("left", T)]
    model.feed(entries_of([small_run()]))
    assert model.slot_names == ["r0c0", "r0c1"]


@pytest.mark.parametrize("learnable", [{}, {"op": 0.0}, {"op": None}])
def test_head_without_unforced_steps_has_not_collapsed(learnable):
    assert anomaly(update(0, entropy={"op": 0.0}, learnable=learnable)) == "ALL CLEAR"


def test_worst_problem_comes_first_and_the_rest_are_counted():
    model = model_of(small_run(), update(0, kl=0.2), step(train_loss=math.nan), step(env=1, train_loss=math.inf))
    line = plain(views.anomaly(model, model.last_s, 60))

    assert line.startswith("train loss not finite in digits/0 and in 1 more")
    assert line.endswith("+1 more")


def test_past_alarm_is_a_note_and_prevents_all_clear():
    alarm = Governor(env=0, episode=0, step=3, alarm="loss_spike", action="rolled back")
    model = model_of(small_run(), alarm, *(step(t=t) for t in range(4, 200)), apart=1.0)

    line = plain(views.anomaly(model, model.last_s, 100))
    assert line.startswith("NOTES   governor: 1 alarm")
    assert "ALL CLEAR" not in line


# text


def test_unmeasured_is_a_dash_and_non_finite_is_spelled_out():
    for word in (short, count, duration, lambda v: quality(v, True), lambda v: points(v, None, True)):
        assert [word(None), word(math.nan), word(math.inf)] == ["–", "NaN", "inf"]
    assert points(0.012, math.nan, True) == "+1.2 ± NaN"
    assert points(0.012, 0.004, True) == "+1.2 ± 0.4"
    assert points(-1.25, 0.5, False) == "-1.25 ± 0.5"


@pytest.mark.parametrize(
    ("value", "said"), [(0.0, "0.000"), (0.4321, "0.432"), (12.34, "12.3"), (1234.5, "1234"), (1e-5, "1.0e-05")]
)
def test_short_numbers(value, said):
    assert short(value) == said


@pytest.mark.parametrize(("value", "said"), [(950, "950"), (12_345, "12.3k"), (1_500_000, "1.50M"), (2.5e9, "2.50G")])
def test_counts(value, said):
    assert count(value) == said


@pytest.mark.parametrize(("value", "said"), [(41, "0:41"), (725, "12:05"), (10_930, "3:02:10"), (187_200, "2d 04h")])
def test_durations(value, said):
    assert duration(value) == said


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=True, width=32)), max_size=60), st.integers(1, 30))
def test_sparkline_has_its_width_and_ends_with_the_newest_value(values, width):
    line = sparkline(values, width)

    assert len(line) == width
    if values and len(values) >= width:
        last = values[-1]
        assert (line[-1] == " ") == (last is None)
        assert (line[-1] == "!") == (last is not None and not math.isfinite(last))


def test_sparkline_rises_with_its_values():
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5], 4) == "▄▄  "


@given(st.one_of(st.none(), st.floats(allow_nan=True)), st.integers(1, 30))
def test_bar_has_its_width(share, width):
    assert len(bar(share, width)) == width


def test_stage_letters_become_counts_in_narrow_columns():
    assert letters([D, T, B, F, P], 5) == "·TBFx"
    assert letters([T, T, B] + [D] * 22, 5) == "T2 B1"
    assert letters([D] * 25, 5) == "·"


@given(st.text(max_size=40), st.integers(1, 30), st.booleans())
def test_cells_have_the_exact_width(said, width, keep_end):
    assert cell_len(fit(said, width, keep_end=keep_end)) == width


def test_nothing_is_cut_within_a_word():
    assert whole_words("governor: loss spike, rolled back to step 12", 30) == "governor: loss spike…"
    assert whole_words("short", 30) == "short"


# lines


@pytest.mark.parametrize("width", [60, 80, 100, 120, 150, 200])
@pytest.mark.parametrize(("envs", "slots"), [(1, 0), (1, 1), (4, 3), (128, 25)])
def test_every_line_fits_and_tables_are_aligned(width, envs, slots):
    model = pretended(envs, slots)
    table = tables.env_table(model, width)
    lines = [*views.header(model, "20251115-230915-digits-a3f1", model.last_s, width), table.head()]
    lines += [table.line(e) for e in model.envs.values()]
    slot_table = tables.slot_table(model, model.envs[0], width)
    lines += [slot_table.head(), *(slot_table.line(s) for s in model.envs[0].slots)]
    lines += [views.ppo_line(model, width), views.mix_line(model, width), views.best_line(model, width)]
    lines += [event_line(model, e, width) for e in model.happenings]

    assert max(cell_len(plain(line)) for line in lines) <= width
    column = plain(table.head()).index("QUAL%") + 5
    for env in model.envs.values():
        assert plain(table.line(env))[:column].endswith(quality(env.quality, True))


def test_qualities_that_are_no_fractions_keep_their_unit():
    model = model_of(small_run(), step(quality=-2.345))

    assert not model.is_percent
    said = frame(model, "x", model.last_s, 100)
    assert "-2.35" in said or "-2.34" in said
    assert "%" not in said.split("\n")[4]


def test_frame_shows_unmeasured_as_a_dash_and_nan_as_nan():
    model = model_of(small_run(), step(quality=None, train_loss=math.nan, stages=(T, D), blueprints=("norm", "")))
    rows = frame(model, "x", model.last_s, 100).split("\n")
    row = next(r for r in rows if r.startswith("digits/0"))

    assert row.split()[2:5] == ["–", "–", "NaN"]  # no quality, no best, no trend; the loss is NaN


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40), (150, 50), (200, 60), (80, 12)])
@pytest.mark.parametrize(("envs", "slots"), [(0, 0), (1, 1), (4, 3), (128, 25)])
def test_layout_uses_every_row_and_no_more(size, envs, slots):
    model = pretended(envs, slots) if envs else WatchModel()
    width, height = size
    p = layout.plan(model, width, height, envs)
    left = p.summary + 1 + p.envs + p.gap + 1 + p.slots + ((p.gap + 1 + p.best) if p.best else 0)
    tail = p.ppo + p.mix + p.best_line

    assert min(p.envs, p.slots, p.events) >= 1
    if p.right:
        assert layout.FIXED + left + tail <= height
        assert layout.FIXED + 1 + p.events + tail == height
    elif height > 12:
        assert layout.FIXED + left + p.gap + 1 + p.events + tail == height


# run selection


def test_run_is_found_by_directory_parent_id_and_latest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(["20251115-120000-a-0001", "20251115-130000-b-0002"]):
        run = write_run(tmp_path / "runs" / name, [small_run()], status="finished")
        os.utime(run / "events", (1000 + i, 1000 + i))
    new = tmp_path / "runs" / "20251115-130000-b-0002"

    assert find_run(new) == new
    assert find_run(tmp_path / "runs") == new
    assert find_run(Path("latest")).resolve() == new
    assert find_run(Path("20251115-12")).name == "20251115-120000-a-0001"


def test_unknown_run_is_an_error_that_lists_existing_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "one-a", [small_run()])
    write_run(tmp_path / "runs" / "one-b", [small_run()])

    with pytest.raises(EsperError, match="one-b, one-a"):
        find_run(tmp_path / "nowhere")
    with pytest.raises(EsperError, match="2 runs begin with 'one'"):
        find_run(Path("one"))


def test_empty_directory_is_waited_for(tmp_path):
    assert find_run(tmp_path) is None


def test_synthetic_run_has_the_requested_size():
    model = model_of(*run_events(envs=3, slots=4, steps=12, rounds=2))

    assert model.done == 1.0
    assert model.env_steps == 72
    assert alarm_rules.state(model, 1e9)[0] == "FINISHED"
