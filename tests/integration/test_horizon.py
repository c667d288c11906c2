"""Positions read from a real Postgres, writer by writer and statement by statement.

The interleavings that would need a long race are made on purpose: writers are connections that the test moves, and
`Between` runs something of the test's choice between two statements of a poll.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
import trio

from replicad.errors import StreamRefused
from replicad.positions import horizon
from replicad.positions.horizon import (
    Fork,
    HolderKind,
    Horizon,
    LockSource,
    Reading,
    ReservationSource,
    TableSource,
    reservation_key,
)
from replicad.postgres.bridge import Connection, Database, load_sql, open_database
from tests.conftest import PATIENCE

pytestmark = pytest.mark.postgres

LAST_VALUES = load_sql("horizon_last_values")
HOLDERS = (
    load_sql("horizon_holders").replace("{moved}", "'{}'::oid[]").replace("{key}", "NULL::bytea")
)  # no names, no secret


class Between:
    """Stands in for a Database; awaits `then` once, after the poll's next statement that `when` names (any: None)."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.when: str | None = None
        self.then: Callable[[], Awaitable[object]] | None = None
        self.target = db.target
        self.fence = db.fence

    @asynccontextmanager
    async def connection(self, *, leader: bool = False) -> AsyncIterator[BetweenConnection]:
        async with self._db.connection(leader=leader) as connection:
            yield BetweenConnection(connection, self)


