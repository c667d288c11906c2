"""The SQL that the features send: queries from files, and calls of functions by name.

A query that is more than a call is in `sql/query/` of its feature, and `statement` fills in the schema. A call of
one SQL function needs no file: `call_rows`, `call_row` and `call_value` make its text from the function's name. The
arguments go by position, and Postgres takes their types from the function's signature. A call must therefore have a
query file of its own where an argument is an expression, or where a cast does something (cut a long name, say).

All texts are kept, so that a repeated call has the same text and the driver finds its prepared statement.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from replicad.postgres.literals import quote_ident

# All files are read at import: a daemon that serves many clients may have no file descriptor left when it needs one.
_QUERIES = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].glob("*/sql/query/*.sql")}


class Queries(Protocol):
    """A `Database` or a `Connection`: whatever statements can be run on."""

    async def fetch(self, sql: str, *args: object) -> list[Any]: ...

    async def fetch_row(self, sql: str, *args: object) -> Any: ...

    async def fetch_value(self, sql: str, *args: object) -> Any: ...


def load_sql(name: str) -> str:
    """The text of `sql/query/<name>.sql` in any folder of the package; names are unique. Opens no file."""
    return _QUERIES[name]


@lru_cache(maxsize=256)  # queries times schemas
def statement(name: str, schema: str) -> str:
    """The query of that name, for an installation in that schema."""
    return load_sql(name).format(schema=quote_ident(schema))


@lru_cache(maxsize=512)  # functions times schemas
def rows_call(schema: str, function: str, count: int, columns: str = "*") -> str:
    """The query for the rows of a function that is called with `count` arguments.

    `columns` is the select list. The name of the function stands for a row, or for the value where there is only one.
    """
    return f"SELECT {columns} FROM {_call(schema, function, count)}"


@lru_cache(maxsize=512)
def value_call(schema: str, function: str, count: int, result: str | None = None) -> str:
    """The query for the value of a function that is called with `count` arguments, cast to the type `result`."""
    return f"SELECT {_call(schema, function, count)}{'' if result is None else f'::{result}'}"


async def call_rows(db: Queries, schema: str, function: str, *args: object, columns: str = "*") -> list[Any]:
    """The rows that an SQL function returns. `columns`: as for `rows_call`."""
    return await db.fetch(rows_call(schema, function, len(args), columns), *args)


async def call_row(db: Queries, schema: str, function: str, *args: object) -> Any:
    """The first row that an SQL function returns, or None."""
    return await db.fetch_row(rows_call(schema, function, len(args)), *args)


async def call_value(db: Queries, schema: str, function: str, *args: object, result: str | None = None) -> Any:
    """The one value that an SQL function returns. `result`: as for `value_call`."""
    return await db.fetch_value(value_call(schema, function, len(args), result), *args)


def _call(schema: str, function: str, count: int) -> str:
    arguments = ", ".join(f"${number}" for number in range(1, count + 1))
    return f"{quote_ident(schema)}.{quote_ident(function)}({arguments})"
