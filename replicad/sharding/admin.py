"""Enables and disables the sharing of a stream's keys, and shows its state to an operator.

SECTION is its part of a file for `replicad apply`.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicad.config.declaring import WHOLE
from replicad.postgres import schema as schemas
from replicad.postgres.bridge import Database
from replicad.postgres.statements import call_value, statement
from replicad.sharding.writer import require_installed
from replicad.streams.queries import SCHEMA
from replicad.streams.registry import Registry
from replicad.terminal.desired import Section, SectionKey, TargetDatabase, Values, as_it_stands

SLOTS = 256  # enough for even shares among dozens of writers; few enough to read all of them in one query


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One writer: its slots, and how long ago (seconds, by Postgres' clock) it sent its last beat."""

    instance: str
    address: str | None
    slots: int
    ttl: float
    silent: float
    leaving: bool


@dataclass(frozen=True, slots=True)
class Stuck:
    """Slots that should move and do not: free ones, or ones above their owner's share; and the transaction in the way.

    Without `held` no transaction is in the way: no writer has taken them yet. `pid` is None for a prepared transaction.
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
    """How the keys of one stream are shared at one moment. `unowned` counts free slots."""

    stream: str
    slots: int
    unowned: int
    members: tuple[MemberStatus, ...]
    stuck: tuple[Stuck, ...]


async def enable(db: Database, stream: str, slots: int = SLOTS, *, schema: str = SCHEMA) -> bool:
    """Let the writers of the stream share its keys, in `slots` slots (1 to 4096); install the SQL that this needs.

    False if they share them already. Raises UnknownStream; StreamRefused if the number of slots is another one.
    """
    await Registry(db, schema).load_stream(stream)
    await schemas.install(db, "sharding", schema)
    made: bool = await call_value(db, schema, "writer_enable", stream, slots)
    return made


async def disable(db: Database, stream: str, *, schema: str = SCHEMA) -> bool:
    """End the sharing. Writers that still take part are refused from now on. False if they share nothing.

    Raises UnknownStream.
    """
    await Registry(db, schema).load_stream(stream)
    if stream not in await _shared(db, schema):
        return False
    await call_value(db, schema, "writer_disable", stream)
    return True


async def list_shared(db: Database, *, schema: str = SCHEMA) -> list[SharingStatus]:
    """All streams whose writers share the keys, by name; empty if sharing was never installed."""
    return [await _status(db, name, schema) for name in await _shared(db, schema)]


async def _shared(db: Database, schema: str) -> list[str]:
    """The names of the streams whose writers share the keys."""
    if await schemas.read_installed(db, "sharding", schema) is None:
        return []
    await schemas.require(db, "sharding", schema)
    return [row["name"] for row in await db.fetch(statement("sharding_streams", schema))]


async def show(db: Database, stream: str, *, schema: str = SCHEMA) -> SharingStatus:
    """The state of one stream. Raises UnknownStream, StreamRefused."""
    await require_installed(db, stream, schema)
    return await _status(db, stream, schema)


async def _status(db: Database, stream: str, schema: str) -> SharingStatus:
    found = await db.fetch_row(statement("sharding_sharing", schema), stream)
    assert found is not None  # else the statement has just raised
    members = await db.fetch(statement("sharding_members", schema), stream)
    stuck = await db.fetch(statement("sharding_stuck", schema), stream)
    return SharingStatus(
        stream,
        found["slots"],
        found["unowned"],
        tuple(MemberStatus(**dict(row)) for row in members),
        tuple(Stuck(**(dict(row) | {"slots": tuple(row["slots"])})) for row in stuck),
    )


# The streams whose writers share the keys, in a file for `replicad apply`.

_MOST_SLOTS = 4096


async def present(place: TargetDatabase) -> dict[str, Values]:
    """The streams whose keys are shared."""
    found = await list_shared(place.db, schema=place.settings.stream_schema)
    return {one.stream: {"slots": one.slots} for one in found}


async def change(place: TargetDatabase, name: str, before: Values | None, wanted: Values) -> None:  # noqa: ARG001
    """Let the writers share the keys; install the SQL that this needs."""
    await enable(place.db, name, wanted["slots"], schema=place.settings.stream_schema)


SECTION = Section(
    name="sharding",
    one="sharding of stream",
    keys=(
        SectionKey(
            "slots",
            WHOLE,
            SLOTS,
            minimum=1,
            maximum=_MOST_SLOTS,
            fixed="a key's slot depends on the number: stop the writers, replicad sharding disable NAME, then apply",
        ),
    ),
    present=present,
    normal=as_it_stands,
    change=change,
    needs="streams",
    removal=lambda name: f"to end it: replicad sharding disable {name}",
)
