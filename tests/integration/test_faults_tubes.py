"""Faults around tubes and their workers, each caused for real: kills, cuts, a full disk, open transactions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.worker import Batch, Worker, WorkerSettings
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.protocol.connection import Timing
from tests.commands import replicad_async
from tests.conftest import PATIENCE
from tests.daemons import Daemon
from tests.full_disk import UNLIMITED, limit_files

from .clients.proxy import FaultProxy
from .conftest import Connect
from .test_faults_daemon import serving

TTL = 2.0
QUICK = WorkerSettings(
    batch_ids=5, memory=50_000, lease_ttl=TTL, poll=1.0, tries=3, backoff_first=0.01, backoff_cap=0.2
)


@pytest.fixture
async def items(database: Database, daemon: Daemon) -> Database:
    """A table `items` attached to a tube of one partition."""
    await make_items(database)
    return database


async def make_items(database: Database) -> None:
    await schema.install(database, "tube")
    await database.execute("SELECT tube.tube_ensure_exists('items')")
    await database.execute(
        "CREATE TABLE items (id bigint PRIMARY KEY, value int);"
        "SELECT tube.tube_table_ensure_attached('items', 'items', 0)"
    )


class Downstream:
    """Ids as they were written, by several workers; it would notice an id at two of them at once."""

    def __init__(self) -> None:
        self.written: Counter[int] = Counter()
        self.busy: Counter[int] = Counter()
        self.hangs_at: int | None = None
        self.hung = trio.Event()

    async def handle(self, batch: Batch) -> None:
        ids = [touch.id for touch in batch.touches]
        self.busy.update(ids)
        assert max(self.busy.values()) == 1
        try:
            if self.hangs_at in ids:
                self.hangs_at = None
                self.hung.set()
                await trio.sleep_forever()
            self.written.update(ids)
        finally:
            self.busy.subtract(ids)


async def until_empty(database: Database) -> None:
    with trio.fail_after(PATIENCE):
        while await database.fetch_value("SELECT count(*) FROM tube.items"):
            await trio.sleep(0.05)


@asynccontextmanager
async def working(port: int, handle: Callable[[Batch], Any], timing: Timing | None = None) -> AsyncIterator[Worker]:
    worker = Worker(
        lambda: open_client("127.0.0.1", port, name="worker", timing=timing), "items", handle, settings=QUICK
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        yield worker
        nursery.cancel_scope.cancel()


async def test_a_killed_workers_ids_come_again_and_its_partition_is_taken_over_when_the_lease_is_over(
    items: Database, daemon: Daemon
) -> None:
    await items.execute("INSERT INTO items SELECT id, 1 FROM generate_series(1, 30) AS id")
    address = daemon.addresses[0]
    script = Path(__file__).with_name("killed_worker.py")
    process = await trio.to_thread.run_sync(
        lambda: subprocess.Popen(
            [sys.executable, str(script), address.host, str(address.port), "items", "25"],
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    assert process.stdout is not None
    said: list[str] = []
    with trio.fail_after(PATIENCE):
        while "begin 25" not in said:  # it has done others and hangs in the middle of a batch
            said.append((await trio.to_thread.run_sync(process.stdout.readline)).strip())
    process.kill()
    process.wait()
    process.stdout.close()
    assert "end 1" in said
    downstream = Downstream()
    async with working(address.port, downstream.handle):
        await until_empty(items)
    assert downstream.written.keys() >= {25, 26, 27, 28, 29, 30}
    assert downstream.written.keys() | {int(line.split()[1]) for line in said if line.startswith("end")} == set(
        range(1, 31)
    )


async def test_of_a_worker_that_the_network_cuts_off_nothing_runs_any_more_when_another_takes_over(
    items: Database, start_daemon: Callable[..., Any]
) -> None:
    downstream = Downstream()
    downstream.hangs_at = 7
    async with start_daemon(ping_interval=0.2, peer_timeout=1.0) as daemon:
        port = daemon.addresses[0].port
        with FaultProxy(port) as proxy:
            async with working(proxy.port, downstream.handle, Timing(0.2, 1.0)) as cut_off:
                await items.execute("INSERT INTO items SELECT id, 1 FROM generate_series(1, 20) AS id")
                with trio.fail_after(PATIENCE):
                    await downstream.hung.wait()
                proxy.frozen = True
                assert downstream.busy[7] == 1
                async with working(port, downstream.handle):  # its claims wait for the lease
                    await until_empty(items)
                assert cut_off.statistics.parked == 0
    assert downstream.written.keys() == set(range(1, 21))
    assert downstream.written[7] == 1


# Bytes of a file: less than the log has. More than a segment of shared memory, which is a file, too: a recovery that
# cannot make one ends, and PostgreSQL 18 then waits for it for ever.
FULL = 1_900_000


async def test_a_full_disk_costs_no_ack_and_it_recovers_by_itself(tmp_path: Path, postgres_folder: Path) -> None:
    """A limit to the size of files makes writes of Postgres fail as a full disk does: it cannot write its log, crashes,
    and cannot start again before there is room."""
    downstream = Downstream()
    with serving(tmp_path, "--data-folder", str(postgres_folder)) as daemon:
        _, port = await daemon.wait_ready()
        with EmbeddedPostgres(postgres_folder) as server:
            async with open_database(server.url, size=2, application_name="test") as database:
                await make_items(database)
                await database.execute("INSERT INTO items SELECT id, 1 FROM generate_series(1, 100) AS id")
                while await database.fetch_value(
                    "SELECT (pg_walfile_name_offset(pg_current_wal_lsn())).file_offset NOT BETWEEN 2e6 AND 14e6"
                ):
                    await database.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 1000000))")
            reached, go_on, log = trio.Event(), trio.Event(), tmp_path / "serve.log"

            async def handle(batch: Batch) -> None:
                reached.set()
                await go_on.wait()
                await downstream.handle(batch)

            async with working(port, handle) as worker:
                with trio.fail_after(PATIENCE):
                    await reached.wait()
                limit_files(daemon.process.pid, FULL)  # and whatever it starts from now on
                limit_files(server.pid(), FULL)
                go_on.set()
                full = False
                with trio.move_on_after(PATIENCE):
                    while not full:
                        assert worker.statistics.acked_pods == 0
                        await trio.sleep(0.05)
                        full = all(word in log.read_text() for word in ("database_away", "File too large"))
                assert full, log.read_text()
                with trio.move_on_after(PATIENCE):
                    while worker.statistics.acked_pods == 0:
                        for pid in (daemon.process.pid, server.pid()):  # again and again: a server may just be starting
                            limit_files(pid, UNLIMITED)
                        await trio.sleep(0.2)
                assert worker.statistics.acked_pods, f"{worker.statistics}\n{log.read_text()}"
            async with open_database(server.url, size=1, application_name="test") as database:
                assert await database.fetch_value("SELECT count(*) FROM tube.items") == 0
        with trio.fail_after(PATIENCE):
            while "database_back" not in log.read_text():
                await trio.sleep(0.05)
    assert downstream.written.keys() == set(range(1, 101))


async def test_a_transaction_that_stays_open_holds_back_its_tube_only_and_is_named(
    items: Database, database_url: str, netcat: Connect
) -> None:
    await items.execute("SELECT tube.tube_ensure_exists('others')")
    async with netcat() as nc:
        await nc.expect("SERVER .*")
        await nc.send("CLAIM items 0/1", "CLAIM others 0/1")
        terms = [line.split()[3] for line in await nc.expect("LEASE items .*", "LEASE others .*")]
        async with items.connection() as connection:
            await connection.execute("BEGIN")
            await connection.execute("INSERT INTO items VALUES (1, 1)")
            await items.execute("INSERT INTO items VALUES (2, 1)")
            await items.execute("SELECT tube.others_touch(0, ARRAY[3], 'T')")
            await nc.send(f"PODS others 0/1 {terms[1]} wait=10")
            await nc.expect(r'RDATA tube:others .*"ids":\[3\].*', "CURSOR .* 1")
            await nc.send(f"PODS items 0/1 {terms[0]} wait=0.5")
            await nc.expect("CURSOR .* 0")
            row = await top(database_url, "items")
            assert row["writer"].startswith("pid ")
            assert "(replicad test)" in row["state"]
            await connection.execute("PREPARE TRANSACTION 'orphan'")
        row = await top(database_url, "items")
        assert "by prepared transaction 'orphan'" in row["state"]
        assert "held back" not in (await top(database_url, "others"))["state"]
        await items.execute("COMMIT PREPARED 'orphan'")
        await nc.send(f"PODS items 0/1 {terms[0]} wait=10")
        await nc.expect(r'RDATA tube:items .*"ids":\[1\].*', r'RDATA tube:items .*"ids":\[2\].*', "CURSOR .* 2")


async def top(url: str, tube: str) -> dict[str, Any]:
    done = await replicad_async("top", "--json", "--warn", "0", "--database", url)
    [row] = [row for row in map(json.loads, done.stdout.splitlines()) if row["tube"] == tube]
    return row  # type: ignore[no-any-return]
