"""Many tables downstream, written together: in one transaction of Postgres, or one table after the other elsewhere.

The tables are those of the sinks (replicad/spark/sinks), of which a pipeline of Spark has one.

A transaction of Postgres is committed with `synchronous_commit = off`: its rows are visible at once, and no batch waits
for the disk of the one before. `flush` waits for the disk, for many batches at once, and only then they may be acked. A
server that crashes before loses the last of them, never one in the middle. The number of the last batch says so
(CommitsLost), and they are written again.

In Postgres the order follows the foreign keys of the tables downstream: rows are deleted in children first, and written
in parents first; deferrable constraints are deferred. That suffices nearly always.

If Postgres refuses a batch because of a foreign key or a unique value, the batch is written once more *with care*. The
rows that are in the way are looked up in the source and written in the same transaction: parents that are missing,
children of deleted rows, rows downstream that have a unique value which another row has now. Unique values that rows
exchange are moved out of the way. A row that still lacks its parent, because the source lacks it too or the pipeline
leaves that table out, waits in the table `replicad_waiting` of the downstream, which is written in the same
transaction. It comes again when a row of the other table is written.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from replicad.errors import DatabaseError, DownstreamUnavailable
from replicad.eventlog import get_logger
from replicad.spark.database import PATIENCE, forget, literal, patiently, quote
from replicad.spark.enrich import EnrichedRows
from replicad.spark.sinks.base import Applied, BatchId, LastBatch, Shape, Sink
from replicad.spark.sinks.postgres import (
    BATCHES,
    CLAIM,
    IDLE_LOADING,
    LAST,
    LASTS,
    LOCKED_WAIT,
    LoadedRows,
    PostgresSink,
    ask,
    columns_of,
    create_missing,
    key_found,
    key_text,
)
from replicad.sqlstates import CONSTRAINT_OF_OTHERS, LOCKED, means

T = TypeVar("T")

log = get_logger("replicad.spark")

SCHEMA = "replicad_pipeline"  # in the downstream, for our two tables
MOST_WAITING = 100_000  # rows that wait for others downstream; beyond that a batch fails, with a remedy
MOST_ROUNDS = 8  # of looking up the rows in the way: parents of parents
MOST_IN_THE_WAY = 100_000  # keys of one table in a round
_WHO = "*"  # as the table in the rows of batches: all tables

LookUpMore = Callable[[Mapping[str, pa.Array]], "Sequence[TableChanges]"]
"""Looks up more ids, by table, as the touches of the batch; returns their changes."""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The changes of one table. `name`: of the table in the source, as SQL writes it."""

    name: str
    sink: Sink
    shape: Shape
    changes: Iterable[EnrichedRows]


@dataclass(frozen=True, slots=True)
class _Both:
    """The changes of several look-ups. Every iteration looks them up again, in bounded pieces."""

    parts: tuple[Iterable[EnrichedRows], ...]

    def __iter__(self) -> Iterator[EnrichedRows]:
        return itertools.chain.from_iterable(self.parts)


class TableGroup(ABC):
    """The tables of one downstream."""

    @abstractmethod
    def begin(self, tables: Mapping[str, tuple[Sink, Shape]]) -> None:
        """Make what the group needs beside its tables, which were prepared. Called again when there are others."""

    @abstractmethod
    def write(
        self, batch: BatchId, tables: Sequence[TableChanges], more: LookUpMore, check: Callable[[], None]
    ) -> Applied:
        """Write a batch. `check` is called when all rows were looked up, before anything of a batch of several tables
        is visible. Raises as `Sink.apply` and `check`.
        """

    @abstractmethod
    def last_batch(self, query: str, sinks: Mapping[str, Sink]) -> dict[str, LastBatch]:
        """The last batches of a query by table; `*` for all of them together."""

    def waiting(self, query: str, touched: Iterable[str]) -> dict[str, pa.Array]:
        """Ids that wait for a row of one of these tables, by table."""
        del query, touched
        return {}

    @property
    def is_flushed(self) -> bool:
        """Whether the downstream has what was written even after a crash."""
        return True

    def flush(self, query: str) -> None:
        """Wait for that. Raises CommitsLost: it has lost batches since the last flush."""
        del query


