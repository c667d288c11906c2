"""Windows of ids below a position: the ids that a table had at one moment, for `late_rows` to compare."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from replicad.errors import DatabaseError
from replicad.postgres.bridge import Connection, Database, load_sql, quote_ident
from replicad.postgres.owners import as_owner
from replicad.sqlstates import LOCKED, means
from replicad.streams.registry import Stream

MAX_COUNTED = 1_000_000  # rows of an attached table that are counted

_SESSION = "SET lock_timeout = '50ms'; SET statement_timeout = '5s'"


@dataclass(frozen=True, slots=True)
class Window:
    """The ids in (after, upto], ascending, and the number of rows of each (None: one)."""

    after: int
    upto: int
    ids: array[int]
    counts: array[int] | None

    def late(self, now: Window) -> dict[int, int]:
        """The ids that have more rows in `now` than in this window, and how many more."""
        after = max(self.after, now.after)
        before = dict(zip(self.ids, self.counts or (), strict=False)) if self.counts else dict.fromkeys(self.ids, 1)
        counts = now.counts or array("q", [1]) * len(now.ids)
        return {
            one: count - before.get(one, 0)
            for one, count in zip(now.ids, counts, strict=True)
            if after < one <= self.upto and count > before.get(one, 0)
        }


class Attached(NamedTuple):
    """Rows of an attached table at or below a position: how many (at most MAX_COUNTED), the first and the last id."""

    rows: int
    first: int
    last: int


class Look(Protocol):
    """One look at the table of a stream."""

    async def tree(self, stream: Stream) -> Mapping[int, str]:
        """The names of the stream's table, its partitions and its children, by oid."""

    async def window(self, stream: Stream, after: int, upto: int, apart: Collection[int] = ()) -> Window:
        """The ids in (after, upto] in all tables of the tree except those in `apart` (oids)."""

    async def attached(self, stream: Stream, table: str, before: int, position: int) -> Attached | None:
        """The rows of an attached table that were not sent to readers; None if there are none.

        `before`: the earlier position of readers, `position`: the present one.
        """


class Windows(Protocol):
    """Makes looks. A look that ends because a table is locked raises nothing: it has found nothing."""

    def looking(self) -> AbstractAsyncContextManager[Look]: ...


class PostgresWindows:
    """`Windows` in Postgres. `max_rows`: rows of a window that are read."""

    def __init__(self, db: Database, max_rows: int) -> None:
        self._db = db
        self._max_rows = max_rows

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[Look]:
        """`Windows.looking`."""
        try:
            async with self._db.connection() as connection:
                await connection.execute(_SESSION)
                yield _PostgresLook(connection, self._max_rows)
        except DatabaseError as error:
            if not means(error.sqlstate, LOCKED):  # another session alters the table; the earlier window stays valid
                raise


@dataclass(frozen=True, slots=True)
class _PostgresLook:
    connection: Connection
    max_rows: int

    async def tree(self, stream: Stream) -> Mapping[int, str]:
        rows = await self.connection.fetch(load_sql("late_tree"), stream.table_oid)
        return {row["oid"]: row["name"] for row in rows}

    async def window(self, stream: Stream, after: int, upto: int, apart: Collection[int] = ()) -> Window:
        some = ", ".join(str(int(one)) for one in sorted(apart))
        query = load_sql("late_ids").format(
            table=stream.table,
            id=quote_ident(stream.id_column),
            apart=f" AND t.tableoid NOT IN ({some})" if some else "",
        )
        reading = as_owner(self.connection, stream.reader, stream.table_oid)
        row = await reading.fetch_row(query, after, upto, self.max_rows)
        assert row is not None
        ids = array("q", row["ids"])
        counts = None if row["counts"] is None else array("q", row["counts"])
        if row["rows"] == self.max_rows:  # the lowest id may have been cut
            after = ids[0]
            ids, counts = ids[1:], None if counts is None else counts[1:]
        return Window(after, upto, ids, counts)

    async def attached(self, stream: Stream, table: str, before: int, position: int) -> Attached | None:
        query = load_sql("late_attached").format(table=table, id=quote_ident(stream.id_column))
        reading = as_owner(self.connection, stream.reader, stream.table_oid)
        row = await reading.fetch_row(query, before, position, MAX_COUNTED)
        return None if row is None or not row["rows"] else Attached(row["rows"], row["first"], row["last"])
