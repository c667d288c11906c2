"""What protects a reserved id until its transaction ends, and what only looks so: an id without cover is refused."""

from __future__ import annotations

from contextlib import AsyncExitStack
from itertools import combinations

import pytest
import trio

from replicad.errors import StreamRefused
from replicad.postgres.bridge import Connection, load_sql
from replicad.streams.writer import open_writer
from tests.conftest import PATIENCE

from .conftest import Facts, until

LOCKS = (
    "FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
    "WHERE datname = current_database() AND locktype = 'advisory' AND l.classid::bigint >> 16 >= 12800"  # no proofs
)


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
            await until(facts.db, f"SELECT count(*) > 0 {LOCKS} AND NOT granted")
            await facts.spend(7)
            await facts.poll()
            await blocker.execute("COMMIT")
            with trio.fail_after(PATIENCE):
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
                await until(facts.db, f"SELECT count(*) > 0 {LOCKS} AND NOT granted")
                assert (await facts.poll()).position == 0, "the old lock stays until the new one is there"
                await blocker.execute("COMMIT")
                await until(facts.db, f"SELECT count(*) = 2 {LOCKS} AND granted")
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


async def test_a_transaction_takes_two_locks_however_many_ids_it_takes(facts: Facts) -> None:
    async with facts.transaction() as writer:
        await writer.execute("INSERT INTO facts SELECT replicad.stream_next('facts') FROM generate_series(1, 20000)")
        await writer.execute("INSERT INTO facts SELECT unnest(replicad.stream_next_mult('facts', 10000))")
        assert await facts.locks() == 2, "a bound and its proof"
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


async def test_a_reservation_counts_while_its_transaction_is_being_prepared(facts: Facts) -> None:
    # Postgres hands the locks over one after the other, some without the pid already. Each such moment is made here.
    assert facts.stream.proof_key is not None
    poll = load_sql("horizon_holders").replace("{moved}", "'{}'::oid[]")
    poll = poll.replace("{key}", f"(SELECT s.key FROM {facts.stream.proof_key} AS s)")
    held = await facts.db.fetch_value("SELECT pg_get_functiondef('replicad.stream_held'::regproc)")
    locks = ["locktype = 'transactionid'", "classid::bigint >> 16 < 12800", "classid::bigint >> 16 > 20992"]
    columns = "locktype, database, relation, classid, objid, objsubid, virtualtransaction, transactionid, mode, granted"
    async with facts.transaction() as writer:
        await writer.execute("SELECT replicad.stream_next('facts')")
        for count in range(len(locks) + 1):
            for handed in combinations(locks, count):
                pid = f"CASE WHEN NOT ({' OR '.join(handed) or 'false'}) THEN pid END AS pid"
                view = f"FROM (SELECT {columns}, {pid} FROM pg_locks)"
                assert poll.count("FROM pg_locks") == held.count("FROM pg_locks") == 1
                rows = await facts.db.fetch(poll.replace("FROM pg_locks", view), [], [], [], [], [], True, [], [])
                assert [row["number"] for row in rows] == [facts.stream.number], handed
                await facts.db.execute(held.replace("FROM pg_locks", view))
                rows = await facts.db.fetch("SELECT * FROM replicad.stream_held($1)", facts.stream.number)
                assert [row["bound"] for row in rows] == [0], handed