class SeparateTables(TableGroup):
    """Tables that are written one after the other, each in a step of its own: Delta, Parquet, an index, a class."""

    def begin(self, tables: Mapping[str, tuple[Sink, Shape]]) -> None:
        """See TableGroup."""

    def write(
        self,
        batch: BatchId,
        tables: Sequence[TableChanges],
        more: LookUpMore,  # noqa: ARG002
        check: Callable[[], None],  # noqa: ARG002
    ) -> Applied:
        """See TableGroup."""
        written = deleted = 0
        for one in tables:
            applied = one.sink.apply(one.shape, batch, 0, one.changes)
            counted = one.sink.commit(batch, [applied])
            written += applied.written
            deleted += applied.deleted if counted is None else counted
        return Applied(written, deleted)

    def last_batch(self, query: str, sinks: Mapping[str, Sink]) -> dict[str, LastBatch]:
        """See TableGroup."""
        found = {name: sink.last_batch(query) for name, sink in sinks.items()}
        return {name: last for name, last in found.items() if last is not None}


@dataclass(frozen=True, slots=True)
class _ForeignKey:
    child: str  # the tables, as SQL writes their names downstream
    parent: str
    columns: tuple[str, ...]  # of the child
    referred: tuple[str, ...]
    action: str  # of a delete: a no action, r restrict, c cascade, n set null, d set default


@dataclass(frozen=True, slots=True)
class _Unique:
    table: str
    columns: tuple[str, ...]
    nullable: bool


@dataclass(slots=True)
class _Constraints:
    """The constraints between the tables. `names` has the names downstream as Postgres writes them."""

    foreign: list[_ForeignKey] = field(default_factory=list)
    unique: list[_Unique] = field(default_factory=list)
    deferrable: bool = False

    def ordered(self, tables: Iterable[str]) -> list[str]:
        """The tables, parents before children. In a cycle the first name counts."""
        left, done = sorted(tables), []
        parents = {name: {one.parent for one in self.foreign if one.child == name} - {name} for name in left}
        while left:
            free = next((name for name in left if not parents[name].intersection(left)), left[0])
            left.remove(free)
            done.append(free)
        return done


_FOREIGN = """
SELECT c.conrelid::oid::bigint, c.confrelid::oid::bigint, c.confdeltype::text,
  ARRAY(SELECT a.attname::text FROM unnest(c.conkey) WITH ORDINALITY k (n, at) JOIN pg_catalog.pg_attribute a
    ON a.attrelid = c.conrelid AND a.attnum = k.n ORDER BY k.at),
  ARRAY(SELECT a.attname::text FROM unnest(c.confkey) WITH ORDINALITY k (n, at) JOIN pg_catalog.pg_attribute a
    ON a.attrelid = c.confrelid AND a.attnum = k.n ORDER BY k.at)
FROM pg_catalog.pg_constraint c WHERE c.contype = 'f' AND c.conparentid = 0
  AND c.conrelid = ANY ($1::bigint[]::oid[]) AND c.confrelid = ANY ($1::bigint[]::oid[])"""
_UNIQUE = """
SELECT i.indrelid::bigint, ARRAY(SELECT a.attname::text FROM unnest(i.indkey::int2[]) WITH ORDINALITY k (n, at)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.n
    WHERE k.at <= i.indnkeyatts ORDER BY k.at),
  NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey::int2[])
    AND a.attnotnull)
FROM pg_catalog.pg_index i
WHERE i.indisunique AND NOT i.indisprimary AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
  AND i.indexprs IS NULL AND i.indrelid = ANY ($1::bigint[]::oid[])"""
_DEFERRABLE = """
SELECT count(*) FROM pg_catalog.pg_constraint c WHERE c.condeferrable AND c.conrelid = ANY ($1::bigint[]::oid[])"""
_WAITING = """
CREATE TABLE IF NOT EXISTS {schema}.replicad_waiting (
  query text NOT NULL, tbl text NOT NULL, key text NOT NULL, waits_for text NOT NULL,
  since timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (query, tbl, key))"""
