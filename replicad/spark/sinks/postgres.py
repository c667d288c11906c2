"""A Postgres table as the downstream: upserts and deletes in one transaction with the batch's number.

Each task has one transaction, which sets this task's row in `replicad_batches` to the batch. If the row already has
this batch, the task writes nothing; if it has a later one, the task fails. So a repeated task or batch, or a driver
that still runs after its replacement, changes nothing: the effect is exactly once. The driver has a row too, which it
sets when all tasks are done.

A task loads its rows into a temporary table first, and sets its row only then: a node that is paused while it loads
rows holds no lock, and finds its batch done when it goes on. From then on the transaction is short, and Postgres ends
it when its client is silent for `_IDLE_LOCKED` seconds.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakKeyDictionary

import pyarrow as pa
import pyarrow.compute as pc

from replicad.errors import (
    DatabaseError,
    DatabaseUnavailable,
    DownstreamError,
    DownstreamUnavailable,
    RowRefused,
    UsageError,
)
from replicad.eventlog import get_logger
from replicad.spark.columns import COLUMNS, ColumnType
from replicad.spark.database import PATIENCE, batches_of, forget, literal, patiently, quote
from replicad.spark.enrich import EnrichedRows, listed
from replicad.spark.sinks.base import Applied, BatchId, LastBatch, Shape, Sink
from replicad.spark.tables import key_among, key_as_text
from replicad.sqlstates import LOCKED, MADE_MEANWHILE, NOT_OF_A_ROW, means

_TYPES = {
    pa.bool_(): "boolean", pa.int8(): "smallint", pa.int16(): "smallint", pa.int32(): "integer", pa.int64(): "bigint",
    pa.float32(): "real", pa.float64(): "double precision", pa.string(): "text", pa.binary(): "bytea",
    pa.date32(): "date", pa.timestamp("us"): "timestamp without time zone",
    pa.timestamp("us", tz="UTC"): "timestamp with time zone",
}  # fmt: skip
CREATED = {  # what comes as text; a table that we create gets the type itself, without its modifier
    "numeric", "json", "jsonb", "uuid", "inet", "cidr", "macaddr", "macaddr8", "interval", "xml",
    "time without time zone", "time with time zone", *_TYPES.values(),
}  # fmt: skip
_LOCK_WAIT = 30  # seconds for which ALTER TABLE may wait, and others behind it
LOCKED_WAIT = 30  # seconds for which a task waits for a row that another transaction has locked
_IDLE_LOCKED = 30  # seconds of silence after which Postgres ends a task that holds locks: its node is paused or away
IDLE_LOADING = 600  # the same while it loads rows and holds none; a chunk takes seconds
_PART = r'(?:"(?:[^"]|"")+"|[A-Za-z_][A-Za-z0-9_$]*)'
_NAME = re.compile(rf"(?:({_PART})\.)?({_PART})")

T = TypeVar("T")

log = get_logger("replicad.spark")

_stages: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # temporary tables, by connection, of small batches
_columns: dict[tuple[str, str], tuple[str, Mapping[str, str]]] = {}  # by URL and table, with a digest of the catalog

_CREATES = 5  # tries of CREATE ... IF NOT EXISTS, which fails where another session has just made the same thing

BATCHES = """
CREATE TABLE IF NOT EXISTS {batches} (
  query text NOT NULL, target text NOT NULL, task integer NOT NULL, batch bigint NOT NULL, step integer NOT NULL,
  mark bigint NOT NULL, written bigint NOT NULL DEFAULT 0, deleted bigint NOT NULL DEFAULT 0,
  at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (query, target, task))"""
CLAIM = """
INSERT INTO {batches} AS b (query, target, task, batch, step, mark) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (query, target, task) DO UPDATE SET batch = excluded.batch, step = excluded.step, mark = excluded.mark,
  at = now()
