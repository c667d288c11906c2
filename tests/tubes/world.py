"""What the checker of tubes runs on: tables, a downstream, daemons, workers, and programs that write."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from replicad.errors import DatabaseError
from replicad.postgres.bridge import Connection, Database
from tests.conftest import PATIENCE

TUBE = "t"
SHARDS = 8
IDS = 300  # ids that programs write; few, so that they meet

TABLES = f"""
CREATE TABLE items (id bigint PRIMARY KEY, value integer);
CREATE TABLE parts (id bigint PRIMARY KEY, value integer) PARTITION BY RANGE (id);
CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (MINVALUE) TO ({IDS + IDS // 2});
CREATE TABLE parts_high PARTITION OF parts DEFAULT;
CREATE VIEW source AS SELECT * FROM items UNION ALL SELECT * FROM parts;
SELECT tube.tube_ensure_exists('{TUBE}', 4);
SELECT tube.tube_table_ensure_attached('{TUBE}', 'items', 0, routing => '(id % {SHARDS})::integer');
SELECT tube.tube_table_ensure_attached('{TUBE}', 'parts', 0, routing => '(id % {SHARDS})::integer');

CREATE SCHEMA down;
CREATE TABLE down.rows (id bigint PRIMARY KEY, value integer, seq bigint, term bigint);
CREATE TABLE down.violation (text text);
CREATE TABLE down.pause (worker text, since timestamptz, upto timestamptz);
CREATE TABLE down.batch (pid integer PRIMARY KEY, worker text, at timestamptz);
CREATE TABLE down.conflict (id bigint, worker text, holder text, began timestamptz, at timestamptz);
CREATE FUNCTION down.begun(worker text) RETURNS void LANGUAGE sql AS $$
    INSERT INTO down.batch VALUES (pg_backend_pid(), worker, clock_timestamp())
    ON CONFLICT (pid) DO UPDATE SET worker = excluded.worker, at = excluded.at
$$;
CREATE FUNCTION down.conflict(worker text, id bigint) RETURNS void LANGUAGE sql AS $$
    INSERT INTO down.conflict SELECT $2, $1, b.worker, b.at, clock_timestamp()
    FROM pg_locks AS l JOIN down.batch AS b USING (pid)
    WHERE l.locktype = 'advisory' AND l.granted AND (l.classid, l.objid) = (77, $2::oid) AND l.pid <> pg_backend_pid()
$$;
"""
VIOLATIONS = """
SELECT text FROM down.violation
UNION ALL SELECT format('id %s at %s: %s has it since %s, and ran all the time', c.id, c.at, c.holder, c.began)
FROM down.conflict AS c
WHERE NOT EXISTS (SELECT FROM down.pause AS p WHERE p.worker = c.holder AND p.upto >= c.began AND p.since <= c.at)
"""
COUNTS = """
SELECT (SELECT count(*) FROM down.rows) AS ids, (SELECT max(term) FROM down.rows) AS "as the last term",
    (SELECT count(*) FROM down.pause) AS "times a worker did not run", (SELECT count(*) FROM down.conflict) AS conflicts
"""
DIFFERENT = """
SELECT coalesce(s.id, d.id) AS id, s.value AS source, d.value AS downstream
FROM source AS s FULL JOIN (SELECT * FROM down.rows WHERE value IS NOT NULL) AS d USING (id)
WHERE s.value IS DISTINCT FROM d.value ORDER BY 1 LIMIT 20
"""


@dataclass(slots=True)
class Program:
    """A daemon or a worker as a process, which can be started again."""

    name: str
    words: list[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; what it logs is kept."""
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | self.environment,
                start_new_session=True,
            )  # fmt: skip

    def send(self, number: signal.Signals) -> None:
        """Send a signal; a killed process has ended when this returns."""
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait(PATIENCE)

    def check(self) -> None:
        """It must not have ended by itself."""
        assert self.process is not None
        assert self.process.poll() is None, f"{self.name} ended by itself: {self.tail()}"

    def tail(self) -> str:
        """The end of its log."""
        return (self.folder / f"{self.name}.log").read_text(errors="replace")[-3000:]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


class Writer:
    """A program that writes with transactions of all kinds, until `stop`."""

    def __init__(self, db: Database, seed: int) -> None:
        self._db = db
        self._chance = random.Random(seed)
        self.stop = trio.Event()
        self.done = self.failed = 0
        self.unrecorded = False  # rows were deleted without a trigger: only a backfill finds them

    async def run(self) -> None:
        """Write until stopped. Some transactions fail by conflicts, as they do in life."""
        kinds: list[tuple[int, Callable[[Connection], Awaitable[None]]]] = [
            (12, self._one), (4, self._several), (3, self._rolled_back), (2, self._savepoint), (2, self._long),
            (2, self._isolated), (1, self._emptied), (2, self._moved), (1, self._unrecorded), (2, self._copied),
        ]  # fmt: skip
        weights, each = zip(*kinds, strict=True)
        while not self.stop.is_set():
            [kind] = self._chance.choices(each, weights)
            try:
                async with self._db.connection() as connection:
                    await kind(connection)
                self.done += 1
            except DatabaseError:  # a serialization failure, a deadlock, a lock_timeout
                self.failed += 1
            await trio.sleep(self._chance.random() * 0.03)

    def _change(self) -> str:
        table, first = self._chance.choice([("items", 1), ("parts", 1 + IDS)])
        if table == "parts" and self._chance.random() < 0.3:
            table, first = "parts_high", IDS + IDS // 2  # a statement on a partition itself
        few = self._chance.choice([1, 1, 1, 3, 30])
        ids = f"(SELECT {first} + (random() * {IDS // 2 - 1})::integer FROM generate_series(1, {few}))"
        value = self._chance.randrange(10**6)
        return self._chance.choice([
            f"INSERT INTO {table} SELECT DISTINCT id, {value} FROM unnest(ARRAY{ids}) AS id "
            "ON CONFLICT (id) DO UPDATE SET value = excluded.value",
            f"INSERT INTO {table} SELECT DISTINCT id, {value} FROM unnest(ARRAY{ids}) AS id ON CONFLICT DO NOTHING",
            f"UPDATE {table} SET value = {value} WHERE id IN {ids}",
            f"DELETE FROM {table} WHERE id IN {ids}",
            f"MERGE INTO {table} AS t USING (SELECT DISTINCT id FROM unnest(ARRAY{ids}) AS id) AS n ON t.id = n.id "
            f"WHEN MATCHED AND t.value % 3 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET value = {value} "
            f"WHEN NOT MATCHED THEN INSERT VALUES (n.id, {value})",
        ])  # fmt: skip

    async def _one(self, connection: Connection) -> None:
        await connection.execute(self._change())

    async def _several(self, connection: Connection) -> None:
        async with connection.transaction():
            for _ in range(self._chance.randint(2, 6)):
                await connection.execute(self._change())

    async def _rolled_back(self, connection: Connection) -> None:
        await connection.execute("BEGIN")
        await connection.execute(self._change())
        await connection.execute("ROLLBACK")

    async def _savepoint(self, connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute(self._change())
            await connection.execute("SAVEPOINT a")
            await connection.execute(self._change())
            await connection.execute("ROLLBACK TO a")
            await connection.execute(self._change())

    async def _long(self, connection: Connection) -> None:
        """Later transactions commit before it: its pods have low numbers and appear late."""
        async with connection.transaction():
            await connection.execute("SET LOCAL lock_timeout = '1s'")
            await connection.execute(self._change())
            await trio.sleep(self._chance.random() * 1.5)
            await connection.execute(self._change())

    async def _isolated(self, connection: Connection) -> None:
        async with connection.transaction():
            level = self._chance.choice(["REPEATABLE READ", "SERIALIZABLE"])
            await connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            await connection.fetch("SELECT count(*) FROM source")
            await connection.execute(self._change())

    async def _emptied(self, connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute("SET LOCAL lock_timeout = '1s'")
            await connection.execute(self._chance.choice(["TRUNCATE items", "TRUNCATE parts", "TRUNCATE parts_high"]))
            await connection.execute(self._change())

    async def _moved(self, connection: Connection) -> None:
        """Ids change; in the partitioned table rows may go to another partition."""
        table, first = self._chance.choice([("items", 1), ("parts", 1 + IDS)])
        old, new = (first + self._chance.randrange(IDS) for _ in range(2))
        await connection.execute(
            f"UPDATE {table} SET id = {new} WHERE id = {old} AND NOT EXISTS (SELECT FROM {table} WHERE id = {new})"
        )

    async def _unrecorded(self, connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute("SET LOCAL session_replication_role = replica")
            await connection.execute(f"DELETE FROM items WHERE id = {self._chance.randint(1, IDS)}")
        self.unrecorded = True

    async def _copied(self, connection: Connection) -> None:
        value = self._chance.randrange(10**6)
        rows = [(10 * IDS + self._chance.randrange(10**9), value) for _ in range(5)]
        await connection.copy_in("items", columns=["id", "value"], records=rows)