_WAIT = """
INSERT INTO {schema}.replicad_waiting (query, tbl, key, waits_for) SELECT $1, $2, k, $3 FROM unnest($4::text[]) k
ON CONFLICT (query, tbl, key) DO UPDATE SET waits_for = excluded.waits_for"""
_COME = """
SELECT tbl, array_agg(key) FROM {schema}.replicad_waiting WHERE query = $1 AND waits_for = ANY ($2::text[])
GROUP BY tbl"""
_CLAIM = f"""
WITH claimed AS ({CLAIM.format(batches=f"{SCHEMA}.replicad_batches")}), columns AS (
  SELECT a.attrelid,
    md5(string_agg(concat_ws(' ', a.attnum, a.attname, a.atttypid, a.atttypmod), ',' ORDER BY a.attnum))
  FROM pg_catalog.pg_attribute a WHERE a.attrelid = ANY ($7::bigint[]::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
  GROUP BY a.attrelid)
SELECT EXISTS (SELECT FROM claimed), (SELECT array_agg(attrelid || ':' || md5) FROM columns)"""
_FLUSH = (
    f"UPDATE {SCHEMA}.replicad_batches SET at = now() WHERE query = $1 AND target = $2 AND task = 0 RETURNING batch"
)
_DONE = "DELETE FROM {schema}.replicad_waiting WHERE query = $1 AND tbl = $2 AND key = ANY ($3::text[])"


class CommitsLost(DownstreamUnavailable):
    """A downstream that crashed has lost batches that it had, and that were not flushed."""


class _InTheWay(Exception):
    """Rows of these keys, by table, must be looked up first."""

    def __init__(self, keys: dict[str, set[str]]) -> None:
        self.keys = keys
        super().__init__()


@dataclass(slots=True)
class _Staged:
    """A table of a batch whose rows are in its stage."""

    changes: TableChanges
    sink: PostgresSink
    loaded: LoadedRows
    there: Mapping[str, str]  # the types of its columns

    @property
    def gone(self) -> pa.Array:
        """The ids to delete."""
        ids = [one.column(self.changes.shape.id).combine_chunks() for one in self.loaded.deletes]
        return pa.concat_arrays(ids) if ids else pa.array([], self.changes.shape.ids)

    @property
    def key(self) -> str:
        """SQL for the key of a row, for comparison."""
        return ", ".join(map(quote, self.changes.shape.key))


