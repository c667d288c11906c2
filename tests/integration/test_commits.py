"""What a commit of ours waits for: always the local disk, and a standby only where a client acts on the answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
import trio

from replicad.caches.writing import invalidate
from replicad.config.settings import ServerSettings
from replicad.errors import DatabaseError
from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from replicad.presence.repository import PresenceRepository
from replicad.presence.roster import OnlineChange
from replicad.redis.work import PublisherBook
from replicad.sender.items import START, Order, Pdu
from replicad.sender.store import Entry, FactBatch, SenderStore, open_store
from replicad.streams.registry import ReaderAck, Registry, Stream
from replicad.tubes.commands import Part
from replicad.tubes.leases import LeaseBook, LeaseHolder
from replicad.tubes.pods import PodBook
from tests.conftest import FAST, PATIENCE, install, psql, server_folder
from tests.daemons import open_daemon
from tests.roles import ROLES, as_daemon

from .conftest import netcat_to

# Only what waits for its commit reaches the disk.
LAZY = {"synchronous_commit": "off", "wal_writer_delay": "10s", "restart_after_crash": "on"}


@pytest.fixture(scope="module")
def lazy() -> Iterator[EmbeddedPostgres]:
    """A server whose commits do not wait for the disk, and a database in it with all parts."""
    with server_folder() as folder, EmbeddedPostgres(folder, FAST | LAZY) as server:
        psql(server.url, ROLES)
        install(as_daemon(server.url), *schema.PARTS)
        psql(
            server.url,
            "CREATE TABLE events (id bigserial PRIMARY KEY, instance_name text, body text)",
            "SELECT replicad.stream_add('events', 'public.events', 'id')",
            "SELECT replicad.cache_enable(ARRAY['w1'])",
            "SELECT replicad.writer_enable('events', 4)",
            "SELECT replicad.presence_enable(NULL, NULL, NULL, NULL)",
            "SELECT tube.tube_ensure_exists('a', 1)",
        )
        yield server


@pytest.fixture
def lazy_url(lazy: EmbeddedPostgres) -> str:
    return lazy.url


@dataclass(frozen=True)
class Everything:
    """An installation with all parts, in which each kind of write is possible."""

    db: Database
    stream: Stream
    store: SenderStore
    term: int  # of the lease of tube a


@pytest.fixture
async def everything(lazy_url: str) -> AsyncIterator[Everything]:
    async with open_database(lazy_url, size=4, application_name="replicad test") as db:
        await db.execute("DELETE FROM tube.tube_lease; DELETE FROM tube.a; DELETE FROM replicad.writer_member")
        await db.execute("DELETE FROM replicad.presence_user; DELETE FROM replicad.redis_publisher")
        await db.execute("DELETE FROM replicad.federation_sender; DELETE FROM replicad.federation_destination")
        await db.execute("SELECT tube.a_touch(0, ARRAY[1, 2]::bigint[], 'T'), tube.a_touch(0, ARRAY[3]::bigint[], 'T')")
        lease = await LeaseBook(db, "tube").claim("a", Part(0, 1), LeaseHolder("me", "c1"), 60.0, [])
        await Registry(db).continue_streams()  # a crash before may have ended the generation
        stream = await Registry(db).load_stream("events")
        with suppress(DatabaseError):  # the crash ends the session that it lets go of at the end
            async with open_store(db, "replicad", "s1", ["s1"], ["events"]) as store:
                await store.begin("events", 0)
                yield Everything(db, stream, store, lease.term)


async def note_ack(at: Everything) -> None:
    await Registry(at.db).note_acks([ReaderAck(at.stream.name, at.stream.epoch, "s1", 1)])
    assert await Registry(at.db).acks(at.stream.name)


async def note_position(at: Everything) -> None:
    assert await Registry(at.db).publish(at.stream, 1, {})


async def begin_generation(at: Everything) -> None:
    assert (await Registry(at.db).fork(at.stream, "a test")).epoch != at.stream.epoch


async def take_slots(at: Everything) -> None:
    async with at.db.connection() as connection:
        term = await connection.fetch_value("SELECT term FROM replicad.writer_join('events', 'w1', '1 h')")
        seen = [row["term"] for row in await connection.fetch("SELECT term FROM replicad.writer_slot ORDER BY slot")]
        await flush(at.db)
        await connection.fetch(
            "SELECT * FROM replicad.writer_take('events', 'w1', $1, '{0,1,2,3}', $2::bigint[])", term, seen
        )


async def claim_lease(at: Everything) -> None:
    await at.db.execute("DELETE FROM tube.tube_lease")
    await flush(at.db)
    await LeaseBook(at.db, "tube").claim("a", Part(0, 1), LeaseHolder("you", "c2"), 60.0, [])


async def ack_pods(at: Everything) -> None:
    seqs = [row["seq"] for row in await at.db.fetch("SELECT seq FROM tube.a ORDER BY seq")]
    assert await pods(at).ack("a", Part(0, 1), at.term, seqs[:1]) == 1


async def park(at: Everything) -> None:
    seq = await at.db.fetch_value("SELECT min(seq) FROM tube.a")
    assert await pods(at).park("a", Part(0, 1), at.term, seq=seq, ids=[], tries=1, error="bad") == 2


def pods(at: Everything) -> PodBook:
    return PodBook(at.db, at.db, at.db, "tube")


async def record_facts(at: Everything) -> None:
    recording = FactBatch()
    recording.add(Pdu(Order(1, 0), None, "{}"), ["example.com"])
    recording.newcomers.append("example.com")
    await at.store.record("events", 1, recording)


async def note_transaction(at: Everything) -> None:
    await at.store.write([Entry(name="example.com", success=START, serial=1)])


async def change_presence(at: Everything) -> None:
    book = PresenceRepository(at.db, "replicad")
    assert await book.apply(await book.enlist("d1"), [OnlineChange("@a", True, 0)])


async def publish_to_redis(at: Everything) -> None:
    assert await PublisherBook(at.db, "replicad", "example.com", claims=at.db).claim("me", None) is not None


async def forget_cached(at: Everything) -> None:
    async with at.db.connection() as connection, connection.transaction():
        await invalidate(connection, "f", ["x"])


async def flush(db: Database) -> None:
    async with db.connection() as connection:
        await connection.execute("SET synchronous_commit = local")
        await connection.execute("SELECT pg_logical_emit_message(true, 'test', '')")


Write = Callable[[Everything], Awaitable[None]]
WRITES: list[Write] = [
    note_ack, note_position, begin_generation, take_slots, claim_lease, ack_pods, park, record_facts, note_transaction,
    change_presence, publish_to_redis, forget_cached,
]  # fmt: skip

# What a crash must not change.
TABLES = """
    replicad.stream_ack replicad.stream_position replicad.stream_generation replicad.writer_member replicad.writer_slot
    replicad.federation_fact replicad.federation_destination replicad.presence_user replicad.redis_publisher
    replicad.cache_invalidation tube.tube_lease tube.tube_parked tube.a
