"""SQL over runs: every event is read once and typed, the views are correct, and only the run is accessible."""

import io
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from esper.commands.sql import cell, distinct, run_sql, split_arguments
from esper.karn import sql, views
from esper.karn.sql import Runs
from esper.leyline.checksums import seal_json
from esper.leyline.errors import ConfigError, EsperError, RunError
from esper.leyline.events import (
    KINDS,
    Checkpoint,
    Decision,
    Episode,
    GovernorAlarm,
    Gradient,
    Health,
    Lifecycle,
    PhaseProfile,
    RunFinished,
    RunStarted,
    SeedWorth,
    Step,
    Update,
)  # fmt: skip
from esper.nissa import journal_reader as journal
from esper.nissa.journal_writer import JsonlSink
from esper.nissa.record import Record, line, sealed
from esper.nissa.run import RunDirectory
from tests.support.journal_checks import missing_seqs
from tests.support.run_outcomes import restore_signal_handling

pytest.importorskip("duckdb")
DOC = Path(__file__).parents[2] / "docs" / "telemetry.md"
AT = {"env": 0, "episode": 0}


def step(n, *, env=0, op="WAIT", params=100, stages=(0, 0), **fields):
    fields = {"quality": n / 10, "committed_quality": None, "val_loss": 0.5, "train_loss": math.nan} | fields
    return Step(env=env, episode=0, step=n, world=env, op=op, params=params, stages=stages, alphas=(0.0, 0.5),
                blueprints=("", "norm"), **fields)  # fmt: skip


def moved(n, was, now, *, slot="r0c1", dwell=2, blueprint="norm", env=0):
    return Lifecycle(env=env, episode=0, step=n, slot=slot, seed=0, blueprint=blueprint, was=was, now=now,
                     cause="controller", params=20, alpha=0.5, dwell_epochs=dwell)  # fmt: skip


def episode(env, quality, *, world=0, germinated=1, baseline=None, params=150, host_params=100, structure=None):
    structure = {"r0c1": "norm"} if structure is None and germinated else structure or {}
    return Episode(env=env, episode=0, world=world, name=f"env {env}", steps=3, quality=quality, quality_best=quality,
                   test_quality=quality - 0.01, baseline_quality=baseline, params=params,
                   host_params=host_params, germinated=germinated, fossilized=min(germinated, 1), pruned=0,
                   structure=structure)  # fmt: skip


def started(**fields):
    about = {"run_id": "x", "command": "esper grow", "task": "rescue", "controller": "heuristic", "seed": 7}
    return RunStarted(**about | {"env_names": ("a", "b"), "slots": ("r0c0", "r0c1"), "steps": 3, "host_params": 100}
                      | fields)  # fmt: skip


EVENTS = (
    started(),
    step(1, op="GERMINATE"),
    Decision(**AT, step=1, op="GERMINATE", slot="r0c1", blueprint="norm", happened=True, legal_ops=("WAIT",)),
    moved(1, "DORMANT", "GERMINATED"),
    step(2, params=120, stages=(0, 2), reward=math.inf),
    moved(2, "GERMINATED", "TRAINING", dwell=1),
    Gradient(**AT, step=2, slot="r0c1", norm=0.1, ratio=0.2, health=1.0),
    moved(3, "TRAINING", "FOSSILIZED", dwell=4),
    moved(3, "TRAINING", "PRUNED", slot="r0c0", dwell=6, blueprint="attention"),
    step(3, params=150, stages=(6, 5)),
    SeedWorth(**AT, step=3, slot="r0c1", seed=0, blueprint="norm", contribution=0.02, contribution_se=0.01),
    GovernorAlarm(**AT, step=3, alarm="divergence", action="rolled back", value=9.0, limit=5.0, restored_step=1),
    PhaseProfile(phase="train", wall_ms=10.0, cpu_ms=9.0, calls=1),
    PhaseProfile(phase="train", wall_ms=3000.0, cpu_ms=2500.0, calls=3),
    PhaseProfile(phase="validate", wall_ms=1000.0, cpu_ms=900.0, calls=3),
    Update(round=0, epochs=1, minibatches=4, policy_loss=-0.1, value_loss=0.2, entropy_loss=0.0, kl=0.01,
           clip_fraction=0.1, ratio_min=0.9, ratio_max=1.1, explained_variance=0.5, value_nrmse=0.7, grad_norm=1.0,
           lr=3e-4, entropy={"op": 0.5, "slot": None}, learnable={"op": 1.0}),
    episode(0, 0.9, world=0, baseline=0.5),
    episode(1, 0.6, world=0, germinated=0, params=100),
    Checkpoint(path="checkpoints/1", reason="interval", size_bytes=10, write_ms=1.0),
    Health(source="hub", severity="info", text="all \x1b[31mred", counters={"coalesced": 0.0}),
    RunFinished(status="finished", wall_s=2.5, env_steps=3),
)  # fmt: skip


