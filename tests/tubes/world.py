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

from replicad.errors import DatabaseError, DatabaseUnavailable
from replicad.postgres.bridge import Connection, Database, Row
from replicad.terminal.failures import UNREACHABLE
from tests.conftest import PATIENCE

TUBE = "t"
SHARDS = 8
IDS = 300  # ids that programs write; few, so that they meet


@dataclass(frozen=True, slots=True)
class Key:
    """A kind of keys: the name and the type of the column, SQL for the key of the number `n`, and for a key's shard."""

    column: str
    type: str
    of: str
    routing: str

    def shard_of(self, key: str) -> str:
        """SQL for the shard of a key that is a text."""
        return self.routing.replace(self.column, f"{key}::{self.type}")


KEYS = (
    Key("id", "bigint", "n", f"(id % {SHARDS})::integer"),
    Key("film_id", "integer", "n::integer", f"film_id % {SHARDS}"),
    Key("uid", "uuid", "md5(n::text)::uuid", f"abs(hashtext(uid::text) % {SHARDS})"),
    Key("code", "text", "'Key '', \u00e9' || n", f"abs(hashtext(code) % {SHARDS})"),
    Key(
        "at", "timestamptz", "'2020-01-01Z'::timestamptz + n * interval '1.5 s'", f"abs(hashtext(at::text) % {SHARDS})"
    ),
)


def tables(key: Key) -> str:
    """SQL that makes the tables of the source, and the tube."""
    routing = f"routing => $${key.routing}$$"
    return f"""
CREATE FUNCTION k(n bigint) RETURNS {key.type} LANGUAGE sql IMMUTABLE AS $$ SELECT {key.of} $$;
CREATE TABLE items ({key.column} {key.type} PRIMARY KEY, value integer);
CREATE TABLE parts ({key.column} {key.type} PRIMARY KEY, value integer) PARTITION BY HASH ({key.column});
CREATE TABLE parts_low PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE parts_high PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 1);
CREATE VIEW source AS SELECT * FROM items UNION ALL SELECT * FROM parts;
CREATE TABLE setting AS SELECT 0 AS m;  -- rows whose value is divisible by it are not wanted; 0: all are
SELECT tube.tube_ensure_exists('{TUBE}', 4);
SELECT tube.tube_on_fork('{TUBE}', 'backfill');
SELECT tube.tube_table_ensure_attached('{TUBE}', 'items', 0, {routing});
SELECT tube.tube_table_ensure_attached('{TUBE}', 'parts', 0, {routing});
"""


