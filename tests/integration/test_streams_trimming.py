"""Trimming removes what was published and no longer needed; whoever needs it all the same is told, and nobody waits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import trio

from replicad.errors import BadToken, StreamRefused, TokenExpired, UsageError
from replicad.postgres import schema
from replicad.postgres.bridge import Database
from replicad.streams import status
from replicad.streams.registry import Registry, Trimmed, row_source
from tests.conftest import PATIENCE

EVENTS = "CREATE TABLE events (id bigserial PRIMARY KEY, instance_name text, body jsonb)"


@pytest.fixture
async def db(database: Database) -> Database:
    await schema.install(database, "stream", "replicad")
    return database


async def test_trimming_keeps_what_nobody_was_sent_and_expires_the_tokens_below(db: Database) -> None:
    await db.execute(EVENTS)
    await db.execute("INSERT INTO events (body) SELECT '{}' FROM generate_series(1, 100)")
    stream = (await Registry(db).add("events", "events", "id")).stream
    source = row_source(stream)
    for before in (1, "1", f"{stream.epoch}!1"):
        with pytest.raises(StreamRefused, match=r"published up to nothing.*must stay"):
            await Registry(db).trim("events", before=before)
    await Registry(db).publish(stream, 60, {"master": 60})
    with pytest.raises(StreamRefused, match="published up to 60"):
        await Registry(db).trim("events", before=61)
    with pytest.raises(BadToken, match="another epoch"):
        await Registry(db).trim("events", before="00000000!5")
    with pytest.raises(UsageError):
        await Registry(db).trim("events")
    assert await source.earliest(db) == 0

    assert await Registry(db).trim("events", before="30~1.55", batch=7) == Trimmed(30, 30)
    assert await source.earliest(db) == 30
    assert (await Registry(db).load_stream("events")).trimmed_upto == 30
    assert await db.fetch_value("SELECT min(id) FROM events") == 31
    assert await Registry(db).trim("events", before=10) == Trimmed(0, 30), "it never goes back"

    async def drop(_: object) -> None: ...

    assert await source.copy_range(db, 30, 60, drop) == 30
    with pytest.raises(TokenExpired, match=r"retained from 30 on, and 29 is older.*EARLIEST"):
        await source.copy_range(db, 29, 60, drop)
    with pytest.raises(TokenExpired):
        await source.copy_vector(db, {"master": (29, 60)}, drop)


async def test_a_reader_never_misses_rows_that_a_trim_takes_away_under_it(db: Database, database_url: str) -> None:
    await db.execute(EVENTS)
    await db.execute("INSERT INTO events (body) SELECT '{}' FROM generate_series(1, 3000)")
    stream = (await Registry(db).add("events", "events", "id", row="body")).stream
    source = row_source(stream)
    await Registry(db).publish(stream, 3000, {})
    read_all, expired = trio.Event(), trio.Event()

    async def read() -> None:
        while not expired.is_set():
            rows: list[int] = []

            async def keep(chunk: object, rows: list[int] = rows) -> None:
                rows.append(chunk.rows)  # type: ignore[attr-defined]

            try:
                await source.copy_range(db, 1000, 3000, keep)
                assert sum(rows) == 2000
                read_all.set()
            except TokenExpired:
                expired.set()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await read_all.wait()
            for upto in range(980, 1020):
                await Registry(db).trim("events", before=upto)


async def test_trimming_by_age_uses_what_daemons_noted_and_the_notes_stay_few(db: Database) -> None:
    await db.execute(EVENTS)
    await db.execute("INSERT INTO events (body) SELECT '{}' FROM generate_series(1, 5000)")
    stream = (await Registry(db).add("events", "events", "id")).stream
    assert (await Registry(db).trim("events", older_than=timedelta(0))).upto is None, "nothing was noted yet"
    now = datetime.now(UTC)
    # four days of a daemon that publishes every 45 seconds
    await db.execute(
        "SELECT replicad.stream_note($1, replicad.stream_epoch(s), n / 2, '{}', '{}',"
        " $2::timestamptz + n * interval '45 seconds') FROM replicad.stream s, generate_series(1, 7680) n",
        stream.number,
        now - timedelta(days=4),
    )
    notes = await db.fetch_value("SELECT count(*) FROM replicad.stream_mark")
    assert 96 - 24 + 700 < notes < 96 + 970, "one an hour, and the last day by the minute or so"
    trimmed = await Registry(db).trim("events", older_than=timedelta(hours=2))
    assert trimmed.upto == pytest.approx(3840 - 80, abs=3)
    assert trimmed.rows == trimmed.upto
    trimmed = await Registry(db).trim("events", older_than=timedelta(seconds=90))
    assert trimmed.upto == pytest.approx(3840 - 1, abs=3)
    assert await db.fetch_value("SELECT count(*) FROM replicad.stream_mark") < 5, "notes of what is gone go too"
    assert (await Registry(db).trim("events", older_than=timedelta(days=9))).rows == 0


async def test_a_row_that_a_trimming_transaction_inserts_is_waited_for(db: Database) -> None:
    await db.execute(EVENTS)
    await db.execute("INSERT INTO events (body) SELECT '{}' FROM generate_series(1, 10)")
    stream = (await Registry(db).add("events", "events", "id")).stream
    await Registry(db).publish(stream, 10, {})
    async with db.connection() as trimmer, trimmer.transaction():
        await trimmer.execute("SELECT replicad.stream_trim('events', 5)")
        await trimmer.execute("INSERT INTO events (body) VALUES ('{}')")
        await db.execute("INSERT INTO events (body) VALUES ('{}')")
        assert (await status.show(db, "events")).horizon == 10
    assert (await status.show(db, "events")).horizon == 12
