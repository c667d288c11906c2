"""The stream of cache invalidations in a file for `replicad apply`: enabled, its writers, and who may invalidate."""

from __future__ import annotations

from replicad.caches.rights import PUBLIC, set_right
from replicad.postgres import schema as schemas
from replicad.postgres.statements import call_value, statement
from replicad.terminal.desired.section import Key, Place, Section, Values, as_it_stands, texts


async def present(place: Place) -> dict[str, Values]:
    """The writers and roles, if the stream is there."""
    schema = place.settings.stream_schema
    if await schemas.read_installed(place.db, "cache", schema) is None:
        return {}
    await schemas.require(place.db, "cache", schema)
    (row,) = await place.db.fetch(statement("cache_desired", schema), PUBLIC)
    if not row["enabled"]:
        return {}
    return {"": {"writers": tuple(sorted(row["writers"])), "roles": tuple(sorted(row["roles"]))}}


async def change(place: Place, name: str, before: Values | None, wanted: Values) -> None:  # noqa: ARG001
    """Install what it needs, make the stream, add writers, grant the right."""
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
    keys=(Key("writers", texts, ()), Key("roles", texts, ())),
    present=present,
    normal=as_it_stands,
    change=change,
    removal=lambda _: "to disable it: replicad caches disable",
    named=False,
    lists="a role loses the right by: replicad caches revoke {one}; a writer stays until caches are disabled",
)
