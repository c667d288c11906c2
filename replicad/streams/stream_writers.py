"""The writers of a stream for an operator: list them with their positions, and retire writers that no longer write.

A retired writer is no longer listed to readers. It keeps its number, and is listed again when it writes again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from replicad.postgres.statements import Queries, call_rows, call_value, statement
from replicad.streams.queries import SCHEMA, installed
from replicad.streams.registry import Stream

QUIET = 60.0  # seconds without a row before a writer may be retired


@dataclass(frozen=True, slots=True)
class StreamWriter:
    """One writer. `position`: its last published position, or None."""

    number: int
    name: str
    position: int | None
    created_at: datetime
    retired_at: datetime | None

    @property
    def retired(self) -> bool:
        """Whether it is no longer listed to readers."""
        return self.retired_at is not None


async def load(db: Queries, stream: str, *, schema: str = SCHEMA) -> list[StreamWriter]:
    """All writers of a stream by number, including retired ones. Raises UnknownStream."""
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
        UnknownStream, StreamRefused: a writer is unknown, may still be writing, or none would be left.
    """
    with installed(schema):
        return int(await call_value(db, schema, "stream_writers_retire", stream, list(names), quiet))


async def idle_since(db: Queries, stream: str, token: int, *, schema: str = SCHEMA) -> list[str]:
    """The writers that are not retired and have no row above `token`; one writer is always left out.

    Raises UnknownStream.
    """
    with installed(schema):
        rows = await call_rows(db, schema, "stream_writers_idle", stream, token)
    return [row["writer"] for row in rows]
