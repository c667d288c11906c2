"""The writer's side: invalidate cache entries in the transaction that changes the data.

These functions call the SQL functions `invalidate_cache` and `invalidate_cache_many`. `invalidate` and
`invalidate_many` take async connections (asyncpg's or replicad's own), `blocking_invalidate` and
`blocking_invalidate_many` connections of DB-API. Errors of the driver are raised unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from replicad.caches.keys import Entry, listed
from replicad.errors import UsageError
from replicad.postgres.literals import DbApi, commits_by_itself, fetch_in_transaction, quote_ident, run

SCHEMA: Final = "replicad"


async def invalidate(connection: Any, func: str, keys: Entry | None, *, schema: str = SCHEMA) -> None:
    """Invalidate the entry `keys` of cache `func` at all workers, when the caller's transaction commits.

    `keys`: the JSON values of the entry's key; None: the whole cache. `connection`: of asyncpg, or replicad's own.

    Raises:
        UsageError: the connection is not in a transaction, so the change or the invalidation could be lost.
        TypeError: the keys are not JSON values, or no list.
    """
    await _ask(connection, _statement("invalidate_cache", schema), func, None if keys is None else _json(listed(keys)))


async def invalidate_many(connection: Any, func: str, entries: Iterable[Entry], *, schema: str = SCHEMA) -> None:
    """As `invalidate`, for many entries in one statement; more than 10,000 of them empty the whole cache."""
    await _ask(connection, _statement("invalidate_cache_many", schema), func, _json([listed(keys) for keys in entries]))


def blocking_invalidate(connection: DbApi, func: str, keys: Entry | None, *, schema: str = SCHEMA) -> None:
    """As `invalidate`, on a DB-API connection (psycopg, pg8000, ADBC, ...)."""
    _run(connection, _statement("invalidate_cache", schema), func, None if keys is None else _json(listed(keys)))


def blocking_invalidate_many(connection: DbApi, func: str, entries: Iterable[Entry], *, schema: str = SCHEMA) -> None:
    """As `invalidate_many`, on a DB-API connection."""
    _run(connection, _statement("invalidate_cache_many", schema), func, _json([listed(keys) for keys in entries]))


def _statement(function: str, schema: str) -> str:
    return f"SELECT {quote_ident(schema)}.{function}($1, $2::text::jsonb)"


def _json(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise TypeError(f"keys of a cache are JSON values: {error}") from None


async def _ask(connection: Any, sql: str, *args: object) -> None:
    await fetch_in_transaction(connection, sql, args, UsageError(_APART))


def _run(connection: DbApi, sql: str, *args: object) -> None:
    if commits_by_itself(connection):
        raise UsageError(_APART)
    run(connection, sql, args)


_APART = "a change and its invalidation belong together: begin a transaction, change, invalidate, commit."