def make_run(root, events=EVENTS, *, name="one", rank=0, first_seq=0):
    with RunDirectory.create(root, "rescue", name=name, manifest={"config": {"lr": 0.1}}) as run:
        write(run.path, events, rank=rank, first_seq=first_seq)
    return run.path


def write(path, events, *, rank=0, first_seq=0, segment_bytes=1500, since_s=1e9):
    sink = JsonlSink(path / "events", rank=rank, segment_bytes=segment_bytes)
    sink.write([Record(first_seq + i, since_s + first_seq + i, rank, event) for i, event in enumerate(events)])
    sink.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def runs(run):
    with Runs([run]) as opened:
        yield opened


def test_every_kind_has_a_table_and_occurs_in_the_sample(runs):
    assert {type(event) for event in EVENTS} == set(KINDS.values())
    for name, kind in KINDS.items():
        expected = sum(type(event) is kind for event in EVENTS)
        assert runs.ask(f"select count(*) from {views.table_name(name)}").rows == [(expected,)], name


def same(a, b):
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def test_every_field_of_every_line_equals_the_journal_reader(run, runs):
    for entry in journal.read(run):
        table = views.table_name(entry.kind)
        answer = runs.ask(f"select * from {table} where seq = {entry.seq} and rank = {entry.rank}")
        (row,) = answer.rows
        fields = dict(zip(answer.columns, row, strict=True))
        assert (fields.pop("run"), fields.pop("extra"), fields.pop("time_s")) == ("one", None, entry.time_s)
        assert {"seq": entry.seq, "rank": entry.rank}.items() <= fields.items()
        assert same({k: v for k, v in fields.items() if k not in ("seq", "rank")}, entry.data), entry.kind


def test_field_columns_never_clash_with_common_columns():
    for kind in KINDS.values():
        assert not {"run", "seq", "time_s", "rank", "extra", "kind"} & set(kind.__struct_fields__)


def test_unmeasured_is_null_and_nan_stays_nan(runs):
    assert runs.ask("select count(*) from steps where committed_quality is null").rows == [(3,)]
    assert runs.ask("select count(*) from steps where isnan(train_loss) and train_loss is not null").rows == [(3,)]
    assert runs.ask("select count(*) from steps where isinf(reward)").rows == [(1,)]


