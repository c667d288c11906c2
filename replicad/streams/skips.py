"""Ids that an operator has left out of a stream, so that it goes on behind a row that cannot be sent."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from replicad.postgres.statements import Queries, call_rows, call_value
from replicad.streams.queries import SCHEMA, installed


@dataclass(frozen=True, slots=True)
class Skipped:
    """An id that an operator has left out of a stream: the reason, the role of Postgres, and the time."""

    id: int
    reason: str
    by: str
    at: datetime


async def skip(db: Queries, name: str, row_id: int, reason: str, *, schema: str = SCHEMA) -> int | None:
    """Leave an id out of a stream; the row stays in its table. Returns the position published so far.

    Raises UnknownStream.
    """
    with installed(schema):
        published: int | None = await call_value(db, schema, "stream_skip_id", name, row_id, reason)
    return published


async def unskip(db: Queries, name: str, row_id: int, *, schema: str = SCHEMA) -> bool:
    """Undo `skip` for readers that have not passed the id; False if it was not skipped. Raises UnknownStream."""
    with installed(schema):
        return bool(await call_value(db, schema, "stream_skip_undo", name, row_id))


async def listed(db: Queries, name: str, *, schema: str = SCHEMA) -> list[Skipped]:
    """The skipped ids of a stream, ascending. Raises UnknownStream."""
    with installed(schema):
        rows = await call_rows(db, schema, "stream_skips", name, columns="id, reason, skipped_by, skipped_at")
    return [Skipped(*row) for row in rows]
