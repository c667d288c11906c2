"""Programs beside the readers: a sender with its destination, a cache, and a worker that reports who is online.

Each says what is wrong once nobody writes any more: None where it has what the database has.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from replicad.caches.async_invalidator import CacheInvalidator
from replicad.caches.writing import invalidate
from replicad.client.async_client import open_client
from replicad.client.events import Reset, RowBatch
from replicad.errors import DatabaseError, ReplicadError
from replicad.postgres.bridge import Database, open_database
from replicad.presence.reporter import open_presence
from replicad.retry import Backoff
from tests.conftest import psql
from tests.federation_receiver import Receiver, Reply
from tests.roles import as_daemon

from .ledger import Row
from .readers import Place

THINGS = 4
USERS = 4
ENABLE = """
    SELECT replicad.cache_enable();
    SELECT replicad.presence_enable('0.3 s', '2 s', '3 s', NULL);
"""
MAKE_THINGS = f"""
    CREATE TABLE things (id int PRIMARY KEY, version int NOT NULL);
    INSERT INTO things SELECT n, 0 FROM generate_series(0, {THINGS - 1}) n;
"""
AGAIN = 0.1


class Sender:
    """`replicad sender` for one stream, and the destination of all rows, which refuses some requests."""

    name = "sender"

    def __init__(self, stream: str, place: Place, url: str, log: Path, rng: random.Random) -> None:
        self.stream = stream
        self._words = [sys.executable, "-m", "replicad", "sender", "--facts", stream, "--start", "earliest"]
        self._words += ["--server", f"{place[0]}:{place[1]}", "--database", as_daemon(url), "--log-format", "json"]
        self._words += ["--allow-private", "127.0.0.1", "--retry-first", "50ms", "--retry-max", "200ms"]
        self._words += ["--catch-up", "every"]
        self._log = log
        self._receiver = Receiver(lambda _: Reply(503) if rng.random() < 0.1 else Reply())
        self._process: trio.Process | None = None
        self.ends = 0

    async def run(self) -> None:
        """Until cancelled. What ends is started again, as by any supervisor."""
        async with self._receiver.listening():
            destination = f"http://127.0.0.1:{self._receiver.port}/d"
            with self._log.open("ab") as log:
                while True:
                    self._process = await trio.lowlevel.open_process(
                        [*self._words, "--destinations", destination], stdout=log, stderr=subprocess.STDOUT
                    )
                    try:
                        await self._process.wait()
                    finally:
                        with suppress(ProcessLookupError):
                            self._process.kill()
                    self.ends += 1
                    await trio.sleep(AGAIN)

    def disturb(self, rng: random.Random) -> None:
        """Now and then it is killed."""
        if self._process is not None and rng.random() < 0.02:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def problem(self, tables: Mapping[str, Iterable[Row]]) -> str | None:
        """Each row that there is was delivered; what was delivered and is void cannot be taken back."""
        have = {(fact[0], fact[-1]) for fact in self._receiver.facts("d")}
        lacks = sorted(one for _, one, body in tables[self.stream] if (one, body) not in have)
        return f"{len(lacks)} rows of {self.stream} were never delivered: {lacks[:20]}" if lacks else None

    def trace(self) -> str:
        """What it logged at last."""
        return self._log.read_text(errors="replace")[-1500:]


class CacheWorker:
    """A worker with a cache that follows one daemon, and a writer that changes what is cached."""

    name = "cache"

    def __init__(self, place: Place, url: str) -> None:
        self._place = place
        self._url = url
        self._caches = CacheInvalidator()
        self._thing = self._caches.cached(name="thing")(self._load)

    async def _load(self, number: int) -> int:
        """A session of its own, which leads to the server that is current."""
        async with self._open() as db:
            return int(await db.fetch_value("SELECT version FROM things WHERE id = $1", number))

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Database]:
        async with open_database(self._url, size=1, application_name="cached") as db:
            yield db

    async def run(self) -> None:
        """Follow until cancelled."""
        async with open_client(*self._place, name="cache", connect_timeout=1.0) as client:
            await self._caches.run(client, backoff=Backoff(first=0.05, cap=0.2))

    async def write(self, rng: random.Random) -> None:
        """Change some thing, and look at some others."""
        with suppress(DatabaseError):
            async with self._open() as db, db.connection() as connection, connection.transaction():
                if rng.random() < 0.5:
                    await connection.execute("SET LOCAL synchronous_commit = off")
                number = rng.randrange(THINGS)
                await connection.execute("UPDATE things SET version = version + 1 WHERE id = $1", number)
                await invalidate(connection, "thing", [number])
        for number in range(THINGS):
            with suppress(DatabaseError):
                await self._thing(number)

    async def problem(self, tables: Mapping[str, Iterable[Row]]) -> str | None:
        """A cached value is the present one."""
        with suppress(DatabaseError):
            async with self._open() as db:
                rows = await db.fetch("SELECT id, version FROM things ORDER BY id")
            wrong = [(n, at, have) for n, at in map(tuple, rows) if (have := await self._thing(n)) != at]
            return f"(thing, version, version that is served): {wrong}; {self._caches.statistics()}" if wrong else None
        return "the database does not answer"

    def trace(self) -> str:
        """What it knows."""
        return str(self._caches.statistics())


class OnlineUsers:
    """A worker that reports users at one daemon, and a reader that keeps the last row of each."""

    name = "presence"

    def __init__(self, places: Sequence[Place], url: str) -> None:
        self._places = places
        self._url = url
        self._online: set[str] = set()
        self._told: dict[str, str] = {}
        self._toggles: list[str] = []

    async def run(self) -> None:
        """Report and read until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report)
            nursery.start_soon(self._read)

    async def _report(self) -> None:
        async with open_presence(*self._places[0], instance="syncer") as worker:
            while True:
                for user in self._toggles:
                    (worker.end if user in self._online else worker.start)(user)
                    self._online ^= {user}
                self._toggles.clear()
                await trio.sleep(0.02)

    async def _read(self) -> None:
        """Who keeps the last row of each user begins at the beginning after a reset (docs/presence.md)."""
        while True:
            self._told.clear()
            with suppress(ReplicadError):
                async with (
                    open_client(*self._places[-1], name="presence") as client,
                    client.follow({"presence": "EARLIEST"}) as follower,
                ):
                    async for event in follower:
                        if isinstance(event, Reset):
                            break
                        if isinstance(event, RowBatch):
                            self._told.update(json.loads(row)[:2] for row in event.rows)
            await trio.sleep(AGAIN)

    def toggle(self, rng: random.Random) -> None:
        """A user comes, or goes."""
        self._toggles.append(f"@u{rng.randrange(USERS)}:x")

    async def problem(self, tables: Mapping[str, Iterable[Row]]) -> str | None:
        """Who syncs is online, and nobody else."""
        told = {user for user, state in self._told.items() if state == "online"}
        return None if told == self._online else f"online are {sorted(self._online)}; the stream says {self._told}"

    def trace(self) -> str:
        """What the database says."""
        with suppress(AssertionError):
            return psql(self._url, "TABLE replicad.presence_user", "TABLE replicad.presence_seen")
        return ""


def prepare(url: str) -> None:
    """What the bystanders need in the database."""
    psql(as_daemon(url), ENABLE)
    psql(url, MAKE_THINGS)


Bystander = Sender | CacheWorker | OnlineUsers
