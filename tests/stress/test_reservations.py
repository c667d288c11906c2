"""Dozens of writers that reserve ids, use them late, lose them and die; a reader that must get every row exactly once.

Takes REPLICAD_STRESS_SECONDS (2 in the suite; `make stress` gives it minutes). Ids that lost their cover must have been
refused: a row that turns up at or below a published position is missing at the end.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
import trio

from replicad.positions.horizon import Horizon
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.streams.registry import Method, Registry, horizon_source

from .reserving import NAMES, REFUSED, SUCCEED

SECONDS = float(os.environ.get("REPLICAD_STRESS_SECONDS", "2"))
PROCESSES, WRITERS = 2, 14

pytestmark = [pytest.mark.postgres, pytest.mark.stress, pytest.mark.timeout(SECONDS * 2 + 120)]


class Reader:
    """Follows all rows by the linear position, or one writer's by that writer's."""

    def __init__(self, writer: str | None) -> None:
        self.writer = writer
        self.position = 0
        self.ids: list[int] = []

    async def advance(self, db: Database, position: int) -> None:
        assert position >= self.position, "a position went back"
        if position > self.position:
            self.ids += await self.rows(db, self.position, position)
            self.position = position

    async def rows(self, db: Database, after: int, upto: int) -> list[int]:
        found = await db.fetch(
            "SELECT id FROM facts WHERE id > $1 AND id <= $2 AND ($3::text IS NULL OR instance = $3) ORDER BY id",
            after,
            upto,
            self.writer,
        )
        return [row["id"] for row in found]


async def test_no_reserved_row_turns_up_at_or_below_a_published_position(database_url: str) -> None:
    async with open_database(database_url, size=3, application_name="reader") as db, Horizon(db) as horizon:
        await schema.install(db, "stream", "replicad")
        await db.execute("CREATE TABLE facts (id bigserial PRIMARY KEY, instance text)")
        stream = (
            await Registry(db).add("facts", "facts", "id", instance_column="instance", method=Method.RESERVATION)
        ).stream
        await Registry(db).ensure_writers(stream, NAMES)
        horizon.watch("facts", horizon_source(stream), writers=NAMES)
        readers = [Reader(None), *(Reader(name) for name in NAMES)]
        done: Counter[str] = Counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow_until_cancelled, db, horizon, readers)
            async with trio.open_nursery() as writing:
                for number in range(PROCESSES):
                    writing.start_soon(run_writers, database_url, number, done)
            nursery.cancel_scope.cancel()
        for row in await db.fetch("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
            await db.execute(f"COMMIT PREPARED '{row['gid']}'")
        for _ in range(3):
            await follow(db, horizon, readers)
            await trio.sleep(0.05)  # a forced flush may not have been due
        last_value = await db.fetch_value("SELECT pg_sequence_last_value($1::oid)", stream.sequence_oid)
        assert [reader.position for reader in readers] == [last_value] * len(readers), "somebody still holds a lock"
        for reader in readers:
            there = await reader.rows(db, 0, last_value)
            missed = sorted(set(there) - set(reader.ids))
            assert reader.ids == there, f"{len(missed)} rows of {reader.writer or 'all'} came too late: {missed[:5]}"
        print(f"{SECONDS:g} s: {len(readers[0].ids)} rows of {last_value} ids; {dict(sorted(done.items()))}")
        assert done["killed"]
        assert all(done[f"refused {kind}"] for kind in REFUSED), "ids that outlived their cover were let in"
        assert done.keys() >= SUCCEED, "some kind of writing never succeeded"
        assert len(readers[0].ids) > (SECONDS * 50 if SECONDS >= 60 else 50)


async def run_writers(url: str, number: int, done: Counter[str]) -> None:
    command = [sys.executable, Path(__file__).with_name("reserving.py"), url, str(SECONDS), str(WRITERS), str(number)]
    process = await trio.run_process(list(map(str, command)), capture_stdout=True)
    done.update(json.loads(process.stdout))


async def follow_until_cancelled(db: Database, horizon: Horizon, readers: list[Reader]) -> None:
    while True:
        await follow(db, horizon, readers)
        await trio.sleep(random.random() * 0.005)


async def follow(db: Database, horizon: Horizon, readers: list[Reader]) -> None:
    with trio.CancelScope(shield=True):  # a reader that stops between its reads would look as if it had missed rows
        reading = (await horizon.poll())["facts"]
        assert reading.fork is None
        assert reading.refused is None
        if reading.position is not None:
            for reader in readers:
                await reader.advance(
                    db, reading.position if reader.writer is None else reading.per_writer[reader.writer]
                )
