"""The stream of cache invalidations in a file for `replicad apply`: enabled or not, its writers, the roles with rights.

A role may invalidate caches if it has EXECUTE on `cache_write`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from replicad.config.declaring import TEXTS
from replicad.errors import UsageError
from replicad.postgres import schema as schemas
from replicad.postgres.literals import quote_ident
from replicad.postgres.statements import Queries, call_value, statement
from replicad.terminal.desired import Section, SectionKey, TargetDatabase, Values, as_it_stands

PUBLIC: Final = "PUBLIC"  # every role


async def set_right(db: Queries, schema: str, roles: Sequence[str], *, may: bool) -> None:
    """Grant these roles the right to invalidate caches, or revoke it. Raises UsageError: a role has no name."""
    if not all(roles):
        raise UsageError("'' is no role; give the name of one, or PUBLIC")
    named = ", ".join(PUBLIC if role == PUBLIC else quote_ident(role) for role in roles)
    function = f"{quote_ident(schema)}.cache_write(text, jsonb)"
    if may:
        await db.fetch(f"GRANT EXECUTE ON FUNCTION {function} TO {named}")
    else:
        await db.fetch(f"REVOKE EXECUTE ON FUNCTION {function} FROM {named}")


async def present(place: TargetDatabase) -> dict[str, Values]:
    """The writers and roles, if the stream exists."""
    schema = place.settings.stream_schema
    if await schemas.read_installed(place.db, "cache", schema) is None:
        return {}
    await schemas.require(place.db, "cache", schema)
    (row,) = await place.db.fetch(statement("cache_desired", schema), PUBLIC)
    if not row["enabled"]:
        return {}
    return {"": {"writers": tuple(sorted(row["writers"])), "roles": tuple(sorted(row["roles"]))}}


async def change(place: TargetDatabase, name: str, before: Values | None, wanted: Values) -> None:  # noqa: ARG001
    """Install the SQL, make the stream, add writers, grant the right."""
    schema = place.settings.stream_schema
    await schemas.install(place.db, "stream", schema)
    await schemas.install(place.db, "cache", schema)
    await call_value(place.db, schema, "cache_enable", list(wanted["writers"]))
    known = () if before is None else before["roles"]
    new = [role for role in wanted["roles"] if role not in known]
    if new:
        await set_right(place.db, schema, new, may=True)


SECTION = Section(
    name="caches",
    one="caches",
    keys=(SectionKey("writers", TEXTS, ()), SectionKey("roles", TEXTS, ())),
    present=present,
    normal=as_it_stands,
    change=change,
    removal=lambda _: "to disable it: replicad caches disable",
    named=False,
    lists="a role loses the right by: replicad caches revoke {one}; a writer stays until caches are disabled",
)
