"""Ids that are reserved ahead of their rows: positions wait for them, and an id that lost its cover is refused."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from itertools import count
from typing import Any

import asyncpg
import pytest
import trio
from adbc_driver_postgresql import dbapi

from replicad.errors import StreamRefused, UnknownStream
from replicad.postgres import schema
from replicad.postgres.bridge import Connection, Database, open_database
from replicad.postgres.horizon import HolderKind, Horizon, Reading
from replicad.streams import blocking, registry, writers
from replicad.streams.registry import Method
from replicad.streams.writers import open_writer

SEED_EXAMPLE = [
    ("reserve", 2, 1), ("reserve", 3, 1), ("complete", 3, 1), ("complete", 2, 3), ("reserve", 4, 3), ("reserve", 5, 3),
    ("reserve", 6, 3), ("complete", 5, 3), ("complete", 4, 5), ("complete", 6, 6),
]  # fmt: skip


# True once there is no session of writer one; kills it until then.
KILL_ONE = """
SELECT count(pg_terminate_backend(pid)) = 0 FROM pg_stat_activity
WHERE application_name = 'one' AND datname = current_database() AND pid <> pg_backend_pid()
"""


async def until(db: Database, sql: str) -> None:
    """Wait for a query to become true."""
    with trio.fail_after(10):
        while not await db.fetch_value(sql):
            await trio.sleep(0.005)


class Facts:
    """A reserved stream `facts` with an instance column, and a reader that trusts the horizon and checks it."""

    def __init__(self, db: Database, url: str, horizon: Horizon, stream: registry.Stream) -> None:
        self.db, self.url, self.horizon, self.stream = db, url, horizon, stream
        self.position = 0
        self.rows: set[int] = set()

    async def poll(self) -> Reading:
        """Poll, read the new rows, and see that none had turned up at or below the old position."""
        reading = (await self.horizon.poll())["facts"]
        assert reading.position is not None
        found = {row["id"] for row in await self.db.fetch("SELECT id FROM facts WHERE id <= $1", reading.position)}
        late = {number for number in found - self.rows if number <= self.position}
        assert not late, f"{late} turned up at or below {self.position}"
        self.position, self.rows = reading.position, found
        return reading

    async def insert(self, *ids: int, via: Database | Connection | None = None, instance: str = "one") -> None:
        await (via or self.db).execute("INSERT INTO facts SELECT unnest($1::bigint[]), $2", list(ids), instance)

    async def spend(self, n: int) -> None:
        """Move the sequence on, as other writers do."""
        await self.db.execute("SELECT nextval('facts_id_seq') FROM generate_series(1, $1)", n)

    @asynccontextmanager
    async def transaction(self, name: str = "somebody") -> AsyncIterator[Connection]:
        """A connection in a transaction; what the test leaves open is rolled back."""
        async with self.db.connection() as connection:
            await connection.execute("SELECT set_config('application_name', $1, false)", name)
            await connection.execute("BEGIN")
            yield connection

    async def locks(self, of: str | None = None) -> int:
        """How many advisory locks there are, in all or of sessions of that name."""
        return int(
            await self.db.fetch_value(
                "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
                " LEFT JOIN pg_stat_activity a ON a.pid = l.pid"
                " WHERE l.locktype = 'advisory' AND d.datname = current_database()"
                " AND ($1::text IS NULL OR a.application_name = $1)",
                of,
            )
        )


@pytest.fixture
async def facts(database_url: str) -> AsyncIterator[Facts]:
    async with open_database(database_url, size=20, application_name="replicad test") as db:
        await schema.install(db, "stream", "replicad")
        await db.execute("CREATE TABLE facts (id bigserial PRIMARY KEY, instance_name text)")
        stream = (
            await registry.add(db, "facts", "facts", "id", instance_column="instance_name", method=Method.RESERVATION)
        ).stream
        numbers = await registry.ensure_writers(db, stream, ["one", "two", "three"])
        # A clock on which every forced flush is due at once, so that no position waits for the next poll.
        async with Horizon(db, now=count(0, 0.1).__next__) as horizon:
            horizon.watch("facts", registry.horizon_source(stream), published=0, writers=numbers)
            yield Facts(db, database_url, horizon, stream)


# --- positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["one"], ["one", "two", "three"]])
async def test_positions_follow_the_example_of_the_definition(facts: Facts, names: list[str]) -> None:
    await facts.db.execute("SELECT setval('facts_id_seq', 1)")
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(open_writer(facts.db, "facts", name)) for name in names]
        blocks: dict[int, AsyncExitStack] = {}
        for action, number, expected in SEED_EXAMPLE:
            writer = opened[number % len(opened)]
            if action == "reserve":
                blocks[number] = AsyncExitStack()
                assert await blocks[number].enter_async_context(writer.get_next()) == number
                await facts.insert(number, instance=writer.instance)
            else:
                await blocks.pop(number).aclose()
            assert (await facts.poll()).position == expected, (action, number)
            if len(opened) == 1:
                assert writer.get_current_token() == expected
            seen = await writer.positions()
            assert (seen.minimum, seen.maximum) == (expected, max(seen.per_writer.values()))
    assert facts.rows == {2, 3, 4, 5, 6}
    assert await facts.locks() == 0


async def test_a_writer_holds_back_its_own_position_and_a_stranger_that_of_all(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one") as one, open_writer(facts.db, "facts", "two") as two:
        async with one.get_next_mult(3) as ids:
            async with two.get_next() as mine:
                await facts.insert(mine, instance="two")
            assert (two.get_current_token(), one.get_current_token()) == (4, 0)
            assert one.get_minimum_and_maximum() == (0, ids[-1])
            reading = await facts.poll()
            assert (reading.position, reading.maximum) == (0, 4)
            assert reading.per_writer == {"one": 0, "two": 4, "three": 4}
            assert reading.held_by is not None
            assert (reading.held_by.kind, reading.held_by.application_name) == (HolderKind.RESERVATION, "one")
            assert await two.positions() == writers.Positions({"one": 0, "two": 4, "three": 4}, 0, 4)
            async with facts.transaction("somebody else") as stranger:
                await stranger.execute("INSERT INTO facts VALUES (replicad.stream_next('facts'))")
                await facts.spend(1)
                assert (await two.positions()).per_writer == {"one": 0, "two": 4, "three": 4}
                assert (await facts.poll()).per_writer == {"one": 0, "two": 4, "three": 4}
        assert (await facts.poll()).per_writer == {"one": 6, "two": 6, "three": 6}


async def test_ids_are_complete_after_failure_and_cancellation_too(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one") as writer:
        with pytest.raises(ZeroDivisionError):
            async with writer.get_next():
                raise ZeroDivisionError
        with trio.move_on_after(0.05) as scope:
            async with writer.get_next_mult(2):
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert writer.get_current_token() == 3
        assert (await facts.poll()).position == 3
        assert await facts.locks() == 0


async def test_many_tasks_share_a_writer_with_one_lock_and_a_bound_on_what_is_in_flight(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one", max_in_flight=10) as writer:
        most = 0

        async def write() -> None:
            nonlocal most
            async with writer.get_next() as number:
                most = max(most, writer.statistics().in_flight)
                await facts.insert(number)
                # a lock and its certificate, twice while they are handed over, however many ids are in flight
                assert 2 <= await facts.locks(of="one") <= 4

        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(write)
            for _ in range(10):
                await facts.poll()
        assert 2 <= most <= 10
        assert writer.statistics() == writers.WriterStatistics(in_flight=0, connected=1, lost=0)
    assert (await facts.poll()).position == 60
    assert len(facts.rows) == 60


# --- forms in the caller's transaction, and without async --------------------------------------------------


async def test_an_id_is_reserved_inside_the_callers_own_asyncpg_transaction(facts: Facts) -> None:
    async def program(step: Callable[[str], None]) -> None:
        connection = await asyncpg.connect(facts.url)
        with pytest.raises(StreamRefused, match="begin it"):
            await writers.next_id(connection, "facts")
        transaction = connection.transaction()
        await transaction.start()
        number = await writers.next_id(connection, "facts")
        more = await writers.next_ids(connection, "facts", 3)
        assert (number, more) == (1, (2, 3, 4))
        await connection.executemany("INSERT INTO facts VALUES ($1)", [(i,) for i in (4, 1, 3)])
        await asyncio.to_thread(step, "written")
        await transaction.commit()
        await asyncio.to_thread(step, "committed")
        with pytest.raises(asyncpg.PostgresError, match="not reserved"):
            await connection.execute("INSERT INTO facts VALUES (2)")
        await connection.close()

    positions: dict[str, int | None] = {}
    token = trio.lowlevel.current_trio_token()

    def step(name: str) -> None:
        positions[name] = trio.from_thread.run(facts.poll, trio_token=token).position

    # An asyncio of its own, in a thread that inherits nothing of the bridge's.
    await trio.to_thread.run_sync(lambda: contextvars.Context().run(asyncio.run, program(step)))
    assert positions == {"written": 0, "committed": 4}
    assert facts.rows == {1, 3, 4}


async def test_an_id_is_reserved_inside_a_transaction_of_our_own_connections_too(facts: Facts) -> None:
    async with facts.transaction() as connection:
        number = await writers.next_id(connection, "facts")
        ids = await writers.next_ids(connection, "facts", 2)
        await facts.insert(number, *ids, via=connection)
        assert (await facts.poll()).position == 0
        await connection.execute("COMMIT")
    assert (await facts.poll()).position == 3
    assert facts.rows == {1, 2, 3}


async def test_programs_without_async_follow_the_same_example(facts: Facts) -> None:
    await facts.db.execute("SELECT setval('facts_id_seq', 1)")

    def program(poll: Callable[[], Any]) -> None:
        writer = blocking.BlockingWriter(dbapi.connect(facts.url), "facts", "one")
        with writer:
            blocks: dict[int, ExitStack] = {}
            for action, number, expected in SEED_EXAMPLE:
                if action == "reserve":
                    blocks[number] = ExitStack()
                    assert blocks[number].enter_context(writer.get_next()) == number
                else:
                    blocks.pop(number).close()
                assert poll().position == expected, (action, number)
                assert writer.get_current_token() == writer.positions().minimum == expected
        with dbapi.connect(facts.url) as connection:
            number = blocking.next_id(connection, "facts")
            assert blocking.next_ids(connection, "facts", 2) == (number + 1, number + 2)
            with connection.cursor() as cursor:
                cursor.execute(f"INSERT INTO facts VALUES ({number})")
            assert poll().position == 6
            connection.commit()
            assert poll().position == number + 2

    await trio.to_thread.run_sync(lambda: program(lambda: trio.from_thread.run(facts.poll)))
    assert facts.rows == {7}
    assert await facts.locks() == 0


async def test_threads_share_a_blocking_writer(facts: Facts) -> None:
    def program() -> None:
        with blocking.BlockingWriter(dbapi.connect(facts.url), "facts", "one") as writer:
            found: list[int] = []

            def write() -> None:
                for n in range(1, 6):
                    with writer.get_next_mult(n) as ids:
                        found.extend(ids)

            threads = [threading.Thread(target=write) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(found) == list(range(1, 91))
            assert writer.get_current_token() == 90

    await trio.to_thread.run_sync(program)
    assert (await facts.poll()).position == 90


# --- what protects an id, and what does not ----------------------------------------------------------------


async def test_an_id_stays_covered_when_another_session_inserts_it_and_its_writer_is_gone(facts: Facts) -> None:
    async with facts.transaction() as inserter:
        async with open_writer(facts.db, "facts", "one") as writer:
            async with writer.get_next() as number:
                await facts.spend(50)
                await facts.poll()
                await facts.insert(number, via=inserter)
            # complete, but the row is not committed; and no poll has seen both locks
        await facts.spend(50)
        assert (await facts.poll()).position == 0
        await inserter.execute("COMMIT")
    assert (await facts.poll()).position == 101
    assert facts.rows == {number}


async def test_what_is_still_in_flight_stays_covered_when_older_ids_complete(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one") as writer, facts.transaction("one") as inserter:
        async with AsyncExitStack() as first:
            await first.enter_async_context(writer.get_next())
            await facts.spend(50)
            async with writer.get_next() as later:
                await facts.spend(50)
                await facts.poll()
                await first.aclose()  # the lock moves from 0 to 51
                assert (await facts.poll()).position == 51
                await facts.insert(later, via=inserter)
                await inserter.execute("COMMIT")
        assert (await facts.poll()).position == 102


async def test_an_id_that_outlived_its_reservation_is_refused(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one") as writer:
        async with writer.get_next() as late:
            pass
        async with writer.get_next() as number:
            assert (await facts.poll()).position == late
            with pytest.raises(StreamRefused, match=f"id {late} of stream facts is not reserved.*stream_next"):
                await facts.insert(late)
            with pytest.raises(StreamRefused, match="not reserved"):
                await facts.insert(number, late)
            await facts.insert(number)
    with pytest.raises(StreamRefused, match="not reserved"):
        await facts.db.execute("INSERT INTO facts DEFAULT VALUES")
    await facts.poll()
    with pytest.raises(StreamRefused, match="not reserved"):
        await facts.db.execute("UPDATE facts SET id = nextval('facts_id_seq')")
    await facts.db.execute("UPDATE facts SET id = id, instance_name = 'x'")
    await facts.db.execute("UPDATE facts SET id = replicad.stream_next('facts')")
    assert (await facts.poll()).position == 5
    assert facts.rows == {5}


async def test_a_session_that_is_called_after_a_writer_may_insert_only_that_writers_ids(facts: Facts) -> None:
    # What it holds back is that writer's position alone, and another's may be beyond the id already.
    async with open_writer(facts.db, "facts", "one") as writer, writer.get_next() as number:
        async with facts.transaction("two") as other:
            assert (await facts.poll()).per_writer == {"one": 0, "two": 1, "three": 1}
            with pytest.raises(StreamRefused, match="of writer one, and this session is called two"):
                await facts.insert(number, via=other, instance="one")
        with pytest.raises(StreamRefused, match="not reserved"):
            await facts.insert(number, instance="two")
        for name in ("one", "nobody that is known"):
            async with facts.transaction(name) as fitting:
                await facts.insert(number, via=fitting, instance="one")
                assert (await facts.poll()).per_writer["one"] == 0


async def test_a_bound_that_another_transaction_holds_covers_nobody_else(facts: Facts) -> None:
    # What another transaction holds may be stale: read before, and locked after, a position beyond it was published.
    async with facts.transaction() as other:
        await other.execute("SELECT replicad.stream_next('facts')")
        number = await facts.db.fetch_value("SELECT nextval('facts_id_seq')")
        with pytest.raises(StreamRefused, match="not reserved"):
            await facts.insert(number)


async def test_the_bound_of_a_session_is_read_again_after_it_was_locked(facts: Facts) -> None:
    # Between the reading of the last value and the lock, others may take ids and a position beyond may be published;
    # here the lock waits that long. The certificate must speak of the value that was read when the lock was there.
    async with facts.transaction() as blocker:
        key = await facts.db.fetch_value("SELECT replicad.stream_lock_key($1, 0)", facts.stream.number)
        await blocker.execute("SELECT pg_advisory_xact_lock($1)", key)
        reserved = trio.Event()
        bounds: list[int] = []

        async def reserve(connection: Connection) -> None:
            bounds.append(await connection.fetch_value("SELECT bound FROM replicad.stream_reserve('facts', 1)"))
            reserved.set()

        async with facts.db.connection() as connection, trio.open_nursery() as nursery:
            nursery.start_soon(reserve, connection)
            await until(facts.db, "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
            await facts.spend(7)
            await facts.poll()
            await blocker.execute("COMMIT")
            with trio.fail_after(10):
                await reserved.wait()
            assert bounds == [7]
            with pytest.raises(StreamRefused, match="not reserved"):
                await facts.insert(5)
            await facts.insert(8)


async def test_the_lock_passes_hand_over_hand_to_what_is_still_in_flight(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one") as writer, facts.transaction() as blocker:
        async with AsyncExitStack() as first, trio.open_nursery() as nursery:
            await first.enter_async_context(writer.get_next())
            await facts.spend(4)
            async with writer.get_next() as later:
                key = await facts.db.fetch_value("SELECT replicad.stream_lock_key($1, 5)", facts.stream.number)
                await blocker.execute("SELECT pg_advisory_xact_lock($1)", key)
                nursery.start_soon(first.aclose)
                await until(facts.db, "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
                assert (await facts.poll()).position == 0, "the old lock stays until the new one is there"
                await blocker.execute("COMMIT")
                await until(facts.db, "SELECT count(*) = 2 FROM pg_locks WHERE locktype = 'advisory' AND granted")
                assert (await facts.poll()).position == 5
        assert later == 6


async def test_a_certificate_without_its_lock_covers_nothing(facts: Facts) -> None:
    # Locks of a session that ends go one by one.
    async with facts.transaction() as dying:
        number = facts.stream.number
        await dying.execute("SELECT pg_advisory_xact_lock_shared(replicad.stream_lock_key($1, 0, true))", number)
        await facts.spend(1)
        with pytest.raises(StreamRefused, match="not reserved"):
            await facts.insert(1)


async def test_an_id_kept_over_the_rollback_of_its_savepoint_is_refused(facts: Facts) -> None:
    async with facts.transaction() as writer:
        await writer.execute("SAVEPOINT s")
        kept = await writer.fetch_value("SELECT replicad.stream_next('facts')")
        await writer.execute("ROLLBACK TO s")
        assert (await facts.poll()).position == kept, "rolled back, the id is finished"
        with pytest.raises(StreamRefused, match="not reserved"):
            await facts.insert(kept, via=writer)
    async with facts.transaction() as writer:
        await writer.execute("SELECT replicad.stream_next('facts')")
        await writer.execute("SAVEPOINT s")
        kept = await writer.fetch_value("SELECT replicad.stream_next('facts')")
        await writer.execute("ROLLBACK TO s")
        assert (await facts.poll()).position == 1
        await facts.insert(kept, via=writer)  # covered by what was taken before the savepoint
        await writer.execute("COMMIT")
    assert (await facts.poll()).position == 3
    assert facts.rows == {kept}


async def test_a_stray_setting_does_not_pass_for_a_reservation(facts: Facts) -> None:
    setting = await facts.db.fetch_value("SELECT setting FROM replicad.stream")
    async with facts.db.connection() as writer:
        before = await writer.fetch_value("SELECT pg_current_xact_id()::text")
        for value in ("0:0", f"{before}:0", "", "nonsense", ":", "1:x"):
            await writer.execute("SELECT set_config($1, $2, false)", setting, value)
            with pytest.raises(StreamRefused, match="not reserved"):
                await writer.execute("INSERT INTO facts DEFAULT VALUES")
            await writer.execute("BEGIN")
            await writer.execute("INSERT INTO facts VALUES (replicad.stream_next('facts'))")
            assert (await facts.poll()).held_by is not None, "the lock was taken in spite of it"
            await writer.execute("COMMIT")


async def test_a_transaction_takes_one_lock_however_many_ids_it_takes(facts: Facts) -> None:
    async with facts.transaction() as writer:
        await writer.execute("INSERT INTO facts SELECT replicad.stream_next('facts') FROM generate_series(1, 20000)")
        await writer.execute("INSERT INTO facts SELECT unnest(replicad.stream_next_mult('facts', 10000))")
        assert await facts.locks() == 1
        assert (await facts.poll()).position == 0
        await writer.execute("COMMIT")
    assert (await facts.poll()).position == 30_000


async def test_prepared_transactions_keep_their_reservation(facts: Facts, database_url: str) -> None:
    gid = database_url.rpartition("/")[2]
    async with facts.transaction() as writer:
        await writer.execute("INSERT INTO facts VALUES (replicad.stream_next('facts'))")
        await facts.poll()
        await writer.execute(f"PREPARE TRANSACTION '{gid}'")
    async with open_writer(facts.db, "facts", "one") as session, facts.transaction() as inserter:
        async with session.get_next() as number:
            await facts.insert(number, via=inserter)
            await inserter.execute(f"PREPARE TRANSACTION '{gid} adopted'")
        reading = await facts.poll()
        assert reading.position == 0
        assert reading.held_by is not None
        assert reading.held_by.gid == gid
        await facts.db.execute(f"COMMIT PREPARED '{gid}'")
        assert (await facts.poll()).position == 1
        await facts.db.execute(f"COMMIT PREPARED '{gid} adopted'")
    assert (await facts.poll()).position == 2
    assert facts.rows == {1, 2}


# --- writers that die --------------------------------------------------------------------------------------


async def test_a_writer_that_dies_lets_go_and_goes_on_with_a_new_connection(facts: Facts) -> None:
    async with open_writer(facts.db, "facts", "one") as writer:
        async with writer.get_next() as lost, facts.transaction() as open_before:
            async with writer.get_next() as saved:
                await facts.insert(saved, via=open_before)
                await until(facts.db, KILL_ONE)
                with pytest.raises(StreamRefused, match="not reserved"):
                    await facts.insert(lost)
                await facts.spend(10)
                assert (await facts.poll()).position == lost, "what was inserted before is covered by its transaction"
                await open_before.execute("COMMIT")
                assert (await facts.poll()).position == 12
                async with writer.get_next() as fresh:
                    await facts.insert(fresh)
                    assert (await facts.poll()).position == 12
        assert writer.statistics() == writers.WriterStatistics(in_flight=0, connected=2, lost=2)
        assert (await facts.poll()).position == fresh
        assert facts.rows == {saved, fresh}
        assert writer.get_current_token() == fresh


async def test_a_connection_that_does_not_answer_is_cut_and_the_writer_goes_on(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "COMPLETE_TIMEOUT", 0.1)
    async with open_writer(facts.db, "facts", "one") as writer, facts.transaction() as blocker:
        key = "SELECT pg_advisory_xact_lock(replicad.stream_lock_key($1, 1))"
        async with AsyncExitStack() as first:
            await first.enter_async_context(writer.get_next())
            async with writer.get_next():
                await blocker.execute(key, facts.stream.number)
                await first.aclose()  # cannot take the next bound
                async with writer.get_next() as number:
                    await facts.insert(number)
                    assert (await facts.poll()).position == number - 1
        assert writer.statistics() == writers.WriterStatistics(in_flight=0, connected=2, lost=1)
        assert writer.get_current_token() == number
        assert (await facts.poll()).position == number


async def test_what_cannot_be_reserved_is_refused_with_the_remedy(facts: Facts) -> None:
    await facts.db.execute("CREATE TABLE plain (id bigserial PRIMARY KEY)")
    await registry.add(facts.db, "plain", "plain", "id")
    with pytest.raises(StreamRefused, match=r"plain are not reserved.*lock_watch.*method reservation"):
        async with open_writer(facts.db, "plain"):
            pass
    with pytest.raises(UnknownStream, match=r"'nothing'.*streams: facts, plain"):
        async with open_writer(facts.db, "nothing"):
            pass
    async with open_writer(facts.db, "facts", "one") as writer:
        for n in (0, -1, 10_001):
            with pytest.raises(StreamRefused, match="ask for 1 to 10000"):
                async with writer.get_next_mult(n):
                    pass
        async with writer.get_next_mult(10_000) as ids:
            assert len(ids) == 10_000
        await facts.db.execute("ALTER SEQUENCE facts_id_seq CACHE 10")
        for _ in range(2):  # the first of a session's cache is above its bound, the next is not
            with pytest.raises(StreamRefused, match="CACHE 1"):
                async with writer.get_next(), writer.get_next():
                    pass
        await facts.db.execute("ALTER SEQUENCE facts_id_seq CACHE 1")
    await facts.db.execute(f"SELECT setval('facts_id_seq', {1 << 48})")
    with pytest.raises(StreamRefused, match="281474976710655"):
        await facts.db.execute("SELECT replicad.stream_next('facts')")
