"""The writers of a stream as an operator sees them: which there are, how far each is, and retiring those that are gone.

A retired writer is no longer listed to readers; its number stays taken, and it is listed again when it writes again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from replicad.postgres.statements import Queries, call_rows, call_value, statement
from replicad.streams.queries import SCHEMA, installed
from replicad.streams.registry import Stream

QUIET = 60.0  # seconds that a writer must have written nothing for to be retired


@dataclass(frozen=True, slots=True)
class StreamWriter:
    """One writer. `position` is what was published of it, None before the first time. One that is retired is not
    listed.
    """

    number: int
    name: str
    position: int | None
    created_at: datetime
    retired_at: datetime | None

    @property
    def retired(self) -> bool:
        """Whether it is listed to readers no more."""
        return self.retired_at is not None


async def load(db: Queries, stream: str, *, schema: str = SCHEMA) -> list[StreamWriter]:
    """All writers of a stream by number, those that are retired too. Raises UnknownStream."""
    with installed(schema):
        rows = await call_rows(
            db, schema, "stream_writers", stream, columns="number, writer AS name, position, created_at, retired_at"
        )
    return [StreamWriter(**dict(row)) for row in rows]


async def named(db: Queries, stream: Stream, numbers: Collection[int], *, schema: str = SCHEMA) -> list[StreamWriter]:
    """The writers that have these numbers."""
    with installed(schema):
        rows = await db.fetch(statement("stream_writers_numbered", schema), stream.number, list(numbers))
    return [StreamWriter(**dict(row)) for row in rows]


async def retire(
    db: Queries, stream: str, names: Collection[str], *, quiet: float = QUIET, schema: str = SCHEMA
) -> int:
    """Retire writers, all of them or none; returns how many were not retired yet.

    `quiet`: seconds for which they must have written nothing.

    Raises:
        UnknownStream, StreamRefused: one is unknown, may still be writing, or none would be left.
    """
    with installed(schema):
        return int(await call_value(db, schema, "stream_writers_retire", stream, list(names), quiet))


async def idle_since(db: Queries, stream: str, token: int, *, schema: str = SCHEMA) -> list[str]:
    """The writers that are not retired and have no row above `token`; one writer is always left out of it.

    Raises UnknownStream.
    """
    with installed(schema):
        rows = await call_rows(db, schema, "stream_writers_idle", stream, token)
    return [row["writer"] for row in rows]