WHERE b.batch < excluded.batch OR (b.batch = excluded.batch AND b.step < excluded.step AND b.mark = excluded.mark)
RETURNING true"""
LAST = "SELECT batch, step, mark FROM {batches} WHERE query = $1 AND target = $2 AND task = $3"
_BEGIN_SMALL = f"""
SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', '{{idle}}s', true),
  pg_catalog.set_config('lock_timeout', '{LOCKED_WAIT}s', true),
  (SELECT pg_catalog.md5(pg_catalog.string_agg(pg_catalog.concat_ws(' ', attnum, attname, atttypid, atttypmod), ','
    ORDER BY attnum)) FROM pg_catalog.pg_attribute
    WHERE attrelid = $3::text::pg_catalog.regclass AND attnum > 0 AND NOT attisdropped),
  (SELECT pg_catalog.json_object_agg(task, pg_catalog.json_build_array(batch, step, mark))::text FROM {{batches}}
    WHERE query = $1 AND target = $2 AND task = ANY ($4::int[]))"""
_CLAIM_SMALL = """
INSERT INTO {batches} AS b (query, target, task, batch, step, mark, written)
SELECT $1, $2, t.task, $3, $4, $5, t.written FROM ROWS FROM (unnest($6::int[]), unnest($7::bigint[])) t (task, written)
ORDER BY t.task
ON CONFLICT (query, target, task) DO UPDATE SET batch = excluded.batch, step = excluded.step, mark = excluded.mark,
  written = excluded.written, deleted = 0, at = now()