def test_damaged_lines_duplicates_and_ranks_match_the_journal(tmp_path):
    path = make_run(tmp_path)
    first = path / "events" / "rank0-00000.jsonl"
    lines = first.read_bytes().splitlines(keepends=True)
    leap = line(Record(900, 1.0, 0, step(2)))
    other_rank = line(Record(3, 1.0, 5, step(2)))
    damaged = [
        b"\0\0\0\n",
        lines[1][:40] + b"\n",
        b"[1]\n",
        b"7\n",
        b'{"seq":1}\n',
        b'{"a":"\xff"}\n',
        other_rank,
        b"\n",
    ]
    again = line(Record(1, 3e9, 0, step(1)))
    first.write_bytes(b"".join([lines[0], *damaged, lines[1], again, leap, *lines[2:]]))
    write(path, [step(n, env=1) for n in range(1, 6)], rank=1)
    write(path, EVENTS[1:3], first_seq=1, since_s=2e9)  # sequence numbers already used
    with (path / "events" / "rank1-00007.jsonl").open("wb") as torn:
        whole = line(Record(5, 2e9, 1, step(6, env=1)))
        torn.write(whole + whole[:30])
    damage = journal.Damage()
    expected = sorted((e.rank, e.seq, e.kind, e.time_s) for e in journal.read(path, damage))

    with Runs([path]) as opened:
        rows = opened.ask("select rank, seq, kind, time_s from events order by rank, seq").rows
        counted = sum(opened.ask(f"select count(*) from {views.table_name(k)}").rows[0][0] for k in KINDS)
        counts = opened.ask("select events, damaged from runs").rows

    assert rows == expected
    assert counted == len(expected)
    assert counts == [(len(expected), damage.lines + damage.torn)]
    assert damage.lines >= 8


def test_reading_segments_in_batches_gives_the_same_result(run, runs, monkeypatch):
    monkeypatch.setattr(sql, "BATCH_BYTES", 1)
    with Runs([run]) as opened:
        for table in ("events", "steps", "lifecycle"):
            query = f"select * from {table} order by seq"
            assert repr(opened.ask(query)) == repr(runs.ask(query))


def test_fields_and_kinds_of_a_newer_version_are_kept(tmp_path):
    path = make_run(tmp_path)
    newer = json.loads(line(Record(100, 2e9, 0, step(4))))
    del newer["crc"]
    newer |= {"mood": "calm", "deep": {"a": [1]}, "nothing": None}
    other = {"seq": 101, "time_s": 2e9, "rank": 0, "kind": "weather", "rain_mm": 3}
    (path / "events" / "rank0-00099.jsonl").write_bytes(
        b"".join(sealed(json.dumps(each).encode()[:-1]) for each in (newer, other))
    )

    with Runs([path]) as opened:
        (extra,) = opened.ask("select extra from steps where seq = 100").rows[0]
        assert json.loads(extra) == {"mood": "calm", "deep": {"a": [1]}, "nothing": None}
        assert opened.ask("select extra from steps where seq != 100").rows == [(None,)] * 3
        assert opened.ask("select kind, (event->>'rain_mm')::int from other_events").rows == [("weather", 3)]


def test_steps_repeated_after_a_resume_show_the_later_version(tmp_path):
    first = [started(), step(1), step(1, env=1), step(2), step(2, env=1), moved(2, "DORMANT", "GERMINATED"), step(3)]
    again = [started(), step(2, quality=0.9), moved(2, "DORMANT", "GERMINATED", blueprint="lora"), step(3, quality=0.8)]
    path = make_run(tmp_path, [*first, *again])

    with Runs([path]) as opened:
        assert opened.ask("select step, quality from steps where env = 0 order by step").rows == [
            (1, 0.1), (2, 0.9), (3, 0.8)
        ]  # fmt: skip
        assert opened.ask("select count(*) from steps where env = 1").rows == [(2,)]  # its steps were not repeated
        assert opened.ask("select blueprint from lifecycle").rows == [("lora",)]
        assert opened.ask("select count(*) from events").rows == [(len(first) + len(again),)]


