"""A whole installation under test: a Postgres, daemons as processes of their own, writers, and clients of all kinds."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from tests import recording
from tests.clock import step
from tests.conftest import PATIENCE, psql
from tests.roles import as_daemon

from .bystanders import Bystander, CacheWorker, OnlineUsers, Sender
from .cluster import Cluster
from .holder import Address, Holder
from .ledger import Difference, Order
from .readers import Events, OverRedis, Pages, Reader, SparkSource, Tail
from .tables import ALTERED, LONE, TABLES, Table, Writing, rows_of

# Until clients and tables must agree. It is a limit for what hangs: agreement takes a second or two.
AGREEMENT = float(os.environ.get("REPLICAD_FORKS_PATIENCE", PATIENCE))

SERVER_NAME = "torture"
_LOOK = 0.05  # seconds between two looks at what all clients have

T = TypeVar("T")


class Disagreement(AssertionError):
    """A client has not what the tables have, or was sent what it may not be sent."""


class Server:
    """`replicad serve` at one address for good, however often it is started."""

    def __init__(self, folder: Path, url: str, number: int, more: Sequence[str] = ()) -> None:
        self.number = number
        self.address: Address = ("127.0.0.1", _free_port())
        self.http: Address = ("127.0.0.1", _free_port())
        self._more = list(more)
        self.ready = folder / f"ready{number}"
        self.log = folder / f"serve{number}.log"
        self.recordings: list[Path] = []  # of what each run has read and published
        self.clock = folder / f"clock{number}"  # by how much its wall clock is wrong
        step(self.clock, 0)
        self._url = url
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.ready.unlink(missing_ok=True)
        polls = self.log.with_name(f"polls{self.number}.{len(self.recordings)}")
        polls.touch()  # it may be killed before it begins
        self.recordings.append(polls)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "tests.clock",
                        str(self.clock),
                        "tests.recording",
                        str(polls),
                        "serve",
                        "--database",
                        as_daemon(self._url),
                        "--log-format",
                        "json",
                    ),
                    *("--listen", f"{self.address[0]}:{self.address[1]}", "--ready-file", str(self.ready)),
                    *("--wait-for-database", str(PATIENCE)),  # which may be restarted at this moment
                    *("--http", f"{self.http[0]}:{self.http[1]}", "--server-name", SERVER_NAME, *self._more),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def wait_ready(self) -> None:
        assert self._process is not None
        with trio.fail_after(PATIENCE):
            while not self.ready.exists():
                assert self._process.poll() is None, f"the daemon ended: {self.said()}"
                await trio.sleep(0.02)

    def said(self, last: int = 6000) -> str:
        """The end of its log, without the sessions that come and go."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(line for line in lines if '"event": "session_' not in line)[-last:]

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def suspend(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self._process is None:
            return
        self._signal(how)
        self._signal(signal.SIGCONT)
        await trio.to_thread.run_sync(self._process.wait, PATIENCE)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


class World:
    """See `open_world`."""

    def __init__(self, cluster: Cluster, servers: list[Server], tables: tuple[Table, ...], seed: int) -> None:
        self.cluster = cluster
        self.servers = servers
        self.tables = tables
        self.holders: list[Holder] = []
        self.readers: list[Reader] = []
        self.bystanders: list[Bystander] = []
        self.writing = Writing(cluster.url, seed, tables)
        self.rng = random.Random(f"world {seed}")
        self._nursery: trio.Nursery | None = None

    @property
    def url(self) -> str:
        return self.cluster.url

    def sql(self, text: str) -> str:
        """Run SQL by psql; several commands are one transaction."""
        return psql(self.url, text)

    def hold(self, name: str, order: Order, place: int = 0, streams: Sequence[str] | None = None) -> Holder:
        """Start a client."""
        assert self._nursery is not None
        names = [table.name for table in self.tables] if streams is None else streams
        holder = self._holder(name, order, names)
        holder.place = place
        self.holders.append(holder)
        self._nursery.start_soon(holder.run)
        return holder

    def _holder(self, name: str, order: Order, streams: Sequence[str]) -> Holder:
        return Holder(name, order, streams, [server.address for server in self.servers], self.rng)

    def read_all_ways(self, folder: Path, redis: str | None) -> None:
        """Start a reader of each transport, and the programs beside them."""
        assert self._nursery is not None
        self.writing.pause *= len(self.tables) / len(TABLES) * 2  # what all of these cost, they have
        names = [table.name for table in self.tables]
        tcp = [server.address for server in self.servers]
        http = [server.http for server in self.servers]
        self.readers = [Pages("pages", names, http), Events("events", names, http), Tail("tail", names, tcp)]
        self.readers.append(SparkSource("spark", [LONE.name, ALTERED.name], tcp))
        if redis is not None:
            self.readers.append(OverRedis("redis", names, tcp, redis, SERVER_NAME))
        sender = Sender(ALTERED.name, tcp[0], self.url, folder / "sender.log", self.rng)
        self.bystanders = [sender, CacheWorker(tcp[-1], self.url), OnlineUsers(tcp, self.url)]
        for one in (*self.readers, *self.bystanders):
            self._nursery.start_soon(one.run)
        self._nursery.start_soon(self._move_bystanders)

    async def _move_bystanders(self) -> None:
        while True:
            await self.writing.wait_open()
            for one in self.bystanders:
                if isinstance(one, Sender):
                    one.disturb(self.rng)
                elif isinstance(one, OnlineUsers):
                    one.toggle(self.rng)
                else:
                    self.writing.begin()
                    try:
                        await one.write(self.rng)
                    finally:
                        self.writing.end()
            await trio.sleep(self.rng.random() * 0.2)

    def hold_all_kinds(self, place: int = 0) -> list[Holder]:
        """A client of each kind at one daemon."""
        return [self.hold(f"{order.value}@{place}", order, place) for order in Order]

    async def settle(self, what: str = "", *, say: bool = True) -> None:
        """Let the writers rest, write one more row of everybody, and wait until all clients have what the tables have.

        Raises Disagreement, with what was sent.
        """
        await self.writing.rest()
        await blocking(self.end_prepared)
        if say:
            await blocking(self.write_once)
        tables = {table.name: rows for table in self.tables for rows in [await blocking(rows_of, self.url, table)]}
        deadline = trio.current_time() + AGREEMENT
        while trio.current_time() < deadline:
            if not any(self._differs(client, tables) for client in (*self.holders, *self.readers)):
                break
            await trio.sleep(_LOOK)
        self.check(tables, what)
        for one in self.bystanders:
            while (problem := await one.problem(tables)) and trio.current_time() < deadline:
                await trio.sleep(_LOOK)
            if problem:
                raise Disagreement(f"{what}\n{one.name}: {problem}\n{one.trace()}")
        await self.newcomer(tables, what)

    def _differs(self, client: Holder | Reader, tables: dict[str, Any]) -> dict[str, Difference]:
        """By stream. Rows that an operator removes are not called back."""
        shrink = {table.name for table in self.tables if table.shrinks}
        found = client.compare(tables)
        return {name: one for name, one in found.items() if one.lost or name not in shrink}

    async def newcomer(self, tables: dict[str, Any], what: str) -> None:
        """A client that comes only now has what the tables have, too. Nobody writes. Raises Disagreement."""
        order = random.Random(f"newcomer {what}").choice([Order.NAMED, Order.LINEAR])  # a plain one gets new rows only
        holder = self._holder(f"newcomer {order.value}", order, list(tables))
        deadline = trio.current_time() + AGREEMENT
        async with trio.open_nursery() as nursery:
            nursery.start_soon(holder.run)
            while self._differs(holder, tables) and trio.current_time() < deadline:
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        self._check([holder], tables, what)

    def check(self, tables: dict[str, Any], what: str) -> None:
        """Raise Disagreement where a client has not what the tables have, or has a finding."""
        self._check([*self.holders, *self.readers], tables, what)

    def _check(self, holders: Sequence[Holder | Reader], tables: dict[str, Any], what: str) -> None:
        told: list[str] = []
        for holder in holders:
            for stream, difference in self._differs(holder, tables).items():
                told += [f"{holder.name} {stream}: {difference}; {holder.counts()}", holder.trace(stream)]
            for finding in dict.fromkeys(holder.findings()):
                told.append(f"{holder.name} {finding}")
            if holder.findings() and not self._differs(holder, tables):
                told.append(holder.trace(holder.findings()[0].partition(":")[0]))
        if told:
            raise Disagreement("\n".join([what, *told]))

    def write_once(self) -> None:
        """One row of each writer in each table."""
        for writer in ("w1", "w2", "w3"):
            inserts = "; ".join(table.insert() for table in self.tables)
            self.sql(f"SET application_name = '{writer}'; {inserts}")
        for table in self.tables:
            if table.advance():
                self.sql(table.advance())

    def write_rows(self, table: Table, rows: int, writer: str = "w1") -> None:
        """So many rows of one writer."""
        self.sql(f"SET application_name = '{writer}'; {table.insert(rows)}")
        if table.advance():
            self.sql(table.advance())

    async def set_back(self, table: Table, back: int, seer: Holder) -> None:
        """Set a sequence back by so much, with nobody in between, so that a poll of the daemon of `seer` can see it.

        A positions table is seen only after the commit: `seer`, a plain client, is waited for.
        """
        to = self.position_of(table) - back
        await blocking(self.sql, f"BEGIN; {table.set_back(to)}; SELECT pg_sleep(0.3); COMMIT")
        if table.method == "positions_table":
            await self.wait_told(table, to, seer)

    async def wait_told(self, table: Table, to: int, seer: Holder) -> None:
        """Wait until a plain client was told that nobody is beyond an id any more."""
        ledger = seer.ledgers[table.name]
        await self.wait_for(lambda: bool(ledger.at) and max(ledger.at.values()) <= to, f"{table.name} is back at {to}")

    async def wait_reached(self, table: Table, seer: Holder) -> None:
        """Wait until a plain client was told the highest position that there is."""
        highest = int(await blocking(self.sql, table.highest()))
        ledger = seer.ledgers[table.name]  # whose mapping is replaced now and then
        await self.wait_for(lambda: max(ledger.at.values(), default=-1) >= highest, f"{table.name} is at {highest}")

    async def wait_noted(self) -> None:
        """Wait until the database knows that all rows were published, for each writer."""
        noted = (
            "SELECT count(*) FROM replicad.stream_position p JOIN replicad.stream s ON s.number = p.stream "
            "WHERE p.writer = 0 AND p.position >= pg_sequence_last_value(s.sequence)"
        )
        await self.wait_for(lambda: int(self.sql(noted)) >= len(self.tables), "what was published is noted")

    def end_prepared(self) -> None:
        """Commit what was prepared and left."""
        for gid in self.sql("SELECT gid FROM pg_prepared_xacts").splitlines():
            self.sql(f"COMMIT PREPARED '{gid}'")

    def position_of(self, table: Table) -> int:
        """The last id that the table's sequence gave out."""
        return int(self.sql(table.last_id()))

    async def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = trio.current_time() + AGREEMENT
        while not condition():
            assert trio.current_time() < deadline, f"waited in vain until {what}"
            await trio.sleep(0.01)

    async def agree(self) -> None:
        """Wait until all clients have what the tables have; nobody writes."""
        await self.settle("at the beginning", say=False)


@asynccontextmanager
async def open_world(
    folder: Path,
    template: Path,
    *,
    daemons: int = 1,
    tables: tuple[Table, ...] = TABLES,
    seed: int = 0,
    more: Sequence[str] = (),
) -> AsyncIterator[World]:
    """A copy of the template's cluster with `daemons` running, with `more` options."""
    cluster = await blocking(Cluster, folder, template)
    servers = [Server(folder, cluster.url, number, more) for number in range(daemons)]
    world = World(cluster, servers, tables, seed)
    try:
        for server in servers:
            server.start()
        for server in servers:
            await server.wait_ready()
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            world._nursery = nursery
            nursery.start_soon(world.writing.run)
            try:
                yield world
            except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery that would wrap it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        for server in servers:
            await server.end()
            check_recordings(server)
    finally:
        with trio.CancelScope(shield=True):
            for server in servers:
                await server.end()
            await blocking(cluster.close)


def check_recordings(server: Server) -> None:
    """Hold every position that the daemon has published against what it had read. Raises Disagreement."""
    assert any(path.stat().st_size for path in server.recordings), "no poll was recorded"
    for path in server.recordings:
        *lines, _ = path.read_text().split("\n")  # a daemon that was killed leaves half a line
        if problems := list(recording.check(lines)):
            raise Disagreement(f"daemon {server.number} has published what was not safe: {problems[:5]}")


async def blocking(function: Callable[..., T], *args: object, **named: object) -> T:
    """Call what blocks in a thread, to its end."""
    return await trio.to_thread.run_sync(lambda: function(*args, **named))


def long(*values: object) -> Any:
    """A parameter that only `make long` takes."""
    return pytest.param(*values, marks=pytest.mark.long)


def _free_port() -> int:
    """Outside of the range from which the system gives out ports: a client that knocks in vain must not meet itself."""
    rng = random.Random(time.monotonic_ns() ^ os.getpid())
    while True:
        port = rng.randrange(20_000, 32_000)
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                tried.bind(("127.0.0.1", port))
                return port
