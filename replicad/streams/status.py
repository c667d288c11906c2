"""What an operator sees of streams: how far they are, what waits, and who holds them back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from replicad.postgres.bridge import Database
from replicad.postgres.horizon import Holder, Horizon, Reading
from replicad.postgres.rows import COUNT_LIMIT
from replicad.streams.queries import SCHEMA
from replicad.streams.registry import (
    Stream,
    horizon_source,
    load_stream,
    load_streams,
    published,
    row_source,
)


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream at one moment.

    `position` is linear, `per_writer` each writer's own, `last_value` the last id handed out; None where not known yet.
    `lag_rows` counts the committed rows that wait behind the position, no further than a million. `lag_seconds` is how
    long they may have been waiting: the age of the transaction that holds them back, 0 where nobody does. `problem`
    says why the stream is not served, with the remedy.
    """

    stream: Stream
    position: int | None
    per_writer: Mapping[str, int]
    last_value: int | None
    lag_rows: int
    lag_seconds: float
    held_by: Holder | None
    problem: str | None

    @property
    def lag_is_capped(self) -> bool:
        """There are more rows waiting than were counted."""
        return self.lag_rows >= COUNT_LIMIT


async def list_streams(
    db: Database, readings: Mapping[str, Reading] | None = None, *, schema: str = SCHEMA
) -> list[StreamStatus]:
    """All streams by name. Without `readings` (of a daemon's horizon) Postgres is asked, in one poll for all.

    Raises:
        SchemaMissing: streams are not installed in this database.
        StandbyRefused: no positions can be had from a standby.
    """
    streams = await load_streams(db, schema=schema)
    return await _look(db, list(streams.values()), readings, schema)


async def show(
    db: Database, name: str, readings: Mapping[str, Reading] | None = None, *, schema: str = SCHEMA
) -> StreamStatus:
    """One stream. Raises UnknownStream besides what `list_streams` raises."""
    [status] = await _look(db, [await load_stream(db, name, schema=schema)], readings, schema)
    return status


async def _look(
    db: Database, streams: list[Stream], readings: Mapping[str, Reading] | None, schema: str
) -> list[StreamStatus]:
    found = readings if readings is not None else await _poll(db, streams, schema)
    return [await _status(db, stream, found.get(stream.name), schema) for stream in streams]


async def _poll(db: Database, streams: list[Stream], schema: str) -> Mapping[str, Reading]:
    known = await published(db, schema=schema)
    async with Horizon(db) as horizon:
        for stream in streams:
            if stream.fault is None:
                last = known.get(stream.name)
                horizon.watch(
                    stream.name,
                    horizon_source(stream),
                    published=last.position if last else None,
                    per_writer=last.per_writer if last else None,
                    writers=stream.writers,
                )
        return await horizon.poll()


async def _status(db: Database, stream: Stream, reading: Reading | None, schema: str) -> StreamStatus:
    reading = reading or Reading()
    problem = stream.fault or (str(reading.refused) if reading.refused else None)
    waiting = 0
    if problem is None and reading.position is not None:
        # to the end of the table, not to last_value: ids may have been handed out since it was read
        waiting = await row_source(stream, schema=schema).count(db, reading.position, (1 << 63) - 1)
    age = reading.held_by.age_s if reading.held_by is not None else None
    return StreamStatus(
        stream=stream,
        position=reading.position,
        per_writer=reading.per_writer,
        last_value=reading.last_value,
        lag_rows=waiting,
        lag_seconds=age or 0.0,
        held_by=reading.held_by,
        problem=problem,
    )