def test_views_return_expected_rows(runs):
    def ask(query):
        return runs.ask(query).rows

    assert ask(
        "select status, task, controller, seed, envs, wall_s, manifest->'config'->>'lr' "
        "from runs join manifests using (run)"
    ) == [("finished", "rescue", "heuristic", 7, 2, 2.5, "0.1")]
    assert ask("select slot, stage, alpha, blueprint from slots where step = 3 order by slot") == [
        ("r0c0", "PRUNED", 0.0, None), ("r0c1", "FOSSILIZED", 0.5, "norm")
    ]  # fmt: skip
    assert ask("select blueprint, visits, epochs_mean, pruned_share from stage_times where stage = 'TRAINING' "
               "order by 1") == [("attention", 1, 6.0, 1.0), ("norm", 1, 4.0, 0.0)]  # fmt: skip
    assert ask("select op, steps, round(share, 3), happened_share from action_mix order by op") == [
        ("GERMINATE", 1, 0.333, 1.0), ("WAIT", 2, 0.667, None)
    ]  # fmt: skip
    assert ask("select phase, wall_s, share, cpu_s, calls, ms_per_call from phase_shares order by phase") == [
        ("train", 3.0, 0.75, 2.5, 3, 1000.0), ("validate", 1.0, 0.25, 0.9, 3, 1000.0 / 3)
    ]  # fmt: skip
    assert ask("select params, added_params, params_ratio from growth order by step") == [
        (100, 0, 1.0), (120, 20, 1.2), (150, 50, 1.5)
    ]  # fmt: skip
    assert ask("select env, peer, round(gain, 6), round(test_gain, 6), round(gain_per_added_param, 6) from outcomes "
               "order by env") == [(0, "baseline", 0.4, 0.3, 0.008), (1, None, None, None, None)]  # fmt: skip
    assert ask("select * from losses") == []
    assert ask("select entropy['op'], entropy['slot'], learnable['slot'] from updates") == [(0.5, None, None)]


def test_gaps_in_the_sequence_are_losses(tmp_path):
    path = make_run(tmp_path, [step(1), step(2)], first_seq=2)
    write(path, [step(3)], first_seq=9)

    with Runs([path]) as opened:
        rows = opened.ask("select after_seq, before_seq, missing from losses order by before_seq").rows

    assert rows == [(-1, 2, 2), (3, 9, 5)]
    assert [(gap.start - 1, gap.stop, len(gap)) for gap in missing_seqs(journal.read(path))[0]] == rows


def test_several_runs_are_queried_together_with_their_baseline(tmp_path):
    grown = make_run(tmp_path, [started(), episode(0, 0.9)], name="grown")
    bare = make_run(tmp_path, [started(), episode(0, 0.6, germinated=0, params=100)], name="bare")
    with Runs([grown, bare]) as opened:
        assert opened.ask("select run, peer, round(gain, 6) from outcomes order by run").rows == [
            ("bare", None, None), ("grown", "episode", 0.3)
        ]  # fmt: skip
        for view in views.catalogue():
            assert opened.ask(f"describe {view.name}").rows[0][0] == "run"
    elsewhere = make_run(tmp_path / "elsewhere", name="grown")
    assert sql.run_names([grown, elsewhere]) == [f"{tmp_path.name}/grown", "elsewhere/grown"]
    with pytest.raises(ConfigError, match="twice"):
        Runs([grown, grown])


def test_only_the_bare_host_of_the_same_world_is_a_baseline(tmp_path):
    """Use the runs of `esper grow`: grown, no growth, same structure from step 0, a wider host; and unrelated runs."""
    events = [
        started(env_names=tuple("abcdef")),
        episode(0, 0.9),
        episode(1, 0.6, germinated=0, params=100),
        episode(2, 0.95, germinated=0, params=150, structure={"r0c1": "norm"}),
        episode(3, 0.85, germinated=0, params=151, host_params=151),
        episode(4, 0.1, germinated=0, params=100, world=8),
        episode(5, 0.8, baseline=0.7),
    ]
    with Runs([make_run(tmp_path, events)]) as opened:
        rows = opened.ask("select env, peer, round(peer_quality, 6), round(gain, 6), round(test_gain, 6) "
                          "from outcomes order by env").rows  # fmt: skip
    assert rows == [(0, "episode", 0.6, 0.3, 0.3), *((env, None, None, None, None) for env in range(1, 5)),
                    (5, "baseline", 0.7, 0.1, 0.2)]  # fmt: skip


