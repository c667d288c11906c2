"""Enrichment: look up the current rows of touched ids. An id without a row becomes a delete.

Runs in a task, or on the driver for garbage collection. That a row is not found proves a delete only if the statement
sees every row, as of the commit of the touch or later. So each statement that looks rows up also looks for the pods of
their touches, in the same snapshot: a pod is written in the transaction that changes the row, and stays in the tube
until the batch is acked. A statement that does not see the pods runs on a standby or a copy that lags, on another
database, or under a snapshot that is too old. A standby is refused in any case, and so is a session in which row
security could hide rows: Postgres gives an error for such a table while `row_security` is off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from replicad.errors import (
    ColumnsChanged,
    DatabaseError,
    DatabaseRefused,
    DatabaseUnavailable,
    RowsUnproven,
    TableUnreadable,
    UsageError,
    ValueUnheld,
)
from replicad.spark.database import PATIENCE, batches_of, forget, literal, patiently
from replicad.spark.tables import ADDED, UNHELD, Layout
from replicad.spark.touches import chunks_by_shard, touch_schema
from replicad.sqlstates import NO_RIGHT, NO_TABLE, WRONG_QUERY, means
from replicad.tracing import MOST_LINKS, TRACEPARENT

CHUNK = 10_000  # ids in one query at most; larger queries are not faster and hold more rows in memory
PIECE = 64 << 20  # bytes of rows in one piece of changes, about: what a task holds of them; a longer row is a piece
NOTHING = "SELECT WHERE $1::{ids}[] IS NULL"  # for the proof alone, with the ids of a look-up
_TRIED = 20  # tables that are tried to find out whether any can be read
KEYS = pa.schema([("_shard", pa.int32()), ("_seq", pa.int64())])
_SEEN = "_replicad_seen"  # one number in each row: how many of the pods are seen, or one of the next two
_STANDBY, _HIDES = -1, -2
_PROOF = f"""
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN {_STANDBY}
  WHEN pg_catalog.current_setting('row_security') OPERATOR(pg_catalog.<>) 'off' THEN {_HIDES}
  ELSE (SELECT count(*) FROM {{pods}} p WHERE p.seq = ANY ({{seqs}})) END AS {_SEEN}"""
_WITH_PROOF = "SELECT proof.*, found.* FROM ({proof}) proof LEFT JOIN ({query}) found ON true"


@dataclass(frozen=True, slots=True)
class EnrichedRows:
    """The changes for one chunk of touches. `writes`: the current rows, then _shard and _seq; `deletes`: _shard, id,
    _seq.
    """

    writes: pa.Table
    deletes: pa.Table


@dataclass(frozen=True, slots=True)
class LookUps(Iterable[EnrichedRows]):
    """The changes for some touches. Every iteration looks up the rows again. `traces` gets the traceparents of rows:
    each once, and no more than a span can have.
    """

    enricher: Enricher
    touches: pa.Table
    traces: dict[str, None] = field(default_factory=dict)

    def __iter__(self) -> Iterator[EnrichedRows]:
        column = self.enricher.traceparent
        for found in self.enricher.changes(self.touches):
            if column is not None and column in found.writes.column_names and len(self.traces) <= MOST_LINKS:
                for text in pc.unique(found.writes.column(column)).to_pylist():
                    if isinstance(text, str) and TRACEPARENT.fullmatch(text) and len(self.traces) <= MOST_LINKS:
                        self.traces[text] = None
            yield found


@dataclass(frozen=True, slots=True)
class Enricher:
    """Loads the rows of touched ids. `url` is the Postgres of the rules without a `database`; `layout` is from
    `tables.find_layout`. `pods` is the SQL name of the tube's table, which is in the database of the rows. The rows of
    a shard in `purged` are deleted if there is no table for it. `traceparent`: a column of rows, downstream, with
    the W3C traceparent of the request that wrote them.
    """

    url: str
    layout: Layout
    pods: str
    chunk: int = CHUNK
    patience: float = PATIENCE
    purged: frozenset[int] = frozenset()
    traceparent: str | None = None

    def __repr__(self) -> str:  # the url may hold a password
        return f"Enricher(layout={self.layout!r})"

    @property
    def schema(self) -> pa.Schema:
        """The schema of `EnrichedRows.writes`."""
        return pa.schema([*self.layout.schema, *KEYS])

    def changes(self, touches: pa.Table) -> Iterator[EnrichedRows]:
        """Look up touches (deduplicated and sorted, see `touches`), in pieces of at most `chunk` ids, and about `PIECE`
        bytes. Within a shard their ids ascend.

        Raises:
            DatabaseError: the rows cannot be read, e.g. because a column was dropped.
            TableUnreadable: the table of a shard was dropped, lost a column or its rights.
            ColumnsChanged: a table has columns that the layout does not have, or values that its types do not hold.
            ValueUnheld: some rows hold what Arrow cannot hold.
            RowsUnproven: the session may not see all rows, or not as of the touches.
            UsageError: no rule has a table for the shard of a touch.
        """
        size = self.chunk
        for shard, chunk in chunks_by_shard(touches, self.chunk):
            at = 0
            while at < chunk.num_rows:
                piece = chunk.slice(at, size)
                found = self._look_up(shard, piece)
                if found is None:
                    size = max(1, piece.num_rows // 4)
                    continue
                yield found
                at += piece.num_rows
                if found.writes.nbytes < PIECE // 4:
                    size = min(self.chunk, 2 * size)

    def unreadable(self, shards: Iterable[int]) -> dict[int, str]:
        """Why the tables of some of these shards cannot be read now, by shard.

        Raises:
            DatabaseError: for another reason.
        """
        found = {}
        for shard in shards:
            try:
                self._look_up(shard, touch_schema(self.layout.ids).empty_table())
            except TableUnreadable as error:
                found[shard] = str(error)
        return found

    def prove(self) -> None:
        """On the driver, before the query starts: check that look-ups will be able to prove what they see.

        Raises:
            UsageError: a database has no such tube, or its role may not read the pods.
            RowsUnproven: it is a standby, or the session does not keep its settings.
            DatabaseError: it cannot be used.
        """
        no_ids, no_seqs = pa.array([], self.layout.ids), pa.array([], pa.int64())
        for url in dict.fromkeys([source.rule.database or self.url for source in self.layout.sources]):
            try:
                self._fetch(url, self._nothing, no_ids, no_seqs)
            except DatabaseError as error:
                if means(error.sqlstate, NO_TABLE):
                    raise UsageError(
                        f"[enrich] database has no tube {self.pods}, so a row that is missing there may not have been "
                        "deleted; give the database of the daemon's tube"
                    ) from error
                if means(error.sqlstate, NO_RIGHT):
                    raise UsageError(
                        "[enrich] database: the role may not read the pods, which prove that a missing row was "
                        f"deleted: {error}; run: GRANT SELECT ON {self.pods} TO role; and GRANT USAGE on its schema"
                    ) from error
                raise

    @property
    def _nothing(self) -> str:
        return NOTHING.format(ids="text" if pa.types.is_string(self.layout.ids) else "bigint")

    def reads_any(self, *, except_for: Collection[int]) -> bool:
        """Whether the table of any other shard can be read."""
        others = [shard for source in self.layout.sources for shard in source.examples if shard not in except_for]
        return any(not self.unreadable([shard]) for shard in others[:_TRIED])

    def _look_up(self, shard: int, touched: pa.Table) -> EnrichedRows | None:
        """The changes of one shard. None: the rows are larger than a piece, and of more than one id."""
        located = self.layout.query(shard)
        if located is None:
            covered = "; ".join(f"{source.rule.shards.text}: {source.rule.table}" for source in self.layout.sources)
            raise UsageError(f"shard {shard} was touched, but no table was named for it (there are {covered})")
        ids = touched.column("id").combine_chunks()
        seqs = pc.unique(touched.column("seq"))
        database, query = located
        try:
            found = self._fetch(database or self.url, query, ids, seqs)
        except DatabaseError as error:
            if not means(error.sqlstate, WRONG_QUERY) or isinstance(error, (DatabaseUnavailable, DatabaseRefused)):
                raise
            if shard not in self.purged or not means(error.sqlstate, NO_TABLE):
                text = f"the table of shard {shard} cannot be read: {error}"
                raise TableUnreadable(text, sqlstate=error.sqlstate) from error
            self._fetch(database or self.url, self._nothing, ids, seqs)
            found = self.layout.schema.empty_table()
        if found is None:
            return None
        if ADDED in found.column_names and found.num_rows and (names := found.column(ADDED)[0].as_py()):
            raise ColumnsChanged(f"the table of shard {shard} has new columns: {names}")
        _check_held(found, self.layout.id, shard)
        try:
            rows = conform(found, self.layout.schema)
        except pa.ArrowInvalid as error:  # a wider type since the pipeline looked
            raise ColumnsChanged(f"the table of shard {shard} has another type: {str(error)[:200]}") from error
        known = rows.column(self.layout.id)
        absent = touched.filter(pc.invert(pc.is_in(ids, value_set=known.combine_chunks())))
        last = touched.column("seq").take(pc.index_in(known, value_set=ids))
        shards = pa.repeat(pa.scalar(shard, pa.int32()), len(rows))
        writes = rows.append_column(KEYS.field("_shard"), shards).append_column(KEYS.field("_seq"), last)
        return EnrichedRows(writes, absent.rename_columns(["_shard", self.layout.id, "_seq"]))

    def _fetch(self, url: str, query: str, ids: pa.Array, seqs: pa.Array) -> pa.Table | None:
        """The rows, with the proof that the statement has seen all of them. None as `_look_up`.

        The ids are in the text of the statement: without parameters the driver reads rows by COPY as they come, and
        otherwise it holds all of them twice.
        """
        before, _, after = query.rpartition("$1")
        proof = _PROOF.format(pods=self.pods, seqs=listed(seqs))
        statement = _WITH_PROOF.format(proof=proof, query=before + listed(ids) + after)

        def work(driver: Any) -> pa.Table | None:
            held, size = [], 0
            with driver.cursor() as cursor:
                cursor.execute(statement)
                reader = batches_of(cursor)
                for batch in reader:
                    held.append(batch)
                    size += batch.nbytes
                    if size > PIECE and len(ids) > 1:
                        return None
                return pa.Table.from_batches(held, reader.schema)

        found = patiently(url, work, patience=self.patience)
        if found is None:
            forget(url, transactional=False)  # the rest of the rows is still on its way
            return None
        self._check_proof(found, seqs)
        if self.layout.id not in found.column_names:
            return found.slice(0, 0)
        known = found.column(self.layout.id)  # a row has a key; without any row there is one line of NULL
        return found if not known.null_count else found.filter(pc.is_valid(known))

    def _check_proof(self, found: pa.Table, seqs: pa.Array) -> None:
        """Raises RowsUnproven if the statement may not have seen every row as of the pods."""
        seen = found.column(_SEEN)[0].as_py()
        unsure = "so a row that is not found may still be there; no row was deleted or written downstream"
        if seen == _STANDBY:
            raise RowsUnproven(
                f"[enrich] database is a standby, which may lag behind the tube, {unsure}; give the URL of the primary"
            )
        if seen == _HIDES:
            raise RowsUnproven(
                f"row_security is not `off` in this session, {unsure}; does a pooler share connections between "
                "transactions? Give the URL of Postgres itself"
            )
        if seen != len(seqs):
            bounds = pc.min_max(seqs).as_py()
            raise RowsUnproven(
                f"[enrich] database sees {seen} of {len(seqs)} pods ({bounds['min']} to {bounds['max']}) in "
                f"{self.pods}, {unsure}; is it the database of the daemon's tube, and not a copy? Or has another query "
                "acked the pods?"
            )


def listed(values: pa.Array) -> str:
    """SQL of an array of integers or texts: one literal, which Postgres parses faster than ten thousand."""
    if not pa.types.is_string(values.type):
        return "'{" + ",".join(map(str, values.to_pylist())) + "}'::bigint[]"
    quoted = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values.to_pylist())
    return literal("{" + ",".join(f'"{one}"' for one in quoted) + "}") + "::text[]"


def _check_held(rows: pa.Table, id_: str, shard: int) -> None:
    if UNHELD not in rows.column_names:
        return
    bad = rows.filter(pc.is_valid(rows.column(UNHELD)))
    if bad.num_rows:
        reasons = dict(zip(bad.column(id_).to_pylist(), bad.column(UNHELD).to_pylist(), strict=True))
        first, reason = next(iter(reasons.items()))
        error = ValueUnheld(f"row {first} of shard {shard} cannot be carried: {reason} (docs/types.md)")
        error.reasons = reasons
        raise error


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Convert a table to exactly `schema`: missing columns are NULL, and types are cast if no value changes."""
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