@dataclass(slots=True)
class PostgresTables(TableGroup):
    """Tables of one Postgres, each with the key of its source (`Shape.key`), in one transaction for each batch."""

    url: str
    patience: float = PATIENCE
    tables: dict[str, str] = field(default_factory=dict)  # the names downstream of all tables, by those in the source
    shapes: dict[str, Shape] = field(default_factory=dict)
    _known: _Constraints | None = None
    _session: Any = None  # whose settings were made
    _stages: set[str] = field(default_factory=set)  # the temporary tables of the session
    _waits: bool | None = None  # whether rows may wait; None: not known
    _loose: int | None = None  # the number of the last batch that is not flushed
    _level: str = "on"  # what a commit waits for when it is flushed
    _check: Callable[[], None] = lambda: None  # before a commit
    _oids: dict[str, int] = field(default_factory=dict)  # of the tables, by their names in the source
    _types: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)  # of their columns, with a digest

    def __repr__(self) -> str:  # the url may hold a password
        return "PostgresTables()"

    def begin(self, tables: Mapping[str, tuple[Sink, Shape]]) -> None:
        """See TableGroup."""
        self.tables = {name: sink.table for name, (sink, _) in tables.items() if isinstance(sink, PostgresSink)}
        self.shapes = {name: shape for name, (_, shape) in tables.items()}

        def work(driver: Any) -> None:
            with driver.cursor() as cursor:
                batches = BATCHES.format(batches=f"{SCHEMA}.replicad_batches")
                create_missing(
                    cursor, [f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}", batches, _WAITING.format(schema=SCHEMA)]
                )

        patiently(self.url, work, patience=min(self.patience, 10))
        self._known = None

    def last_batch(self, query: str, sinks: Mapping[str, Sink]) -> dict[str, LastBatch]:  # noqa: ARG002
        """See TableGroup."""

        def work(driver: Any) -> LastBatch:
            with driver.cursor() as cursor:
                [(whole, newest)] = ask(cursor, LASTS.format(batches=f"{SCHEMA}.replicad_batches"), query, _WHO, 0)
                return LastBatch(whole, newest)

        return {_WHO: patiently(self.url, work, patience=self.patience)}

    def waiting(self, query: str, touched: Iterable[str]) -> dict[str, pa.Array]:
        """See TableGroup."""
        if self._waits is False:
            return {}

        def work(driver: Any) -> dict[str, pa.Array]:
            with driver.cursor() as cursor:
                names = pa.scalar(list(touched), pa.list_(pa.string()))
                found = ask(cursor, _COME.format(schema=SCHEMA), query, names)
                [(self._waits,)] = ask(
                    cursor, f"SELECT EXISTS (SELECT FROM {SCHEMA}.replicad_waiting WHERE query = $1)", query
                )
                return {name: pa.array(keys, pa.string()) for name, keys in found}

        return patiently(self.url, work, patience=self.patience)

    def write(
        self, batch: BatchId, tables: Sequence[TableChanges], more: LookUpMore, check: Callable[[], None]
    ) -> Applied:
        """See TableGroup."""
        self._check = check
        try:
            return self._attempt(batch, tables, care=False, last=False)
        except DatabaseError as error:
            if means(error.sqlstate, LOCKED):
                raise DownstreamUnavailable(
                    f"a row downstream is locked by another transaction for more than {LOCKED_WAIT} s: {error}"
                ) from error
            if not means(error.sqlstate, CONSTRAINT_OF_OTHERS):
                raise
            log.debug("written_with_care", error=str(error))
        self._known = None
        seen: dict[str, set[str]] = {}
        for number in range(MOST_ROUNDS):
            try:
                return self._attempt(batch, tables, care=True, last=number == MOST_ROUNDS - 1)
            except _InTheWay as found:
                wanted = {name: keys - seen.get(name, set()) for name, keys in found.keys.items()}
                wanted = {name: keys for name, keys in wanted.items() if keys}
                for name, keys in wanted.items():
                    seen.setdefault(name, set()).update(keys)
                if not wanted:
                    return self._attempt(batch, tables, care=True, last=True)
                ids = {name: pa.array(sorted(keys), pa.string()) for name, keys in wanted.items()}
                tables = _merged(tables, more(ids))
        raise AssertionError

    def _attempt(self, batch: BatchId, tables: Sequence[TableChanges], *, care: bool, last: bool) -> Applied:
        def work(driver: Any) -> Applied:
            with driver.cursor() as cursor:
                self._enter(driver, cursor, batch.query)
                applied = self._apply(cursor, batch, tables, care=care, last=last)
            self._check()
            driver.commit()
            return applied

        applied = self._in_session(work)
        self._loose = batch.number
        return applied

    def _in_session(self, work: Callable[[Any], T]) -> T:
        try:
            return patiently(self.url, work, transactional=True, patience=self.patience)
        except BaseException:
            self._session = None  # its connection is closed
            forget(self.url, transactional=True)
            raise

    def _enter(self, driver: Any, cursor: Any, query: str) -> None:
        """Make the settings of a new session, and see whether the server has lost batches.

        Raises:
            CommitsLost: it has; only once.
        """
        if self._session is driver:
            return
        [(level,)] = ask(cursor, "SELECT current_setting('synchronous_commit')")
        self._level = "local" if level == "off" else level
        cursor.execute(f"SET lock_timeout = '{LOCKED_WAIT}s'")
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_LOADING}s'")
        cursor.execute("SET synchronous_commit = off")
        driver.commit()
        self._session, self._stages = driver, set()
        if self._loose is not None:
            self._check_kept(ask(cursor, LAST.format(batches=f"{SCHEMA}.replicad_batches"), query, _WHO, 0))

    def _check_kept(self, last: list[tuple[Any, ...]]) -> None:
        loose = self._loose
        if loose is None or (last and last[0][0] >= loose):
            return
        self._loose = None
        has = last[0][0] if last else "none"
        raise CommitsLost(f"the downstream had batch {loose} and has {has}: it crashed, so the last ones are repeated")

    @property
    def is_flushed(self) -> bool:
        """See TableGroup."""
        return self._loose is None

    def flush(self, query: str) -> None:
        """See TableGroup. A commit that waits for the disk, or for standbys, waits for all commits before it too."""
        if self._loose is None:
            return

        def work(driver: Any) -> None:
            with driver.cursor() as cursor:
                self._enter(driver, cursor, query)
                cursor.execute(f"SET LOCAL synchronous_commit = {self._level}")
                self._check_kept(ask(cursor, _FLUSH, query, _WHO))
            driver.commit()

        self._in_session(work)
        self._loose = None

    def _apply(self, cursor: Any, batch: BatchId, tables: Sequence[TableChanges], *, care: bool, last: bool) -> Applied:
        where = f"{SCHEMA}.replicad_batches"
        constraints = self._constraints(cursor)
        staged: dict[str, _Staged] = {}
        for one in tables:
            assert isinstance(one.sink, PostgresSink)
            staged[one.name] = _Staged(one, one.sink, one.sink.load(cursor, one.shape, one.changes, self._stages), {})
        oids = pa.scalar([self._oids[name] for name in staged if name in self._oids], pa.list_(pa.int64()))
        numbers = (batch.number, batch.step, batch.mark)
        [(claimed, digests)] = ask(cursor, _CLAIM, batch.query, _WHO, 0, *numbers, oids)
        if not claimed:
            [row] = ask(cursor, LAST.format(batches=where), batch.query, _WHO, 0)
            batch.is_repeated(row)
            return Applied(repeated=True)
        if constraints.deferrable:
            cursor.execute("SET CONSTRAINTS ALL DEFERRED")
        self._look_at_columns(cursor, staged, dict(one.split(":") for one in digests or ()))
        if self._waits is not False:
            for name, table in staged.items():
                self._come(cursor, batch, name, table)
        kept: dict[str, pa.Array] = {}
        if care:
            kept = _Care(self, cursor, batch, staged, constraints, last).clear()
        return self._write(cursor, staged, constraints, kept, care=care)

    def _look_at_columns(self, cursor: Any, staged: Mapping[str, _Staged], digests: Mapping[str, str]) -> None:
        """The types of the columns; they are looked up again if their digest is another one."""
        by_name = {name: digests.get(str(self._oids.get(name))) for name in staged}
        changed = [
            name for name, digest in by_name.items() if digest is None or self._types.get(name, ("", {}))[0] != digest
        ]
        if changed:
            found = columns_of(cursor, [staged[name].sink.table for name in changed])
            for name, there in zip(changed, found, strict=True):
                self._types[name] = (by_name[name] or "", there)
        if None in by_name.values():  # a table was dropped and made again
            self._known = None
        for name, one in staged.items():
            one.there = self._types[name][1]

    def _write(
        self,
        cursor: Any,
        staged: Mapping[str, _Staged],
        constraints: _Constraints,
        kept: Mapping[str, pa.Array],
        *,
        care: bool,
    ) -> Applied:
        order = constraints.ordered(staged)
        deleted = written = 0
        for name in reversed(order):
            one = staged[name]
            for deletes in one.loaded.deletes:
                rows = deletes
                if name in kept:
                    there = pc.is_in(rows.column(one.changes.shape.id), value_set=kept[name])
                    rows = rows.filter(pc.invert(there))
                deleted += one.sink.delete(cursor, one.changes.shape, rows, one.there)
        for name in order:
            one = staged[name]
            before = _swap(cursor, one, constraints) if care else ""
            written += one.sink.upsert(cursor, one.changes.shape, one.loaded, one.there, before)
        return Applied(written, deleted)

    def _constraints(self, cursor: Any) -> _Constraints:
        """The constraints of all tables, looked up when they are needed first, and after a refusal."""
        if self._known is not None:
            return self._known
        names = {}
        for name, table in self.tables.items():
            [(oid,)] = ask(cursor, f"SELECT {literal(table)}::pg_catalog.regclass::oid::bigint")
            names[int(oid)] = name
        self._oids = {name: oid for oid, name in names.items()}
        oids = pa.scalar(list(names), pa.list_(pa.int64()))
        foreign = [
            _ForeignKey(names[child], names[parent], tuple(columns), tuple(referred), action)
            for child, parent, action, columns, referred in ask(cursor, _FOREIGN, oids)
        ]
        unique = [
            _Unique(names[oid], tuple(columns), nullable) for oid, columns, nullable in ask(cursor, _UNIQUE, oids)
        ]
        [(deferrable,)] = ask(cursor, _DEFERRABLE, oids)
        self._known = _Constraints(foreign, unique, deferrable > 0)
        return self._known

    def _come(self, cursor: Any, batch: BatchId, name: str, one: _Staged) -> None:
        """The ids of this batch wait no more; those that still have to are noted again."""
        texts = (
            ask(
                cursor,
                f"SELECT coalesce(array_agg(({_staged_key(one)})::text), '{{}}') FROM pg_temp.{one.loaded.stage} s",
            )[0][0]
            if one.loaded.rows
            else []
        )
        keys = [*texts, *map(str, one.gone.to_pylist())]
        if keys:
            ask(
                cursor,
                f"{_DONE.format(schema=SCHEMA)} RETURNING 1",
                batch.query,
                name,
                pa.scalar(keys, pa.list_(pa.string())),
            )

    def wait(self, cursor: Any, batch: BatchId, name: str, waits_for: str, keys: Sequence[str]) -> None:
        """Note ids that wait for a row of another table."""
        self._waits = True
        [(count,)] = ask(cursor, f"SELECT count(*) FROM {SCHEMA}.replicad_waiting WHERE query = $1", batch.query)
        if count + len(keys) > MOST_WAITING:
            raise DatabaseError(
                f"more than {MOST_WAITING:,} rows wait downstream for rows of other tables, for example of {name} for "
                f"{waits_for}: is {waits_for} left out of the pipeline? Take it in, or drop the foreign key downstream"
            )
        log.warning("rows_wait", table=name, waits_for=waits_for, rows=len(keys), example=keys[0])
        given = pa.scalar(list(keys), pa.list_(pa.string()))
        ask(cursor, f"{_WAIT.format(schema=SCHEMA)} RETURNING 1", batch.query, name, waits_for, given)