WHERE b.batch < excluded.batch OR (b.batch = excluded.batch AND b.step < excluded.step AND b.mark = excluded.mark)
RETURNING task"""
LASTS = """
SELECT COALESCE(max(batch) FILTER (WHERE task = $3), -1), COALESCE(max(batch), -1)
FROM {batches} WHERE query = $1 AND target = $2"""
_HOLDERS = """
SELECT a.pid::text, a.application_name, COALESCE(a.client_addr::text, 'this host'), a.state,
  extract(epoch FROM now() - a.xact_start)::int::text
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.relation = ANY (ARRAY[{batches}::pg_catalog.regclass::oid, {table}::pg_catalog.regclass::oid])
  AND l.granted AND l.mode ~ 'Exclusive' AND a.pid <> pg_catalog.pg_backend_pid() ORDER BY a.xact_start LIMIT 1"""
_DRIVER = -1  # its number as a task
COUNT = "UPDATE {batches} SET written = $4, deleted = $5 WHERE query = $1 AND target = $2 AND task = $3 RETURNING 1"
_UPSERT = """
WITH {before}done AS (INSERT INTO {table} AS t ({columns}) SELECT {casts} FROM pg_temp.{stage}{after}
ON CONFLICT ({key}) DO UPDATE SET {assignments} RETURNING 1) SELECT count(*) FROM done"""
_DELETE = (
    "WITH done AS (DELETE FROM {table} WHERE _shard = $1 AND {id} = ANY($2) RETURNING 1) SELECT count(*) FROM done"
)
_DELETE_PLAIN = "WITH done AS (DELETE FROM {table} WHERE {found} RETURNING 1) SELECT count(*) FROM done"
_STALE_PLAIN = "SELECT {id} FROM {table} WHERE _seq < $1 ORDER BY {key} LIMIT $2"
_MAY_ASK = "SELECT has_function_privilege('pg_catalog.pg_control_system()', 'EXECUTE')"
_SERVER = "SELECT system_identifier::text FROM pg_catalog.pg_control_system()"
_TABLE = """
SELECT d.oid::text || '/' || {table}::pg_catalog.regclass::oid::text
FROM pg_catalog.pg_database d WHERE d.datname = current_database()"""
_STALE = "SELECT {id} FROM {table} WHERE _shard = $1 AND _seq < $2 ORDER BY {id} LIMIT $3"


@dataclass(slots=True)
class LoadedRows:
    """The changes of a task: rows in the temporary table `stage`, and keys to delete, some tens of bytes each."""

    stage: str
    rows: int
    deletes: list[pa.Table]


def create_missing(cursor: Any, statements: Iterable[str]) -> None:
    """Run CREATE ... IF NOT EXISTS outside of a transaction, beside other sessions that make the same things."""
    for statement in statements:
        for left in reversed(range(_CREATES)):
            try:
                cursor.execute(statement)
                break
            except Exception as error:
                if not left or not means(getattr(error, "sqlstate", None), MADE_MEANWHILE):
                    raise


@dataclass(frozen=True, slots=True)
class PostgresSink(Sink):
    """Keeps `table` (`name` or `schema.name`, as in SQL) at `url` in step. Creates it if it is missing.

    An existing table needs the columns of the rows, `_shard integer` and `_seq bigint`, and a unique key (`_shard`,
    id). Each column must hold every value of the rows' column (`column_types`): the values are sent in the type of the
    rows, and Postgres casts them.
    """

    url: str
    table: str
    patience: float = PATIENCE
    casts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.table):
            raise UsageError(f"downstream table {self.table!r} is not a name of a table; write it like public.cities")

    def __repr__(self) -> str:  # the url may hold a password
        return f"PostgresSink(table={self.table!r})"

    @property
    def _schema(self) -> str | None:
        found = _NAME.fullmatch(self.table)
        return found[1] if found else None

    @property
    def _batches(self) -> str:
        return f"{self._schema}.replicad_batches" if self._schema else "replicad_batches"

    def impatient(self, patience: float) -> Self:
        """See Sink."""
        return replace(self, patience=patience)

    def prepare(self, shape: Shape) -> None:
        """Create the schema, the table and the table of batches if they are missing."""
        columns = ", ".join(f"{quote(field.name)} {_created_as(field, shape)}" for field in shape.plain)
        key = ", ".join(map(quote, _key_of(shape)))
        statements = [
            *([f"CREATE SCHEMA IF NOT EXISTS {self._schema}"] if self._schema else []),
            f"CREATE TABLE IF NOT EXISTS {self.table} ({columns}, PRIMARY KEY ({key}))",
            BATCHES.format(batches=self._batches),
        ]

        def work(driver: Any) -> dict[str, str]:
            with driver.cursor() as cursor:
                create_missing(cursor, statements)
                changes = _changes(shape, self.columns(cursor))
                if changes:
                    self._alter(cursor, changes)
                return self.columns(cursor)

        self._casts(shape, patiently(self.url, work, patience=min(self.patience, 10)))

    def _alter(self, cursor: Any, changes: list[str]) -> None:
        """Change the columns of the table. A wider type mostly rewrites it."""
        change = f"ALTER TABLE {self.table} {', '.join(changes)}"
        log.warning("downstream_altered", statement=change)
        cursor.execute(f"SET lock_timeout = '{_LOCK_WAIT}s'")
        try:
            cursor.execute(change)
        except Exception as error:
            text = str(error).partition("\n")[0]
            raise DatabaseError(
                f"the downstream table {self.table} cannot follow the source: {text}; run it yourself: {change}"
            ) from error
        finally:
            cursor.execute("RESET lock_timeout")

    def probe(self) -> None:
        """Ask the server something, on a connection of this thread."""

        def work(driver: Any) -> None:
            with driver.cursor() as cursor:
                ask(cursor, "SELECT 1")

        patiently(self.url, work, patience=0)
        forget(self.url)

    def identity(self) -> str:
        """The server, the database and the table."""

        def work(driver: Any) -> str:
            with driver.cursor() as cursor:
                [(asks,)] = ask(cursor, _MAY_ASK)
                server = ask(cursor, _SERVER)[0][0] if asks else "server"
                return f"{server}/{ask(cursor, _TABLE.format(table=literal(self.table)))[0][0]}"

        return patiently(self.url, work, patience=min(self.patience, 10))

    def columns(self, cursor: Any) -> dict[str, str]:
        """The types of the table's columns, by their names."""
        return columns_of(cursor, [self.table])[0]

    def _casts(self, shape: Shape, there: Mapping[str, str]) -> str:
        """What an upsert selects: the rows' columns as the types of the table's columns.

        Raises:
            UsageError: the table lacks columns, or some cannot hold the rows' values.
        """
        missing = [name for name in shape.plain.names if name not in there]
        if missing:
            raise UsageError(
                f"the downstream table {self.table} has no column {missing[0]!r}; add it, or use another table "
                f"(its columns are {', '.join(there)})"
            )
        narrow = []
        for field in shape.plain:
            wanted, type = _wanted(field, shape), there[field.name]
            if not ColumnType.parse(type).holds(ColumnType.parse(wanted)):
                name = quote(field.name)
                narrow.append((f"{name} is {type}", f"ALTER COLUMN {name} TYPE {wanted} USING {name}::text::{wanted}"))
        if narrow:
            raise UsageError(
                f"the downstream table {self.table} cannot hold the rows unchanged: "
                f"{', '.join(found for found, _ in narrow)}; run: ALTER TABLE {self.table} "
                f"{', '.join(change for _, change in narrow)}; or use another table. Then check the rows that were "
                "written before"
            )
        return ", ".join(f"{quote(name)}::{there[name]}" for name in shape.plain.names)

    def apply(self, shape: Shape, batch: BatchId, task: int, changes: Iterable[EnrichedRows]) -> Applied:
        """One transaction: load the rows, then set the batch's number, delete and write.

        Raises:
            DownstreamUnavailable: another transaction has locked a row for too long.
        """

        def work(driver: Any) -> Applied:
            with driver.cursor() as cursor:
                applied = self._apply(cursor, shape, batch, task, changes)
            driver.commit()
            return applied

        return self._unless_locked(work)

    def _unless_locked(self, work: Callable[[Any], T]) -> T:
        try:
            return patiently(self.url, work, transactional=True, patience=self.patience)
        except DatabaseError as error:
            if not means(error.sqlstate, LOCKED):
                raise
            raise DownstreamUnavailable(
                f"the downstream table {self.table} has a locked row, for more than {LOCKED_WAIT} s{self._holder()}"
            ) from error

    def write_small(
        self, shape: Shape, batch: BatchId, tasks: Mapping[int, Sequence[EnrichedRows]]
    ) -> tuple[dict[int, Applied], None]:
        """One transaction for all tasks and the driver, with a few statements.

        Raises:
            DownstreamUnavailable: another transaction has locked a row for too long, or has written a task meanwhile.
        """

        def work(driver: Any) -> dict[int, Applied]:
            made = set(_stages.get(driver, ()))
            with driver.cursor() as cursor:
                applied = self._write_small(cursor, shape, batch, tasks, made)
            driver.commit()
            _stages[driver] = made  # a transaction that is rolled back takes its table with it
            return applied

        return self._unless_locked(work), None

    def _write_small(
        self,
        cursor: Any,
        shape: Shape,
        batch: BatchId,
        tasks: Mapping[int, Sequence[EnrichedRows]],
        made: set[str],
    ) -> dict[int, Applied]:
        numbers = pa.scalar([*tasks, _DRIVER], pa.list_(pa.int32()))
        begin = _BEGIN_SMALL.format(idle=_IDLE_LOCKED, batches=self._batches)
        [(_, _, digest, text)] = ask(cursor, begin, batch.query, self.table, self.table, numbers)
        last = {int(task): tuple(known) for task, known in json.loads(text or "{}").items()}
        left = [task for task in (*tasks, _DRIVER) if not batch.is_repeated(last.get(task))]
        applied = {task: Applied(repeated=True) for task in tasks}
        if not left:
            return applied
        changes = {task: tasks[task] for task in left if task != _DRIVER}
        loaded = self.load(cursor, shape, itertools.chain.from_iterable(changes.values()), made) if changes else None
        written = {task: sum(change.writes.num_rows for change in found) for task, found in changes.items()}
        claimed = ask(
            cursor,
            _CLAIM_SMALL.format(batches=self._batches),
            *(batch.query, self.table, batch.number, batch.step, batch.mark),
            pa.scalar(left, pa.list_(pa.int32())),
            pa.scalar([written.get(task, 0) for task in left], pa.list_(pa.int64())),
        )
        if len(claimed) < len(left):
            raise DownstreamUnavailable(f"batch {batch.number} of table {self.table} was written by another session")
        if loaded is None:
            return applied
        there = self._columns_of(cursor, digest)
        for task, found in changes.items():
            deleted = sum(self.delete(cursor, shape, change.deletes, there) for change in found)
            if deleted:
                counts = (batch.query, self.table, task, written[task], deleted)
                ask(cursor, COUNT.format(batches=self._batches), *counts)
            applied[task] = Applied(written[task], deleted)
        self.upsert(cursor, shape, loaded, there)
        return applied

    def _columns_of(self, cursor: Any, digest: str) -> Mapping[str, str]:
        """As `columns`, from memory while the columns have the same digest."""
        key = (self.url, self.table)
        known = _columns.get(key)
        if known is None or known[0] != digest:
            known = _columns[key] = (digest, self.columns(cursor))
        return known[1]

    def _holder(self) -> str:
        """Who has held locks for the longest time, as the end of a sentence."""

        def work(driver: Any) -> list[tuple[Any, ...]]:
            with driver.cursor() as cursor:
                return ask(cursor, _HOLDERS.format(batches=literal(self._batches), table=literal(self.table)))

        for pid, application, host, state, seconds in patiently(self.url, work, patience=1):
            return (
                f": session {pid} ({application or 'without a name'}, from {host}) has been {state} for {seconds} s in "
                "its transaction; end it with pg_terminate_backend if it is a paused or lost program"
            )
        return ""

    def _apply(self, cursor: Any, shape: Shape, batch: BatchId, task: int, changes: Iterable[EnrichedRows]) -> Applied:
        cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_LOADING}s'")
        who = (batch.query, self.table, task)
        last = ask(cursor, LAST.format(batches=self._batches), *who)
        if batch.is_repeated(last[0] if last else None):
            return Applied(repeated=True)
        loaded = self.load(cursor, shape, changes)
        cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{_IDLE_LOCKED}s'")
        cursor.execute(f"SET LOCAL lock_timeout = '{LOCKED_WAIT}s'")
        if not self._claim(cursor, batch, task):
            return Applied(repeated=True)
        applied = self._write(cursor, shape, loaded)
        ask(cursor, COUNT.format(batches=self._batches), *who, applied.written, applied.deleted)
        return applied

    def _claim(self, cursor: Any, batch: BatchId, task: int) -> bool:
        """Set the task's row to the batch. False if it has it. Raises DownstreamError as `BatchId.is_repeated`."""
        who = (batch.query, self.table, task)
        if ask(cursor, CLAIM.format(batches=self._batches), *who, batch.number, batch.step, batch.mark):
            return True
        [last] = ask(cursor, LAST.format(batches=self._batches), *who)
        return not batch.is_repeated(last)

    def commit(self, batch: BatchId, applied: Sequence[Applied]) -> None:  # noqa: ARG002
        """Set the driver's row: all tasks have written the batch."""

        def work(driver: Any) -> None:
            with driver.cursor() as cursor:
                self._claim(cursor, batch, _DRIVER)

        patiently(self.url, work, patience=self.patience)

    def last_batch(self, query: str) -> LastBatch:
        """From the rows of the driver and the tasks."""

        def work(driver: Any) -> LastBatch:
            with driver.cursor() as cursor:
                [(whole, newest)] = ask(cursor, LASTS.format(batches=self._batches), query, self.table, _DRIVER)
                return LastBatch(whole, newest)

        return patiently(self.url, work, patience=self.patience)

    def load(
        self, cursor: Any, shape: Shape, changes: Iterable[EnrichedRows], made: set[str] | None = None
    ) -> LoadedRows:
        """Load the rows into a temporary table of the transaction. `made`: such tables that the session has."""
        typed = ", ".join(f"{quote(field.name)} {_type_of(field)}" for field in shape.plain)
        loaded = LoadedRows(f"replicad_stage_{zlib.crc32(f'{self.table} {typed}'.encode()):08x}", 0, [])
        if made is None or loaded.stage not in made:
            cursor.execute(f"CREATE TEMPORARY TABLE IF NOT EXISTS {loaded.stage} ({typed}) ON COMMIT DELETE ROWS")
            if made is not None:
                made.add(loaded.stage)
        for change in changes:
            if change.writes.num_rows:
                loaded.rows += change.writes.num_rows
                cursor.adbc_ingest(loaded.stage, change.writes.select(shape.plain.names), mode="append", temporary=True)
            loaded.deletes.append(change.deletes)
        return loaded

    def _write(self, cursor: Any, shape: Shape, loaded: LoadedRows) -> Applied:
        there = self.columns(cursor)
        deleted = sum(self.delete(cursor, shape, deletes, there) for deletes in loaded.deletes)
        return Applied(self.upsert(cursor, shape, loaded, there), deleted)

    def try_out(self, shape: Shape, changes: EnrichedRows) -> None:
        """In a transaction that is rolled back."""

        def work(driver: Any) -> None:
            with driver.cursor() as cursor:
                self._write(cursor, shape, self.load(cursor, shape, [changes]))
                cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # a commit would check them
            driver.rollback()

        try:
            patiently(self.url, work, transactional=True, patience=min(self.patience, 10))
        except DatabaseError as error:
            of_a_row = error.sqlstate is not None and not means(error.sqlstate, NOT_OF_A_ROW)
            away = isinstance(error, DatabaseUnavailable)
            kind = RowRefused if of_a_row else DownstreamUnavailable if away else DownstreamError
            raise kind(f"the downstream table {self.table} refuses it: {error}") from error

    def upsert(self, cursor: Any, shape: Shape, loaded: LoadedRows, there: Mapping[str, str], before: str = "") -> int:
        """Write the rows of the stage; returns how many. `before`: a statement that runs first in the same one."""
        if not loaded.rows:
            return 0
        try:
            casts = self._casts(shape, there)
        except UsageError as error:  # the table was altered since the pipeline began
            raise DatabaseError(str(error)) from None
        key = _key_of(shape)
        changing = [quote(name) for name in shape.plain.names if name not in key]
        sql = _UPSERT.format(
            table=self.table,
            stage=loaded.stage,
            columns=", ".join(map(quote, shape.plain.names)),
            casts=casts,
            key=", ".join(map(quote, key)),
            assignments=", ".join(f"{name} = excluded.{name}" for name in changing),
            before=before,
            after=", (SELECT count(*) FROM gone) gone" if before else "",
        )
        return int(ask(cursor, sql)[0][0])

    def delete(self, cursor: Any, shape: Shape, deletes: pa.Table, there: Mapping[str, str]) -> int:
        if not deletes.num_rows:
            return 0
        if shape.key:
            ids = deletes.column(shape.id).combine_chunks()
            sql = _DELETE_PLAIN.format(table=self.table, found=key_found(shape, there))
            return int(ask(cursor, sql, pa.scalar(ids, pa.list_(ids.type)))[0][0])
        sql = _DELETE.format(table=self.table, id=quote(shape.id))
        deleted = 0
        for shard in pc.unique(deletes.column("_shard")).to_pylist():
            ids = deletes.filter(pc.equal(deletes.column("_shard"), shard)).column(shape.id).combine_chunks()
            deleted += ask(cursor, sql, pa.scalar(shard, pa.int32()), pa.scalar(ids, pa.list_(ids.type)))[0][0]
        return deleted

    def stale_ids(self, shape: Shape, shard: int, before: int, limit: int) -> pa.Array:
        """Ids of the shard with a `_seq` below `before`."""
        sql = _STALE.format(table=self.table, id=quote(shape.id))
        plain = _STALE_PLAIN.format(table=self.table, id=key_text(shape), key=", ".join(map(quote, shape.key)))

        def work(driver: Any) -> list[tuple[Any]]:
            with driver.cursor() as cursor:
                if shape.key:
                    return ask(cursor, plain, before, limit)
                return ask(cursor, sql, pa.scalar(shard, pa.int32()), before, limit)

        return pa.array([row[0] for row in patiently(self.url, work, patience=self.patience)], shape.ids)

    def rows(
        self,
        shape: Shape,
        shard: int | None,
        *,
        after: object = None,
        limit: int | None = None,
        ids: pa.Array | None = None,
        most_bytes: int | None = None,
    ) -> pa.Table | None:
        """See Sink. Values are read in the types of the source. None: several rows that have more than `most_bytes`."""
        is_text = pa.types.is_string(shape.ids)
        key = key_text(shape) if shape.key else quote(shape.id)
        order = f'({key}) COLLATE "C"' if is_text else key
        conditions = [] if shape.key or shard is None else [f"_shard = {shard}"]
        if ids is not None:
            among = key_found(shape, shape.types) if shape.key else f"{key} = ANY($1)"
            conditions.append(among.replace("$1", listed(ids)))
        elif after is not None:
            conditions.append(f"{order} > {literal(str(after)) if is_text else after}")
        columns = [f"{key} AS {quote(shape.id)}"]
        columns += [
            f"{_as_of_source(field, shape)} AS {quote(field.name)}"
            for field in shape.schema
            if field.name not in (shape.id, "_shard", "_seq")
        ]
        sql = (
            f"SELECT {', '.join(columns)} FROM {self.table} WHERE {' AND '.join(conditions) or 'true'} ORDER BY {order}"
        )

        def work(driver: Any) -> pa.Table | None:
            held, size = [], 0
            with driver.cursor() as cursor:
                cursor.execute(sql + (f" LIMIT {limit}" if limit is not None else ""))
                reader = batches_of(cursor)
                for batch in reader:
                    held.append(batch)
                    size += batch.nbytes
                    if most_bytes is not None and size > most_bytes and (ids is None or len(ids) > 1):
                        return None
                return pa.Table.from_batches(held, reader.schema)

        found = patiently(self.url, work, patience=self.patience)
        if found is None:
            forget(self.url, transactional=False)  # the rest of the rows is still on its way
        return found

    def stored_counts(self) -> dict[int | None, int]:
        """See Sink."""

        def work(driver: Any) -> dict[int | None, int]:
            with driver.cursor() as cursor:
                [(there,)] = ask(cursor, f"SELECT to_regclass({literal(self.table)}) IS NOT NULL")
                if not there:
                    return {}
                if "_shard" not in self.columns(cursor):
                    return {None: int(ask(cursor, f"SELECT count(*) FROM {self.table}")[0][0])}
                return dict(ask(cursor, f"SELECT _shard, count(*) FROM {self.table} GROUP BY 1"))

        return patiently(self.url, work, patience=self.patience)


