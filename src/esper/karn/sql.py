"""SQL over run directories: DuckDB tables of all events, isolated from everything else.

    Runs(paths) ─ reads every segment into memory, one table per kind, and creates the views
      └ ask(query) ─ one query in a read-only transaction, without access to files, settings and extensions

Isolation uses DuckDB's own settings (no external access, locked configuration, read-only transaction). DuckDB parses
the segments because it is ten times as fast as Python; a test compares the result with `nissa.journal_reader`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from esper.karn.views import PLACE, VIEWS, column_types, table_name
from esper.leyline.atomic_io import read_regular
from esper.leyline.errors import ConfigError, DataError, EsperError
from esper.leyline.events import KINDS
from esper.nissa.journal_reader import EVENTS, MOST_SEQ, MOST_TIME_S, Extent, each_line, is_regular, segments
from esper.nissa.missed_events import lost_events
from esper.nissa.record import is_whole
from esper.nissa.run import MANIFEST, MOST_MANIFEST_BYTES
from esper.nissa.run_list import manifest_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

BATCH_BYTES = 256 << 20
"""Size in bytes of the batches in which segments are read, to limit the text in memory."""
QUERY_BYTES = 2 << 30
"""Memory in bytes that a query may use in addition to the tables."""
TOO_MUCH_MEMORY = (
    f"the query needs more than {QUERY_BYTES >> 30} GB of memory, and was stopped. "
    "Select fewer rows or columns, or aggregate them"
)
ISOLATION_SETTINGS = (
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET python_enable_replacements = false",  # otherwise a query could read our Python variables
    "SET temp_directory = ''",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
PLACED = [name for name, kind in KINDS.items() if {"env", "episode", "step"} <= set(kind.__struct_fields__)]
"""Kinds of events that belong to a step of an environment."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a query."""

    columns: list[str]
    types: list[str]
    rows: list[tuple[Any, ...]]
    more: int
    """Number of rows beyond the limit."""


