"""Enrichment: look up the current rows of touched ids. An id without a row becomes a delete.

Runs in a task, or on the driver for garbage collection. Every statement begins after the touch was committed, so the
row that it finds is never older than the touch. This needs the primary: a standby may lag behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from replicad.errors import (
    ColumnsChanged,
    DatabaseError,
    DatabaseRefused,
    DatabaseUnavailable,
    TableUnreadable,
    UsageError,
    ValueUnheld,
)
from replicad.spark.database import PATIENCE, patiently
from replicad.spark.tables import ADDED, UNHELD, Layout
from replicad.spark.touches import TOUCH_SCHEMA, chunks_by_shard
from replicad.sqlstates import NO_TABLE, WRONG_QUERY, means

CHUNK = 10_000  # ids in one query; larger queries are not faster and hold more rows in memory
_TRIED = 20  # tables that are tried to find out whether any can be read
KEYS = pa.schema([("_shard", pa.int32()), ("_seq", pa.int64())])


@dataclass(frozen=True, slots=True)
class EnrichedRows:
    """The changes for one chunk of touches. `writes`: the current rows, then _shard and _seq; `deletes`: _shard, id,
    _seq.
    """

    writes: pa.Table
    deletes: pa.Table


@dataclass(frozen=True, slots=True)
class Enricher:
    """Loads the rows of touched ids. `url` is the Postgres of the rules without a `database`; `layout` is from
    `tables.find_layout`. The rows of a shard in `purged` are deleted if there is no table for it.
    """

    url: str
    layout: Layout
    chunk: int = CHUNK
    patience: float = PATIENCE
    purged: frozenset[int] = frozenset()

    def __repr__(self) -> str:  # the url may hold a password
        return f"Enricher(layout={self.layout!r})"

    @property
    def schema(self) -> pa.Schema:
        """The schema of `EnrichedRows.writes`."""
        return pa.schema([*self.layout.schema, *KEYS])

    def changes(self, touches: pa.Table) -> Iterator[EnrichedRows]:
        """Look up touches (deduplicated and sorted, see `touches`), chunk by chunk.

        Raises:
            DatabaseError: the rows cannot be read, e.g. because a column was dropped.
            TableUnreadable: the table of a shard was dropped, lost a column or its rights.
            ColumnsChanged: a table has columns that the layout does not have, or values that its types do not hold.
            ValueUnheld: some rows hold what Arrow cannot hold.
            UsageError: no rule has a table for the shard of a touch.
        """
        for shard, chunk in chunks_by_shard(touches, self.chunk):
            yield self._look_up(shard, chunk)

    def unreadable(self, shards: Iterable[int]) -> dict[int, str]:
        """Why the tables of some of these shards cannot be read now, by shard.

        Raises:
            DatabaseError: for another reason.
        """
        found = {}
        for shard in shards:
            try:
                self._look_up(shard, TOUCH_SCHEMA.empty_table())
            except TableUnreadable as error:
                found[shard] = str(error)
        return found

    def reads_any(self, *, except_for: Collection[int]) -> bool:
        """Whether the table of any other shard can be read."""
        others = [shard for source in self.layout.sources for shard in source.examples if shard not in except_for]
        return any(not self.unreadable([shard]) for shard in others[:_TRIED])

    def _look_up(self, shard: int, touched: pa.Table) -> EnrichedRows:
        located = self.layout.query(shard)
        if located is None:
            covered = "; ".join(f"{source.rule.shards.text}: {source.rule.table}" for source in self.layout.sources)
            raise UsageError(f"shard {shard} was touched, but no table was named for it (there are {covered})")
        ids = touched.column("id").combine_chunks()
        database, query = located
        try:
            found = patiently(database or self.url, lambda driver: _fetch(driver, query, ids), patience=self.patience)
        except DatabaseError as error:
            if not means(error.sqlstate, WRONG_QUERY) or isinstance(error, (DatabaseUnavailable, DatabaseRefused)):
                raise
            if shard not in self.purged or not means(error.sqlstate, NO_TABLE):
                text = f"the table of shard {shard} cannot be read: {error}"
                raise TableUnreadable(text, sqlstate=error.sqlstate) from error
            found = self.layout.schema.empty_table()
        if ADDED in found.column_names and found.num_rows and (names := found.column(ADDED)[0].as_py()):
            raise ColumnsChanged(f"the table of shard {shard} has new columns: {names}")
        _check_held(found, self.layout.id, shard)
        try:
            rows = conform(found, self.layout.schema)
        except pa.ArrowInvalid as error:  # a wider type since the pipeline looked
            raise ColumnsChanged(f"the table of shard {shard} has another type: {str(error)[:200]}") from error
        known = rows.column(self.layout.id)
        absent = touched.filter(pc.invert(pc.is_in(ids, value_set=known.combine_chunks())))
        seqs = touched.column("seq").take(pc.index_in(known, value_set=ids))
        shards = pa.repeat(pa.scalar(shard, pa.int32()), len(rows))
        writes = rows.append_column(KEYS.field("_shard"), shards).append_column(KEYS.field("_seq"), seqs)
        return EnrichedRows(writes, absent.rename_columns(["_shard", self.layout.id, "_seq"]))


def _fetch(driver: Any, query: str, ids: pa.Array) -> pa.Table:
    with driver.cursor() as cursor:
        cursor.execute(query, parameters=pa.record_batch([pa.array([ids], pa.list_(pa.int64()))], names=["ids"]))
        return cursor.fetch_arrow_table()


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