def _key_of(shape: Shape) -> tuple[str, ...]:
    """The columns of the table's key."""
    return shape.key or ("_shard", shape.id)


def key_text(shape: Shape) -> str:
    """SQL on a row of a table with `Shape.key` for the id that it has in the tube."""
    return quote(shape.id) if shape.id in shape.key else key_as_text(shape.key)


def key_found(shape: Shape, types: Mapping[str, str]) -> str:
    """SQL on a row of a table with `Shape.key`, whose columns have these types: its id is in the array `$1`."""
    return f"{quote(shape.id)} = ANY($1)" if shape.id in shape.key else key_among(shape.key, types)


def _changes(shape: Shape, there: Mapping[str, str]) -> list[str]:
    """The changes of a table that new or wider columns of the source need."""
    found = []
    for field in shape.plain:
        name, made = quote(field.name), _created_as(field, shape)
        if field.name not in there:
            found += [f"ADD COLUMN {name} {made}"] if field.name in shape.added else []
        elif field.name in shape.widened:
            wanted, present = (ColumnType.parse(type) for type in (_wanted(field, shape), there[field.name]))
            if not present.holds(wanted) and wanted.holds(present):
                found.append(f"ALTER COLUMN {name} TYPE {made} USING {name}::{made}")
    return found


def _wanted(field: pa.Field, shape: Shape) -> str:
    """The type whose values a column has to hold."""
    return shape.types.get(field.name) or _type_of(field)


