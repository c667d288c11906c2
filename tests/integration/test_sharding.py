"""Writers that share a stream's keys: what the fence keeps out, and what happens when they come, go, stop and die."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from replicad.errors import DatabaseError, DatabaseUnavailable, InstanceTaken, NotOwner, SchemaMissing, StreamRefused
from replicad.postgres import schema
from replicad.postgres.bridge import Connection, Database, open_database
from replicad.sharding import ShardedWriter, admin, open_sharded_writer, slot_of
from replicad.sharding.holdings import Holdings
from replicad.streams import next_id
from replicad.streams.registry import Method, Registry
from tests.conftest import PATIENCE, psql
from tests.sharding_checker import ROWS, SABOTAGE, check_rows, write_row

pytestmark = pytest.mark.postgres

SLOTS = 16
TTL = 1.0


@pytest.fixture
async def db(database: Database) -> Database:
    """A stream `events` whose writers share 16 slots, written as the checker wants it."""
    await schema.install(database, "stream")
    await database.execute(ROWS)
    await Registry(database).add("events", "events", "id", instance_column="instance")
    await admin.enable(database, "events", SLOTS)
    return database


def key_in(slot: int) -> str:
    return next(key for key in map(str, range(10_000)) if slot_of(key, SLOTS) == slot)


async def until_balanced(*writers: ShardedWriter) -> None:
    with trio.fail_after(PATIENCE):
        while sorted(w.statistics().owned for w in writers) != sorted(
            SLOTS // len(writers) + (n < SLOTS % len(writers)) for n in range(len(writers))
        ):
            await trio.sleep(0.01)


async def take_over(db: Database, instance: str, slot: int) -> list[int]:
    """What another writer does when it holds everybody for dead; returns the new term, if it got the slot."""
    beats = [row["beat"] for row in await db.fetch("SELECT beat FROM replicad.writer_member")]
    await db.execute("SELECT replicad.writer_expel('events', $1::bigint[])", beats)
    member = await db.fetch_value("SELECT term FROM replicad.writer_join('events', $1, '1 h')", instance)
    rows = await db.fetch(
        "SELECT t.term FROM replicad.writer_slot s, "
        "replicad.writer_take('events', $1, $2, ARRAY[$3::integer], ARRAY[s.term]) t WHERE s.slot = $3",
        instance,
        member,
        slot,
    )
    return [row["term"] for row in rows]


async def pass_fence(connection: Connection, key: str, instance: str, term: int) -> None:
    await connection.fetch_value("SELECT replicad.writer_owns('events', $1, $2, $3)", key, instance, term)


async def late_write(db: Database) -> None:
    """A writes; in the middle of it B takes its slot over, if it can, and writes the same key; then A goes on."""
    (before,) = await take_over(db, "a", 3)
    async with db.connection() as connection:
        async with connection.transaction():
            await pass_fence(connection, key_in(3), "a", before)
            await write_row(connection, key_in(3), "a", before)
            for after in await take_over(db, "b", 3):
                async with db.connection() as other, other.transaction():
                    await pass_fence(other, key_in(3), "b", after)
                    await write_row(other, key_in(3), "b", after)


async def test_a_writer_that_is_cancelled_while_it_joins_leaves(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    scope, joined = trio.CancelScope(), Holdings.joined

    def joined_and_cancelled(holdings: Holdings, *args: Any) -> None:
        scope.cancel()
        joined(holdings, *args)

    monkeypatch.setattr(Holdings, "joined", joined_and_cancelled)
    with scope:
        async with open_sharded_writer(db, "events", "a", ttl=600):
            await trio.sleep_forever()
    assert await db.fetch_value("SELECT count(*) FROM replicad.writer_member") == 0


async def test_a_write_in_flight_keeps_its_slot_from_being_taken_over(db: Database) -> None:
    await late_write(db)
    assert await check_rows(db) == 1


async def test_the_checker_finds_writers_without_a_fence(db: Database) -> None:
    await db.execute(SABOTAGE)
    await late_write(db)
    with pytest.raises(AssertionError, match="at the same time"):
        await check_rows(db)


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
async def test_a_zombies_late_write_is_refused_by_the_statement_itself(db: Database, isolation: str) -> None:
    (old,) = await take_over(db, "a", 3)
    async with db.connection() as connection:
        await connection.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        await connection.fetch_value("SELECT count(*) FROM replicad.writer_slot")  # its snapshot, where it keeps one
        assert len(await take_over(db, "b", 3)) == 1
        with pytest.raises((NotOwner, DatabaseError)) as caught:
            await pass_fence(connection, key_in(3), "a", old)
    if isolation == "READ COMMITTED":
        assert "belongs to writer b, not to a" in str(caught.value)
    else:
        assert isinstance(caught.value, DatabaseError)
        assert caught.value.sqlstate == "40001"


async def test_a_writer_that_stops_inside_of_a_transaction_loses_it_after_its_time_to_live(db: Database) -> None:
    async def stop(writer: ShardedWriter) -> None:
        async with writer.owning("k") as connection:
            assert await connection.fetch_value("SHOW idle_in_transaction_session_timeout") == "1s"
            with trio.fail_after(PATIENCE):
                while not connection.is_closed:
                    await trio.sleep(0.01)

    async with open_sharded_writer(db, "events", "a", ttl=TTL) as writer:
        with pytest.raises(DatabaseUnavailable):
            await stop(writer)


async def test_a_writer_that_comes_gets_its_share_and_one_that_goes_gives_it_back_at_once(db: Database) -> None:
    async with open_sharded_writer(db, "events", "a", address="a:1", ttl=30) as first:
        assert first.statistics().owned == SLOTS, "alone, all of them at once"
        async with open_sharded_writer(db, "events", "b", address="b:1", ttl=30) as second:
            await until_balanced(first, second)
            key = next(key for key in map(key_in, range(SLOTS)) if second.owns(key))
            with pytest.raises(NotOwner, match="belongs to writer b at b:1") as caught:
                async with first.owning(key, wait=PATIENCE):  # it is not moving: no wait
                    pass
            assert (caught.value.key, caught.value.owner, caught.value.address) == (key, "b", "b:1")
            moved = first.statistics().given
            assert moved == SLOTS // 2, "no more moved than had to"
        await until_balanced(first)  # long before a time to live has passed
        async with first.owning(key) as connection:
            await write_row(connection, key, "a", first.term(key))
        assert first.statistics().expelled == 0


async def test_no_caller_sees_an_error_while_keys_change_hands(db: Database) -> None:
    """Two sites; whoever does not own a key sends it to the owner, as an application would."""
    done = [0]

    async def write(sites: dict[str, ShardedWriter], key: str, over: trio.Event) -> None:
        at = "a"
        while not over.is_set():
            try:
                async with sites[at].owning(key, wait=PATIENCE) as connection:
                    await write_row(connection, key, at, sites[at].term(key))
                done[0] += 1
            except NotOwner as refused:
                if refused.owner is None:
                    raise  # it waited in vain
                at = refused.owner

    over = trio.Event()
    async with open_sharded_writer(db, "events", "a", ttl=30) as first, trio.open_nursery() as nursery:
        sites = {"a": first}
        for slot in range(3):
            nursery.start_soon(write, sites, key_in(slot), over)
        for _ in range(3):
            async with open_sharded_writer(db, "events", "b", ttl=30) as second:
                sites["b"] = second
                await until_balanced(first, second)
            sites["b"] = first  # gone, and so are its keys
            await until_balanced(first)
        over.set()
    assert await check_rows(db) == done[0] > 30


async def test_a_name_belongs_to_one_process_until_it_is_dead(db: Database) -> None:
    async with open_sharded_writer(db, "events", "a", ttl=0.4):
        with pytest.raises(InstanceTaken, match="under the name a and is alive"):
            async with open_sharded_writer(db, "events", "a", ttl=0.4):
                pass
    await db.execute("SELECT replicad.writer_join('events', 'a', '0.5 s')")
    async with open_sharded_writer(db, "events", "a", ttl=0.4) as again:
        assert again.statistics().owned == SLOTS


async def test_a_write_that_the_fence_refuses_names_the_owner_and_costs_no_connection(db: Database) -> None:
    async with open_sharded_writer(db, "events", "a", ttl=30) as writer:
        term = "nextval('replicad.writer_term_seq')"
        await db.execute(  # behind its back: without a new version
            "INSERT INTO replicad.writer_member (stream, instance, term, beat, ttl, address) "
            f"SELECT stream, 'b', {term}, {term}, '1 h', 'b:1' FROM replicad.writer_sharding;"
            f"UPDATE replicad.writer_slot SET owner = 'b', term = {term}"
        )
        assert writer.owns("k")
        lost = db.statistics().lost
        with pytest.raises(NotOwner):
            async with writer.owning("k"):
                pass
        assert (writer.owns("k"), writer.statistics().refused) == (False, 1)
        await db.execute(f"UPDATE replicad.writer_sharding SET version = {term}")
        with pytest.raises(NotOwner, match="belongs to writer b at b:1") as caught:
            async with writer.owning("k", wait=1):
                pass
        assert (caught.value.owner, db.statistics().lost) == ("b", lost)


async def test_a_writer_taken_for_dead_joins_anew_under_new_terms(db: Database) -> None:
    async with open_sharded_writer(db, "events", "a", ttl=TTL) as writer:
        old = writer.term("k")
        beats = [row["beat"] for row in await db.fetch("SELECT beat FROM replicad.writer_member")]
        await db.execute("SELECT replicad.writer_expel('events', $1::bigint[])", beats)
        with trio.fail_after(PATIENCE):
            while writer.statistics().joined < 2 or writer.term("k") is None:
                await trio.sleep(0.01)
        assert writer.term("k") != old


async def test_a_restart_of_every_session_costs_nobody_his_keys(db: Database, database_url: str) -> None:
    async with open_sharded_writer(db, "events", "a", ttl=TTL) as first:
        async with open_database(database_url, size=3, application_name="b") as other:
            async with open_sharded_writer(other, "events", "b", ttl=TTL) as second:
                await until_balanced(first, second)
                psql(
                    database_url,
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()",
                )
                with trio.fail_after(PATIENCE):
                    for key in map(key_in, range(SLOTS)):
                        at = first if first.owner(key) == first.owner(key_in(0)) else second
                        while True:
                            try:
                                async with at.owning(key, wait=PATIENCE) as connection:
                                    await write_row(connection, key, at.instance, at.term(key))
                                break
                            except NotOwner:
                                at = second if at is first else first
                            except DatabaseUnavailable:
                                await trio.sleep(0.01)
                await until_balanced(first, second)
                assert first.statistics().expelled + second.statistics().expelled == 0


async def test_ids_are_reserved_in_the_transaction_that_owns_the_key(db: Database) -> None:
    await db.execute("CREATE TABLE facts (id bigserial PRIMARY KEY, key text)")
    await Registry(db).add("facts", "facts", "id", method=Method.RESERVATION)
    await admin.enable(db, "facts", 4)
    async with open_sharded_writer(db, "facts", "a") as writer:
        async with writer.owning("room") as connection:
            number = await next_id(connection, "facts")
            await connection.execute("INSERT INTO facts VALUES ($1, 'room')", number)
    assert await db.fetch_value("SELECT key FROM facts WHERE id = $1", number) == "room"


async def test_a_slot_into_which_a_zombie_writes_is_shown_and_taken_when_it_is_free(db: Database) -> None:
    (old,) = await take_over(db, "zombie", 3)
    async with db.connection() as connection, connection.transaction():
        await pass_fence(connection, key_in(3), "zombie", old)
        await connection.execute("SELECT set_config('idle_in_transaction_session_timeout', '0', true)")
        beats = [row["beat"] for row in await db.fetch("SELECT beat FROM replicad.writer_member")]
        await db.execute("SELECT replicad.writer_expel('events', $1::bigint[])", beats)
        async with open_sharded_writer(db, "events", "a", ttl=TTL) as writer:
            assert writer.statistics().owned == SLOTS - 1
            found = await admin.show(db, "events")
            assert (found.unowned, [stuck.slots for stuck in found.stuck]) == (1, [(3,)])
            assert found.stuck[0].pid is not None
            with pytest.raises(NotOwner, match="changes hands"):
                async with writer.owning(key_in(3), wait=0.3):
                    pass
            await connection.execute("ROLLBACK")
            await connection.execute("BEGIN")
            async with writer.owning(key_in(3), wait=PATIENCE) as own:
                await write_row(own, key_in(3), "a", writer.term(key_in(3)))


async def test_a_prepared_transaction_keeps_its_slot_and_is_shown(db: Database) -> None:
    (term,) = await take_over(db, "a", 3)
    async with db.connection() as connection:
        await connection.execute("BEGIN")
        await pass_fence(connection, key_in(3), "a", term)
        await write_row(connection, key_in(3), "a", term)
        await connection.execute("PREPARE TRANSACTION 'sharded'")
    assert await take_over(db, "b", 3) == []
    found = await admin.show(db, "events")
    (stuck,) = [stuck for stuck in found.stuck if 3 in stuck.slots]
    assert (stuck.held, stuck.pid) == (True, None)
    await db.execute("COMMIT PREPARED 'sharded'")
    assert len(await take_over(db, "c", 3)) == 1
    assert await check_rows(db) == 1


async def test_sharing_is_switched_on_once_and_refused_with_the_remedy(db: Database) -> None:
    assert not await admin.enable(db, "events", SLOTS)
    with pytest.raises(StreamRefused, match="share 16 slots already"):
        await admin.enable(db, "events", 32)
    async with open_sharded_writer(db, "events", "a", ttl=TTL) as writer:
        await admin.disable(db, "events")
        with pytest.raises(StreamRefused, match="sharding enable events"):
            async with writer.owning("k"):
                pass
        await admin.enable(db, "events", 32)
        with trio.fail_after(PATIENCE):
            while writer.statistics().owned != 32:
                await trio.sleep(0.01)
        await schema.uninstall(db, "sharding")
        await admin.enable(db, "events", 32)  # terms begin anew
        with trio.fail_after(PATIENCE):
            while writer.statistics().joined < 3 or writer.statistics().owned != 32:
                await trio.sleep(0.01)
    with pytest.raises(StreamRefused, match="cannot be the name"):
        await db.execute("SELECT replicad.writer_join('events', 'a b', '1 s')")
    await schema.uninstall(db, "sharding")
    with pytest.raises(SchemaMissing, match="sharding enable events"):
        async with open_sharded_writer(db, "events", "a"):
            pass


async def test_a_role_of_no_rights_may_write_and_not_change_who_shares(db: Database) -> None:
    await db.execute(
        "DROP ROLE IF EXISTS sharding_app; CREATE ROLE sharding_app; GRANT SELECT, INSERT ON events TO sharding_app;"
        "GRANT USAGE ON SEQUENCE events_id_seq TO sharding_app"
    )
    try:
        async with db.connection() as connection:
            await connection.execute("SET ROLE sharding_app")
            term = await connection.fetch_value("SELECT term FROM replicad.writer_join('events', 'app', '5 s')")
            rows = await connection.fetch(
                "SELECT t.term FROM replicad.writer_slot s, "
                "replicad.writer_take('events', 'app', $1, ARRAY[s.slot], ARRAY[s.term]) t WHERE s.slot = 3",
                term,
            )
            async with connection.transaction():
                await pass_fence(connection, key_in(3), "app", rows[0]["term"])
                await write_row(connection, key_in(3), "app", rows[0]["term"])
            forbidden = ("UPDATE replicad.writer_slot SET owner = 'x'", "SELECT replicad.writer_disable('events')")
            for statement in forbidden:
                with pytest.raises(DatabaseError, match="permission denied"):
                    await connection.execute(statement)
            await connection.execute("RESET ROLE")
    finally:
        await db.execute("DROP OWNED BY sharding_app; DROP ROLE sharding_app")


async def test_who_may_not_write_the_stream_can_neither_join_nor_expel_its_writers(db: Database) -> None:
    """Each function that changes members or slots asks for a right on this stream; another stream's is not enough."""
    term = await db.fetch_value("SELECT term FROM replicad.writer_join('events', 'a', '1 h')")
    beats = [row["beat"] for row in await db.fetch("SELECT beat FROM replicad.writer_member")]
    await db.execute(
        "DROP ROLE IF EXISTS sharding_other; CREATE ROLE sharding_other;"
        "CREATE TABLE others (id bigserial PRIMARY KEY);"
        "GRANT INSERT, SELECT ON others TO sharding_other; GRANT USAGE ON SEQUENCE others_id_seq TO sharding_other;"
        "GRANT SELECT ON events TO sharding_other"
    )
    await Registry(db).add("others", "others", "id")
    await admin.enable(db, "others", SLOTS)
    calls = [
        "writer_join('events', 'b', '1 s')",
        f"writer_beat('events', 'a', {term})",
        f"writer_take('events', 'a', {term}, '{{1}}', '{{1}}', '1 h')",
        "writer_give('events', 'a', '{1}', '{1}', '{b}', '1 h')",
        f"writer_expel('events', '{{{beats[0]}}}')",
        f"writer_retire('events', 'a', {term})",
        f"writer_leave('events', 'a', {term})",
    ]
    definers = await db.fetch("SELECT proname FROM pg_proc WHERE prosecdef AND proname ~ '^writer_'")
    assert {row["proname"] for row in definers} == {call.partition("(")[0] for call in calls} | {"writer_owns"}
    try:
        async with db.connection() as connection:
            await connection.execute("SET ROLE sharding_other")
            await connection.execute("SELECT replicad.writer_join('others', 'mine', '5 s')")
            for call in calls:
                with pytest.raises(DatabaseError, match=r"GRANT INSERT ON public\.events TO sharding_other") as refused:
                    await connection.execute(f"SELECT replicad.{call}")
                assert refused.value.sqlstate == "42501"
            await connection.execute("RESET ROLE")
            await connection.execute("GRANT USAGE ON SEQUENCE events_id_seq TO sharding_other; SET ROLE sharding_other")
            await connection.execute(
                f"SELECT replicad.writer_beat('events', 'a', {term})"
            )  # writes by others' functions
            await connection.execute("RESET ROLE")
        assert [
            row["instance"] for row in await db.fetch("SELECT instance FROM replicad.writer_member ORDER BY 1")
        ] == [
            "a",
            "mine",
        ]
    finally:
        await db.execute("DROP OWNED BY sharding_other; DROP ROLE sharding_other")


async def test_sql_and_python_agree_on_slots(db: Database) -> None:
    @given(
        st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=10, max_size=50)
    )
    @settings(max_examples=30)
    def gather(keys: list[str]) -> None:
        found.extend(keys)

    found: list[str] = []
    await trio.to_thread.run_sync(gather)
    for slots in (1, 7, 256, 4096):
        rows = await db.fetch("SELECT replicad.writer_slot_of(k, $2) AS slot FROM unnest($1::text[]) k", found, slots)
        assert [row["slot"] for row in rows] == [slot_of(key, slots) for key in found]
    assert len(found) >= 100


async def test_every_use_of_a_connection_ends_with_the_writer(db: Database) -> None:
    async with open_sharded_writer(db, "events", "a") as writer:
        async with writer.owning("k") as connection:
            assert isinstance(connection, Connection)
    assert await db.fetch_value("SELECT count(*) FROM replicad.writer_member") == 0
    held = (
        "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
        "WHERE datname = current_database() AND locktype = 'advisory' AND classid = 1380992591"
    )
    assert await db.fetch_value(held) == 0
    with pytest.raises(NotOwner):
        async with writer.owning("k", wait=PATIENCE):
            pass
