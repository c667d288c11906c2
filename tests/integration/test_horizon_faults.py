"""Positions through crashes, restarts and standbys, each caused on a Postgres of the test's own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import trio

from replicad.errors import DatabaseError, DatabaseUnavailable, StandbyRefused
from replicad.positions.horizon import HolderKind, Horizon, LockSource, Reading
from replicad.postgres.bridge import Connection, Database, Fence, open_database
from replicad.postgres.embedded import EmbeddedPostgres
from tests import recording
from tests.conftest import PATIENCE, server_folder
from tests.recording import RecordedHorizon, Recorder

pytestmark = pytest.mark.postgres

# The WAL is flushed by commits and barriers only, so that what they leave out is lost in every crash, not in some.
LAZY = {"wal_writer_delay": "10s", "bgwriter_delay": "10s", "autovacuum": "off", "max_prepared_transactions": "8"}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with server_folder() as folder, EmbeddedPostgres(folder, LAZY) as running:
        yield running


@pytest.fixture
async def db(server: EmbeddedPostgres) -> AsyncIterator[Database]:
    async with open_database(server.url, size=6, application_name="replicad test") as opened:
        await opened.execute("DROP TABLE IF EXISTS t; CREATE TABLE t (id bigserial PRIMARY KEY)")
        yield opened


@pytest.fixture
async def horizon(db: Database) -> AsyncIterator[Horizon]:
    # A clock on which every forced flush is due at once, so that no position waits for the next poll.
    async with Horizon(db, now=count(0, 0.1).__next__) as opened:
        yield opened


async def watch(db: Database, horizon: Horizon, published: int | None = None) -> None:
    table, sequence = await db.fetch_row("SELECT 't'::regclass::oid, 't_id_seq'::regclass::oid") or (0, 0)
    horizon.watch("t", LockSource(table, sequence), published=published)


async def poll(horizon: Horizon) -> Reading:
    return (await horizon.poll())["t"]


async def insert(db: Database) -> int:
    return int(await db.fetch_value("INSERT INTO t DEFAULT VALUES RETURNING id"))


def crash(server: EmbeddedPostgres) -> None:
    """An immediate shutdown: as a crash, nothing is written on the way; then a start, with recovery."""
    pid = server.pid()
    assert pid is not None
    os.kill(pid, signal.SIGQUIT)
    deadline = time.monotonic() + PATIENCE
    while server.pid() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.ensure_running()


async def published_after_recovery(horizon: Horizon) -> Reading:
    """The first reading after a crash; a horizon says at most a few times that the server is away."""
    for _ in range(5):
        try:
            return await poll(horizon)
        except DatabaseUnavailable:
            continue
    raise AssertionError("the horizon did not come back")


@pytest.mark.parametrize(
    "burn",
    [
        "BEGIN; INSERT INTO t SELECT FROM generate_series(1, 5); ROLLBACK",
        "SET synchronous_commit = off; INSERT INTO t SELECT FROM generate_series(1, 5)",
    ],
)
async def test_ids_at_or_below_a_published_position_are_not_issued_again_after_a_crash(
    server: EmbeddedPostgres, db: Database, horizon: Horizon, burn: str
) -> None:
    await watch(db, horizon)
    await insert(db)
    assert (await poll(horizon)).position == 1
    async with db.connection() as writer:
        await writer.execute("SELECT setval('t_id_seq', 33)")  # the ids that its first use has logged ahead are used up
        await writer.execute(burn)
    position = (await poll(horizon)).position
    assert position == 38
    crash(server)
    with pytest.raises(DatabaseUnavailable):
        await db.fetch_value("SELECT 1")
    assert await insert(db) > position
    assert (await published_after_recovery(horizon)).fork is None


async def test_flushes_are_forced_at_most_fifty_times_a_second(db: Database) -> None:
    now = 10.0
    async with Horizon(db, now=lambda: now) as horizon, db.connection() as writer:
        await watch(db, horizon, published=0)
        await writer.execute("SET synchronous_commit = off")
        positions = []
        for _ in range(4):
            await writer.execute("INSERT INTO t DEFAULT VALUES")
            positions.append((await poll(horizon)).position)
            now += 0.01
    assert positions == [1, 1, 3, 3]


async def test_what_was_read_before_a_crash_and_not_published_counts_no_more(
    server: EmbeddedPostgres, db: Database, horizon: Horizon
) -> None:
    await watch(db, horizon)
    await insert(db)
    assert (await poll(horizon)).position == 1
    async with db.connection() as holder:
        await holder.execute("BEGIN; INSERT INTO t DEFAULT VALUES")
        async with db.connection() as writer:
            await writer.execute("SELECT setval('t_id_seq', 40); SET synchronous_commit = off")
            await writer.execute("INSERT INTO t DEFAULT VALUES")
        reading = await poll(horizon)
        assert (reading.position, reading.last_value) == (1, 41)
        crash(server)
    await poll_until_new(db)
    async with db.connection() as slow:
        await slow.execute("SELECT setval('t_id_seq', 1); BEGIN; INSERT INTO t VALUES (DEFAULT)")
        await db.execute("SELECT setval('t_id_seq', 50)")
        assert (await published_after_recovery(horizon)).position == 1
        await slow.execute("COMMIT")
    assert (await poll(horizon)).position == 2  # a new run: what no row has is not known to be given out
    assert await insert(db) == 51
    assert (await poll(horizon)).position == 51


async def poll_until_new(db: Database) -> None:
    """Use up the connections that the crash has broken."""
    for _ in range(8):
        try:
            await db.fetch_value("SELECT 1")
        except DatabaseUnavailable:
            continue


async def test_orphaned_prepared_transaction_holds_the_position_over_a_crash(
    server: EmbeddedPostgres, db: Database, horizon: Horizon
) -> None:
    await watch(db, horizon)
    await poll(horizon)
    async with db.connection() as writer:
        await writer.execute("BEGIN; INSERT INTO t DEFAULT VALUES; PREPARE TRANSACTION 'orphan'")
    await insert(db)
    assert (await poll(horizon)).position == 0
    crash(server)
    await poll_until_new(db)
    await insert(db)
    for _ in range(2):
        reading = await published_after_recovery(horizon)
        assert reading.position == 0
        assert reading.held_by is not None
        assert (reading.held_by.kind, reading.held_by.gid) == (HolderKind.PREPARED, "orphan")
    await db.execute("COMMIT PREPARED 'orphan'")
    assert (await poll(horizon)).position == (await poll(horizon)).last_value


async def test_transaction_that_prepares_while_listed_keeps_its_bound_over_a_crash_of_the_poller(
    db: Database,
) -> None:
    async with db.connection() as writer:
        await writer.execute("BEGIN; INSERT INTO t DEFAULT VALUES")
        async with Horizon(db) as first:
            await watch(db, first, published=0)
            await insert(db)
            assert (await poll(first)).position == 0
        await writer.execute("PREPARE TRANSACTION 'p'")
    async with Horizon(db) as second:
        await watch(db, second, published=0)
        assert (await poll(second)).position == 0
        await db.execute("ROLLBACK PREPARED 'p'")
        assert (await poll(second)).position == 2


async def test_killed_backend_of_the_poller_costs_no_position(db: Database, horizon: Horizon) -> None:
    await watch(db, horizon)
    await insert(db)
    assert (await poll(horizon)).position == 1
    async with db.connection() as writer:
        await writer.execute("BEGIN; INSERT INTO t DEFAULT VALUES")
        await insert(db)
        await db.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE query LIKE '%pg_sequence_last_value%' AND pid <> pg_backend_pid()"
        )
        assert (await published_after_recovery(horizon)).position == 1
        await writer.execute("COMMIT")
    assert (await poll(horizon)).position == 3


async def test_cancelled_poll_costs_no_position(db: Database, horizon: Horizon) -> None:
    await watch(db, horizon)
    await insert(db)
    await poll(horizon)
    async with db.connection() as writer:
        await writer.execute("BEGIN; INSERT INTO t DEFAULT VALUES")
        for steps in range(12):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cancel_after, scope, steps)
                    await poll(horizon)
                    nursery.cancel_scope.cancel()
            await insert(db)
        assert (await poll(horizon)).position == 1
        await writer.execute("COMMIT")
    assert (await poll(horizon)).position == 14


async def test_a_recording_has_what_a_poll_has_read_that_failed_at_its_end(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_value = Connection.fetch_value

    async def refuse_to_flush(self: Connection, query: str, *values: object) -> object:
        if "pg_logical_emit_message" in query:
            raise DatabaseError("no space left for the WAL")
        return await fetch_value(self, query, *values)

    with Recorder(tmp_path / "polls") as recorder:
        async with RecordedHorizon(db, now=count(0, 0.1).__next__, recorder=recorder) as horizon:
            await watch(db, horizon)
            assert (await poll(horizon)).position == 0
            await db.execute("BEGIN; INSERT INTO t DEFAULT VALUES; ROLLBACK")
            with monkeypatch.context() as patch:
                patch.setattr(Connection, "fetch_value", refuse_to_flush)
                with pytest.raises(DatabaseError):
                    await poll(horizon)
            await db.execute("CREATE TABLE now ()")  # flushes; what follows is not on disk when the next poll looks
            await db.execute("BEGIN; CREATE TABLE later (); ROLLBACK")
            assert (await poll(horizon)).position == 1
    lines = (tmp_path / "polls").read_text().splitlines()
    assert sum('"last_value": 1' in line for line in lines) >= 1
    assert list(recording.check(lines)) == []


async def cancel_after(scope: trio.CancelScope, steps: int) -> None:
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_standby_is_refused_with_the_reason(postgres_folder: Path) -> None:
    with EmbeddedPostgres(postgres_folder, LAZY):
        pass
    (postgres_folder / "data" / "standby.signal").touch()
    with EmbeddedPostgres(postgres_folder, LAZY) as standby:
        async with open_database(standby.url, size=2, application_name="x") as db, Horizon(db) as horizon:
            horizon.watch("t", LockSource(1, 2))
            for _ in range(2):
                with pytest.raises(StandbyRefused, match="connect to its primary"):
                    await horizon.poll()
            assert db.statistics().idle == db.statistics().open


async def test_errors_of_a_poll_leave_the_pool_as_it_was(db: Database) -> None:
    async with Horizon(Failing(db)) as horizon:  # type: ignore[arg-type]
        await watch(db, horizon)
        for _ in range(20):
            with pytest.raises(DatabaseError):
                await horizon.poll()
    assert db.statistics().idle == db.statistics().open


class Failing:
    """A Database whose connections fail at every statement of the poller."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.fence = db.fence

    def connection(self, *, leader: bool) -> FailingConnection:
        return FailingConnection(self._db)


