"""The SQL schema of runs: one table per kind of event, and views for common queries.

Tables are derived from `leyline.events`: a new kind or field appears here automatically, with its documentation.
Every table and view has a column `run`, so several runs can be compared.
"""

from __future__ import annotations

import ast
import inspect
import types
import typing
from dataclasses import dataclass

import msgspec

from esper.leyline import events
from esper.leyline.event_fields import FIELD_NOTES
from esper.leyline.events import KINDS, Event
from esper.leyline.stages import SeedStage

PLURALS = {
    "step": "steps", "decision": "decisions", "gradient": "gradients", "update": "updates", "episode": "episodes",
    "checkpoint": "checkpoints", "phase_profile": "phases",
}  # fmt: skip
"""Tables whose name differs from their kind."""
PLACE = {"seq": "BIGINT", "time_s": "DOUBLE", "rank": "BIGINT"}
PLACE_NOTES = {
    "run": "Directory of the run.",
    "seq": "Place in the run, per rank, from 0.",
    "time_s": "Seconds since 1970.",
    "rank": "Process that emitted it.",
    "extra": "Fields unknown to this version, as JSON; null if there are none.",
}
ATOMS: dict[type, str] = {int: "BIGINT", float: "DOUBLE", str: "VARCHAR", bool: "BOOLEAN"}


@dataclass(frozen=True, slots=True)
class View:
    """A view or table: name, description, columns and SQL."""

    name: str
    meaning: str
    columns: dict[str, str]  # name → meaning
    sql: str


def table_name(kind: str) -> str:
    """Return the table name of a kind of event."""
    return PLURALS.get(kind, kind)


def column_types(kind: type[Event]) -> dict[str, str]:
    """Return the kind's own fields as DuckDB types."""
    return {f.name: duck_type(f.type) for f in msgspec.structs.fields(kind)}


def duck_type(hint: typing.Any) -> str:
    """Return the DuckDB type of a type annotation."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (one,) = (t for t in inner if t is not types.NoneType)
        return duck_type(one)
    if origin is tuple:
        return f"{duck_type(inner[0])}[]"
    if origin is dict:
        return f"MAP({duck_type(inner[0])}, {duck_type(inner[1])})"
    return ATOMS[hint]


def meaning(kind: type[Event]) -> str:
    """Return the kind's docstring on one line."""
    return " ".join((kind.__doc__ or "").split())


def field_notes(kind: type[Event]) -> dict[str, str]:
    """Return the meaning of every field of the kind: its docstring, or else that of its name in `FIELD_NOTES`."""
    own = _all_notes().get(kind.__name__, {})
    return {field.name: own.get(field.name, FIELD_NOTES.get(field.name, "")) for field in msgspec.structs.fields(kind)}


def _all_notes() -> dict[str, dict[str, str]]:
    try:
        tree = ast.parse(inspect.getsource(events))
    except (OSError, TypeError):
        return {}
    notes_by_class: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            notes = notes_by_class.setdefault(node.name, {})
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                    text = _text(after)
                    if text:
                        notes[before.target.id] = " ".join(text.split())
    return notes_by_class


def _text(node: ast.stmt) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


STAGES = "[" + ", ".join(f"'{stage.name}'" for stage in SeedStage) + "]"
WHERE = {"run": PLACE_NOTES["run"], "env": "Environment.", "episode": "Its episode.", "step": "Epochs trained in it."}

