"""Which roles may invalidate caches: those with EXECUTE on cache_write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from replicad.errors import UsageError
from replicad.postgres.literals import quote_ident
from replicad.postgres.statements import Queries

PUBLIC: Final = "PUBLIC"  # every role


async def set_right(db: Queries, schema: str, roles: Sequence[str], *, may: bool) -> None:
    """Give these roles the right to invalidate caches, or take it from them. Raises UsageError: one has no name."""
    if not all(roles):
        raise UsageError("'' is no role; give the name of one, or PUBLIC")
    named = ", ".join(PUBLIC if role == PUBLIC else quote_ident(role) for role in roles)
    function = f"{quote_ident(schema)}.cache_write(text, jsonb)"
    if may:
        await db.fetch(f"GRANT EXECUTE ON FUNCTION {function} TO {named}")
    else:
        await db.fetch(f"REVOKE EXECUTE ON FUNCTION {function} FROM {named}")
