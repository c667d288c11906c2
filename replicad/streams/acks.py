"""The acks of senders (FEDERATION_ACK): the highest token of each stream and instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from replicad.postgres.statements import Queries, call_rows, call_value
from replicad.streams.queries import SCHEMA, installed


@dataclass(frozen=True, slots=True)
class ReaderAck:
    """One ack: `instance` has delivered `stream` up to `token`, in the generation `epoch`."""

    stream: str
    epoch: str
    instance: str
    token: int


@dataclass(frozen=True, slots=True)
class SenderAck:
    """The last ack of a sender; `token` is None if it has sent none in the present generation."""

    instance: str
    token: int | None
    acked_at: datetime | None


async def note(db: Queries, acks: Sequence[ReaderAck], *, schema: str = SCHEMA) -> None:
    """Store acks; at most one for each stream and instance."""
    await call_value(
        db,
        schema,
        "stream_ack_note",
        [ack.stream for ack in acks],
        [ack.epoch for ack in acks],
        [ack.instance for ack in acks],
        [ack.token for ack in acks],
    )


async def load(db: Queries, stream: str, *, schema: str = SCHEMA) -> list[SenderAck]:
    """All known senders of a stream, the lowest token first. Raises UnknownStream."""
    with installed(schema):
        return [SenderAck(*row) for row in await call_rows(db, schema, "stream_acks", stream)]


async def acked(db: Queries, stream: str, *, schema: str = SCHEMA) -> int | None:
    """The lowest token of all known senders; None if a sender has sent no ack, or none is known."""
    with installed(schema):
        token: int | None = await call_value(db, schema, "stream_acked", stream)
    return token


async def forget(db: Queries, stream: str, instance: str, *, schema: str = SCHEMA) -> bool:
    """Remove a sender, so that it no longer holds trimming back; False if it has never sent an ack.

    Raises UnknownStream.
    """
    with installed(schema):
        return bool(await call_value(db, schema, "stream_ack_forget", stream, instance))