"""
STATE = f"SELECT {', '.join(f'(SELECT json_agg(t)::text FROM {table} t)' for table in TABLES.split())}"


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
async def test_what_is_acted_upon_is_not_lost_by_a_crash_although_commits_need_not_wait(
    everything: Everything, write: Write
) -> None:
    db = everything.db
    await flush(db)
    lazily = "INSERT INTO events (body) VALUES ('lost')"
    await write(everything)
    before = await db.fetch_row(STATE)
    await db.execute(lazily)  # the crash shows that it loses what nothing has flushed
    await crash(db)
    assert tuple(await db.fetch_row(STATE)) == tuple(before)
    assert await db.fetch_value("SELECT count(*) FROM events") == 0


async def crash(db: Database) -> None:
    """Kill a process of the server, which makes it start all of them anew."""
    began = await db.fetch_value("SELECT pg_backend_pid()")
    os.kill(began, signal.SIGKILL)
    with trio.fail_after(PATIENCE):
        while True:
            with suppress(DatabaseError):
                if await db.fetch_value("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", began):
                    return
            await trio.sleep(0.02)


async def test_each_table_of_ours_that_survives_a_crash_raises_the_setting(everything: Everything) -> None:
    found = await everything.db.fetch(
        """
        SELECT n.nspname || '.' || c.relname AS name FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname IN ('replicad', 'tube') AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
            AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = 'on_disk')
        """
    )
    # Pods are read up to a position only, and a position waits for the disk; their writers choose for themselves.
    assert [row["name"] for row in found] == ["tube.a"]


@pytest.fixture
def standby_away(lazy_url: str) -> Iterator[str]:
    """The same server, whose commits wait for a standby that is not there."""
    names, level = "ALTER SYSTEM SET synchronous_standby_names", "ALTER DATABASE postgres SET synchronous_commit"
    psql(lazy_url, "SET synchronous_commit = local", f"{level} = 'remote_apply'")
    psql(lazy_url, f"{names} = 'away'", "SELECT pg_reload_conf()")
    yield lazy_url
    psql(lazy_url, f"{names} = ''", "SELECT pg_reload_conf()")
    psql(lazy_url, f"{level} = 'off'")


def restart(server: EmbeddedPostgres) -> None:
    """Stop the server and start it again."""
    pid = server.pid()
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + PATIENCE
    while server.pid() is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    server.ensure_running()


async def waiting(db: Database) -> int:
    """How many sessions wait for the standby."""
    found: int = await db.fetch_value("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
    return found


async def test_streams_are_served_after_a_restart_although_the_standby_is_away(
    standby_away: str, lazy: EmbeddedPostgres, settings: ServerSettings
) -> None:
    insert = "SET synchronous_commit = local", "INSERT INTO events (body) VALUES ('new')"
    most = 0

    async def watch(db: Database) -> None:
        nonlocal most
        while True:
            with suppress(DatabaseError):
                most = max(most, await waiting(db))
            await trio.sleep(0.01)

    async with (
        open_database(standby_away, size=2, application_name="replicad test") as db,
        open_daemon(settings, standby_away) as daemon,
        netcat_to(daemon) as reader,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(watch, db)
        await reader.send("REPLICATE")
        await reader.until("POSITION events .*")
        psql(standby_away, *insert)
        await reader.until("RDATA events .*new.*")
        await trio.to_thread.run_sync(restart, lazy)
        psql(standby_away, *insert)
        await reader.until("RDATA events .*new.*")
        nursery.cancel_scope.cancel()
    assert most == 0


async def test_a_renewal_waits_for_no_standby_and_a_new_term_does(standby_away: str) -> None:
    where, me, you = ("a", Part(0, 1)), LeaseHolder("me", "c1"), LeaseHolder("you", "c2")
    async with (
        open_database(standby_away, size=2, application_name="replicad own", local_commits=True) as own,
        open_database(standby_away, size=2, application_name="replicad test") as db,
        trio.open_nursery() as nursery,
    ):
        await own.execute("DELETE FROM tube.tube_lease")
        lease = await LeaseBook(own, "tube").claim(*where, me, 60.0, [])
        book = LeaseBook(db, "tube", own=own)
        await book.renew(*where, lease.term)
        assert [kept.term for kept in await book.keep("a", [lease.term])] == [lease.term]
        assert await book.release(*where, lease.term)
        nursery.start_soon(book.claim, *where, you, 60.0, [])
        with trio.fail_after(PATIENCE):
            while await waiting(own) == 0:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