def downstream(key: Key) -> str:
    """SQL that makes the downstream, in another server: a fork of the source is none of it."""
    return f"""
CREATE SCHEMA down;
CREATE TABLE down.rows (id text PRIMARY KEY, value integer, seq bigint, term bigint);
CREATE FUNCTION down.shard(id text) RETURNS integer LANGUAGE sql STABLE AS $$ SELECT {key.shard_of("id")} $$;
CREATE TABLE down.violation (text text);
CREATE TABLE down.poison (share integer);  -- per cent of the ids that fail now
CREATE TABLE down.pause (worker text, since timestamptz, upto timestamptz);
CREATE TABLE down.batch (pid integer PRIMARY KEY, worker text, at timestamptz);
CREATE TABLE down.conflict (id text, worker text, holder text, began timestamptz, at timestamptz);
CREATE FUNCTION down.begun(worker text) RETURNS void LANGUAGE sql AS $$
    INSERT INTO down.batch VALUES (pg_backend_pid(), worker, clock_timestamp())
    ON CONFLICT (pid) DO UPDATE SET worker = excluded.worker, at = excluded.at
$$;
CREATE FUNCTION down.conflict(worker text, id text) RETURNS void LANGUAGE sql AS $$
    INSERT INTO down.conflict SELECT $2, $1, b.worker, b.at, clock_timestamp()
    FROM pg_locks AS l JOIN down.batch AS b USING (pid)
    WHERE l.locktype = 'advisory' AND l.granted AND l.classid = 77
        AND l.objid::bigint = hashtext($2)::bigint & 4294967295 AND l.pid <> pg_backend_pid()
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
DOWNSTREAM = "SELECT id, value FROM down.rows WHERE value IS NOT NULL"
WANTED = "(setting.m = 0 OR source.value % greatest(setting.m, 1) <> 0)"


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

    def keep(self) -> None:
        """Start it again if it has ended because Postgres was away when it began, as a supervisor does.

        It must not have ended by itself for another reason.
        """
        assert self.process is not None
        status = self.process.poll()
        if status == UNREACHABLE.status:
            self.start()
        else:
            assert status in (None, -signal.SIGKILL), f"{self.name} ended by itself ({status}): {self.tail()}"

    def tail(self) -> str:
        """The end of its log."""
        return (self.folder / f"{self.name}.log").read_text(errors="replace")[-3000:]


async def rows(db: Database, query: str, *args: object) -> list[Row]:
    """The rows of a query, asked again while the server is away: it may have been exchanged behind the pool."""
    with trio.fail_after(PATIENCE):
        while True:
            try:
                return await db.fetch(query, *args)
            except DatabaseUnavailable:
                await trio.sleep(0.1)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


class Writer:
    """A program that writes with transactions of all kinds, until `stop`."""

    def __init__(self, db: Database, key: Key, seed: int, *, recorded: bool) -> None:
        """`recorded`: nothing is done that no trigger sees."""
        self._db = db
        self._key = key
        self._recorded = recorded
        self._chance = random.Random(seed)
        self.stop = trio.Event()
        self.done = self.failed = 0

    async def run(self) -> None:
        """Write until stopped. Some transactions fail by conflicts, as they do in life."""
        kinds: list[tuple[int, Callable[[Connection], Awaitable[None]]]] = [
            (12, self._one), (4, self._several), (3, self._rolled_back), (2, self._savepoint), (2, self._long),
            (2, self._isolated), (1, self._emptied), (2, self._moved), (1, self._unrecorded), (2, self._copied),
            (2, self._prepared),
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
        few, column = self._chance.choice([1, 1, 1, 3, 30]), self._key.column
        keys = f"(SELECT k({first} + (random() * {IDS - 1})::integer) FROM generate_series(1, {few}))"
        given = f"(SELECT DISTINCT {column} FROM unnest(ARRAY{keys}) AS {column})"
        value = self._chance.randrange(10**6)
        other = f"k({first + self._chance.randrange(IDS)})"
        on_partition = table == "parts" and self._chance.random() < 0.3  # a statement on a partition itself
        some = "parts_high" if on_partition else table
        return self._chance.choice([
            f"INSERT INTO {table} SELECT {column}, {value} FROM {given} AS n "
            f"ON CONFLICT ({column}) DO UPDATE SET value = excluded.value",
            f"INSERT INTO {table} SELECT {column}, {value} FROM {given} AS n ON CONFLICT DO NOTHING",
            f"UPDATE {some} SET value = {value} WHERE {column} IN {keys}",
            f"DELETE FROM {some} WHERE {column} IN {keys}",
            f"MERGE INTO {table} AS t USING {given} AS n ON t.{column} = n.{column} "
            f"WHEN MATCHED AND t.value % 3 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET value = {value} "
            f"WHEN NOT MATCHED THEN INSERT VALUES (n.{column}, {value})",
            f"MERGE INTO {table} AS t USING {given} AS n ON t.{column} = n.{column} WHEN MATCHED AND NOT EXISTS "
            f"(SELECT FROM {table} AS o WHERE o.{column} = {other}) THEN UPDATE SET {column} = {other} "
            f"WHEN NOT MATCHED THEN INSERT VALUES (n.{column}, {value})",
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
        """Keys change; in the partitioned table rows may go to another partition."""
        table, first = self._chance.choice([("items", 1), ("parts", 1 + IDS)])
        old, new = (f"k({first + self._chance.randrange(IDS)})" for _ in range(2))
        column = self._key.column
        await connection.execute(
            f"UPDATE {table} SET {column} = {new} WHERE {column} = {old} "
            f"AND NOT EXISTS (SELECT FROM {table} WHERE {column} = {new})"
        )

    async def _prepared(self, connection: Connection) -> None:
        name = f"p{self._chance.randrange(10**9)}"
        await connection.execute(f"BEGIN; {self._change()}; PREPARE TRANSACTION '{name}'")
        await trio.sleep(self._chance.random() * 0.5)
        await connection.execute(self._chance.choice(["COMMIT", "ROLLBACK"]) + f" PREPARED '{name}'")

    async def _unrecorded(self, connection: Connection) -> None:
        if self._recorded:
            return
        async with connection.transaction():
            await connection.execute("SET LOCAL session_replication_role = replica")
            await connection.execute(f"DELETE FROM items WHERE {self._key.column} = k({self._chance.randint(1, IDS)})")

    async def _copied(self, connection: Connection) -> None:
        first, value = 10 * IDS + self._chance.randrange(10**8), self._chance.randrange(10**6)
        rows = await connection.fetch(f"SELECT k(n), {value} FROM generate_series({first}, {first + 4}) AS n")
        await connection.copy_in("items", columns=[self._key.column, "value"], records=[tuple(row) for row in rows])
