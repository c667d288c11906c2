"""Removes the oldest rows of a stream in bounded batches. A reader that needs a removed row gets TokenExpired."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from replicad.errors import BadToken, UsageError
from replicad.postgres.statements import Queries, call_value, statement
from replicad.protocol.tokens import Vector
from replicad.streams import acks
from replicad.streams.queries import SCHEMA
from replicad.streams.registry import load_stream

BATCH: Final = 10_000  # rows per transaction: some 50 ms, during which updates of these rows wait


@dataclass(frozen=True, slots=True)
class Trimmed:
    """How many rows were removed; tokens below `upto` are expired from now on (None: nothing was ever trimmed)."""

    rows: int
    upto: int | None


async def trim(
    db: Queries,
    name: str,
    *,
    before: str | int | None = None,
    older_than: timedelta | None = None,
    acked: bool = False,
    batch: int = BATCH,
    schema: str = SCHEMA,
) -> Trimmed:
    """Remove rows up to token `before`, or those published longer than `older_than` ago, or those `acked` by every
    known sender (none while a sender has sent no ack).

    The age comes from positions that daemons note while they serve the stream (to the minute for a day, to the hour
    before). Where these notes do not go back so far, nothing is removed. Each batch is a transaction of its own, so the
    batches before an interruption stay removed. The position waits for a batch, as for any other transaction.

    Raises:
        UsageError: `before`, `older_than` and `acked` are all absent, or more than one of the three is given.
        UnknownStream: there is no such stream.
        BadToken: the token does not parse, or belongs to another epoch.
        StreamRefused: it lies beyond the published position; rows that no reader was sent must stay.
    """
    if sum((before is not None, older_than is not None, acked)) != 1:
        raise UsageError("trim takes exactly one of before, older_than and acked.")
    stream = await load_stream(db, name, schema=schema)
    upto: int | None
    if before is not None:
        token = Vector.parse(str(before))
        if token.epoch not in (None, stream.epoch):
            raise BadToken(f"token {before} is of another epoch than stream {name}, which is in {stream.epoch}.")
        upto = token.minimum
    elif acked:
        upto = await acks.acked(db, name, schema=schema)
    else:
        upto = await db.fetch_value(statement("stream_position_at", schema), name, older_than)
    rows = 0
    while upto is not None:
        deleted = await call_value(db, schema, "stream_trim", name, upto, batch)
        if not deleted:
            break
        rows += deleted
    return Trimmed(rows, (await load_stream(db, name, schema=schema)).trimmed_upto)