def test_catalogue_lists_every_view_with_its_columns_in_order(runs):
    catalogue = {view.name: list(view.columns) for view in views.catalogue()}
    existing = {name for (name,) in runs.ask("show tables").rows} - {"places", "directories"}
    assert set(catalogue) == existing
    for name, columns in catalogue.items():
        assert [row[0] for row in runs.ask(f"describe {name}").rows] == columns, name


@pytest.mark.parametrize(
    "query",
    [
        "from steps", "with x as (select 1 as a) select * from x", "describe steps", "show tables", "summarize steps",
        "explain from steps", "explain analyze from steps", "values (1)", "pivot action_mix on op using sum(steps)",
        "select 1; -- done", "table steps", "select * from query('select 1')",
    ],
)  # fmt: skip
def test_read_only_statements_of_any_form_are_accepted(runs, query):
    assert runs.ask(query, limit=5).rows


REFUSED = [
    "select * from read_csv('/etc/passwd')", "select * from '/etc/passwd'", "select * from 'notes.csv'",
    "select * from glob('/*')", "select * from read_text('/etc/passwd')", "select * from read_blob('/etc/passwd')",
    "select * from read_json('manifest.json')", "select * from read_parquet('https://example.org/x.parquet')",
    "select * from sniff_csv('/etc/passwd')", "copy steps to 'out.csv'", "explain analyze copy steps to 'out.csv'",
    "copy steps from 'in.csv'", "export database 'out'", "import database 'out'", "attach 'other.db'", "detach memory",
    "install httpfs", "load httpfs", "select getenv('HOME')", "set threads = 1", "reset threads",
    "set enable_external_access = true", "set variable a = 1", "pragma database_list", "pragma enable_profiling",
    "call pragma_version()", "checkpoint", "vacuum", "use memory", "begin", "prepare p as select 1", "execute p",
    "insert into steps (run) values ('x')", "update steps set env = 1", "delete from steps", "drop table steps",
    "create table z (a int)", "create macro f(x) as x", "create secret (type s3)", "explain analyze delete from steps",
    "with x as (delete from steps returning *) select * from x", "from duckdb_secrets()", "from our_own_variable",
    "select * from enable_logging(storage = 'file', storage_path = 'log')",
    "select * from enable_profiling(save_location = 'profile')", "select 1; select 2", "", ";", "-- nothing",
    "select nonsense from steps", "selec 1", "select ?", "update extensions",
]  # fmt: skip


@pytest.mark.parametrize("query", REFUSED)
def test_other_statements_are_refused_in_one_paragraph(runs, query, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.csv").write_text("a\n1\n")
    (tmp_path / "manifest.json").write_text("{}")
    our_own_variable = {"a": [1]}

    with pytest.raises(EsperError) as refusal:
        runs.ask(query)

    assert our_own_variable
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) > 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", "notes.csv"]
    assert runs.ask("select count(*) from steps").rows == [(3,)]  # and the connection still answers


def test_every_sandbox_setting_is_active(runs):
    names = ("enable_external_access", "autoinstall_known_extensions", "autoload_known_extensions",
             "python_enable_replacements")  # fmt: skip
    for name in names:
        assert runs.ask(f"select current_setting('{name}')").rows == [(False,)], name
    assert runs.ask("select current_setting('lock_configuration'), current_setting('temp_directory')").rows == [
        (True, "")
    ]


def test_refusals_state_what_is_allowed(runs):
    with pytest.raises(EsperError, match="COPY is not allowed here: a query may only read the run"):
        runs.ask("copy steps to 'x'")
    with pytest.raises(EsperError, match="reaches beyond the run"):
        runs.ask("from read_csv('/etc/passwd')")
    with pytest.raises(EsperError, match="2 statements"):
        runs.ask("select 1; select 2")
    with pytest.raises(EsperError, match="lists the views"):
        runs.ask("from stepz")


SLOW = "select sum(a.range * b.range) from range(10000000) a, range(10000000) b"


