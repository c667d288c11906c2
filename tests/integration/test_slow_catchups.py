"""Clients that take old rows and pods slowly, on a real Postgres: they hold nothing there and delay nobody."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio

from replicad.postgres.bridge import Database
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.roles import DAEMON

from .conftest import Netcat, netcat_to

Start = Callable[..., AbstractAsyncContextManager[Daemon]]

ROWS = 60_000
SNAPSHOTS = (  # of the daemon: how many there are, and for how many seconds the oldest was held
    "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8 FROM pg_stat_activity "
    "WHERE datname = current_database() AND application_name LIKE 'replicad%' AND backend_xmin IS NOT NULL "
    "AND application_name <> 'replicad test'"
)


@asynccontextmanager
async def trickling(daemon: Daemon, *lines: str) -> AsyncIterator[trio.SocketStream]:
    """A client with a small buffer that takes a little of the answer, and then nothing."""
    address = daemon.addresses[0]
    with trio.socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await link.connect((address.host, address.port))
        async with trio.SocketStream(link) as stream:
            await stream.send_all("".join(f"{line}\n" for line in lines).encode())
            assert await stream.receive_some(4096)
            yield stream


async def make_stream(database: Database, row: str = "body") -> None:
    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, instance_name text, body jsonb)")
    await Registry(database).add("events", "public.events", "id", row=row)
    await database.execute(
        f"INSERT INTO events (body) SELECT to_jsonb(repeat('x', 400)) FROM generate_series(1, {ROWS})"
    )


async def catch_up(daemon: Daemon, after: int = 0) -> int:
    """How many rows of `events` follow `after`; waits for the last one."""
    found = 0
    async with netcat_to(daemon) as nc:
        await nc.send(f"REPLICATE events {after}")
        rest = b""
        with trio.fail_after(PATIENCE):
            while True:
                data = await nc.stream.receive_some(1 << 18)
                assert data, "closed by the server"
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"RDATA"):
                        found += 1
                        assert int(line.split(b" ", 4)[3]) == after + found
                if found == ROWS - after:
                    return found


async def test_clients_that_trickle_hold_no_snapshot_and_delay_neither_catch_ups_nor_pods(
    database: Database, start_daemon: Start
) -> None:
    async with start_daemon() as daemon, AsyncExitStack() as stack:
        await make_stream(database)
        await database.execute("SELECT tube.tube_ensure_exists('t', 1)")
        await database.execute(
            "INSERT INTO tube.t (op, shard, ids) SELECT 'U', 0, ARRAY[n] FROM generate_series(1, 9) n"
        )
        await daemon.publisher.find("events")
        for _ in range(12):  # more than there are connections
            await stack.enter_async_context(trickling(daemon, "REPLICATE events EARLIEST"))
        held: list[float] = []

        async def look(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            task_status.started()
            while True:
                held.append(await database.fetch_value(SNAPSHOTS))
                await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            await nursery.start(look)
            assert await catch_up(daemon) == ROWS
            async with netcat_to(daemon) as nc:
                await nc.send("CLAIM t 0/1 ttl=60")
                term = (await nc.until("LEASE .*"))[-1].split()[3]
                await nc.send(f"PODS t 0/1 {term} wait=5")
                assert (await nc.until("CURSOR .*"))[-1].endswith(" 9")
            await trio.sleep(2)
            nursery.cancel_scope.cancel()
        assert len(held) > 10
        assert max(held[len(held) // 2 :]) < 1.0, "a snapshot is held for one piece"
        assert daemon.hub.statistics().closed.get("slow_reader", 0) == 0


async def test_workers_that_trickle_hold_no_snapshot(database: Database, start_daemon: Start) -> None:
    async with start_daemon(tube_connections=1) as daemon, AsyncExitStack() as stack:
        await database.execute("SELECT tube.tube_ensure_exists('t', 1)")
        await database.execute(
            "INSERT INTO tube.t (op, shard, ids) SELECT 'U', 0, array_fill(n::bigint, ARRAY[500]) "
            "FROM generate_series(1, 5000) AS n"
        )
        quick = await stack.enter_async_context(netcat_to(daemon))
        await quick.send("CLAIM t 0/1 ttl=60")
        term = (await quick.until("LEASE .*"))[-1].split()[3]
        for _ in range(3):
            await stack.enter_async_context(trickling(daemon, f"PODS t 0/1 {term} limit=5000 wait=5"))
        seqs = [int(line.split()[3]) for line in await pods(quick, term)]
        assert len(seqs) == 5000
        assert seqs == sorted(set(seqs))
        with trio.fail_after(PATIENCE):
            while await database.fetch_value(SNAPSHOTS) > 0.5:
                await trio.sleep(0.05)


async def pods(nc: Netcat, term: str) -> list[str]:
    """All pods of the tube, in answers of at most 5,000."""
    await nc.send(f"PODS t 0/1 {term} limit=5000 wait=5")
    return [line for line in await nc.until("CURSOR .*") if line.startswith("RDATA")]


@pytest.mark.long
async def test_clients_that_come_back_with_one_token_make_postgres_read_each_row_about_once(
    database: Database, start_daemon: Start
) -> None:
    await database.execute(f"CREATE SEQUENCE reads CACHE 1; GRANT USAGE ON SEQUENCE reads TO {DAEMON}")
    await database.execute(
        "CREATE FUNCTION counted(body jsonb) RETURNS jsonb LANGUAGE sql VOLATILE "
        "AS $$ SELECT CASE WHEN nextval('reads') > 0 THEN to_jsonb(1) END $$"
    )
    async with start_daemon() as daemon:
        await make_stream(database, row="counted(body)")
        await daemon.publisher.find("events")
        with trio.fail_after(PATIENCE):
            while daemon.publisher.served["events"].sent_upto < ROWS:
                await trio.sleep(0.05)
        before: Any = await database.fetch_value("SELECT last_value FROM reads")
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(catch_up, daemon, number % 3)
        read = await database.fetch_value("SELECT last_value FROM reads") - before
        assert ROWS - 3 <= read <= 1.2 * ROWS


@pytest.mark.long
async def test_a_burst_that_waits_for_a_slow_reader_holds_no_snapshot_and_lets_others_come_back(
    database: Database, start_daemon: Start
) -> None:
    async with start_daemon(journal_bytes=1 << 20, journal_pace=1, journal_patience=60.0) as daemon:
        await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY, body jsonb)")
        await Registry(database).add("events", "public.events", "id", row="body")
        await daemon.publisher.find("events")
        address = daemon.addresses[0]
        held: list[float] = []
        with trio.socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await slow.connect((address.host, address.port))
            await slow.send(b"REPLICATE events\n")
            async with netcat_to(daemon) as quick:
                await quick.send("REPLICATE events")
                await quick.until("POSITION events .*")
                await database.execute(
                    f"INSERT INTO events (body) SELECT to_jsonb(repeat('x', 400)) FROM generate_series(1, {ROWS})"
                )
                token = int((await quick.until("RDATA events master [0-9]+ .*"))[-1].split()[3])
            for _ in range(150):
                held.append(await database.fetch_value(SNAPSHOTS))
                await slow.recv(1000)
                await trio.sleep(0.02)
            async with netcat_to(daemon) as back:
                await back.send(f"REPLICATE events {token}")
                assert (await back.until("RDATA .*|ERROR .*"))[-1].startswith(f"RDATA events master {token + 1} ")
        assert max(held) < 2.0, "a copy ends before it waits for long; a busy machine adds to it"
        assert await catch_up(daemon) == ROWS
        assert not daemon.troubles.current()