class Runs:
    """The events of some runs, in memory. A context manager."""

    def __init__(self, paths: Sequence[Path]) -> None:
        duckdb = _duckdb()
        if not paths:
            raise ConfigError("no run was given: pass at least one run directory")
        self._error = duckdb.Error
        self._tokenize = duckdb.tokenize
        self._allowed = {duckdb.StatementType.SELECT, duckdb.StatementType.MULTI, duckdb.StatementType.EXPLAIN}
        self._db: DuckDBPyConnection = duckdb.connect(":memory:")
        self.troubles: list[str] = []
        """Messages about what could not be read."""
        try:
            self._create_tables()
            for name, path in zip(run_names(paths), paths, strict=True):
                self._load(name, Path(path))
            for view in VIEWS:
                self._db.execute(f"create view {view.name} as {view.sql}")
        except RuntimeError as error:  # DuckDB's form of Ctrl-C
            if "INTERRUPT" in str(error).upper():
                raise KeyboardInterrupt from None
            raise
        self._db.execute("drop table lines")
        (used,) = self._db.execute("select sum(memory_usage_bytes) from duckdb_memory()").fetchone() or (0,)
        self._db.execute(f"SET memory_limit = '{(int(used or 0) + QUERY_BYTES) >> 20} MiB'")
        for statement in ISOLATION_SETTINGS:
            self._db.execute(statement)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def ask(self, query: str, *, limit: int | None = None) -> Answer:
        """Return the result of one query. Without a limit all rows are returned. `sql_process.ask` adds a timeout."""
        query = self._single(query)
        self._db.execute("BEGIN TRANSACTION READ ONLY")
        try:
            cursor = self._db.execute(query)
            columns = [each[0] for each in cursor.description]
            types = [str(each[1]) for each in cursor.description]
            if limit is None:
                return Answer(columns, types, cursor.fetchall(), 0)
            rows = cursor.fetchmany(limit + 1)
            more = max(self._count(query), len(rows)) - limit if len(rows) > limit else 0
            return Answer(columns, types, rows[:limit], more)
        except (self._error, RuntimeError) as error:
            raise EsperError(_explain(str(error))) from None
        finally:
            self._db.execute("ROLLBACK")

    def _single(self, query: str) -> str:
        """Return the single statement of a query, without what follows it. Raise EsperError if it is not allowed."""
        try:
            statements = self._db.extract_statements(query)
            kinds = [statement.type for statement in statements]
        except (self._error, ValueError) as error:
            raise EsperError(_explain(str(error))) from None
        if len(statements) != 1:
            raise EsperError(f"a query must be one statement, got {len(statements)} statements. Use a single SELECT")
        if kinds[0] not in self._allowed:
            raise EsperError(
                f"{kinds[0].name} is not allowed here: a query may only read the run. "
                "Use SELECT, WITH, FROM, VALUES, PIVOT, DESCRIBE, SHOW, SUMMARIZE or EXPLAIN"
            )
        text = query.encode()
        ends = [at for at, _ in self._tokenize(query) if text[at : at + 1] == b";"]
        return text[: ends[0]].decode() if ends else query

    def _count(self, query: str) -> int:
        """Return the number of rows of a query; 0 for EXPLAIN, which cannot be nested."""
        if query.split(None, 1)[0].upper().startswith("EXPLAIN"):
            return 0
        (count,) = self._db.execute(f"select count(*) from ({query}\n)").fetchone() or (0,)
        return int(count)

    def _create_tables(self) -> None:
        place = ", ".join(f"{name} {of}" for name, of in PLACE.items())
        for name, kind in KINDS.items():
            own = "".join(f'"{column}" {of}, ' for column, of in column_types(kind).items())
            self._db.execute(f"create table {table_name(name)} (run VARCHAR, {own}{place}, extra JSON)")
        self._db.execute(f"create table other_events (run VARCHAR, kind VARCHAR, {place}, event JSON)")
        self._db.execute(f"create table places (run VARCHAR, {place}, kind VARCHAR, replaced BIGINT)")
        self._db.execute(
            "create table directories (run VARCHAR, path VARCHAR, status VARCHAR, manifest JSON, damage VARCHAR, "
            "events BIGINT, damaged BIGINT, missing VARCHAR)"
        )
        self._db.execute(f"create temp table lines (line BIGINT, {place}, kind VARCHAR, replaced BIGINT, json JSON)")

    def _load(self, run: str, path: Path) -> None:
        manifest, damage = manifest_of(path)
        if damage:
            self.troubles.append(f"{damage}. The journal is read without it")
        content = None if damage else read_regular(path / MANIFEST, MOST_MANIFEST_BYTES).decode()
        good = damaged = 0
        for rank, segments_of_rank in segments(path / EVENTS).items():
            readable = [each for _, each in segments_of_rank if is_regular(each)]
            damaged += len(segments_of_rank) - len(readable)
            for batch in batches(readable):
                with whole_lines(batch) as (files, broken):
                    wrong = broken + self._read_lines(run, rank, files)
                good, damaged = good + self._keep_lines(run), damaged + wrong
        losses = self._losses(run, manifest)
        self.troubles += [f"the journal of {run} is incomplete: {text}" for text in losses]
        self._delete_repeated_steps(run)
        missing = "; ".join(losses) or None
        row = [run, str(path), manifest.get("status", "unreadable"), content, damage, good, damaged, missing]
        self._db.execute("insert into directories values (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def _losses(self, run: str, manifest: dict[str, Any]) -> list[str]:
        """Describe the events missing from the journal of a run."""
        rows = self._db.execute(
            "select rank, max(seq) + 1, sum(greatest(0, seq - before - 1 - replaced))::bigint from (select *, "
            "coalesce(lag(seq) over (partition by rank order by seq), -1) as before from places where run = ?) "
            "group by rank",
            [run],
        ).fetchall()
        extents = {rank: Extent(next_seq, missing) for rank, next_seq, missing in rows}
        (ends,) = self._db.execute("select count(*) from run_finished where run = ?", [run]).fetchone() or (0,)
        return lost_events(manifest, extents, has_end=ends > 0)

    def _read_lines(self, run: str, rank: int, files: list[Path]) -> int:
        """Fill `lines` with the entries of these segments, each seq once. Return the number of invalid lines."""
        db = self._db
        db.execute("truncate lines")
        escaped = ["".join(f"[{c}]" if c in "*?[" else c for c in str(file)) for file in files]  # DuckDB's patterns
        db.execute(
            """
            insert into lines
            select line, place.seq, place.time_s, place.rank, place.kind, coalesce(place.replaced, 0), json
            from (select row_number() over () as line, json, json_transform(json, ?) as place
                  from read_ndjson_objects(?, ignore_errors = true, maximum_object_size = 33_554_432))
            """,
            [json.dumps(PLACE | {"kind": "VARCHAR", "replaced": "BIGINT"}), escaped],
        )
        (damaged,) = db.execute(
            "delete from lines where coalesce(rank, -1) != ? or coalesce(seq, -1) not between 0 and ? "
            "or coalesce(abs(time_s) >= ?, true) or kind is null or replaced not between 0 and seq",
            [rank, MOST_SEQ - 1, MOST_TIME_S],
        ).fetchone() or (0,)
        before = "select coalesce(max(seq), -1) from places where run = ? and rank = ?"
        (last,) = db.execute(before, [run, rank]).fetchone() or (-1,)
        (orderly,) = db.execute(
            "select coalesce(bool_and(seq > before), true) "
            "from (select seq, lag(seq, 1, ?) over (order by line) as before from lines)",
            [last],
        ).fetchone() or (True,)
        return int(damaged) if orderly else int(damaged) + self._keep_each_place_once(run, rank, last)

    def _keep_each_place_once(self, run: str, rank: int, last: int) -> int:
        """Keep the first line of each seq and drop damaged seqs that jump ahead, as `nissa.journal_reader` does."""
        (leapt,) = self._db.execute(
            """
            delete from lines where line in (
                select line from (
                    select line, seq, lead(seq) over (order by line) as next,
                           max(seq) over (order by line rows between unbounded preceding and 1 preceding) as before
                    from lines)
                where next < seq and seq > greatest(coalesce(before, -1), $last) + 1)
            """,
            {"last": last},
        ).fetchone() or (0,)
        self._db.execute("delete from lines where line not in (select min(line) from lines group by seq)")
        self._db.execute(
            "delete from lines where seq in (select seq from places where run = ? and rank = ?)", [run, rank]
        )
        return int(leapt)

    def _keep_lines(self, run: str) -> int:
        """Move `lines` to the tables of their kinds. Return their number."""
        db = self._db
        present = {kind for (kind,) in db.execute("select distinct kind from lines").fetchall()}
        for name in sorted(present & KINDS.keys()):
            self._keep_kind(run, name)
        names = ", ".join(f"'{name}'" for name in KINDS)
        db.execute(
            "insert into other_events select ?, kind, seq, time_s, rank, json_merge_patch(json, ?) from lines "
            f"where kind not in ({names})",
            [run, '{"crc": null, "replaced": null}'],
        )
        places = "insert into places select ?, seq, time_s, rank, kind, replaced from lines"
        (count,) = db.execute(places, [run]).fetchone() or (0,)
        return int(count)

    def _keep_kind(self, run: str, name: str) -> None:
        types = column_types(KINDS[name])
        names = [*types, *PLACE, "kind", "crc", "replaced"]
        keys = self._db.execute("select distinct json_keys(json) from lines where kind = ?", [name]).fetchall()
        is_newer = any(key not in names for (each,) in keys for key in each)
        rest = json.dumps(dict.fromkeys(names))  # as a merge patch, it removes these fields
        extra = f"nullif(json_merge_patch(json, '{rest}')::varchar, '{{}}')" if is_newer else "null"
        own = "".join(f'event."{column}", ' for column in types)
        self._db.execute(
            f"""
            insert into {table_name(name)} select ?, {own}seq, time_s, rank, {extra}
            from (select *, json_transform(json, '{json.dumps(types)}') as event from lines where kind = '{name}')
            """,
            [run],
        )

    def _delete_repeated_steps(self, run: str) -> None:
        """Delete steps that a resumed run repeated: the later ones count.

        Each start of the process opens a session. Whatever an earlier session did at or after the first step of a later
        one, in the same environment, was repeated.
        """
        starts = self._db.execute("select seq from run_started where run = ? order by seq", [run]).fetchall()
        for (start,) in starts[1:]:
            at = " union all ".join(f"select run, env, episode, step, seq from {table_name(name)}" for name in PLACED)
            self._db.execute(
                f"""
                create or replace temp table again as select env, min({{e: episode, s: step}}) as since from ({at})
                where run = ? and seq > ? group by env
                """,
                [run, start],
            )
            for table in [*map(table_name, PLACED), "episodes"]:
                place = "{e: episode, s: steps}" if table == "episodes" else "{e: episode, s: step}"
                self._db.execute(
                    f"delete from {table} t using again where t.run = ? and t.seq < ? and t.env = again.env "
                    f"and {place} >= again.since",
                    [run, start],
                )
            self._db.execute(
                "delete from updates where run = $run and seq < $start and "
                "round >= (select min(round) from updates where run = $run and seq > $start)",
                {"run": run, "start": start},
            )


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return the value of the column `run` per run: its directory, with parents where needed to be unique."""
    whole = [Path(path).resolve() for path in paths]
    if len(set(whole)) < len(whole):
        raise ConfigError(f"a run is given twice: {', '.join(str(p) for p in paths)}")
    depth = 1
    while len(names := {p.parts[-depth:] for p in whole}) < len(whole):
        depth += 1
    del names
    return ["/".join(p.parts[-depth:]) for p in whole]


def batches(files: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield the files in order, in groups of up to `BATCH_BYTES`."""
    batch: list[Path] = []
    size = 0
    for file in files:
        bytes_ = file.stat().st_size
        if batch and size + bytes_ > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += bytes_
    if batch:
        yield batch


@contextmanager
def whole_lines(files: Sequence[Path]) -> Iterator[tuple[list[Path], int]]:
    """Yield these files, with damaged lines removed in temporary copies, and the number of damaged lines."""
    with TemporaryDirectory() as place:
        readable, broken = [], 0
        for i, file in enumerate(files):
            damaged = sum(not is_whole(line) for line in each_line(file))
            broken += damaged
            if damaged:
                copy = Path(place) / f"{i}.jsonl"
                with copy.open("wb") as target:
                    target.writelines(line + b"\n" for line in each_line(file) if is_whole(line))
            readable.append(copy if damaged else file)
        yield readable, broken


def _explain(message: str) -> str:
    """Return DuckDB's message as one paragraph, with advice."""
    text = " ".join(message.split("\n\nLINE ")[0].split())
    if text.startswith("Out of Memory") or "bad_alloc" in text or "bad allocation" in text:
        return TOO_MUCH_MEMORY
    if "disabled by configuration" in text or "configuration has been locked" in text:
        return f"the query reaches beyond the run, which is not allowed here. ({text})"
    if "read-only mode" in text:
        return f"the query would change something, and may only read. ({text})"
    if "pytz" in text:
        return (
            "times with a zone cannot be shown here: write `make_timestamp((time_s * 1e6)::bigint)` for a time in UTC"
        )
    return f"the query does not run: {text}. `esper sql RUN` without a query lists the views and their columns"


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError:
        raise DataError("`esper sql` needs DuckDB, which is not installed: pip install 'esper-lite[sql]'") from None
    return duckdb