def test_ctrl_c_stops_a_query_with_a_one_line_message(run):
    code = """
import sys
from esper.cli import main
from esper.karn import sql_process

def line(process, real=sql_process._line):
    message = real(process)
    print("read" if "troubles" in message else "answered", flush=True)
    return message

sql_process._line = line
sys.argv = ["esper", "sql", *sys.argv[1:], "--timeout", "600"]
main()
"""
    command = [sys.executable, "-c", code, str(run), SLOW]
    asking = subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=restore_signal_handling)
    try:
        assert asking.stdout.readline() == "read\n"
        time.sleep(0.5)  # the query is running
        asking.send_signal(signal.SIGINT)
        _, output = asking.communicate(timeout=120)
    finally:
        asking.kill()
    assert (asking.returncode, output) == (130, "esper: interrupted\n")


def test_rows_beyond_the_limit_are_counted_for_any_statement(runs):
    for query, more in (("from range(25)", 20), ("select * from range(25) -- all of them", 20), ("values (1), (2)", 0),
                        ("explain from steps", 0)):  # fmt: skip
        assert runs.ask(query, limit=5).more == more, query
    assert runs.ask("describe steps", limit=5).more == len(runs.ask("describe steps").rows) - 5
    assert runs.ask("from range(30000)", limit=12_000).rows == [(i,) for i in range(12_000)]


def test_damaged_manifest_hides_no_journal(tmp_path, capsys):
    path = make_run(tmp_path)
    (path / "manifest.json").write_text('{"status": "fin')
    run_sql([path], "select status, events, task from runs", as_csv=True)
    printed = capsys.readouterr()
    assert printed.out == f"status,events,task\nunreadable,{len(EVENTS)},rescue\n"
    assert "damaged" in printed.err
    (path / "manifest.json").write_bytes(seal_json(b'{"a": 1}'))
    with Runs([path]) as opened:
        assert "no manifest" in opened.ask("select damage from manifests where manifest is null").rows[0][0]


def test_directory_named_like_a_segment_is_ignored(tmp_path):
    path = make_run(tmp_path)
    (path / "events" / "rank0-00900.jsonl").mkdir()
    (path / "events" / "rank7-00000.jsonl").mkdir()
    with Runs([path]) as opened:
        assert opened.ask("select count(*) from events").rows == [(len(EVENTS),)]


def test_slot_names_fall_back_to_the_manifest(tmp_path):
    with RunDirectory.create(tmp_path, "rescue", name="own", manifest={"slots": ["left", "right"]}) as run:
        write(run.path, [step(1), episode(0, 0.9)])
    with Runs([run.path]) as opened:
        assert opened.ask("select slot from slots order by slot").rows == [("left",), ("right",)]
        assert opened.ask("select task from runs").rows == [("rescue",)]


def test_missing_duckdb_names_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(EsperError, match=r"pip install 'esper-lite\[sql\]'"):
        Runs([run])


def test_non_run_directory_is_reported(tmp_path):
    with pytest.raises(RunError, match="not a run"):
        run_sql([tmp_path / "nowhere"], "from steps")
    with pytest.raises(RunError, match="not a run"):
        run_sql([tmp_path / "nowhere"], None)
    with pytest.raises(ConfigError, match="no run"):
        run_sql([], "from steps")


def test_run_with_odd_path_and_no_events_can_be_queried(tmp_path):
    odd = make_run(tmp_path, name="o[d]d *?'é")
    decoy = make_run(tmp_path, name="odd x1'é")
    empty = make_run(tmp_path, [], name="empty")
    with Runs([odd, empty]) as opened:
        assert opened.ask("select run, events from runs order by events").rows == [
            ("empty", 0),
            (odd.name, len(EVENTS)),
        ]
    assert decoy.exists()


@pytest.fixture
def printed(run, monkeypatch):
    """Return a function that prints a query of the run to a console of 60 columns, and returns the text."""
    from rich.console import Console

    def text_of(query, *, is_terminal=False, limit=None):
        out = io.StringIO()
        console = Console(file=out, width=60, force_terminal=is_terminal)
        monkeypatch.setattr("esper.commands.sql.Console", lambda: console)
        run_sql([run], query, limit=limit)
        return out.getvalue()

    return text_of


