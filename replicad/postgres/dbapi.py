"""Statements on connections of the user's own driver: DB-API (psycopg, pg8000, ADBC, ...), or asyncpg.

Errors of the driver are raised unchanged. Differences between drivers beyond the standard are handled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from replicad.postgres.literals import fill, quote_argument


class DbApi(Protocol):
    """The methods of a DB-API connection that are used here."""

    def cursor(self) -> Any: ...

    def commit(self) -> None: ...

    def close(self) -> None: ...


def run(connection: DbApi, sql: str, args: Sequence[object]) -> Sequence[Any]:
    """The rows of a statement. It gets constants instead of parameters: drivers write parameters differently."""
    cursor = connection.cursor()
    try:
        cursor.execute(fill(sql, args, quote_argument))
        rows: Sequence[Any] = cursor.fetchall()
        return rows
    finally:
        cursor.close()


async def fetch_in_transaction(connection: Any, sql: str, args: Sequence[object], refusal: Exception) -> Any:
    """The value of a query on a connection of asyncpg, or replicad's own. Raises `refusal` outside of a transaction."""
    in_transaction = getattr(connection, "is_in_transaction", None)
    if in_transaction is not None and not in_transaction():
        raise refusal
    fetch = getattr(connection, "fetch_value", None) or connection.fetchval
    return await fetch(sql, *args)


def commits_by_itself(connection: object) -> bool:
    """Whether the connection is in autocommit mode. DB-API does not define it; psycopg and others have `autocommit`."""
    return getattr(connection, "autocommit", False) is True


def told_pid(connection: object) -> int | None:
    """The process that the server named as this connection's when it was made; None if the driver does not show it."""
    pid = getattr(getattr(connection, "info", None), "backend_pid", None)  # of psycopg, 2 and 3
    return pid if isinstance(pid, int) and pid > 0 else None


def close_quietly(connection: DbApi) -> None:
    """Close a connection that may be broken: drivers raise different errors for that."""
    with suppress(Exception):
        connection.close()


def roll_back_quietly(connection: Any) -> None:
    """Roll back on a connection that may be broken."""
    with suppress(Exception):
        connection.rollback()


def sqlstate_of(error: BaseException) -> str | None:
    """The SQLSTATE: an attribute of the exception or, in some drivers, `C` in a dict."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    fields = error.args[0] if error.args and isinstance(error.args[0], dict) else {}
    return state or fields.get("C")