def _created_as(field: pa.Field, shape: Shape) -> str:
    """The type of a column in a table that we create."""
    known = ColumnType.parse(shape.types.get(field.name, ""))
    if known.name in CREATED and (pa.types.is_string(field.type) or pa.types.is_decimal(field.type)):
        return known.name + ("[]" if known.is_list else "")
    if field.name in shape.key and known.name in ("smallint", "integer"):
        return known.name
    return _type_of(field)


def _as_of_source(field: pa.Field, shape: Shape) -> str:
    """SQL for a value as the source gives it."""
    type = shape.types.get(field.name)
    value = quote(field.name) if type is None else f"{quote(field.name)}::{type}"
    return f"{value}::text" if pa.types.is_string(field.type) else value


def _type_of(field: pa.Field) -> str:
    of_list = field.type.value_type if pa.types.is_list(field.type) else field.type
    if pa.types.is_decimal(of_list):
        found: str | None = f"numeric({of_list.precision}, {of_list.scale})"
    else:
        found = _TYPES.get(of_list)
    if found is None:
        raise UsageError(
            f"column {field.name} is {field.type}, for which Postgres has no type; "
            "convert it to text or plain columns in the transform"
        )
    return found + ("[]" if pa.types.is_list(field.type) else "")


def columns_of(cursor: Any, tables: Sequence[str]) -> list[dict[str, str]]:
    """The types of the columns of some tables, by the names of the columns."""
    found: list[dict[str, str]] = [{} for _ in tables]
    for name, type, place in ask(cursor, COLUMNS.format(tables=", ".join(map(literal, tables)))):
        found[place - 1][name] = type
    return found


def ask(cursor: Any, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Run one statement with parameters (plain values or Arrow scalars) and fetch what it returns."""
    values = [value if isinstance(value, pa.Scalar) else pa.scalar(value) for value in parameters]
    if values:
        arrays = [pa.array([value.as_py()], value.type) for value in values]
        cursor.execute(sql, parameters=pa.record_batch(arrays, names=[str(number) for number in range(len(arrays))]))
    else:
        cursor.execute(sql)
    return list(cursor.fetchall())
