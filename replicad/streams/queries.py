"""Shared by all queries of streams: the schema, a short lock time-out, and the error for a missing installation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from replicad import sqlstates
from replicad.errors import DatabaseError, SchemaMissing
from replicad.postgres.bridge import Connection, Database, Sink
from replicad.postgres.failures import Target

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
