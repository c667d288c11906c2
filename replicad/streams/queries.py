"""Shared by all queries of streams: the schema, a short lock time-out, the error for a missing installation, and
queries on many tables in one statement.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final

from replicad import sqlstates
from replicad.errors import DatabaseError, DatabaseUnavailable, ReplicadError, SchemaMissing
from replicad.postgres.failures import Target
from replicad.postgres.literals import quote_literal
from replicad.streams.rows import RowSource

if TYPE_CHECKING:
    from replicad.postgres.bridge import Connection, Database, Sink

SCHEMA: Final = "replicad"  # default schema of the functions and tables of streams

LOOK_LOCK_TIMEOUT: Final = "250ms"  # for queries of Impatient; ordinary locks are held for milliseconds


class Impatient:
    """Queries on a pool with a short lock time-out, so that one locked table does not delay queries for many streams.

    A query that gives up raises a DatabaseError for which `is_locked` is true.
    """

    def __init__(self, db: Database) -> None:
        self._db = db

    @property
    def target(self) -> Target:
        """`Database.target`."""
        return self._db.target

    async def fetch(self, sql: str, *args: object) -> list[Any]:
        """`Database.fetch`."""
        async with self._looking() as connection:
            return await connection.fetch(sql, *args)

    async def fetch_row(self, sql: str, *args: object) -> Any:
        """`Database.fetch_row`."""
        async with self._looking() as connection:
            return await connection.fetch_row(sql, *args)

    async def fetch_value(self, sql: str, *args: object) -> Any:
        """`Database.fetch_value`."""
        async with self._looking() as connection:
            return await connection.fetch_value(sql, *args)

    async def copy_out(
        self, query: str, *args: object, sink: Sink, timeout: float | None = None, lock: str | None = None
    ) -> int:
        """`Database.copy_out`."""
        async with self._looking() as connection:
            return await connection.copy_out(query, *args, sink=sink, timeout=timeout, lock=lock)

    async def copy_values(
        self, query: str, *, sink: Sink, timeout: float | None = None, lock: str | None = None
    ) -> None:
        """`Database.copy_values`."""
        async with self._looking() as connection:
            await connection.copy_values(query, sink=sink, timeout=timeout, lock=lock)

    @asynccontextmanager
    async def _looking(self) -> AsyncIterator[Connection]:
        async with (
            self._db.connection() as connection,
            connection.transaction(readonly=True, opening=f"SET LOCAL lock_timeout = '{LOOK_LOCK_TIMEOUT}'"),
        ):
            yield connection


def is_locked(error: DatabaseError) -> bool:
    """Whether a statement gave up because of another session's lock."""
    return sqlstates.means(error.sqlstate, sqlstates.LOCKED)


@contextmanager
def installed(schema: str) -> Iterator[None]:
    """Raise SchemaMissing where Postgres reports a missing function, table or schema.

    Raises:
        SchemaMissing: the streams are not installed in that schema.
    """
    try:
        yield
    except DatabaseError as error:
        if sqlstates.means(error.sqlstate, sqlstates.MISSING):
            raise SchemaMissing(
                f"streams are not installed in schema {schema} of this database: start `replicad serve` on it once, "
                "or run the SQL that `replicad sql up` prints."
            ) from error
        raise


# Asks about many tables in one statement, where one table that cannot be read must not hide the others.

TOGETHER = 100  # tables in one statement

Take = Callable[[Sequence[str], Sequence[Any] | None], None]


async def fetch_together(db: Impatient, branches: Mapping[str, str], take: Take) -> None:
    """Run queries with the same columns, joined by UNION ALL. `take(names, rows)` gets the rows of some of them.

    A query that fails (its table is locked, replaced, denied) costs the others a few statements more, because the list
    is then divided until it stands alone: `take([name], None)`.

    Raises:
        DatabaseUnavailable: Postgres cannot be reached.
    """
    names = list(branches)
    for at in range(0, len(names), TOGETHER):
        await _fetch(db, branches, names[at : at + TOGETHER], take)


async def _fetch(db: Impatient, branches: Mapping[str, str], names: Sequence[str], take: Take) -> None:
    try:
        rows = await db.fetch(union_all(branches[name] for name in names))
    except DatabaseUnavailable:
        raise
    except ReplicadError:
        if len(names) == 1:
            take(names, None)
            return
        middle = len(names) // 2
        await _fetch(db, branches, names[:middle], take)
        await _fetch(db, branches, names[middle:], take)
    else:
        take(names, rows)


def union_all(queries: Iterable[str]) -> str:
    """One query of several."""
    return " UNION ALL ".join(f"({query})" for query in queries)


# Counts the rows that wait in many streams, in one statement: for figures, where a bounded number is enough.

MOST = 10_000  # rows of a stream that are counted; more cost time and tell an operator nothing new


async def count_waiting(
    db: Impatient, sources: Mapping[str, tuple[RowSource, int]], found: MutableMapping[str, int | None]
) -> None:
    """Put into `found` how many rows each stream has above its position: (source, position) by name, at most MOST.

    A stream that cannot be counted gets None. Results are in `found` also if the caller's time is over meanwhile.
    Raises what `fetch_together` raises.
    """
    branches = {
        name: f"SELECT {quote_literal(name)} AS name, ({source.count_above(position, MOST)}) AS rows"
        for name, (source, position) in sources.items()
    }

    def take(names: Sequence[str], rows: Sequence[Any] | None) -> None:
        found.update(dict.fromkeys(names) if rows is None else ((row["name"], row["rows"]) for row in rows))

    await fetch_together(db, branches, take)
