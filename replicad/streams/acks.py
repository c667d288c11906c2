"""What senders have acknowledged by FEDERATION_ACK: the highest token of each stream and instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from replicad.postgres.statements import Queries, call_rows, call_value
from replicad.streams.queries import SCHEMA, installed


@dataclass(frozen=True, slots=True)
class Ack:
    """One ack: that `instance` has what `stream` has up to `token`, said while the stream had been reset that often."""

    stream: str
    resets: int
    instance: str
    token: int


@dataclass(frozen=True, slots=True)
class SenderAck:
    """How far a sender of a stream is; `token` is None where it has said nothing (since the last reset)."""

    instance: str
    token: int | None
    acked_at: datetime | None


async def note(db: Queries, acks: Sequence[Ack], *, schema: str = SCHEMA) -> None:
    """Keep acks, none of them of the same stream and instance as another."""
    await call_value(
        db,
        schema,
        "stream_ack_note",
        [ack.stream for ack in acks],
        [ack.resets for ack in acks],
        [ack.instance for ack in acks],
        [ack.token for ack in acks],
    )


async def load(db: Queries, stream: str, *, schema: str = SCHEMA) -> list[SenderAck]:
    """All known senders of a stream, the one that holds back most first. Raises UnknownStream."""
    with installed(schema):
        return [SenderAck(*row) for row in await call_rows(db, schema, "stream_acks", stream)]


async def acked(db: Queries, stream: str, *, schema: str = SCHEMA) -> int | None:
    """Up to where all known senders have it; None where one has said nothing, or none is known."""
    with installed(schema):
        token: int | None = await call_value(db, schema, "stream_acked", stream)
    return token


async def forget(db: Queries, stream: str, instance: str, *, schema: str = SCHEMA) -> bool:
    """A sender that will not come back holds nothing back any more; False where it never acked.

    Raises UnknownStream.
    """
    with installed(schema):
        return bool(await call_value(db, schema, "stream_ack_forget", stream, instance))