def _staged_key(one: _Staged) -> str:
    """SQL on a row of the stage for the id that it has in the tube."""
    shape = one.changes.shape
    cast = {name: f"{quote(name)}::{one.there[name]}::text" for name in shape.key}
    if shape.id in shape.key:
        return cast[shape.id]
    texts = [cast[name] for name in shape.key]
    return texts[0] if len(texts) == 1 else f"json_build_array({', '.join(texts)})::text"


def _merged(tables: Sequence[TableChanges], more: Sequence[TableChanges]) -> list[TableChanges]:
    """The changes of both; a table that is in both has the pieces of both."""
    by_name = {one.name: one for one in tables}
    for one in more:
        before = by_name.get(one.name)
        changes = one.changes if before is None else _Both((before.changes, one.changes))
        by_name[one.name] = replace(one, changes=changes)
    return list(by_name.values())


@dataclass(slots=True)
class _Care:
    """Finds the rows that are in the way of a batch whose rows are staged."""

    group: PostgresTables
    cursor: Any
    batch: BatchId
    staged: Mapping[str, _Staged]
    constraints: _Constraints
    last: bool

    def clear(self) -> dict[str, pa.Array]:
        """Raise _InTheWay with what must be looked up first. If it was (`last`): let what cannot be written wait.

        Returns the ids of deletes that wait, by table.
        """
        found: dict[str, set[str]] = {}
        orphans = [(key, self._orphans(key)) for key in self.constraints.foreign if self._has_rows(key.child)]
        children = [(key, self._children(key)) for key in self.constraints.foreign if self._deletes(key)]
        for key, missing in orphans:
            keys = {parent for _, parent in missing if parent is not None}
            found.setdefault(key.parent, set()).update(keys)
        for key, left in children:
            found.setdefault(key.child, set()).update(child for child, _ in left)
        for one in self.constraints.unique:
            if self._has_rows(one.table):
                found.setdefault(one.table, set()).update(self._rivals(one))
        found = {name: set(sorted(keys)[:MOST_IN_THE_WAY]) for name, keys in found.items() if keys}
        if found and not self.last:
            raise _InTheWay(found)
        for key, missing in orphans:
            if missing:
                self._put_aside(key, sorted({child for child, _ in missing}))
        kept: dict[str, set[str]] = {}
        for key, left in children:
            parents = sorted({parent for _, parent in left})
            if parents:
                self.group.wait(self.cursor, self.batch, key.parent, key.child, parents)
                kept.setdefault(key.parent, set()).update(parents)
        return {
            name: pa.array(sorted(keys), pa.string()).cast(self.staged[name].changes.shape.ids)
            for name, keys in kept.items()
        }

    def _has_rows(self, name: str) -> bool:
        return name in self.staged and self.staged[name].loaded.rows > 0

    def _deletes(self, key: _ForeignKey) -> bool:
        return key.action in "ar" and key.parent in self.staged and len(self.staged[key.parent].gone) > 0

    def _cast(self, name: str, columns: Iterable[str], alias: str) -> str:
        there = self.staged[name].there
        return ", ".join(f"{alias}.{quote(one)}::{there[one]}" for one in columns)

    def _orphans(self, key: _ForeignKey) -> list[tuple[str, str | None]]:
        """The ids of staged rows without their parent, and the id of that parent, if it can be told."""
        child, parent = self.staged[key.child], self.staged.get(key.parent)
        given = " AND ".join(f"s.{quote(one)} IS NOT NULL" for one in key.columns)
        refers = ", ".join(f"p.{quote(one)}" for one in key.referred)
        values = self._cast(key.child, key.columns, "s")
        table = self._table_of(key.parent)
        gone = ""
        if parent is not None and len(parent.gone):
            shape = parent.changes.shape
            ids = ask_literal(parent.gone)
            gone = f" AND NOT ({_aliased(key_found(shape, parent.there), 'p', shape.key).replace('$1', ids)})"
        absent = [f"NOT EXISTS (SELECT FROM {table} p WHERE ({refers}) = ({values}){gone})"]
        if parent is not None and parent.loaded.rows:
            staged = self._cast(key.parent, key.referred, "q")
            absent.append(f"NOT EXISTS (SELECT FROM pg_temp.{parent.loaded.stage} q WHERE ({staged}) = ({values}))")
        parent_key = self._parent_key(key, values)
        sql = (
            f"SELECT {_qualified_key(child)}, {parent_key} FROM pg_temp.{child.loaded.stage} s "
            f"WHERE {given} AND {' AND '.join(absent)}"
        )
        return [(str(mine), theirs) for mine, theirs in ask(self.cursor, sql)]

    def _parent_key(self, key: _ForeignKey, values: str) -> str:
        """SQL for the id of the parent; NULL if the foreign key does not refer to the columns of its key."""
        shape = self.group_shape(key.parent)
        if shape is None or set(shape.key) != set(key.referred):
            return "NULL"
        at = dict(zip(key.referred, values.split(", "), strict=True))
        texts = [f"({at[name]})::text" for name in shape.key]
        return texts[0] if len(texts) == 1 else f"json_build_array({', '.join(texts)})::text"

    def group_shape(self, name: str) -> Shape | None:
        """The shape of a table, also if the batch has no changes of it."""
        one = self.staged.get(name)
        return self.group.shapes.get(name) if one is None else one.changes.shape

    def _table_of(self, name: str) -> str:
        one = self.staged.get(name)
        return one.sink.table if one is not None else self.group.tables[name]

    def _children(self, key: _ForeignKey) -> list[tuple[str, str]]:
        """The ids of rows downstream that refer to a deleted row, and the id of that row."""
        parent = self.staged[key.parent]
        shape, child = self.group_shape(key.child), self.staged.get(key.child)
        if shape is None:
            return []
        left = ""
        if child is not None:
            if len(child.gone):
                found = _aliased(key_found(shape, child.there), "c", shape.key)
                left += f" AND NOT ({found.replace('$1', ask_literal(child.gone))})"
            if child.loaded.rows:
                mine = ", ".join(f"c.{quote(one)}" for one in shape.key)
                staged = self._cast(key.child, shape.key, "q")
                left += f" AND NOT EXISTS (SELECT FROM pg_temp.{child.loaded.stage} q WHERE ({staged}) = ({mine}))"
        join = " AND ".join(
            f"c.{quote(mine)} = p.{quote(theirs)}" for mine, theirs in zip(key.columns, key.referred, strict=True)
        )
        theirs = parent.changes.shape
        gone = _aliased(key_found(theirs, parent.there), "p", theirs.key).replace("$1", ask_literal(parent.gone))
        sql = (
            f"SELECT {_aliased(key_text(shape), 'c', shape.key)}, {_aliased(key_text(theirs), 'p', theirs.key)} "
            f"FROM {self._table_of(key.parent)} p JOIN {self._table_of(key.child)} c ON {join} WHERE {gone}{left}"
        )
        return [(str(mine), str(other)) for mine, other in ask(self.cursor, sql)]

    def _rivals(self, unique: _Unique) -> list[str]:
        """The ids of rows downstream that have a unique value of a staged row, and are not in the batch."""
        one = self.staged[unique.table]
        shape = one.changes.shape
        values = self._cast(unique.table, unique.columns, "s")
        held = ", ".join(f"t.{quote(name)}" for name in unique.columns)
        mine = ", ".join(f"t.{quote(name)}" for name in shape.key)
        keys = self._cast(unique.table, shape.key, "q")
        stage = f"pg_temp.{one.loaded.stage}"
        gone = ""
        if len(one.gone):
            found = _aliased(key_found(shape, one.there), "t", shape.key)
            gone = f" AND NOT ({found.replace('$1', ask_literal(one.gone))})"
        sql = (
            f"SELECT {_aliased(key_text(shape), 't', shape.key)} FROM {one.sink.table} t "
            f"JOIN {stage} s ON ({held}) = ({values}) "
            f"WHERE NOT EXISTS (SELECT FROM {stage} q WHERE ({keys}) = ({mine})){gone}"
        )
        return [str(key) for (key,) in ask(self.cursor, sql)]

    def _put_aside(self, key: _ForeignKey, children: Sequence[str]) -> None:
        """Take these rows out of the stage; they wait for their parents."""
        one = self.staged[key.child]
        self.group.wait(self.cursor, self.batch, key.child, key.parent, children)
        ids = ask_literal(pa.array(children, pa.string()))
        sql = f"DELETE FROM pg_temp.{one.loaded.stage} s WHERE {_qualified_key(one)} = ANY ({ids}) RETURNING 1"
        ask(self.cursor, sql)


