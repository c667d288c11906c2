"""Letting the writers of a stream share its keys, and what an operator sees of it."""

from __future__ import annotations

from dataclasses import dataclass

from replicad.errors import SchemaMissing
from replicad.postgres import schema as schemas
from replicad.postgres.bridge import Database
from replicad.postgres.statements import call_value, statement
from replicad.streams.queries import SCHEMA
from replicad.streams.registry import load_stream

SLOTS = 256  # enough for dozens of writers to get even shares, and few enough to look at in one go


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One writer: what it has, and for how long (seconds, by Postgres' clock) it has given no sign of life."""

    instance: str
    address: str | None
    slots: int
    ttl: float
    silent: float
    leaving: bool


@dataclass(frozen=True, slots=True)
class Stuck:
    """Slots that are nobody's or more than their owner's share, and the transaction that keeps them from moving.

    Without `held` nothing is in flight: nobody has taken them yet. `pid` is None for a prepared transaction too.
    `age` is the transaction's, in seconds.
    """

    slots: tuple[int, ...]
    owner: str | None
    held: bool
    pid: int | None
    application_name: str | None
    age: float | None


@dataclass(frozen=True, slots=True)
class SharingStatus:
    """How the keys of one stream are shared at one moment. `unowned` counts slots that are nobody's."""

    stream: str
    slots: int
    unowned: int
    members: tuple[MemberStatus, ...]
    stuck: tuple[Stuck, ...]


async def enable(db: Database, stream: str, slots: int = SLOTS, *, schema: str = SCHEMA) -> bool:
    """Let the writers of the stream share its keys, in so many slots (1 to 4096); installs what that needs.

    False where they do already. Raises UnknownStream, and StreamRefused where the number is another one.
    """
    await load_stream(db, stream, schema=schema)
    await schemas.install(db, "ownership", schema)
    made: bool = await call_value(db, schema, "writer_enable", stream, slots)
    return made


async def disable(db: Database, stream: str, *, schema: str = SCHEMA) -> None:
    """End it: writers that still share the keys are refused from now on. Raises UnknownStream, StreamRefused."""
    await require_installed(db, stream, schema)
    await call_value(db, schema, "writer_disable", stream)


async def list_shared(db: Database, *, schema: str = SCHEMA) -> list[SharingStatus]:
    """All streams whose writers share the keys, by name; none where that was never installed."""
    if await schemas.read_installed(db, "ownership", schema) is None:
        return []
    await schemas.require(db, "ownership", schema)
    names = await db.fetch(statement("ownership_streams", schema))
    return [await _status(db, row["name"], schema) for row in names]


async def show(db: Database, stream: str, *, schema: str = SCHEMA) -> SharingStatus:
    """One of them. Raises UnknownStream, StreamRefused."""
    await require_installed(db, stream, schema)
    return await _status(db, stream, schema)


async def require_installed(db: Database, stream: str, schema: str) -> None:
    """See that the SQL of this is there. Raises SchemaMissing with what to do, and SchemaTooNew."""
    try:
        await schemas.require(db, "ownership", schema)
    except SchemaMissing as error:
        raise SchemaMissing(str(error).replace("writers enable STREAM", f"writers enable {stream}")) from error


async def _status(db: Database, stream: str, schema: str) -> SharingStatus:
    found = await db.fetch_row(statement("ownership_sharing", schema), stream)
    assert found is not None  # else the statement has just raised
    members = await db.fetch(statement("ownership_members", schema), stream)
    stuck = await db.fetch(statement("ownership_stuck", schema), stream)
    return SharingStatus(
        stream,
        found["slots"],
        found["unowned"],
        tuple(MemberStatus(**dict(row)) for row in members),
        tuple(Stuck(**(dict(row) | {"slots": tuple(row["slots"])})) for row in stuck),
    )
