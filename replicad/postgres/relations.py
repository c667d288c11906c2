"""Finds a table or sequence by the name that a person gives, as SQL would."""

from __future__ import annotations

from replicad.errors import DatabaseError
from replicad.postgres.statements import Queries, call_value
from replicad.sqlstates import NOT_A_NAME, means

HOW = 'name it with its schema, as in public.events; capitals and blanks need double quotes, as in public."My Events"'


async def find_relation(db: Queries, name: str) -> int | None:
    """The oid of the relation; None if there is none, or the text is no name."""
    try:
        oid: int | None = await call_value(db, "pg_catalog", "to_regclass", name, result="oid::bigint")
    except DatabaseError as error:
        if not means(error.sqlstate, NOT_A_NAME):
            raise
        return None
    return oid
