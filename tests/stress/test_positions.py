"""Dozens of writers that do everything a writer may do, and one reader that must get every row exactly once.

Takes REPLICAD_STRESS_SECONDS (2 in the suite; `make stress` gives it minutes). The reader polls, reads the rows of
(old position, new position], and never looks back: a row that turns up at or below a published position is missing
at the end.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from replicad.positions.horizon import Horizon, LockSource, Reading
from replicad.postgres.bridge import Database, open_database
from tests import recording
from tests.recording import RecordedHorizon, Recorder

SECONDS = float(os.environ.get("REPLICAD_STRESS_SECONDS", "2"))
PROCESSES, WRITERS = 2, 18
PARTITIONS = 4
NAMES = ("A", "B", "C")
KINDS_OF_WRITING = 9

pytestmark = [pytest.mark.postgres, pytest.mark.stress, pytest.mark.timeout(SECONDS * 2 + 120)]


@dataclass
class Reader:
    """Follows one view of the table: all rows by the linear position, or one writer's by that writer's."""

    writer: str | None
    position: int = 0
    ids: list[int] = field(default_factory=list)

    async def advance(self, db: Database, reading: Reading) -> None:
        position = reading.position if self.writer is None else reading.per_writer[self.writer]
        assert position is not None
        assert position >= self.position, "a position went back"
        if position > self.position:
            rows = await db.fetch(
                "SELECT id FROM t WHERE id > $1 AND id <= $2 AND ($3::text IS NULL OR instance = $3) ORDER BY id",
                self.position,
                position,
                self.writer,
            )
            self.ids += [row["id"] for row in rows]
            self.position = position

    async def check(self, db: Database) -> None:
        rows = await db.fetch("SELECT id FROM t WHERE $1::text IS NULL OR instance = $1 ORDER BY id", self.writer)
        there = [row["id"] for row in rows]
        missed = sorted(set(there) - set(self.ids))
        assert self.ids == there, f"{len(missed)} rows of {self.writer or 'all'} turned up too late, first {missed[:5]}"


async def test_every_row_is_read_exactly_once_whatever_the_writers_do(database_url: str, tmp_path: Path) -> None:
    recorded = tmp_path / "polls"
    async with open_database(database_url, size=3, application_name="reader") as db:
        with Recorder(recorded) as recorder:
            await follow_writers(db, database_url, recorder)
    lines = recorded.read_text().splitlines()
    assert len(lines) > 10
    assert list(recording.check(lines)) == []


async def follow_writers(db: Database, database_url: str, recorder: Recorder) -> None:
    async with RecordedHorizon(db, recorder=recorder) as horizon:
        await make_table(db)
        table, sequence = await db.fetch_row("SELECT 't'::regclass::oid, 't_id_seq'::regclass::oid") or (0, 0)
        horizon.watch("t", LockSource(table, sequence), writers=NAMES)
        readers = [Reader(None), *(Reader(name) for name in NAMES)]
        done: Counter[str] = Counter()
        polls: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow_until_cancelled, db, horizon, readers, polls)
            async with trio.open_nursery() as writing:
                for number in range(PROCESSES):
                    writing.start_soon(run_writers, database_url, number, done)
            nursery.cancel_scope.cancel()
        await finish_prepared(db)
        for _ in range(2):
            await follow(db, horizon, readers)
            await trio.sleep(0.05)  # a forced flush may not have been due
        last_value = await db.fetch_value("SELECT pg_sequence_last_value($1::oid)", sequence)
        assert [reader.position for reader in readers] == [last_value] * len(readers)
        for reader in readers:
            await reader.check(db)
        polls.sort()
        print(f"{SECONDS:g} s: {len(readers[0].ids)} rows of {last_value} ids; {dict(done)}")
        p50, p99 = (polls[len(polls) * percent // 100] * 1e3 for percent in (50, 99))
        print(f"{len(polls)} polls with reads, p50 {p50:.2f} ms, p99 {p99:.2f} ms")
        assert done.pop("killed")
        assert len(done) == KINDS_OF_WRITING, "some kind of writing never succeeded"
        assert len(readers[0].ids) > (SECONDS * 100 if SECONDS >= 60 else 100)


async def make_table(db: Database) -> None:
    await db.execute(
        "CREATE TABLE t (id bigserial, instance text DEFAULT current_setting('application_name'), k integer DEFAULT 0) "
        "PARTITION BY LIST (k);"
        + "".join(f"CREATE TABLE t{k} PARTITION OF t FOR VALUES IN ({k});" for k in range(PARTITIONS))
        + "".join(f"CREATE INDEX ON t{k} (id); ALTER TABLE t{k} ALTER k SET DEFAULT {k};" for k in range(PARTITIONS))
    )


async def run_writers(url: str, number: int, done: Counter[str]) -> None:
    command = [sys.executable, Path(__file__).with_name("writers.py"), url, str(SECONDS), str(WRITERS), str(number)]
    process = await trio.run_process(list(map(str, command)), capture_stdout=True)
    *told, counts = process.stdout.decode().splitlines()
    print(*told, sep="\n")
    done.update(json.loads(counts))


async def follow_until_cancelled(db: Database, horizon: Horizon, readers: list[Reader], polls: list[float]) -> None:
    while True:
        begun = trio.current_time()
        await follow(db, horizon, readers)
        polls.append(trio.current_time() - begun)
        await trio.sleep(random.random() * 0.005)


async def follow(db: Database, horizon: Horizon, readers: list[Reader]) -> None:
    with trio.CancelScope(shield=True):  # a reader that stops between its reads would look as if it had missed rows
        reading = (await horizon.poll())["t"]
        assert reading.fork is None
        assert reading.refused is None
        if reading.position is not None:
            for reader in readers:
                await reader.advance(db, reading)


async def finish_prepared(db: Database) -> None:
    """Those whose writer was killed between PREPARE and its second half."""
    for row in await db.fetch("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
        await db.execute(f"COMMIT PREPARED '{row['gid']}'")
