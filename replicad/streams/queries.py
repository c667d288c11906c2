"""The queries of this floor with the schema's name put in, and the one failure that all of them share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, Protocol

from replicad.errors import DatabaseError, SchemaMissing
from replicad.postgres.bridge import load_sql, quote_ident

SCHEMA: Final = "replicad"  # where the functions and tables of streams are installed unless told otherwise

# undefined table, schema, function, object: what Postgres says when our schema is not there
_MISSING = frozenset({"42P01", "3F000", "42883", "42704"})


class Queries(Protocol):
    """A `Database` or a `Connection`: whatever statements can be run on."""

    async def fetch(self, sql: str, *args: object) -> list[Any]: ...

    async def fetch_row(self, sql: str, *args: object) -> Any: ...

    async def fetch_value(self, sql: str, *args: object) -> Any: ...


@lru_cache(maxsize=256)  # queries times schemas
def statement(name: str, schema: str) -> str:
    """The query of that name, for an installation in that schema."""
    return load_sql(name).format(schema=quote_ident(schema))


@contextmanager
def installed(schema: str) -> Iterator[None]:
    """Say that the schema is missing where Postgres says that something of it is.

    Raises:
        SchemaMissing: the streams are not installed in that schema.
    """
    try:
        yield
    except DatabaseError as error:
        if error.sqlstate in _MISSING:
            raise SchemaMissing(
                f"streams are not installed in schema {schema} of this database: start `replicad serve` on it once, "
                "or run what `replicad sql up` prints."
            ) from error
        raise
