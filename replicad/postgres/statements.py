"""The SQL that the features send: queries from files, and calls of functions by name.

A query that is more than a call is in `sql/query/` of its feature: a file for each topic, in which a line
`-- name: <query>` opens each query. `statement` fills in the schema. A call of one SQL function needs no query in a
file: `call_rows`, `call_row` and `call_value` make its text from the function's name. The arguments go by position, and
Postgres takes their types from the function's signature. A call must therefore have a query in a file where an argument
is an expression, or where a cast does something (cut a long name, say).

All texts are kept, so that a repeated call has the same text and the driver finds its prepared statement.

`find_relation` finds a table or sequence by the name that a person gives, as SQL would. `write_in_pieces` writes many
items in one statement, but for those that Postgres cannot hold.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from replicad.errors import DatabaseError
from replicad.postgres.literals import quote_ident
from replicad.sqlstates import NEVER, NOT_A_NAME, means

if TYPE_CHECKING:
    from replicad.postgres.connection import Sink
    from replicad.postgres.failures import Target

MOST_BYTES = 256 * 1024
"""A larger file of queries is refused: it is another file by mistake. All queries together have 40 KiB."""

_NAMING = re.compile(r"^-- name:(.*)\n?", re.MULTILINE)
_NAME = re.compile(r" ([a-z][a-z0-9_]{0,62})")
_NOTE = re.compile(r"\s*(--.*)?")

HOW = 'name it with its schema, as in public.events; capitals and blanks need double quotes, as in public."My Events"'


class Queries(Protocol):
    """A `Database` or a `Connection`: whatever statements can be run on."""

    @property
    def target(self) -> Target: ...

    async def fetch(self, sql: str, *args: object) -> list[Any]: ...

    async def fetch_row(self, sql: str, *args: object) -> Any: ...

    async def fetch_value(self, sql: str, *args: object) -> Any: ...

    async def copy_out(
        self, query: str, *args: object, sink: Sink, timeout: float | None = None, lock: str | None = None
    ) -> int: ...

    async def copy_values(
        self, query: str, *, sink: Sink, timeout: float | None = None, lock: str | None = None
    ) -> None: ...


def read_queries(files: Iterable[Path]) -> dict[str, str]:
    """The queries of these files by name, each as its text stands between its line `-- name: <query>` and the next one,
    without the blank lines around it. Comments before the first query of a file speak of the file.

    Raises ValueError, with the file, for a file that is too large, for SQL before the first name, for a name that is
    not in lower case with digits and underscores, for a name that is there twice, and for a name without SQL.
    """
    found: dict[str, str] = {}
    places: dict[str, Path] = {}
    for path in files:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"{path} has {size} bytes; a file of queries has at most {MOST_BYTES}")
        head, *parts = _NAMING.split(path.read_text(encoding="utf-8"))
        if not _is_comment(head):
            raise ValueError(f"{path} has SQL before the first line `-- name: <query>`")
        for words, text in zip(parts[::2], parts[1::2], strict=True):
            name = _NAME.fullmatch(words)
            if name is None:
                raise ValueError(
                    f"{path} has the line `-- name:{words}`, which names no query; a name is like a_name_1"
                )
            if name[1] in found:
                raise ValueError(f"the query {name[1]} is in {places[name[1]]} and again in {path}; names are unique")
            if _is_comment(text):
                raise ValueError(f"the query {name[1]} in {path} has no SQL")
            found[name[1]], places[name[1]] = text.strip("\n") + "\n", path
    return found


def _is_comment(text: str) -> bool:
    return all(_NOTE.fullmatch(line) for line in text.splitlines())


# All files are read at import: a daemon that serves many clients may have no file descriptor left when it needs one.
_QUERIES: Mapping[str, str] = read_queries(sorted(Path(__file__).parents[1].glob("*/sql/query/*.sql")))


def load_sql(name: str) -> str:
    """The text of the query of that name, of whatever feature; names are unique. Opens no file.

    Raises LookupError where no file of queries has the name.
    """
    if name not in _QUERIES:
        raise LookupError(f"no file in sql/query of any feature has the line `-- name: {name}`")
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


async def find_relation(db: Queries, name: str) -> int | None:
    """The oid of the relation; None if there is none, or the text is no name."""
    try:
        oid: int | None = await call_value(db, "pg_catalog", "to_regclass", name, result="oid::bigint")
    except DatabaseError as error:
        if not means(error.sqlstate, NOT_A_NAME):
            raise
        return None
    return oid


# Writes many items in one statement. If Postgres refuses some of the items, the others are still written.

T = TypeVar("T")


def is_hopeless(error: DatabaseError) -> bool:
    """Whether the same statement would always fail with the same values.

    asyncpg raises a ValueError for values that cannot be sent.
    """
    return means(error.sqlstate, NEVER) or isinstance(error.__cause__, ValueError)


async def write_in_pieces(
    items: Sequence[T], write: Callable[[Sequence[T]], Awaitable[bool]], refused: Callable[[DatabaseError], None]
) -> bool:
    """Write all items in one statement; without the items that Postgres cannot hold (its encoding lacks a character).

    `refused` is called for each of these. Returns False as soon as `write` returns False; other errors are raised.
    """
    try:
        return await write(items)
    except DatabaseError as error:
        if not is_hopeless(error):
            raise
        if len(items) == 1:
            refused(error)
            return True
    middle = len(items) // 2
    first = await write_in_pieces(items[:middle], write, refused)
    return first and await write_in_pieces(items[middle:], write, refused)