class BetweenConnection:
    def __init__(self, connection: Connection, between: Between) -> None:
        self._connection = connection
        self._between = between

    async def fetch(self, sql: str, *args: object) -> Any:
        rows = await self._connection.fetch(sql, *args)
        between = self._between
        if between.then is not None and between.when in (None, sql):
            then, between.then = between.then, None
            await then()
        return rows

    async def together(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return await work()  # `then` may wait for other connections

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Table:
    """A table `t` fed by a sequence, watched under the name `t`, and a reader that checks what it is told."""

    def __init__(self, db: Database, horizon: Horizon, between: Between, own: list[Database] | None = None) -> None:
        self.db, self.horizon, self.between = db, horizon, between
        self.own = [] if own is None else own  # pools whose sessions only delete
        self.table = self.sequence = 0
        self.position: int | None = None
        self.rows: list[int] = []

    async def make(self, sql: str = "CREATE TABLE t (id bigserial PRIMARY KEY, v text)", **watch: Any) -> None:
        await self.db.execute(sql)
        self.table = await self.db.fetch_value("SELECT 't'::regclass::oid")
        self.sequence = await self.db.fetch_value("SELECT pg_get_serial_sequence('t', 'id')::regclass::oid")
        self.horizon.watch("t", LockSource(self.table, self.sequence, has_sequence=True), **watch)
        self.position = watch.get("published")

    async def poll(self) -> Reading:
        """Poll, read the rows up to the new position, and see that none of them had turned up below the old one."""
        reading = (await self.horizon.poll())["t"]
        if reading.position is not None:
            found = await self.db.fetch("SELECT id FROM t WHERE id <= $1 ORDER BY id", reading.position)
            late = [r["id"] for r in found if r["id"] <= (self.position or 0) and r["id"] not in self.rows]
            assert not late, f"{late} turned up at or below {self.position}"
            self.rows = [r["id"] for r in found]
        self.position = reading.position
        return reading

    @asynccontextmanager
    async def writer(
        self, sql: str = "INSERT INTO t DEFAULT VALUES", name: str = "somebody"
    ) -> AsyncIterator[Connection]:
        """A connection with an open transaction that has run `sql`."""
        async with self.db.connection() as connection:
            await connection.execute("SELECT set_config('application_name', $1, false)", name)
            await connection.execute("BEGIN")
            await connection.execute(sql)
            yield connection

    async def insert(self) -> int:
        return int(await self.db.fetch_value("INSERT INTO t DEFAULT VALUES RETURNING id"))


@pytest.fixture(params=["few", "many"])
async def t(
    database: Database, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Table]:
    """Each test holds for a poll that reads all sequences, and for one that reads those that have moved."""
    if request.param == "many":
        monkeypatch.setattr(horizon, "FEW", 0)
    between = Between(database)
    # A clock on which every forced flush is due at once, so that no position waits for the next poll.
    own: list[Database] = []
    backends = lambda: [backend for db in own for backend in db.backends()]  # noqa: E731
    clock = count(0, 0.1).__next__
    async with Horizon(between, now=clock, own_backends=backends) as watching:  # type: ignore[arg-type]
        yield Table(database, watching, between, own)


async def test_position_passes_over_rollbacks_and_gaps(t: Table) -> None:
    await t.make()
    assert (await t.poll()).position == 0
    await t.insert()
    async with t.writer() as writer:
        await writer.execute("ROLLBACK")
    assert (await t.poll()).position == 2
    await t.insert()
    assert (await t.poll()).position == 3
    assert t.rows == [1, 3]


async def test_open_transaction_holds_the_position_and_is_named(t: Table) -> None:
    await t.make()
    await t.poll()
    async with t.writer(name="slow coach") as writer:
        assert await t.insert() == 2
        reading = await t.poll()
        assert (reading.position, reading.last_value) == (0, 2)
        held = reading.held_by
        assert held is not None
        assert (held.kind, held.application_name) == (HolderKind.TRANSACTION, "slow coach")
        assert held.pid == await writer.fetch_value("SELECT pg_backend_pid()")
        assert held.age_s is not None
        assert held.age_s >= 0
        await writer.execute("COMMIT")
    reading = await t.poll()
    assert (reading.position, reading.held_by) == (2, None)


async def test_killed_backend_holds_nothing_back(t: Table) -> None:
    await t.make()
    await t.poll()
    async with t.writer() as writer:
        await t.insert()
        assert (await t.poll()).position == 0
        await t.db.execute("SELECT pg_terminate_backend($1, 5000)", await writer.fetch_value("SELECT pg_backend_pid()"))
        assert (await t.poll()).position == 2


async def test_writer_that_comes_between_the_statements_of_a_poll_is_not_overtaken(t: Table) -> None:
    await t.make()
    await t.poll()
    async with t.db.connection() as writer:

        async def come_between() -> None:
            await writer.execute("BEGIN")
            await writer.execute("INSERT INTO t DEFAULT VALUES")
            await t.insert()

        for _ in range(3):  # so that the last statement before is one of every kind
            await t.insert()
            t.between.then = come_between
            await t.poll()
            await t.poll()
            await writer.execute("COMMIT")
            await t.poll()
    assert t.rows == list(range(1, 10))


async def test_read_of_the_sequence_never_sees_a_value_that_nextval_is_only_preparing(t: Table) -> None:
    await t.make()
    await t.db.execute("""
        CREATE FUNCTION went_back(reads integer) RETURNS integer LANGUAGE plpgsql AS $$
        DECLARE r record; highest bigint := 0; back integer := 0;
        BEGIN
            FOR i IN 1 .. reads LOOP
                EXECUTE 'EXECUTE poll' INTO r;
                IF r.last_value < highest THEN back := back + 1; END IF;
                highest := greatest(highest, r.last_value);
            END LOOP;
            RETURN back;
        END $$
    """)
    async with (
        t.db.connection() as reader,
        t.db.connection() as one,
        t.db.connection() as other,
        trio.open_nursery() as n,
    ):
        await reader.execute(f"PREPARE poll AS {LAST_VALUES.replace('$1', f'ARRAY[{t.sequence}]')}")
        load = "SELECT count(nextval('t_id_seq')) FROM (SELECT generate_series(1, 2000000000)) AS n"
        n.start_soon(one.execute, load)
        n.start_soon(other.execute, load)
        assert await reader.fetch_value("SELECT went_back(120000)") == 0
        assert await reader.fetch_value("SELECT pg_sequence_last_value('t_id_seq')") > 100_000  # they were at it
        n.cancel_scope.cancel()


async def test_at_the_first_poll_older_transactions_keep_everything_unpublished(t: Table) -> None:
    await t.make()
    async with t.writer() as writer:
        await t.insert()
        assert (await t.poll()).position is None
        await t.insert()
        assert (await t.poll()).position is None
        await writer.execute("COMMIT")
    assert (await t.poll()).position == 3


async def test_at_the_first_poll_older_transactions_are_bounded_by_what_was_published(t: Table) -> None:
    await t.make(published=0)
    async with t.writer() as writer:
        await t.insert()
        assert (await t.poll()).position == 0
        async with t.writer() as newer:
            assert (await t.poll()).position == 0
            await writer.execute("COMMIT")
            assert (await t.poll()).position == 2
            await newer.execute("COMMIT")
    assert (await t.poll()).position == 3


async def test_prepared_transaction_keeps_the_bound_that_it_had_before(t: Table) -> None:
    await t.make()
    await t.poll()
    async with t.writer() as writer:
        await t.poll()
        await t.insert()
        await t.poll()
        await writer.execute("PREPARE TRANSACTION 'forgotten'")
    reading = await t.poll()
    assert reading.position == 0
    assert reading.held_by is not None
    assert (reading.held_by.kind, reading.held_by.gid) == (HolderKind.PREPARED, "forgotten")
    await t.db.execute("COMMIT PREPARED 'forgotten'")
    assert (await t.poll()).position == 2
    assert t.rows == [1, 2]


async def test_transaction_begun_and_prepared_between_two_polls_is_not_overtaken(t: Table) -> None:
    await t.make()
    await t.poll()
    async with t.writer() as writer:
        await writer.execute("PREPARE TRANSACTION 'quick'")
    await t.insert()
    assert (await t.poll()).position == 0
    await t.db.execute("ROLLBACK PREPARED 'quick'")
    assert (await t.poll()).position == 2


async def test_stuck_holders_raise_an_alarm_that_names_them(database: Database) -> None:
    now = 100.0
    async with Horizon(database, now=lambda: now, stuck_after=60) as horizon:
        t = Table(database, horizon, Between(database))
        await t.make()
        await t.poll()
        async with t.writer(name="slow coach") as writer:
            assert (await t.poll()).alarms == ()
            now += 61
            [alarm] = (await t.poll()).alarms
            assert "slow coach" in alarm
            await writer.execute("PREPARE TRANSACTION 'orphan'")
        [alarm] = (await t.poll()).alarms
        assert "COMMIT PREPARED" in alarm
        assert "'orphan'" in alarm
        await t.db.execute("ROLLBACK PREPARED 'orphan'")
        assert (await t.poll()).alarms == ()


async def test_writers_of_partitions_count_however_deep_and_however_new(t: Table) -> None:
    await t.make("""
        CREATE TABLE t (id bigserial, k integer) PARTITION BY LIST (k);
        CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1);
        CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2, 3) PARTITION BY LIST (k);
        CREATE TABLE t3 PARTITION OF t2 FOR VALUES IN (3)
    """)
    await t.poll()

    async def attach() -> None:
        await t.db.execute("CREATE TABLE t4 PARTITION OF t FOR VALUES IN (4)")

    for k, leaf in ((1, "t1"), (3, "t3"), (4, "t4")):
        if k == 4:
            await t.db.execute("INSERT INTO t (k) VALUES (1)")
            t.between.when, t.between.then = LAST_VALUES, attach
            await t.poll()
        async with t.writer(f"INSERT INTO {leaf} (k, id) VALUES ({k}, nextval('t_id_seq'))") as writer:
            await t.db.execute("INSERT INTO t (k) VALUES (1)")
            held = (await t.poll()).held_by
            assert held is not None
            await writer.execute("COMMIT")
        reading = await t.poll()
        assert reading.position == reading.last_value
    assert t.rows == list(range(1, 8))


async def test_writers_of_inheritance_children_count(t: Table) -> None:
    await t.make(
        "CREATE TABLE t (id bigserial); CREATE TABLE child () INHERITS (t); CREATE TABLE grandchild () INHERITS (child)"
    )
    await t.poll()
    async with t.writer("INSERT INTO grandchild DEFAULT VALUES") as writer:
        await t.insert()
        assert (await t.poll()).position == 0
        await writer.execute("COMMIT")
    assert (await t.poll()).position == 2


async def test_our_own_deletes_hold_nothing_back_and_only_they(t: Table, database_url: str) -> None:
    await t.make()
    await t.insert()
    await t.poll()
    t.horizon.watch("t", LockSource(t.table, t.sequence, own_deletes=True), published=1)
    async with open_database(database_url, size=1, application_name="any name", identify=True) as own:
        t.own.append(own)
        async with own.connection() as connection:
            await connection.execute("BEGIN; DELETE FROM t")
            await t.insert()
            assert (await t.poll()).position == 2
        async with t.writer("DELETE FROM t", name="replicad ack"):
            await t.insert()
            assert (await t.poll()).position == 2


TAKEN_BEFORE = {
    "by a statement before the INSERT": ("SELECT nextval('t_id_seq')", "INSERT INTO t (id) VALUES (2)"),
    "in a savepoint that was rolled back": (
        "SAVEPOINT s; INSERT INTO t DEFAULT VALUES; ROLLBACK TO SAVEPOINT s",
        "INSERT INTO t (id) VALUES (2)",
    ),
    "for a table that becomes a child": (
        "CREATE TABLE child (LIKE t INCLUDING ALL); INSERT INTO child DEFAULT VALUES",
        "ALTER TABLE child INHERIT t",
    ),
    "by a cursor that is read later": (
        "DECLARE ids CURSOR FOR SELECT nextval('t_id_seq'); FETCH ids",
        "INSERT INTO t (id) VALUES (2)",
    ),
}


@pytest.mark.parametrize(("before", "after"), TAKEN_BEFORE.values(), ids=TAKEN_BEFORE)
@pytest.mark.parametrize("prepared", [False, True])
async def test_an_id_that_a_transaction_took_before_it_inserts_holds_the_position(
    t: Table, before: str, after: str, prepared: bool
) -> None:
    await t.make("CREATE TABLE t (id bigserial, v text)")
    await t.insert()
    await t.poll()
    async with t.writer(before) as writer:
        assert await t.insert() == 3
        assert (await t.poll()).position == 1
        await writer.execute(after)
        assert await t.insert() == 4
        assert (await t.poll()).position == 1
        await writer.execute("PREPARE TRANSACTION 'held'" if prepared else "COMMIT")
    if prepared:
        assert (await t.poll()).position == 1
        await t.db.execute("COMMIT PREPARED 'held'")
    assert (await t.poll()).position == 4
    assert t.rows == [1, 2, 3, 4]


async def test_lock_taken_before_an_explicit_nextval_holds_the_position(t: Table) -> None:
    await t.make()
    await t.poll()
    async with t.writer("LOCK TABLE t IN SHARE ROW EXCLUSIVE MODE; SELECT nextval('t_id_seq')") as writer:
        await t.db.execute("SELECT nextval('t_id_seq')")
        assert (await t.poll()).position == 0
        await writer.execute("COMMIT")
    assert (await t.poll()).position == 2


async def test_vacuum_and_readers_hold_nothing_back(t: Table) -> None:
    await t.make()
    await t.insert()
    async with t.writer("SELECT count(*) FROM t"), t.writer("LOCK TABLE t IN SHARE UPDATE EXCLUSIVE MODE"):
        assert (await t.poll()).position == 1


async def test_savepoint_that_is_rolled_back_and_written_again_is_not_overtaken(t: Table) -> None:
    await t.make()
    await t.poll()
    async with t.writer("SAVEPOINT s; INSERT INTO t DEFAULT VALUES; ROLLBACK TO s") as writer:
        await t.insert()
        assert (await t.poll()).position == 0, "the transaction may still insert a row with the id that it has taken"
        await writer.execute("INSERT INTO t DEFAULT VALUES")
        await t.insert()
        assert (await t.poll()).position == 0
        await writer.execute("COMMIT")
    assert (await t.poll()).position == 4


async def test_known_writer_holds_back_itself_only(t: Table) -> None:
    await t.make(writers=("A", "B"))
    await t.poll()
    async with t.writer(name="A") as writer:
        await t.insert()
        reading = await t.poll()
        assert (reading.position, dict(reading.per_writer), reading.maximum) == (0, {"A": 0, "B": 2}, 2)
        async with t.writer(name="psql"):
            await t.insert()
            assert dict((await t.poll()).per_writer) == {"A": 0, "B": 2}
        await writer.execute("COMMIT")
    reading = await t.poll()
    assert (reading.position, dict(reading.per_writer)) == (4, {"A": 4, "B": 4})


@pytest.mark.parametrize(
    "how", ["SELECT setval('t_id_seq', 2)", "TRUNCATE t RESTART IDENTITY", "ALTER SEQUENCE t_id_seq RESTART"]
)
async def test_sequence_set_back_leaves_no_position_until_the_watch_begins_anew(t: Table, how: str) -> None:
    await t.make()
    for _ in range(5):
        await t.insert()
    assert (await t.poll()).position == 5
    await t.db.execute(f"DELETE FROM t; {how}")
    for _ in range(7):
        await t.insert()
        fork = (await t.poll()).fork
        assert fork is not None
        assert (fork.reason, (await t.poll()).position) == ("ids_went_back", None)


@pytest.mark.parametrize("climb", [0, 3, 20])
async def test_a_sequence_that_was_restarted_is_seen_however_far_it_has_climbed_since(t: Table, climb: int) -> None:
    await t.make()
    for _ in range(5):
        await t.insert()
    file = await t.db.fetch_value("SELECT pg_relation_filenode('t_id_seq')::bigint")
    t.horizon.watch("t", LockSource(t.table, t.sequence), published=5, file=file)
    assert (await t.poll()).position == 5
    await t.db.execute(
        f"BEGIN; TRUNCATE t RESTART IDENTITY; INSERT INTO t SELECT FROM generate_series(1, {climb}); COMMIT"
    )
    reading = await t.poll()
    assert reading.fork is not None
    assert (reading.fork.reason, reading.position) in {("sequence_changed", None), ("ids_went_back", None)}
    assert (await t.poll()).fork == reading.fork
    t.rows = []
    t.horizon.watch("t", LockSource(t.table, t.sequence), published=0)
    assert (await t.poll()).position == climb


@pytest.mark.parametrize("how", ["SELECT setval('t_id_seq', 100, false)", "ALTER SEQUENCE t_id_seq RESTART WITH 100"])
async def test_sequence_set_forward_without_a_use_is_no_reset(t: Table, how: str) -> None:
    await t.make()
    await t.insert()
    assert (await t.poll()).position == 1
    await t.db.execute(how)
    reading = await t.poll()
    assert (reading.fork, reading.position) == (None, 99)
    assert await t.insert() == 100
    assert (await t.poll()).position == 100


async def test_fresh_sequence_with_a_high_start_begins_just_below_it(t: Table) -> None:
    await t.make(
        "CREATE SEQUENCE s START 1000 INCREMENT 10; CREATE TABLE t (id bigint DEFAULT nextval('s')); "
        "ALTER SEQUENCE s OWNED BY t.id"
    )
    assert (await t.poll()).position == 999
    assert await t.insert() == 1000
    assert (await t.poll()).position == 1000


@pytest.mark.parametrize(
    ("how", "remedy"),
    [
        ("ALTER SEQUENCE t_id_seq CACHE 10", "ALTER SEQUENCE public.t_id_seq CACHE 1"),
        ("ALTER SEQUENCE t_id_seq INCREMENT -1 MINVALUE -100", "INCREMENT BY 1"),
        ("ALTER SEQUENCE t_id_seq CYCLE", "NO CYCLE"),
        ("ALTER TABLE t SET UNLOGGED", "SET LOGGED"),
        ("ALTER TABLE t ALTER id DROP DEFAULT; DROP SEQUENCE t_id_seq", 'sequence of stream "t" was dropped'),
        ("DROP TABLE t", 'table of stream "t" was dropped'),
    ],
)
async def test_unfit_stream_is_refused_with_a_remedy_and_the_others_go_on(t: Table, how: str, remedy: str) -> None:
    await t.db.execute("CREATE TABLE u (id bigserial)")
    table, sequence = await t.db.fetch_row("SELECT 'u'::regclass::oid, 'u_id_seq'::regclass::oid") or (0, 0)
    t.horizon.watch("u", LockSource(table, sequence))
    await t.make()
    await t.insert()
    assert (await t.poll()).position == 1
    await t.db.execute(how)
    await t.db.execute("INSERT INTO u DEFAULT VALUES")
    t.horizon.watch("u", LockSource(table, sequence))  # what changed is looked at when a watch begins, else every 5 s
    readings = await t.horizon.poll()
    assert isinstance(readings["t"].refused, StreamRefused)
    assert remedy in str(readings["t"].refused)
    assert readings["t"].position == 1
    assert readings["u"].position == 1


async def test_sequence_that_gets_a_cache_in_mid_poll_publishes_nothing_more(t: Table) -> None:
    await t.make()
    await t.insert()
    assert (await t.poll()).position == 1
    async with t.db.connection() as session:

        async def cache_and_use() -> None:
            await t.db.execute("ALTER SEQUENCE t_id_seq CACHE 10")

        await t.insert()
        t.between.when, t.between.then = LAST_VALUES, cache_and_use
        assert (await t.poll()).refused is not None
        await session.execute("INSERT INTO t DEFAULT VALUES")
        await t.poll()
        await session.execute("INSERT INTO t DEFAULT VALUES")
        reading = await t.poll()
        assert reading.refused is not None
        assert reading.position == 1
    await t.db.execute("ALTER SEQUENCE t_id_seq CACHE 1")
    t.horizon.watch("t", LockSource(t.table, t.sequence), published=1)
    reading = await t.poll()
    assert (reading.refused, reading.position) == (None, reading.last_value)


async def test_locked_sequence_stops_its_own_stream_only_and_the_culprit_is_named(t: Table) -> None:
    await t.db.execute("CREATE TABLE u (id bigserial)")
    table, sequence = await t.db.fetch_row("SELECT 'u'::regclass::oid, 'u_id_seq'::regclass::oid") or (0, 0)
    t.horizon.watch("u", LockSource(table, sequence))
    await t.make()
    await t.insert()
    await t.poll()
    async with t.writer("TRUNCATE t RESTART IDENTITY", name="cleaner") as cleaner:
        for n in (1, 2):
            await t.db.execute("INSERT INTO u DEFAULT VALUES")
            with trio.fail_after(PATIENCE):
                readings = await t.horizon.poll()
            assert readings["u"].position == n
            held = readings["t"].held_by
            assert held is not None
            assert (held.kind, held.application_name) == (HolderKind.SEQUENCE_LOCK, "cleaner")
            assert readings["t"].position == 1
        await cleaner.execute("ROLLBACK")
    with trio.fail_after(PATIENCE):
        while (await t.poll()).held_by is not None:
            await trio.sleep(0.01)
    await t.insert()
    assert (await t.poll()).position == 2


async def test_watches_may_begin_and_end_while_a_poll_waits_for_postgres(t: Table) -> None:
    await t.make()
    await t.db.execute("CREATE UNLOGGED TABLE u (id bigserial)")
    table, sequence = await t.db.fetch_row("SELECT 'u'::regclass::oid, 'u_id_seq'::regclass::oid") or (0, 0)
    for statement in (load_sql("horizon_inspect"), LAST_VALUES, HOLDERS):

        async def change() -> None:
            t.horizon.unwatch("t")
            t.horizon.watch("u", LockSource(table, sequence))
            t.horizon.watch("p", TableSource(table, "x"))

        t.horizon.watch("t", LockSource(t.table, t.sequence))
        t.between.when, t.between.then = statement, change
        assert not await t.horizon.poll()
        readings = await t.horizon.poll()
        assert set(readings) == {"u", "p"}
        assert "SET LOGGED" in str(readings["u"].refused)
        t.horizon.unwatch("u")
        t.horizon.unwatch("p")


async def test_idle_poll_costs_one_statement_a_busy_one_two_and_one_with_a_new_holder_three(t: Table) -> None:
    await t.make()
    await t.insert()
    await t.poll()

    async def cost() -> int:
        before = t.db.statistics().statements
        await t.horizon.poll()
        return t.db.statistics().statements - before

    assert await cost() == 1
    await t.insert()
    assert await cost() == 2
    assert await cost() == 1
    async with t.writer():
        assert await cost() == 3
        assert await cost() == 2


async def test_a_transaction_that_ends_while_a_poll_is_made_holds_nothing_back(t: Table) -> None:
    await t.make()
    await t.insert()
    await t.poll()
    async with t.writer() as short, t.writer("SELECT 1") as later:

        async def end_one_and_begin_another() -> None:
            await short.execute("COMMIT")
            await later.execute("INSERT INTO t DEFAULT VALUES")

        await t.insert()
        t.between.when, t.between.then = HOLDERS, end_one_and_begin_another
        reading = await t.poll()
        assert (reading.position, t.rows) == (3, [1, 2, 3])
        assert reading.held_by is None
        await t.insert()
        reading = await t.poll()
        assert reading.position == 3
        assert reading.held_by is not None
        await later.execute("COMMIT")
        assert (await t.poll()).position == 5


async def test_ordinary_role_can_poll_a_table_that_is_not_its_own(database_url: str, database: Database) -> None:
    await database.execute("CREATE TABLE t (id bigserial)")
    await database.execute("DROP ROLE IF EXISTS reader_role; CREATE ROLE reader_role LOGIN PASSWORD 'x'")
    table, sequence = await database.fetch_row("SELECT 't'::regclass::oid, 't_id_seq'::regclass::oid") or (0, 0)
    async with (
        open_database(database_url.replace("postgres@", "reader_role@", 1), size=2, application_name="replicad") as db,
        Horizon(db) as horizon,
    ):
        horizon.watch("t", LockSource(table, sequence))
        refused = (await horizon.poll())["t"].refused
        assert "GRANT SELECT ON public.t" in str(refused)
        await database.execute("GRANT SELECT (id) ON t TO reader_role")
        horizon.watch("t", LockSource(table, sequence))
        refused = (await horizon.poll())["t"].refused
        assert "GRANT SELECT ON SEQUENCE public.t_id_seq" in str(refused)
        await database.execute("GRANT SELECT ON SEQUENCE t_id_seq TO reader_role")
        horizon.watch("t", LockSource(table, sequence))
        assert (await horizon.poll())["t"].position == 0
        async with database.connection() as writer:
            await writer.execute("BEGIN; INSERT INTO t DEFAULT VALUES")
            await database.execute("INSERT INTO t DEFAULT VALUES")
            reading = (await horizon.poll())["t"]
            assert reading.position == 0
            assert reading.held_by is not None
            assert reading.held_by.application_name == "replicad test"
    await database.execute("DROP OWNED BY reader_role; DROP ROLE reader_role")


# --- the other two methods -------------------------------------------------------------------------


async def test_reservation_locks_hold_the_position_at_their_lowest_bound(t: Table) -> None:
    await t.make()
    t.horizon.watch("r", ReservationSource(7, t.sequence, table=t.table), writers=("A", "B"))
    await t.poll()
    await t.db.execute("SELECT setval('t_id_seq', 40)")
    async with t.writer(f"SELECT pg_advisory_xact_lock_shared({reservation_key(7, 40)})", name="A") as writer:
        async with t.db.connection() as session:
            await session.execute("SET application_name = 'B'")
            await session.execute(f"SELECT pg_advisory_lock_shared({reservation_key(7, 41)}), setval('t_id_seq', 45)")
            await session.execute("SELECT 1")  # the session's lock outlives transactions, and its virtual ids
            for _ in range(2):
                reading = (await t.horizon.poll())["r"]
                assert (reading.position, dict(reading.per_writer)) == (40, {"A": 40, "B": 41})
                assert reading.held_by is not None
                assert (reading.held_by.kind, reading.held_by.bound) == (HolderKind.RESERVATION, 40)
            await writer.execute("PREPARE TRANSACTION 'res'")
            assert (await t.horizon.poll())["r"].position == 40
            await t.db.execute("COMMIT PREPARED 'res'")
            assert (await t.horizon.poll())["r"].position == 41
    assert (await t.horizon.poll())["r"].position == 45


async def test_advisory_locks_that_are_not_reservations_of_this_stream_do_not_count(
    t: Table, postgres_url: str
) -> None:
    await t.make()
    t.horizon.watch("r", ReservationSource(7, t.sequence, table=t.table))
    await t.poll()
    await t.db.execute("SELECT setval('t_id_seq', 40)")
    key = reservation_key(7, 3)
    async with (
        t.writer(f"SELECT pg_advisory_xact_lock_shared({reservation_key(8, 3)})"),
        t.writer(f"SELECT pg_advisory_xact_lock({key})"),  # exclusive: not ours
        t.writer(f"SELECT pg_advisory_xact_lock_shared({key >> 32}, {key & 0xFFFFFFFF})"),  # the two-integer form
        open_database(postgres_url, size=1, application_name="other database") as elsewhere,
    ):
        await elsewhere.execute(f"SELECT pg_advisory_lock_shared({key})")
        assert (await t.horizon.poll())["r"].position == 40


async def test_reservation_beyond_the_sequence_is_an_alarm(t: Table) -> None:
    await t.make()
    t.horizon.watch("r", ReservationSource(7, t.sequence, table=t.table))
    async with t.writer(f"SELECT pg_advisory_xact_lock_shared({reservation_key(7, 1000)})", name="stranger"):
        assert (await t.horizon.poll())["r"].alarms == ()
        reading = (await t.horizon.poll())["r"]
        assert reading.position == 0
        assert "stranger" in reading.alarms[0]


@pytest.mark.parametrize(("number", "bound"), [(0, 1), (8192, 1), (1, -1), (1, 1 << 48)])
def test_reservation_key_refuses_what_it_cannot_carry(number: int, bound: int) -> None:
    with pytest.raises(ValueError, match="no reservation"):
        reservation_key(number, bound)


async def test_positions_that_writers_publish_themselves_are_trusted(t: Table) -> None:
    await t.db.execute('CREATE TABLE "Stream positions" (stream_name text, instance_name text, stream_id bigint)')
    table = await t.db.fetch_value("""SELECT '"Stream positions"'::regclass::oid""")
    t.horizon.watch("p", TableSource(table, "events"))
    assert (await t.horizon.poll())["p"].position is None
    await t.db.execute(
        """INSERT INTO "Stream positions" VALUES ('events', 'A', 5), ('events', 'B', 9), ('other', 'A', 1)"""
    )
    reading = (await t.horizon.poll())["p"]
    assert (reading.position, dict(reading.per_writer), reading.maximum) == (5, {"A": 5, "B": 9}, 9)
    assert reading.held_by is not None
    assert (reading.held_by.kind, reading.held_by.application_name) == (HolderKind.WRITER, "A")
    await t.db.execute('UPDATE "Stream positions" SET stream_id = 3')
    reading = (await t.horizon.poll())["p"]
    assert (reading.position, reading.fork) == (None, Fork("ids_went_back"))
    await t.db.execute('ALTER TABLE "Stream positions" DROP COLUMN stream_id')
    refused = (await t.horizon.poll())["p"].refused
    assert "stream_name, instance_name and stream_id" in str(refused)
