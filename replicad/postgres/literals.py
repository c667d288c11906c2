"""SQL text from values, and statements on connections of the user's own driver. Needs no driver of ours.

Text is made for statements that take no parameters (COPY, identifiers in DDL).

Everything else uses real parameters. Only the types that our own queries need are rendered; anything else is
refused rather than guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

_PLACEHOLDER = re.compile(r"\$([1-9][0-9]?)(?![0-9])")


def quote_ident(name: str) -> str:
    """The identifier in double quotes, safe in any statement. Raises ValueError for an empty name or a NUL."""
    if not name or "\x00" in name:
        raise ValueError("an identifier is empty or contains a NUL character")
    return '"' + name.replace('"', '""') + '"'


def quote_literal(value: object) -> str:  # noqa: PLR0911 - one return per type
    """A constant of type bool, int, float, str, None, or a list of int or of str, as SQL text in parentheses or quotes.

    Integers have the type bigint, lists bigint[] or text[]. Raises ValueError for text with a NUL and TypeError for
    any other type.
    """
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return f"('{value}'::bigint)"
    if isinstance(value, float):
        return f"('{value!r}'::float8)"
    if isinstance(value, str):
        return _quote_text(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return "('{" + ",".join(map(str, value)) + "}'::bigint[])"
        if all(isinstance(item, str) for item in value):
            return "(ARRAY[" + ",".join(_quote_text(item) for item in value) + "]::text[])"
    raise TypeError(f"cannot write a {type(value).__name__} as an SQL constant")


def quote_argument(value: object) -> str:
    """A constant without a type, as an argument of a function whose signature says the type.

    Takes bool, int, float, str, timedelta, None, or a list of int or of str. Raises as `quote_literal`.
    """
    if value is None:
        return "NULL"
    if isinstance(value, timedelta):
        return f"'{value.total_seconds():.6f} seconds'"
    if isinstance(value, bool | int | float | str):
        return _quote_text(str(value))
    if isinstance(value, list | tuple) and all(type(item) in {int, str} for item in value):
        return _quote_text("{" + ",".join(map(_element, value)) + "}")
    raise TypeError(f"cannot write a {type(value).__name__} as an SQL constant")


def _element(value: int | str) -> str:
    """As an array's text has it."""
    return str(value) if isinstance(value, int) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _quote_text(value: str) -> str:
    if "\x00" in value:
        raise ValueError("Postgres text cannot contain a NUL character")
    escaped = value.replace("'", "''")
    if "\\" in escaped:  # E'' means the same whatever standard_conforming_strings says
        return "E'" + escaped.replace("\\", "\\\\") + "'"
    return "'" + escaped + "'"


def fill(query: str, args: Sequence[object], quote: Callable[[object], str] = quote_literal) -> str:
    """The query with `$1`, `$2`, ... replaced by constants. The query must not contain `$n` inside its own strings.

    Without arguments the query stays as it is. Raises IndexError for a placeholder without an argument and ValueError
    for an argument without a placeholder.
    """
    if not args:
        return query
    used: set[int] = set()

    def constant(match: re.Match[str]) -> str:
        number = int(match.group(1))
        used.add(number)
        return quote(args[number - 1])

    filled = _PLACEHOLDER.sub(constant, query)
    if len(used) != len(args):
        raise ValueError(f"{len(args)} arguments for {len(used)} placeholders")
    return filled


# Statements on connections of the user's own driver: DB-API (psycopg, pg8000, ADBC, ...), or asyncpg.
#
# Errors of the driver are raised unchanged. Differences between drivers beyond the standard are handled here.


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
