"""Our own clients on our own daemons, with everything going on at once: writers, rollbacks, cuts, two daemons."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.events import RowBatch
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.protocol.connection import Timing
from replicad.retry import Backoff
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE
from tests.daemons import Daemon

from .clients.proxy import FaultProxy
from .conftest import Connect, netcat_to

WRITERS = ("alice", "bob", "carol")
KILL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name"
ROWS = 150  # per writer, and about as many that are rolled back


@pytest.fixture
async def facts(database: Database) -> Database:
    """A stream `facts` that several writers write to."""
    await schema.install(database, "stream")
    await database.execute("CREATE TABLE facts (id bigserial PRIMARY KEY, who text, n int)")
    await Registry(database).add("facts", "public.facts", "id", instance_column="who", row="to_json(t.n)")
    return database


async def write(url: str, who: str, known: bool) -> None:
    """One writer: commits of one row or several, rollbacks in between, never in the same rhythm."""
    chance = random.Random(who)
    name = who if known else "stranger"
    async with open_database(url, size=1, application_name=name) as db, db.connection() as connection:
        written = 0
        while written < ROWS:
            rows = min(chance.randint(1, 5), ROWS - written)
            await connection.execute("BEGIN")
            for n in range(written, written + rows):
                await connection.execute("INSERT INTO facts (who, n) VALUES ($1, $2)", who, n)
            await trio.sleep(chance.random() / 200)
            if chance.random() < 0.5:
                await connection.execute("ROLLBACK")
            else:
                await connection.execute("COMMIT")
                written += rows


class Reader:
    """What one follower received, by writer."""

    def __init__(self) -> None:
        self.got: defaultdict[str, list[int]] = defaultdict(list)
        self.tokens: list[int] = []

    @property
    def complete(self) -> bool:
        return all(len(self.got[who]) >= ROWS for who in WRITERS)

    def take(self, event: object) -> None:
        assert isinstance(event, RowBatch), event
        self.got[event.instance] += [int(row) for row in event.rows]
        self.tokens.append(event.token)


@pytest.mark.parametrize("linear", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_every_row_once_and_in_order_through_cuts_kills_and_changes_of_daemon(
    facts: Database, database_url: str, start_daemon: Callable[..., Any], linear: bool
) -> None:
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(start_daemon()) for _ in range(2)]
        chance = random.Random(7)
        proxy = FaultProxy(daemons[0].addresses[0].port, [chance.randint(50, 20_000) for _ in range(15)], seed=3)
        stack.enter_context(proxy)
        client = await stack.enter_async_context(
            open_client("127.0.0.1", proxy.port, name="reader", timing=Timing(0.5, 2.0))
        )
        reader = Reader()

        async def read() -> None:
            quickly = Backoff(first=0.01, cap=0.05)
            async with client.follow({"facts": "EARLIEST"}, linear, backoff=quickly) as follower:
                async for event in follower:
                    reader.take(event)
                    proxy.target = daemons[len(reader.tokens) // 40 % 2].addresses[0].port
                    if reader.complete:
                        return

        async with trio.open_nursery() as nursery:
            for who in WRITERS:
                nursery.start_soon(write, database_url, who, who == "alice")
            with trio.fail_after(PATIENCE):
                await read()
        assert dict(reader.got) == {who: list(range(ROWS)) for who in WRITERS}
        assert proxy.cuts > 0
        if linear:
            assert reader.tokens == sorted(reader.tokens)


async def test_a_cut_that_nobody_is_told_of_is_noticed_by_both_sides(
    facts: Database, start_daemon: Callable[..., Any]
) -> None:
    """Half-open: the connection stands, but nothing goes through it any more."""
    async with start_daemon(ping_interval=0.2, peer_timeout=1.0) as daemon:
        with FaultProxy(daemon.addresses[0].port) as proxy:
            async with open_client("127.0.0.1", proxy.port, name="reader", timing=Timing(0.2, 1.0)) as client:
                async with client.follow({"facts": "EARLIEST"}, backoff=Backoff(first=0.05, cap=0.1)) as follower:
                    await facts.execute("INSERT INTO facts (who, n) VALUES ('alice', 0)")
                    assert (await anext(follower)).rows == ["0"]
                    proxy.frozen = True
                    await facts.execute("INSERT INTO facts (who, n) VALUES ('alice', 1)")
                    with trio.fail_after(PATIENCE):
                        while not daemon.hub.statistics().closed.get("peer_silent"):
                            await trio.sleep(0.05)
                    proxy.frozen = False
                    with trio.fail_after(PATIENCE):
                        assert (await anext(follower)).rows == ["1"]


async def test_a_clock_that_jumps_by_an_hour_changes_nothing(
    facts: Database, daemon: Daemon, netcat: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await facts.execute("SELECT tube.tube_ensure_exists('t')")
    async with netcat() as nc:
        await nc.expect("SERVER .*")
        await nc.send("PING 1", "CLAIM t 0/1 ttl=30")
        [lease] = await nc.expect("LEASE t 0/1 .*")
        term = lease.split()[3]
        really = time.time
        for jump in (3600, -3600):
            monkeypatch.setattr(time, "time", lambda jump=jump: really() + jump)
            async with netcat_to(daemon) as rival:
                await rival.expect("SERVER .*")
                await rival.send("CLAIM t 0/1 wait=2")
                await rival.expect("ERROR lease_held: .*")
            await nc.send(f"PODS t 0/1 {term}")
            await nc.expect("CURSOR t 0/1 0\\.0 0")
    assert daemon.hub.statistics().closed.get("peer_silent") is None


async def test_a_killed_backend_of_a_writer_publishes_nothing_and_the_others_go_on(
    facts: Database, database_url: str, start_daemon: Callable[..., Any]
) -> None:
    async with start_daemon() as daemon, netcat_to(daemon) as nc:
        await nc.expect("SERVER .*")
        await nc.send("REPLICATE facts EARLIEST")
        await nc.expect("WRITERS .*")
        async with open_database(database_url, size=1, application_name="victim") as db, db.connection() as victim:
            await victim.execute("BEGIN; INSERT INTO facts (who, n) VALUES ('alice', 1)")
            await facts.execute("INSERT INTO facts (who, n) VALUES ('bob', 2)")
            await facts.execute(f"{KILL} = 'victim'")
            seen = await nc.until("RDATA facts bob 2 2")
            assert not any(" alice " in line for line in seen)
            victim.terminate()
        await facts.execute(f"{KILL} IN ('replicad', 'replicad ack', 'replicad catch-up')")
        await facts.execute("INSERT INTO facts (who, n) VALUES ('bob', 3)")
        await nc.until("RDATA facts bob 3 3")


class OldWorker:
    """A replication client as Synapse 1.79 has it, in its own words: what it sends, and what it makes of lines.

    It knows six commands, drops RDATA of a stream until it saw a POSITION for it, and takes any other line for an
    error.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rows: dict[str, list[Any]] = {}
        self.tokens: dict[str, int] = {}
        self.pending: dict[str, list[Any]] = {}
        sock.sendall(b"NAME synapse.app.generic_worker\nPING 1490197665618\nREPLICATE \n")

    def line(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "POSITION":
            stream, _instance, _prev, new = rest.split(" ")
            self.tokens[stream] = int(new)
            self.rows.setdefault(stream, [])
        elif command == "RDATA":
            stream, _instance, token, row = rest.split(" ", 3)
            if stream not in self.rows:
                return
            self.pending.setdefault(stream, []).append(json.loads(row))
            if token != "batch":
                self.rows[stream] += self.pending.pop(stream)
                self.tokens[stream] = int(token)
        elif command == "SERVER":
            assert rest == "example.com"
        else:
            assert command in ("PING", "REMOTE_SERVER_UP"), line


@pytest.fixture
async def old_worker(daemon: Daemon) -> AsyncIterator[OldWorker]:
    address = daemon.addresses[0]
    with socket.create_connection((address.host, address.port), timeout=10) as sock:
        yield OldWorker(sock)


async def test_a_client_of_the_original_protocol_follows_without_knowing_the_difference(
    facts: Database, old_worker: OldWorker
) -> None:
    await facts.execute("CREATE TABLE caches (id bigserial PRIMARY KEY, body jsonb)")
    await Registry(facts).add("caches", "public.caches", "id", row="body")
    invalidation = ["get_user_by_id", ["@test:localhost:8823"], 1490197670513]

    def read() -> None:
        rest = ""
        while len(old_worker.rows.get("caches", [])) < 2:
            *lines, rest = (rest + old_worker.sock.recv(65536).decode()).split("\n")
            for line in lines:
                old_worker.line(line)

    async def commit() -> None:
        with trio.fail_after(PATIENCE):
            while "caches" not in old_worker.rows:
                await trio.sleep(0.01)
        for _ in range(2):
            await facts.execute("INSERT INTO caches (body) VALUES ($1::jsonb)", json.dumps(invalidation))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(commit)
        await trio.to_thread.run_sync(read)
    assert old_worker.rows["caches"] == [invalidation, invalidation]
    assert old_worker.tokens["caches"] == 2
