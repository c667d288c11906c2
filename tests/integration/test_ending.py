"""SIGTERM ends workers, presence and sharded writers in order, unless the program handles it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from replicad.postgres.bridge import Database
from replicad.presence.repository import PresenceRepository
from replicad.sharding import admin
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE
from tests.daemons import Daemon

WORKER = """
import sys, {library}
from replicad import open_client
from replicad.client.worker import Worker
async def handle(batch): pass
worker = Worker(lambda: open_client(sys.argv[1], int(sys.argv[2]), name="w"), "queue", handle)
{run}
"""
RUNS = {"trio": "trio.run(worker.run)", "asyncio": "asyncio.run(worker.run())"}
PRESENCE = """
import sys, trio
from replicad.presence import open_presence
async def main():
    async with open_presence(sys.argv[1], int(sys.argv[2]), instance="w") as reporter:
        reporter.start("@ann:example.org")
        await trio.sleep_forever()
trio.run(main)
"""
SHARDED = """
import sys, trio
from replicad.postgres.bridge import open_database
from replicad.sharding import open_sharded_writer
async def main():
    async with open_database(sys.argv[3], size=2, application_name="w") as db:
        async with open_sharded_writer(db, "events", "w", ttl=600):
            await trio.sleep_forever()
trio.run(main)
"""


@contextmanager
def started(text: str, daemon: Daemon, url: str) -> Iterator[subprocess.Popen[bytes]]:
    host, port = daemon.addresses[0].host, str(daemon.addresses[0].port)
    with subprocess.Popen([sys.executable, "-c", text, host, port, url]) as process:
        try:
            yield process
        finally:
            process.kill()


async def ended(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with trio.fail_after(PATIENCE):
        while process.poll() is None:
            await trio.sleep(0.01)
    assert process.returncode == -signal.SIGTERM


async def until(database: Database, query: str, wanted: object, process: subprocess.Popen[bytes] | None = None) -> None:
    with trio.fail_after(PATIENCE):
        while await database.fetch_value(query) != wanted:
            assert process is None or process.poll() is None, "the program has ended"
            await trio.sleep(0.02)


@pytest.mark.parametrize("library", RUNS)
async def test_a_worker_gives_its_leases_back_on_sigterm(
    database: Database, daemon: Daemon, database_url: str, library: str
) -> None:
    await database.execute("SELECT tube.tube_ensure_exists('queue', 2)")
    leases = "SELECT count(*) FROM tube.tube_lease"
    await database.execute("SELECT tube.queue_touch(shard, '{1}', 'T') FROM generate_series(0, 1) shard")
    with started(WORKER.format(library=library, run=RUNS[library]), daemon, database_url) as process:
        await until(database, leases, 2, process)
        await until(database, "SELECT count(*) FROM tube.queue", 0, process)  # so it knows both of its leases
        await ended(process)
        assert await database.fetch_value(leases) == 0


async def test_presence_is_cleared_on_sigterm(database: Database, daemon: Daemon, database_url: str) -> None:
    await PresenceRepository(database, "replicad").enable()
    with trio.fail_after(PATIENCE):
        while daemon.presence.statistics().roster is None:  # it has noticed
            await trio.sleep(0.01)
    syncing = "SELECT count(*) FROM replicad.presence_seen"
    with started(PRESENCE, daemon, database_url) as process:
        await until(database, syncing, 1, process)
        await ended(process)
        await until(database, syncing, 0)


async def test_a_sharded_writer_leaves_on_sigterm(database: Database, daemon: Daemon, database_url: str) -> None:
    await database.execute("CREATE TABLE events (id bigserial PRIMARY KEY)")
    await Registry(database).add("events", "events", "id")
    await admin.enable(database, "events")
    members = "SELECT count(*) FROM replicad.writer_member"
    with started(SHARDED, daemon, database_url) as process:
        slots = "SELECT count(*) FROM replicad.writer_slot WHERE owner = 'w'"
        await until(database, slots, 256, process)  # it has joined, and keeps its share
        await ended(process)
        assert await database.fetch_value(members) == 0


async def test_a_program_that_handles_sigterm_ends_as_it_likes(
    database: Database, daemon: Daemon, database_url: str
) -> None:
    await database.execute("SELECT tube.tube_ensure_exists('queue', 1)")
    own = WORKER.format(
        library="trio, signal, os", run="signal.signal(15, lambda *_: os._exit(3)); trio.run(worker.run)"
    )
    with started(own, daemon, database_url) as process:
        await until(database, "SELECT count(*) FROM tube.tube_lease", 1, process)
        process.send_signal(signal.SIGTERM)
        with trio.fail_after(PATIENCE):
            while process.poll() is None:
                await trio.sleep(0.01)
        assert process.returncode == 3