class FailingConnection:
    def __init__(self, db: Database) -> None:
        self._borrowed = db.connection()

    async def __aenter__(self) -> FailingConnection:
        self._connection: Connection = await self._borrowed.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._borrowed.__aexit__(None, None, None)

    async def execute(self, sql: str) -> str:
        return await self._connection.execute("SELECT 1 / 0")


_CRASHES = """DO $$ BEGIN EXECUTE format('COPY (SELECT 1) TO PROGRAM %L', 'kill -9 ' || pg_backend_pid()); END $$"""


async def test_a_run_of_the_server_ends_with_the_crash_of_a_process_and_not_with_a_reset_of_statistics(
    server: EmbeddedPostgres,
) -> None:
    """The pools of the daemon look at `Fence.server`; `stream_incarnation` has the same parts."""

    async def run() -> tuple[str | None, str | None]:
        async with open_database(server.url, size=1, application_name="replicad test", fence=Fence()) as db:
            async with db.connection(leader=True) as connection:
                return connection.server, await connection.fetch_value("SELECT pg_postmaster_start_time()::text")

    before, started = await run()
    async with open_database(server.url, size=1, application_name="replicad test") as db:
        for kind in ("bgwriter", "archiver"):
            await db.execute(f"SELECT pg_stat_reset_shared('{kind}')")
        assert (await run())[0] == before
        with pytest.raises(DatabaseUnavailable):
            await db.execute(_CRASHES)
    with trio.fail_after(PATIENCE):
        while True:
            with suppress(DatabaseError):
                after, started_after = await run()
                break
            await trio.sleep(0.05)
    assert started_after == started
    assert after != before