VIEWS = (
    View(
        "runs",
        "One row per run: fields of its manifest, and how it ended.",
        {
            "run": PLACE_NOTES["run"],
            "status": "running, finished, failed, interrupted, killed (marked as running, but no process "
            "holds its lock), or unreadable.",
            "task": "", "controller": "", "seed": "", "command": "",
            "envs": "Environments.",
            "slots": "Names of the slots, in the order of the arrays in `steps`.",
            "steps": "Per episode.",
            "rounds": "", "host_params": "", "device": "", "threads": "", "telemetry": "Level.",
            "wall_s": "Null while it runs, or if it was killed.",
            "env_steps": "Epochs over all environments.",
            "error": "",
            "events": "Lines that could be read.",
            "damaged": "Lines that could not; one, the last, is usual after a hard kill.",
            "missing": "What the journal lacks, in words; null where it is complete.",
            "path": "Path of the run directory.",
        },
        """
        select m.run, m.status, coalesce(nullif(s.task, ''), m.manifest->>'task') as task, s.controller, s.seed,
               s.command, len(s.env_names) as envs,
               coalesce(s.slots, try_cast(m.manifest->'slots' as varchar[])) as slots,
               s.steps, s.rounds, s.host_params, s.device, s.threads, s.telemetry, f.wall_s, f.env_steps,
               coalesce(f.error, m.manifest->>'error') as error, m.events, m.damaged, m.missing, m.path
        from directories m
        left join (select * from run_started qualify row_number() over (partition by run order by time_s desc) = 1) s
          using (run)
        left join (select * from run_finished qualify row_number() over (partition by run order by time_s desc) = 1) f
          using (run)
        """,
    ),
    View(
        "manifests",
        "One row per run: its complete manifest.",
        {
            "run": PLACE_NOTES["run"],
            "manifest": "As JSON: `manifest->>'config'` and so on; null where it cannot be read.",
            "damage": "Why it cannot be read.",
        },
        "select run, manifest, damage from directories",
    ),
    View(
        "slots",
        "One row per environment, step and slot: its seed, stage and alpha.",
        {
            **WHERE,
            "slot": "Name of the slot.",
            "stage": "Name of the stage.",
            "alpha": "How strongly the seed is blended in, 0…1.",
            "blueprint": "Null where the slot is empty.",
        },
        f"""
        select s.run, s.env, s.episode, s.step, coalesce(r.slots[i], 'slot ' || (i - 1)) as slot,
               {STAGES}[s.stages[i] + 1] as stage, s.alphas[i] as alpha, nullif(s.blueprints[i], '') as blueprint
        from (select *, unnest(generate_series(1, len(stages))) as i from steps) s left join runs r using (run)
        """,
    ),
    View(
        "stage_times",
        "How long seeds stay in each stage before they leave it, per blueprint.",
        {
            "run": PLACE_NOTES["run"], "blueprint": "", "stage": "The stage that was left.",
            "visits": "How often it was left.",
            "epochs_mean": "", "epochs_median": "", "epochs_max": "",
            "pruned_share": "Of those visits, how many ended in pruning.",
        },
        """
        select run, blueprint, was as stage, count(*) as visits, avg(dwell_epochs) as epochs_mean,
               median(dwell_epochs) as epochs_median, max(dwell_epochs) as epochs_max,
               avg((now = 'PRUNED')::int) as pruned_share
        from lifecycle group by run, blueprint, was
        """,
    ),
    View(
        "action_mix",
        "What each environment's controller did: its ops and their shares.",
        {
            "run": PLACE_NOTES["run"], "env": "Environment.", "op": "",
            "steps": "Steps on which it was chosen.",
            "share": "Of that environment's steps.",
            "happened_share": "Of its recorded decisions, how many changed something; null where none is recorded.",
        },
        """
        select s.run, s.env, s.op, s.steps, s.steps / sum(s.steps) over (partition by s.run, s.env) as share,
               d.happened_share
        from (select run, env, op, count(*) as steps from steps group by all) s
        left join (select run, env, op, avg(happened::int) as happened_share from decisions group by all) d
          using (run, env, op)
        """,
    ),
    View(
        "phase_shares",
        "One row per phase: its total time and its share.",
        {
            "run": PLACE_NOTES["run"], "rank": PLACE_NOTES["rank"], "phase": "",
            "wall_s": "On the clock.",
            "share": "Of all phases of that rank.",
            "cpu_s": "Of the thread that did it.",
            "calls": "", "ms_per_call": "",
        },
        """
        select run, rank, phase, wall_ms / 1000 as wall_s,
               wall_ms / sum(wall_ms) over (partition by run, rank) as share,
               cpu_ms / 1000 as cpu_s, calls, wall_ms / nullif(calls, 0) as ms_per_call
        from (select * from phases qualify row_number() over (partition by run, rank, phase order by seq desc) = 1)
        """,
    ),
    View(
        "growth",
        "Size against the bare host, step by step, with the quality it had.",
        {
            **WHERE,
            "params": "Parameters now.", "host_params": "Of the bare host.",
            "added_params": "", "params_ratio": "1 is no growth.", "quality": "",
        },
        """
        select s.run, s.env, s.episode, s.step, s.params, coalesce(e.host_params, r.host_params) as host_params,
               s.params - coalesce(e.host_params, r.host_params) as added_params,
               s.params / nullif(coalesce(e.host_params, r.host_params), 0) as params_ratio, s.quality
        from steps s left join runs r using (run) left join episodes e using (run, env, episode)
        """,
    ),
    View(
        "outcomes",
        "Episodes against the same world without growth: its baseline, or else episodes of any loaded run of the same "
        "task, world, length and host that ended as the bare host, with nothing planted.",
        {
            "run": PLACE_NOTES["run"], "env": "Environment.", "episode": "Its episode.", "world": "", "name": "",
            "quality": "", "peer_quality": "Of the same world without growth.",
            "peer": "baseline, episode, or null where there is none.",
            "gain": "quality − peer_quality.",
            "test_quality": "", "test_gain": "The same on test data; against episodes only.",
            "params_ratio": "1 is no growth.",
            "gain_per_added_param": "Null where nothing was added.",
            "germinated": "", "fossilized": "", "pruned": "", "structure": "Slot → blueprint.",
        },
        """
        with peers as (
            select r.task, e.world, e.steps, e.host_params, avg(e.quality) as quality,
                   avg(e.test_quality) as test_quality
            from episodes e join runs r using (run)
            where e.germinated = 0 and e.params = e.host_params and cardinality(e.structure) = 0 group by all
        )
        select e.run, e.env, e.episode, e.world, e.name, e.quality,
               coalesce(e.baseline_quality, p.quality) as peer_quality,
               case when e.baseline_quality is not null then 'baseline' when p.quality is not null then 'episode'
               end as peer,
               e.quality - peer_quality as gain, e.test_quality, e.test_quality - p.test_quality as test_gain,
               e.params / nullif(e.host_params, 0) as params_ratio,
               gain / nullif(e.params - e.host_params, 0) as gain_per_added_param,
               e.germinated, e.fossilized, e.pruned, e.structure
        from episodes e left join runs r using (run)
        left join peers p on p.task = r.task and p.world = e.world and p.steps = e.steps
                         and p.host_params = e.host_params and e.germinated > 0
        """,
    ),
    View(
        "events",
        "Every line that could be read, of any kind: its place, and no more.",
        {**{name: PLACE_NOTES[name] for name in ("run", "seq", "time_s", "rank")}, "kind": ""},
        "select run, seq, time_s, rank, kind from places",
    ),
    View(
        "losses",
        "Holes in the sequence numbers: events that are lost. What is missing at the end is in `runs.missing`.",
        {
            "run": PLACE_NOTES["run"], "rank": PLACE_NOTES["rank"],
            "after_seq": "Last number before the hole; −1 where the first is missing.",
            "before_seq": "First number behind it.", "missing": "How many.",
            "from_s": "Time of the events on either side.", "to_s": "",
        },
        """
        select run, rank, after_seq, seq as before_seq, seq - after_seq - 1 - replaced as missing, from_s,
               time_s as to_s
        from (select *, coalesce(lag(seq) over w, -1) as after_seq, lag(time_s) over w as from_s
              from places window w as (partition by run, rank order by seq))
        where seq > after_seq + 1 + replaced
        """,
    ),
)  # fmt: skip


def catalogue() -> list[View]:
    """Return all views and tables, views first. The table of a kind has no SQL."""
    place = {name: PLACE_NOTES[name] for name in PLACE}
    tables = [
        View(table_name(name), meaning(kind), {"run": PLACE_NOTES["run"]}
             | {column: field_notes(kind).get(column, "") for column in column_types(kind)}
             | place | {"extra": PLACE_NOTES["extra"]}, "")
        for name, kind in KINDS.items()
    ]  # fmt: skip
    other = View(
        "other_events",
        "Events of kinds unknown to this version.",
        {"run": PLACE_NOTES["run"], "kind": ""} | place | {"event": "The whole line, as JSON."},
        "",
    )
    return [*VIEWS, *tables, other]