def ask_literal(ids: pa.Array) -> str:
    """An array of ids in SQL."""
    kind = "text" if pa.types.is_string(ids.type) else "bigint"
    quoted = (str(one).replace("\\", "\\\\").replace('"', '\\"') for one in ids.to_pylist())
    return literal("{" + ",".join(f'"{one}"' for one in quoted) + "}") + f"::{kind}[]"


def _aliased(sql: str, alias: str, columns: Iterable[str]) -> str:
    """SQL on the columns of a key, with the alias of its table."""
    for name in columns:
        sql = sql.replace(quote(name), f"{alias}.{quote(name)}")
    return sql


def _qualified_key(one: _Staged) -> str:
    return _aliased(_staged_key(one), "s", one.changes.shape.key)


def _swap(cursor: Any, one: _Staged, constraints: _Constraints) -> str:
    """Move unique values out of the way that rows of the batch exchange.

    Where the columns may be NULL they become NULL first. Otherwise the rows are deleted and written in one statement;
    this is what is returned. No foreign key is checked before the end of a statement.
    """
    shape = one.changes.shape
    anew: list[str] = []
    for unique in constraints.unique:
        if unique.table != one.changes.name or not one.loaded.rows:
            continue
        values = ", ".join(f"s.{quote(name)}::{one.there[name]}" for name in unique.columns)
        held = ", ".join(f"t.{quote(name)}" for name in unique.columns)
        keys = ", ".join(f"s.{quote(name)}::{one.there[name]}" for name in shape.key)
        mine = ", ".join(f"t.{quote(name)}" for name in shape.key)
        moved = (
            f"({mine}) IN (SELECT {keys} FROM pg_temp.{one.loaded.stage} s) AND EXISTS (SELECT FROM "
            f"pg_temp.{one.loaded.stage} s WHERE ({values}) = ({held}) AND ({keys}) <> ({mine}))"
        )
        if unique.nullable:
            nulls = ", ".join(f"{quote(name)} = NULL" for name in unique.columns)
            cursor.execute(f"UPDATE {one.sink.table} t SET {nulls} WHERE {moved}")
        else:
            anew.append(moved)
    return f"gone AS (DELETE FROM {one.sink.table} t WHERE {' OR '.join(anew)} RETURNING 1), " if anew else ""