def test_table_shows_dashes_trimmed_numbers_and_remaining_rows(printed):
    text = printed("select step, quality / 3 as third, committed_quality, train_loss from steps order by step", limit=2)
    assert re.search(r"│ +1 │ 0\.0333333 │ +– │ +nan │", text)
    assert "1 more rows" in text

    assert "columns do not fit" in printed("from steps", is_terminal=True)
    text = printed("from steps")  # to a file: all rows
    assert "extra" in text
    assert "do not fit" not in text


def test_text_of_a_run_cannot_move_the_cursor(runs):
    ((text,),) = runs.ask("select text from health").rows
    assert "\x1b" in text
    assert "\x1b" not in cell(text)


def test_names_of_columns_that_do_not_fit_cannot_move_the_cursor(printed):
    names = ", ".join(f'1 as "column {i} \x1b]0;owned"' for i in range(9))
    text = printed(f"select {names}", is_terminal=True)
    assert "columns do not fit" in text
    assert "\x1b]" not in text


def test_long_cells_are_truncated_with_the_omitted_length():
    assert cell("x" * 500) == "x" * 500
    assert cell("x" * 10_000_500) == "x" * 500 + "… (10,000,000 more characters)"
    assert cell([1] * 150).endswith(", … 50 more]")
    assert len(cell({str(i): "y" * 100 for i in range(300)})) < 600
    assert cell([[["z" * 600] * 101] * 101]).endswith("more characters)")


def test_json_keeps_columns_of_the_same_name_apart(run, capsys):
    run_sql([run], "select 1 a, 2 a, 3 a_1, 4 a", as_json=True)
    assert json.loads(capsys.readouterr().out) == [{"a": 1, "a_2": 2, "a_1": 3, "a_3": 4}]
    assert distinct(["a", "a", "b"]) == ["a", "a_1", "b"]


def test_json_and_csv_have_all_rows_and_spell_out_non_finite_values(run, capsys):
    run_sql(
        [run], "select i, 'NaN'::double as x, null as y, [1, 'inf'::double] as z from range(300) t(i)", as_json=True
    )
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 300
    assert rows[0] == {"i": 0, "x": "NaN", "y": None, "z": [1.0, "Infinity"]}

    run_sql([run], "select 1 as a, null as b, 'NaN'::double as c, ['x'] as d, 'p,q' as e", as_csv=True)
    assert capsys.readouterr().out == 'a,b,c,d,e\n1,,NaN,"[""x""]","p,q"\n'

    run_sql([run], "from range(10)", as_csv=True, limit=2)
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3
    assert "8 more rows" in printed.err
    with pytest.raises(ConfigError, match="exclude each other"):
        run_sql([run], "select 1", as_json=True, as_csv=True)


def test_without_a_query_the_views_are_listed(run, capsys):
    run_sql([run], None)
    printed = " ".join(capsys.readouterr().out.split())
    assert "stage_times" in printed
    assert "Epochs spent in the previous stage" in printed


def test_last_argument_is_the_query_unless_it_is_a_run(run):
    assert split_arguments([str(run), "from steps"]) == ([run], "from steps")
    assert split_arguments([str(run), str(run), "select 1"]) == ([run, run], "select 1")
    long = f"select {', '.join(f'{i} as column_{i}' for i in range(60))}"
    assert split_arguments([str(run), long]) == ([run], long)
    assert split_arguments([str(run)]) == ([run], None)
    assert split_arguments(["misspelt"]) == ([Path("misspelt")], None)


QUERIES = re.findall(r"^```sql\n(.*?)^```", DOC.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("query", QUERIES)
def test_documented_queries_return_rows(runs, query):
    assert runs.ask(query).rows


def test_document_lists_every_view():
    text = DOC.read_text()
    assert len(QUERIES) >= 8
    for view in views.VIEWS:
        assert f"| `{view.name}` |" in text, view.name
